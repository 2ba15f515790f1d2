"""The stage of the compiler: compile, with a run in its simulator. Run by `toolchain/driver.py`.

This script needs the package rknn-toolkit2 and does not import whisperport: a copy of it is the `stages.py`
of a work folder.

    step.onnx, calibration arrays, simulated inputs ─compile─► step.rknn, built.json, simulated outputs

The simulator runs only a program that the same process has built, and cannot load a compiled file: that is
why compiling and simulating are one stage.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any


class RejectedError(Exception):
    """The compiler returned an error code."""


def version() -> str:
    """Return the version of rknn-toolkit2.

    Raises:
        ImportError: it is not installed, or a package that it needs is missing.
    """
    from importlib import metadata

    import rknn.api  # noqa: F401

    return metadata.version("rknn-toolkit2")


def _compile(job: Any, kit: Any) -> None:
    """Build a program, export it, and run it in the simulator."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # progress bars fill the log
    own, log = job.settings, job.folder / "compile.log"
    from rknn.api import RKNN

    with contextlib.ExitStack() as stack:
        building = tempfile.TemporaryDirectory(prefix="building-", dir=job.folder)
        work = Path(stack.enter_context(building))
        stack.enter_context(kit.inside(work))
        with kit.written(job.folder / own["artifact"]) as partial:
            with kit.timed("compilation"):
                compiler = _built(RKNN, job, kit, work)
                exported = compiler.export_rknn(str(partial))
            _expect_success("export_rknn", exported, kit.read_log(log))
            built = {
                "version": version(),
                "errors": _errors(kit.read_log(log)),
                "disabled_rules": own["disable_rules"],
            }
            if own["simulated_outputs"]:
                _simulate(compiler, job, kit)
            compiler.release()
            kit.write_json(job.folder / "built.json", built)


def _configured(sdk: Any, job: Any, kit: Any) -> Any:
    own = job.settings
    quantized = {"quantized_dtype": own["quantized_dtype"]} if own["calibration"] else {}
    compiler = sdk(verbose=False)
    configured = compiler.config(
        target_platform=job.target["chip"],
        optimization_level=own["optimization"],
        disable_rules=own["disable_rules"],
        **quantized,
    )
    print("graph rules that are turned off:", ", ".join(own["disable_rules"]) or "none", flush=True)
    _expect_success("config", configured, kit.read_log(job.folder / "compile.log"))
    return compiler


def _built(sdk: Any, job: Any, kit: Any, work: Path) -> Any:
    """Load the program, and build it, quantized if there is a calibration set."""
    own, log = job.settings, job.folder / "compile.log"
    compiler = _configured(sdk, job, kit)
    loaded = compiler.load_onnx(model=str(job.folder / own["model"]))
    _expect_success("load_onnx", loaded, kit.read_log(log))
    arrays = [kit.load(job.folder / file) for file in own["calibration"]]
    dataset = _dataset(arrays, work) if arrays else None
    if own["in_float"] or own["keep"]:
        status = compiler.hybrid_quantization_step1(dataset=dataset)
        _expect_success("hybrid_quantization_step1", status, kit.read_log(log))
        compiler.release()
        return _built_hybrid(_configured(sdk, job, kit), job, kit, work)
    built = compiler.build(do_quantization=dataset is not None, dataset=dataset)
    _expect_success("build", built, kit.read_log(log))
    return compiler


def _built_hybrid(compiler: Any, job: Any, kit: Any, work: Path) -> Any:
    """Build what the first step wrote, with some operators in float16.

    It wrote the compiler's own graph, and a file that lists its tensors. An operator whose output this file
    names under `custom_quantize_layers` has another type. The second step loads the graph itself.
    """
    files = [work / f"{job.name}.{kind}" for kind in ("model", "data", "quantization.cfg")]
    text = files[-1].read_text(encoding="utf-8")
    files[-1].write_text(in_float16(text, job.settings["in_float"]), encoding="utf-8")
    for index, kept in enumerate(job.settings["keep"]):
        files[index] = files[index].replace(job.folder / kept)
    model, data, listed = map(str, files)
    built = compiler.hybrid_quantization_step2(
        model_input=model, data_input=data, model_quantization_cfg=listed
    )
    _expect_success("hybrid_quantization_step2", built, kit.read_log(job.folder / "compile.log"))
    return compiler


def in_float16(listed: str, names: Sequence[str]) -> str:
    """Return the compiler's list of tensors with the operators of some names in float16.

    The compiler names a tensor of its graph after an operator or tensor of the ONNX file, with a suffix
    such as "-rs", "#1" or "_mm_tp_sw".
    """
    ours = re.compile(f"(?:{'|'.join(map(re.escape, names))})(?:$|[-#]|_(?![0-9]))")
    tensors = re.findall("^    (?=\\S)(.+):$", listed, re.MULTILINE)
    chosen = [tensor for tensor in tensors if names and ours.match(tensor.strip("'\""))]
    print("in float16:", ", ".join(chosen), flush=True)
    layers = "".join(f"\n    {tensor}: float16" for tensor in chosen)
    return listed.replace(
        "custom_quantize_layers: {}", f"custom_quantize_layers:{layers or ' {}'}", 1
    )


def _dataset(arrays: Sequence[Any], work: Path) -> str:
    """Write every sample to files of its own. Returns the list of them: one line per sample."""
    import numpy as np

    lines = []
    for sample in range(min(map(len, arrays))):
        paths = [work / f"sample-{sample}-{index}.npy" for index in range(len(arrays))]
        for path, array in zip(paths, arrays):  # noqa: B905  # Python 3.9 has no `strict`
            np.save(path, array[sample], allow_pickle=False)
        lines.append(" ".join(map(str, paths)))
    listed = work / "samples.txt"
    listed.write_text("\n".join(lines), encoding="utf-8")
    return str(listed)


def _simulate(compiler: Any, job: Any, kit: Any) -> None:
    """Run the program that was built in the simulator, once per sample, and write its outputs."""
    if compiler.init_runtime() != 0:  # no `target`: the simulator
        raise kit.SimulationError("init_runtime failed")

    def run(inputs: Mapping[str, Any]) -> Any:
        formats = ["nchw"] * len(inputs)
        return compiler.inference(inputs=list(inputs.values()), data_format=formats)

    own = job.settings
    kit.run_samples(job.folder, own["simulated_inputs"], own["simulated_outputs"], run)


def _expect_success(call: str, code: Any, log: str) -> None:
    """Raise an error with the compiler's own message if a call failed.

    Raises:
        RejectedError: the code is not 0.
    """
    if code != 0:
        raise RejectedError(f"{call} returned {code}: {(_errors(log) or ['see the log'])[-1]}")


def _errors(log: str) -> list[str]:
    """Return the lines of a log that the compiler marks as errors: "E build: …"."""
    lines = re.findall(r"^E ([^\n]+)$", log, re.MULTILINE)
    return [re.sub(r"\[[0-9:.]+\] ", "", line).strip()[:200] for line in lines]


STAGES: Mapping[str, Callable[[Any, Any], None]] = {"compile": _compile}
