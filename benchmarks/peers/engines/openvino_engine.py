"""openvino-genai on the CPU; the mode is the format of the weights: "fp32" or "int8"."""

import openvino_genai

FORCED = {"return_timestamps": False, "ignore_eos": True}


class Engine:
    def __init__(self, folder, threads, mode):
        self.pipeline = openvino_genai.WhisperPipeline(
            folder / f"openvino-{mode}", "CPU", INFERENCE_NUM_THREADS=threads
        )

    def window(self, audio, tokens):
        result = self.pipeline.generate(
            audio, **greedy(), **FORCED, max_new_tokens=tokens, min_new_tokens=tokens
        )
        return result.perf_metrics.get_num_generated_tokens()

    def transcribe(self, audios):
        how = greedy() | {"return_timestamps": True}
        return [self.pipeline.generate(audio, **how).texts[0] for audio in audios]


def greedy():
    return {"language": "<|en|>", "task": "transcribe", "num_beams": 1, "do_sample": False}
