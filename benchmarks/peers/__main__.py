"""Compare whisperport with other Whisper implementations: speed, CPU time, memory, word errors, start-up.

    python -m benchmarks.peers [--quick] [--models embedded tiny base small turbo-narrowed]

`make bench-peers` makes the peers' environment first, then runs this. Every model is converted from our
checkpoint to each peer's own format; nothing is downloaded. A contender is a process that loads its model
once and stays alive. The contenders run in turn, so that other load affects all alike: figures are medians
of the rounds, ratios are medians of the rounds' ratios to whisperport with its defaults. All decode
greedily, in English, without the text of previous windows, with the same number of threads.

Random weights decode a fixed number of tokens, in 2 to 9 s and in one window; the embedded model
transcribes a command of 3 s, one window, 77 s, 10 minutes, and 100 short files; `embedded-tiny` is the same
with tiny's width and depth. Start-up is measured in new processes. A contender that cannot be converted or
measured is listed with the reason.
`results/peers.json` is written after every case, so that an interrupted run keeps its results.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from whisperport.targets import TARGETS
from whisperport.verification import versions

from ..models import EMBEDDED, SIZES, WIDENED
from ..record import RESULTS, record
from .contenders import AUTO, CONTENDERS, OURS, START, Case, Contender, forced, transcribed
from .measuring import FailedError, Process, Row, measure, measure_start, print_tables

ALL_MODELS = (EMBEDDED, "tiny", "base", "small", "turbo-narrowed")
QUICK_MODELS = (EMBEDDED, "tiny")
PEERS = ("ctranslate2", "faster-whisper", "openai-whisper", "openvino-genai", "pywhispercpp")
PEERS += ("sherpa-onnx", "torch", "transformers")
# Resident memory of a process / size of the float32 weights, at most: measured for tiny and base.
MEMORY_FACTOR, MEMORY_MIB = 2.0, 400
HERE = Path(__file__).parent
SHARED = ("huggingface", "openai.pt")  # what every conversion begins with


def main() -> None:
    chosen = arguments()
    name = "peers_quick" if chosen.quick else "peers"
    result = described(chosen)
    try:
        for model in chosen.models:
            for rows in measured(model, chosen):
                result["rows"] += [{"model": model} | row for row in rows]
                record("peers", name, result, chosen.out)
        if EMBEDDED in chosen.models:
            result["start_up"] = start_up(chosen)
            record("peers", name, result, chosen.out)
    except KeyboardInterrupt:
        print("interrupted; the results of the finished cases are kept", file=sys.stderr)
    print_tables(result)
    print("", record("peers", name, result, chosen.out), sep="\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="fewer models and less audio: about 4 minutes")
    add(
        "--models",
        nargs="+",
        choices=(EMBEDDED, *WIDENED, *SIZES),
        help="default: all but the largest",
    )
    add("--only", nargs="+", default=[""], help="contenders whose name contains one of these texts")
    add("--rounds", type=int, help="rounds of each case; default: 5, or 3 with --quick")
    add("--case-seconds", type=float, default=200.0, help="after these, no fourth round of a case")
    add("--minutes", type=float, help="long audio; default: 10 minutes, or 2 with --quick")
    add("--files", type=int, help="number of short files; default: 100, or 20 with --quick")
    add("--tokens", type=int, default=64, help="tokens in a window of random weights")
    add("--threads", type=int, default=2)
    add("--work", type=Path, default=Path("build/peers"), help="where converted models are kept")
    add("--export-again", action="store_true", help="export our own bundles again")
    add("--peers-python", type=Path, default=Path(".venv-peers/bin/python"))
    add("--out", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    quick = chosen.quick
    chosen.models = chosen.models or (QUICK_MODELS if quick else ALL_MODELS)
    chosen.rounds = chosen.rounds or (3 if quick else 5)
    chosen.minutes = chosen.minutes or (2 if quick else 10)
    chosen.files = chosen.files or (20 if quick else 100)
    return chosen


def described(chosen: argparse.Namespace) -> dict[str, Any]:
    listed = subprocess.run(
        [chosen.peers_python, "-m", "pip", "list", "--format=json"],
        capture_output=True,
        text=True,
        check=True,
    )
    theirs = {
        re.sub("[-_.]+", "-", e["name"]).lower(): e["version"] for e in json.loads(listed.stdout)
    }
    return {
        "what": "whisperport and other Whisper implementations: same weights, audio and threads",
        "rows": [],
        "start_up": [],
        "threads": chosen.threads,
        "load_average": os.getloadavg(),  # processes that used or waited for a core, before
        "versions": versions(("whisperport", "onnxruntime", "numpy")),
        "versions_of_peers": {name: theirs.get(name, "not installed") for name in PEERS},
    }


def measured(model: str, chosen: argparse.Namespace):
    """Yield the rows of each case of a model."""
    folder = chosen.work / model
    cases = cases_of(model, chosen)
    contenders = chosen_contenders(chosen, {case.kind for case in cases})
    reasons = prepared(model, contenders, chosen)
    with ExitStack() as stack:
        processes = {}
        for one in contenders:
            if one.name in reasons:
                continue
            if reason := too_large(folder):
                reasons[one.name] = reason
                continue
            try:
                processes[one.name] = Process(*command(one, folder, chosen))
                stack.callback(processes[one.name].close)
            except FailedError as error:
                reasons[one.name] = str(error)
        for case in cases:
            print(f"{model}: {case.name}", file=sys.stderr)
            able = [one for one in contenders if case.kind in one.kinds]
            ready = {one.name: processes[one.name] for one in able if one.name not in reasons}
            rows, failures = measure(
                case, ready, chosen.rounds, chosen.case_seconds, warm_up=case is cases[0]
            )
            reasons |= failures
            unable = {
                one.name: one.why_not
                for one in contenders
                if case.kind not in one.kinds and one.why_not
            }
            missing = {one.name: reasons[one.name] for one in able if one.name in reasons}
            yield rows + unmeasured(case, unable | missing)


def cases_of(model: str, chosen: argparse.Namespace) -> list[Case]:
    clips = chosen.work / "audio"
    if model.startswith(EMBEDDED):
        return transcribed(clips, chosen.minutes, chosen.files)
    return forced(clips, chosen.tokens)


def chosen_contenders(chosen: argparse.Namespace, kinds: set[str]) -> list[Contender]:
    """Return the contenders to measure on some of the kinds; whisperport's defaults are the first."""
    installed = {AUTO, *(target.spec.name for target in TARGETS)}
    return [
        one
        for one in CONTENDERS
        if kinds & {*one.kinds}
        and (not one.is_ours or one.target.partition("+")[0] in installed)
        and (one.name == OURS or any(text in one.name for text in chosen.only))
    ]


def prepared(
    model: str, contenders: Sequence[Contender], chosen: argparse.Namespace
) -> dict[str, str]:
    folder = chosen.work / model
    if chosen.export_again:
        for target in {one.target for one in contenders if one.is_ours}:
            if not (folder / target).is_symlink():
                shutil.rmtree(folder / target, ignore_errors=True)
    return prepare(model, folder, contenders, chosen.peers_python, chosen.tokens)


def command(one: Contender, folder: Path, chosen: argparse.Namespace) -> tuple[Any, ...]:
    """Return the arguments of `Process`."""
    python = Path(sys.executable) if one.is_ours else chosen.peers_python
    log = chosen.work / f"{one.name.replace(' ', '_')}.log"
    return one, python, folder, chosen.threads, log


def too_large(folder: Path) -> str:
    """Return why the memory may not suffice for one more process, or nothing."""
    file = folder / "openai.pt"
    weights = file.stat().st_size / 2**20 if file.exists() else 0
    needed = MEMORY_FACTOR * weights + MEMORY_MIB
    lines = Path("/proc/meminfo").read_text()
    available = int(re.search(r"MemAvailable:\s+(\d+)", lines)[1]) / 1024
    if available > needed:
        return ""
    return f"needs up to {needed:.0f} MiB of memory, {available:.0f} MiB were free"


def unmeasured(case: Case, reasons: Mapping[str, str]) -> list[Row]:
    return [
        {"case": case.name, "contender": name, "reason": f"not measured: {reason}"}
        for name, reason in reasons.items()
    ]


def start_up(chosen: argparse.Namespace) -> list[Row]:
    """Measure import, load and the first transcript of one window with the embedded model."""
    print(f"{EMBEDDED}: start-up", file=sys.stderr)
    contenders = chosen_contenders(chosen, {START})
    reasons = prepared(EMBEDDED, contenders, chosen)
    audio = next(case.audio for case in cases_of(EMBEDDED, chosen) if case.name == "one window")
    commands = {
        one.name: command(one, chosen.work / EMBEDDED, chosen)
        for one in contenders
        if one.name not in reasons
    }
    rows, failures = measure_start(commands, audio, chosen.rounds)
    missing = reasons | failures
    return rows + [
        {"contender": name, "reason": f"not measured: {why}"} for name, why in missing.items()
    ]


def prepare(
    model: str, folder: Path, contenders: Sequence[Contender], python: Path, tokens: int
) -> dict[str, str]:
    """Return the reason for each contender that has no model: its name -> the last line of the failure.

    Args:
        model: "embedded", or a name of sizes; see `models.py`.
        folder: where the model is written in all formats.
        contenders: whose formats are needed.
        python: the interpreter of the peers' environment.
        tokens: number of tokens that contenders will be forced to decode.
    """
    reasons: dict[str, str] = {}
    targets = {one.target for one in contenders if one.is_ours}
    for target in sorted(targets):
        if not (folder / target).exists() or not all((folder / name).exists() for name in SHARED):
            print(f"writing {model} for {target}", file=sys.stderr)
            command = [
                sys.executable,
                "-m",
                f"{__package__}.models",
                model,
                folder,
                "--target",
                target,
            ]
            failure = failure_of(command)
            reasons |= {
                c.name: failure for c in contenders if c.is_ours and c.target == target and failure
            }
    for format in sorted({one.format for one in contenders if one.format}):
        if not (folder / format).exists():
            print(f"converting {model}: {format}", file=sys.stderr)
            command = [python, HERE / "convert.py", format, folder]
            command += [] if model.startswith(EMBEDDED) else ["--forced-tokens", str(tokens)]
            failure = failure_of(command)
            reasons |= {c.name: failure for c in contenders if c.format == format and failure}
    return reasons


def failure_of(command: Sequence[str | Path]) -> str:
    """Run a command; return the last line that it wrote if it failed, or nothing."""
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return ""
    lines = (done.stdout + done.stderr).strip().splitlines()
    return lines[-1] if lines else f"the conversion ended with status {done.returncode}"


if __name__ == "__main__":
    main()
