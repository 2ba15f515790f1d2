"""A fake of MediaTek's `ncc-tflite`, for tests. It compiles nothing.

It accepts the flags of the documented help and of scripts for NeuroPilot 8, each with or without a value as
documented, and prints what scripts that read the real program expect. It writes a file with some bytes in
place of a compiled program. It was never compared with the real program, which this project does not have.

`install(folder)` makes an SDK folder with it. `faults` changes its behaviour:

    {"check": ["line", …]}       these lines, and exit status 1, with --check-target-only
    {"compile": [...], "describe": [...], "arch": [...], "version": [...]}    likewise
    {"plan": [...]}              these lines with --show-exec-plan, and success
    {"io": [...]}                these lines with --show-io-info, and success
    {"hang": "compile"}          start a child process, and wait
    {"empty": true}              success without a compiled file
    {"signal": 11}               end with this signal when it compiles
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ARCHITECTURES = ("mdla5.3", "edma3.6", "mdla3.0", "mdla2.0", "vpu")
WITH_VALUE = {"--arch", "--l1-size-kb", "--l2-size-kb", "--num-mdla", "-d", "--dla-file", "--gno"}
WITHOUT_VALUE = {
    *("--check-target-only", "--show-io-info", "--show-exec-plan", "--show-memory-summary"),
    *("--opt-accuracy", "--opt-aggressive", "--opt-bw", "--opt-footprint", "--opt-size"),
    *("--relax-fp32", "--fc-to-conv", "--reshape-to-4d", "--disallow-bridge", "--suppress-output"),
    *("--suppress-input", "--version", "--mlo", "--gno-exp", "-O0", "-O1", "-O2", "-O3"),
}
TYPES = {"float32": "kTfLiteFloat32", "int8": "kTfLiteInt8", "int16": "kTfLiteInt16"}


def install(folder: Path, **faults: object) -> Path:
    """Make an SDK with the fake, as NeuroPilot's archive has it; return the SDK's folder."""
    host = folder / "neuron_sdk" / "host"
    (host / "bin").mkdir(parents=True)
    (host / "lib").mkdir()
    script = host / "bin" / "ncc-tflite"
    script.write_text(f"#!{sys.executable}\n" + Path(__file__).read_text("utf-8"), "utf-8")
    script.chmod(0o755)
    change(folder, **faults)
    return folder


def change(folder: Path, **faults: object) -> None:
    """Change the fake's behaviour."""
    (folder / "neuron_sdk" / "host" / "lib" / "faults.json").write_text(json.dumps(faults))


def calls(folder: Path) -> list[list[str]]:
    """Return the arguments of every call that compiled, checked or described."""
    file = folder / "neuron_sdk" / "host" / "lib" / "calls.txt"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fail(lines: list[str]) -> None:
    print("\n".join(lines))
    sys.exit(1)


def main(arguments: list[str]) -> None:
    library = os.environ["LD_LIBRARY_PATH"].split(":")[0]  # the SDK's own, as its loader needs it
    faults = json.loads(Path(library, "faults.json").read_text())
    if arguments == ["--version"]:
        if "version" in faults:
            fail(faults["version"])
        print("ncc-tflite (fake)\nVersion: 8.0.10+build20251029")
        return
    if arguments == ["--arch=?"]:
        if "arch" in faults:
            fail(faults["arch"])
        print("Available architectures:\n" + "\n".join(f"  - {name}" for name in ARCHITECTURES))
        return
    with Path(library, "calls.txt").open("a") as file:
        file.write(json.dumps(arguments) + "\n")
    values = parse(arguments)
    model = Path(values["model"])
    if model.read_bytes()[4:8] != b"TFL3":
        fail([f"ERROR: {model} is not a TFLite model"])
    if "--check-target-only" in values:
        if "check" in faults:
            fail(faults["check"])
        print("OP[0]: CONV_2D")
    elif "--show-io-info" in values:
        if "describe" in faults:
            fail(faults["describe"])
        print("\n".join(faults.get("io") or described(model)))
    else:
        compiled(values, faults)


def parse(arguments: list[str]) -> dict[str, str]:
    values: dict[str, str] = {}
    words = iter(arguments)
    for word in words:
        name, equals, value = word.partition("=")
        if not word.startswith("-"):
            values["model"] = word
        elif name in WITH_VALUE:
            values[name] = value if equals else next(words, "")
        elif name in WITHOUT_VALUE and not equals:
            values[name] = ""
        else:
            fail([f"ncc-tflite: unknown option {word}", "Usage: ncc-tflite [OPTION] model.tflite"])
    unknown = [name for name in values["--arch"].split(",") if name not in ARCHITECTURES]
    if unknown:
        fail([f"ERROR: unknown target {unknown[0]}"])
    return values


def described(model: Path) -> list[str]:
    """Return a description from a file beside the model; a real compiler reads the model."""
    if not model.with_suffix(".fake.json").exists():
        return ["this fake has no description of the model"]
    inputs, outputs = json.loads(model.with_suffix(".fake.json").read_text())
    lines = [f"# of input tensors: {len(inputs)}"]
    for index, (name, tensors) in enumerate((("input", inputs), ("output", outputs))):
        if index:
            lines.append(f"# of output tensors: {len(outputs)}")
        for place, (dtype, shape) in enumerate(tensors):
            lines += [f"[{place}]: {name}", f" ├ Type: {TYPES[dtype]}"]
            lines.append(f" └ Shape: {{{','.join(map(str, shape))}}}")
    return lines


def compiled(values: dict[str, str], faults: dict[str, object]) -> None:
    if "compile" in faults:
        fail(faults["compile"])  # type: ignore[arg-type]
    if faults.get("hang"):
        child = subprocess.Popen(["sh", "-c", "trap '' INT; sleep 300"])
        Path(values["model"]).with_name("pids").write_text(f"{os.getpid()} {child.pid}")
        time.sleep(300)
    if "signal" in faults:
        os.kill(os.getpid(), int(str(faults["signal"])))
    if "--show-exec-plan" in values:
        target = values["--arch"].split(",")[0].upper().replace("MDLA", "MDLA_").replace(".", "_")
        plan = faults.get("plan") or ["ExecutionPlan", f" └ Target: {target}"]
        print("\n".join(plan))  # type: ignore[arg-type]
    if not faults.get("empty"):
        content = b"fake compiled program\n" + bytes(faults.get("bytes") or b"")  # type: ignore[call-overload]
        Path(values.get("-d") or values["--dla-file"]).write_bytes(content)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    main(sys.argv[1:])
