"""Compile programs with vendors' compilers: those of a bundle, or a lowered program in a file of its own.

If a vendor's SDK can run the quantized or compiled program on the CPU, one stage runs it, and its outputs
are compared with those of the lowered program.

    BUNDLE            unchanged until everything is compiled, then replaced
    FILE              unchanged; `STEM-TARGET` beside it gets the result when everything is compiled
    OUTPUT.compile    work folder, see `compiling.py`
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from whisperport.bundle import Bundle
from whisperport.calibration import CalibrationOptions
from whisperport.compilation.bundle_source import BundleSource
from whisperport.compilation.compiling import compile_groups, groups_of
from whisperport.compilation.file_source import FileRequest, FileSource
from whisperport.compilation.source import Compiled, Source
from whisperport.compilation.work_folder import work_folder
from whisperport.errors import UsageError
from whisperport.system.option import Option
from whisperport.system.progress import Progress
from whisperport.targets import TARGETS, RunOptions
from whisperport.toolchain.interpreter import variable

COMPILERS = [target.compiler for target in TARGETS if target.compiler]
TOOLCHAINS = list(dict.fromkeys(compiler.toolchain for compiler in COMPILERS))


def _commands() -> str:
    """Return an example of every toolchain that is a program, for a help text."""
    commands = {one.toolchain: one.sdk for one in COMPILERS if one.is_command}
    named = ", ".join(f"{toolchain}=sdk ({command})" for toolchain, command in commands.items())
    return f", for example {named}" if named else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of `compile`.

    Args:
        options: compiler options of targets, "TARGET.NAME" -> value. Default: none.
        threads: CPU threads per runtime, 1 to 1024, for the programs that compute a calibration set.
            Default: None, the runtime chooses.
        trust: load programs of unknown origin without a trial run in a child process with limits on memory
            and time. Default: False.
    """

    calibration: Annotated[
        Path | None,
        Option(
            "Of a bundle: folder of audio files that resemble what the device will record, or an .npy file "
            "of log-mel spectrograms (clips, mel bins, frames of one window). The compiler derives "
            "quantization ranges from them",
            metavar="PATH",
            default="those of the previous run, else the few that come with whisperport",
        ),
    ] = None
    inputs: Annotated[
        Path | None,
        Option(
            "Of a FILE: folder of samples of its inputs. A sample is a subfolder with an array NAME.npy "
            "for every input, or an .npz file, or, for an encoder, an audio file. The first samples "
            "calibrate it, and it is compared with FILE on the last",
            metavar="PATH",
        ),
    ] = None
    force: Annotated[
        bool,
        Option(
            "Compile even if the calibration audio is too short, silent or narrow-band, the inputs are too "
            "few, or the model is larger than the target's limit"
        ),
    ] = False
    target: Annotated[
        str, Option("Of a FILE: target to compile it for", metavar="NAME", flag="--target -t")
    ] = ""
    precision: Annotated[
        str,
        Option(
            "Of a FILE: precision of the program, such as fp16 or w8a8; `export` chooses those of a bundle",
            metavar="NAME",
            default="the target's",
        ),
    ] = ""
    out: Annotated[
        Path | None,
        Option(
            "Of a FILE: folder for the result, which must not exist",
            metavar="DIR",
            flag="--out -o",
            default="FILE-TARGET",
        ),
    ] = None
    work: Annotated[
        Path | None,
        Option(
            "Folder for the results of finished stages. The next run uses them again; a stage runs again "
            "if its inputs changed, such as the calibration audio or an option",
            metavar="DIR",
            default="BUNDLE.compile, or that of --out",
        ),
    ] = None
    allow_unverified: Annotated[
        bool,
        Option(
            "Write the compiled programs even if their outputs in the vendor's simulator disagree with the "
            "reference. Their evidence keeps the failed comparisons"
        ),
    ] = False
    options: Mapping[str, str] = field(default_factory=dict)
    toolchains: Annotated[
        Mapping[str, str],
        Option(
            "Where a vendor's SDK is: the Python interpreter in which it is installed, for example "
            f"{TOOLCHAINS[0]}=sdk/bin/python, or the folder of an SDK that is a program{_commands()}. "
            f"NAME is one of: {', '.join(TOOLCHAINS)}. May be repeated",
            metavar="NAME=PATH",
            flag="--toolchain",
            default=f"the environment variables {', '.join(map(variable, TOOLCHAINS))}, else this "
            "interpreter and PATH",
        ),
    ] = field(default_factory=dict)
    threads: int | None = None
    trust: bool = False


def compile(
    path: str | os.PathLike[str],
    options: CompileOptions | None = None,
    *,
    progress: Progress = lambda _: None,
) -> Compiled:
    """Compile every program of a bundle whose target has a vendor's compiler, or one lowered program.

    Args:
        path: folder of a bundle, which is replaced when everything is compiled; or a file that `lower`
            wrote, or another third-party program of the format that the target's compiler reads.
        options: see `CompileOptions`. Default: None, all defaults.
        progress: called with the name of each stage, a few words.

    Returns:
        The compiled programs, and the folder that was written.

    Raises:
        BundleError: the bundle is damaged or cannot be replaced, or a compiled file does not fit it.
        UsageError: no program of the bundle needs a compiler, or an option or interpreter does not exist,
            or is for a bundle or a file only.
        AudioError: the audio files or inputs are missing, too few, or unsuitable for calibration.
        ProgramError: the file, or a sample of its inputs, is damaged or does not fit.
        MissingPackageError: an SDK is not installed. The work folder holds everything that the SDK needs.
        LoweringError: the compiler does not support this target or failed, or the model is too large.
        VerificationError: a program disagrees with its reference in the vendor's simulator, or in emulation
            on the CPU where there is no simulator. Nothing was written.
    """
    options = options or CompileOptions()
    source = _source(Path(path), options)
    work = options.work or source.out.with_name(f"{source.out.resolve().name}.compile")
    groups = groups_of(source, options.options, options.toolchains, work)
    samples = any(group.needs_samples(source.dims) for group in groups)
    source.check(samples=samples, force=options.force)
    for group in groups:
        group.check_sdk()
    if work.resolve().is_relative_to(source.out.resolve()):
        raise UsageError(
            f"the work folder {work} cannot be inside {source.out}",
            why="the complete folder is written in one step",
            hint="omit `--work` to use a folder beside it",
        )
    calibration = CalibrationOptions(source=options.calibration, force=options.force)
    with work_folder(work):
        source.quantize(work, progress)
        return compile_groups(
            source, groups, calibration, progress, allow_unverified=options.allow_unverified
        )


def _source(path: Path, options: CompileOptions) -> Source:
    """Return a bundle if the path is one, or a file if the user names its target."""
    run = RunOptions(threads=options.threads, trust=options.trust)
    for_files = {
        "target": options.target,
        "precision": options.precision,
        "inputs": options.inputs,
        "out": options.out,
    }
    if path.is_dir() or not (path.is_file() or options.target):
        if given := [name for name, value in for_files.items() if value]:
            raise _misplaced(given[0], f"{path} is no file; a bundle states it for its programs")
        return BundleSource(Bundle.open(path), run)
    if not options.target:
        names = ", ".join(one.spec.name for one in TARGETS if one.compiler)
        raise UsageError(
            f"{path} is one program, which can be compiled for several targets",
            why="`--target` is missing",
            hint=f"name one with `--target`: {names}",
        )
    if options.calibration:
        raise _misplaced("calibration", f"{path} is a file, which is calibrated with `--inputs`")
    request = FileRequest(
        file=path,
        target=options.target,
        precision=options.precision,
        inputs=options.inputs,
        out=options.out,
    )
    return FileSource(request, run, force=options.force)


def _misplaced(option: str, why: str) -> UsageError:
    return UsageError(f"`--{option}` cannot be used here", why=why, hint=f"omit `--{option}`")
