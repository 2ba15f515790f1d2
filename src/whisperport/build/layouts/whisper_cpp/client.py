"""Run whisper.cpp through pywhispercpp; see `run_client.py`."""

from collections.abc import Callable
from importlib.metadata import version
from typing import Any

from pywhispercpp.model import Model


def versions() -> dict[str, str]:
    return {"pywhispercpp": version("pywhispercpp")}


def load(job: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    model = Model(
        job["model"],
        n_threads=1,
        print_progress=False,
        print_realtime=False,
        language=job["language"],
        no_context=True,
        temperature=0.0,
        temperature_inc=0.0,
        greedy={"best_of": 1},
    )

    def transcribe(samples: Any) -> dict[str, Any]:
        segments = model.transcribe(samples)
        return {
            "text": "".join(segment.text for segment in segments),
            "segments": [[s.t0 / 100, s.t1 / 100, s.text] for s in segments],
        }

    return transcribe
