"""whisper.cpp through pywhispercpp; the mode is the format of the weights: "f16" or "f32"."""

import _pywhispercpp
from pywhispercpp.model import Model


class Engine:
    def __init__(self, folder, threads, mode):
        self.model = Model(
            str(folder / f"ggml-{mode}" / "model.bin"),
            redirect_whispercpp_logs_to=None,
            context_params={"use_gpu": False},
            n_threads=threads,
            language="en",
            no_context=True,
            temperature_inc=0.0,  # no temperature is tried after 0
            suppress_nst=True,
            greedy={"best_of": 1},
            print_progress=False,
        )

    def window(self, audio, tokens):
        self.model.transcribe(audio, single_segment=True, no_timestamps=True, max_tokens=tokens)
        context = self.model._ctx
        segments = range(_pywhispercpp.whisper_full_n_segments(context))
        return sum(_pywhispercpp.whisper_full_n_tokens(context, number) for number in segments)

    def transcribe(self, audios):
        return [
            " ".join(segment.text for segment in self.model.transcribe(audio)) for audio in audios
        ]
