"""What must hold for the weights that people use: tokens, precisions, and words.

Official weights are tested by `make test-official`, checkpoints made to behave like them by `make test`.

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
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import whisper

from whisperport.build.compile.compile import compile as compile_bundle
from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.build.judge.verified import keep_hashes
from whisperport.errors import CheckpointError, MissingPackageError, VerificationError
from whisperport.model.checkpoint import Checkpoint, load_checkpoint
from whisperport.model.checkpoint.names import HUB_IDS
from whisperport.program.bundle import Bundle
from whisperport.runtime import DecodeOptions
from whisperport.speech.audio import load_audio
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import with_target
from whisperport.transcription import TranscribeOptions, Transcriber
from whisperport.verification.clips import Clip, shipped_clips
from whisperport.verification.error_rate import text_errors
from whisperport.verification.machine import machine, versions

from .embedded import default_bundle
from .equality.conftest import openai_original
from .extent import EVERYTHING, core_or_all
from .outlier_checkpoints import NAMES, outlier_checkpoint
from .shared_exports import run_folder

pytestmark = pytest.mark.official

OFFICIAL = os.environ.get("WHISPERPORT_OFFICIAL", "")
AUDIO = os.environ.get("WHISPERPORT_AUDIO", "")
RECORD = os.environ.get("WHISPERPORT_RECORD", "")

PACKAGES = ("whisperport", "torch", "openai-whisper", "onnxruntime", "openvino", "executorch")

GREEDY = TranscribeOptions(temperatures=(0.0,), decode=DecodeOptions(language="en"))
RUNTIMES = ["onnxruntime", "openvino", "litert", "xnnpack"]
# Target -> the package whose presence means that it can be lowered and run.
PACKAGE = {"openvino": "openvino", "litert": "litert_torch", "xnnpack": "executorch"}
SIMULATED = ["sm8650", "rk3588"]
EMBEDDED = "default"


@dataclass(frozen=True)
class Candidate:
    """A checkpoint under test, and the audio that it is tested on."""

    name: str
    checkpoint: Checkpoint
    clips: tuple[Clip, ...]


@pytest.fixture(scope="session", params=[OFFICIAL] if OFFICIAL else core_or_all((EMBEDDED,), NAMES))
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
def record(candidate: Candidate, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
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
        if candidate.name in HUB_IDS and not request.session.testsfailed:
            keep_hashes(candidate.name, candidate.checkpoint)  # for `whisperport judge`


def _all(core: list[str], everything: list[str]) -> list[str]:
    return everything if OFFICIAL else core_or_all(core, everything)


@pytest.fixture(scope="session")
def bundles(candidate: Candidate, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`bundles(target, precisions)`: a verified bundle of the candidate, exported once."""

    @cache
    def bundle(
        target: str,
        precision: str = "",
        of_encoder: str = "",
        options: tuple[tuple[str, str], ...] = (),
    ) -> Bundle:
        if candidate.name == EMBEDDED:
            return Bundle.open(default_bundle())  # `make test` has exported it for other tests
        package = PACKAGE.get(target)
        if package and find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
        how = ExportOptions(
            options=dict(options),
            precision=precision,
            precisions={"encoder": of_encoder} if of_encoder else {},
            run=RunOptions(threads=1),
        )
        out = tmp_path_factory.mktemp("official") / f"{target}-{precision or of_encoder or 'fp32'}"
        return export(candidate.checkpoint, target, out, how)

    return bundle


def _transcriber(bundle: Bundle, target: str) -> Transcriber:
    emulation = with_target(get_target(target).spec.runs.emulation, target)
    run = RunOptions(
        threads=1, options=emulation, short_windows=False
    )  # openai-whisper's have 30 s
    return Transcriber(bundle, run)


@pytest.fixture(scope="session")
def originals(candidate: Candidate) -> list[dict[str, Any]]:
    """What openai-whisper says of each clip."""
    original = openai_original(candidate.checkpoint)
    return [
        whisper.transcribe(original, clip.samples, language="en", temperature=0.0, fp16=False)
        for clip in candidate.clips
    ]


@pytest.mark.parametrize("target", _all(RUNTIMES[:1], RUNTIMES))
def test_tokens_and_text_are_those_of_openai_whisper(
    target: str,
    candidate: Candidate,
    originals: list[dict[str, Any]],
    bundles: Any,
    record: dict[str, Any],
) -> None:
    transcriber = _transcriber(bundles(target), target)

    equal = []
    for clip, theirs in zip(candidate.clips, originals, strict=True):
        ours = transcriber.transcribe(clip.samples, GREEDY)
        equal.append(
            [token for segment in ours.segments for token in segment.tokens]
            == [token for segment in theirs["segments"] for token in segment["tokens"]]
        )

    record[f"{target}: clips with openai-whisper's tokens"] = f"{sum(equal)} of {len(equal)}"
    assert equal
    assert all(equal)


def test_the_word_error_rate_is_that_of_openai_whisper(
    candidate: Candidate,
    originals: list[dict[str, Any]],
    bundles: Any,
    record: dict[str, Any],
) -> None:
    both = zip(candidate.clips, originals, strict=True)
    pairs = [(clip, theirs) for clip, theirs in both if clip.text]
    if not pairs:
        pytest.skip("no clip has a transcript")
    transcriber = _transcriber(bundles("onnxruntime"), "onnxruntime")

    of_ours = [
        text_errors(transcriber.transcribe(clip.samples, GREEDY).text, clip.text)
        for clip, _ in pairs
    ]
    of_theirs = [text_errors(result["text"], clip.text) for clip, result in pairs]

    rate = sum(of_ours[1:], of_ours[0]).rate
    record["WER"] = rate
    assert rate == sum(of_theirs[1:], of_theirs[0]).rate


@pytest.mark.skipif(not (OFFICIAL or EVERYTHING), reason="exports; run make test-all")
@pytest.mark.parametrize("target", ["onnxruntime", "litert", "openvino"])
def test_weights_of_8_bits_are_accepted(target: str, bundles: Any, record: dict[str, Any]) -> None:
    bundle = bundles(target, "w8")

    record[f"{target} w8"] = "verified"
    assert bundle.manifest.verification["passed"] is True


@pytest.mark.skipif(not (OFFICIAL or EVERYTHING), reason="an export; run make test-all")
def test_a_static_8_bit_encoder_is_accepted_with_its_sensitive_outputs_in_w8(
    bundles: Any, record: dict[str, Any]
) -> None:
    bundle = bundles("litert", of_encoder="w8a8")

    notes = bundle.manifest.program("encoder").facts.notes
    record["litert encoder=w8a8"] = {"verified": True, "sensitive": notes}
    assert bundle.manifest.verification["passed"] is True
    assert notes


@pytest.mark.skipif(not (OFFICIAL or EVERYTHING), reason="an export; run make test-all")
def test_a_static_8_bit_encoder_without_exceptions_is_refused_with_the_reason(
    bundles: Any, record: dict[str, Any]
) -> None:
    with pytest.raises(VerificationError) as refused:
        bundles("litert", of_encoder="w8a8", options=(("litert.sensitive", "as-others"),))

    record["litert encoder=w8a8, no output in w8"] = str(refused.value)
    assert "encoder" in refused.value.why
    assert "from float32's in" in refused.value.why  # with the number of words
    assert "torch's own encoder of this checkpoint keeps" in refused.value.why
    assert "`litert` also runs encoder in fp32, fp16, w8, w8a16" in refused.value.why


@pytest.mark.skipif(
    not (OFFICIAL or EVERYTHING), reason="a simulator needs minutes; run make test-all"
)
@pytest.mark.parametrize("target", SIMULATED)
def test_float16_is_compiled_and_simulated(
    target: str, candidate: Candidate, bundles: Any, record: dict[str, Any]
) -> None:
    compiler = get_target(target).compiler
    assert compiler is not None
    if compiler.installed({}) is None:
        pytest.skip(f"{compiler.sdk} is not installed")

    made = compile_bundle(bundles(target).folder)

    checks = {program.name: program.emulation for program in made.programs}
    record[f"{target} fp16, smallest SQNR in dB"] = {
        name: round(min(check.value["sqnr_db"] for check in of if check.level == "arrays"), 1)
        for name, of in checks.items()
        if of
    }
    assert "words" in [check.level for check in checks["encoder"]]
    assert all(check.passed for of in checks.values() for check in of)
