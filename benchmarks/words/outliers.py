"""Repeat on outlier checkpoints: packed chunks, 8-bit logits, live transcription, diagnosis.

    python -m benchmarks.words.outliers [--names default last-tail] [--minutes 4] [--clips 6] [--cases 40]

Each checkpoint gets one ONNX Runtime bundle with `coarse_projection`. No times are taken. Windows of 5 and
10 s have a benchmark of their own (`short_windows.py --checkpoint DIR --paddings 10 5`). Writes
`results/words.json`, after each checkpoint.
"""

import argparse
import json
import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.outlier_checkpoints import outlier_checkpoint
from tests.transcription.live.test_live import Spoken, delays, equal_share, listen
from tests.verification.diagnosis_cases.cases import one
from tests.verification.diagnosis_cases.evaluation import Score, answer, evaluate
from tests.verification.diagnosis_cases.worlds import provide

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions
from whisperport.runtime.engine.coarse import CoarseProjection
from whisperport.speech.audio import load_audio
from whisperport.speech.data.embedded_model import unpack_model
from whisperport.targets import RunOptions
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification import text_errors, versions
from whisperport.verification.clips import ShippedAudio, shipped_audio

from ..record import record
from ..speed.chunks import GAPS, PACKED, VAD, made

ENGLISH = DecodeOptions(language="en")
SEED = 20261124  # of the cases that are diagnosed
ONE_THREAD = RunOptions(threads=1)
WAYS: dict[str, dict[str, Any]] = {
    "windows": {},
    "chunks": {"vad": VAD},
    "packed chunks": {"vad": PACKED},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--names", nargs="+", default=["default", "last-tail", "early-tail"])
    parser.add_argument("--minutes", type=float, default=4, help="audio for each kind of gap")
    parser.add_argument("--clips", type=int, default=6, help="for 8-bit logits and live")
    parser.add_argument("--cases", type=int, default=40, help="device outputs to diagnose")
    parser.add_argument("--work", type=Path, default=Path("build/outliers"))
    chosen = parser.parse_args()
    result: dict[str, Any] = {
        "what": "what was measured on the embedded model, repeated on outlier checkpoints",
        "versions": versions(("whisperport", "torch", "onnxruntime", "numpy")),
    }
    for name in chosen.names:
        with ProcessPoolExecutor(1, get_context("spawn")) as pool:  # the cases are cached by model
            result[name] = pool.submit(measured, name, chosen).result()
        print(name, json.dumps(result[name]), flush=True)
        record("words", "outliers", result)


def measured(name: str, chosen: argparse.Namespace) -> dict[str, Any]:
    folder = checkpoint_folder(name, chosen.work)
    bundle = bundle_of(folder, chosen.work / f"bundle-{name}")
    transcriber = Transcriber(bundle, ONE_THREAD)
    clips = [audio for audio in shipped_audio() if audio.text][: chosen.clips]
    return {
        "8-bit logits": coarse(transcriber, clips),
        "live": live(transcriber, clips),
        "packing": packing(transcriber, chosen.minutes * 60),
        "diagnosis": diagnosis(bundle.folder, folder, chosen.cases),
    }


def checkpoint_folder(name: str, work: Path) -> Path:
    if name != "default":
        return outlier_checkpoint(name, work)
    folder = work / "embedded"
    if not folder.is_dir():
        folder.mkdir(parents=True)
        unpack_model(folder)
    return folder


def bundle_of(checkpoint: Path, folder: Path) -> Bundle:
    """Return a verified bundle with 8-bit logits; verification compares its logits with their bounds."""
    if folder.is_dir():
        return Bundle.open(folder)
    placement = {"coarse_projection": "onnxruntime"}
    return export(
        checkpoint, "onnxruntime", folder, ExportOptions(placement=placement, run=ONE_THREAD)
    )


def coarse(transcriber: Transcriber, clips: list[ShippedAudio]) -> dict[str, Any]:
    """Count the steps that 8-bit logits do not decide, and compare the texts with those of float32."""
    engine, counts = transcriber.engine, Counter[str]()
    program = engine.coarse
    exact = CoarseProjection(
        program._runner, program._embedding, counting(engine.project, "in float32", counts)
    )
    options = TranscribeOptions(decode=ENGLISH, temperatures=(0.0,))
    results = []
    for engine.coarse in (counting(exact, "steps", counts), None):
        found = [transcriber.transcribe(load_audio(clip.path), options) for clip in clips]
        results.append([segment for transcript in found for segment in transcript.segments])
    engine.coarse = program
    pairs = list(zip(*results, strict=True))
    return {
        "steps": counts["steps"],
        "also in float32": counts["in float32"],
        "segments": len(pairs),
        "equal segments": sum(a.tokens == b.tokens for a, b in pairs),
        "largest difference of avg_logprob": max(
            abs(a.avg_logprob - b.avg_logprob) for a, b in pairs
        ),
    }


def counting(call: Callable[[Any], Any], name: str, counts: Counter[str]) -> Callable[[Any], Any]:
    def counted(hidden: Any) -> Any:
        counts[name] += 1
        return call(hidden)

    return counted


def live(transcriber: Transcriber, clips: list[ShippedAudio]) -> dict[str, Any]:
    """Play clips in simulated time: delays of words, and words equal to those of the audio file."""
    late, equal = [], []
    for clip in clips:
        spoken = Spoken(load_audio(clip.path), clip.words)
        done = listen(transcriber, spoken.samples)
        late += delays(done, spoken)
        offline = transcriber.transcribe(spoken.samples).text
        equal.append(equal_share(done.live.transcript().text, offline))
    return {
        "clips": len(clips),
        "words": sum(len(clip.words) for clip in clips),
        "recognized": len(late),
        "lowest equal share": min(equal),
        "median delay s": round(median(late), 2),
        "longest delay s": round(max(late), 2),
    }


def packing(transcriber: Transcriber, seconds: float) -> list[dict[str, Any]]:
    """Transcribe clips with silence between them, in windows, in chunks and in packed chunks."""
    rows = []
    for gap, limits in GAPS.items():
        audio, text = made(seconds, limits)
        for way, options in WAYS.items():
            found = transcriber.transcribe(audio, TranscribeOptions(decode=ENGLISH, **options))
            errors = text_errors(found.text, text)
            row = {"audio": gap, "way": way, "windows": len({s.seek for s in found.segments})}
            rows.append({**row, "errors": errors.errors, "words": errors.length})
    return rows


def diagnosis(bundle: Path, checkpoint: Path, cases: int) -> dict[str, Any]:
    """Diagnose outputs that a simulated device computed with one mistake, two or none."""
    provide(bundle, checkpoint)
    outcomes = [evaluate(one(SEED, n, worlds=("embedded",)), answer) for n in range(cases)]
    score = Score.of(outcomes)
    return {
        "cases": score.cases,
        "exact": score.exact,
        "wrong files passed": sum(o.answer.passed and bool(o.case.labels) for o in outcomes),
        "right files refused": sum(not o.answer.passed and not o.case.labels for o in outcomes),
        "precision": round(score.precision, 3),
        "recall": round(score.recall, 3),
        "misses": [
            {
                "number": n,
                "kinds": o.case.kinds,
                "right": sorted(o.right),
                "named": sorted(o.answer.causes),
            }
            for n, o in enumerate(outcomes)
            if not o.exact
        ],
    }


if __name__ == "__main__":
    main()
