"""Measure whether speculative decoding pays: a draft of three tokens, checked in one run of the decoder.

    python benchmarks/speculation.py [--sizes embedded tiny] [--audio FILES] [--rounds 15]

In greedy decoding, a check decodes the last token and three draft tokens in one run, which gives four
tokens if the draft is right and one token if its first token is wrong. The result is that of single steps.

Texts: the embedded model decodes audio, window by window. For each window, the checks that a draft would
need are counted. There are two kinds of drafts. *n-grams*: the continuation of the last tokens at their
latest earlier occurrence in the text so far; where there is none, a plain step follows. *layers*: the
tokens that the decoder's first layers choose, with its last LayerNorm, its projection and the same rules.

Costs: CPU time of one run on one thread, in ONNX Runtime, and its ratio to a step in the same round.
`prefill_4` has logits of two tokens; a check needs those of four. *Shared* weights are as in a bundle;
*packed* are a separate copy, which is faster with several tokens. Sizes other than `embedded` have random
weights. Relative time is that of all runs of the decoder, 1.00 for steps only, with packed checks. It
leaves out the host's rules and cache, which a draft does not reduce. Writes
`results/speculation_DATE.json` and prints tables.
"""

import argparse
import datetime
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from memory import random_checkpoint
from programs import bound, random_inputs

from whisperport.audio import AudioSource, MelWindows, load_audio
from whisperport.checkpoint import load_checkpoint
from whisperport.model.whisper import Whisper, build_model
from whisperport.program.runner import Runner
from whisperport.rewrites import run_rewrites
from whisperport.runtime import (
    DecodeOptions,
    Decoder,
    Engine,
    Floats,
    decode_window,
    split_segments,
)
from whisperport.runtime.decode import prompt_tokens, suppressed_ids
from whisperport.runtime.rules import Rules
from whisperport.runtime.scores import Scores
from whisperport.targets import RunOptions, get_target
from whisperport.trace.program import Program
from whisperport.trace.whisper import Parts, prefill, step
from whisperport.transcription import Transcriber
from whisperport.verification import machine, versions
from whisperport.verification.clips import shipped_audio

RESULTS = Path(__file__).parent / "results"
EMBEDDED = "embedded"
DRAFTED = 3  # tokens of a draft
LONGEST = 3  # tokens of the longest n-gram
PAUSE_S = 1.5  # silence after each recording, in seconds, where all are joined
RUNS = 20  # in a round
PACKED, SHARED = "check, packed", "check, shared"


@dataclass(frozen=True)
class Window:
    """One decoded window.

    Attributes:
        past: the text of the windows before.
        tokens: the decoded ids, with the end of text.
        by_layers: number of layers -> the ids that they choose in place of `tokens`.
    """

    past: list[int]
    tokens: list[int]
    by_layers: dict[int, list[int]]


Draft = Callable[[Window, int], Sequence[int]]
"""Guesses the tokens of a window from an index on; empty: no guess."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", default=[EMBEDDED, "tiny"])
    parser.add_argument("--audio", nargs="*", default=[], help="further audio files")
    parser.add_argument("--rounds", type=int, default=15)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    costs = {size: costs_of(size, chosen.rounds) for size in chosen.sizes}
    show_costs(costs)
    texts = [text(name, files, costs) for name, files in audio(chosen.audio).items()]
    show_texts(texts, chosen.sizes)
    save(costs, texts, chosen)


def audio(further: Sequence[str]) -> dict[str, list[AudioSource]]:
    """Return groups of audio. In the second one every sentence occurs twice: the best case of n-grams."""
    spoken = [clip.path for clip in shipped_audio() if clip.text]
    once = [np.pad(load_audio(path), (0, round(PAUSE_S * 16_000))) for path in spoken]
    found: dict[str, list[AudioSource]] = {
        "recordings": list(spoken),
        "joined, twice": [np.concatenate([*once, *once])],
    }
    return found | ({"further": list(further)} if further else {})


def windows(files: Sequence[AudioSource], model: Whisper) -> Iterator[Window]:
    """Decode files as `transcribe` does with one temperature."""
    engine = Transcriber("default", run=RunOptions(threads=1)).engine
    decoder, begin = Decoder(engine), engine.generation.timestamp_begin
    for file in files:
        mel, seek = MelWindows(file, engine.dims.n_mels, engine.dims.n_frames), 0
        history: list[int] = []
        while (found := mel.window(seek))[1]:
            frames, n_audio = found
            frames[:, n_audio:] = 0
            features = engine.encode(frames)
            options = DecodeOptions(language="en", prompt=tuple(history))
            decoded = decode_window(decoder, features, options)
            tokens = [*decoded.tokens, *[engine.generation.end_of_text] * decoded.ended]
            prompt = prompt_tokens(engine, "en", options)
            guesses = drafts_of_layers(engine, model, features, prompt, tokens)
            yield Window(history.copy(), tokens, guesses)
            split = split_segments(decoded.tokens, begin, n_audio)
            history += [token for segment in split.segments for token in segment.tokens]
            seek += split.advance or n_audio
        mel.close()


def drafts_of_layers(
    engine: Engine,
    model: Whisper,
    features: Floats,
    prompt: list[int],
    tokens: list[int],
) -> dict[int, list[int]]:
    """Return what the first layers choose after each token; all layers choose the decoded tokens."""
    generation = engine.generation
    suppressed = suppressed_ids(generation, engine.dims, DecodeOptions().suppress_tokens)
    rules = Rules(generation, timestamps=True, suppressed=suppressed, max_initial_timestamp=50)
    cross = model.cross_kv(torch.from_numpy(features)[None])
    given = torch.tensor(prompt + tokens[:-1])
    found: dict[int, list[int]] = {}
    with torch.no_grad():
        for number, (x, _) in enumerate(model._layers(given, cross), 1):
            hidden = model.decoder.ln(x)[0, len(prompt) - 1 :]
            logits = (hidden @ model.decoder.token_embedding.weight.T).numpy()
            for index, row in enumerate(logits):
                rules.apply(Scores(row), tokens[:index])
            found[number] = logits.argmax(axis=1).tolist()
    assert found.pop(number) == tokens
    return found


def by_ngram(shortest: int) -> Draft:
    """Return a draft that continues the longest of the last tokens that occurred before."""

    def draft(window: Window, known: int) -> Sequence[int]:
        past = window.past + window.tokens[:known]
        for size in range(LONGEST, shortest - 1, -1):
            for end in range(len(past) - 1, size - 1, -1):
                if past[end - size : end] == past[-size:]:
                    return past[end : end + DRAFTED]
        return ()

    return draft


def of_layers(layers: int, window: Window, known: int) -> Sequence[int]:
    return window.by_layers[layers][known : known + DRAFTED]


def counted(window: Window, draft: Draft) -> dict[str, int]:
    """Count the runs that decode a window. The first token follows from the prompt without a run."""
    known, total = 1, len(window.tokens)
    counts = {"steps": 0, "checks": 0, "accepted": 0, "plain": total - 1}
    while known < total:
        guess = draft(window, known)
        pairs = zip(guess, window.tokens[known:], strict=False)
        right = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(guess), total - known)
        )
        counts["checks" if guess else "steps"] += 1
        counts["accepted"] += right
        known += right + 1
    return counts


def text(name: str, files: Sequence[AudioSource], costs: dict[str, Any]) -> dict[str, Any]:
    """Count the runs with each draft, and compute the time relative to steps."""
    model = build_model(load_checkpoint("default"))
    found = list(windows(files, model))
    layers = range(1, model.dims.n_text_layer)
    drafts: dict[str, tuple[Draft, int]] = {
        **{f"n-grams, {size} or more tokens": (by_ngram(size), 0) for size in (1, 2, 3)},
        **{
            f"the first {n} of {model.dims.n_text_layer} layers": (partial(of_layers, n), n)
            for n in layers
        },
    }
    rows = []
    for draft, (guess, used) in drafts.items():
        counts = [counted(window, guess) for window in found]
        total = {key: sum(each[key] for each in counts) for key in counts[0]}
        times = {size: relative_time(total, cost["ratios"], used) for size, cost in costs.items()}
        rows.append({"draft": draft, **total, "relative_time": times})
    agreement = {
        n: statistics.mean(
            a == b for w in found for a, b in zip(w.by_layers[n], w.tokens, strict=True)
        )
        for n in layers
    }
    plain = rows[0]["plain"]
    return {"audio": name, "windows": len(found), "steps": plain, "rows": rows, "same": agreement}


def relative_time(counts: dict[str, int], ratios: dict[str, float], layers: int) -> float | None:
    """Return the time of all runs in that of plain steps; None: the draft's cost was not measured."""
    draft = ratios.get(f"draft, layers: {layers}") if layers else 0.0
    if draft is None or counts["plain"] == 0:
        return None
    with_draft = ratios[PACKED] + DRAFTED * draft
    return (counts["steps"] + counts["checks"] * with_draft) / counts["plain"]


def costs_of(size: str, rounds: int) -> dict[str, Any]:
    """Measure each program in turn."""
    model = build_model(load_checkpoint("default") if size == EMBEDDED else random_checkpoint(size))
    parts = Parts(model, [])
    with patch("whisperport.trace.whisper.PICKED_ROWS", 1 + DRAFTED):
        check = prefill(parts, 1 + DRAFTED)
    check = replace(check, spec=replace(check.spec, name="check"))
    with tempfile.TemporaryDirectory() as folder:
        shared = {"step": step(parts), "prefill_4": prefill(parts, 4), SHARED: check}
        runners = loaded(shared, Path(folder) / "shared")
        runners |= loaded({PACKED: check}, Path(folder) / "packed")
        for layers in range(1, model.dims.n_text_layer):  # the time does not depend on the weights
            first = Parts(Whisper(replace(model.dims, n_text_layer=layers)).eval(), [])
            name = f"draft, layers: {layers}"
            both = {name: step(first), "": prefill(first, 4)}  # shared weights, as of the step
            runners[name] = loaded(both, Path(folder) / f"draft_{layers}")[name]
        runs = {name: bound(runner, random_inputs(runner)) for name, runner in runners.items()}
        found = [{name: cpu_ms(run) for name, run in runs.items()} for _ in range(rounds + 1)][1:]
    return {
        "cpu_ms": {name: statistics.median(each[name] for each in found) for name in runs},
        "ratios": {
            name: statistics.median(each[name] / each["step"] for each in found) for name in runs
        },
        "rounds": found,
    }


def loaded(programs: dict[str, Program], folder: Path) -> dict[str, Runner]:
    """Lower programs for ONNX Runtime and load them; they share weights if there are several."""
    folder.mkdir()
    target = get_target("onnxruntime")
    ready = [run_rewrites(each, target.spec.rewrites)[0] for each in programs.values()]
    runners = target.load(
        folder, target.lower(ready, folder, lambda _: None), RunOptions(threads=1)
    )
    return {name: runners[program.spec.name] for name, program in programs.items()}


def cpu_ms(run: Callable[[], object]) -> float:
    started = time.process_time()
    for _ in range(RUNS):
        run()
    return 1e3 * (time.process_time() - started) / RUNS


def show_costs(costs: dict[str, Any]) -> None:
    for size, cost in costs.items():
        print(f"\n{size:20}{'CPU ms':>8}{'/ step':>8}   accepted tokens per check that pay")
        for name, ms in cost["cpu_ms"].items():
            ratio = cost["ratios"][name]
            needed = ""
            if name in (PACKED, SHARED):
                needed = f"more than {ratio - 1:.2f} of {DRAFTED}"
            elif name.startswith("draft"):
                total = cost["ratios"][PACKED] + DRAFTED * ratio
                needed = f"more than {total - 1:.2f} of {DRAFTED}"
            print(f"{name:20}{ms:8.2f}{ratio:8.2f}   {needed}")
        limit = cost["ratios"][PACKED] / (1 + DRAFTED)
        print(f"relative time with drafts that are always right and cost nothing: {limit:.2f}")


def show_texts(texts: list[dict[str, Any]], sizes: Sequence[str]) -> None:
    for found in texts:
        same = ", ".join(f"{n}: {share:.0%}" for n, share in found["same"].items())
        print(f"\n{found['audio']}: {found['windows']} windows, {found['steps']} steps")
        print(f"tokens that the first layers choose as all layers do: {same}")
        heads = "".join(f"{size:>10}" for size in sizes)
        print(f"{'draft':27}{'steps':>6}{'checks':>8}{'accepted/check':>16}   time:{heads}")
        for row in found["rows"]:
            share = row["accepted"] / max(1, row["checks"])
            times = (row["relative_time"][size] for size in sizes)
            shown = "".join(f"{'':>10}" if time is None else f"{time:10.2f}" for time in times)
            print(f"{row['draft']:27}{row['steps']:6}{row['checks']:8}{share:16.2f}{'':8}{shown}")


def save(costs: dict[str, Any], texts: list[dict[str, Any]], chosen: argparse.Namespace) -> None:
    today = datetime.date.today().isoformat()
    result = {
        "what": f"runs of the decoder with drafts of {DRAFTED} tokens, and their CPU time on one thread",
        "costs": costs,
        "texts": texts,
        "machine": machine(),
        "versions": versions(("whisperport", "onnxruntime", "torch", "numpy")),
        "measured_on": today,
        "command": f"python benchmarks/speculation.py --sizes {' '.join(chosen.sizes)} "
        f"--rounds {chosen.rounds}",
    }
    (RESULTS / f"speculation_{today}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
