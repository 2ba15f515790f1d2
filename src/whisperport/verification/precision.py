"""Determine the precision in which each program of a bundle runs."""

from collections.abc import Iterable, Mapping

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import with_target
from whisperport.verification.tolerances import GATES


def precisions(bundle: Bundle, run: RunOptions | None = None) -> dict[str, str]:
    """Return the precision in which each program runs; see `run_precision`.

    Args:
        bundle: the bundle.
        run: the run options, which may choose emulation.

    Returns:
        Name of the program -> precision, such as "fp32" or "w8a8".

    Raises:
        BundleError: there are no limits for one of the precisions.
    """
    options = run.options if run else {}
    by_program = {e.spec.name: run_precision(e, options) for e in bundle.manifest.programs}
    unknown = [precision for precision in by_program.values() if precision not in GATES]
    if unknown:
        raise BundleError(
            f"cannot verify {bundle.folder}: a program has the precision `{unknown[0]}`",
            why=f"this version of whisperport has limits for {', '.join(GATES)}",
            hint="pip install --upgrade whisperport",
        )
    return by_program


def run_precision(entry: ProgramEntry, options: Mapping[str, str]) -> str:
    """Return the precision in which a program runs. Emulation runs in the precision of the lowered file.

    Args:
        entry: the program.
        options: run options, "TARGET.NAME" -> value, which may choose emulation.
    """
    if is_emulated(entry.target, options):
        return get_target(entry.target).emulated_precision(entry.precision)
    return entry.precision


def coarsest(precisions: Iterable[str]) -> str:
    """Return the precision with the widest limits."""
    return min(precisions, key=lambda precision: GATES[precision].min_sqnr_db)


def is_emulated(target: str, options: Mapping[str, str]) -> bool:
    """Return whether run options, "TARGET.NAME" -> value, choose emulation of a target on the CPU."""
    emulation = with_target(get_target(target).spec.runs.emulation, target)
    return bool(emulation) and emulation.items() <= options.items()
