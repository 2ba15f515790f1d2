"""The stages of the compiler: compile, simulate. Run by `toolchain/driver.py`.

This script needs the packages onnxruntime and onnxruntime-qnn, and does not import whisperport: a copy of
it is the `stages.py` of a work folder.

    step.onnx ─compile─► step.qnn, built.json
    step.qnn, simulated inputs ─simulate─► simulated outputs

Both libraries of the vendor are in onnxruntime-qnn: the compiler, and on x86-64 a simulator of the NPU.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROVIDER = "QNNExecutionProvider"
MAX_LOG = 4 * 2**20  # bytes of a log that are examined
# Errors of C++ and of the vendor's library, in the text of an exception of ONNX Runtime's own class.
NO_MEMORY = ("bad_alloc", "QNN_COMMON_ERROR_MEM_ALLOC")


class UnsupportedOperatorError(Exception):
    """The NPU does not support nodes of the program in this precision."""


class NotWrittenError(Exception):
    """The compiler reported success and wrote no file."""


def version() -> str:
    """Return the version of onnxruntime-qnn.

    Raises:
        ImportError: it is not installed.
    """
    import onnxruntime  # noqa: F401  # the provider is a plugin of it
    import onnxruntime_qnn

    return str(onnxruntime_qnn.__version__)


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this version of the SDK does not support the chip; "" if it does.

    Args:
        settings: `chip`, its name; `oldest`, the major and minor number of the oldest version that is
            known to compile for it.
    """
    import onnxruntime

    if not hasattr(onnxruntime, "register_execution_provider_library"):
        return (
            f"onnxruntime {onnxruntime.__version__} has no execution providers as plugins; 1.24 has"
        )
    oldest = list(settings["oldest"])
    found = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if found and found < oldest:
        return (
            f"{settings['chip']} needs onnxruntime-qnn {oldest[0]}.{oldest[1]} or later; "
            f"version {version} is installed"
        )
    return ""


def _compile(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Compile a program. ONNX Runtime writes the context binary when it creates a session."""
    own = program["settings"]
    partial = folder / ("partial." + own["artifact"])
    if partial.exists():
        partial.unlink()
    configuration = {
        "ep.context_enable": "1",
        "ep.context_file_path": str(partial),
        "ep.context_embed_mode": "1",
        "session.record_ep_graph_assignment_info": "1",
    }
    started = time.monotonic()
    try:
        session = _session(folder / own["model"], own["options"], configuration)
    except Exception as error:
        if any(one in str(error) for one in NO_MEMORY):
            raise MemoryError(str(error)) from error
        unsupported = _unsupported(folder / "compile.log")
        if unsupported:
            raise UnsupportedOperatorError(unsupported) from error
        raise
    nodes = {
        part.ep_name: len(part.get_nodes()) for part in session.get_provider_graph_assignment_info()
    }
    if not partial.is_file() or partial.stat().st_size == 0:
        raise NotWrittenError("it wrote no " + own["artifact"])
    built = {"nodes": nodes, "seconds": round(time.monotonic() - started, 1), "version": version()}
    (folder / "built.json").write_text(json.dumps(built, indent=1), encoding="utf-8")
    os.replace(str(partial), str(folder / own["artifact"]))


def _simulate(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Run the compiled program in the simulator, once per sample."""
    import numpy as np

    own = program["settings"]
    arrays = {
        name: np.load(folder / file, mmap_mode="r", allow_pickle=False)
        for name, file in own["simulated_inputs"].items()
    }
    session = _session(folder / own["artifact"], own["options"], {})
    samples = len(next(iter(arrays.values())))
    names = list(own["simulated_outputs"])
    results: list[list[Any]] = [[] for _ in names]
    started = time.monotonic()
    for sample in range(samples):
        print("sample", sample + 1, "of", samples, flush=True)
        feed = {name: np.ascontiguousarray(array[sample]) for name, array in arrays.items()}
        for made, output in zip(results, session.run(names, feed)):  # noqa: B905  # Python 3.9 has no `strict`
            made.append(np.asarray(output, np.float32))
    print("seconds of the simulation, which tell nothing about the chip:", end=" ")
    print(round(time.monotonic() - started, 1), flush=True)
    for file, made in zip(own["simulated_outputs"].values(), results):  # noqa: B905
        np.save(folder / file, np.stack(made), allow_pickle=False)


def _session(model: Path, options: Mapping[str, str], configuration: Mapping[str, str]) -> Any:
    """Create a session that runs on the NPU or its simulator only, never on the CPU."""
    import onnxruntime
    import onnxruntime_qnn

    registered = {device.ep_name for device in onnxruntime.get_ep_devices()}
    if PROVIDER not in registered:
        library = onnxruntime_qnn.get_library_path()
        onnxruntime.register_execution_provider_library(PROVIDER, library)
    devices = [one for one in onnxruntime.get_ep_devices() if one.ep_name == PROVIDER]
    chosen = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), **options}
    given = onnxruntime.SessionOptions()
    given.log_severity_level = 2
    given.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for name, value in configuration.items():
        given.add_session_config_entry(name, value)
    given.add_provider_for_devices(devices[:1], chosen)
    # Without `enable_fallback=0`, ONNX Runtime tries again on the CPU, and reports another error.
    return onnxruntime.InferenceSession(str(model), given, enable_fallback=0)


def _unsupported(log: Path) -> str:
    """Return the nodes that the provider rejected, from its lines in the log; "" if there are none.

    A line is "Unsupported nodes in QNN EP: { name: node_linear, type: MatMul }{ … }".
    """
    try:
        with open(str(log), "rb") as file:
            text = file.read(MAX_LOG).decode("utf-8", "replace")
    except OSError:
        return ""
    nodes = []
    for line in re.findall(r"Unsupported nodes in QNN EP: ([^\n]*)", text):
        nodes += re.findall(r"\{ name: ([^,{}]{1,100}), type: (\w{1,60}) \}", line)
    found = dict(nodes)
    if not found:
        return ""
    kinds = sorted(set(found.values()))
    return (
        f"{len(found)} nodes are not supported: {', '.join(kinds[:5])}, such as {next(iter(found))}"
    )


STAGES: Mapping[str, Callable[[Path, Mapping[str, Any], Mapping[str, Any]], None]] = {
    "compile": _compile,
    "simulate": _simulate,
}
