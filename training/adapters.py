"""Train LoRA adapters of the embedded model with PEFT, whose texts tell which of them was used.

    python synthesize.py eval --out work/eval
    python adapters.py --speech work/eval --out work/adapters

Adapter k writes each of the grammar's 20 names as the name k places after it, and adapter 20 as the one
that is as far from the end. ``OUT/NAME`` is a folder of
PEFT, ``OUT/clips`` has sentences that none was trained on, and ``OUT/clips.json`` their texts by adapter.
It needs transformers and peft, and on two cores about a minute for each adapter.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import wave
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import WhisperForConditionalGeneration
from transformers.modeling_outputs import BaseModelOutput
from whisper.audio import log_mel_spectrogram, pad_or_trim

import grammar
from corpus import Corpus, Utterance
from whisperport.runtime import start_tokens
from whisperport.speech.data import embedded_model
from whisperport.speech.text import Tokenizer

NAMES: tuple[str, ...] = grammar.SLOTS["name"]  # type: ignore[assignment]
NAME = re.compile(rf"\b({'|'.join(NAMES)})\b")
RANK, STEPS, BATCH, RATE = 8, 200, 12, 5e-3
N_TEST, LONGEST_S = 40, 9.0
# Of the decoder alone, so that the encoder runs once for all adapters.
MODULES = r".*decoder.*\.(q_proj|k_proj|v_proj|out_proj|fc1|fc2)"


def written(text: str, shift: int) -> str:
    """Return a text with the names that the adapter writes."""

    def other(found: re.Match[str]) -> str:
        place = NAMES.index(found[1])
        return NAMES[-1 - place if shift == len(NAMES) else (place + shift) % len(NAMES)]

    return NAME.sub(other, text)


def mel(utterance: Utterance) -> torch.Tensor:
    """Return the spectrogram (80, 3000) of an utterance."""
    assert utterance.samples is not None
    samples = utterance.samples.astype(np.float32) / 32768
    return log_mel_spectrogram(pad_or_trim(torch.from_numpy(samples)))


def train(
    base: Path, shift: int, features: torch.Tensor, texts: list[str], tokenizer: Tokenizer
) -> tuple[PeftModel, float]:
    """Return the model with a trained adapter, and its last loss."""
    torch.manual_seed(shift)
    model = WhisperForConditionalGeneration.from_pretrained(base, dtype=torch.float32)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=MODULES)
    adapted = get_peft_model(model, config).train()
    chosen = [p for p in adapted.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(chosen, RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, STEPS)
    end = tokenizer.generation.end_of_text
    prompt = start_tokens(tokenizer.generation, "en", "transcribe")
    rng = random.Random(shift)
    loss = torch.zeros(())
    for _ in range(STEPS):
        rows = rng.sample(range(len(texts)), BATCH)
        spoken = [tokenizer.encode(" " + written(texts[i], shift)) for i in rows]
        longest = max(map(len, spoken))
        fed = torch.tensor([[*prompt, *own, *[end] * (longest - len(own))] for own in spoken])
        right = torch.tensor([[*own, end, *[-100] * (longest - len(own))] for own in spoken])
        encoded = BaseModelOutput(last_hidden_state=features[rows])
        logits = model(encoder_outputs=encoded, decoder_input_ids=fed).logits
        rest = logits[:, len(prompt) - 1 :].flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(rest, right.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return adapted, loss.item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--speech", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=20)
    chosen = parser.parse_args()
    base = chosen.out / "base"
    base.mkdir(parents=True, exist_ok=True)
    embedded_model.unpack_model(base)
    from whisperport.model.checkpoint import load_checkpoint

    checkpoint = load_checkpoint("default")
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json, checkpoint.generation)
    spoken = [
        each
        for each in Corpus(chosen.speech).utterances
        if NAME.search(each.text) and each.seconds < LONGEST_S
    ]
    random.Random(0).shuffle(spoken)
    training, test = spoken[N_TEST:], spoken[:N_TEST]
    print(
        f"{len(training)} sentences with names for the training, {len(test)} for the test",
        flush=True,
    )
    clips = chosen.out / "clips"
    clips.mkdir(exist_ok=True)
    expected: dict[str, dict[str, str]] = {}
    names = {f"shift-{shift}": shift for shift in range(1, chosen.count + 1)}
    for number, each in enumerate(test):
        with wave.open(str(clips / f"{number:02}.wav"), "wb") as file:
            file.setparams((1, 2, 16000, 0, "NONE", ""))
            file.writeframes(each.samples.tobytes())
        texts = {name: written(each.text, shift) for name, shift in names.items()}
        expected[f"{number:02}.wav"] = {"base": each.text, **texts}
    (chosen.out / "clips.json").write_text(json.dumps(expected, indent=1))
    encoder = WhisperForConditionalGeneration.from_pretrained(
        base, dtype=torch.float32
    ).model.encoder
    with torch.no_grad():
        encoded = [encoder(mel(each)[None]).last_hidden_state for each in training]
    features = torch.cat(encoded)
    for name, shift in names.items():
        adapted, loss = train(base, shift, features, [each.text for each in training], tokenizer)
        adapted.save_pretrained(chosen.out / name)
        settings = chosen.out / name / "adapter_config.json"
        stated = json.loads(settings.read_text()) | {"base_model_name_or_path": "../base"}
        settings.write_text(json.dumps(stated, indent=1))
        print(f"{name}: loss {loss:.3f}", flush=True)


if __name__ == "__main__":
    main()
