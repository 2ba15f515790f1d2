"""Files that are missing, damaged, or not audio."""

import contextlib
import io
import struct
import warnings
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from whisperport.errors import AudioError
from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.speech.audio.decode import ClippedAudioWarning, DamagedAudioWarning

from .conftest import CODECS, WriteAudio, tone

SOUND = tone(SAMPLE_RATE, 1.0)


def wav(n_bytes: int, *, rate: int = SAMPLE_RATE, channels: int = 1, bits: int = 16) -> bytes:
    """A wav of integers, `n_bytes` of zeros, written by hand."""
    size = bits // 8 * channels
    form = struct.pack("<HHIIHH", 1, channels, rate, rate * size % 2**32, size, bits)
    body = b"WAVEfmt " + struct.pack("<I", 16) + form + b"data" + struct.pack("<I", n_bytes)
    return b"RIFF" + struct.pack("<I", len(body) + n_bytes) + body + bytes(n_bytes)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "is empty"),
        (b"hello, world\n" * 500, "not an audio file|no audio"),
        (bytes(100_000), "not an audio file|no audio"),
        (b"RIFF", "is not an audio file"),
        (wav(0), "contains no samples"),
        (wav(2), r"too short: 1 sample at 16 kHz(.|\n)*160 samples, 10 ms"),
        (wav(318), "too short: 159 samples"),
        (wav(3200, rate=1), "sample rate of 1 Hz"),
        (wav(3200, rate=2_000_000), "sample rate of 2000000 Hz"),
        (wav(20_000, channels=20, bits=64), r"cannot be mixed down(.|\n)*20 channels"),
    ],
)
@pytest.mark.parametrize("suffix", ["wav", "mp3", "txt"])
def test_a_file_that_is_not_audio_is_rejected(
    tmp_path: Path, content: bytes, expected: str, suffix: str
) -> None:
    path = tmp_path / f"talk.{suffix}"
    path.write_bytes(content)

    with pytest.raises(AudioError, match=expected) as caught:
        load_audio(path)

    assert "talk." in caught.value.what


def test_a_tag_that_is_not_utf8_does_not_keep_a_file_from_being_read() -> None:
    name = b"caf\xe9\0"  # Latin-1
    tags = (
        b"LIST"
        + struct.pack("<I4s4sI", 12 + len(name) + 1, b"INFO", b"INAM", len(name))
        + name
        + b"\0"
    )
    plain = wav(3200)
    tagged = plain[:4] + struct.pack("<I", len(plain) - 8 + len(tags)) + plain[8:] + tags

    samples = load_audio(io.BytesIO(tagged))

    np.testing.assert_array_equal(samples, load_audio(io.BytesIO(plain)))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match=r"no\.wav` does not exist"):
        load_audio(tmp_path / "no.wav")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (
            "https://example.org/talk.wav",
            r"`https://example\.org/talk\.wav` is an address(.|\n)*download it first",
        ),
        ("talk\0.wav", "null "),
        ("", "path of the audio file is empty"),
        *((one, "cannot read audio from") for one in (io.StringIO("text"), 3, None, [0.0] * 400)),
    ],
)
def test_what_names_no_file_is_rejected(source: Any, words: str) -> None:
    with pytest.raises(AudioError, match=words):
        load_audio(source)


@pytest.mark.parametrize("prefix", ["file:", "file://", "concat:", "subfile:", "cache:", "async:"])
def test_a_protocol_of_ffmpeg_before_a_path_opens_nothing(
    write_audio: WriteAudio, prefix: str
) -> None:
    path = write_audio(SOUND, SAMPLE_RATE)

    with pytest.raises(AudioError, match=r"does not exist|is an address"):
        load_audio(f"{prefix}{path}")


def test_a_folder_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(AudioError, match="is a folder"):
        load_audio(tmp_path)


def test_a_file_one_may_not_read_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "talk.wav"
    path.write_bytes(wav(3200))

    def reject(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", reject)  # tests may run as root, who may read anything
    with pytest.raises(AudioError, match=r"cannot open(.|\n)*Permission denied"):
        load_audio(path)


def test_a_video_without_audio_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "silent.mp4"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 32
        stream.pix_fmt = "yuv420p"
        picture = av.VideoFrame.from_ndarray(np.zeros((32, 32, 3), np.uint8), format="rgb24")
        container.mux(stream.encode(picture))
        container.mux(stream.encode(None))

    with pytest.raises(AudioError, match=r"contains no audio(.|\n)*video"):
        load_audio(path)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_float_file_with_a_nan_is_rejected(write_audio: WriteAudio, value: float) -> None:
    samples = SOUND.copy()
    samples[5000] = value
    path = write_audio(samples, SAMPLE_RATE, codec="pcm_f32le")

    with pytest.raises(AudioError, match="NaN or an infinity"):
        load_audio(path)


def test_floats_that_were_never_scaled_are_warned_of(write_audio: WriteAudio) -> None:
    path = write_audio(32768 * SOUND, SAMPLE_RATE, codec="pcm_f32le")

    with pytest.warns(
        ClippedAudioWarning, match="clipped at 1: they may be unscaled integers"
    ) as caught:
        samples = load_audio(path)

    assert len(caught) == 1
    assert np.abs(samples).max() <= 1


@pytest.mark.parametrize("codec", ["pcm_f32le", "pcm_f64le"])
def test_hot_floats_are_clipped_without_a_word(write_audio: WriteAudio, codec: str) -> None:
    path = write_audio(SOUND * (1.9 / np.abs(SOUND).max()), SAMPLE_RATE, codec=codec)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = load_audio(path)

    assert np.abs(samples).max() == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("suffix", ["wav", "flac", "mp3"])
def test_a_cut_file_gives_what_is_there_and_warns(write_audio: WriteAudio, suffix: str) -> None:
    whole = write_audio(tone(SAMPLE_RATE, 4.0), SAMPLE_RATE, suffix)
    path = whole.with_name(f"cut_{whole.name}")
    path.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])

    with pytest.warns(DamagedAudioWarning) as caught:
        samples = load_audio(path)

    assert any("is incomplete: its header states" in str(warning.message) for warning in caught)
    assert SAMPLE_RATE < samples.size < 3 * SAMPLE_RATE  # half the bytes: about 2 s
    n_common = samples.size - 1600
    np.testing.assert_allclose(
        samples[1600:n_common], load_audio(whole)[1600:n_common], atol=1 / 32768
    )


def test_a_cut_m4a_has_lost_its_index_and_is_rejected(write_audio: WriteAudio) -> None:
    data = write_audio(SOUND, SAMPLE_RATE, "m4a").read_bytes()

    with pytest.raises(AudioError, match="is not an audio file"):
        load_audio(io.BytesIO(data[: len(data) // 2]))


@pytest.mark.parametrize("size", [0, 0xFFFF_FFFF])
def test_a_wav_that_does_not_know_its_length_is_read_without_a_warning(size: int) -> None:
    data = bytearray(wav(SAMPLE_RATE * 2))
    data[40:44] = data[4:8] = struct.pack("<I", size or 0xFFFF_FFFF)
    data[4:8] = struct.pack("<I", size)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        samples = load_audio(io.BytesIO(bytes(data)))

    assert samples.size == SAMPLE_RATE


@pytest.mark.parametrize(
    "playlist",
    [
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\n{path}\n#EXT-X-ENDLIST\n",
        "#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\nfile://{path}\n#EXT-X-ENDLIST\n",
        "ffconcat version 1.0\nfile {path}\n",
        "ffconcat version 1.0\nfile {name}\n",
    ],
)
@pytest.mark.parametrize("suffix", ["wav", "m3u8", "txt"])
def test_a_playlist_posing_as_audio_reaches_no_other_file(
    write_audio: WriteAudio, playlist: str, suffix: str
) -> None:
    secret = write_audio(SOUND, SAMPLE_RATE, "mp3")
    path = secret.with_name(f"playlist_{secret.stem}.{suffix}")
    path.write_text(playlist.format(path=secret, name=secret.name))

    with pytest.raises(AudioError):
        load_audio(path)


def test_nothing_is_printed_about_damage(
    write_audio: WriteAudio, capfd: pytest.CaptureFixture[str]
) -> None:
    for suffix in CODECS:
        data = bytearray(write_audio(SOUND, SAMPLE_RATE, suffix).read_bytes())
        for i in range(len(data) // 3, len(data), 97):
            data[i] ^= 0xFF
        with warnings.catch_warnings(), contextlib.suppress(AudioError):
            warnings.simplefilter("ignore")
            load_audio(io.BytesIO(bytes(data)))

    assert capfd.readouterr() == ("", "")


@pytest.fixture(scope="session")
def encoded(write_audio: WriteAudio) -> dict[str, bytes]:
    return {s: write_audio(SOUND[:4800], SAMPLE_RATE, s).read_bytes() for s in CODECS}


@given(data=st.data())
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_damage_is_decoded_or_rejected(encoded: dict[str, bytes], data: st.DataObject) -> None:
    content = bytearray(encoded[data.draw(st.sampled_from(sorted(CODECS)))])
    places = st.one_of(st.integers(0, 100), st.integers(0, len(content) - 1))
    for place in data.draw(st.lists(places, max_size=8)):
        content[min(place, len(content) - 1)] = data.draw(st.integers(0, 255))
    del content[data.draw(st.integers(len(content) // 2, len(content))) :]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DamagedAudioWarning)
        try:
            samples = load_audio(io.BytesIO(bytes(content)))
        except AudioError:
            return

    assert samples.size >= 160
    assert np.abs(samples).max() <= 1.0


@given(st.binary(max_size=400))
@settings(max_examples=100)
def test_any_bytes_are_decoded_or_rejected(content: bytes) -> None:
    with contextlib.suppress(AudioError):
        load_audio(io.BytesIO(content))
