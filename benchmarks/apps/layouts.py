"""Convert for every installed app: what the app returns, and what its files cost.

    cd training && python synthesize.py eval --out work/eval     # see training/README.md
    python -m benchmarks.apps.layouts --eval training/work/eval

The embedded model is converted for each app in each precision, and verified with the short audio files
of the package; for an app that is compared by words, with at least 400 words of all voices instead. A
checkpoint of tiny's sizes with random weights is written, too.

Each conversion is a process of its own. CPU seconds and peak memory are those of this process from its
start until the files are written: torch, the checkpoint and the writer. The app, and the converter of its
tokenizer, are other processes. WER is counted against the transcripts. Writes `results/apps.json`, of
which `make docs` makes the table of docs/how-to/convert-for-an-app.md. With `--apps`, the rows of the other
apps stay: each has its own date and processor.
"""

import argparse
import datetime
import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whisperport.build.layouts import App, all_layouts, layout_of
from whisperport.build.layouts.client import is_installed
from whisperport.speech.audio.pcm import to_int16, write_wav
from whisperport.verification.clips import Clip, shipped_clips
from whisperport.verification.machine import machine

from ..memory.export_cost import make_checkpoint, resident
from ..record import record, recorded
from ..words.short_windows import utterances

EMBEDDED, TINY = "default", "tiny"
LEAST_WORDS = 400  # of the clips of an app that is compared by words
COMMAND = "python -m benchmarks.apps.layouts --eval training/work/eval"  # measures all rows
WRITING = "writing the files of"  # start of the stage whose end is measured


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    every = [app for layout in all_layouts() for app in layout.apps.values()]
    here = [app.name for app in every if app.compile is None]  # the others run in simulators
    parser.add_argument("--apps", nargs="+", default=here)
    parser.add_argument("--eval", type=Path, help="for apps that are compared by words")
    parser.add_argument("--work", type=Path, default=Path("build/apps"))
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.child:
        print(json.dumps(conversion(*chosen.child, chosen.work)))
        return
    make_inputs(chosen.work, chosen.eval)
    for app in chosen.apps:
        if not is_installed(layout_of(app).apps[app]):
            print(f"{app}: not installed")
            continue
        for precision in layout_of(app).precisions:
            row = child(chosen.work, app, precision, EMBEDDED)
            row["tiny"] = child(chosen.work, app, precision, TINY)
            print(json.dumps(row), flush=True)
            save(row)


def make_inputs(work: Path, evaluation: Path | None) -> None:
    """Write the folders of clips and the checkpoint of tiny's sizes; what exists is not written again."""
    write_clips(work / "shipped", shipped_clips(None))
    if evaluation:
        write_clips(work / "words", sentences(evaluation))
    if not (work / TINY / "tokenizer.json").exists():
        make_checkpoint(TINY, work / TINY)


def sentences(evaluation: Path) -> list[Clip]:
    """Return at least 400 words of all voices, as many sentences apart from each other."""
    spoken = [*utterances(evaluation), *utterances(evaluation, held_out=True)]
    for step in range(len(spoken), 0, -1):
        clips = spoken[::step]
        if sum(len(clip.text.split()) for clip in clips) >= LEAST_WORDS:
            return clips
    raise SystemExit(f"{evaluation} has less than {LEAST_WORDS} words")


def write_clips(folder: Path, clips: Sequence[Clip]) -> None:
    """Write WAV files, each with its transcript beside it."""
    if folder.is_dir():
        return
    folder.mkdir(parents=True)
    for number, clip in enumerate(clips):
        path = folder / f"{number:03d}.wav"
        write_wav(str(path), to_int16(clip.samples))
        path.with_suffix(".txt").write_text(clip.text, encoding="utf-8")


def child(work: Path, app: str, precision: str, model: str) -> dict[str, Any]:
    """Convert in another process."""
    shared = ["--work", str(work), "--child", app, precision, model]
    command = [sys.executable, "-m", __spec__.name, *shared]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    row: dict[str, Any] = json.loads(ended.stdout.strip().rpartition("\n")[2])
    return row


class WrittenError(Exception):
    """The files are written, and the app is not to run."""


def conversion(app: str, precision: str, model: str, work: Path) -> dict[str, Any]:
    """Return what writing the files costs and, of the embedded model, what the app returned."""
    logging.disable(logging.WARNING)
    from whisperport.build.layouts.convert import ConvertOptions, convert
    from whisperport.system.progress import reporting

    layout, cost = layout_of(app), {}
    stages = [""]

    def progress(name: str) -> None:
        if stages[-1].startswith(WRITING):
            cost.update(cpu_s=time.process_time(), peak_bytes=resident("VmHWM"))
            if model == TINY:
                raise WrittenError
        stages.append(name)

    clips = "words" if layout.apps[app].compared == "words" else "shipped"
    out = work / "out" / f"{app}-{precision}-{model}{layout.suffix}"
    options = ConvertOptions(precision=precision, verify_with=work / clips, allow_unverified=True)
    try:
        with reporting(progress):
            converted = convert(work / model if model == TINY else model, app, out, options)
    except WrittenError:
        return cost
    record_of, verification = converted.record, converted.record.verification
    files = [out] if layout.suffix else [out / name for name in record_of.files]
    return {
        "app": app,
        "precision": precision,
        "versions": dict(verification.versions),
        "verified": record_of.is_verified,
        **compared(layout.apps[app], converted),
        "bytes": sum(file.stat().st_size for file in files),
        **cost,
    }


def compared(app: App, converted: Any) -> dict[str, Any]:
    """Count the clips for which an app returns what the checkpoint emits, and the words of all clips."""
    from whisperport.build.layouts.checks import checks_of
    from whisperport.verification.error_rate import TextErrors, text_errors

    clips, results = converted.record.clips, converted.run.results
    expected = [clip.expected for clip in clips]
    if app.compared == "words":
        pairs = zip(expected, results, strict=True)
        equal = [a.text.split() == b.text.split() for a, b in pairs]
    else:
        checks = checks_of(app, "", clips, expected, results, exact=True)
        equal = [
            check.passed for check in checks if check.level == "tokens"
        ]  # not of word timestamps

    def errors(hypotheses: Any, references: Any) -> TextErrors:
        pairs = zip(hypotheses, references, strict=True)
        return sum((text_errors(a.text, b.text) for a, b in pairs), TextErrors())

    return {
        "clips": len(clips),
        "equal": sum(equal),
        "words": errors(results, clips).length,
        "wer": errors(results, clips).rate,
        "reference_wer": errors(expected, clips).rate,
        "differ": errors(results, expected).errors,
        "emitted": errors(results, expected).length,
    }


def save(row: dict[str, Any]) -> None:
    """Keep a row, with its date and processor, beside those of other apps and precisions."""
    keys = ("app", "precision")
    measured = {"measured_on": datetime.date.today().isoformat(), "cpu": machine()["cpu"]}
    known = recorded("apps", "layouts").get("rows", [])
    rows = [other for other in known if any(other[key] != row[key] for key in keys)]
    result = {"command": COMMAND, "what": "files of other apps", "rows": [*rows, row | measured]}
    record("apps", "layouts", result)


if __name__ == "__main__":
    main()
