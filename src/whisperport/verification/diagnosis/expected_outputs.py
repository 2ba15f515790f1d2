"""Compute the expected outputs of a program for a reference clip, and its outputs for wrong inputs."""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import UsageError, WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.program.dims import Dims
from whisperport.program.program_kind import ENCODER
from whisperport.program.runner import Array
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import Engine
from whisperport.speech.data import embedded_model
from whisperport.system.progress import begin_stage
from whisperport.targets import RunOptions
from whisperport.verification.array_checks import other_features
from whisperport.verification.diagnosis.causes import CauseCode
from whisperport.verification.diagnosis.expected import (
    Alternative,
    Expected,
    ExpectedTensor,
    Quantization,
    Simulations,
)
from whisperport.verification.diagnosis.wrong_inputs import input_mistakes
from whisperport.verification.precision import precisions
from whisperport.verification.recording import BundleSession
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel

if TYPE_CHECKING:
    from whisperport.model.network.static_int8 import StaticInt8Encoder

AFTER_AUDIO = (ENCODER, "cross_kv")  # programs whose outputs depend on the audio only
CALIBRATION_CLIPS = 4  # of the reference, whose ranges the simulation has
FROM_REFERENCE = "the bundle's reference, computed by PyTorch in float32"
FROM_BUNDLE = "the bundle's programs, run on this machine in float32 where their target allows it"
Floats = NDArray[np.float32]


def expected_outputs(
    bundle: Bundle | str | os.PathLike[str],
    program: str = ENCODER,
    clip: str = "",
    *,
    quantization: Mapping[str, Quantization] | None = None,
    precision: str = "",
    of_float32: str = "fp16",
    run: RunOptions | None = None,
) -> Expected:
    """Return the expected outputs of a program for one clip of the bundle's reference.

    The features of the encoder are those of the reference, computed in float32 when the bundle was
    exported. All other outputs are computed by the bundle's programs on this machine.

    Args:
        bundle: the bundle or its folder.
        program: name of the program.
        clip: name of a clip of the reference; "": the first.
        quantization: output name -> how the device stores it; outputs that are not named are float32.
        precision: precision of the device, whose limits apply, such as "w8a8"; "": the program's own.
        of_float32: what the device is expected to compute a program in float32 in; many use float16.
        run: how the bundle's programs are run here; emulation on the CPU is added where a target has it.

    Raises:
        UsageError: the bundle has no such program or clip.
        BundleError: the bundle is damaged.
        MissingPackageError: a target's runtime is not installed.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    session = BundleSession(opened, run or RunOptions())
    source = _Source(session, spec_of(opened, program))
    chosen_clip = reference_clip(opened, clip)
    arrays = source.outputs(chosen_clip)
    declared = quantization or {}
    tensors = tuple(
        ExpectedTensor(t.name, arrays[t.name], frame_axis(t), declared.get(t.name))
        for t in source.spec.outputs
    )
    own = precisions(opened)[program]
    limits_of = precision or (of_float32 if own == "fp32" else own)
    reference = session.reference
    return Expected(
        program=program,
        clip=chosen_clip.name,
        tensors=tensors,
        source=FROM_REFERENCE if program == ENCODER and chosen_clip.features.size else FROM_BUNDLE,
        precision=limits_of,
        make_alternatives=lambda: tuple(source.alternatives(chosen_clip)),
        simulate=partial(source.simulated_clip, chosen_clip),
        sensitive=source.sensitive,
        losses={
            t.name: loss
            for t in tensors
            if (loss := reference.loss(limits_of, t.name.partition("_")[0]))
        },
        wrong_features=other_features(chosen_clip, reference),
        speech=chosen_clip.frames,
    )


def frame_axis(tensor: TensorSpec) -> int:
    """Return the axis of frames or tokens of an output: the second last of logits, else the longest."""
    if tensor.name.startswith("logits") or tensor.name in ("features", "rows"):
        return len(tensor.shape) - 2
    return int(np.argmax(tensor.shape))


@dataclass(eq=False)
class _Source:
    """Computes the outputs of one program of a bundle."""

    session: BundleSession
    spec: ProgramSpec

    @cached_property
    def engine(self) -> Engine:
        begin_stage("loading the programs")
        return self.session.engine

    def outputs(self, clip: ReferenceClip) -> dict[str, Array]:
        """Return the outputs for a clip, by name."""
        if self.spec.name == ENCODER:
            return {"features": self._features(clip)[None]}
        begin_stage(f"computing the outputs of {self.spec.name} for {clip.name}")
        return self._run(inputs_of(self.session, self.spec, clip))

    def alternatives(self, clip: ReferenceClip) -> Iterator[Alternative]:
        """Yield the outputs for other clips and, for the encoder and `cross_kv`, for wrong spectrograms."""
        for other_clip in self.session.reference.clips:
            if other_clip.name != clip.name:
                yield Alternative(
                    CauseCode.OTHER_CLIP,
                    f"The file holds the output for the clip `{other_clip.name}`.",
                    self.outputs(other_clip),
                    "Give the device the input of the clip that is compared.",
                    partial(self.simulated_clip, other_clip),
                )
        if self.spec.name not in AFTER_AUDIO:
            return
        for mistake in input_mistakes(self.dims):
            mel = mistake.spectrogram(clip.audio, self.dims)
            if mel is not None:
                begin_stage(f"encoding a wrong input: {mistake.cause}")
                arrays = self._of_features(self.engine.encode(mel))
                simulate = partial(self.simulated, mel)
                yield Alternative(mistake.cause, mistake.sentence, arrays, mistake.advice, simulate)

    def simulated(self, mel: Array, recipes: Sequence[str]) -> Simulations:
        """Return the outputs of the simulated static 8-bit encoder; {} if there is none."""
        if self.spec.name not in AFTER_AUDIO or self._simulation is None:
            return {}
        begin_stage("simulating the encoder in static 8 bits")
        by_recipe = self._simulation.features(mel, recipes)
        return {recipe: self._of_features(features) for recipe, features in by_recipe.items()}

    def simulated_clip(self, clip: ReferenceClip, recipes: Sequence[str]) -> Simulations:
        """Return the same for a clip."""
        return self.simulated(self.mel(clip), recipes)

    def sensitive(self) -> str:
        """Return which tensor 8 bits suit least; "" if there is no simulation."""
        return self._simulation.sensitive() if self._simulation else ""

    def mel(self, clip: ReferenceClip) -> Array:
        """Return the spectrogram of a clip."""
        return reference_mel(self.dims, clip)

    @property
    def dims(self) -> Dims:
        return self.session.bundle.manifest.dims

    @cached_property
    def _simulation(self) -> "SimulatedEncoder | None":
        clips = self.session.reference.clips[:CALIBRATION_CLIPS]
        return simulated_encoder(self.session.bundle, [self.mel(clip) for clip in clips])

    def _of_features(self, features: Array) -> dict[str, Array]:
        """Return the outputs of the encoder or of `cross_kv` from features (T, d)."""
        if self.spec.name == ENCODER:
            return {"features": features[None]}
        return self.engine.cross_kv.run({"features": features[None]})

    def _features(self, clip: ReferenceClip) -> Array:
        if clip.features.size:
            return clip.features
        begin_stage(f"encoding {clip.name}")
        return self.engine.encode(self.mel(clip))

    def _run(self, inputs: Sequence[Array]) -> dict[str, Array]:
        names = [tensor.name for tensor in self.spec.inputs]
        return self.session.runners[self.spec.name].run(dict(zip(names, inputs, strict=True)))


def inputs_of(session: BundleSession, spec: ProgramSpec, clip: ReferenceClip) -> Sequence[Array]:
    """Return the inputs of one call of a program while a clip is transcribed, in the program's order.

    The clip is transcribed twice, so that the second window has a text prompt; the last recorded call is
    returned.

    Raises:
        UsageError: the program is not called for this clip.
    """
    mel = reference_mel(session.bundle.manifest.dims, clip)
    samples = list(session.inputs(spec, [mel, mel]))
    if not samples:
        raise UsageError(
            f"the program `{spec.name}` has no inputs for the clip `{clip.name}`",
            why="the decoder does not call it while this clip is transcribed",
            hint="choose another clip with --clip",
        )
    return samples[-1]


def spec_of(bundle: Bundle, program: str) -> ProgramSpec:
    """Return the signature of a program.

    Raises:
        UsageError: the bundle has no such program.
    """
    specs = {entry.spec.name: entry.spec for entry in bundle.manifest.programs}
    if program not in specs:
        raise UsageError(
            f"the bundle {bundle.folder} has no program `{program}`",
            hint=f"its programs are {', '.join(specs)}",
        )
    return specs[program]


def reference_clip(bundle: Bundle, name: str) -> ReferenceClip:
    """Return a clip of the reference by its name; the first for "".

    Raises:
        UsageError: the reference has no such clip.
    """
    clips = Reference.from_arrays(bundle.reference()).clips
    for clip in clips:
        if name in ("", clip.name):
            return clip
    raise UsageError(
        f"the bundle's reference has no clip `{name}`",
        hint=f"its clips are {', '.join(clip.name for clip in clips) or 'none'}",
    )


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEncoder:
    """The static 8-bit encoder of a checkpoint, in several recipes."""

    encoder: "StaticInt8Encoder"

    def features(self, mel: Floats, recipes: Sequence[str]) -> dict[str, Floats]:
        """Return recipe -> features (T, d) of mel (n_mels, 2T); with all recipes if none is named."""
        import torch

        from whisperport.model.network.static_int8 import RECIPES

        batch = torch.from_numpy(np.ascontiguousarray(mel, np.float32))[None]
        names = recipes or tuple(RECIPES)
        return {name: self.encoder.encode(batch, name)[0].numpy() for name in names}

    def sensitive(self) -> str:
        """Return which tensor 8 bits suit least, in one sentence."""
        if (widest := self.encoder.widest) is None:
            return ""
        return (
            f"8 bits suit the output of `{widest.module}` least: its largest value, in channel "
            f"{widest.channel}, is {widest.ratio:,.0f} times the median."
        )


def simulated_encoder(bundle: Bundle, mels: Sequence[Floats]) -> SimulatedEncoder | None:
    """Return the simulation; None without torch, or if the bundle's checkpoint is not on this machine.

    Args:
        bundle: the bundle. Its checkpoint is looked for under the name that `export` was given, and must
            have the same files.
        mels: calibration inputs, (n_mels, 2T) each.
    """
    try:
        import torch

        from whisperport.model.checkpoint import load_checkpoint
        from whisperport.model.network.static_int8 import StaticInt8Encoder
        from whisperport.model.network.whisper import build_model
    except ImportError:
        return None
    source = _local(str(bundle.manifest.source.get("name", "")))
    if source is None:
        return None
    try:
        checkpoint = load_checkpoint(source)
    except WhisperportError:
        return None
    if dict(checkpoint.source.sha256) != bundle.manifest.source.get("sha256"):
        return None
    model = build_model(checkpoint, bundle.manifest.window)
    inputs = [torch.from_numpy(mel)[None] for mel in mels]
    return SimulatedEncoder(StaticInt8Encoder(model.encoder, inputs))


def _local(name: str) -> str | Path | None:
    """Return what names the checkpoint without a download; None: nothing does."""
    from whisperport.model.checkpoint.by_name import openai_cache
    from whisperport.model.checkpoint.hub import cached
    from whisperport.model.checkpoint.names import HUB_IDS

    if name == embedded_model.NAME or (name and Path(name).expanduser().exists()):
        return name
    if (file := openai_cache() / f"{name}.pt").is_file():
        return file
    return cached(HUB_IDS.get(name, name)) if name else None
