"""Features that a device computed become the transcript that the audio itself has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.errors import NumericalError, UsageError
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import MelWindows
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, Transcript
from whisperport.transcription.feature_files import FeatureOptions, transcribe_features
from whisperport.verification.clips import shipped_audio
from whisperport.verification.diagnosis.stored_features import FeatureStorage, read_features
from whisperport.verification.reference import Reference

from ..embedded import default_bundle
from ..extent import core_or_all

FULL_WINDOWS = RunOptions(threads=1, short_windows=False)  # those of the features
OPTIONS = TranscribeOptions(run=FULL_WINDOWS)
SCALE, ZERO_POINT = 0.08, -3


@pytest.fixture(scope="module")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle(), run=FULL_WINDOWS)


@pytest.fixture(scope="module")
def clips(transcriber: Transcriber) -> tuple[Any, Any]:
    """Two reference clips whose features the bundle stores."""
    stored = [
        clip
        for clip in Reference.from_arrays(transcriber.bundle.reference()).clips
        if clip.features.size
    ]
    return stored[0], stored[1]


@pytest.fixture(scope="module")
def spoken(transcriber: Transcriber, clips: tuple[Any, Any]) -> Transcript:
    """The transcript of the first clip's audio."""
    return transcriber.transcribe(clips[0].audio)


def quantized(features: Any) -> Any:
    return np.clip(np.rint(features / SCALE) + ZERO_POINT, -128, 127).astype(np.int8)


def tokens(transcript: Transcript) -> list[tuple[int, ...]]:
    return [segment.tokens for segment in transcript.segments]


FORMS: dict[str, tuple[Any, FeatureStorage]] = {
    "float32": (lambda f: f, FeatureStorage()),
    "float16": (lambda f: f.astype("<f2"), FeatureStorage()),
    "big-endian float32": (
        lambda f: f.astype(">f4"),
        FeatureStorage(dtype="float32", is_big_endian=True),
    ),
    "channels first": (lambda f: f.T, FeatureStorage(order="channels-frames")),
    "int8": (quantized, FeatureStorage(dtype="int8", scale=SCALE, zero_point=ZERO_POINT)),
    "uint16": (
        lambda f: np.rint(f / 0.001 + 32768).astype(np.uint16),
        FeatureStorage(dtype="uint16", scale=0.001, zero_point=32768),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_of_a_device_has_the_tokens_of_the_audio(
    form: str, clips: tuple[Any, Any], spoken: Transcript, tmp_path: Path
) -> None:
    store, storage = FORMS[form]
    path = tmp_path / "output.bin"
    np.ascontiguousarray(store(clips[0].features)).tofile(path)

    found = transcribe_features(
        path, default_bundle(), options=OPTIONS, stored=FeatureOptions(storage=storage)
    )

    assert tokens(found) == tokens(spoken)
    assert found.text == spoken.text != ""
    assert found.language == spoken.language
    assert found.duration_s == 30.0


@pytest.mark.parametrize(
    "shape", [(1, 1500, 128), (1, 128, 1, 1500), (1, 1500, 1, 128), (128, 1500)], ids=str
)
def test_the_shape_of_an_npy_file_states_the_order_of_its_axes(
    shape: tuple[int, ...], clips: tuple[Any, Any], tmp_path: Path
) -> None:
    features = clips[0].features
    stored = features if shape.index(1500) < shape.index(128) else features.T
    np.save(tmp_path / "output.npy", stored.reshape(shape))

    read = read_features(tmp_path / "output.npy", (1500, 128))

    assert np.array_equal(read, features)


# Name -> how a device stores features that nobody describes to us.
UNKNOWN: dict[str, Any] = {
    "int8, channels first, padded to 1504": lambda f: np.pad(quantized(f).T, ((0, 0), (0, 4))),
    "stored integers as float32": lambda f: quantized(f).astype(np.float32),
    "tiles of 16 channels in float16": lambda f: (
        f.reshape(1500, 8, 16).transpose(1, 0, 2).astype("<f2")
    ),
    "big-endian": lambda f: f.astype(">f4"),
    "a header of 64 bytes": lambda f: np.concatenate([np.zeros(16, np.float32), f.reshape(-1)]),
    "as it is": lambda f: f,
}


@pytest.mark.parametrize("form", core_or_all(tuple(UNKNOWN)[:2], tuple(UNKNOWN)))
def test_the_output_for_a_reference_clip_shows_how_a_device_stores_features(
    form: str, transcriber: Transcriber, clips: tuple[Any, Any], tmp_path: Path
) -> None:
    example, output = tmp_path / "reference.bin", tmp_path / "output.bin"
    for path, clip in zip((example, output), clips, strict=True):
        np.ascontiguousarray(UNKNOWN[form](clip.features)).tofile(path)
    said: list[str] = []

    found = transcribe_features(
        output,
        default_bundle(),
        options=OPTIONS,
        stored=FeatureOptions(like=example),
        recognized=said.append,
    )

    assert tokens(found) == tokens(transcriber.transcribe(clips[1].audio))
    assert bool(said) == (form != "as it is")


@pytest.mark.parametrize("example", core_or_all(("cut",), ("cut", "other clip", "noise")))
def test_an_example_with_a_fault_of_its_own_is_rejected(
    example: str, clips: tuple[Any, Any], tmp_path: Path
) -> None:
    path = tmp_path / "example.bin"
    random = np.random.default_rng(0).standard_normal((1500, 128))
    faulty = {
        "cut": clips[0].features[:900],
        "other clip": clips[1].features,
        "noise": random.astype(np.float32),
    }
    faulty[example].tofile(path)

    with pytest.raises(UsageError, match="does not show how") as caught:
        transcribe_features(
            path, default_bundle(), options=OPTIONS, stored=FeatureOptions(like=path)
        )

    assert caught.value.why
    assert "diagnose" in caught.value.hint


def test_each_window_follows_the_one_before_and_words_have_times(
    transcriber: Transcriber, clips: tuple[Any, Any]
) -> None:
    features = np.stack([clip.features for clip in clips])

    found = transcriber.transcribe_features(features, TranscribeOptions(word_timestamps=True))

    first, second = found.segments[0], found.segments[-1]
    assert found.duration_s == 60.0
    assert 0 <= first.start < first.end < 30 <= second.start < second.end < 60
    assert [word.word for word in first.words] == first.text.split(" ")[1:] or first.words
    assert all(30 <= word.start <= word.end <= 60 for word in second.words)
    assert second.words
    assert (first.seek, second.seek) == (0, 3000)


def test_an_array_that_is_filled_again_is_transcribed_again(
    transcriber: Transcriber, clips: tuple[Any, Any]
) -> None:
    """The decoder of the call before knows the features of its last window by their array."""
    expected = [tokens(transcriber.transcribe_features(clip.features)) for clip in clips]
    features = clips[0].features.copy()
    transcripts = []

    for clip in clips:
        features[:] = clip.features
        transcripts.append(tokens(transcriber.transcribe_features(features)))

    assert transcripts == expected


def test_text_that_the_end_of_a_window_cuts_is_kept(transcriber: Transcriber) -> None:
    long = max(shipped_audio(), key=lambda file: file.seconds)
    dims = transcriber.engine.dims
    mel = MelWindows(long.path, dims.n_mels, dims.n_frames)
    windows = [mel.window(start)[0][:, : dims.n_frames] for start in (0, 3000)]
    mel.close()

    found = transcriber.transcribe_features([transcriber.engine.encode(w) for w in windows])

    words = found.text.lower().replace(",", "").replace(".", "").split()
    expected = long.text.lower().replace(",", "").replace(".", "").split()
    assert len(words) > 0.7 * len(expected) * 60 / long.seconds
    ends = [segment.end for segment in found.segments]
    assert ends == sorted(ends)
    assert ends[-1] <= 60


def test_options_of_decoding_apply(transcriber: Transcriber, clips: tuple[Any, Any]) -> None:
    few = TranscribeOptions(decode=DecodeOptions(max_tokens=3), temperatures=(0,))

    found = transcriber.transcribe_features(clips[0].features, few)

    assert sum(len(segment.tokens) for segment in found.segments) <= 3
    assert found.truncated == (0.0,)


@pytest.mark.parametrize(
    ("size", "explained"),
    [(192_000, "int8 or uint8"), (768_000 - 4, "fit no dtype"), (1, "fit no dtype")],
)
def test_a_file_of_another_size_is_explained(size: int, explained: str, tmp_path: Path) -> None:
    path = tmp_path / "output.bin"
    path.write_bytes(bytes(range(256)) * (size // 256) + bytes(size % 256))

    with pytest.raises(UsageError, match=f"has {size:,} bytes") as caught:
        transcribe_features(path, default_bundle(), options=OPTIONS)

    assert explained in caught.value.why
    assert "diagnose" in caught.value.hint


def test_the_sizes_1_2_mb_and_4_6_mb_of_whisper_small_are_explained(tmp_path: Path) -> None:
    # given: 1,152,000 bytes are 1500 x 768 values of 8 bits; 4,608,000 bytes the same in float32
    small = tmp_path / "output.bin"
    small.write_bytes(bytes(1_152_000))
    full = tmp_path / "full.bin"
    full.write_bytes(bytes(4_608_000))

    with pytest.raises(UsageError) as caught:
        read_features(small, (1500, 768))

    assert "1500 x 768 values of 1 byte(s) each: `features` as int8 or uint8" in caught.value.why
    assert "4,608,000" in caught.value.what
    assert read_features(full, (1500, 768)).shape == (1500, 768)


def test_integers_need_their_scale(clips: tuple[Any, Any], tmp_path: Path) -> None:
    path = tmp_path / "output.bin"
    quantized(clips[0].features).tofile(path)
    np.save(tmp_path / "output.npy", quantized(clips[0].features))

    for file, storage in (
        (path, FeatureStorage(dtype="int8")),
        (tmp_path / "output.npy", FeatureStorage()),
    ):
        with pytest.raises(UsageError, match="int8 integers without a scale"):
            read_features(file, (1500, 128), storage)


def test_features_that_the_encoder_cannot_have_computed_are_rejected(
    clips: tuple[Any, Any], tmp_path: Path
) -> None:
    features, path = clips[0].features, tmp_path / "output.bin"
    cases = (
        (features.T, "channels-frames"),
        (quantized(features).astype(np.float32), "standard deviation"),
        (np.zeros_like(features), "standard deviation"),
    )

    for stored, why in cases:
        np.ascontiguousarray(stored).tofile(path)

        with pytest.raises(UsageError, match="not as this bundle's encoder") as caught:
            transcribe_features(path, default_bundle(), options=OPTIONS)

        assert why in caught.value.why


def test_values_that_are_not_finite_are_rejected(
    transcriber: Transcriber, clips: tuple[Any, Any]
) -> None:
    features = clips[0].features.copy()
    features[7, 3:5] = np.nan, np.inf

    with pytest.raises(NumericalError, match="window 2 of 2 contain 2 values"):
        transcriber.transcribe_features([clips[0].features, features])


@pytest.mark.parametrize(
    "features",
    [
        np.zeros((1499, 128), np.float32),
        np.zeros((128, 1500), np.float32),
        np.zeros((1500, 128), np.int8),
        np.zeros((0, 1500, 128), np.float32),
        [],
    ],
    ids=lambda f: str(np.shape(f)),
)
def test_arrays_of_another_shape_are_rejected(transcriber: Transcriber, features: Any) -> None:
    with pytest.raises(UsageError, match="features"):
        transcriber.transcribe_features(features)


@pytest.mark.parametrize(
    "options",
    [
        {"clip_timestamps": (1.0,)},
        {"hallucination_silence_threshold": 1.0, "word_timestamps": True},
    ],
)
def test_options_that_need_the_audio_are_rejected(
    transcriber: Transcriber, clips: tuple[Any, Any], options: Any
) -> None:
    with pytest.raises(UsageError, match="cannot be used with features"):
        transcriber.transcribe_features(clips[0].features, TranscribeOptions(**options))


@pytest.mark.parametrize(
    "storage",
    [
        {"dtype": "complex64"},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"zero_point": 3.0},
        {"scale": 1.0, "zero_point": float("inf")},
    ],
)
def test_a_storage_that_cannot_be_is_rejected(storage: Any) -> None:
    with pytest.raises(UsageError):
        FeatureStorage(**storage)


def test_a_bundle_without_its_encoder_transcribes_features_and_no_audio(
    clips: tuple[Any, Any], spoken: Transcript
) -> None:
    loaded: list[str] = []

    def seen(runner: Any) -> Any:
        loaded.append(type(runner).__name__)
        return runner

    transcriber = Transcriber(default_bundle(), FULL_WINDOWS, wrap_runner=seen, encoder=False)

    found = transcriber.transcribe_features(clips[0].features)

    assert loaded.count("_NotLoaded") == 1
    assert tokens(found) == tokens(spoken)
    with pytest.raises(UsageError, match="`encoder` is not loaded"):
        transcriber.transcribe(clips[0].audio)


def test_a_window_has_as_many_positions_as_the_checkpoint(exported: Any) -> None:
    bundle = exported("onnxruntime")  # windows of 2 s, random weights
    transcriber = Transcriber(bundle, FULL_WINDOWS)
    clip = Reference.from_arrays(bundle.reference()).clips[1]  # it fills a window
    options = TranscribeOptions(
        decode=DecodeOptions(max_tokens=6, language="en"), temperatures=(0,)
    )

    found = transcriber.transcribe_features(clip.features, options)
    heard = transcriber.transcribe(clip.audio, options)

    assert found.duration_s == 2.0
    assert tokens(found)[0][:6] == tokens(heard)[0][:6] != ()


@pytest.mark.parametrize("number", [10**30 * 10**10, 10**400, float("inf"), float("nan")])
def test_a_number_that_float32_cannot_store_is_rejected(number):
    with pytest.raises(UsageError, match="zero point"):
        FeatureStorage(dtype="int8", scale=1.0, zero_point=number)
    with pytest.raises(UsageError, match="scale"):
        FeatureStorage(dtype="int8", scale=number)


def test_a_large_integer_is_a_zero_point():
    assert FeatureStorage(dtype="int8", scale=1.0, zero_point=10**30).zero_point == 10**30
