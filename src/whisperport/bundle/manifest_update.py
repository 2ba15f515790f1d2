"""Rewrite the manifest of a bundle in place; no other file is touched."""

import os
from dataclasses import replace
from pathlib import Path

from whisperport.atomic import flush_folder, write_atomic
from whisperport.bundle.folder import Bundle, check_complete
from whisperport.bundle.manifest import MANIFEST, Manifest
from whisperport.bundle.staging import staging
from whisperport.errors import BundleError


def rewrite_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Put `manifest` in place of the bundle's own, completely or not at all, under the bundle's lock.

    Args:
        manifest: lists the same files as the bundle's own.

    Raises:
        BundleError: another process writes the bundle or has replaced it, or its folder cannot be
            written to.
    """
    if manifest.files != bundle.manifest.files:
        raise ValueError("the manifest lists other files than the bundle has")
    raw = manifest.to_bytes()
    manifest = Manifest.from_bytes(raw)  # what cannot be read back is not written
    check_complete(manifest)
    out = Path(os.path.realpath(bundle.folder))
    try:
        with staging(out) as folders:
            bundle.check_unchanged()  # from here on, nobody else replaces it
            os.mkdir(
                folders.partial
            )  # beside the bundle, so that a kill leaves nothing inside of it
            write_atomic(folders.partial / MANIFEST, raw)
            os.replace(folders.partial / MANIFEST, out / MANIFEST)
            flush_folder(out)
    except OSError as error:
        raise BundleError(
            f"cannot write the manifest of {bundle.folder}",
            why=str(error),
            hint="copy the bundle to a folder that you may write to",
        ) from error
    return replace(bundle, manifest=manifest, raw=raw)
