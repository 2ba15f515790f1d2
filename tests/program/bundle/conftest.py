"""A bundle of a few kilobytes: 2 layers, width 8, with every kind of file of a real bundle."""

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from whisperport.program.bundle import (
    EMBEDDING,
    POSITIONS,
    REFERENCE,
    TOKENIZER,
    Bundle,
    Manifest,
    ProgramEntry,
)
from whisperport.program.bundle.program_entry import ProgramFacts
from whisperport.program.bundle.writing import writing_bundle
from whisperport.program.checks import Check
from whisperport.program.evidence import Evidence
from whisperport.program.generation import Generation
from whisperport.program.placement import Placement
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system import atomic

from ...micro import whisper_dims

DIMS = replace(whisper_dims(8, 2, heads=2), n_mels=4, n_audio_ctx=6, n_text_ctx=5, n_vocab=11)


PASSED = Check(
    level="arrays",
    program="encoder",
    what="clip",
    value={"sqnr_db": float("inf"), "frames": 6},
    rule="SQNR ≥ 60 dB",
    passed=True,
)


def program_of(folder: Path) -> bytes:
    """Return the program of a bundle, after checking that the bundle is complete."""
    return Bundle.open(folder).path("programs/encoder.bin").read_bytes()


@pytest.fixture(params=["one step", "two steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Exchange folders in one step, as on Linux, or in two steps, as on other systems."""
    if request.param == "two steps":
        monkeypatch.setattr(atomic, "_renameat2", lambda *_: False)
    return str(request.param)


@pytest.fixture
def fill() -> Callable[..., None]:
    def fill(folder: Path, program: bytes = b"program") -> None:
        (folder / TOKENIZER).write_bytes(b'{"version": "1.0"}')
        np.save(folder / EMBEDDING, np.arange(88, dtype=np.float16).reshape(11, 8))
        np.save(folder / POSITIONS, np.ones((5, 8), np.float32))
        np.savez(folder / REFERENCE, mel=np.ones((1, 4, 12), np.float32))
        (folder / "programs").mkdir()
        (folder / "programs/encoder.bin").write_bytes(program)

    return fill


@pytest.fixture
def manifest() -> Manifest:
    encoder = ProgramEntry(
        spec=ProgramSpec(
            "encoder",
            (TensorSpec("mel", (1, 4, 12)),),
            (TensorSpec("features", (1, 6, 8)),),
        ),
        placement=Placement("fake"),
        method="encoder",
        files=("programs/encoder.bin",),
        facts=ProgramFacts(delegated=12, undelegated=()),
        evidence=(
            Evidence(
                kind="run",
                files={"programs/encoder.bin": sha256(b"program").hexdigest()},
                runtime={"fake": "1.0"},
                machine={"cores": 2},
                date="2026-11-22",
                checks=(PASSED,),
            ),
        ),
    )
    return Manifest(
        name="nano",
        source={"kind": "openai", "name": "nano.pt", "revision": None, "sha256": "0" * 64},
        dims=DIMS,
        generation=Generation(
            start_of_transcript=6,
            end_of_text=5,
            start_of_previous=7,
            no_speech=8,
            no_timestamps=9,
            languages={"en": 1},
            tasks={"transcribe": 2},
            suppressed=(3, 4),
            suppressed_at_start=(5,),
            alignment_heads=((0, 1), (1, 0)),
        ),
        programs=(encoder,),
        rewrites={"encoder": [{"name": "conv1d-as-conv2d", "changed": 2}]},
        versions={"whisperport": "0.1.0"},
        machine={"cores": 2},
        verification={"passed": True},
    )


@pytest.fixture
def write(manifest: Manifest, fill: Callable[..., None]) -> Callable[..., Bundle]:
    def write(
        out: Path, program: bytes = b"program", then: Callable[[Path], object] | None = None
    ) -> Bundle:
        with writing_bundle(out) as writer:
            fill(writer.folder, program)
            if then:
                then(writer.folder)
            return writer.commit(manifest)

    return write


@pytest.fixture
def bundle(tmp_path: Path, write: Callable[..., Bundle]) -> Bundle:
    return write(tmp_path / "nano")
