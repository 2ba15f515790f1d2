"""The worlds of the cases: a model, the clips that a user gave to the device, and the true outputs.

A world's outputs are computed by `whisper.py`, once for each input that a case needs.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import numpy as np

from .whisper import HIDDEN, Floats, Model, Sizes, Spectrogram, Tap, embedded, random_weights

# Folders of the embedded model's bundle, and of the checkpoints "embedded" and "outlier"; set by `provide`.
_FOLDERS: dict[str, Path] = {}


def provide(**folders: Path) -> None:
    """Set folders that are made by the package, or by the recipe of the outlier checkpoints."""
    _FOLDERS.update(folders)


CLIPS = 4  # clips of the reference that the cases use
PROMPT = (50258, 50259, 50359, 50363)  # start of transcript, English, transcribe, no timestamps

RANDOM_SIZES = {
    # name: mel bins, positions, width, heads, encoder layers, decoder layers, cached tokens, vocabulary
    "random-64": Sizes(80, 500, 64, 2, 2, 2, 64, 700),  # a window of 10 s
    "random-72": Sizes(
        128, 500, 72, 3, 2, 3, 48, 611
    ),  # 10 s, 128 bins, a width of no power of two
    "random-48": Sizes(80, 1500, 48, 2, 1, 1, 32, 300),  # 30 s
    "random-32": Sizes(80, 200, 32, 2, 2, 2, 24, 300),  # 4 s
    "random-96": Sizes(128, 250, 96, 6, 3, 2, 40, 1000),  # 5 s, heads of 16
}
PROGRAMS = ("encoder", "cross_kv", "step", "prefill_4")


@dataclass(frozen=True, slots=True)
class Input:
    """What the device was given: a clip, a part of it, and how its spectrogram was computed."""

    clip: int
    skip: int = 0  # samples that are missing at the start; negative: silence that was put before
    silent: str = ""  # "audio": zeros as audio, "mel": a spectrogram of zeros
    how: Spectrogram = field(default_factory=Spectrogram)


@dataclass(frozen=True, eq=False)
class World:
    """One model and its clips."""

    name: str
    model: Model
    clips: tuple[Floats, ...]  # samples, within [-1, 1]
    clip_names: tuple[str, ...]
    _outputs: dict[tuple[str, Input], Mapping[str, Floats]] = field(default_factory=dict)

    def outputs(self, program: str, given: Input) -> Mapping[str, Floats]:
        """Return the outputs of a program for an input, computed in float32."""
        key = (program, given)
        if key not in self._outputs:
            if len(self._outputs) > 400:  # the memory of a long run stays small
                self._outputs.clear()
            self._outputs[key] = self.run(program, given)
        return self._outputs[key]

    def run(self, program: str, given: Input, tap: Tap | None = None) -> Mapping[str, Floats]:
        """Run a program; `tap` sees and may change every intermediate tensor."""
        taps = {} if tap is None else {"tap": tap}
        if program == "encoder":
            return self.model.encoder(self.mel(given), **taps)
        features = self.outputs("encoder", given)["features"]
        if program == "cross_kv":
            return self.model.cross_kv(features, **taps)
        cross = self.outputs("cross_kv", given)
        return self.model.decode(self._decoder_inputs(program, cross, given.clip), **taps)

    def mel(self, given: Input) -> Floats:
        """Return the spectrogram (bins, frames) that the encoder reads."""
        sizes = self.model.sizes
        if given.silent == "mel":
            return np.zeros((sizes.mels, sizes.frames), np.float32)
        samples = self.clips[given.clip]
        if given.silent == "audio":
            samples = np.zeros_like(samples)
        if given.skip >= 0:
            samples = samples[given.skip :]
        else:
            samples = np.concatenate([np.zeros(-given.skip, np.float32), samples])
        return given.how.of(samples, sizes.mels, sizes.frames)

    def _decoder_inputs(
        self, program: str, cross: Mapping[str, Floats], clip: int
    ) -> dict[str, Floats]:
        """Return inputs of `prefill_4`, or of the `step` after a few tokens, as a host makes them."""
        prompt = [token % self.model.sizes.vocabulary for token in PROMPT]
        prefill = self._token_inputs(prompt, 0, {}, cross)
        prefill["pick"] = np.zeros((1, 2, 4), np.float32)
        prefill["pick"][0, [0, 1], [0, 3]] = 1
        if program == "prefill_4":
            return prefill
        rows = self.model.decode(prefill)
        token = int(rows["logits"][1].argmax()) if clip % 2 else (97 + 13 * clip) % 300
        return self._token_inputs([token], 4, rows, cross)

    def _token_inputs(
        self, tokens: list[int], start: int, rows: Mapping[str, Floats], cross: Mapping[str, Floats]
    ) -> dict[str, Floats]:
        sizes, weights = self.model.sizes, self.model.weights
        positions = weights["decoder.embed_positions.weight"][start : start + len(tokens)]
        mask = np.full((1, len(tokens), sizes.tokens + len(tokens)), HIDDEN, np.float32)
        mask[:, :, :start] = 0
        mask[0, :, sizes.tokens :] = np.triu(np.full((len(tokens), len(tokens)), HIDDEN), 1)
        inputs = {
            "x": (weights["decoder.embed_tokens.weight"][tokens] + positions)[None],
            "mask": mask,
        }
        width = sizes.width // sizes.heads
        for i in range(sizes.decoder_layers):
            k = np.zeros((sizes.heads, width, sizes.tokens), np.float32)
            v = np.zeros((sizes.heads, sizes.tokens, width), np.float32)
            if rows:
                k[:, :, :start], v[:, :start] = rows[f"new_k_{i}"], rows[f"new_v_{i}"]
            inputs[f"self_k_{i}"], inputs[f"self_v_{i}"] = k, v
        return inputs | dict(cross)


@lru_cache(maxsize=8)
def world(name: str) -> World:
    """Return a world by name: "embedded", "outlier", or one of `RANDOM_SIZES`."""
    stored = np.load(_FOLDERS["bundle"] / "reference.npz")
    names = tuple(str(n) for n in stored["names"][:CLIPS])
    clips = tuple((stored[f"samples_{i}"] / 32768).astype(np.float32) for i in range(CLIPS))
    if name in ("embedded", "outlier"):
        sizes, weights = embedded(_FOLDERS[name])
    else:
        sizes = RANDOM_SIZES[name]
        weights = random_weights(sizes, seed=sum(name.encode()))
    return World(name, Model(sizes, weights), clips, names)
