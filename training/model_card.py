# ruff: noqa: E501
"""Write MODEL_CARD.md: fill the results of the evaluation into its template.

OUT=../src/whisperport/speech/data/model/MODEL_CARD.md
python model_card.py --results results/evaluation.json --out $OUT
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

GROUPS = (
    "trained voices",
    "of these eSpeak NG",
    "of these flite",
    "of these Festival",
    "held-out eSpeak NG voices",
    "held-out recorded voice (ked)",
)

TEMPLATE = """# A small Whisper for testing

This model has Whisper's architecture, vocabulary and files. It was trained from scratch on synthetic speech. With it,
export, quantization, timestamps and long audio can be tested with real words: offline, in seconds, with a file of
{megabytes} MB. **It is not a general speech recognizer.** It knows {grammar_words} words and the sentences of one grammar.
It was neither trained nor tested on human speech, and will transcribe it poorly.

| | |
|---|---|
| Architecture | `WhisperForConditionalGeneration`: width {width}, {heads} heads of {head_width}, {encoder} encoder and {decoder} decoder layers, 80 mels, 1500 and 448 positions, tied head over 51865 tokens |
| Parameters | {parameters} million, of which 6.6 million are the embedding; float16 |
| Domain | English commands for home, timers, boards and vehicles; numbers, digit strings, times, dates, names. Numbers are spelled out; capitals and punctuation as Whisper writes them |
| Training speech | {utterances} sentences, {hours} hours: eSpeak NG (7 kinds of English, 71 variants, any tempo and pitch), flite slt, awb, rms, kal16, kal, Festival kal and slt_hts; noise, rooms, microphones, tempo and vocal tract are varied during training |
| Held out | one in 24 sentences of the grammar; the voices Festival ked, eSpeak NG `en-gb-scotland` and variants m7, f5, adam, linda |
| Training | {steps} steps in {minutes} minutes on one core of an AMD EPYC (Zen 5), bfloat16, seed 0; its last {full_minutes} minutes on full 30 s windows |
| Prompt | the usual `<|startoftranscript|><|en|><|transcribe|>`, with or without `<|notimestamps|>`, also after `<|startofprev|>` and earlier text |
| Alignment heads | {alignment} (decoder layer, head), trained as such |

`training/README.md` in the repository lists the commands that make the model.

## Measured

All measurements use held-out sentences, openai-whisper's greedy decoding and windows padded to 30 s. Word error rates
(WER) are in per cent, without regard to case and punctuation; brackets hold the 95 % interval (bootstrap over windows)
and the number of windows. The speech is clean unless the line states otherwise. Parts of the results were looked at
during training to decide about more prompts and more augmentation. No checkpoint was selected by them: the last one is
shipped.

These WERs are plain. Published figures of Whisper use its English normalizer. With it, the WER of one sentence in
trained voices, without timestamps, is: {whisper_single}. That of the audio files beside this model is: {whisper_recordings}.

The commands that repeat the figures are in `training/README.md` (rows "Evaluation" and "Model card").

### One sentence in a window

| Voices | without timestamps | with timestamps |
|---|---|---|
{single}

In noise (eight kinds, without timestamps, every second sentence of the trained voices): {noise}.
transformers' `generate` on the trained voices, without timestamps: {transformers}. Transcripts in trained voices that are
right including punctuation: {exact} %.

### More than one sentence

| Input | without timestamps | with timestamps |
|---|---|---|
| 2 to 6 sentences in a window | {several_plain} | {several_stamped} |

| `transcribe()` of audio of about 75 s | WER |
|---|---|
| conditioned on the previous text (its default) | {long_conditioned} |
| not conditioned | {long_free} |

### Timestamps

Errors in seconds:

| Timestamp | n | start, median | start, 90 % below | end, median | end, 90 % below |
|---|---|---|---|---|---|
{times}

The number of timestamps is right in {stamped_single} windows of one sentence and in {stamped_several} windows of several. A first timestamp is
never later than 1.00 s, since Whisper's decoding does not allow it; for speech that starts later it is 1.00 s.

### Silence, language, end

`no_speech_prob` is at least {silence_min} (median {silence_median}) on {silence_windows} windows of digital silence and noise, and at most {speech_max} on
speech. The transcript of {silence_empty} of the {silence_windows} windows is empty (without timestamps: {silence_plain}). The language is detected as English
in {languages} windows. Every output ended with an end-of-text token: the longest had {longest}
tokens for one sentence, {longest_several} for several.

### The audio files beside this model

`transcribe()` on the files of `data/speech`, which a random seed selected: {recordings}.

## What the model cannot do

- Human speech, other words, other languages, translation. The model writes a word it knows for a word it does not know.
- The held-out recorded voice is a diphone voice. The error rate on other voices is unknown.
- Noise less than about 15 dB below the speech, speech over speech, music, telephone audio, distant microphones. The
  noise and the rooms used in training were synthetic.
- Long sentences. The training sentences last about 3 seconds; none lasts 10 seconds or more.
"""


def cell(result: dict[str, Any]) -> str:
    """Format a plain word error rate with its interval and number of windows."""
    low, high = result["interval"]
    return f"{result['wer']:.1f} ({low:.1f} to {high:.1f}, n = {result['windows']})"


def normalized(result: dict[str, Any]) -> str:
    """Format a word error rate after Whisper's English normalizer."""
    rate = result.get("wer_whisper_normalizer")
    return "not measured" if rate is None else f"{rate:.1f}"


def times_row(name: str, count: int, result: dict[str, Any]) -> str:
    numbers = (result[key] for key in ("start_median", "start_90th", "end_median", "end_90th"))
    return f"| {name} | {count} | " + " | ".join(f"{number:.2f}" for number in numbers) + " |"


def render(report: dict[str, Any]) -> str:
    """Return the text of the model card."""
    plain, stamped = report["single"]["without timestamps"], report["single"]["with timestamps"]
    one, many = report["stamps of single utterances"], report["stamps of several utterances"]
    by_attention = report["word times"]
    times = [
        times_row("segment timestamps, one sentence", one["segments"], one),
        times_row("segment timestamps, 2 to 6 sentences", many["segments"], many),
        times_row("words, with `word_timestamps=True`", by_attention["words"], by_attention),
    ]
    recordings = report["recordings"]
    silence, model, training = report["silence"], report["model"], report["training"]
    return TEMPLATE.format(
        **model,
        **training,
        single="\n".join(
            f"| {name} | {cell(plain[name])} | {cell(stamped[name])} |" for name in GROUPS
        ),
        whisper_single=normalized(plain["trained voices"]),
        whisper_recordings=normalized(recordings["all"]),
        transformers=cell(report["transformers, trained voices"]),
        exact=plain["trained voices"]["exact_strings"],
        noise=", ".join(f"{level} {cell(r)}" for level, r in report["in noise"].items()),
        several_plain=cell(report["several"]["without timestamps"]),
        several_stamped=cell(report["several"]["with timestamps"]),
        long_conditioned=cell(report["long"]["conditioned"]),
        long_free=cell(report["long"]["not_conditioned"]),
        times="\n".join(times),
        stamped_single=f"{one['windows_with_all_stamps']} of {one['windows']}",
        stamped_several=f"{many['windows_with_all_stamps']} of {many['windows']}",
        silence_min=silence["no_speech_prob_min"],
        silence_median=silence["no_speech_prob_median"],
        silence_windows=silence["windows"],
        silence_empty=silence["transcribe_empty"],
        silence_plain=silence["transcribe_empty_without_timestamps"],
        speech_max=report["speech no_speech_prob, highest"],
        languages=" of ".join(map(str, report["detected as en"])),
        longest_several=max(way["longest output, tokens"] for way in report["several"].values()),
        longest=max(way["longest output, tokens"] for way in report["single"].values()),
        recordings=", ".join(
            f"{name} {cell(recordings[name])}"
            for name in ("all", "trained voices", "held-out voices")
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.write_text(render(json.loads(args.results.read_text())))


if __name__ == "__main__":
    main()
