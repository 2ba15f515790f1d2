"""sherpa-onnx. It pads short audio to 10 s more than its length, and reads the first 30 s of long audio.

Its number of tokens is limited by the size of the cache that the model file states, so `convert.py` writes
it for forced tokens; the argument `tokens` of `window` is not used.
"""

import sherpa_onnx

RATE = 16_000


class Engine:
    def __init__(self, folder, threads, mode):
        files = folder / "sherpa-onnx"
        self.recognizer = sherpa_onnx.OfflineRecognizer.from_whisper(
            encoder=str(files / "encoder.onnx"),
            decoder=str(files / "decoder.onnx"),
            tokens=str(files / "tokens.txt"),
            language="en",
            num_threads=threads,
        )

    def window(self, audio, tokens):
        return len(self.result(audio).tokens)

    def transcribe(self, audios):
        return [self.result(audio).text for audio in audios]

    def result(self, audio):
        stream = self.recognizer.create_stream()
        stream.accept_waveform(RATE, audio)
        self.recognizer.decode_stream(stream)
        return stream.result
