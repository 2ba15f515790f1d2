"""At which precision the programs of a bundle compute, as they are run."""

from collections.abc import Iterable, Mapping

from whisperport.bundle import Bundle
from whisperport.errors import BundleError
from whisperport.targets import RunOptions, get_target
from whisperport.verification.tolerances import GATES


def precisions(bundle: Bundle, run: RunOptions | None = None) -> dict[str, str]:
    """Program -> its precision: its chip's own, else the bundle's; a stand-in has the bundle's.

    Raises:
        BundleError: there are no limits for one of them.
    """
    options = run.options if run else {}
    found = {}
    for entry in bundle.manifest.programs:
        spec = get_target(entry.target).spec
        own = "" if _stands_in(spec.stand_in, options) else spec.precision
        found[entry.spec.name] = own or bundle.manifest.precision
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


def _stands_in(stand_in: Mapping[str, str], options: Mapping[str, str]) -> bool:
    return any(options.get(name) == value for name, value in stand_in.items())
