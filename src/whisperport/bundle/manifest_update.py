"""Replace the manifest of a bundle on disk; no other file changes."""

import os
from dataclasses import replace
from pathlib import Path

from whisperport.bundle.folder import Bundle, check_complete
from whisperport.bundle.manifest import MANIFEST, Manifest
from whisperport.bundle.staging import staging
from whisperport.errors import BundleError
from whisperport.system.atomic import flush_folder, write_atomic


def rewrite_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Replace the bundle's manifest, completely or not at all. Holds the lock of the bundle meanwhile.

    Args:
        manifest: the new manifest, which must list the same files as the old one.

    Raises:
        BundleError: another process writes the bundle or has replaced it, or the folder is not writable.
    """
    if manifest.files != bundle.manifest.files:
        raise ValueError("the new manifest does not list the same files as the old one")
    raw = manifest.to_bytes()
    manifest = Manifest.from_bytes(raw)  # checks that the manifest can be read again
    check_complete(manifest)
    out = Path(os.path.realpath(bundle.folder))
    try:
        with staging(out) as folders:
            bundle.check_unchanged()  # no other process replaces it while the lock is held
            os.mkdir(folders.partial)  # outside of the bundle, so that a kill leaves no file in it
            write_atomic(folders.partial / MANIFEST, raw)
            os.replace(folders.partial / MANIFEST, out / MANIFEST)
            flush_folder(out)
    except OSError as error:
        raise BundleError(
            f"cannot write the manifest of {bundle.folder}",
            why=str(error),
            hint="copy the bundle to a folder that you have permission to write to",
        ) from error
    return replace(bundle, manifest=manifest, raw=raw)
