"""Move a complete bundle to its output path, where an older bundle may be, without losing either.

If the system can exchange two folders in one step, readers always find the old or the new bundle. If
files of the user have appeared at the output, they are not touched, and the new bundle is kept beside it.
"""

import logging
import os

from whisperport.errors import BundleError
from whisperport.program.bundle.ownership import check_replaceable
from whisperport.program.bundle.staging import Staging, keep_visible
from whisperport.system.atomic import exchange, flush_rename, rename_if_free

log = logging.getLogger(__name__)


def put_in_place(folders: Staging) -> None:
    """Move the bundle in `partial` to the output; move an older bundle from there to `discarded`.

    Raises:
        BundleError: the folder at the output is not a bundle, or a rename failed. The output has not
            changed, and the new bundle is in `NAME.new`.
    """
    out = folders.out
    try:
        # The bundle is complete and may be moved to the output. `partial` may be deleted at any time.
        os.rename(folders.partial, folders.discarded)
        if not rename_if_free(folders.discarded, out):
            check_replaceable(out)
            if not _swapped(folders):
                _swap_in_two_steps(folders)
    except (BundleError, OSError) as error:
        new = folders.discarded if folders.discarded.exists() else folders.partial
        kept = keep_visible(new, out, "new")
        raise BundleError(
            f"the new bundle was not moved to {out}",
            why=error.what if isinstance(error, BundleError) else str(error),
            hint=f"the bundle is complete in {kept}: use it there, or move {out} to another path "
            f"and rename {kept.name} to {out.name}",
        ) from error
    flush_rename(out)


def _swapped(folders: Staging) -> bool:
    """Exchange the new and the old bundle in one step; return False if the system cannot do that."""
    new, out = folders.discarded, folders.out
    if not exchange(new, out):
        return False
    try:
        check_replaceable(new, out)  # after the exchange, this is the folder that was at the output
    except (BundleError, OSError):
        exchange(new, out)
        raise
    return True


def _swap_in_two_steps(folders: Staging) -> None:
    """Replace the old bundle with two renames. Between them there is nothing at the output.

    If this process is killed then, the next writer moves `replaced` back to the output.
    """
    out, old = folders.out, folders.replaced
    os.rename(out, old)
    try:
        check_replaceable(old, out)
        if not rename_if_free(folders.discarded, out):
            raise BundleError(f"another file or folder has appeared at {out}")
    except (BundleError, OSError):
        if not rename_if_free(old, out):
            kept = keep_visible(old, out, "replaced")
            log.warning("the bundle that was at %s is kept in %s", out, kept)
        raise
    os.rename(old, folders.discarded)
