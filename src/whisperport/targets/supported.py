"""The error about a program that a target's compiler would reject."""

from collections.abc import Sequence

from whisperport.errors import LoweringError
from whisperport.program.spec import Rejection, TargetSpec


def expect_supported(spec: TargetSpec, program: str, rejected: Sequence[Rejection]) -> None:
    """
    Args:
        spec: of the target.
        program: name of the program.
        rejected: what the target's check rejects in the program.

    Raises:
        LoweringError: `rejected` is not empty.
    """
    if rejected:
        raise LoweringError(
            f"`{spec.name}` does not support the program `{program}`",
            why=f"{rejected[0].node}: {rejected[0].reason} ({len(rejected)} rejected nodes)",
            hint=f"place it on the fallback target: `--placement {program}={spec.fallback}`"
            if spec.fallback
            else "",
        )
