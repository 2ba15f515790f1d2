"""The jobs that `fuzz.kill` kills: an export, an import of a compiled encoder, and a compilation.

The compilation runs a dummy of the vendor's compiler. All run in forks of a process that has imported all
modules, so a kill takes about one second. Slow parts that write no file of whisperport are done once:
tracing, and lowering to ONNX, whose files the export then copies into its bundle. All other parts are the
real `export`, `import` and `compile`. The model has a few kilobytes of random weights.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.writing import writing_bundle
from whisperport.system.progress import begin_stage, reporting

LAST_STAGES = ("moving the bundle to its folder", "writing the bundle", "writing nano")
TARGETS = ("onnxruntime", "hailo8l")


@dataclass(frozen=True)
class Job:
    """A kind of job, and the bundle that is at its output before the job."""

    name: str
    old: Path
    run: Callable[[Path], object]  # called with the output


def make_jobs(folder: Path) -> list[Job]:
    """Prepare all jobs in a folder; this takes several seconds."""
    import torch

    torch.set_num_threads(1)
    checkpoint = _checkpoint()
    _trace_once()
    made = {target: _export(checkpoint, target, folder / target) for target in TARGETS}
    _lower_by_copying(made)
    old = folder / "old"
    with writing_bundle(old) as writer:
        _copy(made["onnxruntime"], writer.folder)
        writer.commit(replace(made["onnxruntime"].manifest, name="old"))
    return [
        Job("export", old, lambda out: _export(checkpoint, "onnxruntime", out)),
        Job("import", old, _import(checkpoint, made["hailo8l"], folder / "encoder.hef")),
        Job("compile", made["hailo8l"].folder, _compilation(made["hailo8l"], folder / "sdk")),
    ]


def _checkpoint() -> Any:
    import torch
    from tests.micro import DIMS, GENERATION, tokenizer_json

    from whisperport.model.checkpoint.checkpoint import Checkpoint, Source
    from whisperport.model.network.whisper import Whisper

    dims = replace(DIMS, n_audio_ctx=50)  # 1 s, the shortest window that may be exported
    torch.manual_seed(0)
    model = Whisper(dims).eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_().mul_(parameter[0].numel() ** -0.5)
    model.decoder.token_embedding.weight.mul_(4)  # distinct logits
    return Checkpoint(
        dims=dims,
        generation=GENERATION,
        weights=dict(model.state_dict()),
        tokenizer_json=tokenizer_json(),
        source=Source(kind="openai", name="micro", sha256={}),
    )


def _trace_once() -> None:
    from whisperport.model.trace import variants as programs

    real, traced = programs.whisper_programs, {}

    def whisper_programs(parts: Any, names: Any, variants: Any) -> Any:
        asked = (names, *sorted(variants.items()))
        if asked not in traced:
            kept = replace(parts, model=deepcopy(parts.model))  # an export unloads its model
            traced[asked] = tuple(real(kept, names, variants))
        return iter(traced[asked])

    programs.whisper_programs = whisper_programs  # type: ignore[assignment]


def _export(checkpoint: Any, target: str, out: Path) -> Bundle:
    from whisperport.build.export.export import export
    from whisperport.build.export.export_options import ExportOptions
    from whisperport.targets import RunOptions

    return export(checkpoint, target, out, ExportOptions(run=RunOptions(threads=1)))


def _lower_by_copying(made: dict[str, Bundle]) -> None:
    from whisperport.targets.cpu.onnxruntime import OnnxRuntime

    bundle = made["onnxruntime"]

    def lower(self: Any, programs: Sequence[Any], folder: Path) -> list[ProgramEntry]:
        for name in bundle.manifest.files:
            if "/" in name:
                begin_stage(f"copying {name}")
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(bundle.path(name), folder / name)
        asked = {program.name for program in programs}
        return [entry for entry in bundle.manifest.programs if entry.spec.name in asked]

    OnnxRuntime.lower = lower  # type: ignore[method-assign]


def _compiled_encoder(bundle: Bundle) -> bytes:
    from tests.targets.vendors.hailo.hef_file import encoder_hef

    dims = bundle.manifest.dims
    return encoder_hef(3, 2 * dims.n_audio_ctx, dims.n_mels, dims.n_audio_state)


def _import(checkpoint: Any, bundle: Bundle, hef: Path) -> Callable[[Path], object]:
    """Return a function that imports an encoder, which a vendor published."""
    from whisperport.build.compile.importing import ImportOptions, import_artifact
    from whisperport.targets import RunOptions

    hef.write_bytes(_compiled_encoder(bundle))
    options = ImportOptions(run=RunOptions(threads=1))
    return lambda out: import_artifact(hef, checkpoint, out, options)


def _compilation(bundle: Bundle, sdk: Path) -> Callable[[Path], object]:
    """Return a function that compiles a copy of a bundle with the dummy compiler's interpreter."""
    from tests.targets.vendors.hailo.fake_sdk import InstalledSdk

    from whisperport.build.compile.compile import CompileOptions, compile

    options = CompileOptions(
        force=True,
        options={"hailo8l.finetune": "off"},
        toolchains={
            "hailo": str(InstalledSdk(sdk, {"encoder": _compiled_encoder(bundle)}).interpreter)
        },
        threads=1,
    )
    return lambda out: compile(out, options)


def _copy(bundle: Bundle, folder: Path) -> None:
    for name in bundle.manifest.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.path(name), folder / name)


def fork(run: Callable[[], object]) -> tuple[int, int]:
    """Run a function in a fork; return its process id and a descriptor to read its stages from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = 1
    try:
        os.close(reading)
        silent = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silent, 1)

        def progress(stage: str) -> None:
            os.write(writing, f"{stage}\n".encode())

        with reporting(progress):
            run()
        code = 0
    except BaseException as error:
        os.write(2, f"{error}\n".encode())
    finally:
        os._exit(code)
