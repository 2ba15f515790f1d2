"""Options of the MediaTek targets for running; lowering has none."""

from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.targets.mediatek.run_options import DeviceOptions
from whisperport.targets.options import Option


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions(DeviceOptions):
    """Options for running: on the board, or emulated on the CPU.

    Raises:
        UsageError: a number is out of its range.
    """

    emulation: Annotated[
        Literal["tflite"] | None,
        Option(
            "Run the lowered .tflite files on the CPU in float32 with LiteRT, not the compiled files on "
            "the NPU; the default is the NPU"
        ),
    ] = None
