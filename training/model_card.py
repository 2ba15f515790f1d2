"""Write MODEL_CARD.md: fill the results of the evaluation into model_card_template.md.

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

TEMPLATE = Path(__file__).with_name("model_card_template.md")


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
    return TEMPLATE.read_text().format(
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
