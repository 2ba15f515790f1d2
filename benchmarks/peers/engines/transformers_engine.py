"""transformers, in float32; several files are decoded in batches."""

import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

RATE = 16_000
WINDOW_S = 30
BATCH = 8
GREEDY = {"language": "en", "task": "transcribe", "num_beams": 1, "do_sample": False}


class Engine:
    def __init__(self, folder, threads, mode):
        torch.set_num_threads(threads)
        self.processor = WhisperProcessor.from_pretrained(folder / "huggingface")
        self.model = WhisperForConditionalGeneration.from_pretrained(
            folder / "huggingface", dtype=torch.float32
        ).eval()

    @torch.inference_mode()
    def window(self, audio, tokens):
        inputs = self.processor(audio, sampling_rate=RATE, return_tensors="pt")
        output = self.model.generate(
            inputs.input_features, **GREEDY, max_new_tokens=tokens, min_new_tokens=tokens
        )
        return output.shape[1] - n_start_tokens(output, self.model)

    @torch.inference_mode()
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
        output = self.model.generate(
            inputs.input_features,
            attention_mask=inputs.attention_mask,
            return_timestamps=True,
            condition_on_prev_tokens=False,
            **GREEDY,
        )
        return self.processor.batch_decode(output, skip_special_tokens=True)


def n_start_tokens(output, model):
    """Return how many tokens of the prompt the output begins with; it depends on the version."""
    return 4 if output[0, 0] == model.generation_config.decoder_start_token_id else 0
