"""Fetch a checkpoint from the Hugging Face hub, or from its cache when offline."""

from collections.abc import Callable
from pathlib import Path

from whisperport.checkpoint.sizes import shortened
from whisperport.errors import CheckpointError, MissingPackageError

_TEXTS = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "adapter_config.json",  # so that an adapter is refused by name
]
# Tried in this order; the next only where a repository has nothing of the one before. The first
# leaves out copies in other precisions (`model.fp32-00001-of-00002.safetensors`): gigabytes.
_WEIGHTS = (
    ["model.safetensors", "model.safetensors.index.json", "model-*-of-*.safetensors"],
    ["model.fp16*.safetensors", "model.safetensors.index.fp16.json"],
    ["pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*-of-*.bin"],
)


def fetch(hub_id: str, revision: str | None, check: Callable[[Path], object]) -> Path:
    """The folder in the hub's cache; its name is the commit.

    `check` is given the folder while it holds no weights yet, and raises for one that cannot be used:
    gigabytes of another model are not fetched.

    Raises MissingPackageError without huggingface_hub, CheckpointError when there is no such
    repository or revision, no permission, or no network and no copy in the cache.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise MissingPackageError(
            f"cannot fetch `{hub_id}`: huggingface_hub is not installed",
            why=f"importing it said: {error}",
            hint="pip install 'whisperport[export]', or give a folder or a .pt file",
        ) from error

    def download(patterns: list[str]) -> Path:
        try:
            return Path(snapshot_download(hub_id, revision=revision, allow_patterns=patterns))
        # The HTTP library below it has changed before, and not all of its errors share a base.
        except Exception as error:
            raise _explained(error, hub_id, revision) from error

    folder = download(_TEXTS)
    check(folder)
    for weights in _WEIGHTS:
        folder = download([*_TEXTS, *weights])
        if any(next(folder.glob(pattern), None) for pattern in weights):
            break
    return folder


def _explained(error: Exception, hub_id: str, revision: str | None) -> CheckpointError:
    from huggingface_hub import errors

    what = f"cannot fetch `{hub_id}` from the Hugging Face hub"
    if isinstance(error, errors.GatedRepoError):
        return CheckpointError(
            what,
            why="its owner grants access one by one",
            hint=f"ask for access on huggingface.co/{hub_id}, then run `hf auth login`",
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return CheckpointError(
            what,
            why="there is no such repository, or it is private; nor is there such a folder here",
            hint="check the spelling, or run `hf auth login` for a private one",
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return CheckpointError(
            what, why=f"it has no revision {revision!r}", hint="give a branch, tag or commit it has"
        )
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return CheckpointError(
            what,
            why="there is no connection to it, no copy in the local cache, and no such folder here",
            hint="connect once, or give a folder or a .pt file",
        )
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return CheckpointError(
        what, why=shortened(lines[0]), hint="try again, or give a folder or a .pt file"
    )
