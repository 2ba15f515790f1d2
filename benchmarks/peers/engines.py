"""Every speech recognizer that is compared: one class each, so that one page shows that all decode alike.

All decode English greedily, at temperature 0 only, without the text of previous windows. A class imports
its package inside of its functions: each runs in an environment that may lack the others.

    PACKAGES                        what is imported first, and measured
    Engine(folder, threads, mode)   loads the model that `convert.py` wrote to the folder
    .window(audio, tokens)          decodes this number of tokens in one window of 30 s; returns the number
    .transcribe(audios)             returns the text of each array of samples, float32 at 16 kHz
"""

from dataclasses import replace

RATE = 16_000
WINDOW_S = 30
BATCH = 8
NOT_TEXT = range(50257, 51865)  # random weights emit timestamps too, which would cut the window


FASTER_WHISPER = {
    "language": "en",
    "beam_size": 1,
    "best_of": 1,
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "log_prob_threshold": None,
    "no_speech_threshold": None,
    "condition_on_previous_text": False,
}
FASTER_WHISPER_START = 4  # tokens before the text: start, language, task, no timestamps


class FasterWhisper:
    """faster-whisper; the mode is a compute type of CTranslate2, and "batched" for the batched pipeline.

    "single" gives it one audio after the other, and not several in one batch.
    """

    PACKAGES = ("faster_whisper",)

    def __init__(self, folder, threads, mode):
        from faster_whisper import BatchedInferencePipeline, WhisperModel

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
            **FASTER_WHISPER,
            without_timestamps=True,
            suppress_tokens=[-1, *NOT_TEXT],
            max_new_tokens=2 * tokens
            - FASTER_WHISPER_START,  # CTranslate2 decodes half of prompt and new tokens
        )
        return sum(len(segment.tokens) for segment in segments)

    def transcribe(self, audios):
        if self.batched is None:
            return [text_of(self.model.transcribe(audio, **FASTER_WHISPER)) for audio in audios]
        if len(audios) == 1 or self.is_single:
            results = (
                self.batched.transcribe(audio, batch_size=BATCH, **FASTER_WHISPER)
                for audio in audios
            )
            return [text_of(result) for result in results]
        from faster_whisper import decode_audio

        return self.together(
            [decode_audio(audio) if isinstance(audio, str) else audio for audio in audios]
        )

    def together(self, audios):
        """Decode several files in batches: the pipeline takes one array, and where each file is in it."""
        import numpy as np

        ends = np.cumsum([audio.size for audio in audios]) / RATE
        starts = np.concatenate([[0.0], ends[:-1]])
        clips = [
            {"start": float(start), "end": float(end)}
            for start, end in zip(starts, ends, strict=True)
        ]
        segments, _ = self.batched.transcribe(
            np.concatenate(audios), batch_size=BATCH, clip_timestamps=clips, **FASTER_WHISPER
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


OPENAI_WHISPER = {
    "language": "en",
    "temperature": 0.0,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
    "condition_on_previous_text": False,
    "fp16": False,
}


class OpenaiWhisper:
    """openai-whisper, in float32."""

    PACKAGES = ("torch", "whisper")

    def __init__(self, folder, threads, mode):
        import torch
        import whisper

        torch.set_num_threads(threads)
        self.model = whisper.load_model(str(folder / "openai.pt"), device="cpu")

    def window(self, audio, tokens):
        result = self.model.transcribe(
            audio,
            **OPENAI_WHISPER,
            without_timestamps=True,
            suppress_tokens=[-1, *NOT_TEXT],
            sample_len=tokens,
        )
        return sum(len(segment["tokens"]) for segment in result["segments"])

    def transcribe(self, audios):
        return [self.model.transcribe(audio, **OPENAI_WHISPER)["text"] for audio in audios]


OPENVINO = {"language": "<|en|>", "task": "transcribe", "num_beams": 1, "do_sample": False}
OPENVINO_FORCED = {"return_timestamps": False, "ignore_eos": True}


class OpenvinoGenai:
    """openvino-genai on the CPU; the mode names the format of the weights: "fp32", "int8" or "fp32 own".

    OpenVINO's own choice is to compute in bfloat16 where the processor has it. The others compute in
    float32.
    """

    PACKAGES = ("openvino_genai",)

    def __init__(self, folder, threads, mode):
        import openvino_genai

        weights, *own = mode.split()
        precision = {} if own else {"INFERENCE_PRECISION_HINT": "f32"}
        self.pipeline = openvino_genai.WhisperPipeline(
            folder / f"openvino-{weights}", "CPU", INFERENCE_NUM_THREADS=threads, **precision
        )

    def window(self, audio, tokens):
        result = self.pipeline.generate(
            audio, **OPENVINO, **OPENVINO_FORCED, max_new_tokens=tokens, min_new_tokens=tokens
        )
        return result.perf_metrics.get_num_generated_tokens()

    def transcribe(self, audios):
        how = OPENVINO | {"return_timestamps": True}
        return [self.pipeline.generate(audio, **how).texts[0] for audio in audios]


class SherpaOnnx:
    """sherpa-onnx. It pads short audio to 10 s more than its length, and reads 30 s of long audio.

    Its number of tokens is limited by the size of the cache that the model file states, so `convert.py`
    writes it for forced tokens; the argument `tokens` of `window` is not used.
    """

    PACKAGES = ("sherpa_onnx",)

    def __init__(self, folder, threads, mode):
        import sherpa_onnx

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


TRANSFORMERS = {"language": "en", "task": "transcribe", "num_beams": 1, "do_sample": False}


class Transformers:
    """transformers, in float32; several files are decoded in batches."""

    PACKAGES = ("torch", "transformers")

    def __init__(self, folder, threads, mode):
        import torch
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        torch.set_num_threads(threads)
        self.processor = WhisperProcessor.from_pretrained(folder / "huggingface")
        self.model = WhisperForConditionalGeneration.from_pretrained(
            folder / "huggingface", dtype=torch.float32
        ).eval()

    def window(self, audio, tokens):
        inputs = self.processor(audio, sampling_rate=RATE, return_tensors="pt")
        output = self.generated(inputs.input_features, max_new_tokens=tokens, min_new_tokens=tokens)
        return output.shape[1] - n_start_tokens(output, self.model)

    def transcribe(self, audios):
        texts = []
        for start in range(0, len(audios), BATCH):
            texts += self.together(audios[start : start + BATCH])
        return texts

    def together(self, audios):
        is_long = any(audio.size > WINDOW_S * RATE for audio in audios)
        how = {"truncation": False, "padding": "longest"} if is_long else {}
        inputs = self.processor(
            audios, sampling_rate=RATE, return_tensors="pt", return_attention_mask=True, **how
        )
        output = self.generated(
            inputs.input_features,
            attention_mask=inputs.attention_mask,
            return_timestamps=True,
            condition_on_prev_tokens=False,
        )
        return self.processor.batch_decode(output, skip_special_tokens=True)

    def generated(self, features, **how):
        import torch

        with torch.inference_mode():
            return self.model.generate(features, **TRANSFORMERS, **how)


def n_start_tokens(output, model):
    """Return how many tokens of the prompt the output begins with; it depends on the version."""
    return 4 if output[0, 0] == model.generation_config.decoder_start_token_id else 0


class WhisperCpp:
    """whisper.cpp through pywhispercpp; the mode is the format of the weights: "f16" or "f32"."""

    PACKAGES = ("_pywhispercpp", "pywhispercpp.model")

    def __init__(self, folder, threads, mode):
        from pywhispercpp.model import Model

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
        import _pywhispercpp

        self.model.transcribe(audio, single_segment=True, no_timestamps=True, max_tokens=tokens)
        context = self.model._ctx
        segments = range(_pywhispercpp.whisper_full_n_segments(context))
        return sum(_pywhispercpp.whisper_full_n_tokens(context, number) for number in segments)

    def transcribe(self, audios):
        return [
            " ".join(segment.text for segment in self.model.transcribe(audio)) for audio in audios
        ]


class Whisperport:
    """whisperport; the mode names the target and the options: "onnxruntime", "onnxruntime vad workers".

    "text" decodes no timestamps, as faster-whisper's batched pipeline does by default.
    """

    PACKAGES = ("whisperport.transcription",)

    def __init__(self, folder, threads, mode):
        from whisperport.runtime import Decoder
        from whisperport.speech.audio import VadOptions
        from whisperport.targets import RunOptions
        from whisperport.transcription import Transcriber

        target, *chosen = mode.split()
        workers = threads if "workers" in chosen else 1
        self.options = replace(
            greedy(),
            decode=replace(greedy().decode, without_timestamps="text" in chosen),
            vad=VadOptions(pack="pack" in chosen) if "vad" in chosen else None,
            workers=workers,
            batch="single" not in chosen,
        )
        spin = {"onnxruntime.spin": "on"} if "spin" in chosen else {}
        self.is_short = "short" in chosen
        run = RunOptions(
            threads=threads // workers, options=spin, short_windows=True if self.is_short else None
        )
        self.transcriber = Transcriber(folder / target, run)
        self.decoder = Decoder(self.transcriber.engine) if self.is_short else None

    def window(self, audio, tokens):
        from whisperport.runtime import DecodeOptions

        engine = self.transcriber.engine
        # Random weights emit timestamps too, which would cut the window.
        not_text = range(engine.generation.end_of_text, engine.dims.n_vocab)
        decode = DecodeOptions(
            language="en",
            without_timestamps=True,
            max_tokens=tokens,
            suppress_tokens=(-1, *not_text),
        )
        if self.is_short:
            return self.short_window(audio, decode)
        transcript = self.transcriber.transcribe(audio, replace(self.options, decode=decode))
        return sum(len(segment.tokens) for segment in transcript.segments)

    def short_window(self, audio, decode):
        """Decode once: random weights end no text, and `transcribe` would decode the full window, too."""
        from whisperport.runtime import decode_window
        from whisperport.speech.audio.mel_windows import MelWindows

        engine = self.transcriber.engine
        mel, n_frames = MelWindows(audio, engine.dims.n_mels, engine.dims.n_frames).window(0)
        mel[:, n_frames:] = 0
        features = engine.encode(mel[:, : 2 * engine.positions_for(n_frames)])
        return len(decode_window(self.decoder, features, decode).tokens)

    def transcribe(self, audios):
        if len(audios) == 1:
            return [self.transcriber.transcribe(audios[0], self.options).text]
        from whisperport.transcription import transcribe_files

        transcripts = transcribe_files(audios, self.transcriber, self.options)
        return [transcript.text for transcript in transcripts]


def greedy():
    """Return whisperport's options of a comparison."""
    from whisperport.runtime import DecodeOptions, Thresholds
    from whisperport.transcription import TranscribeOptions

    return TranscribeOptions(
        decode=DecodeOptions(language="en"),
        temperatures=(0.0,),
        thresholds=Thresholds(
            compression_ratio_threshold=None, logprob_threshold=None, no_speech_threshold=None
        ),
        condition_on_previous_text=False,
    )
