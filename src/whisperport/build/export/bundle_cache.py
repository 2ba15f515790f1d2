"""Bundles of models that are given by name: exported once, and then kept in the user's cache.

    $XDG_CACHE_HOME/whisperport          default: ~/.cache/whisperport
    ├── bundles/KEY       the bundle of a checkpoint, in float32 for the CPU with ONNX Runtime
    ├── bundles/KEY-CPU   the one that `export --target auto` found to be the fastest; it is preferred
    └── models/NAME       the KEY of a name or path, so that the checkpoint is not read again

KEY is a hash of the checkpoint's weights, tokenizer and settings, of this package's version and the bundle
format, and of the export's options. NAME is a hash of the name, or of the files of a path: their sizes and
the times of their last change. CPU is a hash of the processor's instruction sets: in a home folder on
a network, a mix that was measured on another kind of CPU is not used.
"""

import errno
import hashlib
import json
import os
import platform
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from whisperport.errors import BundleError, UsageError, WhisperportError, needs
from whisperport.program.bundle import FORMAT_VERSION, MANIFEST, Bundle
from whisperport.speech.data import embedded_model
from whisperport.system.atomic import write_atomic
from whisperport.system.locking import waiting_for_lock
from whisperport.system.machine import instruction_sets
from whisperport.system.progress import begin_stage
from whisperport.system.system_error import HINTS
from whisperport.targets import get_target

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.checkpoint import Checkpoint

B = TypeVar("B", bound=Bundle)

TARGET, BATCH = "onnxruntime", 8  # step_8 decodes beams, chunks and files together
VARIABLE = "WHISPERPORT_BUNDLE"  # environment variable: folder of the bundle if none is given
_KEY = re.compile(r"[0-9a-f]{16}")
MAX_FILES = 1000  # of a checkpoint's folder that are compared


class EmbeddedModelWarning(UserWarning):
    """The embedded model was chosen by its name in Python, and it understands little."""


def open_bundle(bundle: Bundle | str | os.PathLike[str] | None) -> Bundle:
    """Open a bundle, or the bundle of a model that is given by name.

    Args:
        bundle: an open bundle; the folder of a bundle; or, as a `str`, a model: anything else that
            `load_checkpoint` accepts, such as "tiny.en". None: the folder in `$WHISPERPORT_BUNDLE`.

    Warns:
        EmbeddedModelWarning: it is "default"; Python shows it once.

    Raises:
        UsageError: None is given, and the environment variable is not set.
        BundleError: the bundle is damaged or missing.
        WhisperportError: see `bundle_of`.
    """
    if isinstance(bundle, Bundle):
        return bundle
    if bundle is None:
        return Bundle.open(bundle_of_environment())
    if isinstance(bundle, str) and not _is_bundle(bundle):
        if embedded_model.is_meant(bundle):
            warnings.warn(embedded_model.UNDERSTANDS, EmbeddedModelWarning, stacklevel=2)
        return bundle_of(bundle)
    return Bundle.open(bundle)


def bundle_of_environment() -> Path:
    """Return the folder in the environment variable `WHISPERPORT_BUNDLE`.

    Raises:
        UsageError: it is not set. No model is chosen silently: each invents text for speech it cannot
            understand.
    """
    if folder := os.environ.get(VARIABLE):
        return Path(folder)
    raise UsageError(
        "no model was given",
        why="no model is used that you did not choose",
        hint="give the name of a model, such as tiny.en: with --model, or in Python in place of a bundle. "
        "It is exported once and kept\n"
        "or the folder of a bundle that `whisperport export` wrote: with --bundle, or in the "
        f"environment variable {VARIABLE}",
    )


def bundle_of(model: str) -> Bundle:
    """Return the bundle of a model, which is exported at the first call and then read from the cache.

    It is exported for the CPU with ONNX Runtime, in float32. If `export_best` kept a faster one for this
    CPU, that one is returned. Another process that needs the same bundle waits.

    Args:
        model: anything that `load_checkpoint` accepts; "default" is the embedded model.

    Raises:
        CheckpointError, TokenizerError: see `load_checkpoint`.
        MissingPackageError: the bundle is not in the cache, and torch is not installed.
        WhisperportError: see `export`; or the cache is not writable.
    """
    return cached_bundle(model) or _exported(model)


def cached_bundle(model: str) -> Bundle | None:
    """Return the bundle of a model if it was exported before. Neither torch nor the network is used.

    None: it was not exported, a file of the checkpoint has changed since, or the bundle is damaged.
    """
    record = _record(model)
    try:
        key = record.read_text(encoding="ascii") if record.is_file() else ""  # a pipe could block
    except (OSError, ValueError):
        return None
    if not _KEY.fullmatch(key):
        return None
    fastest = _opened(_bundles() / _of_this_cpu(key))
    return fastest if fastest and _runs_here(fastest) else _opened(_bundles() / key)


def is_fastest(bundle: Bundle) -> bool:
    """Return whether a bundle was kept with `keep_fastest`."""
    return bundle.folder.parent == _bundles() and "-" in bundle.folder.name


def keep_fastest(model: str, export: "Callable[[Checkpoint, Path], B]") -> B:
    """Export a model to the user's cache, where `bundle_of` finds it on this kind of CPU from then on.

    Args:
        model: see `bundle_of`.
        export: writes a verified bundle of the checkpoint to the folder, completely or not at all.

    Raises:
        WhisperportError: see `bundle_of`, and what `export` raises. A bundle of an earlier call is kept.
    """
    return _kept(model, _of_this_cpu, export)


def cache_folder() -> Path:
    """Return the folder of this user's bundles.

    Raises:
        WhisperportError: the environment names no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME") or {
        "win32": os.environ.get("LOCALAPPDATA", ""),
        "darwin": "~/Library/Caches",
    }.get(sys.platform, "~/.cache")
    folder = Path(os.path.expanduser(base))
    if not folder.is_absolute():
        raise WhisperportError(
            "there is no folder to keep exported models in",
            why=f"`{folder}` is not an absolute path",
            hint="set XDG_CACHE_HOME, or export to a folder of your choice with `whisperport export`",
        )
    return folder / "whisperport"


def _exported(model: str) -> Bundle:
    from whisperport.build.export.export import export  # it imports every target
    from whisperport.build.export.export_options import ExportOptions

    def export_if_missing(checkpoint: "Checkpoint", folder: Path) -> Bundle:
        bundle = _opened(folder)  # of another name, or of another process
        return bundle or export(checkpoint, TARGET, folder, ExportOptions(batch=BATCH))

    return _kept(model, str, export_if_missing)


def _kept(
    model: str, name_of: Callable[[str], str], export: "Callable[[Checkpoint, Path], B]"
) -> B:
    """Call `export` for the folder `name_of(KEY)` of a model; no other process writes to it meanwhile.

    Raises:
        WhisperportError: the cache is not writable, and see `bundle_of`.
    """
    record = _record(model)  # before the files are read: they may be replaced during the export
    checkpoint = _checkpoint(model)
    key = _key(checkpoint)
    folder = _bundles() / name_of(key)
    try:
        for parent in (folder.parent, record.parent):
            parent.mkdir(parents=True, exist_ok=True)
        waiting = f"another process exports {model}: waiting for it"
        lock = folder.with_name(f"{folder.name}.lock")
        with waiting_for_lock(lock, lambda: begin_stage(waiting)):
            bundle = export(checkpoint, folder)
    except OSError as error:
        raise WhisperportError(
            f"cannot keep the bundle of `{model}`",
            why=f"{folder.parent}: {error.strerror or error}",
            hint=HINTS[errno.EFBIG]
            if error.errno == errno.EFBIG
            else "set XDG_CACHE_HOME to a folder that you may write to, on a disk with free space",
        ) from error
    write_atomic(record, key.encode())
    return bundle


def _checkpoint(model: str) -> "Checkpoint":
    begin_stage(f"reading {model}")
    with needs(
        f"cannot export `{model}`: torch is not installed",
        hint='pip install "whisperport[export]"\n'
        "or, for a board: install that on a computer, run there `whisperport export "
        f"{model} --target {TARGET} --out DIR`, copy DIR here, and give it with --bundle",
    ):
        from whisperport.model.checkpoint import load_checkpoint

        return load_checkpoint(model)


def _opened(folder: Path) -> Bundle | None:
    try:
        return Bundle.open(folder)
    except BundleError:
        return None


def _runs_here(bundle: Bundle) -> bool:
    """Return whether the runtimes of a bundle are installed: another environment may have kept it."""
    from whisperport.build.doctor import GENERAL  # its `is_installed` would import every target

    names = {entry.target for entry in bundle.manifest.programs}
    software = [get_target(name).spec.software for name in names]
    packages = (p for of in software for p in {**GENERAL, **of.packages}.get(of.run_extra, ()))
    return all(find_spec(package.module) for package in packages)


def _of_this_cpu(key: str) -> str:
    """Return the name of the folder of the fastest bundle of a checkpoint on this CPU."""
    return f"{key}-{_hash([platform.machine(), instruction_sets() or platform.processor()])}"


def _is_bundle(folder: str) -> bool:
    try:
        return (Path(folder) / MANIFEST).is_file()
    except (OSError, ValueError):  # too long, or a zero byte in the name
        return False


def _bundles() -> Path:
    return cache_folder() / "bundles"


def _record(model: str) -> Path:
    """Return the path of the file that holds the key of a model's bundle."""
    return cache_folder() / "models" / _hash([*_made_by(), _state(model)])


def _key(checkpoint: "Checkpoint") -> str:
    tokenizer = hashlib.sha256(checkpoint.tokenizer_json).hexdigest()
    parts = (checkpoint.dims, checkpoint.generation)
    weights = sorted(checkpoint.source.sha256.values())  # the files may have other names
    return _hash([*_made_by(), weights, tokenizer, [asdict(part) for part in parts]])


def _made_by() -> list[Any]:
    """What a bundle depends on beside its checkpoint."""
    from importlib.metadata import version

    return [version("whisperport"), FORMAT_VERSION, TARGET, BATCH]


def _state(model: str) -> Any:
    """Return what shows whether a model is the same as before: its files, if it is a path here."""
    path = Path(os.path.abspath(os.path.expanduser(model)))
    try:
        if path.is_dir():
            files = sorted(entry for entry in path.iterdir() if entry.is_file())[:MAX_FILES]
        else:
            files = [path]
        return [str(path), [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]]
    except (OSError, ValueError):
        return embedded_model.model_digest() if model == embedded_model.NAME else model


def _hash(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, default=str).encode()).hexdigest()[:16]
