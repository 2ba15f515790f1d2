"""A FAKE of neuronrt for tests; it is not MediaTek's tool, and no NPU is involved.

It accepts exactly the arguments of the tool's help, and runs the .tflite that a fake .dla contains with
LiteRT on the CPU, so that the numbers are real. The environment variable FAKE_NEURONRT chooses a fault.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import NoReturn

import numpy as np

HEADER = b"FAKE DLA\n"  # a fake .dla is this header and a .tflite
OPTIONS = {"-m": 1, "-a": 1, "-d": 0, "-c": 1, "-b": 1, "-i": 1, "-o": 1, "-v": 0}


def fail(text: str, status: int = 1) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(status)


def parsed(words: list[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {name: [] for name in OPTIONS}
    while words:
        name = words.pop(0)
        if name not in OPTIONS:
            fail(f"neuronrt: invalid option {name}")
        if OPTIONS[name] and not words:
            fail(f"neuronrt: option requires an argument {name}")
        found[name].append(words.pop(0) if OPTIONS[name] else "")
    return found


def main() -> None:
    fault = os.environ.get("FAKE_NEURONRT", "")
    options = parsed(sys.argv[1:])
    if len(options["-a"]) != 1 or not options["-i"]:
        fail("neuronrt: specify the compiled network and its inputs")
    device = (options["-m"] or ["null"])[-1]
    if device not in ("null", "cmodel", "hw"):
        fail(f"neuronrt: unknown device {device}")
    dla = Path(options["-a"][0]).read_bytes()
    if not dla.startswith(HEADER):
        fail("ERROR: Cannot load network: The DLA file is V9, mismatching runtime V8", 255)
    misbehave(fault)
    outputs = run(dla.removeprefix(HEADER), options["-i"], zeros=device == "null")
    if len(options["-o"]) != len(outputs):
        fail("neuronrt: the number of outputs differs")
    for number, (path, array) in enumerate(zip(options["-o"], outputs, strict=True)):
        data = array.tobytes()
        if fault == "missing" and number == 1:
            continue
        if fault == "truncated" and number == 1:
            data = data[:-4]
        if fault == "as-int8":
            data = data[: len(data) // 4]
        Path(path).write_bytes(data)
    if fault == "garbage":
        sys.stdout.buffer.write(b"\xff\xfe\x00\x1b[2J" * 100_000 + b"\n")
        sys.stdout.flush()
    print("Inference repeats for 1 times.\nTotal inference time = 12.5 ms (12.5 ms/inf)")


def misbehave(fault: str) -> None:
    if fault == "hangs":
        pid = os.fork()  # a child that would outlive its parent
        Path(os.environ["FAKE_PID_FILE"]).write_text(f"{pid or os.getpid()}")
        while True:
            time.sleep(0.05)
    if fault == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "denied":
        fail("ERROR: open /dev/apusys failed: Permission denied", 3)
    if fault == "unknown":
        fail("first line\nsomething went wrong", 7)


def run(model: bytes, inputs: list[str], *, zeros: bool) -> list[np.ndarray]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=model)
    interpreter.allocate_tensors()
    wanted = interpreter.get_input_details()
    if len(inputs) != len(wanted):
        fail("neuronrt: the number of inputs differs")
    for path, tensor in zip(inputs, wanted, strict=True):
        data = Path(path).read_bytes()
        if len(data) != np.prod(tensor["shape"]) * np.dtype(tensor["dtype"]).itemsize:
            fail(f"ERROR: the size of {path} is wrong")
        array = np.frombuffer(data, tensor["dtype"]).reshape(tensor["shape"])
        interpreter.set_tensor(tensor["index"], array)
    interpreter.invoke()
    found = [interpreter.get_tensor(one["index"]) for one in interpreter.get_output_details()]
    return [np.zeros_like(array) for array in found] if zeros else found


if __name__ == "__main__":
    main()
