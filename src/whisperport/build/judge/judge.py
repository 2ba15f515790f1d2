"""Judge files that an app loads, whoever wrote them: what they are, and what is wrong with them.

Nothing of the files is executed in this process: apps load them in processes of their own, and graphs are
compared layer by layer in one with limits.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.build.judge.graphs import GRAPHS, check_computed, check_words, taken
from whisperport.build.judge.identity import Identity, identify
from whisperport.build.judge.layers import ComparedGraph, compare_graphs
from whisperport.build.judge.verified import NamedWeights, name_of
from whisperport.build.judge.words import ComparedWords, compare_words
from whisperport.build.layouts import all_layouts, layout_of, recognized
from whisperport.build.layouts.checkpoint_rules import COMPARED
from whisperport.build.layouts.client import is_installed
from whisperport.build.layouts.convert import read_checkpoint, spoken_language
from whisperport.build.layouts.layout import App, DecodingProfile, Layout
from whisperport.build.layouts.onnx_graph.header import read_header
from whisperport.build.layouts.reading import Files, StoredArray
from whisperport.build.layouts.record import LayoutRecord, hashes
from whisperport.build.layouts.reference import Emitted, reference_of
from whisperport.build.layouts.rules import Problem
from whisperport.build.layouts.verifying import ClipSet, run_and_compare
from whisperport.errors import (
    CheckpointError,
    MissingPackageError,
    ProgramError,
    UsageError,
    VerificationError,
    needs,
)
from whisperport.program.checks import Check
from whisperport.program.json_records import to_json
from whisperport.system.child import KilledError, StoppedError, killed
from whisperport.system.progress import begin_stage
from whisperport.verification.clips import Clip

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint


WEIGHTS = "the weights"  # name of the run that could not read them
FAR = 0.05  # of the largest logit: float16 rounds less (4e-4 seen)
FAR_OF_8_BITS = 0.1  # 8 bits round less (0.05 seen), and one wrong layer may leave most words right


@dataclass(frozen=True, slots=True, kw_only=True)
class AppRun:
    """What an app returned, compared with the checkpoint.

    Attributes:
        app: its name.
        device: on which it ran; empty: the app has no others.
        checks: the comparisons; empty: it did not run.
        words: what it returned in words; None: it did not run.
        reason: why it did not run, or failed; empty: it ran.
        failed: whether it began to run, and failed.
    """

    app: str
    device: str = ""
    checks: tuple[Check, ...] = ()
    words: ComparedWords | None = None
    reason: str = ""
    failed: bool = False

    def __bool__(self) -> bool:
        """Whether nothing that was compared differs."""
        lost = self.words is not None and not self.words
        return not self.failed and not lost and all(check.passed for check in self.checks)

    @property
    def computes(self) -> bool:
        """Whether nothing differs, or, of graphs without an app, the logits do not."""
        arrays = [check.passed for check in self.checks if check.level == "arrays"]
        return bool(self) or (self.app == GRAPHS and bool(arrays) and all(arrays))

    @property
    def name(self) -> str:
        """The app, and its device if there are several."""
        return f"{self.app} ({self.device})" if self.device else self.app

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "app": self.app,
            "device": self.device or None,
            "reason": self.reason or None,
            "failed": self.failed,
            "checks": [
                {"what": c.what, "passed": c.passed, "reason": c.reason or None}
                for c in self.checks
            ],
            "words": None if self.words is None else self.words.to_json(),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What files are, and what is wrong with them.

    Attributes:
        path: of their folder, or of the only file.
        layout: what they are.
        precision: of the weights that were judged.
        precisions: all that are there.
        problems: what breaks a rule.
        checkpoint: name of the checkpoint that they were compared with; empty: with none.
        identity: how its weights were found; None: there was no checkpoint.
        named: the verified checkpoint that has such weights; None: none is known, or one was given.
        runs: what each app of the layout returned.
        clips: that they transcribed.
        graphs: the layers of the files' graphs, compared with the checkpoint's if weights or results are
            not; empty: they were not compared.
    """

    path: Path
    layout: Layout
    precision: str
    precisions: tuple[str, ...]
    problems: tuple[Problem, ...]
    checkpoint: str = ""
    identity: Identity | None = None
    named: NamedWeights | None = None
    runs: tuple[AppRun, ...] = ()
    clips: tuple[Clip, ...] = ()
    graphs: tuple[ComparedGraph, ...] = ()

    def __bool__(self) -> bool:
        """Whether nothing wrong was found but for warnings."""
        same = self.identity is None or bool(self.identity)
        broken = any(not problem.is_warning for problem in self.problems)
        return not broken and same and all(self.runs) and all(self.graphs)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "path": os.fspath(self.path),
            "passed": bool(self),
            "layout": self.layout.title,
            "apps": list(self.layout.apps),
            "precision": self.precision,
            "precisions": list(self.precisions),
            "problems": [
                {"rule": p.code, "file": p.file, "reason": p.reason, "warning": p.is_warning}
                for p in self.problems
            ],
            "checkpoint": self.checkpoint or None,
            "weights": self.identity.to_json() if self.identity is not None else None,
            "named": to_json(self.named),
            "runs": [run.to_json() for run in self.runs],
            "graphs": [graph.to_json() for graph in self.graphs],
        }


def judge(
    path: str | os.PathLike[str],
    checkpoint: "Checkpoint | str | os.PathLike[str] | None" = None,
    *,
    app: str | None = None,
    precision: str | None = None,
    verify_with: str | os.PathLike[str] | None = None,
    language: str | None = None,
) -> Judgement:
    """Judge a folder or file that an app loads.

    Args:
        path: of the folder, or of the only file.
        checkpoint: a checkpoint, or what `load_checkpoint` accepts. Its weights are looked for in the
            files, and the apps that are installed must return what it emits. Default: None, neither.
        app: the only app that is run. Default: None, every app of the layout.
        precision: of the weights that are judged. Default: None, the first that is there.
        verify_with: folder of audio files, of which the first 30 s are transcribed. Default: None, six
            clips that come with whisperport.
        language: spoken in them, as a code or a name. Default: None, "en", or a language of the checkpoint.

    Raises:
        UsageError: no layout has such files, or there is no such app or precision.
        ProgramError: a file is damaged.
        CheckpointError, TokenizerError, AudioError: the checkpoint or the audio cannot be read.
        MissingPackageError: torch, or the reader of a format, is not installed.
        WhisperportError: an app, or the process of the graphs, was killed: nothing is known of the files.
    """
    files = Files(Path(path))
    with needs("cannot judge files: torch is not installed", extra="export"):
        import_module("torch")  # for the readers of some layouts
    begin_stage("reading the files")
    layout = layout_of_files(files, app)
    precisions = tuple(layout.reader.precisions(files)) or layout.precisions[:1]
    precision = precision or precisions[0]
    if precision not in precisions:
        raise UsageError(
            f"{files.path} has no files of the precision `{precision[:40]}`",
            hint=f"choose one of {', '.join(precisions)}",
        )
    name = os.fspath(checkpoint) if isinstance(checkpoint, str | os.PathLike) else "the checkpoint"
    if checkpoint is not None:
        begin_stage("reading the checkpoint")
        files.checkpoint = checkpoint = read_checkpoint(checkpoint)
    problems = [problem for rule in layout.rules for problem in rule.problems(files)]
    problems.sort(key=lambda problem: problem.code != COMPARED)
    judgement = Judgement(
        path=files.path,
        layout=layout,
        precision=precision,
        precisions=precisions,
        problems=tuple(problems),
    )
    if checkpoint is None:
        return replace(judgement, named=_named(judgement, files))
    judgement = replace(judgement, checkpoint=name)
    apps = [layout.apps[app]] if app is not None else list(layout.apps.values())
    return _compared(judgement, files, checkpoint, apps, verify_with, language)


def _named(judgement: Judgement, files: Files) -> NamedWeights | None:
    """Return the verified checkpoint that has such weights; None: none is known, or a rule says why."""
    try:
        return name_of(stored_arrays(judgement.layout, files, judgement.precision))
    except (CheckpointError, ProgramError):
        if judgement:
            raise
        return None


def _compared(
    judgement: Judgement,
    files: Files,
    checkpoint: "Checkpoint",
    apps: Sequence[App],
    verify_with: str | os.PathLike[str] | None,
    language: str | None,
) -> Judgement:
    """Compare files with a checkpoint: weights, what apps return, and layers if one of these differs.

    Args:
        judgement: what the rules say of them.
        files: that are compared.
        checkpoint: of which they were made.
        apps: that are run.
        verify_with, language: as those of `judge`.
    """
    layout, identity = judgement.layout, None
    begin_stage("comparing weights")
    try:
        if _has_arrays(layout, files):
            arrays = stored_arrays(layout, files, judgement.precision)
            identity = identify(checkpoint, arrays, has_graphs=layout.weights is None)
    except (CheckpointError, ProgramError) as error:
        if judgement:
            raise
        run = AppRun(app=WEIGHTS, reason=f"{error.what}: {error.why}", failed=True)
        return replace(judgement, runs=(run,))  # a rule says why
    spoken = spoken_language(checkpoint, language)
    folder = None if verify_with is None else Path(verify_with)
    clips = ClipSet.of(folder, spoken, checkpoint.dims.window_s)
    record = LayoutRecord(
        app="",
        precision=judgement.precision,
        exact=identity is not None and identity.is_exact and not _in_halves(files, identity),
        language=spoken,
        window_s=checkpoint.dims.window_s,
        source={},
        # Only a run could change them.
        files=hashes(files.path) if any(map(is_installed, apps)) else {},
    )
    judgement = replace(judgement, identity=identity, clips=clips.clips)
    runs = (
        *_runs_of_graphs(judgement, record, checkpoint, clips),
        *_runs(files.path, apps, record, checkpoint, clips),
    )
    judgement = replace(judgement, runs=runs)
    is_right = identity and all(run.computes for run in runs) and not _is_far(identity, runs)
    if layout.logits is None or is_right or identity is None:
        return judgement
    clip = _differing_clip(judgement)
    cut, known = taken(layout, apps[0], checkpoint, clip)
    graphs = tuple(compare_graphs(files.path, identity, cut, clip, known))
    return replace(judgement, graphs=graphs)


def _is_far(identity: Identity, runs: Sequence[AppRun]) -> bool:
    """Return whether logits are farther away than the weights' form rounds them: a layer may say why."""
    checks = [check for run in runs for check in run.checks if check.level == "arrays"]
    limit = FAR_OF_8_BITS if identity.eight_bits else FAR
    return any(check.value.get("max_relative", 0.0) > limit for check in checks)


def _in_halves(files: Files, identity: Identity) -> bool:
    """Return whether an ONNX graph that holds weights computes in float16."""
    names = {file for places in identity.places.values() for file, _ in places}
    graphs = [name for name in names if name.endswith(".onnx") and files.has(name)]
    return any(files.read(name, read_header).computes_in_halves for name in graphs)


def _differing_clip(judgement: Judgement) -> Clip:
    """Return the first clip whose text is not the checkpoint's; the first clip if there is none."""
    names = {
        entry.clip
        for run in judgement.runs
        if run.words is not None
        for entry in run.words.texts
        if entry.text.strip() != entry.expected.strip()
    }
    return next((c for c in judgement.clips if c.name in names), judgement.clips[0])


def _has_arrays(layout: Layout, files: Files) -> bool:
    """Return whether the weights of files can be read."""
    is_read = layout.reader.arrays is not None or layout.weights is not None
    return is_read and layout.reader.is_readable(files)


def stored_arrays(layout: Layout, files: Files, precision: str) -> Iterator[StoredArray]:
    """Yield the arrays in files of a layout."""
    if not _has_arrays(layout, files):
        return
    if layout.reader.arrays is not None:
        yield from layout.reader.arrays(files, precision)
    elif layout.weights is not None:
        file = files.largest()
        for name, weight in files.read_now("", layout.weights).items():
            is_float16 = str(weight.dtype) == "torch.float16"
            yield StoredArray(file, name, (weight if is_float16 else weight.float()).numpy())


def layout_of_files(files: Files, app: str | None) -> Layout:
    """Return the layout of files, which an app loads; None: any app.

    Raises:
        UsageError: none has such files, or the app loads others.
    """
    if not files.path.exists():
        raise UsageError(f"there is no file or folder {files.path}")
    files.check_entries()
    if layout := recognized(files):
        if app is not None and app not in layout.apps:
            layout_of(app)  # or there is no such app
            raise UsageError(f"{files.path} has no files of {app}", why=f"it is a {layout.title}")
        return layout
    if files.path.is_file() and not files.path.stat().st_size:
        raise ProgramError(f"{files.path} is empty", hint="download or export it again")
    if files.path.is_file() and recognized(Files(files.path.absolute().parent)):
        raise UsageError(
            f"{files.path} is a part of what an app loads",
            hint=f"give its folder: whisperport judge {files.path.absolute().parent}",
        )
    if files.path.is_file():
        _reject_placeholder(files.path)
    known = "\n".join(f"{', '.join(layout.apps)}: {layout.title}" for layout in all_layouts())
    if any(files.has(name) for name in ("model.safetensors", "pytorch_model.bin")):
        raise UsageError(
            f"{files.path} is a checkpoint, which no app loads",
            why="it has weights, and not the files that an app loads",
            hint=f"whisperport convert {files.path} --for APP --out build/converted\n"
            f"APP is one of these:\n{known}",
        )
    raise UsageError(
        f"{files.path} has the files of no app that is known here",
        hint=f"give the folder, or the only file, that one of these apps loads:\n{known}\n"
        "`whisperport convert` makes such files of a checkpoint",
    )


def _reject_placeholder(path: Path) -> None:
    from whisperport.program.untrusted import PLACEHOLDER_BYTES, reject_placeholder

    with path.open("rb") as file:
        reject_placeholder(file.read(PLACEHOLDER_BYTES), f"cannot read {path}")


def _runs_of_graphs(
    judgement: Judgement, record: LayoutRecord, checkpoint: "Checkpoint", clips: ClipSet
) -> Iterator[AppRun]:
    """Run the graphs without an app, if the files hold graphs whose weights are right, or that decode."""
    path, layout, identity = judgement.path, judgement.layout, judgement.identity
    if layout.logits is None or not (identity or layout.emitted is not None):
        return
    words = None
    try:
        check = check_computed(
            layout,
            path,
            record.precision,
            checkpoint,
            clips.clips[0],
            exact=record.exact,
            swapped=identity.odd if identity is not None else (),
        )
        checks = [check]
        if layout.emitted is not None:
            words, check = check_words(layout, path, checkpoint, clips.clips)
            checks.append(check)
    except (MissingPackageError, ProgramError) as error:
        yield AppRun(app=GRAPHS, reason=": ".join(filter(None, (error.what, error.why))))
    except KilledError as error:
        raise killed("the process of the graphs") from error
    except StoppedError as error:
        yield AppRun(app=GRAPHS, reason=f"they do not run: {error}", failed=True)
    else:
        yield AppRun(app=GRAPHS, checks=tuple(checks), words=words)


def _runs(
    path: Path,
    apps: Sequence[App],
    record: LayoutRecord,
    checkpoint: "Checkpoint",
    clips: ClipSet,
) -> Iterator[AppRun]:
    """Run each app that is installed on each of its devices."""
    emitted: dict[DecodingProfile, list[Emitted]] = {}
    for app in apps:
        if not is_installed(app):
            why = "not installed, so it did not run" if app.module else "it runs on its device only"
            yield AppRun(app=app.name, reason=why)
            continue
        if app.compile is not None:
            why = (
                "its files are for one chip: `whisperport verify` runs it, if `convert` wrote them"
            )
            yield AppRun(app=app.name, reason=why)
            continue
        profile = app.profile_of(checkpoint)
        if profile not in emitted:
            emitted[profile] = reference_of(checkpoint, profile, clips.clips)
        for device in app.devices:
            on_device = replace(app, devices=(device,))
            yield _run(on_device, path, record, clips, emitted[profile], timed=profile.timestamps)


def _run(
    app: App,
    path: Path,
    record: LayoutRecord,
    clips: ClipSet,
    expected: list[Emitted],
    *,
    timed: bool,
) -> AppRun:
    on_device = partial(AppRun, app=app.name, device=app.devices[0])
    try:
        run, verification = run_and_compare(app, path, record, clips.clips, expected)
    except VerificationError as error:
        return on_device(reason=f"{error.what}: {error.why}".rstrip(": "), failed=True)
    words = compare_words(clips.clips, expected, run.results, timed=timed)
    return on_device(checks=verification.checks, words=words)
