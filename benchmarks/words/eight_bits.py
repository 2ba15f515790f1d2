"""Count the words that 8-bit encoders lose, paired with float32's words on speech nobody calibrated with.

    cd training && python synthesize.py eval --out work/eval     # see training/README.md
    python -m benchmarks.words.eight_bits --eval training/work/eval default OUTLIER_FOLDER...

Every checkpoint is exported with its encoder in float32 and in each recipe; the decoder runs on ONNX
Runtime in float32. The utterances of the evaluation have sentences that no embedded model was trained with,
a third of them in voices that it never heard; the calibration uses the audio files of the package.
They are decoded as users decode: with timestamps, and with other temperatures if a text fails. An early
stop is a text with less than half of float32's words.

The bound is one-sided, with 95 %, from a paired bootstrap over utterances. Its honesty is checked with 40
samples of a tenth of the utterances each: how many bounds are at least the increase over all utterances.
Bundles and texts are kept in `--work` and used again. Writes `results/words.json` and prints a
table. The share of multiplications with 8-bit activations is computed from the operators that the encoder's
notes name as float32, for the sizes of the checkpoint and for those of Whisper tiny.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import TextErrors, text_errors, versions
from whisperport.verification.clips import Clip
from whisperport.verification.error_rate import increase_bounds

from ..record import record
from .short_windows import utterances

FLOAT = "fp32"
# Name -> target, precision and options of the encoder.
RECIPES: Mapping[str, tuple[str, str, Mapping[str, str]]] = {
    FLOAT: ("litert", "fp32", {}),
    "onnxruntime w8a8": ("onnxruntime", "w8a8", {}),
    "litert w8a8": ("litert", "w8a8", {"litert.static": "matmul"}),
    "onnxruntime without exceptions": (
        "onnxruntime",
        "w8a8",
        {"onnxruntime.sensitive": "as-others"},
    ),
    "litert without exceptions": ("litert", "w8a8", {"litert.sensitive": "as-others"}),
}
TINY = {"d": 384, "blocks": 4}
DECODER = ("cross_kv", "prefill_4", "prefill_64", "step", "align")
AS_USERS = TranscribeOptions(decode=DecodeOptions(language="en"))
SETS, PART = 40, 0.1  # samples of the utterances that check the bound


def bundle_of(checkpoint: str, recipe: str, work: Path) -> Bundle:
    """Return the bundle of a checkpoint and a recipe, also if its verification failed."""
    folder = work / f"{Path(checkpoint).name}-{recipe.replace(' ', '-')}"
    try:
        return Bundle.open(folder)
    except BundleError:
        target, precision, options = RECIPES[recipe]
        chosen = ExportOptions(
            placement=dict.fromkeys(DECODER, "onnxruntime"),
            precisions={"encoder": precision},
            options=options,
            allow_unverified=True,
            run=RunOptions(threads=1),
        )
        return export(load_checkpoint(checkpoint), target, folder, chosen)


def transcribed(bundle: Bundle, clips: Sequence[Clip]) -> list[str]:
    """Return the text of every clip; the texts are kept beside the bundle."""
    kept = bundle.folder.with_suffix(f".{len(clips)}.json")
    if not kept.exists():
        transcriber = Transcriber(bundle, RunOptions(threads=1))
        texts = [transcriber.transcribe(clip.samples, AS_USERS).text for clip in clips]
        kept.write_text(json.dumps(texts))
    found: list[str] = json.loads(kept.read_text())
    return found


def in_8_bits(notes: Sequence[str], of: Mapping[str, int]) -> float:
    """Return the share of an encoder's multiplications whose activations have 8 bits.

    Args:
        notes: of the encoder, which name the operators in float32: attention, or a convolution.
        of: d, and the number of blocks.
    """
    d, blocks, positions = of["d"], of["blocks"], 1500
    conv1, conv2, linears = (
        2 * positions * d * 80 * 3,
        positions * d * d * 3,
        12 * positions * d * d,
    )
    attention = positions * positions * d  # scores; probabilities times values
    total = conv1 + conv2 + blocks * (linears + 2 * attention)
    exact = [note for note in notes if note.startswith("in fp32")]
    convolutions = sum("conv1:" in note for note in exact)
    return 1 - (convolutions * conv2 + (len(exact) - convolutions) * attention) / total


def row(texts: Sequence[str], of_float: Sequence[str], clips: Sequence[Clip]) -> dict[str, Any]:
    """Return the words lost by one recipe, paired with float32's."""
    pairs = [
        (text_errors(text, clip.text), text_errors(exact, clip.text))
        for text, exact, clip in zip(texts, of_float, clips, strict=True)
    ]
    total = sum((pair[0] for pair in pairs), TextErrors())
    exact = sum((pair[1] for pair in pairs), TextErrors())
    low, high = increase_bounds(pairs)
    short = [len(t.split()) < 0.5 * len(e.split()) for t, e in zip(texts, of_float, strict=True)]
    return {
        "words": total.length,
        "wer": total.rate,
        "increase": total.rate - exact.rate,
        "increase_at_least": low,
        "increase_at_most": high,
        "early_stops": sum(short),
        "utterances_that_differ": sum(a != b for a, b in zip(texts, of_float, strict=True)),
        "bounds_that_hold": _holding(pairs, total.rate - exact.rate),
    }


def _holding(pairs: Sequence[tuple[TextErrors, TextErrors]], increase: float) -> int:
    """Return for how many samples of the utterances the bound is at least the increase over all."""
    random, count = np.random.default_rng(1), max(1, round(PART * len(pairs)))
    samples = [
        [pairs[i] for i in random.choice(len(pairs), count, replace=False)] for _ in range(SETS)
    ]
    return sum(increase_bounds(sample)[1] >= increase for sample in samples)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--eval", type=Path, required=True, help="folder of training/synthesize.py")
    parser.add_argument("--utterances", type=int, default=450)
    parser.add_argument("--work", type=Path, default=Path("work/eight_bits"))
    options = parser.parse_args()
    clips = [*utterances(options.eval), *utterances(options.eval, held_out=True)]
    order = np.random.default_rng(0).permutation(len(clips))[: options.utterances]
    clips = [clips[int(i)] for i in order]
    packages = ("whisperport", "ai-edge-litert", "ai-edge-quantizer", "onnxruntime", "torch")
    results: dict[str, Any] = {"versions": versions(packages)}
    for checkpoint in options.checkpoints:
        name = Path(checkpoint).name
        of_float: list[str] = []
        results[name] = {}
        for recipe in RECIPES:
            bundle = bundle_of(checkpoint, recipe, options.work)
            texts = transcribed(bundle, clips)
            of_float = of_float or texts
            results[name][recipe] = made = row(texts, of_float, clips)
            made["verified"] = bundle.manifest.verified
            made["exceptions"] = notes = list(bundle.manifest.program("encoder").facts.notes)
            dims = bundle.manifest.dims
            own = {"d": dims.n_audio_state, "blocks": dims.n_audio_layer}
            made["in_8_bits"] = in_8_bits(notes, own) if recipe != FLOAT else 0.0
            made["in_8_bits_of_tiny"] = in_8_bits(notes, TINY) if recipe != FLOAT else 0.0
            print(
                f"{name:<20} {recipe:<32} {made['words']} words, WER {made['wer']:7.2%}, increase "
                f"{100 * made['increase']:+6.2f} points, at most {100 * made['increase_at_most']:+6.2f}",
                flush=True,
            )
            record("words", "eight_bits", results)


if __name__ == "__main__":
    main()
