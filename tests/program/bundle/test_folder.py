import contextlib
import errno
import io
import os
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import BundleError
from whisperport.program.bundle import (
    EMBEDDING,
    MANIFEST,
    POSITIONS,
    REFERENCE,
    TOKENIZER,
    Bundle,
    Manifest,
)
from whisperport.program.bundle import folder as folder_module
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.writing import writing_bundle

FILES = [TOKENIZER, EMBEDDING, POSITIONS, REFERENCE, "programs/encoder.bin"]


@pytest.fixture
def write_with(
    tmp_path: Path, manifest: Manifest, fill: Callable[[Path], None]
) -> Callable[[str, bytes], Bundle]:
    """Make a bundle with correct hashes, in which one file has these contents."""

    def write_with(relative: str, contents: bytes) -> Bundle:
        with writing_bundle(tmp_path / "hostile") as writer:
            fill(writer.folder)
            (writer.folder / relative).write_bytes(contents)
            return writer.commit(manifest)

    return write_with


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def test_what_was_written_can_be_read(bundle: Bundle, manifest: Manifest) -> None:
    opened = Bundle.open(str(bundle.folder))

    assert replace(opened.manifest, files={}) == manifest
    assert sorted(opened.manifest.files) == sorted(FILES)
    assert opened.path("programs/encoder.bin").read_bytes() == b"program"
    assert opened.tokenizer_json() == b'{"version": "1.0"}'
    assert opened.embedding().dtype == np.float16
    assert opened.embedding()[10, 7] == 87
    assert opened.positions().shape == (5, 8)
    assert set(opened.reference()) == {"mel"}


def test_tables_cannot_be_written_to(bundle: Bundle) -> None:
    with pytest.raises(ValueError, match="read-only"):
        bundle.embedding()[0, 0] = 1


@pytest.mark.parametrize("relative", FILES)
def test_one_changed_byte_is_found_and_the_file_named(bundle: Bundle, relative: str) -> None:
    file = bundle.folder / relative
    contents = bytearray(file.read_bytes())
    contents[len(contents) // 2] ^= 1
    file.write_bytes(contents)

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.folder)

    assert relative in caught.value.what


@pytest.mark.parametrize("relative", FILES)
@pytest.mark.parametrize("check_hashes", [True, False])
def test_another_size_is_found_without_hashing_too(
    bundle: Bundle, relative: str, check_hashes: bool
) -> None:
    file = bundle.folder / relative
    file.write_bytes(file.read_bytes() + b"\0")

    with pytest.raises(BundleError, match="bytes") as caught:
        Bundle.open(bundle.folder, check_hashes=check_hashes)

    assert relative in caught.value.what


@pytest.mark.parametrize("relative", [MANIFEST, *FILES])
def test_each_missing_file_is_named(bundle: Bundle, relative: str) -> None:
    (bundle.folder / relative).unlink()

    with pytest.raises(BundleError) as caught:
        Bundle.open(bundle.folder, check_hashes=False)

    assert relative in str(caught.value)


def test_hashes_are_left_out_when_asked(bundle: Bundle) -> None:
    (bundle.folder / "programs/encoder.bin").write_bytes(b"PROGRAM")

    opened = Bundle.open(bundle.folder, check_hashes=False)

    assert opened.manifest == bundle.manifest


def test_a_note_in_the_folder_is_no_harm(bundle: Bundle) -> None:
    (bundle.folder / "notes.txt").write_text("mine")

    opened = Bundle.open(bundle.folder)

    with pytest.raises(BundleError, match="does not list"):
        opened.path("notes.txt")


@pytest.mark.parametrize("path", ["missing", "file", "empty", "nul\0"])
def test_what_is_no_bundle_is_refused(tmp_path: Path, path: str) -> None:
    (tmp_path / "file").write_text("text")
    (tmp_path / "empty").mkdir()

    with pytest.raises(BundleError):
        Bundle.open(tmp_path / path)


def test_a_file_that_may_not_be_read_is_not_called_damaged(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(_: Path) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(folder_module, "file_sha256", denied)

    with pytest.raises(BundleError, match="cannot be read") as caught:
        Bundle.open(bundle.folder)

    assert "readable" in caught.value.hint
    assert "copy" not in caught.value.hint


@pytest.mark.parametrize("relative", [MANIFEST, *FILES])
def test_a_link_that_leads_out_is_refused(bundle: Bundle, tmp_path: Path, relative: str) -> None:
    outside = tmp_path / "outside"
    (bundle.folder / relative).rename(outside)
    (bundle.folder / relative).symlink_to(outside)

    with pytest.raises(BundleError, match="leads out") as caught:
        Bundle.open(bundle.folder)

    assert relative in caught.value.what


def test_a_linked_folder_that_leads_out_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    (bundle.folder / "programs").rename(tmp_path / "outside")
    (bundle.folder / "programs").symlink_to(tmp_path / "outside")

    with pytest.raises(BundleError, match="leads out"):
        Bundle.open(bundle.folder)


def test_a_link_that_stays_inside_and_a_linked_bundle_are_read(
    bundle: Bundle, tmp_path: Path
) -> None:
    (bundle.folder / TOKENIZER).rename(bundle.folder / "real.json")
    (bundle.folder / TOKENIZER).symlink_to("real.json")
    (tmp_path / "link").symlink_to(bundle.folder)

    assert Bundle.open(tmp_path / "link").tokenizer_json() == b'{"version": "1.0"}'


def test_a_circle_of_links_is_refused(bundle: Bundle) -> None:
    (bundle.folder / TOKENIZER).unlink()
    (bundle.folder / TOKENIZER).symlink_to(TOKENIZER)

    with pytest.raises(BundleError, match=TOKENIZER):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize("relative", [MANIFEST, TOKENIZER])
def test_a_pipe_is_refused_and_not_waited_for(bundle: Bundle, relative: str) -> None:
    (bundle.folder / relative).unlink()
    os.mkfifo(bundle.folder / relative)

    with pytest.raises(BundleError, match="regular"):
        Bundle.open(bundle.folder)


def test_a_huge_manifest_is_refused_before_it_is_parsed(bundle: Bundle) -> None:
    with (bundle.folder / MANIFEST).open("r+b") as stream:
        stream.truncate(2**30)  # sparse: a gigabyte that takes no room

    with pytest.raises(BundleError, match="too large"):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize("relative", FILES)
def test_a_manifest_that_lists_too_little_is_refused(bundle: Bundle, relative: str) -> None:
    files = {path: entry for path, entry in bundle.manifest.files.items() if path != relative}
    raw = replace(bundle.manifest, files=files).to_bytes()
    (bundle.folder / MANIFEST).write_bytes(raw)

    with pytest.raises(BundleError, match=relative):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize(
    "table",
    [
        npy(np.zeros((11, 9), np.float32)),
        npy(np.zeros((10, 8), np.float32)),
        npy(np.zeros((11, 8), np.float64)),
        npy(np.zeros((11, 8), ">f4")),
        npy(np.zeros((11, 8), np.int32)),
        npy(np.array([["x"] * 8] * 11, dtype=object)),
        npy(np.zeros((11, 8), np.float32))[:-1],
        b"\x93NUMPY\x01\x00\x46\x00{'descr': '<f4', 'fortran_order': False, 'shape': (11, 8), }\n",
        b"\x93NUMPY\x01\x00\x10\x00" + b"(" * 16,
        b"\x93NUMPY\x09\x00",
        b"PK\x03\x04",
        b"",
    ],
)
def test_an_embedding_that_does_not_fit_is_refused(
    write_with: Callable[[str, bytes], Bundle], table: bytes
) -> None:
    bundle = write_with(EMBEDDING, table)

    with pytest.raises(BundleError, match=EMBEDDING):
        bundle.embedding()


def npz(**arrays: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.savez_compressed(stream, **arrays)
    return stream.getvalue()


def archive(name: str, contents: str) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as file:
        file.writestr(name, contents)
    return stream.getvalue()


@pytest.mark.parametrize(
    ("contents", "why"),
    [
        (npz(mel=np.array([print], dtype=object)), "pickle"),
        (npz(mel=np.zeros(20 * 2**20, np.float32)), "unpacks"),  # to 80 MB, from less than one
        (archive("mel.txt", "not an array"), "not an array"),
    ],
    ids=["pickle", "unpacks to far more", "another kind of file"],
)
def test_a_reference_of_another_form_is_refused(
    write_with: Callable[[str, bytes], Bundle], contents: bytes, why: str
) -> None:
    bundle = write_with(REFERENCE, contents)

    with pytest.raises(BundleError, match=why):
        bundle.reference()


@pytest.mark.parametrize(
    "put",
    [
        lambda file: file.write_bytes(file.read_bytes() + b"\0"),
        lambda file: file.write_bytes(npy(np.zeros((8, 11), np.float32).T)),
        lambda file: file.write_bytes(npy(np.zeros((11, 8), np.int32))),
        lambda file: file.write_bytes(npy(np.array([[None] * 8] * 11, dtype=object))),
    ],
    ids=["longer than its header says", "in Fortran's order", "integers", "pickled objects"],
)
def test_a_table_that_does_not_fit_is_found_when_the_bundle_is_opened(
    tmp_path: Path, write: Callable[..., Bundle], put: Callable[[Path], object]
) -> None:
    write(tmp_path / "nano", then=lambda folder: put(folder / EMBEDDING))

    with pytest.raises(BundleError, match=EMBEDDING):
        Bundle.open(tmp_path / "nano")


# Bundles that are replaced while they are read ---------------------------------------------------


@pytest.fixture
def other(tmp_path: Path, write: Callable[..., Bundle]) -> Path:
    """Make another bundle, whose program has other bytes."""
    return write(tmp_path / "other", b"another program").folder


def exchange(one: Path, other: Path) -> None:
    """Replace the bundle in one step, as another process does."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


def while_hashing(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], None], times: int) -> None:
    """Call a function before each of the first files is hashed."""
    left = [happens] * times

    def sha256(file: Path) -> str:
        if left:
            left.pop()()
        return file_sha256(file)

    monkeypatch.setattr("whisperport.program.bundle.folder.file_sha256", sha256)


def test_a_bundle_that_is_replaced_while_it_is_opened_is_read_again(
    bundle: Bundle, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_hashing(monkeypatch, lambda: exchange(bundle.folder, other), times=1)

    opened = Bundle.open(bundle.folder)

    assert opened.path("programs/encoder.bin").read_bytes() == b"another program"


def test_a_bundle_that_is_replaced_all_the_time_is_an_error_that_says_so(
    bundle: Bundle, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    while_hashing(monkeypatch, lambda: exchange(bundle.folder, other), times=1000)

    with pytest.raises(BundleError, match="was replaced while it was read"):
        Bundle.open(bundle.folder)


@pytest.mark.parametrize("fails", [False, True])
def test_a_bundle_that_is_replaced_while_it_is_loaded_is_an_error_that_says_so(
    bundle: Bundle, other: Path, fails: bool
) -> None:
    opened = Bundle.open(bundle.folder)
    with opened.unchanged():
        pass

    def load() -> None:
        exchange(bundle.folder, other)
        if fails:
            raise BundleError("a file is missing")

    with pytest.raises(BundleError, match="was replaced while it was read"), opened.unchanged():
        load()


def test_a_bundle_that_is_removed_while_it_is_loaded_is_an_error_that_says_so(
    bundle: Bundle,
) -> None:
    opened = Bundle.open(bundle.folder)

    with pytest.raises(BundleError, match="was replaced while it was read"), opened.unchanged():
        bundle.folder.rename(bundle.folder.with_name("elsewhere"))


# Damaged arrays ----------------------------------------------------------------------------------


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_arrays_raise_a_bundle_error_or_nothing(
    bundle: Bundle, data: st.DataObject
) -> None:
    """Hashes detect accidents. A hostile writer can write correct hashes for a damaged file."""
    for relative in (EMBEDDING, REFERENCE):
        file = bundle.folder / relative
        contents = original = file.read_bytes()
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(contents) - 1))
            contents = contents[:at] + data.draw(st.binary(max_size=3)) + contents[at + 1 :]
            contents = contents or b"\0"
        file.write_bytes(contents)

        with contextlib.suppress(BundleError):
            bundle.embedding() if relative == EMBEDDING else bundle.reference()

        file.write_bytes(original)


@pytest.mark.needs("torch")
def test_a_checkpoint_given_for_a_bundle_is_answered_with_how_to_export_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path)

    assert caught.value.what == f"{tmp_path} is not a bundle"
    assert f"whisperport export {tmp_path} --target NAME --out DIR" in caught.value.hint


def test_a_manifest_that_may_not_be_read_is_not_said_to_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    lstat = os.lstat

    def denied(path: os.PathLike[str], **options: object) -> os.stat_result:
        if os.fspath(path).endswith(MANIFEST):
            raise PermissionError(13, "Permission denied", str(path))
        return lstat(path, **options)

    monkeypatch.setattr(os, "lstat", denied)

    with pytest.raises(BundleError) as caught:
        Bundle.open(tmp_path)

    assert "cannot be read" in caught.value.what
    assert "Permission denied" in caught.value.why
