"""Load a checkpoint from wherever it is: a folder, a file, a short name, or a hub id."""

import difflib
import re
from pathlib import Path

from whisperport.checkpoint.checkpoint import Checkpoint
from whisperport.checkpoint.hub import fetch
from whisperport.checkpoint.huggingface import check_texts, load_folder
from whisperport.checkpoint.names import HUB_IDS, default_checkpoint_folder
from whisperport.checkpoint.openai import load_pt
from whisperport.checkpoint.other_forms import reject_other_file
from whisperport.checkpoint.sizes import shortened
from whisperport.errors import CheckpointError, UsageError

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLED = {".pt", ".pth", ".ckpt"}  # openai-whisper's own, and what training loops call theirs
_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_checkpoint(source: str | Path, *, revision: str | None = None) -> Checkpoint:
    """Load a Whisper checkpoint.

    `source` is, in this order: a folder as transformers saves it, a `.pt` file as openai-whisper
    saves it, `default` (the small model inside this package), a name such as `tiny.en` or `turbo`,
    or a hub id such as `openai/whisper-tiny`. `revision` is a branch, tag or commit, for the last
    two alone.

    Raises CheckpointError when it is not there, damaged, of another architecture, or not whole;
    TokenizerError when its tokenizer is; MissingPackageError when it is on the hub and
    huggingface_hub is not installed; UsageError for a revision of something that has none.
    """
    name = str(source)
    path = _expanded(source)
    if _exists(path):
        _reject_revision(revision, name)
        return _load_path(path, name)
    if name == "default":
        _reject_revision(revision, name)
        folder = default_checkpoint_folder()
        if not folder.is_dir():
            raise CheckpointError(
                "this installation has no default checkpoint",
                why="its data/model folder is missing",
                hint="install the package again, or give a name such as `tiny`",
            )
        return load_folder(folder, name=name)
    hub_id = HUB_IDS.get(name, name)
    if isinstance(source, Path) or not _HUB_ID.fullmatch(hub_id) or hub_id.endswith(".pt"):
        raise CheckpointError(
            f"no checkpoint `{shortened(name)}`",
            why="it is no folder or file here, and no name this package knows",
            hint=_nearest(name),
        )
    folder = fetch(hub_id, revision, check_texts)
    commit = folder.name if _COMMIT.fullmatch(folder.name) else revision or ""
    return load_folder(folder, name=name, revision=commit)


def _load_path(path: Path, name: str) -> Checkpoint:
    if path.is_dir():
        return load_folder(path, name=name)
    if path.suffix in _PICKLED and path.is_file():
        return load_pt(path, name=name)
    if path.is_file():
        reject_other_file(path)
    if path.suffix in {".safetensors", ".bin", ".json"}:
        raise CheckpointError(
            f"`{name}` is one file of a checkpoint",
            why="sizes and tokenizer are in the files beside it",
            hint=f"give its folder: `{path.parent}`",
        )
    raise CheckpointError(
        f"`{name}` is not a checkpoint",
        why=f"its name ends in {path.suffix or 'nothing'!r}; expected a folder or a .pt file",
        hint="give a folder, a .pt file, or a name such as `tiny`",
    )


def _expanded(source: str | Path) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # `~someone`, who has no home here
        return Path(source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name too long, or with a zero byte in it
        return False


def _reject_revision(revision: str | None, name: str) -> None:
    if revision is not None:
        raise UsageError(
            f"`{name}` has no revisions",
            why=f"revision {revision!r} was asked for; only checkpoints on the hub have them",
            hint="leave the revision out",
        )


def _nearest(name: str) -> str:
    near = difflib.get_close_matches(name, ["default", *HUB_IDS], n=3)
    known = ", ".join(near or ["default", *HUB_IDS])
    return f"did you mean {known}?" if near else f"known names: {known}; or give a path or hub id"
