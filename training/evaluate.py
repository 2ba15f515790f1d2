"""Measure an exported model on held-out sentences: greedy decoding of 30 s windows of audio samples.

    python evaluate.py --model work/model --eval work/eval \\
        --run work/run --speech ../src/whisperport/speech/data/speech --out results/evaluation.json

openai-whisper decodes, with the model that :func:`openai_model` converts; transformers' ``generate``
repeats the first measurement. Intervals are 95 % bootstrap intervals over windows.

Without ``--eval``, only the files of ``--speech`` are measured, and ``--out`` keeps its other results:

    python evaluate.py --model work/model \\
        --speech ../src/whisperport/speech/data/speech --out results/evaluation.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
import whisper
from safetensors.torch import load_file
from whisper.audio import N_FRAMES, N_SAMPLES, log_mel_spectrogram, pad_or_trim
from whisper.decoding import DecodingOptions, DecodingResult
from whisper.model import ModelDimensions, Whisper

import grammar
from corpus import Corpus
from make_recordings import add_noise, held_out
from mel_frames import NOISE_KINDS, noise_wave
from scoring import (
    Samples,
    Spoken,
    by_group,
    describe_errors,
    stamp_errors,
    window_of,
    word_error_rate,
    words,
)
from synthesize import HELD_OUT_RECORDED
from synthesizers import SAMPLE_RATE
from vocabulary import tokenizer

BATCH = 8
NAMES = (
    ("model.", ""),
    (".layers.", ".blocks."),
    (".encoder_attn_layer_norm", ".cross_attn_ln"),
    (".self_attn_layer_norm", ".attn_ln"),
    (".final_layer_norm", ".mlp_ln"),
    (".encoder_attn", ".cross_attn"),
    (".self_attn", ".attn"),
    (".k_proj", ".key"),
    (".v_proj", ".value"),
    (".q_proj", ".query"),
    (".out_proj", ".out"),
    (".fc1", ".mlp.0"),
    (".fc2", ".mlp.2"),
    ("encoder.layer_norm", "encoder.ln_post"),
    ("decoder.layer_norm", "decoder.ln"),
    ("embed_positions.weight", "positional_embedding"),
    ("embed_tokens", "token_embedding"),
)


def openai_model(folder: Path) -> Whisper:
    """Load the exported model into openai-whisper's model class, with its alignment heads."""
    config = json.loads((folder / "config.json").read_text())
    dims = ModelDimensions(
        n_mels=config["num_mel_bins"],
        n_audio_ctx=config["max_source_positions"],
        n_audio_state=config["d_model"],
        n_audio_head=config["encoder_attention_heads"],
        n_audio_layer=config["encoder_layers"],
        n_vocab=config["vocab_size"],
        n_text_ctx=config["max_target_positions"],
        n_text_state=config["d_model"],
        n_text_head=config["decoder_attention_heads"],
        n_text_layer=config["decoder_layers"],
    )
    state = {}
    for name, value in load_file(folder / "model.safetensors").items():
        for exported, openai in NAMES:
            name = name.replace(exported, openai)
        state[name] = value.float()
    model = Whisper(dims)
    model.load_state_dict(state)
    heads = torch.zeros(dims.n_text_layer, dims.n_text_head, dtype=torch.bool)
    for layer, head in json.loads((folder / "generation_config.json").read_text())[
        "alignment_heads"
    ]:
        heads[layer, head] = True
    model.register_buffer("alignment_heads", heads.to_sparse(), persistent=False)
    return model.eval()


def decode(model: Whisper, audio: Sequence[Samples], timestamps: bool) -> list[DecodingResult]:
    """Decode windows, padded to 30 s, with openai-whisper's greedy decoding."""
    results = []
    options = DecodingOptions(language="en", fp16=False, without_timestamps=not timestamps)
    for i in range(0, len(audio), BATCH):
        mels = [
            pad_or_trim(log_mel_spectrogram(s, padding=N_SAMPLES), N_FRAMES)
            for s in audio[i : i + BATCH]
        ]
        results += whisper.decode(model, torch.stack(mels), options)
    return results


def silence_results(model: Whisper, count: int) -> dict[str, Any]:
    """Measure ``no_speech_prob`` on digital silence and noise, and count empty transcripts of them."""
    audio = [np.zeros(8 * SAMPLE_RATE, np.float32)]
    for i in range(count - 1):
        rng = np.random.default_rng(1000 + i)
        wave = noise_wave(NOISE_KINDS[i % len(NOISE_KINDS)], float(rng.uniform(1, 29)), 900 + i)
        audio.append(wave * 10 ** rng.uniform(-4, -1.2))
    results = decode(model, audio, timestamps=True)
    texts = [
        model.transcribe(s, language="en", fp16=False, temperature=0.0)["text"].strip()
        for s in audio
    ]
    unstamped = [
        model.transcribe(s, language="en", fp16=False, temperature=0.0, without_timestamps=True)[
            "text"
        ].strip()
        for s in audio
    ]
    probabilities = [r.no_speech_prob for r in results]
    return {
        "windows": len(audio),
        "no_speech_prob_min": round(min(probabilities), 4),
        "no_speech_prob_median": round(float(np.median(probabilities)), 4),
        "above_0.6": sum(p > 0.6 for p in probabilities),
        "transcribe_empty": sum(not t for t in texts),
        "transcribe_empty_without_timestamps": sum(not t for t in unstamped),
    }


def word_time_errors(model: Whisper, spoken: Sequence[Spoken]) -> dict[str, Any]:
    """Measure the errors of word timestamps from openai-whisper's cross-attention DTW, in seconds.

    Only transcripts whose words are all right count.
    """
    starts, ends = [], []
    for item in spoken:
        out = model.transcribe(
            item.samples, language="en", fp16=False, temperature=0.0, word_timestamps=True
        )
        decoded: list[dict[str, Any]] = []
        for word in (w for segment in out["segments"] for w in segment["words"]):
            if word["word"].startswith(" "):
                decoded.append(word)
            elif decoded:  # whisper splits "twenty-five"; the grammar's words are split by spaces
                decoded[-1] = decoded[-1] | {
                    "word": decoded[-1]["word"] + word["word"],
                    "end": word["end"],
                }
        times = [
            span
            for utterance, (begin, _) in zip(item.utterances, item.times, strict=True)
            for span in utterance.word_times(begin - utterance.start)
        ]
        if [words(w["word"]) for w in decoded] == [words(w) for w in item.text.split()]:
            starts += [abs(w["start"] - t[0]) for w, t in zip(decoded, times, strict=True)]
            ends += [abs(w["end"] - t[1]) for w, t in zip(decoded, times, strict=True)]
    medians = [
        float(np.percentile(v, p)) if v else float("nan") for v in (starts, ends) for p in (50, 90)
    ]
    names = ("start_median", "start_90th", "end_median", "end_90th")
    return {"words": len(starts)} | {n: round(m, 3) for n, m in zip(names, medians, strict=True)}


def long_results(model: Whisper, spoken: Sequence[Spoken]) -> dict[str, Any]:
    """Measure the WER of ``transcribe()`` on audio of 60 to 90 s."""
    ways: dict[str, dict[str, Any]] = {
        "conditioned": {},
        "not_conditioned": {"condition_on_previous_text": False},
    }
    out = {}
    for name, options in ways.items():
        settings = {"language": "en", "fp16": False, "temperature": 0.0} | options
        texts = [model.transcribe(s.samples, **settings)["text"] for s in spoken]
        out[name] = word_error_rate([s.text for s in spoken], texts)
    return out | {"seconds": round(sum(len(s.samples) for s in spoken) / SAMPLE_RATE, 1)}


def recording_results(model: Whisper, folder: Path) -> dict[str, Any]:
    """Measure the WER of ``transcribe()`` on the shipped audio files."""
    clips = json.loads((folder / "transcripts.json").read_text())["clips"]
    texts = {
        c["file"]: model.transcribe(
            str(folder / c["file"]), language="en", fp16=False, temperature=0.0
        )["text"].strip()
        for c in clips
    }
    spoken = [c for c in clips if c["text"]]
    wrong = [c for c in clips if words(c["text"]) != words(texts[c["file"]])]
    out: dict[str, Any] = {"wrong": [[c["file"], c["text"], texts[c["file"]]] for c in wrong]}
    for name, chosen in (
        ("all", spoken),
        ("trained voices", [c for c in spoken if not c["held_out"]]),
        ("held-out voices", [c for c in spoken if c["held_out"]]),
    ):
        out[name] = word_error_rate([c["text"] for c in chosen], [texts[c["file"]] for c in chosen])
    return out


def transformers_texts(folder: Path, audio: Sequence[Samples]) -> list[str]:
    """Decode windows with transformers' ``generate``."""
    model = transformers.WhisperForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    )
    processor = transformers.WhisperProcessor.from_pretrained(folder)
    texts: list[str] = []
    for i in range(0, len(audio), BATCH):
        features = processor(
            list(audio[i : i + BATCH]), sampling_rate=SAMPLE_RATE, return_tensors="pt"
        ).input_features
        tokens = model.generate(features, language="en", task="transcribe")
        texts += processor.batch_decode(tokens, skip_special_tokens=True)
    return texts


def tokenizers_agree(folder: Path, texts: Iterable[str]) -> int:
    """Return the number of texts, all of which tokenizer.json must encode as openai-whisper does.

    Raises:
        AssertionError: a text is encoded differently.
    """
    exported, count = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")), 0
    for text in texts:
        expected = tokenizer().encoding.encode(text, allowed_special="all")
        if exported.encode(text, add_special_tokens=False).ids != expected:
            raise AssertionError(f"{text!r} is tokenized differently")
        count += 1
    return count


def describe_model(folder: Path) -> dict[str, Any]:
    """Return the sizes that the model card shows."""
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    heads = json.loads((folder / "generation_config.json").read_text())["alignment_heads"]
    return {
        "width": config["d_model"],
        "heads": config["encoder_attention_heads"],
        "head_width": config["d_model"] // config["encoder_attention_heads"],
        "encoder": config["encoder_layers"],
        "decoder": config["decoder_layers"],
        "parameters": round(sum(t.numel() for t in state.values()) / 1e6, 1),
        "megabytes": round((folder / "model.safetensors").stat().st_size / 1e6, 1),
        "alignment": " and ".join(f"({layer}, {head})" for layer, head in heads),
        "grammar_words": len(grammar.vocabulary()),
    }


def measure(folder: Path, corpus: Corpus, fraction: float, quick: bool) -> dict[str, Any]:
    """Run all measurements on a fraction of the evaluation speech."""
    model, rng = openai_model(folder), np.random.default_rng(5)
    groups = {
        "trained voices": lambda u: not held_out(u.voice),
        "of these eSpeak NG": lambda u: not held_out(u.voice) and u.voice.startswith("espeak"),
        "of these flite": lambda u: u.voice.startswith("flite"),
        "of these Festival": lambda u: u.voice.startswith("festival") and not held_out(u.voice),
        "held-out eSpeak NG voices": lambda u: held_out(u.voice) and u.voice.startswith("espeak"),
        "held-out recorded voice (ked)": lambda u: u.voice == HELD_OUT_RECORDED,
    }
    utterances = [u for u in corpus.utterances if rng.random() < fraction]
    single = [window_of([u], rng) for u in utterances]
    report: dict[str, Any] = {"single": {}, "errors": {}}
    results = {}
    for way in (False, True):
        results[way] = decode(model, [s.samples for s in single], timestamps=way)
        name = "with timestamps" if way else "without timestamps"
        report["single"][name] = by_group(groups, single, results[way])
        report["errors"][f"single {name}"] = describe_errors(single, results[way], 12)
        tokens = [len(r.tokens) for r in results[way]]
        report["single"][name]["longest output, tokens"] = max(tokens)
    report["stamps of single utterances"] = stamp_errors(single, results[True])
    trained = [u for u in corpus.utterances if not held_out(u.voice)]
    several = []
    for _ in range(max(12, int(120 * fraction))):
        count = int(rng.integers(2, 7))
        several.append(window_of([trained[i] for i in rng.integers(len(trained), size=count)], rng))
    report["several"] = {}
    for way in (False, True):
        name = "with timestamps" if way else "without timestamps"
        outs = decode(model, [s.samples for s in several], timestamps=way)
        report["several"][name] = word_error_rate([s.text for s in several], [r.text for r in outs])
        report["several"][name]["longest output, tokens"] = max(len(r.tokens) for r in outs)
        report["errors"][f"several {name}"] = describe_errors(several, outs, 6)
    report["stamps of several utterances"] = stamp_errors(several, outs)
    samples = [rng.integers(len(trained), size=40) for _ in range(2 if quick else 12)]
    long = [window_of([trained[i] for i in indices], rng, 75.0) for indices in samples]
    report["long"] = long_results(model, long)
    report["silence"] = silence_results(model, 8 if quick else 32)
    if not quick:
        report["speech no_speech_prob, highest"] = round(
            max(r.no_speech_prob for r in results[True]), 4
        )
        known_voices = [s for s in single if not held_out(s.utterances[0].voice)]
        report["in noise"] = noise_results(model, known_voices[::2])
        report["word times"] = word_time_errors(model, several[:60])
        texts = transformers_texts(folder, [s.samples for s in single])
        chosen = [
            (s.text, t)
            for s, t in zip(single, texts, strict=True)
            if not held_out(s.utterances[0].voice)
        ]
        report["transformers, trained voices"] = word_error_rate(*zip(*chosen, strict=True))
        mels = [
            pad_or_trim(log_mel_spectrogram(s.samples, padding=N_SAMPLES), N_FRAMES)
            for s in single[:50]
        ]
        languages = [model.detect_language(mel)[1] for mel in mels]
        report["detected as en"] = [
            sum(max(p, key=p.__getitem__) == "en" for p in languages),
            len(languages),
        ]
        strange = [
            "Grüße, 你好! naïve  café\n\n😀 3.14 don't",
            "<|startoftranscript|><|en|> Hi<|1.02|>",
            "  \t x",
        ]
        texts = [u.text for u in utterances] + strange
        report["texts tokenized as openai-whisper does"] = tokenizers_agree(folder, texts)
    return report


def noise_results(model: Whisper, single: Sequence[Spoken]) -> dict[str, Any]:
    """Measure the WER of the same windows with noise added, without timestamps.

    The kinds of noise alternate from window to window.
    """
    out = {}
    for decibels in (20, 10):
        audio = [
            add_noise(s.samples, NOISE_KINDS[i % len(NOISE_KINDS)], decibels)
            for i, s in enumerate(single)
        ]
        texts = [r.text for r in decode(model, audio, timestamps=False)]
        out[f"{decibels} dB"] = word_error_rate([s.text for s in single], texts)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="folder of the exported model")
    parser.add_argument("--eval", type=Path, help="folder of the evaluation speech")
    parser.add_argument(
        "--run", type=Path, help="folder of the training run; its steps and minutes are recorded"
    )
    parser.add_argument("--speech", type=Path, help="folder written by make_recordings.py")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument(
        "--fraction",
        type=float,
        default=1.0,
        help="part of the evaluation speech to use, 0 to 1 [default: 1]",
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure less, to look at a model during training"
    )
    args = parser.parse_args()
    if not args.eval and not (args.speech and args.out and args.out.exists()):
        parser.error("give --eval, or --speech and an existing --out")
    begun = time.time()
    if not args.eval:
        report = json.loads(args.out.read_text())
        report["recordings"] = recording_results(openai_model(args.model), args.speech)
        args.out.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        return
    report = measure(args.model, Corpus(args.eval), args.fraction, args.quick)
    if args.speech:
        report["recordings"] = recording_results(openai_model(args.model), args.speech)
    if args.run:
        report["training"] = json.loads((args.run / "training.json").read_text())
    report["model"] = describe_model(args.model)
    report["seconds"] = round(time.time() - begun)
    report["versions"] = {"python": platform.python_version()} | {
        module.__name__: str(module.__version__)
        for module in (torch, transformers, whisper, np, tokenizers)
    }
    text = json.dumps(report, indent=1, ensure_ascii=False)
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
