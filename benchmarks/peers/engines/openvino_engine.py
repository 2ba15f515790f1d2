"""openvino-genai on the CPU; the mode names the format of the weights: "fp32", "int8" or "fp32 own".

OpenVINO's own choice is to compute in bfloat16 where the processor has it. The others compute in float32.
"""

import openvino_genai

FORCED = {"return_timestamps": False, "ignore_eos": True}


class Engine:
    def __init__(self, folder, threads, mode):
        weights, *own = mode.split()
        precision = {} if own else {"INFERENCE_PRECISION_HINT": "f32"}
        self.pipeline = openvino_genai.WhisperPipeline(
            folder / f"openvino-{weights}", "CPU", INFERENCE_NUM_THREADS=threads, **precision
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
