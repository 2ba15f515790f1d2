"""Download a checkpoint from the Hugging Face hub, or find it in the hub's local cache."""

from collections.abc import Callable
from pathlib import Path

from whisperport.errors import CheckpointError, needs
from whisperport.model.checkpoint.weight_files import find_weights
from whisperport.program.adapter_settings import WEIGHTS, is_adapter
from whisperport.program.untrusted import shorten

INSTALL = "pip install 'whisperport[export]', or give a folder or a .pt file"

_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "adapter_config.json",
]
# File patterns of the weights, in order of preference; the first that matches is downloaded. The patterns
# do not match gigabytes of copies in other precisions (`model.fp32-00001-of-00002.safetensors`).
_WEIGHTS = (
    ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"],
    ["model.fp16*.safetensors", "model.safetensors.index.fp16.json"],
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"],
)


def fetch(hub_id: str, revision: str | None, check: Callable[[Path], object]) -> Path:
    """Download a repository into the hub's cache.

    Args:
        hub_id: such as `openai/whisper-tiny`.
        revision: branch, tag or commit; None: the default branch.
        check: called with the folder before the weights are downloaded. It raises an error if the
            checkpoint is not supported.

    Returns:
        The folder in the cache, whose name is the commit.

    Raises:
        MissingPackageError: huggingface_hub is not installed.
        CheckpointError: the repository or revision does not exist, access is not permitted, or there is
            no network and no copy in the cache.
    """
    with needs(f"cannot download `{hub_id}`: huggingface_hub is not installed", hint=INSTALL):
        from huggingface_hub import snapshot_download

    def download(patterns: list[str]) -> Path:
        try:
            return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
        # huggingface_hub's HTTP library has changed before, and its errors have no common base class.
        except Exception as error:
            raise _hub_error(error, hub_id, revision) from error

    folder = download(_SMALL_FILES)
    check(folder)
    for weights in [[name] for name in WEIGHTS] if is_adapter(folder) else _WEIGHTS:
        folder = download([*_SMALL_FILES, *weights])
        if any(next(folder.glob(pattern), None) for pattern in weights):
            break
    return folder


def cached(hub_id: str) -> Path | None:
    """Return the folder of a repository in the hub's cache; None: it or its weights are not there."""
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError:
        return None
    try:
        folder = Path(snapshot_download(hub_id, local_files_only=True))
    except LocalEntryNotFoundError:
        return None
    return folder if (folder / "config.json").is_file() and find_weights(folder) else None


def is_offline() -> bool:
    """Return whether the user told the hub's package not to use the network (`HF_HUB_OFFLINE`)."""
    try:
        from huggingface_hub import constants
    except ImportError:
        return False
    return bool(constants.HF_HUB_OFFLINE)


def _hub_error(error: Exception, hub_id: str, revision: str | None) -> CheckpointError:
    from huggingface_hub import errors

    what = f"cannot download `{hub_id}` from the Hugging Face hub"
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            what,
            why="its owner must grant you access",
            hint=f"request access on huggingface.co/{hub_id}, then run `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            what,
            why="the repository does not exist or is private, and there is no local folder with this name",
            hint="check the spelling; for a private repository, run `hf auth login`",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            what,
            why=f"it has no revision {revision!r}",
            hint="give a branch, tag or commit of the repository",
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return CheckpointError(
            what,
            why="there is no network connection, no copy in the local cache, and no local folder with "
            "this name",
            hint="connect to the network once, or give a folder or a .pt file",
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
        what, why=shorten(lines[0]), hint="try again, or give a folder or a .pt file"
    )
