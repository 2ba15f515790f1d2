"""Ask the package for a diagnosis of a case, and compare what it says with what is true.

This is the only module that knows both: the labels of the cases, and the package's names of causes.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from whisperport.program.dims import Dims
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import diagnose
from whisperport.verification.diagnosis.expected import (
    Alternative,
    Expected,
    ExpectedTensor,
    Quantization,
)
from whisperport.verification.diagnosis.result import Diagnosis
from whisperport.verification.diagnosis.wrong_inputs import input_mistakes

from .cases import Case
from .worlds import Input, World, world

CODES: Mapping[str, str] = {  # label of the cases -> name of the cause
    "other clip": "other-clip",
    "other window": "other-window",
    "silent input": "silent-input",
    "samples not scaled": "audio-not-scaled",
    "mel transposed": "mel-transposed",
    "mel not normalized": "mel-not-normalized",
    "mel without floor": "mel-not-clamped",
    "natural log": "natural-log",
    "wrong mel bins": "wrong-mel-bins",
    "mel frames": "wrong-mel-frames",
    "quantization error": "quantization-error",
    "not finite": "not-finite",
    "frame shift": "frame-shift",
    "channel blocks": "channel-blocks-reordered",
    "outputs swapped": "outputs-swapped",
    "saturated": "saturated",
    "integer file": "integers-read-as-floats",
    "not dequantized": "not-dequantized",
    "wrong scale": "wrong-scale",
    "wrong zero point": "wrong-zero-point",
    "signedness": "wrong-signedness",
    "axes permuted": "axes-permuted",
    "padded axis": "padded-axis",
    "channel tiles": "channel-tiles",
    "stale buffer": "stale-buffer",
    "zero tail": "zero-tail",
    "constant": "constant",
    "half precision": "half-precision",
    "bfloat16": "bfloat16",
    "double precision": "double-precision",
    "byte order": "byte-order",
    "bytes as numbers": "floats-read-as-integers",
    "extra bytes": "extra-bytes",
    "truncated": "truncated",
}


@dataclass(frozen=True, slots=True)
class Answer:
    """What a diagnosis says about one file."""

    passed: bool
    causes: frozenset[str]


Diagnose = Callable[[Case], Answer]


@dataclass(frozen=True, slots=True)
class Outcome:
    """One case and its answer, in names of causes."""

    case: Case
    answer: Answer
    right: frozenset[str]  # the accepted set that is nearest to the answer
    seconds: float

    @property
    def found(self) -> frozenset[str]:
        """Causes that were named and are true."""
        return self.right & self.answer.causes

    @property
    def missed(self) -> frozenset[str]:
        """Causes that are true and were not named; `passed` if a wrong file passed."""
        return self.right - self.answer.causes

    @property
    def wrong(self) -> frozenset[str]:
        """Causes that were named and are not true; `not passed` if a right file did not pass."""
        named = self.answer.causes - self.right
        if not self.case.labels and not self.answer.passed:
            return named | {"not passed"}
        return named

    @property
    def exact(self) -> bool:
        """Whether exactly the true causes were named, and only a right file passed."""
        return not self.missed and not self.wrong and self.answer.passed == (not self.case.labels)


@dataclass(slots=True)
class Score:
    """Counts over outcomes."""

    found: Counter[str] = field(default_factory=Counter)
    missed: Counter[str] = field(default_factory=Counter)
    wrong: Counter[str] = field(default_factory=Counter)
    cases: int = 0
    exact: int = 0

    @classmethod
    def of(cls, outcomes: Iterable[Outcome]) -> "Score":
        """Count outcomes."""
        score = cls()
        for outcome in outcomes:
            score.cases += 1
            score.exact += outcome.exact
            score.found.update(outcome.found)
            score.missed.update(outcome.missed)
            score.wrong.update(outcome.wrong)
        return score

    @property
    def precision(self) -> float:
        """Share of the named causes that are true."""
        return _share(self.found.total(), self.wrong.total())

    @property
    def recall(self) -> float:
        """Share of the true causes that were named."""
        return _share(self.found.total(), self.missed.total())

    def of_cause(self, cause: str) -> tuple[float, float]:
        """Return precision and recall of one cause."""
        found = self.found[cause]
        return _share(found, self.wrong[cause]), _share(found, self.missed[cause])


def _share(right: int, not_right: int) -> float:
    return right / (right + not_right) if right + not_right else float("nan")


def evaluate(case: Case, diagnose: Diagnose) -> Outcome:
    """Ask for a diagnosis of one case, and compare it with the truth."""
    started = time.perf_counter()
    answer = diagnose(case)
    seconds = time.perf_counter() - started
    accepted = (frozenset(CODES[label] for label in labels) for labels in case.accepted)
    right = min(accepted, key=lambda causes: len(causes ^ answer.causes))
    return Outcome(case, answer, right, seconds)


def answer(case: Case) -> Answer:
    """Return what the package says about a case."""
    found = diagnosis(case)
    return Answer(found.passed, frozenset(cause.value for cause in found.causes))


def diagnosis(case: Case) -> Diagnosis:
    """Return the package's diagnosis of the case's file."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "output.bin"
        path.write_bytes(case.file)
        return diagnose(expected_of(case), {case.plan.output: path})


def expected_of(case: Case) -> Expected:
    """Return the expected outputs of a case's program and clip."""
    plan = case.plan
    here = world(plan.world)
    quantization = None if case.quantized is None else Quantization(*case.quantized)
    tensors = tuple(
        ExpectedTensor(name, x, _frame_axis(name), quantization if name == plan.output else None)
        for name, x in here.outputs(plan.program, Input(plan.clip)).items()
    )
    return Expected(
        program=plan.program,
        clip=here.clip_names[plan.clip],
        tensors=tensors,
        precision=case.precision,
        make_alternatives=lambda: _alternatives(plan.world, plan.program, plan.clip),
    )


def _frame_axis(output: str) -> int:
    """Return the axis of positions or tokens: (1, T, d), (R, V), (H, D, T) and (H, T, D)."""
    return {"features": 1, "logits": 0}.get(output, 2 if "_k_" in output else 1)


@lru_cache(maxsize=64)
def _alternatives(of: str, program: str, clip: int) -> tuple[Alternative, ...]:
    here = world(of)
    return (*_other_clips(here, program, clip), *_wrong_inputs(here, program, clip))


def _other_clips(here: World, program: str, clip: int) -> Iterator[Alternative]:
    for other, name in enumerate(here.clip_names):
        if other != clip:
            outputs = here.outputs(program, Input(other))
            yield Alternative(CauseCode.OTHER_CLIP, f"clip {name}", outputs)


def _wrong_inputs(here: World, program: str, clip: int) -> Iterator[Alternative]:
    """Yield the outputs for the spectrograms that the package takes for the usual mistakes."""
    if program not in ("encoder", "cross_kv"):
        return
    for mistake in input_mistakes(dims_of(here)):
        mel = mistake.spectrogram(here.clips[clip], dims_of(here))
        if mel is not None:
            outputs = here.model.encoder(mel)
            if program == "cross_kv":
                outputs = here.model.cross_kv(outputs["features"])
            yield Alternative(mistake.cause, mistake.sentence, outputs)


def dims_of(here: World) -> Dims:
    """Return a world's sizes in the package's form."""
    sizes = here.model.sizes
    return Dims(
        n_mels=sizes.mels,
        n_audio_ctx=sizes.positions,
        n_audio_state=sizes.width,
        n_audio_head=sizes.heads,
        n_audio_layer=sizes.encoder_layers,
        n_text_ctx=sizes.tokens,
        n_text_state=sizes.width,
        n_text_head=sizes.heads,
        n_text_layer=sizes.decoder_layers,
        n_vocab=sizes.vocabulary,
        n_audio_ffn=4 * sizes.width,
        n_text_ffn=4 * sizes.width,
    )
