"""What a board cannot run at all, with the reason and what to do instead.

A Whisper program is rejected here before anything is lowered. The operators of a file of any other program
are checked with the limits of the spec.
"""

from whisperport.targets.base import Unsupported
from whisperport.targets.mediatek.chips import MDLA_2_0, Chip

# Programs without attention: linears only. All others multiply two activations in their attention.
WITHOUT_ATTENTION = frozenset({"cross_kv", "vocab_projection"})

ON_THE_CPU = "run Whisper on its CPU: export with `--target litert`"


def unsupported(chip: Chip, program: str, precision: str) -> Unsupported | None:
    """Return why a board cannot run a Whisper program in a precision; None: it can, as far as is known."""
    npu = chip.npu
    if npu.engine == "vpu":
        return Unsupported(
            f"{chip.board} ({chip.soc}) has no MDLA, MediaTek's accelerator of neural networks; its VPU "
            "supports quantized convolutions, and no list of its operators contains attention",
            ON_THE_CPU,
        )
    if precision == "w8a16" and not npu.w8a16:
        return Unsupported(
            f"{npu.name} of {chip.board} ({chip.soc}) has no 16-bit activations with 8-bit weights (16x8)",
            f"use `fp16`, the default, for linears such as `cross_kv`; {ON_THE_CPU}",
        )
    if npu is MDLA_2_0 and program not in WITHOUT_ATTENTION:
        return Unsupported(
            f"{npu.name} of {chip.board} ({chip.soc}) does not support transformers, and `{program}` "
            f"contains attention (source: {npu.sources['transformer']})",
            f"{ON_THE_CPU}; `--placement cross_kv={chip.name}` then places the linears of the "
            "cross-attention K/V on the NPU",
        )
    return None
