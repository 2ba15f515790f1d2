"""Options of the compiler, and the arguments of `neuronx-cc` that they become.

Sources: chips.COMPILER_GUIDE for every argument; `--model-type transformer`: release notes of torch-neuronx
in release 2.14, "improves performance and compilation time for all models".
"""

import shlex
from dataclasses import dataclass
from typing import Annotated, Literal

from whisperport.errors import UsageError
from whisperport.targets.target_options import Option
from whisperport.targets.vendors.aws_neuron.chips import CHIPS, Chip

# Arguments that would change the values which the comparison with the reference has verified, or the chip.
_OWN = {
    "--target": "chip",
    "--logical-nc-config": "lnc",
    "--lnc": "lnc",
    "-lnc": "lnc",
    "--optlevel": "optlevel",
    "-O": "optlevel",
    "--model-type": "model-type",
}
_STAGE = ("--logfile", "--output", "--framework")  # the stage or the tracer sets them


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileOptions:
    """Options of `neuronx-cc`."""

    chip: Annotated[
        Literal["inf2", "trn1", "trn2", "trn3"],
        Option("Chip to compile for: Inferentia2, Trainium, Trainium2 or Trainium3"),
    ] = "inf2"
    lnc: Annotated[
        Literal[1, 2] | None,
        Option(
            "Physical cores of a logical core [default: 2 on trn2 and trn3, 1 on inf2 and trn1]"
        ),
    ] = None
    optlevel: Annotated[
        Literal[1, 2, 3],
        Option("Compile effort: 1 compiles fastest, 3 may give a faster program"),
    ] = 2
    model_type: Annotated[
        Literal["transformer", "generic"], Option("Kind of model that the compiler optimizes for")
    ] = "transformer"
    flags: Annotated[
        str,
        Option('Further arguments of neuronx-cc, in quotes, such as "--verbose info"'),
    ] = ""

    def chosen_chip(self) -> Chip:
        """Return the chip."""
        return CHIPS[self.chip]

    def chosen_lnc(self) -> int:
        """Return the number of physical cores of a logical core.

        Raises:
            UsageError: the chip cannot combine so many cores.
        """
        chip = self.chosen_chip()
        lnc = chip.lncs[0] if self.lnc is None else self.lnc
        if lnc not in chip.lncs:
            able = ", ".join(
                candidate.name for candidate in CHIPS.values() if lnc in candidate.lncs
            )
            raise UsageError(
                f"`{chip.name}` cannot combine {lnc} physical cores into one logical core",
                why=f"each core of {chip.title} ({chip.core}) is a logical core",
                hint=f"remove the option `aws-neuron.lnc`, or choose a chip that can: {able}",
            )
        return lnc


def arguments_of(options: CompileOptions) -> list[str]:
    """Return the arguments of `neuronx-cc`.

    `--auto-cast none` is given although it is the default: another default of a later release would change
    the precision that was verified.

    Raises:
        UsageError: the chip does not have this size of a logical core; or `flags` cannot be split into
            arguments, or sets what another option sets.
    """
    chip, lnc = options.chosen_chip(), options.chosen_lnc()
    arguments = ["--target", chip.compiler_target, "--model-type", options.model_type]
    arguments += ["--auto-cast", "none", "--optlevel", str(options.optlevel)]
    if chip.has_lnc:
        arguments += ["--logical-nc-config", str(lnc)]
    return arguments + _further(options.flags)


def _further(flags: str) -> list[str]:
    try:
        split = shlex.split(flags)
    except ValueError as error:
        raise UsageError(
            f"the option `aws-neuron.flags` cannot be `{flags[:80]}`",
            why=str(error),
            hint="write the arguments as in a shell, with quotes in pairs",
        ) from None
    for argument in split:
        name = argument.partition("=")[0]
        option = _OWN.get(name) or ("optlevel" if name[:2] == "-O" else "")
        if option:
            raise UsageError(
                f"the option `aws-neuron.flags` cannot contain `{name}`",
                why="another option sets it, and the manifest would state a wrong value",
                hint=f"use `--option aws-neuron.{option}=VALUE`",
            )
        if name in _STAGE:
            raise UsageError(
                f"the option `aws-neuron.flags` cannot contain `{name}`",
                why="`whisperport compile` and the tracer set it, and read the file that it names",
                hint="remove it; the log of the stage is in the work folder",
            )
        if name in ("--auto-cast", "--auto-cast-type"):
            raise UsageError(
                f"the option `aws-neuron.flags` cannot contain `{name}`",
                why="the compiler would change the precision that was verified against the reference",
                hint="export with `--precision bf16` for bfloat16",
            )
    return split
