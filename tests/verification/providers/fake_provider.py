"""A FAKE execution provider for tests: ONNX Runtime's CPU provider under another name, with faults.

The child process of a verification imports it by name. A provider option PROGRAM=FAULT chooses the fault.
"""

import os
import signal
import time
from typing import Any

import numpy as np

from whisperport.program.execution_providers import CPU
from whisperport.system.progress import begin_stage
from whisperport.verification.providers.provider_session import CREATING, run_session


def run(**arguments: Any) -> dict[str, Any]:
    """The job; see `whisperport.verification.providers.provider_session.run_session`."""
    provider = arguments["provider"]
    if provider["name"] == CPU:
        return run_session(**arguments)
    fault = provider["options"].get(arguments["program"], "")
    if fault == "crashes":
        with open(arguments["log"], "a", encoding="utf-8") as log:
            log.write("one\ntwo\nthree\nMDLA: Cannot support Float32 input\n")
        begin_stage(CREATING)
        os.kill(os.getpid(), signal.SIGSEGV)
    if fault == "hangs":
        begin_stage(CREATING)
        time.sleep(60)
    if fault == "raises":
        import onnxruntime

        def raises(*_: Any, **__: Any) -> None:
            raise RuntimeError("unordered_map::at\nsecond line")

        onnxruntime.InferenceSession = raises
    found = run_session(**{**arguments, "provider": {"name": CPU}})
    if "failed" in found or fault == "declines":
        return found
    found["ms"] *= 0.01 if fault != "slow" else 100
    for node in found["nodes"]:
        if fault != "partly" or node["operator"] != "MatMul":
            node["provider"] = provider["name"]
    if fault == "unstable":
        found["deviation"] = 0.5
    if fault in ("wrong", "nan", "almost"):
        _change(arguments["outputs"], fault)
    return found


def _change(path: str, fault: str) -> None:
    with np.load(path) as stored:
        arrays = {name: stored[name] for name in stored.files}
    first = next(iter(arrays))
    noise = np.random.default_rng(0).standard_normal(arrays[first].shape)
    scale = {"wrong": 0.5, "almost": 1e-3, "nan": np.nan}[fault] * arrays[first].std()
    arrays[first] = (arrays[first] + scale * noise).astype(arrays[first].dtype)
    np.savez(path, **arrays)
