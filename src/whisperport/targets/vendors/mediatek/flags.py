"""Options of MediaTek's compiler, `ncc-tflite`, and the flags that they become.

Sources of the flags: the help of ncc-tflite 6.x in MediaTek's aiot-dev-guide; for NeuroPilot 8, the scripts
of superLin006/MTK_model_zoo@942c4fb. The defaults are those of a transformer that compiled for MT8371
(sense-voice/SenseVoice_workspace/compile/compile_sensevoice_fp.sh): -O3 --relax-fp32 --opt-accuracy
--opt-footprint --fc-to-conv, with the sizes of the board's NPU.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from whisperport.errors import UsageError
from whisperport.targets.target_options import Option, check_ranges
from whisperport.targets.vendors.mediatek.chips import Chip


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options for compiling, such as `--option genio720.opt-accuracy=off`.

    Raises:
        UsageError: a number is out of its range.
    """

    arch: Annotated[
        str | None,
        Option(
            "Architectures to compile for (--arch), such as mdla3.0, separated by commas; the default is "
            "that of the board"
        ),
    ] = None
    opt: Annotated[
        int, Option("Optimization level (-O): 0 compiles fastest, 3 runs fastest", low=0, high=3)
    ] = 3
    relax_fp32: Annotated[
        bool,
        Option(
            "Compute float32 operators in float16 (--relax-fp32): the NPU has no float32; inputs and "
            "outputs stay float32"
        ),
    ] = True
    opt_accuracy: Annotated[
        bool | None,
        Option(
            "Prefer accuracy to speed (--opt-accuracy): 16-bit integers become float16, and the bias of a "
            "convolution is added separately; the default is on, and off with opt-aggressive"
        ),
    ] = None
    opt_aggressive: Annotated[
        bool,
        Option("Prefer speed to accuracy (--opt-aggressive)"),
    ] = False
    opt_footprint: Annotated[
        bool, Option("Prefer a small memory footprint to speed (--opt-footprint)")
    ] = True
    opt_bandwidth: Annotated[bool, Option("Prefer few memory transfers to speed (--opt-bw)")] = (
        False
    )
    fc_to_conv: Annotated[
        bool,
        Option("Compile linears (FULLY_CONNECTED) as 1x1 convolutions (--fc-to-conv)"),
    ] = True
    reshape_to_4d: Annotated[
        bool, Option("Compile tensors of fewer axes with 4 axes (--reshape-to-4d)")
    ] = False
    disallow_bridge: Annotated[
        bool,
        Option(
            "Do not convert data on another engine than the NPU (--disallow-bridge), for boards without "
            "that engine"
        ),
    ] = False
    suppress_output: Annotated[
        bool,
        Option(
            "Leave the outputs as the NPU writes them (--suppress-output): int8, channels first, and the "
            "width padded to a multiple of 16; whisperport cannot run such a file"
        ),
    ] = False
    l1_size_kb: Annotated[
        int | None,
        Option(
            "Size of the NPU's first memory in KiB (--l1-size-kb); the default is that of the board, or "
            "the compiler's own",
            low=1,
        ),
    ] = None
    num_mdla: Annotated[
        int | None,
        Option(
            "Number of NPU cores (--num-mdla); the default is that of the board", low=1, high=16
        ),
    ] = None
    flags: Annotated[
        str,
        Option(
            'Further flags for ncc-tflite, such as "--gno=LTS --mlo"; those that have an option of their '
            "own are rejected"
        ),
    ] = ""

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags for one board, and what the user should know about them."""

    flags: tuple[str, ...]
    notes: tuple[str, ...]


# Flag -> field of `CompileOptions`: whether the flag is given.
_SWITCHES: Mapping[str, str] = {
    "--relax-fp32": "relax_fp32",
    "--opt-accuracy": "opt_accuracy",
    "--opt-aggressive": "opt_aggressive",
    "--opt-footprint": "opt_footprint",
    "--opt-bw": "opt_bandwidth",
    "--fc-to-conv": "fc_to_conv",
    "--reshape-to-4d": "reshape_to_4d",
    "--disallow-bridge": "disallow_bridge",
    "--suppress-output": "suppress_output",
}
_VALUES: Mapping[str, str] = {
    "--arch": "arch",
    "-O": "opt",
    "--opt": "opt",
    "--l1-size-kb": "l1_size_kb",
    "--num-mdla": "num_mdla",
}
# Flags that whisperport itself gives, or that would make the compiler do something else.
_OWN = (
    *("-d", "--dla-file", "-o", "-i", "-e", "--exec", "-h", "--help", "--version", "-v"),
    *("--check-target-only", "--show-exec-plan", "--show-io-info", "--show-memory-summary"),
    *("-s", "--show-tflite", "--show-builtin-ops", "--show-mtkext-ops"),
    *("--platform", "--platform-config"),
)

_ARCH = re.compile(r"[A-Za-z][\w.]*(,[A-Za-z][\w.]*)*", re.ASCII)


def flags_of(options: CompileOptions, chip: Chip) -> Flags:
    """Return the flags that the options become for a board.

    Raises:
        UsageError: a flag in `flags` has an option of its own, or `arch` is no name.
    """
    if options.arch is not None and not _ARCH.fullmatch(options.arch):
        raise UsageError(
            f"the option `{chip.name}.arch` cannot be `{options.arch[:40]}`",
            hint="expected names of architectures, such as mdla3.0 or mdla5.3,edma3.6; "
            "`ncc-tflite --arch=?` lists them",
        )
    extra = _further(options.flags, chip.name)
    l1_kb, cores = options.l1_size_kb or chip.npu.l1_kb, options.num_mdla or chip.npu.cores
    flags = [f"--arch={options.arch or chip.npu.arch}", f"-O{options.opt}"]
    flags += [f"--l1-size-kb={l1_kb}"] if l1_kb else []
    flags += [f"--num-mdla={cores}"] if chip.npu.engine == "mdla" else []
    accuracy = not options.opt_aggressive if options.opt_accuracy is None else options.opt_accuracy
    chosen = {
        **{name: getattr(options, name) for name in _SWITCHES.values()},
        "opt_accuracy": accuracy,
    }
    flags += [flag for flag, field in _SWITCHES.items() if chosen[field]]
    return Flags((*flags, *extra), tuple(_notes(options, extra, chip)))


def _notes(options: CompileOptions, extra: Sequence[str], chip: Chip) -> Sequence[str]:
    notes = []
    if options.suppress_output or "--suppress-output" in extra:
        notes.append(
            "--suppress-output leaves the outputs as the NPU writes them: int8, channels before height and "
            "width, and the width padded to a multiple of 16; `whisperport diagnose BUNDLE "
            "FILE` recognizes this layout, and the compiled file does not run with whisperport"
        )
    if "--suppress-input" in extra:
        notes.append(
            "--suppress-input expects inputs as the NPU reads them: channels before height and width, and "
            "the width padded to a multiple of 16; the compiled file does not run with whisperport"
        )
    if options.opt_aggressive:
        notes.append(
            "--opt-aggressive may lose accuracy: compare the outputs of the board with the reference, "
            "with `whisperport diagnose BUNDLE FILE`"
        )
    if not options.relax_fp32:
        notes.append(
            "without --relax-fp32, operators in float32 do not run on the NPU, which has no float32"
        )
    return notes


def _further(text: str, target: str) -> tuple[str, ...]:
    """Split and check further flags.

    A flag that is not known is passed on: newer SDKs have more flags, and the compiler names one that it
    does not have.

    Raises:
        UsageError: a flag has an option of its own, or is whisperport's own.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(
            f"the option `{target}.flags` cannot be read", why=str(error), hint="close every quote"
        ) from error
    if words and not words[0].startswith("-"):
        raise UsageError(
            f"the option `{target}.flags` begins with `{words[0][:40]}`, which is not a flag",
            hint="flags begin with a dash, such as --gno=LTS",
        )
    for word in words:
        if word.startswith("-"):
            _check_flag(word.partition("=")[0], target)
    return tuple(words)


def _check_flag(flag: str, target: str) -> None:
    shown = f"the flag `{flag[:40]}` of the option `{target}.flags`"
    if flag in _SWITCHES or flag in _VALUES or flag.startswith("-O"):
        field = {**_SWITCHES, **_VALUES}.get(flag, "opt").replace("_", "-")
        raise UsageError(
            f"{shown} has an option of its own",
            why="the compiler would receive it twice",
            hint=f"use `--option {target}.{field}=…`",
        )
    if flag in _OWN:
        raise UsageError(
            f"{shown} is not for the user",
            why="whisperport gives this flag itself, or the compiler would do something else with it",
            hint="remove it",
        )
