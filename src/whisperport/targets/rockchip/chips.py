"""The chips as data, each value with its source.

Programs were compiled and simulated here for these chips; nothing was run on a chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass

FLOAT, W8A8, W8A16, W16A16 = "fp16", "w8a8", "w8a16", "w16a16"

TOOL = "rknn-toolkit2 2.5.0"
COMPILED = f"compiled here with {TOOL} and run in its simulator"
LITE = "rknn-toolkit-lite2 2.5.0, rknnlite/config/cpu_npu_mapper.yml"
CORE_MASK = "rknn-toolkit-lite2 2.5.0, rknnlite/api/rknn_lite.py: set_core_mask, and NPU_CORE_0_1_2"
INTEGERS_OF_16 = (
    f"w16a16: {TOOL} compiles it (`w16a16i_dfp`), though the API reference of 2.2 lists it for RV1103 and "
    "RV1106 only: try it on a chip first"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One system on a chip.

    Attributes:
        name: name of the target, and the compiler's `target_platform`, such as "rk3588".
        marketing_name: the chips that it stands for.
        npu: the vendor's name of the NPU's generation.
        cores: cores of the NPU that the runtime can choose; 1: it has no choice.
        tops: 8-bit operations per second, in units of 10^12.
        precisions: precisions that programs can have; the first is the default.
        w8a16: what the compiler does with a program in w8a16, as words that follow its name.
        sources: name of a field -> the document or measurement that its value comes from.
    """

    name: str
    marketing_name: str
    npu: str
    cores: int
    tops: float
    precisions: tuple[str, ...]
    w8a16: str
    sources: Mapping[str, str]


BY_NAME = "rejects it for this chip by name"
CRASHES = "ends with `munmap_chunk(): invalid pointer` when it compiles an encoder for it"


def _chip(
    name: str, npu: str, *, cores: int, tops: float, chips: str = "", w8a16: str = BY_NAME
) -> Chip:
    """Return a chip; `chips` are the vendor's names of several chips that it stands for."""
    return Chip(
        name=name,
        marketing_name=chips or name.upper(),
        npu=npu,
        cores=cores,
        tops=tops,
        precisions=(FLOAT, W8A8, W16A16),
        w8a16=w8a16,
        sources={
            "marketing_name": "rknn-toolkit2's README: Support Platform",
            "npu": LITE,
            "cores": CORE_MASK,
            "tops": "from memory of the vendor's product pages",
            "precisions": f"{COMPILED}; w8a16: it {w8a16}; {INTEGERS_OF_16}",
            "w8a16": f"tried here with {TOOL}",
        },
    )


CHIPS = (
    _chip("rk3588", "RKNPU2-V2", cores=3, tops=6.0, chips="RK3588 and RK3588S"),
    _chip("rk3576", "RKNPU2-F2", cores=2, tops=6.0),
    _chip("rk3568", "RKNPU2-LITE", cores=1, tops=1.0),
    _chip("rk3566", "RKNPU2-LITE", cores=1, tops=1.0),
    _chip("rk3562", "RKNPU2-T4", cores=1, tops=1.0, w8a16=CRASHES),
)
