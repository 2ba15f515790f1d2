"""The chips as data, each value with its source.

Programs were compiled and simulated here for these chips; nothing was run on a chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.program.spec import Package, TargetSpec
from whisperport.targets.onnx.target import onnx_lowering, onnx_runs, onnx_software, onnx_support

FLOAT, W8A8, W8A16, W16A16 = "fp16", "w8a8", "w8a16", "w16a16"

TOOL = "rknn-toolkit2 2.5.0"
COMPILED = f"compiled here with {TOOL} and run in its simulator"
LITE = "rknn-toolkit-lite2 2.5.0, rknnlite/config/cpu_npu_mapper.yml"
CORE_MASK = "rknn-toolkit-lite2 2.5.0, rknnlite/api/rknn_lite.py: set_core_mask, and NPU_CORE_0_1_2"
INTEGERS_OF_16 = (
    f"w16a16: {TOOL} compiles it (`w16a16i_dfp`), though the API reference of 2.2 lists it for RV1103 and "
    "RV1106 only: try it on a chip first"
)
OPSET = 19  # the newest that the compiler reads
RUNTIME, EXTRA = "rknn-toolkit-lite2", "rockchip"
FEED = f"a graph with inputs of each was compiled and ran in the simulator ({TOOL})"


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


def spec_of(chip: Chip) -> TargetSpec:
    """Return the spec of a chip's target."""
    return TargetSpec(
        name=chip.name,
        summary=f"{chip.marketing_name}: NPU {chip.npu}, {', '.join(chip.precisions)}",
        supports=onnx_support(
            max_rank=4, dtypes=frozenset({"float32", "float16", "int32", "int64"})
        ),
        lowering=onnx_lowering(),
        runs=onnx_runs(precisions=chip.precisions),
        software=onnx_software(
            runtime=RUNTIME,
            run_extra=EXTRA,
            packages={
                EXTRA: (
                    Package(
                        "rknnlite", RUNTIME, f"install whisperport's extra `{EXTRA}` on the board"
                    ),
                )
            },
        ),
        sources={
            "formats": "the compiler reads ONNX, opset 12 to 19 (its change log, 1.5.3b15); torch programs "
            "are converted first",
            "domains": f"only ONNX's own operators were tried ({TOOL})",
            "static": "this target gives the compiler static shapes only",
            "dtypes": FEED,
            "max_rank": f"graphs of rank 4 ran in the simulator; with an addition of rank 5, {TOOL} "
            "printed that the graph is not sorted, and did not end within 100 s of CPU time",
            "precisions": chip.sources["precisions"],
        },
    )
