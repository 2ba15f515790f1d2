"""The stages of the compiler: compile, simulate. Run by `toolchain/driver.py`.

This script needs the packages onnxruntime and onnxruntime-qnn, and does not import whisperport: a copy of
it is the `stages.py` of a work folder.

    step.onnx ─compile─► step.qnn, built.json
    step.qnn, simulated inputs ─simulate─► simulated outputs

Both libraries of the vendor are in onnxruntime-qnn: the compiler, and on x86-64 a simulator of the NPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PROVIDER = "QNNExecutionProvider"
# Errors of C++ and of the vendor's library, in the text of an exception of ONNX Runtime's own class.
NO_MEMORY = ("bad_alloc", "QNN_COMMON_ERROR_MEM_ALLOC")


class UnsupportedOperatorError(Exception):
    """The NPU does not support nodes of the program in this precision."""


def version() -> str:
    """Return the version of onnxruntime-qnn.

    Raises:
        ImportError: it is not installed.
    """
    import onnxruntime  # noqa: F401  # the provider is a plugin of it
    import onnxruntime_qnn

    return str(onnxruntime_qnn.__version__)


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this version of ONNX Runtime does not have the compiler; "" if it does."""
    import onnxruntime

    if hasattr(onnxruntime, "register_execution_provider_library"):
        return ""
    return f"onnxruntime {onnxruntime.__version__} has no execution providers as plugins; 1.24 has"


def _compile(job: Any, kit: Any) -> None:
    """Compile a program. ONNX Runtime writes the context binary when it creates a session."""
    folder, own = job.folder, job.settings
    with kit.written(folder / own["artifact"]) as partial:
        configuration = {
            "ep.context_enable": "1",
            "ep.context_file_path": str(partial),
            "ep.context_embed_mode": "1",
            "session.record_ep_graph_assignment_info": "1",
        }
        try:
            with kit.timed("compilation"):
                session = _session(folder / own["model"], own["options"], configuration)
        except Exception as error:
            if any(text in str(error) for text in NO_MEMORY):
                raise MemoryError(str(error)) from error
            unsupported = _unsupported(kit.read_log(folder / "compile.log"))
            if unsupported:
                raise UnsupportedOperatorError(unsupported) from error
            raise
        parts = session.get_provider_graph_assignment_info()
        nodes = {part.ep_name: len(part.get_nodes()) for part in parts}
        kit.write_json(folder / "built.json", {"nodes": nodes, "version": version()})


def _simulate(job: Any, kit: Any) -> None:
    """Run the compiled program in the simulator, once per sample."""
    own = job.settings
    session = _session(job.folder / own["artifact"], own["options"], {})
    names, files = list(own["simulated_outputs"]), list(own["simulated_outputs"].values())
    kit.run_samples(
        job.folder, own["simulated_inputs"], files, lambda feed: session.run(names, feed)
    )


def _session(model: Path, options: Mapping[str, str], configuration: Mapping[str, str]) -> Any:
    """Create a session that runs on the NPU or its simulator only, never on the CPU."""
    import onnxruntime
    import onnxruntime_qnn

    registered = {device.ep_name for device in onnxruntime.get_ep_devices()}
    if PROVIDER not in registered:
        library = onnxruntime_qnn.get_library_path()
        onnxruntime.register_execution_provider_library(PROVIDER, library)
    devices = [device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER]
    chosen = {"backend_path": onnxruntime_qnn.get_qnn_htp_path(), **options}
    session_options = onnxruntime.SessionOptions()
    session_options.log_severity_level = 2
    session_options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    for name, value in configuration.items():
        session_options.add_session_config_entry(name, value)
    session_options.add_provider_for_devices(devices[:1], chosen)
    # Without `enable_fallback=0`, ONNX Runtime tries again on the CPU, and reports another error.
    return onnxruntime.InferenceSession(str(model), session_options, enable_fallback=0)


def _unsupported(text: str) -> str:
    """Return the nodes that the provider rejected, from its lines in the log; "" if there are none.

    A line is "Unsupported nodes in QNN EP: { name: node_linear, type: MatMul }{ … }".
    """
    nodes = []
    for line in re.findall(r"Unsupported nodes in QNN EP: ([^\n]*)", text):
        nodes += re.findall(r"\{ name: ([^,{}]{1,100}), type: (\w{1,60}) \}", line)
    rejected = dict(nodes)
    if not rejected:
        return ""
    kinds = ", ".join(sorted(set(rejected.values()))[:5])
    return f"{len(rejected)} nodes are not supported: {kinds}, such as {next(iter(rejected))}"


STAGES: Mapping[str, Callable[[Any, Any], None]] = {"compile": _compile, "simulate": _simulate}
