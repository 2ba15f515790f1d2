"""Load a checkpoint from a folder, a file, a short name, or a hub id."""

import difflib
import re
from pathlib import Path

from whisperport.errors import CheckpointError, MissingPackageError, UsageError
from whisperport.model.checkpoint.adapter import merged
from whisperport.model.checkpoint.by_name import locate
from whisperport.model.checkpoint.checkpoint import Checkpoint
from whisperport.model.checkpoint.ctranslate2 import is_ctranslate2, load_ctranslate2
from whisperport.model.checkpoint.ggml import is_ggml, load_ggml
from whisperport.model.checkpoint.hub import fetch
from whisperport.model.checkpoint.huggingface import check_config_files, load_folder
from whisperport.model.checkpoint.names import HUB_IDS
from whisperport.model.checkpoint.openai import load_pt
from whisperport.model.checkpoint.other_forms import reject_other_file
from whisperport.program.adapter_settings import CONFIG, Adapter, is_adapter, read_adapter
from whisperport.program.untrusted import shorten
from whisperport.speech.data import embedded_model
from whisperport.system.locking import temporary_folder
from whisperport.system.system_error import unopenable

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLED = {".pt", ".pth", ".ckpt"}  # suffixes that openai-whisper and training loops use
_COMMIT = re.compile(r"[0-9a-f]{40}")


def load_checkpoint(
    source: str | Path, *, revision: str | None = None, adapter: Path | None = None
) -> Checkpoint:
    """Load a Whisper checkpoint.

    Args:
        source: the first of these that exists: a folder in transformers' or CTranslate2's format, a folder
            with a LoRA adapter of PEFT, which is merged with its base, a `.pt` file of openai-whisper, a
            ggml file of whisper.cpp, `default` (the embedded model), a name such as `tiny.en` or `turbo`,
            or a hub id such as `openai/whisper-tiny`. A name is OpenAI's file, which is looked for in
            openai-whisper's cache, in the hub's cache, at OpenAI and on the hub; see `fetch`.
        revision: branch, tag or commit of a checkpoint on the hub; None: the default branch.
        adapter: folder of a LoRA adapter of PEFT, which is merged with the checkpoint, whatever its own
            settings name as its base; None: none.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged or incomplete, or has an architecture
            that is not supported.
        TokenizerError: its tokenizer is missing or damaged.
        MissingPackageError: it is on the hub, and huggingface_hub is not installed.
        UsageError: `revision` is given for a checkpoint that is not on the hub.
    """
    if adapter is not None:
        settings, base = read_adapter(adapter), load_checkpoint(source, revision=revision)
        settings.check_base(base.source.name)
        return merged(settings, base, name=f"{base.source.name} with {adapter.name}")
    name = str(source)
    if name == embedded_model.NAME and not _exists(Path(name)):
        _reject_revision(revision, name)
        return _load_embedded()
    path, commit = _located(source, revision)
    if reason := unopenable(path):
        raise CheckpointError(f"cannot read `{shorten(name)}`", **reason)
    try:
        return _load_path(path, name, commit)
    except OSError as error:
        raise CheckpointError(
            f"cannot read `{shorten(name)}`",
            why=str(error),
            hint="check the permissions, and that no file of it is removed or changed meanwhile",
        ) from error


def _located(source: str | Path, revision: str | None) -> tuple[Path, str]:
    """Return the folder or file of a checkpoint, and its commit on the hub; empty: it is not from there."""
    name = str(source)
    path = _expand_user(source)
    if _exists(path):
        _reject_revision(revision, name)
        return path, ""
    hub_id = HUB_IDS.get(name, name)
    if isinstance(source, Path) or not _HUB_ID.fullmatch(hub_id) or hub_id.endswith(".pt"):
        raise CheckpointError(
            f"no checkpoint `{shorten(name)}`",
            why="it is not an existing folder or file, and not a known name",
            hint=_suggestion(name),
        )
    if name in HUB_IDS and revision is None:
        path = locate(name, check_config_files)
    else:
        path = fetch(hub_id, revision, check_config_files)
    return path, path.name if _COMMIT.fullmatch(path.name) else revision or ""


def _load_embedded() -> Checkpoint:
    """Unpack the embedded model and load it. Its weights stay mapped when the files are deleted."""
    with temporary_folder() as folder:
        embedded_model.unpack_model(folder)
        return load_folder(folder, name=embedded_model.NAME)


def _load_path(path: Path, name: str, commit: str) -> Checkpoint:
    if path.is_dir() and is_adapter(path):
        adapter = read_adapter(path)
        return merged(adapter, _load_base(adapter), name=name, revision=commit)
    if path.is_dir():
        if is_ctranslate2(path):
            return load_ctranslate2(path, name=name)
        return load_folder(path, name=name, revision=commit)
    if path.suffix in _PICKLED and path.is_file():
        return load_pt(path, name=name)
    if path.is_file() and is_ggml(path):
        return load_ggml(path, name=name)
    if path.is_file():
        reject_other_file(path)
    if path.suffix in {".safetensors", ".bin", ".json"}:
        raise CheckpointError(
            f"`{name}` is only one file of a checkpoint",
            why="the sizes and the tokenizer are in other files of its folder",
            hint=f"give the folder: `{path.parent}`",
        )
    raise CheckpointError(
        f"`{name}` is not a checkpoint",
        why=f"its name ends in {path.suffix or 'nothing'!r}; expected a folder, a .pt file or a ggml file",
        hint="give a folder, a .pt file, or a name such as `tiny`",
    )


def _load_base(adapter: Adapter) -> Checkpoint:
    """Load the base of an adapter: from the path that it states, in or beside its folder, or the hub."""
    stated, folder = _expand_user(adapter.base), adapter.folder
    places = (folder / stated, stated, folder / stated.name, folder.parent / stated.name)
    place = next((path for path in places if _exists(path)), None)
    try:
        path, commit = (place, "") if place else _located(adapter.base, adapter.base_revision)
    except (CheckpointError, MissingPackageError) as error:
        raise type(error)(
            f"the base of the adapter in `{folder}` was not found: `{shorten(adapter.base)}`",
            why=f"{error.what}: {error.why}",
            hint=f"copy the base into the folder of the adapter, as `{folder / stated.name}`, or "
            f"write its path as `base_model_name_or_path` in {CONFIG}",
        ) from error
    if path.is_dir() and is_adapter(path):
        raise CheckpointError(
            f"the base of the adapter in `{folder}` is an adapter, too",
            why=f"`{path}` has {CONFIG}",
            hint="merge that one first: `PeftModel.merge_and_unload()`, then `save_pretrained`",
        )
    return _load_path(path, adapter.base, commit)


def _expand_user(source: str | Path) -> Path:
    try:
        return Path(source).expanduser()
    except RuntimeError:  # `~user` of an unknown user
        return Path(source)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # the name is too long or contains a zero byte
        return False


def _reject_revision(revision: str | None, name: str) -> None:
    if revision is not None:
        raise UsageError(
            f"`{name}` has no revisions",
            why=f"the revision {revision!r} was given; only checkpoints on the hub have revisions",
            hint="do not give a revision",
        )


def _suggestion(name: str) -> str:
    near = difflib.get_close_matches(name, ["default", *HUB_IDS], n=3)
    known = ", ".join(near or ["default", *HUB_IDS])
    return f"did you mean {known}?" if near else f"known names: {known}; or give a path or a hub id"
