"""Hailo's Dataflow Compiler: calibration set, model script, stages, and check of compiled files."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, cast, final

from whisperport.errors import BundleError
from whisperport.program.dims import Dims
from whisperport.program.program_kind import ENCODER
from whisperport.program.spec import ProgramSpec
from whisperport.system.atomic import write_atomic
from whisperport.targets.compiler import (
    CalibrationNeed,
    CompilePlan,
    Compiler,
    CompileRequest,
    Explanation,
    Layout,
)
from whisperport.targets.onnx.ruined import Ruined, ruined
from whisperport.targets.toolchain import Stage
from whisperport.targets.vendors.hailo import stages
from whisperport.targets.vendors.hailo.chips import Chip
from whisperport.targets.vendors.hailo.hef import ARCHITECTURES, Hef, read_hef
from whisperport.targets.vendors.hailo.layout import (
    all_match,
    as_stream,
    result_outputs,
    stream_shape,
)
from whisperport.targets.vendors.hailo.model_script import (
    ScriptOptions,
    model_script,
    samples_needed,
)

# The compiler's exceptions, by class name, since the classes cannot be imported without the SDK.
# Sources: community.hailo.ai, hailo-ai/hailo_model_zoo#98, ankandrew/fast-plate-ocr#44.
_NOT_PARSED = (
    "`whisperport check BUNDLE/{target}/{program}.onnx --target {target}` lists the rejected nodes"
)
_FAILURES: Mapping[str, Explanation] = {
    "ParsingWithRecommendationException": ("cannot parse the whole graph", _NOT_PARSED),
    "UnsupportedModelError": ("does not support a node of the graph", _NOT_PARSED),
    "UnsupportedActivationLayerError": ("does not support an activation", _NOT_PARSED),
    "UnsupportedShuffleLayerError": ("does not support a reshape or transpose", _NOT_PARSED),
    "AllocatorScriptParserException": (
        "rejects a line of the model script",
        "leave the option `{target}.sixteen-bit` at its default: the published lists of layers are for "
        "Hailo's own graphs",
    ),
    "BackendAllocatorException": (
        "could not place the program on the chip",
        "export with a shorter `--window`; or use `--option {target}.compiler-optimization-level=max`, "
        "which takes longer",
    ),
    "BadInputsShape": (
        "rejects the shape of the calibration set",
        "delete the work folder and run the command again with `--calibration`",
    ),
    "MemoryError": (
        "ran out of memory",
        "use a machine with more memory, or `--option {target}.finetune=off`, which needs less memory",
    ),
}

# A line at the end of the optimization: "[info] 	whisper_tiny_encoder/output_layer1 SNR:	9.179 dB".
# Source: the log in the notebook of ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab.
_SNR = re.compile(r"(\S+) SNR:\s*(-?[0-9]+(?:\.[0-9]+)?) dB")


@final
class HailoCompiler(Compiler):
    """The Dataflow Compiler for one chip."""

    toolchain: ClassVar[str] = "hailo"
    sdk: ClassVar[str] = "hailo_sdk_client"
    source: ClassVar[str] = "x86-64 Linux, from Hailo's developer zone"
    script: ClassVar[Path] = Path(stages.__file__)
    options: ClassVar[type[Any]] = ScriptOptions
    suffix: ClassVar[str] = ".hef"
    runs: ClassVar[Literal["emulated"]] = "emulated"
    layout: ClassVar[Layout] = staticmethod(as_stream)
    failures: ClassVar[Mapping[str, Explanation]] = _FAILURES

    def __init__(self, chip: Chip) -> None:
        self._chip, self.target = chip, chip.name
        self.required = {"sdk": "", "oldest": list(chip.compiler), "same_major": True}
        self.title = f"Hailo's Dataflow Compiler {chip.compiler[0]}.x"

    def calibration(self, spec: ProgramSpec, dims: Dims, options: Any) -> CalibrationNeed:
        chosen = cast(ScriptOptions, options)
        return CalibrationNeed(
            samples=samples_needed(dims.n_audio_state, chosen, program=_recipe_name(spec)),
            names=_layers(spec),
            layout=as_stream,
            fewer_hint=f"`--option {self._chip.name}.finetune=off` needs fewer samples"
            if chosen.finetune
            else "",
        )

    def plan(self, request: CompileRequest) -> CompilePlan:
        name, chosen = request.spec.name, cast(ScriptOptions, request.options)
        script = model_script(
            self._chip.name,
            request.dims.n_audio_state,
            chosen,
            program=_recipe_name(request.spec),
            samples=request.samples,
        )
        write_atomic(request.folder / f"{name}.alls", script.encode("utf-8"))
        optimize = ("parsed.har", f"{name}.alls", *request.arrays)
        stages = [
            Stage("parse", (f"{name}.onnx",), ("parsed.har",)),
            Stage("optimize", optimize, ("optimized.har",)),
            Stage("compile", ("optimized.har",), (f"{name}.hef",)),
        ]
        sensitive = _ruined(request)
        settings: dict[str, Any] = {
            "calibration": _by_layer(request, request.arrays),
            "sixteen_bit": sensitive.names if sensitive else (),
        }
        _, outputs = self.emulated(request)
        if outputs:
            results = tuple(outputs.values())
            stages.insert(2, Stage("emulate", ("optimized.har", *request.emulation), results))
            settings["emulation"] = _by_layer(request, request.emulation)
            settings["emulated"] = results
        return CompilePlan(
            stages=tuple(stages),
            artifact=f"{name}.hef",
            settings=settings,
            keep=(f"{name}.alls",),
            notes=sensitive.notes("a16_w16") if sensitive else (),
        )

    def check(self, artifact: Path, spec: ProgramSpec) -> Mapping[str, Any]:
        hef = check_hef(artifact, self._chip, spec)
        return {"compiler": hef.compiler_version, "compiled_for": hef.chip}

    def accuracy(self, stage: str, log: str) -> Mapping[str, float]:
        ratios = _SNR.findall(log) if stage == "optimize" else []
        return {layer: float(decibels) for layer, decibels in ratios}


def _ruined(request: CompileRequest) -> Ruined | None:
    """Return the linears, convolutions and sums of an encoder that 8 bits ruin; None: not examined.

    Softmax and the matrix multiplications of attention are not examined: users report that the compiler
    ends with an error if these have 16 bits on Hailo-10H.
    """
    chosen = cast(ScriptOptions, request.options).sixteen_bit
    if chosen == "nothing" or request.spec.kind.name != ENCODER or not request.arrays:
        return None
    ((name, array),) = zip(
        (tensor.name for tensor in request.spec.inputs), request.arrays, strict=True
    )
    return ruined(
        request.folder / f"{request.spec.name}.onnx",
        {name: request.folder / array},
        kinds=("Add", "Conv"),
        layout=as_stream,
    )


def _recipe_name(spec: ProgramSpec) -> str:
    """Return the name of the program whose published recipe is used for this program."""
    return "uncached_decoder" if len(spec.inputs) > 1 else "encoder"


def _layers(spec: ProgramSpec) -> tuple[str, ...]:
    """Return the compiler's names of the input layers."""
    return tuple(f"input_layer{i}" for i in range(1, len(spec.inputs) + 1))


def _by_layer(request: CompileRequest, arrays: Sequence[str]) -> str | dict[str, str]:
    """Return the only file, or the compiler's name of each input layer -> its file."""
    if len(arrays) == 1:
        return arrays[0]
    network = request.spec.name.replace(".", "_")  # the compiler's name of the network
    layers = _layers(request.spec)
    return {f"{network}/{layer}": array for layer, array in zip(layers, arrays, strict=True)}


def check_hef(path: Path, chip: Chip, spec: ProgramSpec) -> Hef:
    """Compare a HEF with its chip and its program.

    Raises:
        BundleError: the HEF is damaged, is for another chip, or has other inputs or outputs.
    """
    hef = read_hef(path)
    check_chip(hef, chip, path)
    if len(hef.networks) != 1:
        raise BundleError(
            f"{path.name} contains {len(hef.networks)} networks; expected one",
            hint="give a HEF that was compiled from one program",
        )
    (network,) = hef.networks
    kept = result_outputs([stream.name for stream in network.outputs], len(spec.outputs))
    results = [stream for stream in network.outputs if stream.name in kept]
    # Files of older compilers describe streams in another way, which is not read; then there are none.
    sides = [("inputs", network.inputs, spec.inputs)] if network.inputs else []
    sides += [("outputs", tuple(results), spec.outputs)] if network.outputs else []
    for kind, streams, tensors in sides:
        shapes = [stream.shape for stream in streams]
        expected = [stream_shape(tensor.shape) for tensor in tensors]
        if not all_match(shapes, tensors):
            raise BundleError(
                f"{path.name} does not compute `{spec.name}`",
                why=f"its {kind} are {shapes}; expected {expected} (height, width, channels), where axes "
                "of length 1 may be in other places",
                hint="compile this bundle with `whisperport compile`, or give the HEF of the same "
                "checkpoint and window",
            )
    return hef


def check_chip(hef: Hef, chip: Chip, path: Path) -> None:
    """Check that a HEF was compiled for a chip.

    Raises:
        BundleError: the chip does not run this HEF.
    """
    if hef.architecture not in chip.architectures:
        runs = ", ".join(ARCHITECTURES.get(a, str(a)) for a in sorted(chip.architectures))
        raise BundleError(
            f"{path.name} is for another chip than `{chip.name}`",
            why=f"it was compiled for {hef.chip}; `{chip.name}` runs HEFs for {runs}",
            hint="export a bundle for your chip with `whisperport export CHECKPOINT --target …`, then "
            "compile it with `whisperport compile BUNDLE --calibration AUDIO_DIR`",
        )
