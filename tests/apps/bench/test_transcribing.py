"""The parts of the time of transcribing: nothing is missing, and nothing is counted twice."""

from collections import Counter
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.bench import transcribing
from whisperport.apps.bench.acceptance import TOKENS
from whisperport.apps.bench.memory import peak_memory_mib
from whisperport.apps.bench.timed import Clock
from whisperport.apps.bench.transcribing import (
    UNCACHED_CALLS,
    BenchOptions,
    BenchResult,
    run_bench,
    time_uncached,
)
from whisperport.errors import UsageError
from whisperport.model.network.whisper import Whisper
from whisperport.program.bundle import Bundle
from whisperport.program.program_kind import UNCACHED_DECODER
from whisperport.program.runner import Binding, Runner
from whisperport.program.spec import UncachedForm
from whisperport.runtime import DecodeOptions, Engine
from whisperport.system.progress import reporting
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import whisper_text_errors
from whisperport.verification.clips import ShippedAudio, shipped_audio

from ...embedded import default_bundle
from ...micro import GENERATION
from ...runtime.engine.test_engine import Eager as EagerUncached

ONE_THREAD = RunOptions(threads=1)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return Bundle.open(default_bundle())


@pytest.fixture(scope="module")
def recording() -> ShippedAudio:
    return shipped_audio()[0]


@pytest.fixture(scope="module")
def result(bundle: Bundle, recording: ShippedAudio) -> BenchResult:
    """The result of the embedded model on a shipped audio file, with word timestamps."""
    options = BenchOptions(repeat=2, word_timestamps=True, run=ONE_THREAD)
    return run_bench([bundle], recording.path, options)[0]


def test_the_decoder_without_cache_is_timed_beside_the_whole(
    micro: Whisper, eager_runners: Any
) -> None:
    clock = Clock()
    runners = eager_runners(micro) | {
        UNCACHED_DECODER: EagerUncached(micro, UncachedForm(12, pieces=2))
    }
    timed = {name: clock.wrap_runner(runner) for name, runner in runners.items()}
    tables = micro.decoder.token_embedding.weight, micro.decoder.positional_embedding
    engine = Engine(micro.dims, GENERATION, timed, *(table.numpy() for table in tables))

    seconds = time_uncached(engine, clock)

    assert len(seconds) == UNCACHED_CALLS
    assert min(seconds) > 0
    without = {name: runner for name, runner in timed.items() if name != UNCACHED_DECODER}
    assert (
        time_uncached(Engine(micro.dims, GENERATION, without, np.empty(0), np.empty(0)), clock)
        == []
    )


def test_a_bundle_without_the_uncached_decoder_has_no_time_of_it(result: BenchResult) -> None:
    assert result.uncached is None


@pytest.fixture
def no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the separate process that measures memory, and the clips of the reference."""
    monkeypatch.setattr(transcribing, "peak_memory_mib", lambda *_, **__: None)
    monkeypatch.setattr(transcribing, "check_accuracy", lambda *_: ())


def test_the_parts_add_up_to_the_whole(result: BenchResult) -> None:
    assert sum(part.total_ms for part in result.parts) == pytest.approx(result.total_ms)


def test_the_cpu_time_of_the_parts_adds_up_and_splits_into_encoder_and_decoder(
    result: BenchResult,
) -> None:
    cpu = {part.name: part.cpu_ms or 0.0 for part in result.parts}

    decoder = sum(
        ms for name, ms in cpu.items() if name not in ("load", "mel", "encoder", "Python")
    )

    assert all(part.cpu_ms is not None and part.cpu_ms >= 0 for part in result.parts)
    assert result.cpu_s_per_audio_s * result.audio_s * 1e3 == pytest.approx(
        sum(cpu.values()) - cpu["load"]
    )
    assert result.decoder_cpu_s_per_audio_s * result.audio_s * 1e3 == pytest.approx(decoder)
    assert result.encoder_cpu_s_per_audio_s * result.audio_s * 1e3 == pytest.approx(cpu["encoder"])
    assert decoder > 0


def test_no_part_is_negative_so_nothing_was_counted_twice(result: BenchResult) -> None:
    assert all(part.total_ms > 0 for part in result.parts)


def test_every_program_that_ran_is_a_part_and_words_need_align(
    result: BenchResult, bundle: Bundle
) -> None:
    programs = {entry.spec.name for entry in bundle.manifest.programs}
    names = [part.name for part in result.parts]

    assert names[:2] == ["load", "mel"]
    assert names[-1] == "Python"
    # A short recording has no long prompt, and one text needs no batch.
    assert set(names[2:-1]) == programs - {"prefill_64", "step_8"}


def test_the_acceptance_table_has_the_latencies_and_the_accuracy(result: BenchResult) -> None:
    medians = {part.name: part.median_ms for part in result.parts}
    rows = {row.metric: row for row in result.acceptance}

    for row in rows.values():
        if row.unit == "ms":
            assert row.value == medians.get(row.programs[0]), row.metric
    assert rows["encoder latency"].value is not None
    assert (rows[TOKENS].value, rows[TOKENS].reference) == (6, 6)
    assert set(result.how.values()) == {"run here"}
    assert [*result.to_json()["acceptance"]] == [asdict(row) for row in result.acceptance]


def test_calls_are_as_many_as_another_observer_counts(
    result: BenchResult, bundle: Bundle, recording: ShippedAudio, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Counter[str]()

    def counted(run: Any) -> Any:
        def count(self: Any, *arrays: Any) -> Any:
            seen.update([getattr(self, "runner", self).spec.name])
            return run(self, *arrays)

        return count

    for kind, name in ((Runner, "run"), (Runner, "run_into"), (Binding, "run")):
        monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
    transcriber = Transcriber(bundle, ONE_THREAD)
    transcript = transcriber.transcribe(recording.path, TranscribeOptions(word_timestamps=True))

    assert {p.name: p.calls for p in result.parts if p.name in seen} == seen
    assert result.text == transcript.text


def test_speed_comes_with_accuracy(result: BenchResult, recording: ShippedAudio) -> None:
    assert result.errors is not None
    assert result.errors.length > 5
    assert result.errors.rate < 0.5
    assert result.whisper_errors == whisper_text_errors(result.text, recording.text)
    assert result.to_json()["wer_whisper_normalizer"] == result.whisper_errors.rate
    assert result.audio_s == pytest.approx(recording.seconds, abs=0.01)


def test_the_real_time_factor_leaves_loading_aside(result: BenchResult) -> None:
    load = result.parts[0].total_ms

    assert result.real_time_factor * result.audio_s * 1e3 == pytest.approx(result.total_ms - load)


def test_what_is_counted_follows_the_language_first_heard(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    heard = iter([("请左转", "zh"), ("请右转", "en")])

    def one_round(*_: object) -> transcribing._Round:
        text, language = next(heard)
        calls = {transcribing.LOAD: [0.1], transcribing.MEL: [0.1]}
        return transcribing._Round(calls, 1.0, 1.0, text, language)

    monkeypatch.setattr(transcribing, "_one_round", one_round)

    options = BenchOptions(repeat=1, run=ONE_THREAD, transcript="请右转")
    results = run_bench([bundle, bundle], Path("talk.wav"), options)

    assert [r.errors and (r.errors.name, r.errors.errors) for r in results] == [
        ("CER", 1),
        ("CER", 0),
    ]
    assert results[0].to_json()["cer"] == pytest.approx(1 / 3)
    assert [r.whisper_errors for r in results] == [r.errors for r in results]


def test_without_a_transcript_the_error_rate_is_not_known(
    bundle: Bundle, recording: ShippedAudio, tmp_path: Path, no_memory: None
) -> None:
    stranger = tmp_path / "stranger.wav"
    stranger.write_bytes(recording.path.read_bytes())

    unknown = run_bench([bundle], stranger, BenchOptions(repeat=1, run=ONE_THREAD))[0]
    told = BenchOptions(repeat=1, run=ONE_THREAD, transcript=unknown.text + " and more")
    known = run_bench([bundle], stranger, told)[0]

    assert unknown.errors is None
    assert unknown.to_json()["wer"] is None
    assert unknown.to_json()["wer_whisper_normalizer"] is None
    assert known.errors is not None
    assert known.errors.deletions == 2


def test_two_bundles_take_turns(bundle: Bundle, recording: ShippedAudio, no_memory: None) -> None:
    said: list[str] = []
    copy = Bundle(bundle.folder, bundle.manifest)
    options = BenchOptions(repeat=2, run=ONE_THREAD)

    with reporting(said.append):
        results = run_bench([bundle, copy], recording.path, options)

    assert [line.split(":")[0] for line in said if "round" in line] == [
        "round 1 of 2",
        "round 1 of 2",
        "round 2 of 2",
        "round 2 of 2",
    ]
    assert results[0].text == results[1].text


@pytest.mark.parametrize("target", ["onnxruntime", "xnnpack"])
def test_every_target_is_split_alike(
    target: str, exported: Any, monkeypatch: pytest.MonkeyPatch, no_memory: None
) -> None:
    decode = DecodeOptions(max_tokens=4, without_timestamps=True)  # no time may end a file early
    short = partial(TranscribeOptions, decode=decode, temperatures=(0,))
    monkeypatch.setattr(transcribing, "TranscribeOptions", short)
    recording = shipped_audio()[0].path

    result = run_bench([exported(target)], recording, BenchOptions(repeat=1, run=ONE_THREAD))[0]

    calls = {part.name: part.calls for part in result.parts}
    assert calls["encoder"] > 1  # windows of 2 s
    # The first window's keys detect the language too, and are computed once.
    assert calls["cross_kv"] == calls["encoder"]
    assert sum(part.total_ms for part in result.parts) == pytest.approx(result.total_ms)


def test_the_median_round_is_the_one_shown() -> None:
    rounds = [
        transcribing._Round({"load": [1.0], "step": [s, s]}, 1.0 + 2 * s + 0.5, 10.0, "", "en")
        for s in (0.3, 0.1, 0.2)
    ]

    parts = transcribing._parts(rounds[2], rounds, ["encoder", "step"])

    assert [(p.name, p.calls) for p in parts] == [("load", 1), ("step", 2), ("Python", 0)]
    assert parts[1].total_ms == pytest.approx(400)
    assert parts[1].median_ms == pytest.approx(200)
    assert parts[2].total_ms == pytest.approx(500)


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UsageError, match="`repeat` is 0"):
        BenchOptions(repeat=0)


def test_memory_is_that_of_the_run_and_not_of_this_process(
    bundle: Bundle, recording: ShippedAudio
) -> None:
    held = np.ones(700 * 2**17)  # 700 MiB

    peak = peak_memory_mib(bundle.folder, recording.path, word_timestamps=False, run=ONE_THREAD)

    assert held.nbytes == 700 * 2**20
    assert peak is not None
    assert 50 < peak < 700


def test_memory_of_a_run_that_fails_is_not_known(bundle: Bundle, tmp_path: Path) -> None:
    missing = tmp_path / "missing.wav"

    assert peak_memory_mib(bundle.folder, missing, word_timestamps=False, run=ONE_THREAD) is None


def test_a_clock_that_saw_nothing_leaves_all_to_python() -> None:
    quiet = transcribing._Round({"load": [1.0], **Clock().calls}, 3.0, 1.0, "", "en")

    parts = transcribing._parts(quiet, [quiet], ["encoder"])

    assert [(p.name, p.total_ms) for p in parts] == [("load", 1000.0), ("Python", 2000.0)]
