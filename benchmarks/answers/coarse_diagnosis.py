"""Measure which causes `diagnose` names for the outputs of encoders that real tools quantized.

    python -m benchmarks.answers.coarse_diagnosis default OUTLIER_FOLDER... --work FOLDER [--nncf PYTHON]

The folders of outlier checkpoints are made as `training/README.md` says. Each of the 20 programs of
`quantized_encoders.py`, of three checkpoints, gives two files: its output as it is, and with one other
mistake. The embedded model has a window of 8 s; the others have 30 s, because their massive frames are at
the end of it. Every third encoder is held out: the diagnosis was not changed with a look at it.

A quantization is a true cause if the output fails the tolerances of float16, which are those of a program
in float32. If a file is stored in 8 bits, with another mistake, and the rounding of the file explains a
fourth of the error or more, naming it or not is right. So is `saturated`, if the output for a wrong input
exceeds the range of the right one. `--known` also gives the output of the 8-bit program here to each
diagnosis, as `--simulated` does.

Outputs are kept in `--work`. Writes `results/answers.json` and prints tables.
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")


import numpy as np
from tests.verification.diagnosis_cases.evaluation import Answer, Outcome, Score

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import BundleError
from whisperport.model.checkpoint import load_checkpoint
from whisperport.model.network.whisper import build_model
from whisperport.model.trace.onnx_file import write_onnx_file
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts
from whisperport.program.bundle import Bundle
from whisperport.program.window import WindowOptions
from whisperport.speech.audio import log_mel
from whisperport.targets import RunOptions
from whisperport.targets.tflite.lowering import lower_to_tflite
from whisperport.verification import versions
from whisperport.verification.array_comparison import compare
from whisperport.verification.clips import clips_of, shipped_audio
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.diagnosing import DiagnoseOptions, diagnose
from whisperport.verification.diagnosis.expected import Expected, Quantization
from whisperport.verification.diagnosis.expected_outputs import expected_outputs
from whisperport.verification.diagnosis.wrong_inputs import input_mistakes
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel
from whisperport.verification.tolerances import GATES

from ..record import record
from .quantized_encoders import PROGRAMS, Made, run_torch

_C = CauseCode
MISTAKES = {  # with the file or the input -> the cause that is true
    "scale": _C.WRONG_SCALE,
    "transposed": _C.AXES_PERMUTED,
    "not scaled": _C.AUDIO_NOT_SCALED,
    "zero point": _C.WRONG_ZERO_POINT,
    "rotated channels": _C.CHANNEL_BLOCKS_REORDERED,
    "not normalized": _C.MEL_NOT_NORMALIZED,
    "int8 as float32": _C.INTEGERS_READ_AS_FLOATS,
    "other clip": _C.OTHER_CLIP,
}
SHORT_S = 8.0  # window of the embedded model
CALIBRATION = 6  # audio files
CLIPS = 3  # that files are made of
PACKAGES = ("whisperport", "numpy", "torch", "onnxruntime", "ai-edge-quantizer", "torchao")
CLEAR = 4.0  # an error larger by this factor than the rounding of the file is no rounding


@dataclass(frozen=True)
class Case:
    """One file of an encoder, and the causes that are true: the first of `accepted`, or another of them."""

    number: int  # of the encoder
    checkpoint: str
    recipe: str
    tool: str
    clip: str
    mistake: str
    stored: str
    sqnr_db: float  # of the program, for the input that it was given
    accepted: tuple[frozenset[CauseCode], ...]
    file: bytes
    expected: Expected
    known: Any  # output of the 8-bit program for the right input

    @property
    def is_held_out(self) -> bool:
        return self.number % 3 == 2

    @property
    def labels(self) -> frozenset[CauseCode]:
        return self.accepted[0]


class World:
    """A checkpoint with its bundle, its quantized programs, and their outputs for each input."""

    def __init__(self, source: str, number: int, chosen: argparse.Namespace) -> None:
        self.name, self.number, self.nncf = Path(source).name, number, chosen.nncf
        self.folder = chosen.work / self.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = load_checkpoint(source if source == "default" else Path(source))
        seconds = SHORT_S if source == "default" else None
        try:
            self.bundle = Bundle.open(self.folder / "bundle")
        except BundleError:
            options = ExportOptions(window=WindowOptions(seconds=seconds))
            self.bundle = export(self.checkpoint, "onnxruntime", self.folder / "bundle", options)
        self.dims = self.bundle.manifest.dims
        self.clips = Reference.from_arrays(self.bundle.reference()).clips
        self.encoder = build_model(self.checkpoint, self.bundle.manifest.window).encoder

    @cached_property
    def made(self) -> Made:
        """What the tools read."""
        model = build_model(self.checkpoint, self.bundle.manifest.window)
        (program,) = whisper_programs(Parts(model, []), ["encoder"])
        made = Made(model.encoder, self.folder, self.nncf)
        write_onnx_file(program, made.onnx)
        lower_to_tflite([program], made.tflite, target="litert", extra="litert")
        used = {clip.name for clip in self.clips}
        files = [file for file in shipped_audio() if file.path.name not in used][:CALIBRATION]
        bins, frames = self.dims.n_mels, self.dims.n_frames
        mels = [log_mel(clip.samples, bins, n_frames=frames)[None] for clip in clips_of(files)]
        np.save(made.mels, np.stack(mels))
        return made

    def outputs(self, number: int, mistake: str) -> dict[str, Any]:
        """Return the outputs of a program for the right input and for that of a mistake, and exact ones."""
        path = self.folder / f"{number}.npz"
        if not path.exists():
            run = list(PROGRAMS.values())[number % len(PROGRAMS)](self.made)
            found = {}
            for given in ("none", mistake):
                mel = self.mel(number, given)
                found |= {given: run(mel), f"exact {given}": run_torch(self.encoder)(mel)}
            np.savez(path, **found)
        return dict(np.load(path))

    def mel(self, number: int, mistake: str) -> Any:
        """Return what the device was given, (1, n_mels, 2T)."""
        clip = self.clip(number + (mistake == "other clip"))
        mel = reference_mel(self.dims, clip)
        if mistake in ("not scaled", "not normalized"):
            mistakes = {one.cause: one for one in input_mistakes(self.dims)}
            mel = mistakes[MISTAKES[mistake]].spectrogram(clip.audio, self.dims)
        return np.ascontiguousarray(mel[None], np.float32)

    def clip(self, number: int) -> ReferenceClip:
        return self.clips[number % CLIPS]

    @cache  # noqa: B019  # a world lives as long as the process
    def expected(self, clip: str) -> Expected:
        """Return the expected outputs; what is simulated for a file is kept for the next one."""
        found = expected_outputs(self.bundle, "encoder", clip, run=RunOptions(threads=1))
        return replace(
            found,
            simulate=cache(found.simulate),
            make_alternatives=lambda: [
                replace(a, simulate=cache(a.simulate)) for a in found.alternatives
            ],
        )


def cases_of(world: World) -> Iterator[Case]:
    """Yield two files of each encoder: its output as it is, and with another mistake."""
    for index, (recipe, tool) in enumerate(PROGRAMS):
        if tool == "nncf" and not world.nncf:
            continue
        number = world.number * len(PROGRAMS) + index
        mistake = list(MISTAKES)[(index + 3 * world.number) % len(MISTAKES)]
        outputs = world.outputs(number, mistake)
        for one in ("none", mistake):
            yield case_of(world, (number, recipe, tool), one, outputs)


def case_of(
    world: World, encoder: tuple[int, str, str], mistake: str, outputs: dict[str, Any]
) -> Case:
    number, recipe, tool = encoder
    expected = world.expected(world.clip(number).name)
    y, x = outputs[mistake], outputs[f"exact {mistake}"]
    random = np.random.default_rng(number)
    form = storage(outputs["none"])
    is_int8 = mistake == "int8 as float32" or bool(number & 1)
    if mistake == "rotated channels":
        file = np.roll(y, int(random.integers(8, y.shape[2] - 8)), axis=2)
    elif mistake == "transposed":
        file = y.swapaxes(1, 2)
    else:
        file = y
    declared = form
    if mistake == "scale":
        factor = float(np.exp(random.uniform(np.log(1.6), np.log(16)))) ** random.choice((-1, 1))
        declared = replace(form, scale=form.scale * factor)
    elif mistake == "zero point":
        moved = int(random.integers(24, 80)) * int(random.choice((-1, 1)))
        declared = replace(form, zero_point=int(np.clip(form.zero_point + moved, -128, 127)))
    values = np.ascontiguousarray(form.quantize(file) if is_int8 else file)
    if not is_int8:  # the host dequantized it with other numbers
        values = values * np.float32(declared.scale / form.scale)
        values += np.float32((form.zero_point - declared.zero_point) * declared.scale)
    elif mistake != "int8 as float32":
        (tensor,) = expected.tensors
        expected = replace(expected, tensors=(replace(tensor, quantization=declared),))
    return Case(
        number,
        world.name,
        recipe,
        tool,
        world.clip(number).name,
        mistake,
        "int8" if is_int8 else "float32",
        sqnr(x, y),
        accepted(x, y, form if is_int8 else None, mistake),
        values.astype(values.dtype).tobytes(),
        expected,
        outputs["none"],
    )


def storage(y: Any) -> Quantization:
    """Return how a device would store an output in int8, from its smallest to its largest value."""
    scale = float(np.ptp(y)) / 255
    return Quantization("int8", scale, round(-128 - float(y.min()) / scale))


def accepted(
    x: Any, y: Any, form: Quantization | None, mistake: str
) -> tuple[frozenset[CauseCode], ...]:
    """Return the sets of causes that are true."""
    own = frozenset({MISTAKES[mistake]} if mistake in MISTAKES else ())
    both = own | {_C.QUANTIZATION_ERROR}
    stored, clipped = y, frozenset[CauseCode]()
    if form:
        exact = y / form.scale + form.zero_point
        clipped = frozenset({_C.SATURATED} if exact.min() < -129 or exact.max() > 128 else ())
        stored = (form.quantize(y) - np.float32(form.zero_point)) * np.float32(form.scale)
    if compare("features", stored.astype(np.float32), x, GATES["fp16"]):
        return own, own | clipped
    if form and own and np.square(x - y).mean() < CLEAR * form.scale**2 / 12:
        return both, own, both | clipped
    return both, both | clipped


def sqnr(x: Any, y: Any) -> float:
    return float(10 * np.log10(np.square(x).sum() / np.square(x - y).sum()))


def outcome_of(case: Case, *, known: bool) -> tuple[Outcome, str]:
    """Diagnose a file; return what was named, and the verdict."""
    options = DiagnoseOptions(simulated=case.known if known else None)
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(case.file)
        file.flush()
        started = time.perf_counter()
        found = diagnose(case.expected, file.name, options)
        seconds = time.perf_counter() - started
    answer = Answer(found.passed, frozenset(found.causes))
    right = min(case.accepted, key=lambda causes: len(causes ^ answer.causes))
    return Outcome(case, answer, right, seconds), found.verdict


def main() -> None:
    parser = argparse.ArgumentParser(description="Causes named for outputs of quantized encoders.")
    parser.add_argument("checkpoints", nargs="+")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--nncf", default="", help="Python interpreter that has NNCF")
    parser.add_argument("--known", action="store_true", help="give the 8-bit program's output")
    parser.add_argument("--part", choices=("all", "own", "held-out"), default="all")
    chosen = parser.parse_args()
    outcomes: list[Outcome] = []
    for number, source in enumerate(chosen.checkpoints):
        for case in cases_of(World(source, number, chosen)):
            if chosen.part == "all" or case.is_held_out == (chosen.part == "held-out"):
                outcome, verdict = outcome_of(case, known=chosen.known)
                outcomes.append(outcome)
                print(line(outcome), verdict, flush=True)
    write(outcomes, chosen)


def line(outcome: Outcome) -> str:
    case = outcome.case
    mark = "  " if outcome.exact else "! "
    named = "passed" if outcome.answer.passed else ", ".join(sorted(outcome.answer.causes))
    return (
        f"{mark}{case.number:3} {case.checkpoint[:18]:18} {case.recipe[:36]:36} {case.tool[:11]:11} "
        f"{case.stored:7} {case.mistake:17} {case.sqnr_db:5.1f} dB {outcome.seconds:5.1f} s  {named}"
    )


def write(outcomes: Sequence[Outcome], chosen: argparse.Namespace) -> None:
    result = {
        "what": "causes named by diagnose for files of quantized encoders, against the true ones",
        "coarse": "the output fails the tolerances of float16: SQNR 35 dB, largest error 0.01",
        "checkpoints": [Path(source).name for source in chosen.checkpoints],
        "known_8_bit_program": chosen.known,
        "all": part(outcomes),
        "own": part([o for o in outcomes if not o.case.is_held_out]),
        "held_out": part([o for o in outcomes if o.case.is_held_out]),
        "seconds_first_file_of_a_clip": first_seconds(outcomes),
        "median_s_of_the_others": statistics.median(o.seconds for o in outcomes),
        "load": os.getloadavg(),
        "versions": versions(PACKAGES),
    }
    record("answers", "coarse_diagnosis_known" if chosen.known else "coarse_diagnosis", result)
    for name in ("all", "own", "held_out"):
        print(name, json.dumps(result[name]))


def first_seconds(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Return the longest of these: nothing was computed before, as on the command line."""
    seen, found = set(), {}
    for o in outcomes:
        if o.answer.passed or (o.case.checkpoint, o.case.clip) in seen:
            continue
        seen.add((o.case.checkpoint, o.case.clip))
        found[o.case.checkpoint] = max(round(o.seconds, 1), found.get(o.case.checkpoint, 0))
    return found


def part(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    score = Score.of(outcomes)
    q = _C.QUANTIZATION_ERROR
    others = {c for c in (*score.found, *score.missed, *score.wrong) if c != q}
    found, missed, wrong = (
        sum(counts[c] for c in others) for counts in (score.found, score.missed, score.wrong)
    )
    confused = Counter(
        (" + ".join(sorted(o.right)) or "nothing", " + ".join(sorted(o.answer.causes)) or "nothing")
        for o in outcomes
        if not o.exact
    )
    return {
        "encoders": len({o.case.number for o in outcomes}),
        "files": score.cases,
        "files_that_pass_and_need_no_cause": sum(not o.case.labels for o in outcomes),
        "exact": score.exact,
        "precision": score.precision,
        "recall": score.recall,
        "quantization": dict(zip(("precision", "recall"), score.of_cause(q), strict=True)),
        "other_mistakes": {
            "precision": found / max(found + wrong, 1),
            "recall": found / max(found + missed, 1),
        },
        "confused": [{"true": t, "named": n, "files": k} for (t, n), k in confused.most_common()],
    }


if __name__ == "__main__":
    main()
