"""Errors for the failures of vendors' compilers: what happened, why, and what to do next."""

from pathlib import Path

from whisperport.errors import LoweringError, MissingPackageError
from whisperport.targets import Target
from whisperport.targets.compiler import Compiler
from whisperport.toolchain import Failure, Installed, variable


def compile_error(
    target: Target,
    failure: Failure,
    work: Path,
    installed: Installed | None,
    *,
    prepared: bool = True,
) -> LoweringError:
    """Return the error for a failure of a target's compiler.

    Args:
        target: has a compiler.
        failure: what the toolchain reported.
        work: work folder of the target.
        installed: the SDK; None: it is not on this machine.
        prepared: the work folder holds what another machine needs.
    """
    compiler, name = target.compiler, target.spec.name
    assert compiler is not None
    path = "/path/to/sdk" if compiler.is_command else "/path/to/python"
    option = f"`--toolchain {compiler.toolchain}={path}`"
    if failure.kind == "missing" and not prepared:
        return MissingPackageError(
            f"{compiler.title} cannot be used",
            why=failure.message,
            hint=f"name {_owner(compiler)} that has it with {option} or the variable "
            f"{variable(compiler.toolchain)}; without both, `whisperport compile` prepares a folder for a "
            "machine that has it",
        )
    if failure.kind == "missing":
        return MissingPackageError(
            f"not compiled yet: {compiler.title} is not installed here",
            why=failure.message,
            hint=f"if {_owner(compiler)} on this machine has it, name it with {option} or the variable "
            f"{variable(compiler.toolchain)}. If not, copy {work}, which holds all inputs, to a "
            f"machine that has it ({compiler.source}), run `{_on_another_machine(compiler)}` there, copy "
            "the folder back, and repeat this command",
        )
    if failure.kind == "unsuitable":
        return LoweringError(
            f"the installed compiler does not support `{name}`",
            why=failure.message,
            hint=f"install {compiler.title} separately, and name {_owner(compiler)} with it: {option}",
        )
    log = f"the complete log is in {failure.log}" if failure.log else ""
    where = f"{failure.program}, {failure.stage}: " if failure.stage else ""
    if failure.kind == "died":
        return LoweringError(
            f"{compiler.title} ended without a result",
            why=where + failure.message,
            hint="; ".join(filter(None, (failure.hint, log)))
            or f"start `{installed and installed.path}` directly to see what fails",
        )
    happened, hint = compiler.explain(failure)
    return LoweringError(
        f"{compiler.title} {happened}",
        why=f"{where}{failure.classes[0]}: {failure.message}",
        hint="; ".join(filter(None, (hint, log))),
    )


def missing_sdk(compiler: Compiler) -> Failure:
    """Return the failure of a compiler whose SDK is not on this machine."""
    message = f"No module named '{compiler.sdk}'"
    if compiler.is_command:
        message = f"the program {compiler.sdk} is not in PATH"
    return Failure(kind="missing", message=message)


def _on_another_machine(compiler: Compiler) -> str:
    setting = f"{compiler.variables[0]}=/path/to/sdk " if compiler.variables else ""
    return f"{setting}python compile.py"


def _owner(compiler: Compiler) -> str:
    """Return what a toolchain's option names, in words."""
    return "a folder" if compiler.is_command else "another Python interpreter"
