"""The embedded model, models that are given by name, and bundles whose windows may be short."""

import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from whisperport.apps.cli import model_option
from whisperport.apps.cli.model_option import bundle_of_model
from whisperport.build.export import bundle_cache
from whisperport.build.export import export as exporting
from whisperport.build.export.bundle_cache import (
    EmbeddedModelWarning,
    bundle_of,
    cached_bundle,
    open_bundle,
)
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.judge.verified import name_of
from whisperport.build.search.timing import known_times, remember
from whisperport.errors import CheckpointError, MissingPackageError, UsageError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.window import DEFAULT_PADDING, Window, WindowOptions
from whisperport.runtime import DecodeOptions, compression_ratio
from whisperport.runtime.decoding.decode import start_tokens
from whisperport.speech.audio import load_audio
from whisperport.speech.data import embedded_model
from whisperport.speech.text import Segment
from whisperport.targets import RunOptions
from whisperport.transcription import (
    TranscribeOptions,
    Transcriber,
    Transcript,
    transcribe,
    transcribe_files,
)
from whisperport.transcription.feature_files import transcribe_features
from whisperport.verification import LEVELS, Report, TextErrors, text_errors
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import clips_of, shipped_audio
from whisperport.verification.reference import Reference

from ...embedded import default_bundle, unpacked
from ...extent import EVERYTHING, core_or_all

# Models that are given by name.

# A model is given by name: its bundle is exported once and reused; none is chosen silently.

AUDIO = shipped_audio()[0].path


@pytest.fixture
def exports(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, exported: Callable[..., Bundle]
) -> list[Path]:
    """The folders that bundles were exported to, in an empty cache. An export copies a bundle.

    `default_bundle` is exported the same way, for real.
    """
    done: list[Path] = []

    def copied(_: Any, target: str, out: Path, *__: Any, **___: Any) -> Bundle:
        done.append(out)
        shutil.rmtree(out, ignore_errors=True)
        return Bundle.open(Path(shutil.copytree(exported(target).folder, out)))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(exporting, "export", copied)
    return done


@pytest.mark.parametrize(
    "use",
    [
        Transcriber,
        lambda: transcribe(AUDIO),
        lambda: list(transcribe_files([AUDIO])),
        lambda: transcribe_features("output.bin"),
        lambda: open_bundle(None),
    ],
)
def test_no_model_is_used_that_was_not_named(use: Callable[[], Any]) -> None:
    with pytest.raises(UsageError, match="no model") as caught:
        use()

    assert "--model" in caught.value.hint
    assert "--bundle" in caught.value.hint


def test_the_environment_may_name_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHISPERPORT_BUNDLE", str(default_bundle()))

    assert open_bundle(None).folder == default_bundle()


def test_a_folder_that_is_a_bundle_is_opened_and_not_looked_up() -> None:
    assert open_bundle(str(default_bundle())).folder == default_bundle()


def test_a_model_is_exported_once_for_all_its_names(
    exports: list[Path], one_layer_pt: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "copy.pt"
    copy.write_bytes(one_layer_pt.read_bytes())
    assert cached_bundle(str(copy)) is None

    first, again = bundle_of(str(copy)), bundle_of(str(copy))
    other_name = bundle_of(str(one_layer_pt))
    os.utime(copy, (1, 1))  # as if it were written again, with the same contents
    touched = bundle_of(str(copy))
    (first.folder / "embedding.npy").write_bytes(b"damaged")
    repaired = bundle_of(str(copy))

    assert exports == [first.folder, first.folder]
    for found in (again, other_name, touched, repaired):
        assert found.folder == first.folder
    assert first.manifest.verified


def test_a_checkpoint_that_is_replaced_during_its_export_is_exported_again(
    exports: list[Path], one_layer_pt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given: a checkpoint that a training writes again while its older weights are exported
    path = tmp_path / "training.pt"
    path.write_bytes(one_layer_pt.read_bytes())
    copied = exporting.export

    def slow(*arguments: Any) -> Any:
        os.utime(path, (1, 1))
        return copied(*arguments)

    monkeypatch.setattr(exporting, "export", slow)

    # when
    bundle_of(str(path))

    # then: the bundle of the older weights is not that of the file that is there now
    assert cached_bundle(str(path)) is None


def test_without_torch_a_model_of_the_cache_is_used_and_another_is_an_error_with_the_way(
    tmp_path: Path,
) -> None:
    default_bundle()
    script = (
        "import sys; sys.modules['torch'] = None\n"
        "from whisperport.build.export.bundle_cache import bundle_of\n"
        "print(bundle_of('default').folder)\n"
        "bundle_of('tiny.en')\n"
    )

    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, cwd=tmp_path
    )

    assert ran.stdout.strip() == str(default_bundle())
    assert MissingPackageError.__name__ in ran.stderr
    assert "whisperport export tiny.en --target onnxruntime --out DIR" in ran.stderr
    assert "--bundle" in ran.stderr
    assert 'hint: pip install "whisperport[export]"' in ran.stderr


def test_python_says_once_what_the_embedded_model_understands(tmp_path: Path) -> None:
    default_bundle()
    script = (
        "from whisperport.transcription import Transcriber\n"
        "for _ in range(2): Transcriber('default')\n"
    )

    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path
    )

    assert ran.stderr.count(embedded_model.UNDERSTANDS) == 1
    assert EmbeddedModelWarning.__name__ in ran.stderr


@pytest.mark.filterwarnings("error")
def test_a_bundle_of_the_embedded_model_that_is_given_by_its_folder_needs_no_warning() -> None:
    assert open_bundle(str(default_bundle())).folder == default_bundle()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no pipes")
def test_a_pipe_in_the_cache_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # given pipes without a writer at the paths of what the cache keeps
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    remember("about", [])
    (times,) = (tmp_path / "whisperport" / "times").iterdir()
    times.unlink()
    record = bundle_cache._record("default")
    for path in (record, times, tmp_path / "whisperport" / "weights" / "tiny.json"):
        path.parent.mkdir(parents=True, exist_ok=True)
        os.mkfifo(path)
    # then nothing is kept there, and no read blocks
    assert bundle_cache.cached_bundle("default") is None
    assert known_times("about") is None
    assert name_of([]) is None


@pytest.mark.skipif(not EVERYTHING, reason="takes ten seconds; run make test-all")
def test_two_processes_export_a_model_once(tmp_path: Path, one_layer_pt: Path) -> None:
    script = (
        "import sys\n"
        "from whisperport.build.export import export as exporting\n"
        "from whisperport.build.export import bundle_cache\n"
        "def export(checkpoint, target, out, *_, **__):\n"
        "    import shutil, time\n"
        "    time.sleep(1)\n"
        "    open(sys.argv[1], 'a').write('exported\\n')\n"
        "    return bundle_cache.Bundle.open(shutil.copytree(sys.argv[2], out))\n"
        "exporting.export = export\n"
        "from whisperport.system.progress import reporting\n"
        "with reporting(lambda stage: print(stage, flush=True)):\n"
        "    bundle_cache.bundle_of(sys.argv[3])\n"
    )
    log = tmp_path / "log"
    arguments = [sys.executable, "-c", script, log, default_bundle(), one_layer_pt]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}

    both = [
        subprocess.Popen(arguments, env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    shown = [one.communicate(timeout=120)[0] for one in both]

    assert [one.returncode for one in both] == [0, 0]
    assert log.read_text() == "exported\n"
    assert sum("another process exports" in text for text in shown) <= 1


@pytest.mark.parametrize("fault", ["cut", "flipped", "larger"])
def test_a_damaged_embedded_model_is_an_error(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in embedded_model.model_folder().iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    weights = folder / "model.safetensors.xz"
    data = bytearray(weights.read_bytes())
    if fault == "flipped":
        data[len(data) // 2] ^= 1
    weights.write_bytes(data[:-100] if fault == "cut" else data)
    if fault == "larger":
        monkeypatch.setattr(embedded_model, "MAX_BYTES", 1000)
    monkeypatch.setattr(embedded_model, "model_folder", lambda: folder)

    with pytest.raises(CheckpointError, match="the embedded model is damaged"):
        unpacked(tmp_path)


@pytest.mark.needs("torch")
def test_a_cache_that_cannot_be_made_names_the_variable_that_moves_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in it

    with pytest.raises(WhisperportError) as raised:
        bundle_of_model("default")

    assert "cannot keep the bundle of `default`" in raised.value.what
    assert "XDG_CACHE_HOME" in raised.value.hint
    assert (tmp_path / "file").read_text() == "mine"


def test_the_command_for_a_faster_bundle_is_quoted_for_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(model_option, "run_watched", Mock(side_effect=CheckpointError("missing")))

    with pytest.raises(CheckpointError):
        bundle_of_model("my model.pt")

    assert "`whisperport export 'my model.pt' --target auto` finds" in capsys.readouterr().err


# The model, the bundle and the clips inside the package fit together, and transcription works.

MAX_WEIGHTS = 20_000_000  # bytes
SHA256 = {  # of the files as they were trained and exported; the package stores them in another form
    "model.safetensors": "08ffee7fd9c680dd87d5c02430b0c0245bf87f5b4ce4fc4d50cdd6a79cd5e7f3",
    "tokenizer.json": "3b5c82461dc5e64127a6ea180af31e9cd4bf558465b55fca24593462358faabc",
}
MAX_WER = 0.05  # of all clips, voices absent from the training and noise among them


def test_the_unpacked_model_is_the_trained_one_bit_for_bit(tmp_path: Path) -> None:
    unpacked(tmp_path)

    for name, sha256 in SHA256.items():
        assert hashlib.sha256((tmp_path / name).read_bytes()).hexdigest() == sha256


def test_the_bundle_was_exported_from_the_embedded_checkpoint(tmp_path: Path) -> None:
    weights = (unpacked(tmp_path) / "model.safetensors").read_bytes()

    manifest = Bundle.open(default_bundle()).manifest

    assert manifest.source["sha256"] == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    assert manifest.verified
    assert len(weights) <= MAX_WEIGHTS


def test_the_bundle_verifies_here() -> None:
    report = verify(default_bundle())

    assert report, report.failures()


def test_the_clips_are_transcribed() -> None:
    transcriber = Transcriber(default_bundle())

    errors = TextErrors()
    for clip in shipped_audio():
        transcript = transcriber.transcribe(clip.path)
        assert not transcript.truncated, f"{clip.path.name}: end of text was not emitted"
        if not clip.text:
            assert transcript.text == "", f"{clip.path.name} holds no speech"
        errors += text_errors(transcript.text, clip.text)

    assert errors.length > 300
    assert errors.rate <= MAX_WER


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"language": "de"}, "cannot transcribe `de`"),
        ({"task": "translate"}, "cannot translate `en`"),
    ],
)
def test_what_it_does_not_understand_is_an_error(asked: dict[str, str], says: str) -> None:
    transcriber = Transcriber(default_bundle())

    with pytest.raises(UsageError, match=says):
        transcriber.transcribe(
            shipped_audio()[0].path, TranscribeOptions(decode=DecodeOptions(**asked))
        )


def test_its_prompt_has_the_start_tokens_of_a_multilingual_model() -> None:
    transcriber = Transcriber(default_bundle())
    generation = transcriber.bundle.manifest.generation

    assert start_tokens(generation, "en", "transcribe") == [50258, 50259, 50359, 50363]
    assert transcriber.transcribe(shipped_audio()[0].path).language == "en"


def test_clips_are_of_every_kind() -> None:
    clips = shipped_audio()

    assert len(clips) >= 12
    assert {r.path.suffix for r in clips} == {".wav", ".flac", ".mp3"}
    assert any(r.held_out for r in clips)
    assert len({r.voice for r in clips}) >= 6
    assert any(60 <= r.seconds <= 90 for r in clips)


# Windows that may be short.

ONE_THREAD = RunOptions(threads=1)
TARGETS = core_or_all(["onnxruntime"], ["onnxruntime", "xnnpack"])
ENGLISH = TranscribeOptions(decode=DecodeOptions(language="en"), run=ONE_THREAD)

# Short ones repeat one behaviour; of these, `make test` has noise, hiss and no speech.
FILES = core_or_all(
    [f for f in shipped_audio() if f.path.name[:2] in ("14", "15", "17", "19")],
    list(shipped_audio()),
)

# Of all shipped recordings in windows of 5 s. Measured: 2 of 314 words (docs/explanation/short-windows.md);
# other processors round otherwise, and may hear a few words more wrong.
MAX_WER_5_S = 0.03


@pytest.fixture(scope="module")
def short(
    exported: Callable[..., Bundle],
) -> Callable[[str], Bundle]:
    """`short("xnnpack")`: a random model of 2 s windows and one layer, with windows of 1 s."""
    window = WindowOptions(seconds=1.0, audio_s=1.0)
    return lambda target: exported(target, "one layer", window=window)


@pytest.fixture(scope="module")
def five_seconds(exported: Callable[..., Bundle]) -> Transcriber:
    """The embedded model in windows of 5 s."""
    window = WindowOptions(seconds=5.0)
    return Transcriber(exported("onnxruntime", "default", window=window), ONE_THREAD)


def windows(transcript: Transcript) -> list[list[Segment]]:
    """The segments of each window that has text."""
    return [list(group) for _, group in groupby(transcript.segments, lambda s: s.seek)]


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_bundle_is_verified_and_says_its_window(
    target: str, short: Callable[[str], Bundle]
) -> None:
    manifest = Bundle.open(short(target).folder).manifest

    report = Report.from_json(manifest.verification)
    assert manifest.verified
    assert {check.level for check in report.checks} == set(LEVELS)
    assert manifest.window == Window(
        positions=50, audio_positions=50, context_positions=100, padding=DEFAULT_PADDING
    )
    assert manifest.dims.n_audio_ctx == 50
    shapes = {t.name: t.shape for t in manifest.program("cross_kv").spec.outputs}
    assert manifest.program("encoder").spec.inputs[0].shape == (1, 80, 100)
    assert (shapes["cross_k_0"], shapes["cross_v_0"]) == ((2, 32, 100), (2, 100, 32))


@pytest.mark.parametrize("target", TARGETS)
def test_a_short_bundle_verifies_again_and_transcribes_what_is_longer(
    target: str, short: Callable[[str], Bundle]
) -> None:
    folder = short(target).folder
    audio = 0.1 * np.random.default_rng(2).standard_normal(3 * 16_000).astype(np.float32)
    greedy = replace(
        ENGLISH, decode=DecodeOptions(language="en", max_tokens=8), temperatures=(0.0,)
    )

    transcript = Transcriber(folder, ONE_THREAD).transcribe(audio, greedy)

    assert verify(folder, run=ONE_THREAD)
    assert transcript.duration_s == pytest.approx(3.0)
    assert all(0 <= s.start <= s.end <= s.seek / 100 + 1 for s in transcript.segments)


def test_the_reference_is_of_the_short_window(short: Callable[[str], Bundle]) -> None:
    reference = Reference.from_arrays(short("onnxruntime").reference())

    assert [clip.samples.size for clip in reference.clips] == [16_000, 16_000]
    assert reference.clips[0].features.shape == (50, 64)


def test_a_window_the_checkpoint_cannot_have_is_rejected_before_any_work(
    tiny_checkpoint: Any, tmp_path: Any
) -> None:
    options = ExportOptions(window=WindowOptions(seconds=10))

    with pytest.raises(UsageError, match="cannot be 10 s"):
        export(tiny_checkpoint, "onnxruntime", tmp_path / "out", options)

    assert list(tmp_path.iterdir()) == []


def test_audio_of_any_length_is_transcribed_in_windows_of_5_s_without_a_loop(
    five_seconds: Transcriber,
) -> None:
    assert five_seconds.bundle.manifest.verified
    errors, longest = TextErrors(), 0.0
    for clip in clips_of(FILES):
        transcript = five_seconds.transcribe(clip.samples, ENGLISH)

        longest = max(longest, transcript.duration_s)
        errors += text_errors(transcript.text, clip.text)
        assert not transcript.truncated, clip.name
        assert re.search(r"\b((?:\S+ ){3}\S+)( \1){2}", transcript.text) is None, clip.name
        for window in windows(transcript):
            text = "".join(segment.text for segment in window)
            assert not text or compression_ratio(text.strip()) <= 2.4, clip.name
        for before, after in pairwise(transcript.segments):
            assert before.start <= after.start, clip.name
    assert longest > 60
    assert errors.rate <= MAX_WER_5_S


def test_segments_and_words_stay_inside_of_their_window(five_seconds: Transcriber) -> None:
    long = next(r for r in shipped_audio() if r.seconds > 60)
    seconds = core_or_all(30, 60)
    samples = load_audio(long.path)[: seconds * 16_000]

    transcript = five_seconds.transcribe(samples, replace(ENGLISH, word_timestamps=True))

    assert len(windows(transcript)) >= seconds / 5 - 1
    for segment in transcript.segments:
        begin = segment.seek / 100
        assert begin <= segment.start <= segment.end <= begin + 5.0 + 1e-6
        assert all(begin <= word.start <= word.end <= begin + 5.0 + 1e-6 for word in segment.words)
    assert sum(len(segment.words) for segment in transcript.segments) > 1.5 * seconds
