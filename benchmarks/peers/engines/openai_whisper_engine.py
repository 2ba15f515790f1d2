"""openai-whisper, in float32."""

import torch
import whisper

NOT_TEXT = range(50257, 51865)  # random weights emit timestamps too, which would cut the window
GREEDY = {
    "language": "en",
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
    "condition_on_previous_text": False,
    "fp16": False,
}


class Engine:
    def __init__(self, folder, threads, mode):
        torch.set_num_threads(threads)
        self.model = whisper.load_model(str(folder / "openai.pt"), device="cpu")

    def window(self, audio, tokens):
        result = self.model.transcribe(
            audio,
            **GREEDY,
            without_timestamps=True,
            suppress_tokens=[-1, *NOT_TEXT],
            sample_len=tokens,
        )
        return sum(len(segment["tokens"]) for segment in result["segments"])

    def transcribe(self, audios):
        return [self.model.transcribe(audio, **GREEDY)["text"] for audio in audios]
