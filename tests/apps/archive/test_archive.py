"""An archive with real speech: every row once and equal to `transcribe`, whatever ends in between."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

import whisperport
from whisperport import (
    ArchiveOptions,
    DecodeOptions,
    RunOptions,
    TranscribeOptions,
    Transcriber,
)
from whisperport.apps.archive import ArchiveProgress
from whisperport.apps.archive import archive as archive_module
from whisperport.apps.archive.archive import default_workers
from whisperport.apps.archive.output_folder import RECORD
from whisperport.apps.archive.store import Store
from whisperport.errors import MissingPackageError, UsageError, WhisperportError
from whisperport.system.locking import lock_path, locked
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle

CLIPS = [clip.path for clip in shipped_audio() if clip.seconds < 4][:4]
OPTIONS = TranscribeOptions(
    decode=DecodeOptions(language="en"),
    run=RunOptions(threads=1),
    batch=False,
    word_timestamps=True,
)
ONE = ArchiveOptions(workers=1, save_every=0)


def archive(source: Any, out: Path, options: ArchiveOptions = ONE, **values: Any) -> Any:
    transcribe = values.pop("transcribe", OPTIONS)
    return whisperport.transcribe_archive(
        source, out, default_bundle(), options, transcribe, **values
    )


def rows(out: Path) -> dict[str, dict[str, Any]]:
    from pyarrow import parquet

    parts = (out / "parts").glob("*.parquet")
    found = [row for part in parts for row in parquet.read_table(part).to_pylist()]
    assert len({row["id"] for row in found}) == len(found), "a row is there twice"
    return {row["id"]: row for row in found}


def children() -> Iterator[int]:
    for path in Path("/proc/self/task").glob("*/children"):
        yield from map(int, path.read_text().split())


def damage(folder: Path) -> dict[str, str]:
    """Write damaged files, and return what the error or the marks of each say."""
    whole = CLIPS[0].read_bytes()
    (folder / "cut.wav").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.wav").touch()
    (folder / "noise.wav").write_bytes(b"no audio " * 100)
    os.mkfifo(folder / "pipe.wav")
    (folder / "loop.wav").symlink_to(folder / "loop.wav")
    (folder / "gone.wav").symlink_to(folder / "nothing")
    return {
        "cut.wav": "damaged audio",
        "empty.wav": "it has 0 bytes",
        "noise.wav": "not an audio file",
        "pipe.wav": "is a pipe",
        "loop.wav": "levels of symbolic links",
        "gone.wav": "does not exist",
    }


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One run over good and damaged files, whose worker is killed after the first row."""
    folder = tmp_path_factory.mktemp("archive")
    source, out = folder / "source", folder / "out"
    (source / "night").mkdir(parents=True)
    for clip in CLIPS:
        shutil.copy(clip, source / "night")
    says, states = damage(source), list[ArchiveProgress]()

    def progress(now: ArchiveProgress) -> None:
        if not states:
            for worker in children():
                os.kill(worker, signal.SIGKILL)
        states.append(now)

    summary = archive(source, out, replace(ONE, subtitles="srt"), progress=progress)
    return {"source": source, "out": out, "says": says, "states": states, "summary": summary}


def test_every_row_is_that_of_a_single_call(ran: dict[str, Any]) -> None:
    found, transcriber = rows(ran["out"]), Transcriber(default_bundle(), OPTIONS.run)

    for clip in CLIPS:
        row, single = found[f"night/{clip.name}"], transcriber.transcribe(clip, OPTIONS)
        expected = json.loads(json.dumps([asdict(segment) for segment in single.segments]))
        for segment in expected:
            del segment["window_s"], segment["match"]
        assert (row["text"], row["segments"]) == (single.text, expected)
        assert (row["duration"], row["language"]) == (single.duration_s, "en")
        assert (row["error"], row["marks"], row["warnings"]) == (None, [], [])
        assert [one["word"] for one in row["segments"][0]["words"]]


def test_a_killed_worker_and_damaged_files_cost_no_other_file(ran: dict[str, Any]) -> None:
    found = rows(ran["out"])

    assert set(found) == {f"night/{clip.name}" for clip in CLIPS} | set(ran["says"])
    for name, says in ran["says"].items():
        row = found[name]
        assert says in " ".join([*(row["error"] or {}).values(), *row["marks"]]), name
        assert str(ran["source"]) not in " ".join((row["error"] or {}).values())
    assert len(list((ran["out"] / "parts").iterdir())) == 1, "parts are not merged"


def test_progress_and_summary_count_the_rows(ran: dict[str, Any]) -> None:
    last, summary = ran["states"][-1], ran["summary"]

    assert [one.finished for one in ran["states"]] == list(range(1, 11))
    assert (last.files, last.failed) == (10, 5)
    assert (summary.files, summary.failed, summary.run_files) == (10, 5, 10)
    assert last.audio_s == pytest.approx(summary.audio_s)
    assert json.loads((ran["out"] / "summary.json").read_text())["errors"] == summary.errors


def test_each_transcript_has_a_subtitle_file(ran: dict[str, Any]) -> None:
    files = list((ran["out"] / "subtitles").glob("*.srt"))

    assert len(files) == sum(bool(row["segments"]) for row in rows(ran["out"]).values())
    assert all("-->" in file.read_text() for file in files)


def test_a_second_run_transcribes_only_what_has_changed(
    ran: dict[str, Any], tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(ran["source"] / "night", source)
    shutil.copytree(ran["out"], out)
    names = {path.name: f"night/{path.name}" for path in source.iterdir()}
    manifest = tmp_path / "list.jsonl"
    listed = [{"id": id, "path": f"source/{name}"} for name, id in names.items()]
    first, second, *_ = listed
    manifest.write_text("\n".join(map(json.dumps, listed)))

    assert archive(manifest, out).run_files == 0  # it has moved
    before = rows(out)
    (tmp_path / second["path"]).write_bytes((tmp_path / first["path"]).read_bytes())
    os.utime(tmp_path / first["path"], ns=(5, 5))  # another time, the same content
    summary = archive(manifest, out)

    after = rows(out)
    assert before[first["id"]]["path"] == str(tmp_path / first["path"])
    assert summary.run_files == 1
    assert after[second["id"]]["text"] == before[first["id"]]["text"]
    assert after[first["id"]] == before[first["id"]] | {"modified_ns": 5}
    assert {one for one in after if after[one] != before[one]} == {first["id"], second["id"]}


def test_another_collection_with_equal_names_changes_nothing(
    ran: dict[str, Any], tmp_path: Path
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    shutil.copytree(ran["source"] / "night", source / "night")
    shutil.copytree(ran["out"], out)
    path, other = (source / f"night/{clip.name}" for clip in CLIPS[:2])
    shutil.copy2(other, path)
    before = rows(out)

    with pytest.raises(UsageError) as error:
        archive(source, out)

    assert str(path) in error.value.what
    assert str(ran["source"] / f"night/{path.name}") in error.value.what
    assert rows(out) == before


def test_no_row_is_deleted_for_a_language_that_the_model_lacks(
    ran: dict[str, Any], tmp_path: Path
) -> None:
    out, manifest = tmp_path / "out", tmp_path / "list.jsonl"
    shutil.copytree(ran["out"], out)
    ids = [f"night/{clip.name}" for clip in CLIPS[:2]]
    listed = [{"id": id, "path": str(ran["source"] / id), "language": "Klingon"} for id in ids]
    manifest.write_text("\n".join(map(json.dumps, listed)))
    before = rows(out)

    with pytest.raises(UsageError, match=f"`{ids[0]}`|`{ids[1]}`") as error:
        archive(manifest, out)

    assert "Klingon" in error.value.why
    assert rows(out) == before


def test_failed_files_are_transcribed_again_only_if_asked(
    ran: dict[str, Any], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(ran["out"], out)

    assert archive(ran["source"], out).run_files == 0
    assert archive(ran["source"], out, replace(ONE, retry_failed=True)).run_files == 5
    assert len(rows(out)) == 10


@pytest.mark.parametrize("step", ["Store.merge", "summarize", "write_subtitles", "_warn_of_kept"])
def test_a_file_that_the_user_puts_there_during_the_run_is_kept(
    step: str, ran: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an archive, and a user who writes into it at the end of the next run
    out = tmp_path / "out"
    shutil.copytree(ran["out"], out)
    report = out / "report.html"
    before_step(step, lambda: report.write_text("mine"), monkeypatch)
    # then the file is named, and not replaced
    with pytest.raises(UsageError, match=r"report\.html` is in the way"):
        archive(ran["source"], out, replace(ONE, subtitles="srt"))
    assert report.read_text() == "mine"


@pytest.mark.parametrize("name", ["parts", "subtitles"])
def test_a_folder_of_another_place_is_not_written_to(
    name: str, ran: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given an archive, one of whose folders becomes a link to two parts elsewhere
    out, elsewhere = tmp_path / "out", tmp_path / "elsewhere"
    shutil.copytree(ran["out"], out)
    shutil.copytree(out / "parts", elsewhere)
    shutil.copy(next(elsewhere.iterdir()), elsewhere / "copy.parquet")
    before = set(elsewhere.iterdir())

    def link() -> None:
        shutil.rmtree(out / name)
        (out / name).symlink_to(elsewhere)

    before_step("_transcribe" if name == "parts" else "summarize", link, monkeypatch)
    # then it is named, and has the same files
    with pytest.raises(UsageError, match=f"{name}` is in the way"):
        archive(ran["source"], out, replace(ONE, subtitles="srt"))
    assert set(elsewhere.iterdir()) == before


@pytest.mark.parametrize("step", ["Store.merge", "summarize"])
def test_a_part_that_is_copied_during_the_run_doubles_no_row(
    step: str, ran: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given a user who copies a part at the end of a run
    out = tmp_path / "out"
    shutil.copytree(ran["out"], out)
    (part,) = (out / "parts").iterdir()
    copy = out / "parts" / "copy.parquet"
    before_step(step, lambda: shutil.copy(part, copy), monkeypatch)
    # then the run says so, and merges nothing
    with pytest.raises(WhisperportError, match=r"\.parquet` is damaged") as error:
        archive(ran["source"], out)
    assert "it has a row of" in error.value.why
    assert copy.read_bytes() == part.read_bytes()


def before_step(step: str, action: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Do something before a step of the next run."""
    name = f"whisperport.apps.archive.archive.{step}"
    run = Store.merge if step == "Store.merge" else getattr(archive_module, step)

    def run_after(*arguments: Any) -> Any:
        action()
        return run(*arguments)

    monkeypatch.setattr(name, run_after)


def test_an_interrupt_saves_finished_rows_and_ends_the_workers(tmp_path: Path) -> None:
    def interrupt(_: ArchiveProgress) -> None:
        raise KeyboardInterrupt

    others = set(children())  # of tests before this one in the same process

    with pytest.raises(KeyboardInterrupt):
        archive(CLIPS, tmp_path / "out", replace(ONE, save_every=3600), progress=interrupt)

    assert len(rows(tmp_path / "out")) == 1
    assert set(children()) <= others


def test_the_language_prompt_and_phrases_of_a_row_are_those_of_the_manifest(tmp_path: Path) -> None:
    manifest = tmp_path / "list.jsonl"
    listed = [
        {"id": "prompt", "path": str(CLIPS[0]), "prompt": "Kitchen, lights."},
        {"id": "phrases", "path": str(CLIPS[0]), "phrases": "five, Anna"},
        {"id": "damaged", "path": str(CLIPS[0]), "phrases": "AC/DC"},
        {"id": "wrong", "path": str(CLIPS[0]), "language": "Klingon"},
    ]
    manifest.write_text("\n".join(map(json.dumps, listed)))

    archive(manifest, tmp_path / "out")

    found = rows(tmp_path / "out")
    prompted = replace(OPTIONS, initial_prompt="Kitchen, lights.")
    expected = whisperport.transcribe(CLIPS[0], default_bundle(), prompted)
    assert found["prompt"]["text"] == expected.text
    assert found["prompt"]["segments"][0]["avg_logprob"] == expected.segments[0].avg_logprob
    assert found["phrases"]["options_sha256"] != found["wrong"]["options_sha256"]
    assert "AC/DC" in found["damaged"]["error"]["what"]
    assert "Klingon" in found["wrong"]["error"]["what"]
    assert found["prompt"]["options_sha256"] != found["wrong"]["options_sha256"]


def test_one_process_writes_at_a_time(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with (
        locked(lock_path(tmp_path / "out" / RECORD)),
        pytest.raises(UsageError, match="another process"),
    ):
        archive(CLIPS, tmp_path / "out")


def test_a_bundle_that_cannot_be_loaded_is_an_error_of_the_job(tmp_path: Path) -> None:
    run = RunOptions(options={"onnxruntime.nothing": "1"})

    with pytest.raises(UsageError, match="nothing"):
        archive(CLIPS, tmp_path / "out", transcribe=replace(OPTIONS, run=run))


@pytest.mark.needs("torch")  # the model is exported first
def test_a_cluster_without_ray_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # `import ray` fails, also where it is installed

    with pytest.raises(MissingPackageError) as error:
        archive(CLIPS, tmp_path / "out", ArchiveOptions(ray="auto"))

    assert "whisperport[ray]" in error.value.hint


def test_there_is_a_worker_per_core_or_fewer_if_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "whisperport.apps.archive.archive"
    monkeypatch.setattr(f"{module}.usable_cores", lambda: 8)
    found = []
    for available in (None, 10**12, 10**9, 10**6):
        monkeypatch.setattr(f"{module}.available_memory", lambda available=available: available)
        found.append(default_workers(default_bundle()))

    assert found[:2] == [8, 8]
    assert 1 <= found[2] < 8
    assert found[3] == 1
