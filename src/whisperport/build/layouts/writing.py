"""Move the files of an app to their place with their record: all of them, or none."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from whisperport.build.layouts.layout import App, Layout
from whisperport.build.layouts.record import check_name, read_record
from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.bundle.manifest import MANIFEST
from whisperport.program.bundle.ownership import RECORD
from whisperport.program.bundle.replacing import put_in_place
from whisperport.program.bundle.replacing_files import put_files_in_place
from whisperport.program.bundle.staging import staged_beside, staging
from whisperport.program.bundle.writing import check_writable, flush_files, naming_full_disk
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
        if (out / MANIFEST).is_file():
            raise _not_own(out, out / MANIFEST)
        return
    check_name(out.name)
    if out.suffix != layout.suffix:
        raise UsageError(
            f"{app.name} loads one file, and `{out}` does not end with {layout.suffix}",
            hint=f"--out {out.parent / (out.stem or 'model')}{layout.suffix}",
        )
    record = draft_record(layout, out)
    check_outputs([Output(place, "--out", "file") for place in (out, record)], read)
    _check_own(out, record)


def _check_own(out: Path, record: Path) -> None:
    """Check that a file and its record are missing, or as `convert` wrote them.

    Raises:
        UsageError: one of them is something else, which would be lost.
    """
    there = [place for place in (out, record) if os.path.lexists(place)]
    if not there:
        return
    try:
        digest = read_record(record).files.get(out.name)
        is_own = (digest is not None and out not in there) or digest == file_sha256(out)
    except (BundleError, OSError):
        is_own = False
    if not is_own or any(place.is_symlink() for place in there):
        raise _not_own(out, there[0])


def _not_own(out: Path, place: Path) -> UsageError:
    return UsageError(
        f"cannot write `--out {out}`",
        why=f"{place} is there, and `convert` did not write it",
        hint="choose another path, or delete that file",
    )


@contextmanager
def writing(layout: Layout, out: Path) -> Iterator[Path]:
    """Yield the folder or the file to write; after the block, it is moved to its place with its record.

    Without a record, nothing is moved, and `out` does not change.
    """
    if layout.suffix:
        with staged_beside(out) as staged:
            draft = staged.partial / out.name
            yield draft
            if not draft_record(layout, draft).is_file():
                return
            _check_own(out, draft_record(layout, out))  # again: the user may have put a file there
            names = (draft_record(layout, draft).name, out.name)
            put_files_in_place(staged.partial, staged.files, out, names)
        return
    out = check_writable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with staging(out) as staged, naming_full_disk(out, staged.partial):
        staged.partial.mkdir()
        yield staged.partial
        if draft_record(layout, staged.partial).is_file():
            flush_files(staged.partial)
            put_in_place(staged)


def draft_record(layout: Layout, draft: Path) -> Path:
    """Return the path of the record of files that are not at their place yet."""
    return draft.with_name(f"{draft.stem}.{RECORD}") if layout.suffix else draft / RECORD
