"""At which precision the programs of a bundle compute, as they are run."""

from collections.abc import Iterable, Mapping

from whisperport.bundle import Bundle
from whisperport.errors import BundleError
from whisperport.targets import RunOptions, get_target
from whisperport.targets.options import with_target
from whisperport.verification.tolerances import GATES


def precisions(bundle: Bundle, run: RunOptions | None = None) -> dict[str, str]:
    """Program -> the precision that it computes in as it is run; emulation is in float32.

    Raises:
        BundleError: there are no limits for one of them.
    """
    options = run.options if run else {}
    found = {}
    for entry in bundle.manifest.programs:
        spec = get_target(entry.target).spec
        emulated = is_emulated(entry.target, options)
        own = entry.precision
        if emulated:
            own = "fp32"
        elif own == "fp32" and own not in spec.precisions:  # as format version 1 stored it
            own = spec.precisions[0]
        found[entry.spec.name] = own
    unknown = [precision for precision in found.values() if precision not in GATES]
    if unknown:
        raise BundleError(
            f"cannot verify {bundle.folder}: its precision is `{unknown[0]}`",
            why=f"limits are known for {', '.join(GATES)}",
            hint="pip install --upgrade whisperport",
        )
    return found


def coarsest(found: Iterable[str]) -> str:
    """The precision of which least is asked."""
    return min(found, key=lambda precision: GATES[precision].min_sqnr_db)


def is_emulated(target: str, options: Mapping[str, str]) -> bool:
    """Whether run options, `TARGET.NAME` -> value, emulate a target's programs on the CPU."""
    emulation = with_target(get_target(target).spec.emulation, target)
    return bool(emulation) and emulation.items() <= options.items()
