"""The checkpoints that `make test-official` tests: OpenAI's weights, or ones that behave like them.

| Environment variable | Meaning |
|---|---|
| `WHISPERPORT_OFFICIAL` | a checkpoint: `tiny.en`, a path, or an outlier checkpoint as `last-tail` |
| `WHISPERPORT_AUDIO` | folder of audio files of speech; `NAME.txt` beside an audio file is its transcript |
| `WHISPERPORT_RECORD` | file for the record of the run, JSON |

Without `WHISPERPORT_OFFICIAL`, as in `make test`, the same tests run on outlier checkpoints, so that they
are known to work.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.judge.verified import keep_hashes
from whisperport.errors import CheckpointError, MissingPackageError
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.checkpoint.names import HUB_IDS
from whisperport.speech.audio import load_audio
from whisperport.verification.clips import Clip, shipped_clips
from whisperport.verification.machine import machine, versions

from ..extent import core_or_all
from ..outlier_checkpoints import NAMES, outlier_checkpoint
from ..shared_exports import run_folder

OFFICIAL = os.environ.get("WHISPERPORT_OFFICIAL", "")
AUDIO = os.environ.get("WHISPERPORT_AUDIO", "")
RECORD = os.environ.get("WHISPERPORT_RECORD", "")

PACKAGES = ("whisperport", "torch", "openai-whisper", "onnxruntime", "openvino", "executorch")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint under test, and the audio that it is tested on."""

    name: str
    checkpoint: Checkpoint
    clips: tuple[Clip, ...]


@pytest.fixture(scope="session", params=[OFFICIAL] if OFFICIAL else core_or_all(NAMES[:1], NAMES))
def candidate(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Candidate:
    name: str = request.param
    if name in NAMES:
        folder = outlier_checkpoint(name, run_folder(tmp_path_factory) / "outliers")
        return Candidate(name, load_checkpoint(folder), _clips())
    try:
        return Candidate(name, load_checkpoint(name), _clips())
    except (CheckpointError, MissingPackageError) as error:
        pytest.skip(f"the weights of {name} are not at hand: {error}")


def _clips() -> tuple[Clip, ...]:
    """The user's recordings, or else the shipped clips of synthetic speech."""
    if not AUDIO:
        return shipped_clips()
    found = [path for path in sorted(Path(AUDIO).iterdir()) if path.suffix != ".txt"]
    assert found, f"there is no audio file in {AUDIO}"
    return tuple(Clip(path.name, _transcript(path), load_audio(path)) for path in found)


def _transcript(audio: Path) -> str:
    beside = audio.with_suffix(".txt")
    return beside.read_text(encoding="utf-8").strip() if beside.exists() else ""


@pytest.fixture(scope="session")
def record(candidate: Candidate) -> Iterator[dict[str, Any]]:
    """Figures by name. They are written with the model's hashes, the versions and the machine."""
    figures: dict[str, Any] = {}
    yield figures
    if RECORD:
        data = {
            "model": candidate.name,
            "sha256": dict(candidate.checkpoint.source.sha256),
            "audio": "the user's recordings" if AUDIO else "the shipped clips, synthetic speech",
            "clips": len(candidate.clips),
            "figures": figures,
            "versions": versions(PACKAGES),
            "machine": machine(),
        }
        Path(RECORD).parent.mkdir(parents=True, exist_ok=True)
        Path(RECORD).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
        if candidate.name in HUB_IDS:
            keep_hashes(candidate.name, candidate.checkpoint)  # for `whisperport judge`
