"""The reference of a bundle: outputs of its model in eager torch, which verification compares with."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import BundleError
from whisperport.program.dims import Dims
from whisperport.program.generation import Generation
from whisperport.speech.audio import HOP_LENGTH, log_mel
from whisperport.verification.loss import TORCH_PRECISIONS, Loss, worst

Floats = NDArray[np.float32]


def _none() -> Floats:
    return np.empty((0, 0, 0), np.float32)


def _no_margins() -> Floats:
    return np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class ReferenceClip:
    """A clip and the outputs of the model for it, computed in float32 on the build machine."""

    name: str
    text: str  # correct transcript; empty: not known
    samples: NDArray[np.int16]  # (n_samples,) 16 kHz mono
    prompt: tuple[int, ...]  # tokens before the decoded ones
    tokens: tuple[int, ...]  # decoded tokens, including the end of text if it was decoded
    features: Floats  # (T, d) encoder output; (0, d): not stored
    logits: Floats  # (K, V) after the prompt and after each of the first K - 1 tokens; (0, V): none
    uncached_logits: Floats  # the same without audio padding, for `uncached_decoder`
    # (A, S, P) cross-attention scores of the alignment heads, for the prompt and the first K - 1 tokens,
    # at the P positions of the audio; (0, 0, 0): not stored
    scores: Floats = field(default_factory=_none)
    # (n_tokens,) float32, how much larger the logit of each decoded token is than the next allowed one's;
    # (0,): not stored
    margins: Floats = field(default_factory=_no_margins)
    # (precision of torch, "features" or "logits") -> what that precision loses in this clip
    losses: Mapping[tuple[str, str], Loss] = field(default_factory=dict)
    # T -> (T, d) encoder output for the first T positions of the window alone, for `encoder_T`
    short_features: Mapping[int, Floats] = field(default_factory=dict)

    @property
    def audio(self) -> Floats:
        """(n_samples,) float32 within [-1, 1]."""
        return self.samples.astype(np.float32) / np.float32(32768)

    @property
    def frames(self) -> int:
        """Number of the window's frames, of 20 ms, up to the end of the clip; at least one."""
        return max(1, math.ceil(len(self.samples) / (2 * HOP_LENGTH)))

    def language(self, generation: Generation) -> str:
        """Return the code of the language in which the reference decoded the clip."""
        codes = {token: code for code, token in generation.languages.items()}
        return next((codes[token] for token in self.prompt if token in codes), "en")


def reference_mel(dims: Dims, clip: ReferenceClip) -> Floats:
    """Return the spectrogram of the first window of a clip: (n_mels, 2T) float32."""
    return log_mel(clip.audio, dims.n_mels, n_frames=dims.n_frames)


@dataclass(frozen=True, slots=True)
class Reference:
    """The reference clips of a bundle, stored as `reference.npz` without pickle."""

    clips: tuple[ReferenceClip, ...]
    max_tokens: int  # largest number of tokens decoded per clip
    # The first clip with the adapter of `adapter_check.py`; None: the programs take no adapter.
    adapted: ReferenceClip | None = None

    def loss(self, precision: str, output: str) -> Loss | None:
        """Return the largest loss of torch in a precision, over the clips; None: it is not stored.

        Args:
            precision: precision of a program, such as "w8a16".
            output: "features" or "logits".
        """
        key = TORCH_PRECISIONS.get(precision, ""), output
        losses = [clip.losses[key] for clip in self.clips if key in clip.losses]
        return worst(losses) if losses else None

    def losses(self, output: str) -> dict[str, Loss]:
        """Return precision of torch -> its largest loss over the clips."""
        known = {precision for clip in self.clips for precision, of in clip.losses if of == output}
        return {p: loss for p in sorted(known) if (loss := self.loss(p, output))}

    def to_arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays of `reference.npz` by name."""
        clips = (*self.clips, *([self.adapted] if self.adapted else []))
        arrays: dict[str, NDArray[Any]] = {
            "names": np.array([clip.name for clip in clips], np.str_),
            "texts": np.array([clip.text for clip in clips], np.str_),
            "max_tokens": np.array(self.max_tokens),
        }
        if self.adapted:  # the last clip
            arrays["adapted"] = np.array(len(self.clips))
        for i, clip in enumerate(clips):
            arrays[f"samples_{i}"] = clip.samples
            arrays[f"prompt_{i}"] = np.array(clip.prompt, np.int64)
            arrays[f"tokens_{i}"] = np.array(clip.tokens, np.int64)
            arrays[f"features_{i}"] = clip.features
            arrays[f"logits_{i}"] = clip.logits
            if clip.scores.size:
                arrays[f"scores_{i}"] = clip.scores
            if clip.margins.size:
                arrays[f"margins_{i}"] = clip.margins
            for (precision, output), loss in clip.losses.items():
                arrays[f"loss_{precision}_{output}_{i}"] = loss.to_array()
            for positions, features in clip.short_features.items():
                arrays[f"short_features_{i}_{positions}"] = features
            if clip.uncached_logits.size:
                arrays[f"uncached_logits_{i}"] = clip.uncached_logits
        return arrays

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]]) -> "Reference":
        """Read the arrays that `to_arrays` returned.

        Raises:
            BundleError: an array is missing, or has another shape or dtype.
        """
        try:
            clips = [_clip(arrays, i) for i in range(len(arrays["names"]))]
            adapted = clips.pop() if "adapted" in arrays else None
            return cls(tuple(clips), int(arrays["max_tokens"]), adapted)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BundleError(
                "the bundle's reference cannot be read",
                why=f"{type(error).__name__}: {error}",
                hint="export the bundle again",
            ) from error


def _clip(arrays: Mapping[str, NDArray[Any]], i: int) -> ReferenceClip:
    logits = _of(arrays[f"logits_{i}"], np.float32, 2)
    uncached = arrays.get(f"uncached_logits_{i}", arrays.get(f"full_logits_{i}", logits[:0]))
    return ReferenceClip(
        name=str(arrays["names"][i]),
        text=str(arrays["texts"][i]),
        samples=_of(arrays[f"samples_{i}"], np.int16, 1),
        prompt=tuple(int(t) for t in _of(arrays[f"prompt_{i}"], np.int64, 1)),
        tokens=tuple(int(t) for t in _of(arrays[f"tokens_{i}"], np.int64, 1)),
        features=_of(arrays[f"features_{i}"], np.float32, 2),
        logits=logits,
        uncached_logits=_of(uncached, np.float32, 2),  # format version 1 calls them full logits
        scores=_of(arrays.get(f"scores_{i}", _none()), np.float32, 3),
        margins=_of(arrays.get(f"margins_{i}", _no_margins()), np.float32, 1),
        losses={
            (precision, output): Loss.from_array(_of(arrays[name], np.float64, 1))
            for precision in sorted(set(TORCH_PRECISIONS.values()))
            for output in ("features", "logits")
            if (name := f"loss_{precision}_{output}_{i}") in arrays
        },
        short_features={
            int(name.removeprefix(prefix)): _of(arrays[name], np.float32, 2)
            for prefix in [f"short_features_{i}_"]
            for name in arrays
            if name.startswith(prefix)
        },
    )


def _of(array: NDArray[Any], dtype: type, ndim: int) -> NDArray[Any]:
    if array.dtype != dtype or array.ndim != ndim:
        raise ValueError(f"expected {ndim}-D {np.dtype(dtype)}, got {array.ndim}-D {array.dtype}")
    return array
