"""The loop of a search: export the candidates, best first, until one is verified and accepted."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from whisperport.build.export.exported import Attempt
from whisperport.errors import VerificationError
from whisperport.program.bundle import Bundle

C = TypeVar("C")
B = TypeVar("B", bound=Bundle)


def first_accepted(
    candidates: Callable[[list[tuple[C, VerificationError]]], Iterable[C]],
    export: Callable[[C], B],
    judge: Callable[[C, B], Attempt],
) -> tuple[B, tuple[Attempt, ...]]:
    """Export candidates until one of them is accepted.

    Args:
        candidates: called once with a list, to which each candidate that is not verified is added; yields
            the candidates, best first.
        export: exports a candidate, or returns the verified bundle of an earlier run.
        judge: returns the attempt, with the reason if a verified candidate is rejected.

    Returns:
        The bundle, and all attempts in order.

    Raises:
        VerificationError: no candidate is left.
    """
    attempts: list[Attempt] = []
    failures: list[tuple[C, VerificationError]] = []
    for candidate in candidates(failures):
        try:
            bundle = export(candidate)
        except VerificationError as error:
            failures.append((candidate, error))
            attempts.append(Attempt(name=str(candidate), rejected=f"not verified: {error.why}"))
            continue
        attempts.append(judge(candidate, bundle))
        if not attempts[-1].rejected:
            return bundle, tuple(attempts)
    raise failures[-1][1]
