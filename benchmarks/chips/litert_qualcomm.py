"""Compile `.tflite` files for Qualcomm's NPU ahead of time, by LiteRT's plugin, beside onnxruntime-qnn.

    whisperport export default --target litert --out build/words-litert
    python -m benchmarks.chips.litert_qualcomm build/words-litert [--soc SM8650]

LiteRT's plugin, in the package ai-edge-litert, asks the vendor's libraries about every operator of a
`.tflite` file, and compiles those that they accept. It finds these libraries in the package
onnxruntime-qnn, except one for an audio processor; in its place, a C compiler builds an empty library.
Nothing is run: the library that runs such a file on a phone is not in the package. Prints a Markdown table,
and the kinds of operators that the vendor's libraries rejected.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import time
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
    parser.add_argument("litert", type=Path, help="bundle for the target litert")
    parser.add_argument("--soc", default="SM8650", help="the plugin's name of the chip")
    chosen = parser.parse_args()
    bundle = Bundle.open(chosen.litert)
    rejected: Counter[str] = Counter()
    print("| File | Programs | Operators accepted | Parts | MB | Compiled: MB | s |")
    print("|---|---|---|---|---|---|---|")
    for file in sorted({file for entry in bundle.manifest.programs for file in entry.files}):
        output, compiled, seconds = _compile(bundle.folder / file, chosen.soc)
        answers = [tuple(map(int, found[1:])) for found in ANSWER.findall(output)]
        rejected.update(REJECTED.findall(output))
        accepted, total, parts = map(sum, zip(*answers, strict=True))
        names = ", ".join(read_signatures(bundle.folder / file))
        sizes = f"{(bundle.folder / file).stat().st_size / 1e6:.1f} | {compiled}"
        print(f"| {file} | {names} | {accepted} of {total} | {parts} | {sizes} | {seconds:.0f} |")
    print("\nrejected:", ", ".join(f"{n} {kind}" for kind, n in rejected.most_common()) or "none")


def _compile(file: Path, soc: str) -> tuple[str, str, float]:
    """Return what the plugin prints about a `.tflite` file, the result's MB or its failure, and seconds."""
    litert, vendor = _folder("ai_edge_litert"), _folder("onnxruntime_qnn")
    with TemporaryDirectory() as empty:
        stub = Path(empty) / "libQnnLpai.so"  # the plugin is linked to it, and does not use it here
        subprocess.run(["cc", "-shared", "-x", "c", os.devnull, "-o", stub], check=True)
        searched = (vendor, vendor.with_name("onnxruntime_qnn.libs"), stub.parent)
        result, begin = Path(empty) / "compiled.tflite", time.perf_counter()
        done = subprocess.run(
            [
                litert / "tools/apply_plugin_main",
                "--cmd=apply",
                f"--model={file}",
                "--soc_manufacturer=Qualcomm",
                f"--soc_model={soc}",
                f"--libs={litert / PLUGIN}",
                f"--qualcomm_qnn_lib_dir={vendor}",
                f"--o={result}",
            ],
            env={**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(map(str, searched))},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        seconds = time.perf_counter() - begin
        size = result.stat().st_size if result.is_file() else 0  # a failure leaves an empty file
    output = done.stdout.decode("utf-8", "replace")
    if not ANSWER.search(output):
        raise SystemExit(f"the plugin did not partition {file}:\n{output[-2000:]}")
    failed = done.returncode or not size
    return output, f"fails ({done.returncode})" if failed else f"{size / 1e6:.1f}", seconds


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package} is not installed: pip install ai-edge-litert onnxruntime-qnn")
    return Path(spec.origin).parent


if __name__ == "__main__":
    main()
