"""Calibration sets: which audio is used, which is skipped, and the layout of the arrays."""

import shutil
import wave
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from whisperport.build.calibration.arrays import ArrayWriter, array_files
from whisperport.build.calibration.calibration_set import check_enough
from whisperport.build.calibration.spectrograms import (
    check_spectrograms,
    spectrograms_of,
    stored_spectrograms,
)
from whisperport.errors import AudioError
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.speech.audio import load_audio, log_mel
from whisperport.targets.compiler import CalibrationNeed
from whisperport.verification.clips import shipped_audio
from whisperport.verification.recording.audio_files import (
    CalibrationAudio,
    audio_files,
    fingerprint,
)

ENCODER = ProgramSpec(
    "encoder", (TensorSpec("mel", (1, 80, 1, 200)),), (TensorSpec("features", (1, 100, 64)),)
)
DECODER = ProgramSpec(
    "uncached_decoder",
    (TensorSpec("features", (1, 4, 5)), TensorSpec("embeddings", (1, 5, 2, 1))),
    (TensorSpec("logits_0", (1, 2, 7)),),
)
SECOND = 16_000


def last_axis(array: np.ndarray) -> np.ndarray:
    """Channels last, as many compilers want their samples: (1, C, H, W) as (H, W, C)."""
    return array[0].transpose(1, 2, 0) if array.ndim == 4 else array


def need(samples: int, spec: ProgramSpec = ENCODER, **more) -> CalibrationNeed:
    names = tuple(f"input_layer{i}" for i in range(1, len(spec.inputs) + 1))
    return CalibrationNeed(samples=samples, names=names, layout=last_axis, **more)


def write(samples, folder: Path, needed: int, spec: ProgramSpec = ENCODER, **more) -> int:
    writer = ArrayWriter(spec, need(needed, spec, **more), folder)
    writer.add(samples)
    return writer.close()


def speech(seconds: float, part: int = 0) -> np.ndarray:
    """Return a part of the long clip of the package, at half of full scale."""
    samples = np.roll(long_clip(), -8 * part * SECOND)[: round(seconds * SECOND)]
    return np.round(samples / np.abs(samples).max() * 16000).astype(np.int16)


@cache
def long_clip() -> np.ndarray:
    (path,) = (clip.path for clip in shipped_audio() if "long" in clip.path.name)
    return load_audio(path)


def noise(seconds: float, *, pink: bool = False) -> np.ndarray:
    samples = np.random.default_rng(0).standard_normal(round(seconds * SECOND))
    if pink:
        bins = np.fft.rfft(samples)
        samples = np.fft.irfft(bins / np.sqrt(np.arange(1, bins.size + 1)), samples.size)
    return np.round(samples / np.abs(samples).max() * 16000).astype(np.int16)


def write_wav(path: Path, samples: np.ndarray, rate: int = SECOND) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(samples.astype("<i2").tobytes())
    return path


def _audio(*files: Path, **options) -> CalibrationAudio:
    return CalibrationAudio(files=files, seconds=2.0, **options)


def test_every_window_is_used_as_recorded_quiet_and_loud(tmp_path):
    audio = _audio(
        write_wav(tmp_path / "a.wav", speech(4)), write_wav(tmp_path / "b.wav", speech(2, 1))
    )

    levels = [float(np.abs(window).max()) for window in audio.windows()]

    recorded = [levels[0], levels[7], levels[5]]  # of windows 0, 1 and 2, each in another turn
    assert len(levels) == 9
    assert max(recorded) < 0.6
    assert levels[1] == pytest.approx(recorded[1] / 10, rel=1e-3)  # quiet
    assert levels[2] == pytest.approx(1.0)  # loud


def test_a_set_is_spectrograms_channels_last_on_disk(tmp_path):
    file = write_wav(tmp_path / "a.wav", speech(2))

    mels = ([mel[None, :, None, :]] for mel in spectrograms_of(_audio(file), ENCODER))

    count = write(mels, tmp_path, 3)

    (name,) = array_files(need(3))
    array = np.load(tmp_path / name)
    assert (count, array.shape, array.dtype) == (3, (3, 1, 200, 80), "f4")
    samples = speech(2).astype(np.float32) / 32768
    assert np.allclose(array[0, 0].T, log_mel(samples, 80, n_frames=200), atol=1e-5)
    assert array.flags.c_contiguous


def test_a_set_stops_at_what_is_needed_and_is_cut_to_what_there_is(tmp_path):
    mels = [(np.full((1, 80, 1, 200), i, np.float32),) for i in range(4)]
    assert write(mels, tmp_path, 2) == 2
    assert np.load(tmp_path / "input_layer1.npy").shape == (2, 1, 200, 80)
    assert write(mels, tmp_path, 9) == 4
    cut = np.load(tmp_path / "input_layer1.npy")
    assert cut.shape == (4, 1, 200, 80)
    assert [one.max() for one in cut] == [0, 1, 2, 3]
    assert write([], tmp_path, 9) == 0


def test_a_set_of_several_inputs_has_an_array_for_each_of_the_dtype_that_is_wanted(tmp_path):
    features = np.arange(20, dtype=np.float32).reshape(1, 4, 5)
    embeddings = np.arange(10, dtype=np.float32).reshape(1, 5, 2, 1)

    write([(features, embeddings)] * 2, tmp_path, 2, DECODER, dtype="float16")

    first, second = (np.load(tmp_path / name) for name in array_files(need(2, DECODER)))
    assert first.dtype == second.dtype == np.float16
    assert first.shape == (2, 1, 4, 5)  # (N, 1, T, C)
    assert second.shape == (2, 2, 1, 5)  # (N, S, 1, C)
    assert (second[0, :, 0] == embeddings.reshape(5, 2).T).all()


def test_a_full_disk_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    usage = type("usage", (), {"free": 575_000})  # of 576,000 bytes that are needed
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(AudioError, match="disk is too full") as caught:
        write([], tmp_path, 9)
    assert caught.value.why == "1 MB are needed; 0 MB are free"
    assert not list(tmp_path.iterdir())


# Which audio is skipped.


def test_silence_constants_copies_and_short_windows_are_skipped(tmp_path):
    good = write_wav(tmp_path / "good.wav", speech(2))
    copy = write_wav(tmp_path / "copy.wav", speech(2))
    silent = write_wav(tmp_path / "silent.wav", np.zeros(2 * SECOND, np.int16))
    hum = write_wav(tmp_path / "constant.wav", np.full(2 * SECOND, 9000, np.int16))
    scrap = write_wav(tmp_path / "scrap.wav", speech(0.5, 2))
    text = tmp_path / "notes.txt"
    text.write_text("no audio")
    audio = _audio(good, copy, silent, hum, scrap, text)

    assert len(list(audio.windows())) == 3
    assert audio.skipped == {
        "identical to another": 1,
        "silent": 1,
        "constant": 1,
        "shorter than 1 s": 1,
        "not readable as audio": 1,
    }


@pytest.mark.parametrize(
    "samples",
    [
        noise(4),
        noise(4) // 10,
        noise(4, pink=True),
        np.int16(9000 * np.sin(2 * np.pi * 440.3 * np.arange(4 * SECOND) / SECOND)),
        np.int16(noise(4) * np.exp(-(np.arange(4 * SECOND) % 4000) / 600)),
    ],
    ids=["white noise", "quiet", "pink noise", "tone", "drum"],
)
def test_audio_without_speech_is_skipped_and_the_error_says_what_it_would_have_cost(
    tmp_path, samples
):
    audio = _audio(write_wav(tmp_path / "a.wav", samples))

    assert not list(audio.windows())

    assert audio.skipped == {"without speech": 2}
    with pytest.raises(AudioError, match="too little audio") as caught:
        check_enough(ENCODER, need(3), 0, audio)
    assert "skipped: 2 without speech. Measured" in caught.value.why
    assert "18 of 55 words" in caught.value.why
    audio.force = True
    assert len(list(audio.windows())) == 6


def test_every_clip_with_speech_is_used_and_the_one_without_is_not():
    for clip in shipped_audio():
        audio = CalibrationAudio(files=[clip.path], seconds=30.0)

        assert (next(audio.windows(), None) is not None) == ("no-speech" not in clip.path.name)


def test_a_file_with_a_nan_is_skipped_with_the_reason(tmp_path):
    samples = speech(2).astype(np.float32) / 32768
    samples[5000] = np.nan
    header = b"RIFF\xff\xff\xff\xffWAVEfmt \x10\0\0\0\x03\0\x01\0"
    rates = np.array([SECOND, 4 * SECOND], "<u4").tobytes() + b"\x04\0\x20\0"
    data = b"data" + np.uint32(samples.nbytes).tobytes() + samples.tobytes()
    (tmp_path / "nan.wav").write_bytes(header + rates + data)
    audio = _audio(tmp_path / "nan.wav")

    assert not list(audio.windows())
    assert audio.skipped == {"with a NaN or an infinity": 1}


def test_force_uses_silence_and_copies_but_no_clip_of_the_reference(tmp_path):
    used = speech(2)
    files = [write_wav(tmp_path / f"{i}.wav", speech(2, 1)) for i in range(2)]
    files += [write_wav(tmp_path / "clip.wav", used)]
    files += [write_wav(tmp_path / "silent.wav", np.zeros(2 * SECOND, np.int16))]
    audio = _audio(*files, excluded=frozenset({fingerprint(used)}), force=True)
    assert len(list(audio.windows())) == 9
    assert audio.skipped == {"used to verify the bundle": 1}


def test_audio_sampled_below_16_khz_is_skipped_and_reported(tmp_path):
    narrow = write_wav(tmp_path / "phone.wav", speech(2), rate=8000)
    audio = _audio(narrow)
    assert not list(audio.windows())
    with pytest.raises(AudioError, match="too little audio") as caught:
        check_enough(ENCODER, need(3), 0, audio)
    assert "1 sampled below 16 kHz" in caught.value.why


def test_higher_sample_rates_are_resampled_and_used(tmp_path):
    audio = _audio(write_wav(tmp_path / "studio.wav", speech(6), rate=48_000))
    assert {window.size for window in audio.windows()} == {2 * SECOND}


def test_a_clip_of_the_reference_is_recognized_by_its_audio(tmp_path):
    clip = speech(2)
    longer = np.concatenate([np.zeros(800, np.int16), clip, speech(3, 5)])
    file = write_wav(tmp_path / "renamed.wav", longer)
    audio = _audio(file, excluded=frozenset({fingerprint(clip)}))
    assert not list(audio.windows())
    assert audio.skipped == {"used to verify the bundle": 1}
    assert fingerprint(clip.astype(np.float32) / 32768) == fingerprint(clip)


@pytest.mark.parametrize("there", [True, False], ids=["empty", "missing"])
def test_a_folder_without_audio_files_is_an_error(tmp_path, there):
    folder = tmp_path / "recordings"
    if there:
        folder.mkdir()
    with pytest.raises(AudioError, match="no audio files"):
        audio_files(folder)


def test_files_are_mixed_and_always_in_the_same_order(tmp_path):
    for i in range(20):
        write_wav(tmp_path / f"speaker{i // 5}" / f"{i}.wav", speech(0.1, 1))
    first = audio_files(tmp_path)
    assert first == audio_files(tmp_path)
    assert first != sorted(first)
    assert len(first) == 20


def test_too_few_samples_report_the_hours_needed_unless_forced(tmp_path):
    audio = CalibrationAudio(files=[], seconds=10.0)
    with pytest.raises(AudioError) as caught:
        check_enough(ENCODER, need(3340, fewer_hint="`--fast` needs fewer"), 57, audio)
    assert "57 samples of 10 s" in caught.value.why
    assert "3.1 h" in caught.value.why
    assert "`--fast` needs fewer" in caught.value.hint
    check_enough(ENCODER, need(3340), 3340, audio)
    audio.force = True
    check_enough(ENCODER, need(3340), 1, audio)
    with pytest.raises(AudioError):
        check_enough(ENCODER, need(3340), 0, audio)


# Spectrograms from an .npy.


def _ready(tmp_path: Path, array: np.ndarray, **options) -> int:
    path = tmp_path / "set.npy"
    np.save(path, array)
    return check_spectrograms(path, ENCODER, last_axis, 2, **options)


def _mels(n: int, frames: int = 200) -> np.ndarray:
    return _mels_of(*(speech(frames / 100, part) for part in range(n)))


def _mels_of(*clips: np.ndarray) -> np.ndarray:
    made = [log_mel(clip / 32768.0, 80, n_frames=clip.size // 160).T for clip in clips]
    return np.stack(made)[:, None].astype(np.float32)


def test_an_array_of_spectrograms_is_used(tmp_path):
    assert _ready(tmp_path, _mels(2)) == 2
    assert _ready(tmp_path, _mels(3)) == 2  # no more are read than are needed


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (_mels(2, frames=300), "does not fit the encoder"),
        (_mels(2)[:, 0], "does not fit the encoder"),
        (_mels(2).transpose(0, 3, 1, 2), "does not fit the encoder"),
        (_mels(2).astype(np.float64), "does not fit the encoder"),
        (speech(2), "does not fit the encoder"),
        (20 * _mels(2), "not Whisper's log-mel"),  # in dB
        (_mels(2) - 4, "not Whisper's log-mel"),
        (np.where(np.arange(80) == 3, np.nan, _mels(2)).astype("f4"), "not Whisper's log-mel"),
        (_mels(1), "not a usable calibration set"),
        (np.repeat(_mels(1), 2, axis=0), "identical"),
        (np.zeros((2, 1, 200, 80), np.float32), "constant"),
        (_mels_of(noise(2), noise(2, pink=True)), "2 steady, as noise is"),
    ],
    ids=[
        "window",
        "3-D",
        "NCHW",
        "float64",
        "audio",
        "dB",
        "shift",
        "NaN",
        "few",
        "copies",
        "zeros",
        "noise",
    ],
)
def test_an_array_that_holds_something_else_is_rejected(tmp_path, array, message):
    with pytest.raises(AudioError, match=message):
        _ready(tmp_path, array)


def test_spectrograms_are_read_back_out_of_a_compilers_layout(tmp_path):
    mels = _mels(2)
    np.save(tmp_path / "set.npy", mels)
    read = list(stored_spectrograms(tmp_path / "set.npy", ENCODER, last_axis))
    assert np.array_equal(read, mels[:, 0].transpose(0, 2, 1))


def test_force_uses_few_and_constant_arrays_but_no_other_shape_or_scale(tmp_path):
    assert _ready(tmp_path, np.zeros((1, 1, 200, 80), np.float32), force=True) == 1
    with pytest.raises(AudioError):
        _ready(tmp_path, 20 * _mels(2), force=True)
    (tmp_path / "cut.npy").write_bytes(b"\x93NUMPY\x01\x00")
    with pytest.raises(AudioError, match="cannot read"):
        check_spectrograms(tmp_path / "cut.npy", ENCODER, last_axis, 2, force=True)
