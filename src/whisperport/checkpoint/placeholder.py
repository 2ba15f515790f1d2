"""Short texts that lie where weights should be, because a download went another way."""

from whisperport.errors import CheckpointError

PLACEHOLDER_BYTES = 64  # of a file's beginning, enough to know one by


def reject_placeholder(head: bytes, what: str) -> None:
    """Raises CheckpointError, saying `what`, where a file's first bytes are such a text's."""
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            what,
            why="it is a Git LFS pointer, not the weights",
            hint="run `git lfs pull` in the folder",
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(
            what,
            why="it is a web page, not the weights: an error, or a page to log in",
            hint="download the file itself; on the hub its address has `/resolve/`, not `/blob/`",
        )
