"""Move the files of an app to their place with their record: all of them, or none."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whisperport.build.layouts.layout import App, Layout
from whisperport.build.layouts.record import read_record
from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.ownership import RECORD
from whisperport.program.bundle.replacing import put_in_place
from whisperport.program.bundle.replacing_files import put_files_in_place
from whisperport.program.bundle.staging import staged_beside, staging
from whisperport.program.bundle.writing import check_writable, flush_files
from whisperport.system.outputs import Output, check_outputs


def check_out(layout: Layout, app: App, out: Path, inputs: Sequence[object]) -> None:
    """Check before the work that the output has the right form and replaces nothing of the user.

    Args:
        out: folder or file to write.
        inputs: what is read; those that are no existing paths are left out.

    Raises:
        UsageError: the name has another suffix, the output is an input, or a file is there that `convert`
            did not write. Folders are checked again by `check_writable`.
    """
    read = [p for p in inputs if isinstance(p, str | os.PathLike) and os.path.exists(p)]
    if not layout.suffix:
        check_outputs([Output(out, "--out", "bundle")], read)
        return
    if out.suffix != layout.suffix:
        raise UsageError(
            f"{app.name} loads one file, and `{out}` does not end with {layout.suffix}",
            hint=f"--out {out.with_suffix(layout.suffix)}",
        )
    places = [out, draft_record(layout, out)]
    check_outputs([Output(place, "--out", "file") for place in places], read)
    there = [place for place in places if os.path.lexists(place)]
    if there and not _is_own(out):
        raise UsageError(
            f"cannot write `--out {out}`",
            why=f"{there[0]} is there, and `convert` did not write it",
            hint="choose another path, or delete that file",
        )


def _is_own(out: Path) -> bool:
    """Whether a file has a record beside it that names it."""
    try:
        return out.name in read_record(out).files
    except BundleError:
        return False


@contextmanager
def writing(layout: Layout, out: Path) -> Iterator[Path]:
    """Yield the folder or the file to write; after the block, it is moved to its place with its record."""
    if layout.suffix:
        with staged_beside(out) as staged:
            draft = staged.partial / out.name
            yield draft
            names = (draft_record(layout, draft).name, out.name)
            put_files_in_place(staged.partial, staged.files, out, names)
        return
    out = check_writable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as staged:
        staged.partial.mkdir()
        yield staged.partial
        flush_files(staged.partial)
        put_in_place(staged)


def draft_record(layout: Layout, draft: Path) -> Path:
    """Return the path of the record of files that are not at their place yet."""
    return draft.with_name(f"{draft.stem}.{RECORD}") if layout.suffix else draft / RECORD


def hashes(layout: Layout, path: Path) -> dict[str, str]:
    """Return relative path -> SHA-256 of every file, without the record."""
    files = [path] if layout.suffix else sorted(file for file in path.rglob("*") if file.is_file())
    parent = path.parent if layout.suffix else path
    relative = {file.relative_to(parent).as_posix(): file for file in files}
    return {name: file_sha256(file) for name, file in relative.items() if name != RECORD}
