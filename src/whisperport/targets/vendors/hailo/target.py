"""The Hailo targets: write ONNX and a model script for the compiler; run or emulate programs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, cast, final

from whisperport.errors import UsageError
from whisperport.program.bundle import ProgramEntry
from whisperport.program.dims import Dims
from whisperport.program.runner import Runner
from whisperport.program.spec import ProgramSpec, UncachedForm
from whisperport.targets.onnx.target import OnnxTarget
from whisperport.targets.target_options import EmulationOptions, Option, check_ranges
from whisperport.targets.vendors.hailo.chips import HAILO8, HAILO8L, HAILO10H, Chip
from whisperport.targets.vendors.hailo.compiler import HailoCompiler
from whisperport.targets.vendors.hailo.importer import HailoImporter
from whisperport.targets.vendors.hailo.model_script import model_script

DEFAULT_SEQUENCE_LENGTH = (
    32  # of `uncached_decoder`, where none is published for a checkpoint's width
)

# Numbers of weights of Whisper's encoders, without positions. Hailo's toolkit compiles only these two.
TINY_WEIGHTS, BASE_WEIGHTS = 7_632_384, 19_822_592

# The encoder of tiny with a 10 s window has 7 to 9 contexts; partitioning took about 21 minutes on a CPU.
# Source: ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab, the log in its notebook.
TINY_CONTEXTS, TINY_MINUTES = 8, 21


# The opsets of published programs that compiled: hailocs/hailo-whisper@ebe7a85 export/ writes decoders in
# opset 13; ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab writes encoders in opset 17, in which a
# layer norm is one node.
Opset = Literal[13, 17]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """Options for lowering.

    Raises:
        UsageError: `sequence_length` is below 8.
    """

    encoder_opset: Annotated[Opset, Option("ONNX opset of the encoder's file")] = 17
    decoder_opset: Annotated[Opset, Option("ONNX opset of the uncached decoder's file")] = 13
    sequence_length: Annotated[
        int | None,
        Option(
            "Sequence length of the uncached decoder, in tokens, at most 448; the default is that of "
            "Hailo's published decoder: 32 for tiny, 24 for base (64 on Hailo-10H), else 32",
            low=8,
        ),
    ] = None
    positions: Annotated[
        Literal["host", "graph"],
        Option(
            "Where positional embeddings are added to the uncached decoder's input: on the CPU (host), "
            "or in the compiled program (graph)"
        ),
    ] = "host"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions(EmulationOptions):
    """Options for running."""

    service: Annotated[
        bool, Option("Share the chip with other processes through HailoRT's multi-process service")
    ] = False


@final
class Hailo(OnnxTarget):
    """The target for one chip. Lowered ONNX files can be emulated on the CPU before they are compiled."""

    lower_options: ClassVar[type[Any]] = LowerOptions
    options = LowerOptions()
    run_options: ClassVar[type[Any]] = DeviceOptions

    def __init__(self, chip: Chip) -> None:
        self.chip, self.spec = chip, chip.spec
        self.compiler = HailoCompiler(chip)
        self.importer = HailoImporter(chip)

    def uncached_form(self, dims: Dims) -> UncachedForm:
        """Return the form of Hailo's published decoder.

        Its graph starts after the lookup of token embeddings and ends before the pieces of the logits are
        joined; its causal mask is -inf. Source: hailocs/hailo-whisper@ebe7a85.

        Raises:
            UsageError: the option `sequence-length` is above the number of the decoder's positions.
        """
        published = min(
            self.chip.sequence_length.get(dims.n_text_state, DEFAULT_SEQUENCE_LENGTH),
            dims.n_text_ctx,
        )
        sequence_length = self.options.sequence_length or published
        if sequence_length > dims.n_text_ctx:
            raise UsageError(
                f"the option `{self.spec.name}.sequence-length` cannot be `{sequence_length}`",
                hint=f"expected at most {dims.n_text_ctx}, the number of the decoder's positions",
            )
        return UncachedForm(sequence_length, self.options.positions)

    def too_large(self, dims: Dims) -> str:
        """Return why an encoder is too large, with an estimate; "" up to the size of base.

        The estimate is proportional to the number of weights, starting from the log of tiny.
        """
        weights = dims.encoder_weights
        if weights <= BASE_WEIGHTS:
            return ""
        times = weights / TINY_WEIGHTS
        return (
            f"its encoder has {weights / 1e6:.1f} million weights; the largest that is known to compile "
            f"has {BASE_WEIGHTS / 1e6:.1f} million. In proportion to a log for tiny, it would need about "
            f"{TINY_CONTEXTS * times:.0f} contexts and {TINY_MINUTES * times / 60:.1f} hours to partition "
            "them"
        )

    def opset(self, spec: ProgramSpec) -> int:
        return self.options.decoder_opset if _is_decoder(spec) else self.options.encoder_opset

    def texts(self, spec: ProgramSpec) -> Mapping[str, str]:
        """Return the model script."""
        return {".alls": _script(self.chip, spec)}

    def load_compiled(
        self, entries: Sequence[ProgramEntry], files: Mapping[str, Path], options: Any
    ) -> dict[str, Runner]:
        from whisperport.targets.vendors.hailo.runtime import load_hefs

        service = cast(DeviceOptions, options).service
        return load_hefs(self.chip, [entry.spec for entry in entries], files, service=service)


def _is_decoder(spec: ProgramSpec) -> bool:
    """Whether a program is a decoder: it has features and embeddings as inputs, an encoder only mel."""
    return len(spec.inputs) > 1


def _script(chip: Chip, spec: ProgramSpec) -> str:
    """Write the model script with default options; the width d is that of the features, (1, T, d)."""
    if not _is_decoder(spec):
        return model_script(chip.name, spec.outputs[0].shape[-1])
    features = next((tensor for tensor in spec.inputs if len(tensor.shape) == 3), spec.inputs[0])
    return model_script(chip.name, features.shape[-1], program="uncached_decoder")


TARGETS = (Hailo(HAILO8), Hailo(HAILO8L), Hailo(HAILO10H))
