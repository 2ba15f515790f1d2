"""Put a complete bundle where another one may lie, without losing either.

Readers find the old bundle or the new one at every moment, where the system can swap two folders in
one step. If something of the user's has appeared at the output, it stays there, and the new bundle
is kept beside it.
"""

import logging
import os

from whisperport.atomic import flush_folder
from whisperport.bundle.ownership import check_replaceable
from whisperport.bundle.renaming import exchange, rename_if_free
from whisperport.bundle.staging import Staging, keep_visible
from whisperport.errors import BundleError

log = logging.getLogger(__name__)


def put_in_place(folders: Staging) -> None:
    """Move the bundle in `partial` to the output; one that was there lies in `discarded` then.

    Raises:
        BundleError: something else lies at the output, or it cannot be renamed. The output is as
            it was, and the new bundle lies in `NAME.new`.
    """
    out = folders.out
    try:
        # From now on it is complete, and may come to lie at the output.
        os.rename(folders.partial, folders.discarded)
        if not rename_if_free(folders.discarded, out):
            check_replaceable(out)
            if not _swapped(folders):
                _swap_in_two_steps(folders)
    except (BundleError, OSError) as error:
        new = folders.discarded if folders.discarded.exists() else folders.partial
        kept = keep_visible(new, out, "new")
        raise BundleError(
            f"the new bundle was not put at {out}",
            why=error.what if isinstance(error, BundleError) else str(error),
            hint=f"it is complete in {kept}: use it there, or move away what is at {out} "
            f"and rename {kept.name} to {out.name}",
        ) from error
    try:
        flush_folder(out.parent)
    except OSError as error:
        log.warning("%s was written, but a power cut may undo that: %s", out, error)


def _swapped(folders: Staging) -> bool:
    """Exchange the two in one step, unless the system cannot."""
    new, out = folders.discarded, folders.out
    if not exchange(new, out):
        return False
    try:
        check_replaceable(new, out)  # now the folder that lay at the output
    except (BundleError, OSError):
        exchange(new, out)
        raise
    return True


def _swap_in_two_steps(folders: Staging) -> None:
    """For a moment nothing lies at the output; whoever finds `replaced` puts it back."""
    out, old = folders.out, folders.replaced
    os.rename(out, old)
    try:
        check_replaceable(old, out)
        if not rename_if_free(folders.discarded, out):
            raise BundleError(f"something else has appeared at {out}")
    except (BundleError, OSError):
        if not rename_if_free(old, out):
            kept = keep_visible(old, out, "replaced")
            log.warning("the bundle that lay at %s is kept in %s", out, kept)
        raise
    os.rename(old, folders.discarded)
