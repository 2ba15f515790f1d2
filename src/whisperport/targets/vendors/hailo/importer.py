"""Import published HEFs of Whisper: determine their window and the form of their decoder.

Two forms of the decoder were published. In one, the host adds positional embeddings and passes (S, 1, d);
in the other, the HEF adds them to (1, S, d). Source: hailo-ai/Hailo-Application-Code-Examples@0d987d8.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast, final

import numpy as np

from whisperport.errors import BundleError
from whisperport.program.dims import SECONDS_PER_POSITION, Dims
from whisperport.program.spec import ProgramSpec
from whisperport.system.array_files import open_array
from whisperport.targets.importer import Importer, ImportForm
from whisperport.targets.target_options import Option
from whisperport.targets.vendors.hailo.chips import Chip
from whisperport.targets.vendors.hailo.compiler import check_chip, check_hef
from whisperport.targets.vendors.hailo.hef import Hef, Network, read_hef
from whisperport.targets.vendors.hailo.layout import without_unit_axes

if TYPE_CHECKING:  # boards have no torch
    from whisperport.model.checkpoint import Checkpoint

TABLES = ("token_embedding_weight_*.npy", "onnx_add_input_*.npy")  # of Hailo's decoder assets
MAX_TABLE_DIFFERENCE = (
    1e-3  # of the largest value: float16 keeps 11 bits, and some checkpoints are stored so
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportOptions:
    """Options for importing."""

    assets: Annotated[
        Path | None,
        Option(
            "Folder with the .npy files of token and position embeddings that the vendor published with "
            "the .hef files, to be compared with the checkpoint's; a difference is an error. The default "
            "compares none"
        ),
    ] = None


@final
class HailoImporter(Importer):
    """Imports HEFs for one chip."""

    options: ClassVar[type[Any]] = ImportOptions
    suffix: ClassVar[str] = ".hef"
    programs: ClassVar[frozenset[str]] = frozenset({"encoder", "uncached_decoder"})

    def __init__(self, chip: Chip) -> None:
        self._chip = chip

    def is_for(self, artifact: Path) -> bool:
        return read_hef(artifact).architecture in self._chip.compiled_for

    def form(self, artifacts: Mapping[str, Path], dims: Dims) -> ImportForm:
        encoder = artifacts["encoder"]
        positions = _positions(_network(self._read(encoder), encoder), dims, encoder)
        decoder = artifacts.get("uncached_decoder")
        return ImportForm(
            window_s=positions * SECONDS_PER_POSITION,
            options={} if decoder is None else _decoder_form(self._read(decoder), decoder, dims),
        )

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        hef = check_hef(artifact, self._chip, spec)
        return {"compiler": hef.compiler_version, "compiled_for": hef.chip}

    def check_checkpoint(
        self, artifacts: Mapping[str, Path], checkpoint: "Checkpoint", options: Any
    ) -> None:
        assets = cast(ImportOptions, options).assets
        if assets is not None:
            _check_assets(assets, checkpoint)

    def _read(self, path: Path) -> Hef:
        hef = read_hef(path)
        check_chip(hef, self._chip, path)
        return hef


def _network(hef: Hef, path: Path) -> Network:
    """Return the only network of a HEF, which must have inputs and outputs."""
    if len(hef.networks) == 1 and hef.networks[0].inputs and hef.networks[0].outputs:
        return hef.networks[0]
    raise BundleError(
        f"the shapes of {path.name} are not known",
        why=f"it contains {len(hef.networks)} networks, or an older compiler wrote it",
        hint="use a HEF with one network from Dataflow Compiler 3.31 or later",
    )


def _positions(network: Network, dims: Dims, path: Path) -> int:
    """Return T, the number of encoder positions. The input is (2T, n_mels) and the output (T, d)."""
    inputs = [stream.shape for stream in network.inputs]
    outputs = [stream.shape for stream in network.outputs]
    positions = next(iter(without_unit_axes(inputs[0])), 0) // 2
    expected = [(2 * positions, dims.n_mels)], [(positions, dims.n_audio_state)]
    shapes = [*map(without_unit_axes, inputs)], [*map(without_unit_axes, outputs)]
    if shapes != expected or not 0 < positions <= dims.n_audio_ctx:
        raise BundleError(
            f"{path.name} is not an encoder of this checkpoint",
            why=f"its inputs are {inputs} and its outputs {outputs}; expected (1, 2T, {dims.n_mels}) and "
            f"(1, T, {dims.n_audio_state}) with T at most {dims.n_audio_ctx}",
            hint="give the checkpoint from which the HEF was made",
        )
    return positions


def _decoder_form(hef: Hef, path: Path, dims: Dims) -> dict[str, str]:
    """Return the options for lowering that make an uncached decoder with the HEF's shapes."""
    inputs = sorted(_network(hef, path).inputs, key=lambda stream: stream.name)
    shape = inputs[-1].shape
    if len(inputs) != 2 or shape[2] != dims.n_text_state or 1 not in shape[:2]:
        raise BundleError(
            f"{path.name} is not a decoder of this checkpoint",
            why=f"its inputs are {[stream.shape for stream in inputs]}; expected features "
            f"(1, T, {dims.n_text_state}) and embeddings (S, 1, {dims.n_text_state}) or "
            f"(1, S, {dims.n_text_state})",
            hint="give the checkpoint from which the HEF was made",
        )
    positions = "host" if shape[1] == 1 else "graph"
    return {"sequence-length": str(max(shape[:2])), "positions": positions}


def _check_assets(folder: Path, checkpoint: "Checkpoint") -> None:
    """Compare the token and position embeddings in a folder with those of the checkpoint.

    Raises:
        BundleError: a file is missing or unreadable, or its values are not those of the checkpoint.
    """
    weights = checkpoint.weights
    tables = (weights["decoder.token_embedding.weight"], weights["decoder.positional_embedding"])
    for pattern, weight in zip(TABLES, tables, strict=True):
        files = sorted(folder.glob(pattern))
        if len(files) != 1:
            raise BundleError(
                f"{folder} contains {len(files)} files {pattern}; expected one",
                hint="give the folder of decoder assets that was published with the HEFs",
            )
        table, own = _table(files[0]), weight.float().numpy()
        same = table.ndim == 2 and len(table) <= len(own) and table.shape[1:] == own.shape[1:]
        if same:
            rows = own[: len(table)]
            same = bool(
                np.abs(table - rows).max(initial=0)
                <= MAX_TABLE_DIFFERENCE * np.abs(rows).max(initial=0)
            )
        if not same:
            raise BundleError(
                f"{files[0].name} does not belong to this checkpoint",
                why=f"its shape is {table.shape}, that of the checkpoint {own.shape}, or its values differ",
                hint="give the checkpoint from which the HEF was made",
            )


def _table(path: Path) -> Any:
    try:
        table = open_array(path)
    except ValueError as error:
        raise BundleError(f"cannot read {path.name}", why=str(error)) from error
    if table.dtype.kind != "f" or not table.size:
        raise BundleError(f"{path.name} is not an array of numbers")
    return table
