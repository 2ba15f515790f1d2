"""Write the inputs of a program as files for a device, with a manifest and the expected outputs.

    DIR/manifest.json
    DIR/CLIP/inputs/NAME.bin      headerless, little-endian, in the program's order
    DIR/CLIP/expected/NAME.bin    what the device should write

The folder appears when it is complete: it is written under another name and then renamed.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.errors import UsageError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.staging import staging
from whisperport.program.json_records import to_json
from whisperport.program.runner import Array
from whisperport.program.spec import TensorSpec
from whisperport.system.atomic import flush_rename, write_atomic
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions
from whisperport.verification.diagnosis.expected import Quantization
from whisperport.verification.diagnosis.expected_outputs import (
    expected_outputs,
    inputs_of,
    reference_clip,
    spec_of,
)
from whisperport.verification.recording import BundleSession

MANIFEST = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceInputs:
    """A folder of input files for a device.

    Attributes:
        folder: the folder.
        program: name of the program.
        clips: names of the clips, one folder each.
        manifest: the JSON data of `manifest.json`.
    """

    folder: Path
    program: str
    clips: tuple[str, ...]
    manifest: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"folder": str(self.folder), **self.manifest}


def write_device_inputs(
    bundle: Bundle | str | os.PathLike[str],
    folder: str | os.PathLike[str],
    options: DiagnoseOptions | None = None,
    *,
    clips: Sequence[str] = (),
) -> DeviceInputs:
    """Write the inputs of one program for clips of the reference, and the outputs that are expected.

    The inputs of a decoder program are those of one call while the clip is transcribed by the bundle's
    programs: real features, caches and masks.

    Args:
        bundle: the bundle or its folder.
        folder: where to write; it must not exist, or be empty.
        options: program, quantization and how to run; None: the defaults. `options.clip` is used if
            `clips` is empty.
        clips: names of the clips; empty: the clip of the options, which is by default the first.

    Raises:
        UsageError: the folder is not empty, or the bundle has no such program or clip.
        WhisperportError: the folder cannot be written.
        BundleError: the bundle is damaged.
        MissingPackageError: a target's runtime is not installed.
    """
    options = options or DiagnoseOptions()
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    out = Path(folder)
    _check_free(out)
    names = tuple(dict.fromkeys(clips)) or (options.clip,)
    spec = spec_of(opened, options.program)
    known = {t.name for t in (*spec.inputs, *spec.outputs)}
    for name in options.quantization:
        if name not in known:
            raise UsageError(
                f"the program `{spec.name}` has no input or output `{name}`",
                hint=f"its inputs and outputs are {', '.join(sorted(known)[:12])}",
            )
    entry = next(e for e in opened.manifest.programs if e.spec.name == spec.name)
    try:
        with staging(Path(os.path.realpath(out))) as folders:
            written = [_write_clip(opened, options, name, folders.partial) for name in names]
            manifest = {
                "format": FORMAT,
                "bundle": opened.manifest.name,
                "program": spec.name,
                "target": entry.target,
                "precision": entry.precision,
                "byte_order": "little",
                "clips": written,
            }
            text = json.dumps(manifest, indent=2) + "\n"
            write_atomic(folders.partial / MANIFEST, text.encode())
            os.rename(folders.partial, folders.out)
            flush_rename(folders.out)
    except OSError as error:
        raise WhisperportError(
            f"cannot write the folder {out}",
            why=error.strerror or str(error),
            hint="check the free space and the permissions; nothing was written",
        ) from error
    return DeviceInputs(
        folder=out,
        program=spec.name,
        clips=tuple(clip["clip"] for clip in written),
        manifest=manifest,
    )


def _check_free(out: Path) -> None:
    why, hint = "", "give the path of a new folder"
    if os.path.lexists(out) and (out.is_symlink() or not out.is_dir() or any(out.iterdir())):
        why = "it exists and is not an empty folder"
    elif not out.parent.is_dir():
        why, hint = f"the folder {out.parent} does not exist", "create the folder first"
    if why:
        raise UsageError(f"cannot write the device's inputs to {out}", why=why, hint=hint)


def _write_clip(
    bundle: Bundle, options: DiagnoseOptions, name: str, folder: Path
) -> dict[str, Any]:
    """Write the files of one clip; return its entry of the manifest."""
    clip = reference_clip(bundle, name)
    spec = spec_of(bundle, options.program)
    expected = expected_outputs(bundle, options.program, clip.name, run=options.run)
    arrays = inputs_of(BundleSession(bundle, options.run), spec, clip)
    at = folder / _folder_name(clip.name)
    inputs = list(zip(spec.inputs, arrays, strict=True))
    outputs = [
        (tensor, output.array)
        for tensor, output in zip(spec.outputs, expected.tensors, strict=True)
    ]
    return {
        "clip": clip.name,
        "expected_from": expected.source,
        "inputs": list(_files(inputs, options.quantization, at / "inputs", folder)),
        "expected": list(_files(outputs, options.quantization, at / "expected", folder)),
    }


def _folder_name(clip: str) -> str:
    """Return the name of a clip without characters that mean something in a path."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", clip).strip(".")[:100] or "clip"


def _files(
    tensors: Sequence[tuple[TensorSpec, Array]],
    quantization: Mapping[str, Quantization],
    at: Path,
    folder: Path,
) -> Iterator[dict[str, Any]]:
    """Write one file per tensor; yield its entry of the manifest."""
    at.mkdir(parents=True)
    for index, (tensor, array) in enumerate(tensors):
        stored = quantization.get(tensor.name)
        values = stored.quantize(array) if stored else array.astype(tensor.dtype)
        data = values.astype(values.dtype.newbyteorder("<")).tobytes()
        path = at / f"{tensor.name}.bin"
        write_atomic(path, data)
        yield {
            "index": index,
            "name": tensor.name,
            "file": path.relative_to(folder).as_posix(),
            "shape": list(tensor.shape),
            "dtype": str(values.dtype),
            "quantization": to_json(stored),
            "bytes": len(data),
            "sha256": hashlib.sha256(data).hexdigest(),
        }
