"""Speech that is found while audio arrives is the speech that is found in the complete audio."""

import numpy as np
import pytest

from whisperport.speech.audio import (
    HOP_LENGTH,
    AudioStream,
    SpeechTurns,
    VadOptions,
    load_audio,
    speech_spans,
)
from whisperport.speech.audio.vad import HOP
from whisperport.verification.clips import shipped_audio


@pytest.mark.parametrize("size", [160, 5_000])
def test_turns_are_the_spans_of_the_audio(size: int) -> None:
    clips = [load_audio(clip.path) for clip in shipped_audio()[:2]]
    gap = np.zeros(24_000, np.float32)
    audio = np.concatenate([gap, clips[0], gap, clips[1]])
    options, integers = VadOptions(), np.round(audio * 32768).astype(np.int16)
    spans = list(speech_spans(AudioStream(audio), options))

    turns = SpeechTurns(options)
    found = [turns.push(integers[at : at + size]) for at in range(0, audio.size, size)]
    edges = [turn for turns in [*found, turns.end()] for turn in turns]

    assert len(spans) > 1
    assert [turn.begins for turn in edges] == [True, False] * len(spans)
    starts = [turn.at for turn in edges if turn.begins]
    ends = [turn.at for turn in edges if not turn.begins]
    lags = [turn.known_at - turn.at for turn in edges[:-1]]
    assert [at // HOP_LENGTH for at in starts] == [span.start for span in spans]
    assert ends == pytest.approx([span.end * HOP_LENGTH for span in spans], abs=HOP)
    assert all(1_600 <= lag <= 4_800 + HOP for lag in lags)


def test_a_beginning_is_known_before_the_end() -> None:
    audio = np.round(load_audio(shipped_audio()[0].path) * 32768).astype(np.int16)
    turns = SpeechTurns(VadOptions())

    found = turns.push(audio[: audio.size // 2])

    assert [turn.begins for turn in found] == [True]
