"""Greedy tokens without timestamps are those of transformers' `generate`, for every clip."""

from pathlib import Path

import pytest
import torch
import transformers

from whisperport.runtime import DecodeOptions, Decoder, decode_window
from whisperport.speech.audio import load_audio, log_mel
from whisperport.transcription import Transcriber
from whisperport.verification.clips import ShippedAudio, shipped_audio

from ..embedded import unpacked
from ..extent import core_or_all

RECORDINGS = shipped_audio()


@pytest.mark.parametrize(
    "recording", core_or_all(RECORDINGS[::4], RECORDINGS), ids=lambda r: r.path.name
)
def test_greedy_tokens_are_those_of_generate(
    recording: ShippedAudio,
    tmp_path: Path,
    transcriber: Transcriber,
    hf_model: transformers.WhisperForConditionalGeneration,
) -> None:
    samples = load_audio(recording.path)[: 30 * 16_000]
    extractor = transformers.WhisperFeatureExtractor.from_pretrained(unpacked(tmp_path))
    theirs_in = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features
    engine = transcriber.engine

    with torch.no_grad():
        expected = hf_model.generate(
            theirs_in, language="en", task="transcribe", max_new_tokens=224, do_sample=False
        )[0].tolist()
    mel = log_mel(samples, engine.dims.n_mels, n_frames=engine.dims.n_frames)
    options = DecodeOptions(language="en", without_timestamps=True)
    decoded = decode_window(Decoder(engine), engine.encode(mel), options)

    end = engine.generation.end_of_text
    expected_text = [token for token in expected if token < end]
    assert [token for token in decoded.tokens if token < end] == expected_text
