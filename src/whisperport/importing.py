"""Wrap published HEFs into a bundle: the chip runs them, and a checkpoint gives the programs around them.

Those are exported and verified as ever, while ONNX stands in for what is in the HEFs. What is checked of a
HEF is what it says of itself: chip, shapes, checksum. It was not run.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.bundle import Bundle, check_writable
from whisperport.bundle.staging import staging
from whisperport.compiling import put_hefs
from whisperport.dims import SECONDS_PER_POSITION, Dims
from whisperport.errors import BundleError
from whisperport.exporting import ExportOptions, export
from whisperport.regular_file import other_kind
from whisperport.runtime.engine import FULL
from whisperport.targets import RunOptions
from whisperport.targets.hailo.chips import HAILO8, HAILO8L, HAILO10H, Chip
from whisperport.targets.hailo.compiler import check_hef
from whisperport.targets.hailo.hef import Hef, Network, read_hef
from whisperport.window import WindowOptions

if TYPE_CHECKING:  # boards have no torch
    from whisperport.checkpoint import Checkpoint

CHIPS = (
    HAILO8L,
    HAILO8,
    HAILO10H,
)  # a HEF of the 8L is taken for that, though a Hailo-8 runs it too
TABLES = ("token_embedding_weight_*.npy", "onnx_add_input_*.npy")  # of Hailo's decoder assets
SAME = 1e-3  # of the largest value: float16 keeps 11 bits, and some checkpoints are stored so

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """What is imported beside an encoder, and how the rest is exported."""

    chip: str = ""  # the target; empty: the chip that the HEF was compiled for
    decoder: Path | None = None  # a HEF of the decoder without a cache
    assets: Path | None = None  # the folder of its tables, which must be the checkpoint's
    run: RunOptions = field(default_factory=RunOptions)


def import_hef(
    hef: str | os.PathLike[str],
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    out: str | os.PathLike[str],
    options: ImportOptions | None = None,
    *,
    say: Say = lambda _: None,
) -> Bundle:
    """A bundle around an encoder's HEF: window and chip are the HEF's, all else the checkpoint's.

    Raises:
        BundleError: a HEF is damaged, for another chip, or of another checkpoint; or `out` cannot be
            written.
        CheckpointError, LoweringError, VerificationError: see `export`.
    """
    options, out, path = options or ImportOptions(), Path(out), Path(hef)
    check_writable(out)
    encoder = read_hef(path)
    chip = _chip(encoder, path, options.chip)
    from whisperport.checkpoint import load_checkpoint

    if isinstance(checkpoint, str | os.PathLike):
        say(f"reading {checkpoint}")
        checkpoint = load_checkpoint(
            checkpoint if isinstance(checkpoint, str) else Path(checkpoint)
        )
    positions = _positions(_network(encoder, path), checkpoint.dims, path)
    hefs, form = {"encoder": path}, {}
    if options.decoder is not None:
        form = _form(options.decoder, checkpoint.dims)
        _check_assets(options.assets, checkpoint)
        hefs[FULL] = options.decoder
    exporting = ExportOptions(
        window=WindowOptions(seconds=positions * SECONDS_PER_POSITION),
        full=bool(form),
        lower=form,
        run=options.run,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out.with_name(f"{out.name}.import")) as folders:
        bundle = export(checkpoint, chip.name, folders.partial / "bundle", exporting, say=say)
        read = {
            name: check_hef(file, chip, bundle.manifest.program(name).spec)
            for name, file in hefs.items()
        }
        say("putting the HEF into the bundle")
        facts = {name: {"imported": file.name} for name, file in hefs.items()}
        return put_hefs(bundle, hefs, read, "checked against contract", facts=facts, out=out)


def _chip(hef: Hef, path: Path, name: str) -> Chip:
    for chip in CHIPS:
        if hef.architecture in chip.architectures and name in ("", chip.name):
            return chip
    raise BundleError(
        f"{path.name} is for another chip than {f'`{name}`' if name else 'those known here'}",
        why=f"it was compiled for {hef.chip}",
        hint=f"known: {', '.join(chip.name for chip in CHIPS)}",
    )


def _network(hef: Hef, path: Path) -> Network:
    """Its only network, with streams that say their shapes."""
    if len(hef.networks) == 1 and hef.networks[0].inputs and hef.networks[0].outputs:
        return hef.networks[0]
    raise BundleError(
        f"{path.name} does not say which shapes it has",
        why=f"it holds {len(hef.networks)} networks, or describes them as old compilers did",
        hint="take a HEF that Dataflow Compiler 3.31 or later wrote, of one network",
    )


def _positions(network: Network, dims: Dims, path: Path) -> int:
    """T, from an input (1, 2T, n_mels) and an output (1, T, d)."""
    inputs = [stream.shape for stream in network.inputs]
    outputs = [stream.shape for stream in network.outputs]
    positions = inputs[0][1] // 2
    expected = [(1, 2 * positions, dims.n_mels)], [(1, positions, dims.n_audio_state)]
    if (inputs, outputs) != expected or not 0 < positions <= dims.n_audio_ctx:
        raise BundleError(
            f"{path.name} is no encoder of this checkpoint",
            why=f"from {inputs} it makes {outputs}; expected (1, 2T, {dims.n_mels}) to "
            f"(1, T, {dims.n_audio_state}), T at most {dims.n_audio_ctx}",
            hint="give the checkpoint that the HEF was made of",
        )
    return positions


def _form(path: Path, dims: Dims) -> dict[str, str]:
    """The options of `export` that give a decoder of the HEF's shapes.

    Two generations were published: the host adds positions and gives (S, 1, d), or the HEF adds them to
    (1, S, d). Source: hailo-ai/Hailo-Application-Code-Examples@0d987d8.
    """
    inputs = sorted(_network(read_hef(path), path).inputs, key=lambda stream: stream.name)
    shape = inputs[-1].shape
    if len(inputs) != 2 or shape[2] != dims.n_text_state or 1 not in shape[:2]:
        raise BundleError(
            f"{path.name} is no decoder of this checkpoint",
            why=f"its inputs are {[stream.shape for stream in inputs]}; expected features "
            f"(1, T, {dims.n_text_state}) and embeddings (S, 1, {dims.n_text_state}) or "
            f"(1, S, {dims.n_text_state})",
            hint="give the checkpoint that the HEF was made of",
        )
    positions = "host" if shape[1] == 1 else "graph"
    return {"rows": str(max(shape[:2])), "positions": positions}


def _check_assets(folder: Path | None, checkpoint: "Checkpoint") -> None:
    """The host's tables belong to the decoder: where they are given, they must be the checkpoint's."""
    if folder is None:
        return
    weights = checkpoint.weights
    tables = (weights["decoder.token_embedding.weight"], weights["decoder.positional_embedding"])
    for pattern, weight in zip(TABLES, tables, strict=True):
        found = sorted(folder.glob(pattern))
        if len(found) != 1:
            raise BundleError(
                f"{folder} holds {len(found)} files {pattern}", hint="one of each is needed"
            )
        given, own = _table(found[0]), weight.float().numpy()
        same = given.ndim == 2 and len(given) <= len(own) and given.shape[1:] == own.shape[1:]
        if same:
            rows = own[: len(given)]
            same = bool(np.abs(given - rows).max(initial=0) <= SAME * np.abs(rows).max(initial=0))
        if not same:
            raise BundleError(
                f"{found[0].name} is not of this checkpoint",
                why=f"it holds {given.shape}, and other values than the checkpoint's {own.shape}",
                hint="give the checkpoint that the HEF was made of",
            )


def _table(path: Path) -> Any:
    try:
        if kind := other_kind(path):
            raise ValueError(f"it is {kind}, not a file")
        table = np.load(path, allow_pickle=False)
    except Exception as error:  # numpy raises nine kinds on a damaged file, MemoryError among them
        raise BundleError(
            f"cannot read {path.name}", why=f"{type(error).__name__}: {error}"[:200]
        ) from error
    if not isinstance(table, np.ndarray) or table.dtype.kind != "f" or not table.size:
        raise BundleError(f"{path.name} is no array of numbers")
    return table
