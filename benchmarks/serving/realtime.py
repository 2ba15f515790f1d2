"""How late the words of a realtime session are, when audio files are played to it in real time.

    whisperport serve --model default --threads 1
    python -m benchmarks.serving.realtime --url ws://127.0.0.1:8000/v1/realtime --clips 18

Each shipped clip is sent in pieces of 40 ms, each when its last sample would have been recorded. For each
word that the transcript has in common with the clip's known text, it prints the time from the end of the
word to the first event with it: as a tentative word, and as a certain one.
"""

import argparse
import asyncio
import base64
import json
import os
import statistics
import time
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any

import numpy as np
from websockets.asyncio.client import ClientConnection, connect

from whisperport.speech.audio import SAMPLE_RATE, load_audio
from whisperport.speech.text.normalize import normalize
from whisperport.verification.clips import shipped_audio

PIECE = SAMPLE_RATE // 25
PAUSE_S = 1.0
TRANSCRIPTION = "conversation.item.input_audio_transcription"


@dataclass
class Shown:
    """What a client shows of one clip, and when: certain text, and all text."""

    began: float = 0.0
    certain: str = ""
    states: list[tuple[float, list[str], list[str]]] = field(default_factory=list)

    def note(self, tentative: str) -> None:
        now = time.monotonic() - self.began
        self.states.append((now, words(self.certain), words(self.certain + tentative)))

    def seen_at(self, index: int, word: str, *, certain: bool) -> float:
        for at, fixed, everything in self.states:
            found = fixed if certain else everything
            if index < len(found) and found[index] == word:
                return at
        return float("nan")


def words(text: str) -> list[str]:
    return [normalize(word) or word for word in text.split()]


async def play(socket: ClientConnection, samples: np.ndarray) -> Shown:
    """Send audio in real time until its transcript is complete."""
    shown = Shown(time.monotonic())
    sending = asyncio.create_task(send(socket, samples, shown.began))
    while True:
        event: dict[str, Any] = json.loads(await socket.recv())
        kind = event["type"]
        if kind == f"{TRANSCRIPTION}.delta":
            shown.certain += event["delta"]
            shown.note("")
        elif kind == f"{TRANSCRIPTION}.tentative":
            shown.note(event["text"])
        elif kind == f"{TRANSCRIPTION}.completed":
            assert event["transcript"] == shown.certain, "certain text changed"
            await sending
            return shown
        elif kind in ("error", f"{TRANSCRIPTION}.failed"):
            raise SystemExit(event)


async def send(socket: ClientConnection, samples: np.ndarray, began: float) -> None:
    for at in range(0, samples.size, PIECE):
        piece = samples[at : at + PIECE]
        await asyncio.sleep(max(0.0, began + (at + piece.size) / SAMPLE_RATE - time.monotonic()))
        audio = base64.b64encode(piece.tobytes()).decode()
        await socket.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
    await socket.send(json.dumps({"type": "input_audio_buffer.commit"}))


async def measured(url: str, count: int, delay: str) -> tuple[list[float], list[float]]:
    """Return the lateness of tentative and of certain words, in seconds."""
    tentative, certain = list[float](), list[float]()
    async with connect(f"{url}?intent=transcription") as socket:
        given = {
            "format": {"type": "audio/pcm", "rate": SAMPLE_RATE},
            "turn_detection": None,
            "transcription": {"delay": delay},
        }
        include = ["item.input_audio_transcription.tentative"]
        update = {"audio": {"input": given}, "include": include}
        await socket.send(json.dumps({"type": "session.update", "session": update}))
        for clip in shipped_audio()[:count]:
            audio = np.round(load_audio(clip.path) * 32767).astype("<i2")
            shown = await play(socket, np.pad(audio, (0, round(PAUSE_S * SAMPLE_RATE))))
            final = words(shown.certain)
            spoken = [normalize(word.word) for word in clip.words]
            for block in SequenceMatcher(None, spoken, final, False).get_matching_blocks():
                for i in range(block.size):
                    word, index = clip.words[block.a + i], block.b + i
                    tentative.append(shown.seen_at(index, final[index], certain=False) - word.end)
                    certain.append(shown.seen_at(index, final[index], certain=True) - word.end)
    return tentative, certain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="ws://127.0.0.1:8000/v1/realtime")
    parser.add_argument("--clips", type=int, default=18)
    parser.add_argument("--delay", default="minimal")
    chosen = parser.parse_args()
    tentative, certain = asyncio.run(measured(chosen.url, chosen.clips, chosen.delay))
    print(f"{len(certain)} words, delay {chosen.delay}, load {os.getloadavg()[0]:.1f}")
    for name, late in (("tentative", tentative), ("certain", certain)):
        late = [max(one, 0.0) for one in late]
        tenths = statistics.quantiles(late, n=10)
        print(f"{name}: median {statistics.median(late):.2f} s, 90 % {tenths[8]:.2f} s")


if __name__ == "__main__":
    main()
