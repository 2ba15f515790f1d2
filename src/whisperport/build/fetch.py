"""Fetch a checkpoint by its name, without loading it."""

from pathlib import Path

from whisperport.errors import CheckpointError, needs


def fetch(name: str) -> Path:
    """Find the weights of a name such as `tiny.en`, and download them if they are not on this machine.

    They are looked for in openai-whisper's cache (`~/.cache/whisper`, or `whisper` in `XDG_CACHE_HOME`), in
    the hub's cache, at OpenAI, and on the hub, which is asked if OpenAI cannot be reached. OpenAI's file is
    accepted only if it has its published SHA-256, also from the cache. It is stored in openai-whisper's
    cache, which both packages share. A download that was cut is continued.

    Args:
        name: a name such as `tiny.en` or `turbo`.

    Returns:
        OpenAI's `.pt` file, or the folder in the hub's cache.

    Raises:
        CheckpointError: the name is not known, the file has another SHA-256, it cannot be stored, or it is
            not here and cannot be downloaded.
        MissingPackageError: torch, or a package for downloads, is not installed.
    """
    with needs("cannot fetch a checkpoint: torch is not installed", extra="export"):
        from whisperport.model.checkpoint.by_name import locate
        from whisperport.model.checkpoint.huggingface import check_config_files
        from whisperport.model.checkpoint.names import HUB_IDS
    if name not in HUB_IDS:
        raise CheckpointError(
            f"`{name}` is not a known name",
            why=f"the known names are {', '.join(HUB_IDS)}",
            hint="a hub id or a path needs no fetch: give it to `whisperport export`",
        )
    return locate(name, check_config_files)
