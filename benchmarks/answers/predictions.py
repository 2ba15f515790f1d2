"""Compare what `whisperport check` predicts of third-party programs with what the real partitioner does.

    python -m benchmarks.answers.predictions [--target xnnpack] [--only NAME] [--held-out]

For each program of `predicted_models.py` and each target, `check` predicts which nodes are not delegated,
and the target's own partitioner decides it. A node of the program counts as not delegated if the compiled
program has an operator, made from this node, outside of every delegate. Nodes that compute are those with
operations, lookups, and those whose cost is not known; the others only move data.

    recall       predicted nodes among those that are not delegated
    precision    nodes that are not delegated among those predicted

Needs torchvision and timm beside whisperport's own packages. Writes `results/answers.json`.
"""

import argparse
import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from whisperport.build.check import check
from whisperport.model.inspection.cost import MOVEMENT
from whisperport.model.inspection.graph import Node
from whisperport.model.inspection.rejections import CheckedProgram
from whisperport.model.trace.program import Program, trace
from whisperport.targets import get_target
from whisperport.targets.vendors.qualcomm.chips import CHIPS
from whisperport.targets.vendors.qualcomm.compiler import CompileOptions, provider_options
from whisperport.verification import versions

from ..record import record
from .predicted_models import HELD_OUT, SUITE, Case

# A part of the text of a wrong prediction -> why it is wrong, for the generated page.
REMOVED = "not in the graph"
EXPLAINED = {
    REMOVED: "`check` assumes that it is removed: it reads constants only, is a copy, or writes in place",
    "rank 6 is above the limit": "the execution provider replaces reshape, transpose and reshape of "
    "rank 6, if an axis has the size 1, by those of rank 5",
    "select: WP101": "torch removes a view that is written to and not read",
}
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select"})


@dataclass(frozen=True)
class Truth:
    """What a partitioner did with one program."""

    undelegated: dict[str, list[str]]  # node of the program -> operators that are in no delegate
    subgraphs: int


def computes(node: Node) -> bool:
    return node.op in LOOKUPS or node.op not in MOVEMENT


def moves(operators: list[str]) -> bool:
    """Whether operators of a compiled program only copy a tensor."""
    return all("copy" in one or "clone" in one for one in operators)


class Xnnpack:
    """ExecuTorch: each operator outside of delegates is followed to the node that it was made from."""

    name = "xnnpack"

    def lower(self, program: Program, folder: Path) -> Truth:
        from executorch.exir.lowered_backend_module import executorch_call_delegate

        from whisperport.targets.cpu.xnnpack.lowering import _lower_to_edge, import_executorch

        import_executorch()
        manager, _ = _lower_to_edge({"forward": program})
        names = {node.name for node in program.exported.graph.nodes}
        undelegated: dict[str, list[str]] = {}
        subgraphs = 0
        for node in manager.exported_program("forward").graph.nodes:
            if node.target is executorch_call_delegate:
                subgraphs += 1
            elif node.op == "call_function" and "getitem" not in str(node.target):
                operator = str(node.target).split(": schema")[0].removeprefix("<EdgeOpOverload: ")
                for name in origins(node, names):
                    undelegated.setdefault(name, []).append(operator)
        return Truth(undelegated, subgraphs)

    def predict(self, program: Program, folder: Path) -> CheckedProgram:
        return check(program, self.name).programs[0]


def origins(node: Any, names: set[str]) -> set[str]:
    """Return the nodes of the program that a node of the lowered program was made from."""
    found: set[str] = set()
    sources = list(node.meta.get("from_node") or ())
    while sources:
        source = sources.pop()
        sources += source.from_node
        if not source.from_node:
            found.add(source.name)
    return found & names or {f"?{node.name}"}


class LiteRt:
    """LiteRT: its interpreter lists the calls of XNNPACK, which replace operators of the file."""

    name = "litert"

    def lower(self, program: Program, folder: Path) -> Truth:
        from whisperport.model.inspection.litert_run import listed_ops
        from whisperport.model.inspection.profile_tflite import DELEGATE, replaced
        from whisperport.targets.tflite.runner import TfliteFile

        get_target(self.name).lower_file(program, folder / "program.tflite")
        ops = listed_ops(TfliteFile(folder / "program.tflite", 1, extra="litert").interpreter)
        file = [op for op in ops if op.name != DELEGATE]
        calls = [op for op in ops if op.name == DELEGATE]
        taken = {index for call in calls for index in replaced(call, file)}
        left = {f"{op.name}_{op.index}": [op.name] for op in file if op.index not in taken}
        return Truth(left, len(calls))

    def predict(self, program: Program, folder: Path) -> CheckedProgram:
        return check(folder / "program.tflite", self.name).programs[0]


class Qnn:
    """Qualcomm's execution provider: ONNX Runtime records which provider gets each node."""

    def __init__(self, name: str) -> None:
        self.name = name

    def lower(self, program: Program, folder: Path) -> Truth:
        import onnxruntime
        import onnxruntime_qnn

        provider = "QNNExecutionProvider"
        path = folder / "program.onnx"
        target = get_target(self.name)
        target.lower_file(program, path)
        if provider not in {device.ep_name for device in onnxruntime.get_ep_devices()}:
            library = onnxruntime_qnn.get_library_path()
            onnxruntime.register_execution_provider_library(provider, library)
        devices = [one for one in onnxruntime.get_ep_devices() if one.ep_name == provider]
        settings = onnxruntime.SessionOptions()
        settings.log_severity_level = 3
        settings.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        chip = next(one for one in CHIPS if one.name == self.name)
        options = provider_options(chip, CompileOptions())
        settings.add_provider_for_devices(
            devices[:1], {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), **options}
        )
        session = onnxruntime.InferenceSession(str(path), settings)
        parts = session.get_provider_graph_assignment_info()
        left: dict[str, list[str]] = {}
        for part in parts:
            for node in part.get_nodes() if part.ep_name != provider else ():
                left.setdefault(node.name.split("/")[0], []).append(node.op_type)
        return Truth(left, sum(part.ep_name == provider for part in parts))

    def predict(self, program: Program, folder: Path) -> CheckedProgram:
        return check(folder / "program.onnx", self.name).programs[0]


TARGETS: dict[str, Any] = {one.name: one for one in (Xnnpack(), LiteRt(), Qnn("sm8550"))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--target", action="append", choices=TARGETS)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument(
        "--keep", type=Path, help="folder of what partitioners did, to compare again"
    )
    options = parser.parse_args()
    cases = HELD_OUT if options.held_out else {**SUITE, **HELD_OUT}
    chosen = [one for one in cases if not options.only or any(part in one for part in options.only)]
    rows = []
    for name in chosen:
        for target in options.target or TARGETS:
            row = measured(name, cases[name], target, options.keep)
            print(line(row), flush=True)
            rows.append(row)
    report(rows, options)


def measured(name: str, make: Callable[[], Case], target: str, keep: Path | None) -> dict[str, Any]:
    about = {"program": name, "held_out": name in HELD_OUT, "target": target}
    try:
        torch.manual_seed(0)
        module, inputs = make()
        program = trace("program", module.eval(), inputs)
        with tempfile.TemporaryDirectory() as temporary:
            folder = (keep or Path(temporary)) / target / name.replace(" ", "_").replace(",", "")
            truth = kept_truth(program, folder, TARGETS[target])
            checked = TARGETS[target].predict(program, folder)
    except Exception as error:
        traceback.print_exc()
        return {**about, "failed": str(error).split("\n")[0], "why": str(getattr(error, "why", ""))}
    return {**about, **compared(checked, truth)}


def kept_truth(program: Program, folder: Path, target: Any) -> Truth:
    """Return the truth of the folder, if an earlier run left it there; else lower the program."""
    path = folder / "truth.json"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(target.lower(program, folder))))
    return Truth(**json.loads(path.read_text()))


def compared(checked: CheckedProgram, truth: Truth) -> dict[str, Any]:
    nodes = {node.name: node for node in checked.graph.nodes}
    predicted = {
        found.name: f"{group.rule} {found.reason}"
        for group in checked.rejected
        for found in group.occurrences
        if found.cost is not None
    }
    real = truth.undelegated
    row: dict[str, Any] = {
        "subgraphs": truth.subgraphs,
        "predicted_subgraphs": checked.predicted and len(checked.predicted.subgraphs),
    }
    # Operators of the compiled program that `check` removed from the graph, as a compiler would.
    removed = {name: ops for name, ops in real.items() if name not in nodes}
    for kind, of in (
        ("compute", {n for n, one in nodes.items() if computes(one)}),
        ("all", {*nodes}),
    ):
        row[kind] = {
            "nodes": len(of),
            "undelegated": len(of & real.keys())
            + sum(kind == "all" or not moves(ops) for ops in removed.values()),
            "predicted": len(of & predicted.keys()),
            "right": len(of & real.keys() & predicted.keys()),
        }
    row["missed"] = {
        name: f"{nodes[name].op}: {', '.join(dict.fromkeys(real[name]))}"
        for name in nodes
        if name in real and name not in predicted
    }
    row["wrong"] = {
        name: f"{nodes[name].op}: {predicted[name]}"
        for name in nodes
        if name in predicted and name not in real
    }
    row["missed"] |= {name: f"{', '.join(ops)}: {REMOVED}" for name, ops in removed.items()}
    return row


def line(row: dict[str, Any]) -> str:
    if "failed" in row:
        return f"{row['target']:10} {row['program']:36} failed: {row['failed']} {row['why']}"
    counts = "   ".join(
        f"{kind} {row[kind]['right']:3}/{row[kind]['undelegated']:3} of {row[kind]['predicted']:3}"
        for kind in ("compute", "all")
    )
    parts = f"{row['subgraphs']} subgraphs, predicted {row['predicted_subgraphs']}"
    return f"{row['target']:10} {row['program']:36} {counts}   {parts}"


def report(rows: list[dict[str, Any]], options: argparse.Namespace) -> None:
    for target in options.target or TARGETS:
        of = [row for row in rows if row["target"] == target and "failed" not in row]
        for kind in ("compute", "all"):
            total = {key: sum(row[kind][key] for row in of) for key in of[0][kind]} if of else {}
            if total:
                recall = total["right"] / (total["undelegated"] or 1)
                precision = total["right"] / (total["predicted"] or 1)
                print(f"{target} {kind}: {total} recall {recall:.3f} precision {precision:.3f}")
    packages = (
        "whisperport",
        "torch",
        "executorch",
        "litert-torch",
        "ai-edge-litert",
        "onnxruntime",
    )
    packages += ("onnxruntime-qnn", "transformers", "openai-whisper", "torchvision", "timm")
    result = {
        "what": "nodes not delegated, as `check` predicts and as partitioners decided",
        "rows": rows,
        "explained": EXPLAINED,
        "versions": versions(packages),
    }
    record("answers", "predictions", result)


if __name__ == "__main__":
    main()
