"""faster-whisper; the mode is a compute type of CTranslate2, and "batched" for the batched pipeline.

"single" gives it one audio after the other, and not several in one batch.
"""

import numpy as np
from faster_whisper import BatchedInferencePipeline, WhisperModel, decode_audio

RATE = 16_000
BATCH = 8
N_START = 4  # tokens before the text: start, language, task, no timestamps
NOT_TEXT = range(50257, 51865)  # random weights emit timestamps too, which would cut the window
GREEDY = {
    "language": "en",
    "beam_size": 1,
    "best_of": 1,
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
    "condition_on_previous_text": False,
}


class Engine:
    def __init__(self, folder, threads, mode):
        compute_type, *chosen = mode.split()
        self.model = WhisperModel(
            str(folder / "ctranslate2"),
            device="cpu",
            compute_type=compute_type,
            cpu_threads=threads,
            local_files_only=True,
        )
        self.batched = BatchedInferencePipeline(self.model) if "batched" in chosen else None
        self.is_single = "single" in chosen

    def window(self, audio, tokens):
        segments, _ = self.model.transcribe(
            audio,
            **GREEDY,
            without_timestamps=True,
            suppress_tokens=[-1, *NOT_TEXT],
            max_new_tokens=2 * tokens
            - N_START,  # CTranslate2 decodes half of prompt and new tokens
        )
        return sum(len(segment.tokens) for segment in segments)

    def transcribe(self, audios):
        if self.batched is None:
            return [text_of(self.model.transcribe(audio, **GREEDY)) for audio in audios]
        if len(audios) == 1 or self.is_single:
            found = (self.batched.transcribe(one, batch_size=BATCH, **GREEDY) for one in audios)
            return [text_of(one) for one in found]
        return self.together([decode_audio(one) if isinstance(one, str) else one for one in audios])

    def together(self, audios):
        """Decode several files in batches: the pipeline takes one array, and where each file is in it."""
        ends = np.cumsum([audio.size for audio in audios]) / RATE
        starts = np.concatenate([[0.0], ends[:-1]])
        clips = [
            {"start": float(start), "end": float(end)}
            for start, end in zip(starts, ends, strict=True)
        ]
        segments, _ = self.batched.transcribe(
            np.concatenate(audios), batch_size=BATCH, clip_timestamps=clips, **GREEDY
        )
        texts = [""] * len(audios)
        for segment in segments:
            texts[int(np.searchsorted(starts, segment.start + 1e-3, side="right")) - 1] += (
                segment.text
            )
        return texts


def text_of(result):
    segments, _ = result
    return "".join(segment.text for segment in segments)
