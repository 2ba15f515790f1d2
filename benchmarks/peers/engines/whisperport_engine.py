"""whisperport; the mode names the target and the options: "onnxruntime", "onnxruntime vad workers".

"text" decodes no timestamps, as faster-whisper's batched pipeline does by default.
"""

from dataclasses import replace

from whisperport.runtime import DecodeOptions, Thresholds
from whisperport.speech.audio import VadOptions
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber, transcribe_files

GREEDY = TranscribeOptions(
    decode=DecodeOptions(language="en"),
    temperatures=(0.0,),
    thresholds=Thresholds(
        compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
    ),
    condition_on_previous_text=False,
)


class Engine:
    def __init__(self, folder, threads, mode):
        target, *chosen = mode.split()
        workers = threads if "workers" in chosen else 1
        self.options = replace(
            GREEDY,
            decode=replace(GREEDY.decode, without_timestamps="text" in chosen),
            vad=VadOptions(pack="pack" in chosen) if "vad" in chosen else None,
            workers=workers,
            batch="single" not in chosen,
        )
        spin = {"onnxruntime.spin": "on"} if "spin" in chosen else {}
        run = RunOptions(threads=threads // workers, options=spin)
        self.transcriber = Transcriber(folder / target, run)

    def window(self, audio, tokens):
        engine = self.transcriber.engine
        # Random weights emit timestamps too, which would cut the window.
        not_text = range(engine.generation.end_of_text, engine.dims.n_vocab)
        decode = DecodeOptions(
            language="en",
            without_timestamps=True,
            max_tokens=tokens,
            suppress_tokens=(-1, *not_text),
        )
        transcript = self.transcriber.transcribe(audio, replace(self.options, decode=decode))
        return sum(len(segment.tokens) for segment in transcript.segments)

    def transcribe(self, audios):
        if len(audios) == 1:
            return [self.transcriber.transcribe(audios[0], self.options).text]
        return [one.text for one in transcribe_files(audios, self.transcriber, self.options)]
