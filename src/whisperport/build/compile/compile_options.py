"""Options of `compile`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from whisperport.errors import UsageError
from whisperport.system.option import Option
from whisperport.targets import TARGETS, RunOptions
from whisperport.targets.toolchain.interpreter import variable

COMPILERS = [target.compiler for target in TARGETS if target.compiler]
TOOLCHAINS = list(dict.fromkeys(compiler.toolchain for compiler in COMPILERS))


def _commands() -> str:
    """Return an example of every toolchain that is a program, for a help text."""
    commands = {compiler.toolchain: compiler.sdk for compiler in COMPILERS if compiler.is_command}
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
            exists=True,
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
            exists=True,
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
            is_output=True,
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
            is_output=True,
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

    @property
    def run(self) -> RunOptions:
        """How the lowered programs are run."""
        return RunOptions(threads=self.threads, trust=self.trust)

    def check_only(self, *allowed: str) -> None:
        """Check that no option is given that is for files only, or for bundles only.

        Args:
            allowed: those of these options that may be given.

        Raises:
            UsageError: another one is given.
        """
        for name in ("calibration", "inputs", "target", "precision", "out"):
            if name not in allowed and getattr(self, name):
                raise UsageError(
                    f"`--{name}` cannot be used here",
                    why="a bundle has `--calibration`, and states the targets and precisions of its "
                    "programs; a file has `--target`, `--precision`, `--inputs` and `--out`",
                    hint=f"omit `--{name}`",
                )
