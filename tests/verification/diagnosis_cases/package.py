"""Ask the package for a diagnosis of a case: the only place where cases and diagnosis meet."""

from collections.abc import Iterator
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
from .evaluation import Answer
from .worlds import Input, World, world


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
