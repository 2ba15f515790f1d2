"""The options of Hailo's chips, for lowering and for running."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.targets.options import Option, check_ranges

# As the published programs that compiled: hailocs/hailo-whisper@ebe7a85 export/ writes decoders in 13, and
# ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab encoders in 17, where layer norms stay one node.
Opset = Literal[13, 17]


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerOptions:
    """How programs are written for the compiler.

    Raises:
        UsageError: `sequence_length` is below 8.
    """

    encoder_opset: Annotated[Opset, Option("ONNX operator set of encoders")] = 17
    decoder_opset: Annotated[Opset, Option("ONNX operator set of decoders")] = 13
    sequence_length: Annotated[
        int | None,
        Option(
            "Tokens that the uncached decoder takes; without it, as published for this width", low=8
        ),
    ] = None
    positions: Annotated[
        Literal["host", "graph"],
        Option("Where positions are added to the uncached decoder's embeddings"),
    ] = "host"

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How programs are run."""

    emulation: Annotated[
        Literal["onnx"] | None,
        Option("Run the ONNX files that the compiler is given on the CPU, instead of the chip"),
    ] = None
    service: Annotated[bool, Option("Share the chip with other processes by HailoRT's service")] = (
        False
    )
