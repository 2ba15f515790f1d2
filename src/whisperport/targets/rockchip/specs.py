"""The spec of each chip's target."""

from whisperport.spec import Package, TargetSpec
from whisperport.targets.onnx_target import onnx_spec
from whisperport.targets.rockchip.chips import TOOL, Chip

OPSET = 19  # the newest that the compiler reads
RUNTIME, EXTRA = "rknn-toolkit-lite2", "rockchip"
FEED = f"a graph with inputs of each was compiled and ran in the simulator ({TOOL})"


def spec_of(chip: Chip) -> TargetSpec:
    """Return the spec of a chip's target."""
    return onnx_spec(
        name=chip.name,
        summary=f"{chip.marketing_name}: NPU {chip.npu}, {', '.join(chip.precisions)}",
        max_rank=4,
        dtypes=frozenset({"float32", "float16", "int32", "int64"}),
        precisions=chip.precisions,
        runtime=RUNTIME,
        run_extra=EXTRA,
        packages={
            EXTRA: (
                Package("rknnlite", RUNTIME, f"install whisperport's extra `{EXTRA}` on the board"),
            )
        },
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
