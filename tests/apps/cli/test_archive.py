"""`whisperport archive`: its options, and what it prints."""

import json
from typing import Any

import pytest

from whisperport import ArchiveOptions, ArchiveSummary
from whisperport.apps.archive import ArchiveProgress
from whisperport.apps.cli import archive as verb
from whisperport.errors import UsageError

pytestmark = pytest.mark.usefixtures("any_bundle", "talk")

SUMMARY = ArchiveSummary(
    model="tiny",
    files=1000,
    failed=2,
    audio_s=36_000.0,
    languages={"en": 998},
    errors={"empty": 2},
    marks={},
    run_files=500,
    run_seconds=100.0,
    run_audio_s=18_000.0,
    bundle_sha256="b",
    options_sha256="0",
    versions={},
)


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the verb gave to `transcribe_archive`, in place of a transcription."""
    found: dict[str, Any] = {"summary": SUMMARY}

    def transcribe_archive(*given: Any, progress: Any) -> ArchiveSummary:
        names = ("source", "out", "bundle", "options", "transcribe")
        found.update(zip(names, given, strict=True))
        progress(ArchiveProgress(1000, 500, 2, 18_000.0, 100.0, 120.0))
        return found["summary"]

    monkeypatch.setattr(verb, "transcribe_archive", transcribe_archive)
    return found


def test_every_option_reaches_the_function(run: Any, called: dict[str, Any]) -> None:
    run(
        *("archive", "talks", "--out", "rows", "--workers", "3", "--retry-failed"),
        *("--subtitles", "vtt", "--save-every", "5", "--ray", "--language", "de", "--threads", "2"),
        *("--vad", "--no-batch", "--no-word-timestamps"),
    )

    assert (called["source"], str(called["out"])) == ("talks", "rows")
    assert called["options"] == ArchiveOptions(
        workers=3,
        retry_failed=True,
        subtitles="vtt",
        save_every=5.0,
        ray="auto",
        word_timestamps=False,
    )
    transcribe = called["transcribe"]
    assert (transcribe.decode.language, transcribe.run.threads) == ("de", 2)
    assert (transcribe.batch, transcribe.workers) == (False, 1)
    assert transcribe.vad is not None


def test_the_result_names_the_causes_and_failed_files_give_status_1(
    run: Any, called: dict[str, Any]
) -> None:
    ran = run("archive", "talks", "--out", "rows")

    assert ran.code == 1
    assert ran.out.splitlines() == [
        "rows: 1000 files, 10.00 hours of audio, 2 failed",
        "this run: 500 files in 100 s, 180.0 times as fast as real time",
        "     2  empty: The file has no samples",
    ]
    assert "rows/report.html" in ran.err


def test_words_are_in_the_rows_unless_switched_off(run: Any, called: dict[str, Any]) -> None:
    run("archive", "talks", "--out", "rows")

    assert called["options"].word_timestamps


def test_json_is_the_summary(run: Any, called: dict[str, Any]) -> None:
    found = json.loads(run("archive", "talks", "--out", "rows", "--json").out)

    assert (found["files"], found["speed"]) == (1000, 180.0)


def test_the_progress_without_a_terminal_is_a_line_from_time_to_time(
    run: Any, called: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "NOTE_S", 0.0)

    assert (
        "500 of 1000 files, 5.00 h of audio, 180.0 times real time, 2 failed, about 2 min left"
        in run("archive", "talks", "--out", "rows").err
    )


def test_a_wrong_number_of_workers_is_wrong_usage(run: Any, called: dict[str, Any]) -> None:
    assert run("archive", "talks", "--out", "rows", "--workers", "0").code == 2
    with pytest.raises(UsageError):
        ArchiveOptions(workers=0)
