"""Measure adapters as inputs of programs: a step, a swap, memory, and 2,000 requests for 20 of them.

    python -m benchmarks.serving.adapters --adapters training/work/adapters [--parts step requests ...]

    step      a step of Whisper's sizes (random weights) with inputs for adapters of rank 16, and without
    equal     texts of each adapter: as inputs, and merged by `export --adapter`
    requests  2,000 requests of 16 clients, each for one of the adapters or the base, against `Transcriber`
    memory    resident memory of the server with all adapters, and of one without

Bundles are exported to `--work` unless they exist. The adapters are those of `training/adapters.py`. Writes
`results/serving.json`, and exits with 1 if an answer was another adapter's.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from fuzz.server_process import ServerProcess

from whisperport import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.program.bundle import Bundle
from whisperport.runtime import Decoder, Engine, load_engine
from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber
from whisperport.verification import versions

from ..models import SIZES, random_checkpoint
from ..record import record, recorded

RANK, PROMPT, STEPS = 16, (50258, 50259, 50359, 50363), 48
CLIENTS, REQUESTS, CHECKED = 16, 2000, 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--adapters", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    parser.add_argument("--work", type=Path, default=Path("build/adapters"))
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--target", default="onnxruntime")
    parser.add_argument("--precision", default="")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--threads", type=int, default=2)
    chosen = parser.parse_args()
    measured = {part: PARTS[part](chosen) for part in chosen.parts}
    for part, result in measured.items():
        print(f"{part}: {json.dumps(result)}", flush=True)
    name = "adapters"
    result = {"versions": versions(("whisperport", "onnxruntime", "openvino"))} | measured
    record("serving", name, recorded("serving", name) | result)
    sys.exit(any(part.get("different") for part in measured.values()))


def step(chosen: argparse.Namespace) -> dict[str, Any]:
    """Time per step of both bundles in turn, and the time to change the adapter."""
    made = None
    engines: dict[str, Engine] = {}
    for kind, inputs in (("plain", ""), ("adapters", str(RANK))):
        folder = chosen.work / "-".join(
            filter(None, (chosen.size, chosen.target, chosen.precision, kind))
        )
        if not folder.exists():
            made = made or random_checkpoint(chosen.size)
            options = ExportOptions(
                adapters_as_inputs=inputs,
                precision=chosen.precision,
                batch=1,
                allow_unverified=True,
            )
            export(made, chosen.target, folder, options)
        run = RunOptions(threads=chosen.threads, trust=True)
        engines[kind] = load_engine(Bundle.open(folder), run)
    mel = np.random.default_rng(0).standard_normal((80, 3000)).astype(np.float32) / 2
    features = engines["plain"].encode(mel)
    decoders = {kind: Decoder(engine) for kind, engine in engines.items()}
    encoders = {kind: [] for kind in engines}
    ms: dict[str, list[float]] = {kind: [] for kind in engines}
    for number in range(chosen.rounds + 1):
        for kind in sorted(engines, reverse=bool(number % 2)):
            began = time.perf_counter()
            engines[kind].encode(mel)
            encoders[kind].append(1e3 * (time.perf_counter() - began))
            decoder = decoders[kind]
            decoder.start_window(features.copy())
            decoder.prefill(PROMPT)
            began = time.perf_counter()
            for token in range(STEPS):
                decoder.step(token)
            ms[kind].append(1e3 * (time.perf_counter() - began) / STEPS)
    return {
        "size": chosen.size,
        "target": chosen.target,
        "precision": chosen.precision or "fp32",
        "rank": RANK,
        "ms per step": {kind: statistics.median(times[1:]) for kind, times in ms.items()},
        "step, of the time without": ratio(ms["adapters"][1:], ms["plain"][1:]),
        "encoder, of the time without": ratio(encoders["adapters"][1:], encoders["plain"][1:]),
    }


def ratio(times: list[float], others: list[float]) -> dict[str, float]:
    """Return median and quartiles of the ratios of paired times."""
    ratios = np.array(times) / np.array(others)
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return {"median": float(middle), "quartiles": [float(low), float(high)]}  # type: ignore[dict-item]


def adapted_bundle(chosen: argparse.Namespace) -> Path:
    """Return the embedded model's bundle for adapters."""
    folder: Path = chosen.work / f"embedded-{chosen.target}"
    if not folder.exists():
        export("default", chosen.target, folder, ExportOptions(adapters_as_inputs="8"))
    return folder


def folders(chosen: argparse.Namespace) -> dict[str, Path]:
    """Return the adapters by name."""
    found = sorted(chosen.adapters.glob("*/adapter_config.json"))
    return {config.parent.name: config.parent for config in found}


def clips(chosen: argparse.Namespace) -> list[Path]:
    return sorted((chosen.adapters / "clips").glob("*.wav"))


def equal(chosen: argparse.Namespace) -> dict[str, Any]:
    """Compare the texts of some adapters with those of bundles into which they are merged."""
    base = Transcriber(adapted_bundle(chosen), RunOptions(threads=chosen.threads))
    counts, swaps = Counter[str](), list[float]()
    spoken = json.loads((chosen.adapters / "clips.json").read_text())
    for name, folder in list(folders(chosen).items())[:: max(1, 20 // 5)]:
        merged = chosen.work / f"merged-{name}"
        if not merged.exists():
            export("default", chosen.target, merged, ExportOptions(adapter=folder))
        whole = Transcriber(merged, RunOptions(threads=chosen.threads, short_windows=False))
        began = time.perf_counter()
        adapted = base.adapted(folder)
        swaps.append(1e3 * (time.perf_counter() - began))
        for clip in clips(chosen):
            texts = [each.transcribe(clip, language="en").text for each in (whole, adapted, base)]
            counts["texts"] += 1
            counts["different"] += texts[0] != texts[1]
            counts["changed by the adapter"] += texts[1] != texts[2]
            counts["as the adapter was trained"] += texts[1].strip() == spoken[clip.name][name]
    return {
        **counts,
        "different": counts["different"],
        "ms to read and swap": statistics.median(swaps),
    }


def requests(chosen: argparse.Namespace) -> dict[str, Any]:
    """Ask for all adapters at the same time, and count the answers that are not the adapter's own."""
    folder, own = adapted_bundle(chosen), folders(chosen)
    base = Transcriber(folder, RunOptions(threads=chosen.threads, short_windows=False))
    chosen_clips = clips(chosen)[:CHECKED]
    expected: dict[tuple[str, str], str] = {}
    for name, transcriber in (("", base), *((n, base.adapted(f)) for n, f in own.items())):
        for clip in chosen_clips:
            text = transcriber.transcribe(clip, language="en").text
            expected[name, clip.name] = text.strip()
    arguments = [word for name, f in own.items() for word in ("--adapter", f"{name}={f}")]
    data = {clip.name: clip.read_bytes() for clip in chosen_clips}
    counts: Counter[str] = Counter()
    asked = random.Random(0).choices([*expected], k=REQUESTS)
    with ServerProcess(
        *("--bundle", str(folder), "--model-id", "base", "--no-short-windows", *arguments)
    ) as server:
        limits = httpx.Limits(max_connections=CLIENTS)
        client = httpx.Client(base_url=server.url, trust_env=False, timeout=600, limits=limits)

        def ask(wanted: tuple[str, str]) -> None:
            name, clip = wanted
            fields = {"model": f"base:{name}" if name else "base", "language": "en"}
            files = {"file": (clip, data[clip])}
            answer = client.post("/v1/audio/transcriptions", data=fields, files=files)
            answer.raise_for_status()
            text = answer.json()["text"].strip()
            others = {t for (n, c), t in expected.items() if c == clip and n != name}
            counts["right"] += text == expected[wanted]
            counts["another adapter's"] += text != expected[wanted] and text in others
            counts["different"] += text != expected[wanted]
            counts["texts that no other adapter has"] += expected[wanted] not in others

        began = time.perf_counter()
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(ask, asked))
        seconds = time.perf_counter() - began
    return {
        "requests": len(asked),
        "clients": CLIENTS,
        "adapters": len(own),
        **counts,
        "different": counts["different"],
        "requests per second": len(asked) / seconds,
    }


def memory(chosen: argparse.Namespace) -> dict[str, Any]:
    """Return the resident memory of a server after a request for each adapter, and without adapters."""
    bundle, own = adapted_bundle(chosen), folders(chosen)
    clip = clips(chosen)[0].read_bytes()
    arguments = [word for name, f in own.items() for word in ("--adapter", f"{name}={f}")]
    mib = {}
    for kind, further in (("without", []), ("with all", arguments)):
        with ServerProcess("--bundle", str(bundle), "--model-id", "base", *further) as server:
            names = ["base"] * len(own) if kind == "without" else [f"base:{name}" for name in own]
            for name in names:
                answer = httpx.post(
                    f"{server.url}/v1/audio/transcriptions",
                    data={"model": name, "language": "en"},
                    files={"file": ("clip.wav", clip)},
                    trust_env=False,
                    timeout=600,
                )
                answer.raise_for_status()
            mib[kind] = server.rss_mib
    files = sum((f / "adapter_model.safetensors").stat().st_size for f in own.values())
    return {"MiB": mib, "adapters' files in MiB": files / 2**20, "adapters": len(own)}


PARTS = {"step": step, "equal": equal, "requests": requests, "memory": memory}


if __name__ == "__main__":
    main()
