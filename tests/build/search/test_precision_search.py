"""`export_best` with the precision "auto": what is tried, what is chosen, and why not the others."""

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.export.export_options import ExportOptions
from whisperport.build.search import attempts, precision_search
from whisperport.build.search.attempts import KeptAttempts
from whisperport.build.search.search import export_best
from whisperport.errors import UsageError, VerificationError
from whisperport.program.bundle import MANIFEST, Bundle
from whisperport.program.bundle.ownership import delete_listed
from whisperport.targets import RunOptions, get_target

from ...conftest import micro_clips, noise_clips

AUTO = {"encoder": "auto"}
OPTIONS = ExportOptions(clips=noise_clips(), batch=1, run=RunOptions(threads=1), precisions=AUTO)
WORDS = 700


@dataclass
class Exports:
    """What each precision of the encoder gives; `tried` lists them in order.

    Attributes:
        bounds: precision -> bound of the increase, or None: the bundle is refused.
        ms: precision -> time of the encoder.
    """

    bounds: Mapping[str, float | None]
    ms: Mapping[str, float]
    bundle: Bundle
    tried: list[str]
    interrupted_in: str = ""

    def export(self, _: Any, __: str, out: Path, options: ExportOptions, **___: Any) -> Bundle:
        name = options.precisions["encoder"]
        self.tried.append(name)
        if name == self.interrupted_in:
            raise KeyboardInterrupt
        if (bound := self.bounds.get(name, 0.0)) is None:
            raise VerificationError("not written", why="encoder: the SQNR is 4 dB")
        made = Bundle.open(Path(shutil.copytree(self.bundle.folder, out)))
        checks = [
            {**check, "value": {**check["value"], "words": WORDS, "increase_at_most": bound}}
            if check["level"] == "words"
            else check
            for check in made.manifest.verification["checks"]
        ]
        verification = {**made.manifest.verification, "checks": checks}
        manifest = replace(made.manifest, verification=verification)
        (out / MANIFEST).write_bytes(manifest.to_bytes())
        return replace(made, manifest=manifest)

    def times(self, bundles: list[Bundle], _: RunOptions) -> Any:
        return [self.ms.get(bundle.folder.name, 10.0) for bundle in bundles]


@pytest.fixture
def exports(
    exported: Callable[..., Bundle], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Exports]:
    """`exports(bounds, ms)`: exports that give these numbers; the words of a bundle are `WORDS`."""

    def prepared(
        bounds: Mapping[str, float | None], ms: Mapping[str, float] | None = None
    ) -> Exports:
        made = Exports(bounds, ms or {}, exported("onnxruntime"), [])
        monkeypatch.setattr(precision_search, "export", made.export)
        monkeypatch.setattr(precision_search, "_times", made.times)
        return made

    return prepared


def search(tiny_checkpoint: Any, out: Path, limit: float = 0.005) -> Any:
    return export_best(tiny_checkpoint, "litert", out, OPTIONS, max_increase=limit)


def test_the_least_exact_precision_within_the_limit_is_chosen_and_each_attempt_is_kept(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    made = exports({"w8a8": None, "w8": 0.012, "w8a16": 0.0043}, {"w8a16": 5.0})

    found = search(tiny_checkpoint, tmp_path / "out")

    notes = found.manifest.program("encoder").facts.notes
    assert made.tried == ["fp32", "w8a8", "w8", "w8a16"]
    assert [attempt.name for attempt in found.attempts] == ["w8a8", "w8", "w8a16"]
    assert notes[0] == "w8a8: not verified: encoder: the SQNR is 4 dB"
    assert (
        notes[1] == "w8: the word error rate may be 1.20 points higher, with 95%; the limit is 0.5"
    )
    assert notes[2].startswith("w8a16: chosen; WER at most +0.43 points; ")
    assert Bundle.open(tmp_path / "out").manifest.program("encoder").facts.notes == notes
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def test_a_precision_that_is_neither_smaller_nor_faster_is_not_chosen(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    exports({}, {"w8a8": 11.0, "w8": 9.0})

    found = search(tiny_checkpoint, tmp_path / "out")

    assert [attempt.name for attempt in found.attempts] == ["w8a8", "w8"]
    assert found.attempts[0].rejected.startswith("neither smaller nor faster than fp32: ")
    assert found.attempts[1].rejected == ""


def test_without_a_precision_within_the_limit_the_bundle_is_float32s(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    made = exports(dict.fromkeys(get_target("litert").spec.runs.precisions[1:], 0.02))

    found = search(tiny_checkpoint, tmp_path / "out")

    assert sorted(made.tried) == sorted(get_target("litert").spec.runs.precisions)
    assert found.attempts[-1].name == "fp32"
    assert found.manifest.program("encoder").facts.notes[-1].startswith("fp32: chosen; ")


def test_the_same_call_continues_an_interrupted_search(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    made = exports({"w8a8": None, "w8": 0.012}, {"w8a16": 5.0})
    made.interrupted_in = "w8a16"
    with pytest.raises(KeyboardInterrupt):
        search(tiny_checkpoint, tmp_path / "out")
    before, made.interrupted_in = made.tried.copy(), ""
    made.tried.clear()

    found = search(tiny_checkpoint, tmp_path / "out")

    assert before == ["fp32", "w8a8", "w8", "w8a16"]
    assert made.tried == ["w8a16"]
    assert [attempt.name for attempt in found.attempts] == ["w8a8", "w8", "w8a16"]
    assert found.attempts[0].rejected == "not verified: encoder: the SQNR is 4 dB"
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]


def test_attempts_of_other_options_are_not_used(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    made = exports({})
    made.interrupted_in = "w8a8"
    with pytest.raises(KeyboardInterrupt):
        search(tiny_checkpoint, tmp_path / "out")
    made.interrupted_in = ""
    made.tried.clear()

    other = replace(OPTIONS, precisions={"step": "w8", **AUTO})
    export_best(tiny_checkpoint, "litert", tmp_path / "out", other)

    assert made.tried[0] == "fp32"


def test_an_interrupted_deletion_leaves_a_folder_that_the_next_search_deletes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptAttempts(tmp_path / "out", "one checkpoint")
    for name in ("fp32", "w8", "w8a8"):
        (kept.folder / name).mkdir()
    deleted = []

    def interrupted(path: Path) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(path)
        delete_listed(path)

    with monkeypatch.context() as patched:
        patched.setattr(attempts, "delete_listed", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept.delete()
    assert len(list(kept.folder.iterdir())) == 3  # two attempts, and the index

    found = KeptAttempts(tmp_path / "out", "another checkpoint")

    assert [path.name for path in found.folder.iterdir()] == [attempts.INDEX]


def test_what_the_user_has_put_among_the_attempts_is_kept(tmp_path: Path) -> None:
    kept = KeptAttempts(tmp_path / "out", "one checkpoint")
    for name in ("fp32", ".w8.partial-0123456789abcdef", "mine"):
        (kept.folder / name).mkdir()
    own = [kept.folder / "notes.txt", kept.folder / "mine" / "notes.txt"]
    for path in own:
        path.write_text("mine")

    KeptAttempts(tmp_path / "out", "another checkpoint").delete()

    assert sorted(path for path in kept.folder.rglob("*") if path.is_file()) == sorted(own)


def test_a_folder_of_the_user_is_not_deleted(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    exports({})
    own = tmp_path / "out.attempts" / "notes.txt"
    own.parent.mkdir()
    own.write_text("mine")

    with pytest.raises(UsageError, match="not a folder of attempts"):
        search(tiny_checkpoint, tmp_path / "out")

    assert own.read_text() == "mine"


def test_too_few_words_are_an_error_that_says_how_many_are_needed(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    made = exports({})

    with pytest.raises(UsageError, match="700 words cannot show") as few:
        search(tiny_checkpoint, tmp_path / "out", limit=0.004)

    assert "at least 750 words" in few.value.hint
    assert made.tried == ["fp32"]
    assert not (tmp_path / "out").exists()


def test_the_shipped_clips_are_counted_before_any_work(
    tiny_checkpoint: Any, exports: Callable[..., Exports], tmp_path: Path
) -> None:
    made = exports({})

    with pytest.raises(UsageError, match="55 words cannot show"):
        export_best(tiny_checkpoint, "litert", tmp_path / "out", ExportOptions(precisions=AUTO))

    assert made.tried == []


def test_a_target_that_only_emulates_in_float32_is_refused(
    tiny_checkpoint: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="`rk3588` has no precision to search"):
        export_best(tiny_checkpoint, "rk3588", tmp_path / "out", OPTIONS)


def test_a_real_export_leaves_only_the_chosen_bundle(
    fake_targets: dict[str, Any],
    micro_checkpoint: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transcripts are float32's own. Few words exclude little, so the limit is the largest there is."""
    target = fake_targets["fake"]
    target.spec = replace(target.spec, runs=replace(target.spec.runs, precisions=("fp32", "w8")))
    monkeypatch.setattr(precision_search, "_times", lambda *_: [10.0, 9.0])
    how = replace(OPTIONS, clips=[replace(clip, text="") for clip in micro_clips()])

    found = export_best(micro_checkpoint, "fake", tmp_path / "out", how, max_increase=1.0)

    assert [attempt.rejected for attempt in found.attempts] == [""]
    assert found.manifest.program("encoder").precision == "w8"
    assert found.manifest.verified
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["out"]
    Bundle.open(tmp_path / "out")


def test_the_target_and_the_precision_are_not_both_searched(
    tiny_checkpoint: Any, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="cannot both be `auto`"):
        export_best(tiny_checkpoint, "auto", tmp_path / "out", OPTIONS)
