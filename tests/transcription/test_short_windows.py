"""Windows as short as the rest of the audio: what is computed, and that the text is that of 30 s."""

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import BundleError, UsageError
from whisperport.program.bundle import SILENCE, Bundle
from whisperport.program.checks import Check
from whisperport.program.runner import Array, Binding, Runner
from whisperport.program.window import ShortWindows
from whisperport.runtime import Batch, Decoded, DecodeOptions, Decoder, Engine, load_engine
from whisperport.runtime.decoding.fallback import is_probable, is_whole
from whisperport.speech.audio import VadOptions
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, session, transcribe_files
from whisperport.transcription.live.live_options import LiveOptions
from whisperport.transcription.live.transcriber import LiveTranscriber
from whisperport.verification import short_windows
from whisperport.verification.clips import shipped_clips
from whisperport.verification.reference import Reference, reference_mel
from whisperport.verification.short_windows import check_short_windows
from whisperport.verification.word_check import Transcribed

from ..embedded import default_bundle

SECOND = 16_000
SHORT = RunOptions(threads=1, short_windows=True)
Sizes = dict[str, list[int]]


class Recorded(Runner):
    """A runner that notes how many positions or frames it reads."""

    def __init__(self, inner: Runner, sizes: Sizes) -> None:
        super().__init__(inner.spec, inner.run_lock)
        self.inner, self.sizes = inner, sizes.setdefault(inner.spec.name, [])
        self.free_axes, self.writes_in_place = inner.free_axes, inner.writes_in_place

    def _noted(self, inputs: Any) -> Any:
        axis = self.free_axes.get(self.spec.inputs[0].name, 0)
        self.sizes.append(inputs[0].shape[axis])
        return inputs

    def _run(self, inputs: Any) -> Any:
        return self.inner._run(self._noted(inputs))

    def _run_into(self, inputs: Any, outputs: Any) -> None:
        self.inner._run_into(self._noted(inputs), outputs)

    def binding(self) -> Binding:
        return self.inner.binding()


@pytest.fixture(scope="module")
def full() -> Transcriber:
    return Transcriber(default_bundle(), RunOptions(threads=1, short_windows=False))


@pytest.fixture(scope="module")
def sizes() -> Sizes:
    """Program -> how many frames or positions each of its runs reads."""
    return {}


@pytest.fixture(scope="module")
def short(sizes: Sizes) -> Transcriber:
    wrapped = ("encoder", "cross_kv")
    return Transcriber(
        default_bundle(),
        SHORT,
        wrap_runner=lambda r: Recorded(r, sizes) if r.spec.name in wrapped else r,
    )


@pytest.fixture(autouse=True)
def fresh(sizes: Sizes) -> None:
    for noted in sizes.values():
        noted.clear()


def clip(index: int = 1) -> np.ndarray:
    """Shipped speech; of index 1, of 3.7 s."""
    return shipped_clips(None)[index].samples


def audio_of(decoder: Decoder) -> dict[str, Array]:
    return {name: array.copy() for name, array in decoder._cross_kv.items()}


def random_features(engine: Engine, positions: int) -> np.ndarray:
    random = np.random.default_rng(positions)
    return random.standard_normal((positions, engine.dims.n_audio_state)).astype(np.float32)


@pytest.mark.parametrize("batched", [False, True])
@pytest.mark.parametrize("before", [[1500], [250, 1000], [1000, 250, 500], []])
def test_rows_behind_a_short_window_are_those_of_silence_whatever_was_there_before(
    short: Transcriber, batched: bool, before: list[int]
) -> None:
    engine = short.engine
    decoder = Batch(engine).decoder() if batched else Decoder(engine)
    assert decoder is not None
    features = random_features(engine, 300)

    for positions in before:
        decoder.start_window(random_features(engine, positions))
    decoder.start_window(features)

    padded = np.concatenate([features, engine.silence[300:]])
    expected = engine.cross_kv.run({"features": padded[None]})
    for name, array in audio_of(decoder).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)


@pytest.mark.parametrize("failed", [700, 1500])
def test_the_window_before_a_failed_one_is_computed_again(short: Transcriber, failed: int) -> None:
    engine = short.engine
    decoder = Decoder(engine)
    decoder.start_window(features := random_features(engine, 250))
    with pytest.raises(Exception, match="NaN"):
        decoder.start_window(np.full((failed, engine.dims.n_audio_state), np.nan, np.float32))

    decoder.start_window(features)  # the same object, of which nothing may be kept

    padded = np.concatenate([features, engine.silence[250:]])
    expected = engine.cross_kv.run({"features": padded[None]})
    for name, array in audio_of(decoder).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5, err_msg=name)


def test_a_command_is_encoded_in_4_5_s_and_its_keys_are_computed_once_in_225_rows(
    short: Transcriber, full: Transcriber, sizes: Sizes
) -> None:
    expected = full.transcribe(clip())
    short.transcribe(clip())  # the first call computes silence
    for noted in sizes.values():
        noted.clear()

    transcript = short.transcribe(clip())

    assert transcript.text == expected.text
    assert sizes == {"encoder": [450], "cross_kv": [225]}  # for the language and for the text
    assert [segment.window_s for segment in transcript.segments] == [4.5]
    assert [segment.window_s for segment in expected.segments] == [None]


def test_only_the_end_of_a_long_file_is_a_short_window(
    short: Transcriber, full: Transcriber, sizes: Sizes
) -> None:
    pause = np.zeros(SECOND, np.float32)
    samples = np.concatenate([part for index in range(8) for part in (clip(index), pause)])

    transcript = short.transcribe(samples)

    assert transcript.text == full.transcribe(samples).text
    lengths = list(dict.fromkeys(segment.window_s for segment in transcript.segments))
    assert lengths[0] is None
    assert lengths[-1] is not None
    assert sizes["encoder"][0] == 3000
    assert min(sizes["encoder"]) < 3000


def test_a_clip_of_the_audio_is_a_short_window(short: Transcriber, sizes: Sizes) -> None:
    samples = np.concatenate([np.zeros(2 * SECOND, np.float32), clip(), clip()])
    end = 2 + len(clip()) / SECOND

    transcript = short.transcribe(samples, clip_timestamps=(2.0, end))

    assert {segment.window_s for segment in transcript.segments} == {4.5}
    assert min(segment.start for segment in transcript.segments) >= 2.0


@pytest.mark.parametrize(
    "options",
    [
        {"initial_prompt": "Set a timer."},
        {"prefix": "the"},
        {"word_timestamps": True},
        {"beam_size": 2},
        {"without_timestamps": True},
    ],
)
def test_with_any_option_the_text_is_that_of_30_s(
    short: Transcriber, full: Transcriber, options: dict[str, Any]
) -> None:
    found, expected = (t.transcribe(clip(), **options) for t in (short, full))

    assert found.text == expected.text
    for segment, other in zip(found.segments, expected.segments, strict=True):
        for word, same in zip(segment.words or (), other.words or (), strict=True):
            assert word.word == same.word
            assert word.start == pytest.approx(same.start, abs=0.1)


def test_several_files_are_decoded_together_as_they_are_alone(
    short: Transcriber, full: Transcriber
) -> None:
    clips = [clip(index) for index in range(4)]

    together = list(transcribe_files(clips, short))

    assert [t.text for t in together] == [full.transcribe(samples).text for samples in clips]
    lengths = [{segment.window_s for segment in t.segments} for t in together]
    assert lengths == [
        {segment.window_s for segment in short.transcribe(samples).segments} for samples in clips
    ]


def test_chunks_of_speech_are_short_windows(short: Transcriber, sizes: Sizes) -> None:
    pause = np.zeros(3 * SECOND, np.float32)
    samples = np.concatenate([clip(1), pause, clip(4)])

    transcript = short.transcribe(samples, vad=VadOptions())

    assert max(sizes["encoder"][1:]) < 3000  # the first is of silence, or detects the language
    assert transcript.text == " ".join(short.transcribe(clip(i)).text for i in (1, 4))


def with_windows(transcriber: Transcriber, windows: ShortWindows) -> Callable[[], None]:
    """Give an engine other short windows; the result undoes it."""
    before, transcriber.engine.short_windows = transcriber.engine.short_windows, windows
    return lambda: setattr(transcriber.engine, "short_windows", before)


@pytest.fixture
def never_sure(short: Transcriber, monkeypatch: pytest.MonkeyPatch) -> Iterator[Transcriber]:
    monkeypatch.setattr(sys.modules[is_probable.__module__], "LOG_HALF", 0.1)
    undo = with_windows(short, ShortWindows(positions=(250,), min_logprob=0.0))
    yield short
    undo()


def test_a_window_of_improbable_text_is_decoded_in_full(
    never_sure: Transcriber, full: Transcriber, sizes: Sizes
) -> None:
    transcript = never_sure.transcribe(clip())

    assert sizes["encoder"][-2:] == [500, 3000]
    assert [replace(s, avg_logprob=0, no_speech_prob=0) for s in transcript.segments] == [
        replace(s, avg_logprob=0, no_speech_prob=0) for s in full.transcribe(clip()).segments
    ]


def verified(short: Transcriber) -> Check:
    """Return the check of one clip."""
    engine, reference = short.engine, Reference.from_arrays(short.bundle.reference())
    spoken = next(each for each in reference.clips if len(each.samples) < 4 * SECOND)
    text = Transcribed(clip=spoken, tokens=(), text=spoken.text, expected=spoken.text, unit="words")
    _, check = check_short_windows(
        short.bundle,
        Decoder(engine),
        lambda clip: engine.encode(reference_mel(engine.dims, clip)),
        [text],
        reference.max_tokens,
    )
    return check


def test_a_verification_decodes_in_the_windows_that_the_runtime_uses(
    short: Transcriber, sizes: Sizes
) -> None:
    undo = with_windows(short, ShortWindows(positions=(750,), min_logprob=-0.25))
    try:
        verified(short)
    finally:
        undo()

    assert sizes["encoder"] == [3000, 1500]  # not 450, of the windows of a new export


def test_a_text_that_the_limit_of_tokens_cut_between_two_segments_is_not_whole() -> None:
    begin = 100
    text = Decoded((begin, 7, begin + 9), "en", -0.1, 0.0, 0.0, ended=True)

    assert is_whole(text, begin)
    assert not is_whole(replace(text, ended=False), begin)


@pytest.mark.parametrize("max_tokens", [3, 9])
def test_a_window_without_an_end_of_its_text_is_decoded_in_full(
    short: Transcriber, max_tokens: int
) -> None:
    options = TranscribeOptions(decode=DecodeOptions(max_tokens=max_tokens))

    transcript = short.transcribe(clip(), options)

    assert {segment.window_s for segment in transcript.segments} <= {None}


NOT_WHOLE = pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda tokens: tokens[:-1], id="whose last segment is open"),
        pytest.param(lambda tokens: tokens * 2, id="that says a sentence twice"),
    ],
)


def with_changes(
    decoded: Decoded, changed: Callable[[tuple[Any, ...]], tuple[Any, ...]]
) -> Decoded:
    return replace(decoded, tokens=changed(decoded.tokens), logprobs=changed(decoded.logprobs))


@NOT_WHOLE
def test_a_window_is_decoded_in_full(
    short: Transcriber,
    sizes: Sizes,
    monkeypatch: pytest.MonkeyPatch,
    changed: Callable[[tuple[Any, ...]], tuple[Any, ...]],
) -> None:
    decode = session.decoding_with_fallback

    def with_changed_tokens(decoder: Decoder, features: np.ndarray, *arguments: Any) -> Any:
        decoded, ratio = yield from decode(decoder, features, *arguments)
        is_short = len(features) < short.engine.dims.n_audio_ctx
        return (with_changes(decoded, changed) if is_short else decoded), ratio

    monkeypatch.setattr(session, "decoding_with_fallback", with_changed_tokens)

    transcript = short.transcribe(clip())

    assert sizes["encoder"][-2:] == [450, 3000]
    assert {segment.window_s for segment in transcript.segments} == {None}


@NOT_WHOLE
def test_a_verification_trusts_no_text_that_the_runtime_decodes_in_full(
    short: Transcriber,
    monkeypatch: pytest.MonkeyPatch,
    changed: Callable[[tuple[Any, ...]], tuple[Any, ...]],
) -> None:
    monkeypatch.setattr(short_windows, "FEWEST_CLIPS", 1)
    assert verified(short).value["decoded_again"] == 0
    decode = short_windows.decode_window

    def with_changed_tokens(*arguments: Any) -> Any:
        return with_changes(decode(*arguments), changed)

    monkeypatch.setattr(short_windows, "decode_window", with_changed_tokens)

    assert verified(short).value["decoded_again"] == 1


def test_the_language_is_detected_in_the_window_that_is_decoded(
    short: Transcriber, sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    detected: list[int] = []

    def detect(decoder: Decoder) -> tuple[str, float]:
        detected.append(decoder._rows_used)
        return "en", 0.5

    monkeypatch.setattr(session, "detect_language", detect)

    assert short.transcribe(clip()).language_probability == 0.5
    assert (detected, sizes["encoder"]) == ([225], [450])

    monkeypatch.setattr(sys.modules[is_probable.__module__], "LOG_HALF", 0.1)
    undo = with_windows(short, ShortWindows(positions=(250,), min_logprob=0.0))
    try:
        short.transcribe(clip())
    finally:
        undo()
    assert detected[1:] == [250, 1500]


def test_captions_agree_where_the_window_changes_between_two_passes(
    short: Transcriber, full: Transcriber, sizes: Sizes
) -> None:
    samples = clip(7)  # 4.2 s
    texts = []
    for transcriber in (short, full):
        live = LiveTranscriber(transcriber, LiveOptions(step_s=1.5))
        for piece in np.array_split(samples, 3):
            live.feed(piece)
        live.finish()
        texts.append(live.transcript().text)

    assert texts[0] == texts[1]
    assert len(set(sizes["encoder"])) > 1


def test_concurrent_calls_return_what_single_calls_return(short: Transcriber) -> None:
    clips = [clip(index % 2) for index in range(4)]
    alone = [short.transcribe(samples) for samples in clips]

    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(short.transcribe, clips))

    assert together == alone


# Which bundles have short windows, and the table of silence.


def test_short_windows_are_off_without_evidence_and_on_with_it(tmp_path: Path) -> None:
    windows = ShortWindows(positions=(300,), min_logprob=-0.5)
    bundle = Bundle.open(default_bundle())
    without = replace(bundle, manifest=replace(bundle.manifest, short_windows=None))
    verified = replace(bundle, manifest=replace(bundle.manifest, short_windows=windows))

    def loaded(of: Bundle, short_windows: bool | None) -> ShortWindows | None:
        options = RunOptions(threads=1, trust=True, short_windows=short_windows)
        return load_engine(of, options).short_windows

    assert loaded(without, None) is None
    assert [loaded(verified, choice) for choice in (None, False, True)] == [windows, None, windows]


def test_an_export_writes_the_windows_that_it_verified_and_the_table_of_silence() -> None:
    bundle = Bundle.open(default_bundle())
    (check,) = (
        check
        for check in bundle.manifest.verification["checks"]
        if check["what"] == "short windows"
    )

    assert bundle.manifest.short_windows == ShortWindows(
        positions=(175, 225, 375, 500, 750, 1000), min_logprob=check["value"]["min_logprob"]
    )
    silence = bundle.silence()
    assert silence is not None
    assert silence.dtype == np.float16


def test_a_bundle_whose_programs_have_one_length_cannot_be_asked_for_short_windows(
    micro_bundle: Bundle,
) -> None:
    with pytest.raises(UsageError, match="no short windows"):
        Transcriber(micro_bundle, SHORT)


def with_table(folder: Path, table: np.ndarray) -> Path:
    """Copy the embedded model's bundle, and add a table of silence and short windows."""
    import shutil

    from whisperport.program.bundle.folder import file_sha256
    from whisperport.program.bundle.manifest import MANIFEST, FileEntry

    bundle = Bundle.open(default_bundle())
    shutil.copytree(bundle.folder, folder)
    np.save(folder / SILENCE, table)
    entry = FileEntry(file_sha256(folder / SILENCE), (folder / SILENCE).stat().st_size)
    manifest = replace(
        bundle.manifest,
        files={**bundle.manifest.files, SILENCE: entry},
        short_windows=ShortWindows(positions=(250,), min_logprob=-0.25),
    )
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return folder


def test_a_bundle_with_a_table_of_silence_does_not_compute_it(
    tmp_path: Path, short: Transcriber
) -> None:
    folder = with_table(tmp_path / "bundle", short.engine.silence.astype(np.float16))
    sizes: Sizes = {}

    transcriber = Transcriber(
        folder,
        RunOptions(threads=1, trust=True),
        wrap_runner=lambda r: Recorded(r, sizes) if r.spec.name == "encoder" else r,
    )

    assert transcriber.transcribe(clip()).text == short.transcribe(clip()).text
    assert sizes["encoder"] == [500]


@pytest.mark.parametrize("shape", [(1500, 127), (1499, 128), (1500,)])
def test_a_table_of_another_size_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    folder = with_table(tmp_path / "bundle", np.zeros(shape, np.float16))

    with pytest.raises(BundleError, match=SILENCE):
        Bundle.open(folder)
