"""Compare the operators that two ways to Qualcomm's NPU support: LiteRT's plugin, and onnxruntime-qnn.

    whisperport export default --target litert --out build/words-litert
    whisperport export default --target sm8650 --out build/words-sm8650
    whisperport compile build/words-sm8650
    python -m benchmarks.chips.litert_qualcomm build/words-litert build/words-sm8650 [--soc SM8650]

LiteRT's plugin, in the package ai-edge-litert, asks the vendor's libraries about every operator of a
`.tflite` file. It finds these libraries in the package onnxruntime-qnn, except one for an audio processor;
in its place, a C compiler builds an empty library. Nothing is compiled for the NPU, and nothing is run.
Prints a Markdown table, and the kinds of operators that the vendor's libraries rejected.
"""

import argparse
import importlib.util
import os
import re
import subprocess
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.model.inspection.tflite_signatures import read_signatures
from whisperport.program.bundle import Bundle

PLUGIN = "vendors/qualcomm/compiler"
# "Partitioned subgraph<0>, selected 213 ops, from a total of 213 ops. resulted in 1 partitions."
ANSWER = re.compile(
    r"Partitioned subgraph<(\d+)>, selected (\d+) ops, from a total of (\d+) ops\. resulted in (\d+)"
)
REJECTED = re.compile(r"QNN op validation failed: '[^']*' \(type=(\w+)")


def main() -> None:
    """Ask the plugin about every file of the bundle, and print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("litert", type=Path, help="bundle for the target litert, in float32")
    parser.add_argument("compiled", type=Path, help="bundle that onnxruntime-qnn compiled")
    parser.add_argument("--soc", default="SM8650", help="the plugin's name of the chip")
    chosen = parser.parse_args()
    bundle = Bundle.open(chosen.litert)
    plans = {
        entry.spec.name: dict(entry.facts.plan)
        for entry in Bundle.open(chosen.compiled).manifest.programs
    }
    rejected: Counter[str] = Counter()
    print("| Program | LiteRT's plugin accepts | Parts | onnxruntime-qnn, nodes by engine |")
    print("|---|---|---|---|")
    for file in sorted({file for entry in bundle.manifest.programs for file in entry.files}):
        output = _ask(bundle.folder / file, chosen.soc)
        answers = {int(found[0]): tuple(map(int, found[1:])) for found in ANSWER.findall(output)}
        rejected.update(REJECTED.findall(output))
        for name, signature in read_signatures(bundle.folder / file).items():
            accepted, total, parts = answers[signature.subgraph]
            plan = ", ".join(f"{engine} {nodes}" for engine, nodes in plans.get(name, {}).items())
            print(f"| {name} | {accepted} of {total} operators | {parts} | {plan or '-'} |")
    print("\nrejected:", ", ".join(f"{n} {kind}" for kind, n in rejected.most_common()) or "none")


def _ask(file: Path, soc: str) -> str:
    """Return what the plugin prints about a `.tflite` file."""
    litert, vendor = _folder("ai_edge_litert"), _folder("onnxruntime_qnn")
    with TemporaryDirectory() as empty:
        stub = Path(empty) / "libQnnLpai.so"  # the plugin is linked to it, and does not use it here
        subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-o", stub], check=True)
        searched = (vendor, vendor.with_name("onnxruntime_qnn.libs"), stub.parent)
        done = subprocess.run(
            [
                litert / "tools/apply_plugin_main",
                "--cmd=partition",
                f"--model={file}",
                "--soc_manufacturer=Qualcomm",
                f"--soc_model={soc}",
                f"--libs={litert / PLUGIN}",
                f"--qualcomm_qnn_lib_dir={vendor}",
                "--o=none",
            ],
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, searched))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
    output = done.stdout.decode("utf-8", "replace")
    if done.returncode or not ANSWER.search(output):
        raise SystemExit(f"the plugin did not partition {file}:\n{output[-2000:]}")
    return output


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install ai-edge-litert onnxruntime-qnn")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
