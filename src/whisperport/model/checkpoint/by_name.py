"""Find official weights by name: in openai-whisper's cache, in the hub's cache, on the network."""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from whisperport.errors import CheckpointError, MissingPackageError
from whisperport.model.checkpoint import hub
from whisperport.model.checkpoint.download import (
    RemoteFile,
    UnreachableError,
    check_digest,
    download,
)
from whisperport.model.checkpoint.names import HUB_IDS
from whisperport.model.checkpoint.openai_releases import ALIASES, RELEASES
from whisperport.system.locking import is_locked, lock_path
from whisperport.system.progress import begin_stage

log = logging.getLogger(__name__)

# openai-whisper downloads from here (`whisper/__init__.py`, `_MODELS`): SERVER/SHA256/NAME.pt
SERVER = "https://openaipublic.azureedge.net/main/whisper/models"


def openai_cache() -> Path:
    """Return the folder in which openai-whisper stores its files (`whisper.load_model`)."""
    default = Path("~/.cache").expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME", default)) / "whisper"


def locate(name: str, check: Callable[[Path], object]) -> Path:
    """Return the `.pt` file or the folder of a short name; download it if this machine does not have it.

    OpenAI's file is looked for before the hub's copy, because its digest is published. The hub is asked
    only if OpenAI's server cannot be reached or does not give it, never after a wrong digest.

    Args:
        name: a key of `HUB_IDS`.
        check: called with a folder of the hub before its weights are downloaded.

    Raises:
        CheckpointError: OpenAI's file has another digest, or the weights were not found.
        MissingPackageError: a package for downloads is not installed.
    """
    release = RELEASES.get(ALIASES.get(name, name))
    if release is None:  # not one of OpenAI's
        return hub.fetch(HUB_IDS[name], None, check)
    path = openai_cache() / f"{release.name}.pt"
    if os.path.lexists(path):
        # Removes the lock file of a download that was killed at its end; not in another user's cache.
        with suppress(OSError):
            is_locked(lock_path(path))
        begin_stage(f"checking the SHA-256 of {path}")
        check_digest(path, release.sha256)
        return path
    if folder := hub.cached(HUB_IDS[name]):
        return folder
    remote = RemoteFile(
        f"{SERVER}/{release.sha256}/{release.name}.pt", path, release.sha256, release.most_bytes
    )
    reasons: list[str] = []
    try:
        if hub.is_offline():
            raise UnreachableError("offline", why="HF_HUB_OFFLINE is set")
        return download(remote)
    except (UnreachableError, MissingPackageError) as error:
        reasons.append(f"{remote.url}: {error.why}")
    try:
        folder = hub.fetch(HUB_IDS[name], None, check)
    except (CheckpointError, MissingPackageError) as error:
        reasons.append(f"{HUB_IDS[name]} on the Hugging Face hub: {error.why}")
        raise _not_found(name, remote, reasons, error) from error
    log.warning("%s; the hub's copy is used: %s", reasons[0], HUB_IDS[name])
    return folder


def _not_found(
    name: str, remote: RemoteFile, reasons: list[str], error: CheckpointError | MissingPackageError
) -> CheckpointError | MissingPackageError:
    """Return the error that lists every place that was searched."""
    places = [
        f"there is no file or folder `{name}`",
        f"{remote.path} does not exist",
        f"{HUB_IDS[name]} is not in the hub's cache",
        *reasons,
    ]
    by_hand = (
        f"connect to the network, or bring the file by hand: download {remote.url} on another machine and "
        f"copy it to {remote.path}, or give its path"
    )
    packages = f"{error.hint}; or {by_hand}" if isinstance(error, MissingPackageError) else by_hand
    return type(error)(
        f"`{name}` was not found and cannot be downloaded", why="\n".join(places), hint=packages
    )
