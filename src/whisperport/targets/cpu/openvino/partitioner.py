"""Ask OpenVINO's plugin for NPUs whether it takes a model, also on a machine without an NPU.

A part of the plugin, NPUW, rewrites a model and gives its parts to devices. With the CPU as the device, the
rewriting is the same, and no NPU, driver or compiler is needed. Where a compiler is, it is asked too: the
driver of an NPU has it, and OpenVINO's package for Windows, where it compiles without an NPU. How fast a
model is on an NPU is not known after it.

A decoder with states is rewritten for Whisper, as OpenVINO GenAI asks for it.

Source: openvino 2026.4.1, src/plugins/intel_npu/src/plugin/npuw; openvinotoolkit/openvino.genai@da1db86,
src/cpp/src/utils.cpp and whisper.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from whisperport.errors import ProgramError
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.targets.cpu.openvino.ir import is_ir
from whisperport.targets.cpu.openvino.profiler import with_weights
from whisperport.targets.cpu.openvino.runtime import (
    NO_NPU_PLUGIN,
    NPU,
    NPUW_ON_CPU,
    first_line,
    has_npu_plugin,
    shared_core,
)
from whisperport.targets.partitioner import Partition, Partitioner

# As GenAI: the axes of batch and time in a cache, the tokens of a prompt, and those after it.
WHISPER = {
    "NPU_USE_NPUW": "YES",
    "NPUW_LLM": "YES",
    "NPUW_WHISPER": "YES",
    "NPUW_LLM_BATCH_DIM": 0,
    "NPUW_LLM_SEQ_LEN_DIM": 2,
    "NPUW_LLM_MAX_PROMPT_LEN": 4,
    "NPUW_LLM_MIN_RESPONSE_LEN": 444,
}
TOKENS, AUDIO = "input_ids", "encoder_hidden_states"
SIZES = {TOKENS: (1, 4), AUDIO: (1, 1500)}  # of inputs of dynamic shape; all other axes have 1
NOT_COMPUTED = {"Constant", "Parameter", "Result"}
# NPUs of Core Ultra, series 1, 2 and 3, that a compiler without an NPU is asked for.
PLATFORM, PLATFORMS = "NPU_PLATFORM", ("3720", "4000", "5010")
# The compiler took 20 s for the largest program of the embedded model, 17 MB.
MEMORY_BYTES, MEMORY_PER_BYTE = 8 * 2**30, 12.0
SECONDS, SECONDS_PER_GB = 600.0, 3600.0
PACKAGE = "openvino"


@final
class NpuPartitioner(Partitioner):
    """OpenVINO's plugin for NPUs, which takes a model as a whole or rejects it."""

    title = "OpenVINO's NPU plugin"

    def recognizes(self, head: bytes) -> bool:
        return is_ir(head)

    def unavailable(self) -> str:
        try:
            core = shared_core()
        except ImportError:
            return f'{PACKAGE} is not installed; pip install "whisperport[openvino]" installs it'
        return "" if has_npu_plugin(core) else NO_NPU_PLUGIN

    def partition(self, path: Path) -> Partition:
        model, weights = with_weights([path])
        size = sum(file.stat().st_size for file in (model, weights) if file.is_file())
        limits = Limits(
            round(MEMORY_BYTES + MEMORY_PER_BYTE * size), SECONDS + SECONDS_PER_GB * size / 1e9
        )
        arguments = {"model": os.fspath(model), "weights": os.fspath(weights)}
        try:
            answer = run_limited(f"{__name__}:ask", arguments, limits)
        except StoppedError as error:
            raise ProgramError(
                f"{self.title} did not finish with {path.name}",
                why=f"{error}; the limits are {limits}",
                hint="export the model again",
            ) from error
        return Partition(
            total=answer["total"],
            partitions=1,
            declined=(),
            runtime={PACKAGE: answer["version"]},
            rejection=answer["rejection"],
            scope=answer["scope"],
        )


def ask(*, model: str, weights: str) -> dict[str, Any]:
    """Ask the plugin about a model. Runs in a child process with limits; returns JSON.

    Raises:
        ProgramError: OpenVINO cannot read the files.
    """
    from importlib.metadata import version

    core = shared_core()
    try:
        read = core.read_model(model, weights)
    except (RuntimeError, ValueError) as error:  # ValueError: a name is not UTF-8
        raise ProgramError(
            f"OpenVINO cannot read {Path(model).name}",
            why=first_line(error),
            hint="export the model again",
        ) from error
    computed = [node for node in read.get_ops() if node.get_type_name() not in NOT_COMPUTED]
    compilers = _compilers(core)
    return {
        "total": len(computed),
        "rejection": _rejection(core, read, compilers),
        "scope": f"it compiled them for {', '.join(compilers)}"
        if compilers
        else "it rewrote them and ran them on the CPU; no compiler for an NPU is on this machine",
        "version": version(PACKAGE),
    }


def _compilers(core: Any) -> dict[str, dict[str, str]]:
    """Return the NPUs for which this machine has a compiler: name -> OpenVINO's properties."""
    if any(device.split(".")[0] == NPU for device in core.available_devices):
        return {"the NPU of this machine": {}}
    offline = PLATFORM in core.get_property(NPU, "SUPPORTED_PROPERTIES")
    return {f"NPU {name}": {PLATFORM: name} for name in PLATFORMS} if offline else {}


def _rejection(core: Any, model: Any, compilers: dict[str, dict[str, str]]) -> str:
    """Let the plugin rewrite a model, run it on the CPU, and compile it; return why it cannot, or ""."""
    is_decoder = bool(model.get_sinks()) and any(AUDIO in p.get_names() for p in model.inputs)
    own: dict[str, Any] = WHISPER if is_decoder else {}
    npu = ""
    try:
        model.reshape(  # as GenAI; NPUW itself fixes the other axes of a decoder
            {
                port: _shape(port, fixed=not is_decoder or AUDIO in port.get_names())
                for port in model.inputs
            }
        )
        _run(core.compile_model(model, NPU, {**own, **NPUW_ON_CPU}), is_decoder=is_decoder)
        for npu, properties in compilers.items():  # noqa: B007  # it is in the message
            core.compile_model(model, NPU, {**own, **properties})
    except Exception as error:  # C++ exceptions of any class: `unordered_map::at` is an IndexError
        return f"{npu}: {first_line(error)}" if npu else first_line(error)
    return ""


def _run(compiled: Any, *, is_decoder: bool) -> None:
    """Run a model once; a decoder also on a token after the prompt."""
    sizes = [_shape(port, fixed=True) for port in compiled.inputs]
    request = compiled.create_infer_request()
    request.infer([*map(_zeros, compiled.inputs, sizes)])
    if is_decoder:
        names = [port.get_names() for port in compiled.inputs]
        sizes = [[1, 1] if TOKENS in own else s for s, own in zip(sizes, names, strict=True)]
        request.infer([*map(_zeros, compiled.inputs, sizes)])


def _shape(port: Any, *, fixed: bool) -> list[int]:
    """Return the sizes of an input; those of dynamic axes are -1 or, with `fixed`, a number."""
    known = next((SIZES[name] for name in port.get_names() if name in SIZES), ())
    sizes = [-1 if axis.is_dynamic else axis.get_length() for axis in port.get_partial_shape()]
    if not fixed:
        return sizes
    return [size if size > 0 else (*known, *[1] * len(sizes))[i] for i, size in enumerate(sizes)]


def _zeros(port: Any, sizes: Sequence[int]) -> Any:
    """Return zeros, or empty texts, of the input's dtype; numpy does not have each."""
    from openvino import Shape, Tensor, Type

    tensor = Tensor(port.get_element_type(), Shape(sizes))
    if tensor.get_element_type() != Type.string:
        tensor.data[...] = 0
    return tensor
