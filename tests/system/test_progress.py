"""What is shown: progress, safe text and pages."""

import io
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from rich.progress import Progress

from whisperport import verify
from whisperport.apps.cli.console import AudioBar, RemainingColumn, Stages
from whisperport.system.page import MAX_TEXT, html_page, is_page
from whisperport.system.printable import escaped_json, is_printable, one_line, printable
from whisperport.system.progress import (
    LEAST_MEASURED_S,
    Counted,
    Remaining,
    begin_stage,
    prefixed,
    remaining_text,
    reporting,
)


class Clock:
    """A time that passes only where a test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_the_rest_takes_as_long_as_the_measured_part_did(clock):
    remaining = Remaining(clock)
    remaining.report(30, 600)
    clock.seconds += 10
    remaining.report(60, 600)

    assert remaining.seconds() == pytest.approx(180)  # 540 more at 3 per second

    clock.seconds += 20
    assert remaining.seconds() == pytest.approx(160)  # it goes on while nothing is reported


def test_what_came_before_the_first_report_is_not_part_of_the_speed(clock):
    remaining = Remaining(clock)
    clock.seconds += 1000  # loading
    remaining.report(30, 90)
    clock.seconds += 5
    remaining.report(60, 90)

    assert remaining.seconds() == pytest.approx(5)


def test_there_is_no_estimate_before_enough_was_measured(clock):
    remaining = Remaining(clock)
    assert remaining.seconds() is None

    remaining.report(0, 100)
    clock.seconds += 60
    assert remaining.seconds() is None  # nothing is done yet

    remaining = Remaining(clock)
    remaining.report(0, 100)
    clock.seconds += LEAST_MEASURED_S / 2
    remaining.report(1, 100)
    assert remaining.seconds() is None

    clock.seconds += LEAST_MEASURED_S / 2
    remaining.report(2, 100)
    assert remaining.seconds() == pytest.approx(49 * LEAST_MEASURED_S)


@pytest.mark.parametrize(("done", "total"), [(100, 100), (120, 100), (50, None), (50, 0)])
def test_nothing_is_estimated_for_finished_work_or_an_unknown_total(clock, done, total):
    remaining = Remaining(clock)
    remaining.report(10, total)
    clock.seconds += 10
    remaining.report(done, total)

    assert remaining.seconds() is None


def test_an_estimate_that_was_too_short_disappears_and_is_never_negative(clock):
    remaining = Remaining(clock)
    remaining.report(0, 10)
    clock.seconds += 9
    remaining.report(9, 10)
    assert remaining.seconds() == pytest.approx(1)

    clock.seconds += 5
    assert remaining.seconds() is None


def test_other_work_is_measured_anew(clock):
    remaining = Remaining(clock)
    remaining.report(0, 10)
    clock.seconds += 10
    remaining.report(5, 10)

    remaining.report(0, 4)
    assert remaining.seconds() is None

    clock.seconds += 8
    remaining.report(2, 4)
    assert remaining.seconds() == pytest.approx(8)

    remaining.report(0, 4)  # the same work again, of the next bundle
    assert remaining.seconds() is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, ""),
        (0.4, "about 5 s left"),
        (42.0, "about 40 s left"),
        (57.4, "about 55 s left"),
        (57.5, "about 1 min left"),
        (130.0, "about 2 min left"),
        (7199.0, "about 120 min left"),
        (7200.0, "about 2 h left"),
        (360_000.0, "about 100 h left"),
    ],
)
def test_the_text_is_rounded_and_short(seconds, text):
    assert remaining_text(seconds) == text


def test_a_stage_is_reported_to_the_innermost_context_and_after_it_to_the_outer_one():
    outer: list[str] = []
    inner: list[str] = []

    with reporting(outer.append):
        begin_stage("loading")
        with reporting(inner.append), prefixed("encoder"):
            begin_stage("lowering")
        with prefixed("cpu"), prefixed("step"):
            begin_stage("running")
        begin_stage("writing")
    begin_stage("reported to nobody")

    assert outer == ["loading", "cpu: step: running", "writing"]
    assert inner == ["encoder: lowering"]


def test_a_prefix_without_a_context_reports_to_nobody():
    with prefixed("encoder"):
        begin_stage("lowering")


def test_a_context_ends_with_an_error():
    stages: list[str] = []

    with pytest.raises(ZeroDivisionError), reporting(stages.append):
        raise ZeroDivisionError
    begin_stage("the next work")

    assert stages == []


def test_another_thread_reports_if_it_runs_in_a_copy_of_the_context():
    stages: list[str] = []

    with ThreadPoolExecutor(1) as pool, reporting(stages.append):
        pool.submit(begin_stage, "work of somebody else").result()
        pool.submit(copy_context().run, begin_stage, "work of this call").result()

    assert stages == ["work of this call"]


def test_a_counted_stage_is_its_name_and_keeps_its_count_between_processes():
    stage = Counted("transcribing a clip", 3, 18)

    copy = pickle.loads(pickle.dumps(stage))

    assert copy == "transcribing a clip"
    assert (copy.n_finished, copy.total) == (3, 18)


def test_a_verification_counts_its_clips(exported):
    bundle = exported("onnxruntime")
    stages: list[str] = []

    with reporting(stages.append):
        verify(bundle)

    clips = [stage for stage in stages if isinstance(stage, Counted)]
    assert [stage.n_finished for stage in clips] == list(range(len(clips)))
    assert len(clips) > 0
    assert {stage.total for stage in clips} == {len(clips)}


def shown(width: int) -> tuple[Progress, io.StringIO]:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=width, emoji=False)
    return Progress(*Progress.get_default_columns()[:1], RemainingColumn(), console=terminal), file


@pytest.mark.parametrize("width", [60, 80])
def test_counted_stages_show_the_remaining_time_and_others_none(clock, width):
    progress, file = shown(width)
    with progress:
        stages = Stages(progress, Remaining(clock))
        stages(Counted("clip 1 of 3", 0, 3))
        clock.seconds += 60
        stages(Counted("clip 2 of 3", 1, 3))
        progress.refresh()
        assert "about 2 min left" in file.getvalue()

        file.seek(0)
        file.truncate()
        stages("writing")
        progress.refresh()
        assert "left" not in file.getvalue()


def test_the_bar_of_an_audio_file_shows_the_remaining_time(clock):
    progress, file = shown(80)
    with progress:
        bar = AudioBar(progress, "talk.mp3", Remaining(clock))
        bar(30, 630)
        clock.seconds += 10
        bar(60, 630)
        progress.refresh()

    assert "about 3 min left" in file.getvalue()


# Text that is safe to show.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("talk.wav", "talk.wav"),
        ("\x1b[2J", r"\x1b[2J"),
        ("a\nhint: b\r\tc", r"a\nhint: b\r\tc"),
        ("\x00\x7f\x9b\x85", r"\x00\x7f\x9b\x85"),
        ("a\u2028b\u2029c", r"a\u2028b\u2029c"),
        ("\u202egpj.exe\u2066", r"\u202egpj.exe\u2066"),
        ("caf\udce9", r"caf\xe9"),  # as `os.fsdecode` gives a name that is not UTF-8
        ("\ud800", r"\ud800"),
        ("日本\u3000👩\u200d🚒 می\u200cخواهم\u200f", "日本\u3000👩\u200d🚒 می\u200cخواهم\u200f"),
    ],
)
def test_what_a_terminal_obeys_is_shown_as_an_escape(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=[])))
def test_nothing_unsafe_is_left(text: str) -> None:
    assert is_printable(printable(text))
    assert is_printable(one_line(text))
    assert len(printable(text).splitlines()) <= 1


def test_line_breaks_and_tabs_of_a_transcript_are_spaces() -> None:
    assert one_line("a\tb\nc\r\nd\u2028e\x1b") == r"a b c  d e\x1b"


@given(st.recursive(st.text(st.characters(exclude_categories=[])) | st.none(), st.lists))
def test_json_is_the_same_and_printable(data: object) -> None:
    document = escaped_json(json.dumps(data, ensure_ascii=False, indent=1))

    assert json.loads(document) == data
    assert is_printable(document.replace("\n", ""))


# Pages of whisperport are told from all other files.


@pytest.mark.parametrize("title", ["", "a" * MAX_TEXT, "&" * MAX_TEXT, "</title>\x00\u202e"])
def test_a_page_is_told_by_its_head(tmp_path: Path, title: str) -> None:
    page, link = tmp_path / "page.html", tmp_path / "link"
    page.write_text(html_page(title, "<p>body"))
    link.symlink_to(page)

    assert is_page(page)
    assert is_page(link)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\x00" * 4000,
        b"<!doctype html>\n<html><head><title>mine</title>",
        b"<!doctype html>\n" + b"<p>mine" * 1000 + b'<meta name="generator" content="whisperport">',
        b'# notes\n`<meta name="generator" content="whisperport">`',
        b'<!doctype html>\n<meta name="generator" content="another">',
    ],
)
def test_a_file_of_another_origin_is_no_page(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "file.html"
    file.write_bytes(content)

    assert not is_page(file)


def test_what_is_no_readable_file_is_no_page(tmp_path: Path) -> None:
    pipe, dangling = tmp_path / "pipe", tmp_path / "dangling"
    os.mkfifo(pipe)
    dangling.symlink_to(tmp_path / "missing")

    assert not any(map(is_page, (tmp_path, pipe, dangling, tmp_path / "missing", "a\x00b")))
