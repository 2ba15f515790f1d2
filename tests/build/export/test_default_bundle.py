"""The model, the bundle and the clips inside the package fit together, and transcription works."""

import hashlib
from pathlib import Path

import pytest

from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions
from whisperport.runtime.decoding.decode import start_tokens
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import TextErrors, text_errors
from whisperport.verification.bundle_check import verify
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle, unpacked

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
