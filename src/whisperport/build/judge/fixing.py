"""Correct the files of an app: copy them, repair what breaks a rule, judge the copy, and only then move it.

The user's own files are never changed.
"""

import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.judge.identity import identify
from whisperport.build.judge.judge import Judgement, judge, layout_of_files, stored_arrays
from whisperport.build.layouts.convert import read_checkpoint
from whisperport.build.layouts.layout import Layout
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.record import LayoutRecord, check_name, hashes, write_record
from whisperport.build.layouts.rules import Draft
from whisperport.build.layouts.writing import check_out, draft_record, writing
from whisperport.errors import UsageError
from whisperport.program.bundle.ownership import RECORD
from whisperport.program.bundle.writing import check_writable
from whisperport.system.outputs import is_inside
from whisperport.system.progress import begin_stage

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

# What a repair raises where a file's members or nodes are not what its format says.
MALFORMED = (AttributeError, KeyError, IndexError, TypeError, ValueError, StopIteration)
SAME = 0.5  # of a checkpoint's weights: with fewer, the files are another model's


@dataclass(frozen=True, slots=True)
class FixedFiles:
    """Files of an app that were repaired.

    Attributes:
        path: of the new folder or file; None: no repair applied, so nothing was written.
        changes: code of each rule that a repair was for -> what it changed.
        judgement: of the repaired files, or of the old ones if nothing was written.
    """

    path: Path | None
    changes: dict[str, str]
    judgement: Judgement

    def __bool__(self) -> bool:
        """Whether nothing is wrong any more but for warnings."""
        return bool(self.judgement)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "written": None if self.path is None else os.fspath(self.path),
            "changes": [{"rule": code, "change": what} for code, what in self.changes.items()],
            "judgement": self.judgement.to_json(),
        }


def fix_files(
    path: Path,
    out: Path,
    checkpoint: "Checkpoint | str | os.PathLike[str] | None" = None,
    *,
    app: str | None = None,
) -> FixedFiles:
    """Repair a copy of an app's files, and judge it; `whisperport.fix` describes the arguments."""
    files = Files(path)
    layout = layout_of_files(files, app)
    chosen = layout.apps[app or next(iter(layout.apps))]
    check_out(layout, chosen, out, (path, checkpoint))
    if is_inside(out, path):
        raise UsageError(
            f"cannot write `--out {out}`",
            why=f"it is in the input `{path}`, which is copied as a whole",
            hint="choose another path for `--out`",
        )
    source = {name: path / name for name in _names(path)} if path.is_dir() else {"": path}
    if not layout.suffix:
        check_writable(out, needed_bytes=sum(file.stat().st_size for file in source.values()))
    opened = None if checkpoint is None else _checkpoint_of(checkpoint, layout, files)

    def judged(place: Path, shown: Path) -> Judgement:
        judgement = judge(place, opened, app=app)
        if isinstance(checkpoint, str | os.PathLike):
            judgement = replace(judgement, checkpoint=os.fspath(checkpoint))
        return replace(judgement, path=shown)

    if not any(rule.repair and any(rule.problems(files)) for rule in layout.rules):
        return FixedFiles(None, {}, judged(path, path))
    with writing(layout, out) as draft:
        begin_stage(f"copying {path.name}")
        for name, file in source.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, draft / name)
        changes = _repaired(layout, draft, opened)
        if not changes:  # without a record, nothing is moved to its place
            return FixedFiles(None, {}, judged(path, path))
        judgement = judged(draft, out)
        record = LayoutRecord(
            app=chosen.name,
            precision=judgement.precision,
            exact=False,
            language="en",
            window_s=30.0,
            source={"repaired": sorted(changes)},
            files=hashes(draft),
        )
        write_record(draft_record(layout, draft), record)
    return FixedFiles(out, changes, judgement)


def _repaired(layout: Layout, draft: Path, checkpoint: "Checkpoint | None") -> dict[str, str]:
    """Repair what breaks a rule, in the order of the rules; return what was changed, by code."""
    changes = {}
    for rule in layout.rules:
        files = Files(draft)  # again: an earlier repair may have changed them
        if rule.repair is not None and any(rule.problems(files)):
            begin_stage(f"repairing {rule.code}")
            try:
                change = rule.repair(Draft(files, layout.reader.sizes(files), checkpoint))
            except MALFORMED:
                change = ""
            if change:
                changes[rule.code] = change
    return changes


def _checkpoint_of(
    checkpoint: "Checkpoint | str | os.PathLike[str]", layout: Layout, files: Files
) -> "Checkpoint":
    """Return the checkpoint, opened.

    Raises:
        UsageError: the files hold another model.
    """
    begin_stage("reading the checkpoint")
    opened = read_checkpoint(checkpoint)
    begin_stage("comparing weights")
    precision = next(iter(layout.reader.precisions(files)), layout.precisions[0])
    changed = identify(opened, stored_arrays(layout, files, precision)).changed
    if len(changed) > SAME * len(opened.weights):
        raise UsageError(
            f"{files.path} holds another model than the checkpoint",
            why=f"{len(changed)} of {len(opened.weights)} weights are not there",
            hint="give the checkpoint that the files were made of",
        )
    return opened


def _names(folder: Path) -> Iterator[str]:
    """Yield the name of each file that is copied, relative to its folder: none that is hidden.

    Raises:
        UsageError: a name cannot be recorded.
    """
    for path in folder.rglob("*"):
        name = path.relative_to(folder)
        is_hidden = any(part.startswith(".") for part in name.parts)
        if path.is_file() and name.name != RECORD and not is_hidden:
            check_name(name)
            yield name.as_posix()
