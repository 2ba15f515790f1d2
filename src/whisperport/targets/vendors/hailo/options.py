"""Options of the Hailo targets, for lowering and for running."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.targets.options import EmulationOptions, Option, check_ranges

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
class RunOptions(EmulationOptions):
    """Options for running."""

    service: Annotated[
        bool, Option("Share the chip with other processes through HailoRT's multi-process service")
    ] = False
