"""Open a bundle and check it: the manifest is consistent, and every listed file is unchanged."""

import hashlib
import math
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError, WhisperportError, out_of_memory
from whisperport.program.bundle.consistency import check_consistent
from whisperport.program.bundle.listed_files import DAMAGED, PERMISSION, ListedFiles, regular_file
from whisperport.program.bundle.manifest import (
    EMBEDDING,
    MANIFEST,
    MAX_MANIFEST_BYTES,
    POSITIONS,
    REFERENCE,
    REQUIRED,
    SILENCE,
    TOKENIZER,
    Manifest,
)
from whisperport.system.system_error import unopenable

ATTEMPTS = 5  # attempts to read a bundle that another process replaces in the meantime
LONGEST_HEADER = 10_000  # characters of an .npy header; numpy has the same limit
TABLE_DTYPES = (np.dtype("<f4"), np.dtype("<f2"))

# The reference file may be compressed, and silence compresses well. The size of its arrays is limited to
# eight times its size on disk, or to 64 MiB if that is more.
MAX_EXPANSION = 8
MIN_EXPANDED_BYTES = 64 * 2**20

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bundle:
    """A bundle on disk that was checked. Use `Bundle.open` to open one."""

    folder: Path
    manifest: Manifest
    # Bytes of the manifest file; None for a bundle that this process is writing or has written.
    raw: bytes | None = field(default=None, compare=False, repr=False)
    # Whether the hash of every file was checked.
    hashed: bool = field(default=True, compare=False, repr=False)

    @classmethod
    def open(cls, path: str | os.PathLike[str], *, check_hashes: bool = True) -> "Bundle":
        """Read and check the bundle in folder `path`.

        Only files that the manifest lists are read; other files are ignored. If another process replaces
        the bundle in the meantime, the new bundle is read.

        Args:
            check_hashes: False compares only the sizes of files, for a fast start on a slow disk.

        Raises:
            BundleError: `path` is not a bundle, or has a newer format; its manifest is inconsistent; or a
                file is missing, has another size or hash, is not a regular file, or is a link that leads
                out of the folder.
        """
        folder = Path(path)
        if reason := unopenable(folder):
            raise BundleError(f"cannot open the bundle {folder}", **reason)
        for _ in range(ATTEMPTS):
            raw = read_manifest_bytes(folder)
            try:
                bundle = cls(folder, Manifest.from_bytes(raw), raw, check_hashes)
                bundle._check_files(check_hashes)
            except BundleError:
                if _manifest_now(folder) == raw:
                    raise
            else:
                if _manifest_now(folder) == raw:
                    return bundle
        raise _replaced(folder)

    def _check_files(self, check_hashes: bool) -> None:
        check_complete(self.manifest)
        for relative, entry in self.manifest.files.items():
            file = self.path(relative)
            size = file.stat().st_size
            if size != entry.bytes:
                raise BundleError(
                    f"{relative} in bundle {self.folder} is damaged",
                    why=f"it has {size} bytes; the manifest lists {entry.bytes}",
                    hint=DAMAGED,
                )
            if check_hashes and _read_file(file, file_sha256) != entry.sha256:
                raise BundleError(
                    f"{relative} in bundle {self.folder} is damaged",
                    why="its SHA-256 differs from the one in the manifest",
                    hint=DAMAGED,
                )
        for relative, shape in self._tables().items():
            self._check_table(relative, shape)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Check after a `with` block that reads files that the bundle was not replaced in the meantime.

        If another process replaces the bundle, the block may read some old and some new files.

        Raises:
            BundleError: the bundle was replaced. This error replaces an error that the block raised.
        """
        try:
            yield
        except WhisperportError:
            self.check_unchanged()
            raise
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Check that the folder still contains the bundle that was opened.

        Raises:
            BundleError: another process replaced the bundle.
        """
        if self.raw is not None and _manifest_now(self.folder) != self.raw:
            raise _replaced(self.folder)

    def path(self, relative: str) -> Path:
        """Return the path of a listed file.

        Raises:
            BundleError: the file is not listed, does not exist, is not a regular file, or is a link that
                leads out of the folder.
        """
        return ListedFiles(self.folder, frozenset(self.manifest.files)).path(relative)

    def embedding(self) -> NDArray[np.floating[Any]]:
        """Return the token embedding, (V, d) float16 or float32, memory-mapped and read-only.

        Raises:
            BundleError: the file does not contain such an array.
        """
        return self._table(EMBEDDING)

    def positions(self) -> NDArray[np.floating[Any]]:
        """Return the decoder's positions, (N, d) float16 or float32, memory-mapped and read-only.

        Raises:
            BundleError: the file does not contain such an array.
        """
        return self._table(POSITIONS)

    def silence(self) -> NDArray[np.floating[Any]] | None:
        """Return the encoder's output for a window of silence, (T, d); None if the bundle does not have it.

        Raises:
            BundleError: the file does not contain such an array.
        """
        return self._table(SILENCE) if SILENCE in self.manifest.files else None

    def reference(self) -> dict[str, NDArray[Any]]:
        """Return the reference inputs and outputs, by name.

        Raises:
            BundleError: the file is not an archive of arrays, or its arrays are much larger than the file.
        """
        limit = max(MIN_EXPANDED_BYTES, MAX_EXPANSION * self.manifest.files[REFERENCE].bytes)
        return _read_file(self.path(REFERENCE), lambda file: _arrays(file, limit))

    def tokenizer_json(self) -> bytes:
        """Return the bytes of the tokenizer's file."""
        return _read_file(self.path(TOKENIZER), Path.read_bytes)

    def _tables(self) -> dict[str, tuple[int, int]]:
        """The shape of each table."""
        dims = self.manifest.dims
        tables = {
            EMBEDDING: (dims.n_vocab, dims.n_text_state),
            POSITIONS: (dims.n_text_ctx, dims.n_text_state),
            SILENCE: (dims.n_audio_ctx, dims.n_audio_state),
        }
        return {name: shape for name, shape in tables.items() if name in self.manifest.files}

    def _table(self, relative: str) -> NDArray[np.floating[Any]]:
        shape = self._tables()[relative]
        dtype, start = self._check_table(relative, shape)
        return _read_file(
            self.path(relative), lambda file: np.memmap(file, dtype, "r", start, shape, order="C")
        )

    def _check_table(self, relative: str, shape: tuple[int, int]) -> tuple[np.dtype[Any], int]:
        """Check the header and size of a table; return its dtype and the offset of its data in bytes."""
        file = self.path(relative)
        stored_shape, fortran, dtype, start = _read_file(file, _npy_header)
        if stored_shape != shape or fortran or dtype not in TABLE_DTYPES:
            raise BundleError(
                f"{relative} in bundle {self.folder} does not match the sizes of the model",
                why=f"expected {shape} float16 or float32, got {str(stored_shape)[:80]} {dtype}",
                hint=DAMAGED,
            )
        expected, size = start + dtype.itemsize * math.prod(shape), file.stat().st_size
        if size != expected:
            raise BundleError(
                f"{relative} in bundle {self.folder} is damaged",
                why=f"it has {size} bytes; expected {expected} for {shape} {dtype}",
                hint=DAMAGED,
            )
        return dtype, start


def read_manifest_bytes(folder: Path, name: str = MANIFEST) -> bytes:
    """Read the manifest file of a bundle, or the file `name` in its place.

    Raises:
        BundleError: `folder` has no manifest, or its manifest is larger than 16 MiB.
    """
    if not _is_folder(folder):
        raise BundleError(
            f"there is no bundle at {folder}",
            why="it is not a folder" if os.path.lexists(folder) else "it does not exist",
            hint="`whisperport export CHECKPOINT --target NAME --out DIR` writes a bundle",
        )
    if _is_absent(folder / name):
        is_checkpoint = os.path.lexists(folder / "config.json")
        raise BundleError(
            f"{folder} is not a bundle",
            why=f"it has no {name}" + (", but the config.json of a checkpoint" * is_checkpoint),
            hint=f"`whisperport export {folder if is_checkpoint else 'CHECKPOINT'} --target NAME "
            "--out DIR` writes a bundle",
        )
    file = regular_file(folder, name)

    def read(file: Path) -> bytes:
        with file.open("rb") as stream:
            return stream.read(MAX_MANIFEST_BYTES + 1)

    raw = _read_file(file, read)
    if len(raw) > MAX_MANIFEST_BYTES:
        raise BundleError(
            f"{file} is too large for a manifest",
            why=f"it has more than {MAX_MANIFEST_BYTES} bytes",
            hint=DAMAGED,
        )
    return raw


def check_complete(manifest: Manifest) -> None:
    """Check that the manifest lists every file that is needed, and that its parts agree.

    Raises:
        BundleError: a file is not listed, or a field does not agree with the others; the message names it.
    """
    needed = dict.fromkeys(REQUIRED, "every bundle needs this file")
    for entry in manifest.programs:
        needed |= dict.fromkeys(entry.files, f"program {entry.spec.name!r} needs this file")
    if not manifest.programs:
        raise BundleError(f"bundle {manifest.name!r} has no program")
    for relative, why in needed.items():
        if relative not in manifest.files:
            raise BundleError(
                f"the manifest of bundle {manifest.name!r} does not list the file {relative}",
                why=why,
            )
    check_consistent(manifest)


def file_sha256(file: Path) -> str:
    """Compute the SHA-256 of a file, in hexadecimal. The file is read in chunks."""
    with file.open("rb", buffering=0) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _manifest_now(folder: Path) -> bytes | None:
    """Read the manifest that is in the folder now; None if it cannot be read."""
    try:
        return read_manifest_bytes(folder)
    except BundleError:
        return None


def _replaced(folder: Path) -> BundleError:
    return BundleError(
        f"bundle {folder} was replaced while it was read",
        why="its manifest changed in the meantime",
        hint="run the command again",
    )


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except (OSError, ValueError):  # no permission; a NUL in the name
        return False


def _is_absent(file: Path) -> bool:
    """Whether a file does not exist. A file that exists and cannot be read is not absent."""
    try:
        os.lstat(file)
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _read_file(file: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(file)
    except BundleError:
        raise
    except Exception as error:  # numpy, zipfile and zlib raise nine kinds of exceptions
        if lack := out_of_memory(error):
            raise lack from error
        raise BundleError(
            f"{file.name} in bundle {file.parent} cannot be read",
            why=f"{type(error).__name__}: {error}"[:300],
            hint=PERMISSION if isinstance(error, PermissionError) else DAMAGED,
        ) from error


def _npy_header(file: Path) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Read an .npy header: shape, whether the order is Fortran's, dtype, and the offset of the data."""
    with file.open("rb") as stream:
        version = np.lib.format.read_magic(stream)
        if version not in ((1, 0), (2, 0)):
            raise ValueError(f"version {version} of the .npy format is not supported")
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, fortran, dtype = read(stream, LONGEST_HEADER)
        return shape, fortran, dtype, stream.tell()


def _arrays(file: Path, limit: int) -> dict[str, NDArray[Any]]:
    with zipfile.ZipFile(file) as archive:
        total = sum(member.file_size for member in archive.infolist())
    if total > limit:
        raise BundleError(
            f"{file.name} in bundle {file.parent} is rejected",
            why=f"it unpacks to {total} bytes; expected at most {limit} for a file of this size",
        )
    with np.load(file, allow_pickle=False) as archive:
        arrays: Mapping[str, Any] = {name: archive[name] for name in archive.files}
    for name, array in arrays.items():
        if not isinstance(array, np.ndarray):
            raise BundleError(f"{file.name} in bundle {file.parent}: {name!r} is not an array")
    return dict(arrays)
