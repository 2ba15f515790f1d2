"""An opened bundle: every file it lists exists, lies inside of it, and is as it was written."""

import hashlib
import os
import stat
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whisperport.bundle.manifest import (
    EMBEDDING,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    POSITIONS,
    REFERENCE,
    REQUIRED,
    TOKENIZER,
    Manifest,
)
from whisperport.errors import BundleError

DAMAGED = "copy the bundle again, or write it again with `whisperport export`"
HASH_CHUNK = 2**20  # bytes held while hashing, whatever the size of the file

# A reference may be compressed, and silence compresses well. What it unpacks to is bounded all the
# same: eight times its size on disk, or 64 MiB where that is more.
MAX_EXPANSION = 8
MIN_EXPANDED_BYTES = 64 * 2**20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk, checked. Open one with `Bundle.open`."""

    folder: Path
    manifest: Manifest

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check_hashes: bool = True) -> "Bundle":
        """Read and check the bundle in folder `path`.

        Files that the manifest does not list are ignored: a note is no danger, since nothing
        but a listed file is ever read.

        Args:
            check_hashes: False compares sizes only, for a fast start on a slow disk.

        Raises:
            BundleError: `path` is no bundle or a newer one; a file is missing, is of another size
                or hash, is no regular file, or leads out of the folder.
        """
        folder = Path(path)
        bundle = cls(folder, read_manifest(folder))
        check_complete(bundle.manifest)
        for relative, entry in bundle.manifest.files.items():
            file = bundle.path(relative)
            size = file.stat().st_size
            if size != entry.bytes:
                raise BundleError(
                    f"{relative} in bundle {folder} is damaged",
                    why=f"it has {size} bytes, and {entry.bytes} were written",
                    hint=DAMAGED,
                )
            if check_hashes and _reading(file, file_sha256) != entry.sha256:
                raise BundleError(
                    f"{relative} in bundle {folder} is damaged",
                    why="its bytes differ from those that were written (SHA-256)",
                    hint=DAMAGED,
                )
        return bundle

    def path(self, relative: str) -> Path:
        """Where a listed file lies.

        Raises:
            BundleError: it is not listed or not there, is no regular file, or leads out.
        """
        if relative not in self.manifest.files:
            raise BundleError(f"bundle {self.folder} does not list a file {relative!r}")
        return _regular_file(self.folder, relative)

    def embedding(self) -> NDArray[np.floating[Any]]:
        """Token embedding, (V, d) float16 or float32, mapped from disk and read-only.

        Raises:
            BundleError: the file is no such array.
        """
        return self._table(EMBEDDING, (self.manifest.dims.n_vocab, self.manifest.dims.n_text_state))

    def positions(self) -> NDArray[np.floating[Any]]:
        """Positional embedding, (N, d) float16 or float32, mapped from disk and read-only.

        Raises:
            BundleError: the file is no such array.
        """
        return self._table(
            POSITIONS, (self.manifest.dims.n_text_ctx, self.manifest.dims.n_text_state)
        )

    def reference(self) -> dict[str, NDArray[Any]]:
        """Reference inputs and outputs by name.

        Raises:
            BundleError: the file is no archive of plain arrays, or unpacks to far more than its
                size.
        """
        limit = max(MIN_EXPANDED_BYTES, MAX_EXPANSION * self.manifest.files[REFERENCE].bytes)
        return _reading(self.path(REFERENCE), lambda file: _arrays(file, limit))

    def tokenizer_json(self) -> bytes:
        """The tokenizer's file, as bytes."""
        return _reading(self.path(TOKENIZER), Path.read_bytes)

    def _table(self, relative: str, shape: tuple[int, int]) -> NDArray[np.floating[Any]]:
        file = self.path(relative)
        table: NDArray[Any] = _reading(file, lambda f: np.lib.format.open_memmap(f, mode="r"))
        if table.shape != shape or table.dtype not in (np.dtype("f4"), np.dtype("f2")):
            raise BundleError(
                f"{relative} in bundle {self.folder} does not fit its model",
                why=f"expected {shape} float16 or float32, got {table.shape} {table.dtype}",
                hint=DAMAGED,
            )
        return table


def read_manifest(folder: Path) -> Manifest:
    """Raises BundleError if `folder` holds no manifest, or none that this version reads."""
    return Manifest.from_bytes(read_manifest_bytes(folder))


def read_manifest_bytes(folder: Path) -> bytes:
    """Raises BundleError if `folder` holds no manifest, or one above 16 MiB."""
    if not _is_folder(folder):
        raise BundleError(
            f"there is no bundle at {folder}",
            why="it is not a folder" if os.path.lexists(folder) else "it does not exist",
            hint="`whisperport export CHECKPOINT --out DIR` writes one",
        )
    if _is_absent(folder / MANIFEST):
        is_checkpoint = os.path.lexists(folder / "config.json")
        raise BundleError(
            f"{folder} is not a bundle",
            why=f"it has no {MANIFEST}" + (", but a checkpoint's config.json" * is_checkpoint),
            hint=f"`whisperport export {folder if is_checkpoint else 'CHECKPOINT'} --out DIR` writes one",
        )
    file = _regular_file(folder, MANIFEST)

    def read(file: Path) -> bytes:
        with file.open("rb") as stream:
            return stream.read(MAX_MANIFEST_BYTES + 1)

    raw = _reading(file, read)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{file} is too large for a manifest",
            why=f"it has more than {MAX_MANIFEST_BYTES} bytes",
        )
    return raw


def check_complete(manifest: Manifest) -> None:
    """Raises BundleError if the manifest does not list a file that its programs or readers need."""
    wanted = dict.fromkeys(REQUIRED, "every bundle has one")
    for entry in manifest.programs:
        wanted |= dict.fromkeys(entry.files, f"program {entry.spec.name!r} needs it")
    if not manifest.programs:
        raise BundleError(f"bundle {manifest.name!r} holds no program")
    for relative, why in wanted.items():
        if relative not in manifest.files:
            raise BundleError(f"bundle {manifest.name!r} lacks the file {relative}", why=why)


def file_sha256(file: Path) -> str:
    """SHA-256 of a file of any size, in hexadecimal."""
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # no permission; a NUL in the name
        return False


def _is_absent(file: Path) -> bool:
    """Not there; what is there and cannot be read is another matter."""
    try:
        os.lstat(file)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _regular_file(folder: Path, relative: str) -> Path:
    """A link may stay inside; a pipe would block the reader for ever."""
    file = folder / relative
    try:
        real = file.resolve(strict=True)
        inside = real.is_relative_to(folder.resolve(strict=True))
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle
        raise BundleError(
            f"{relative} in bundle {folder} cannot be read", why=str(error), hint=DAMAGED
        ) from error
    if not inside or not regular:
        raise BundleError(
            f"{relative} in bundle {folder} is refused",
            why="it is not a regular file"
            if inside
            else "it is a link that leads out of the bundle",
        )
    return real


def _reading(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except BundleError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise nine kinds on a hostile file
        raise BundleError(
            f"{file.name} in bundle {file.parent} cannot be read",
            why=f"{type(error).__name__}: {error}"[:300],
            hint=DAMAGED,
        ) from error


def _arrays(file: Path, limit: int) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(file) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > limit:
        raise BundleError(
            f"{file.name} in bundle {file.parent} is refused",
            why=f"it unpacks to {total} bytes, and {limit} is the most for a file of its size",
        )
    with np.load(file, allow_pickle=False) as archive:
        arrays: Mapping[str, Any] = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BundleError(f"{file.name} in bundle {file.parent}: {name!r} is not an array")
    return dict(arrays)
