"""Recognize small text files that a wrong download wrote in place of weights."""

from whisperport.errors import CheckpointError

PLACEHOLDER_BYTES = 64  # number of bytes at the start of a file that identify such a text


def reject_placeholder(head: bytes, what: str) -> None:
    """Reject a Git LFS pointer or a web page in place of a weight file.

    Args:
        head: the first `PLACEHOLDER_BYTES` of the file.
        what: what happened, for the error.

    Raises:
        CheckpointError: the file is one of them.
    """
    if head.startswith(b"version https://git-lfs"):
        raise CheckpointError(
            what,
            why="it is a Git LFS pointer, not the weights",
            hint="run `git lfs pull` in the folder",
        )
    if head.lstrip().lower().startswith((b"<!doctype", b"<html")):
        raise CheckpointError(
            what,
            why="it is a web page, such as an error or a login page, not the weights",
            hint="download the file again; on the hub, its address contains `/resolve/`, not `/blob/`",
        )
