"""Whisper's programs in plain numpy, with an optional simulation of integer arithmetic in every layer.

It shares no code with the package: weights are read from a safetensors file with `struct`, and every
operator is a numpy expression. The simulated device of the cases runs this model.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Weights = dict[str, Floats]
Tap = Callable[[str, Floats], Floats]
"""Called with the name and the values of every intermediate tensor; returns what the device stores."""

HIDDEN = -30_000.0  # added to the attention scores of hidden tokens


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of a model: mel bins, positions, width, heads, layers, cached tokens, vocabulary."""

    mels: int
    positions: int
    width: int
    heads: int
    encoder_layers: int
    decoder_layers: int
    tokens: int
    vocabulary: int

    @property
    def frames(self) -> int:
        """Number of mel frames of 10 ms."""
        return 2 * self.positions


def read_safetensors(path: Path) -> Weights:
    """Read all tensors of a file as float32."""
    data = path.read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    weights = {}
    for name, entry in header.items():
        if name != "__metadata__":
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            kind = {"F16": "<f2", "F32": "<f4"}[entry["dtype"]]
            stored = np.frombuffer(data[start:end], kind).reshape(entry["shape"])
            weights[name.removeprefix("model.")] = stored.astype(np.float32)
    return weights


def embedded(folder: Path) -> tuple[Sizes, Weights]:
    """Return the model of a Hugging Face folder."""
    config = json.loads((folder / "config.json").read_text())
    sizes = Sizes(
        mels=config["num_mel_bins"],
        positions=config["max_source_positions"],
        width=config["d_model"],
        heads=config["encoder_attention_heads"],
        encoder_layers=config["encoder_layers"],
        decoder_layers=config["decoder_layers"],
        tokens=config["max_target_positions"],
        vocabulary=config["vocab_size"],
    )
    return sizes, read_safetensors(folder / "model.safetensors")


def random_weights(sizes: Sizes, seed: int) -> Weights:
    """Draw weights of a gain of about 1, with a few strong channels as trained models have them."""
    random = np.random.default_rng(seed)
    d = sizes.width
    weights: Weights = {
        "encoder.embed_positions.weight": _sinusoids(sizes.positions, d),
        "decoder.embed_positions.weight": _normal(random, (sizes.tokens, d), 0.3),
        "decoder.embed_tokens.weight": _normal(random, (sizes.vocabulary, d), 1.0),
        "encoder.conv1.weight": _normal(random, (d, sizes.mels, 3), 2.0 / (3 * sizes.mels) ** 0.5),
        "encoder.conv1.bias": _normal(random, (d,), 0.1),
        "encoder.conv2.weight": _normal(random, (d, d, 3), 2.0 / (3 * d) ** 0.5),
        "encoder.conv2.bias": _normal(random, (d,), 0.1),
    }
    for i in range(sizes.encoder_layers):
        _random_block(weights, f"encoder.layers.{i}", ("self_attn",), d, random)
    for i in range(sizes.decoder_layers):
        _random_block(weights, f"decoder.layers.{i}", ("self_attn", "encoder_attn"), d, random)
    for side in ("encoder", "decoder"):
        _random_norm(weights, f"{side}.layer_norm", d, random)
    return weights


def _random_block(
    weights: Weights, name: str, attentions: tuple[str, ...], d: int, random: np.random.Generator
) -> None:
    for attention in attentions:
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            weights[f"{name}.{attention}.{part}.weight"] = _normal(random, (d, d), 1 / d**0.5)
            if part != "k_proj":
                weights[f"{name}.{attention}.{part}.bias"] = _normal(random, (d,), 0.1)
        _random_norm(weights, f"{name}.{attention}_layer_norm", d, random)
    weights[f"{name}.fc1.weight"] = _normal(random, (4 * d, d), 1 / d**0.5)
    weights[f"{name}.fc1.bias"] = _normal(random, (4 * d,), 0.1)
    weights[f"{name}.fc2.weight"] = _normal(random, (d, 4 * d), 1 / d**0.5)
    weights[f"{name}.fc2.bias"] = _normal(random, (d,), 0.1)
    _random_norm(weights, f"{name}.final_layer_norm", d, random)


def _random_norm(weights: Weights, name: str, d: int, random: np.random.Generator) -> None:
    gain = 1 + 0.2 * random.standard_normal(d)
    gain[random.choice(d, 2, replace=False)] *= 5
    weights[f"{name}.weight"] = gain.astype(np.float32)
    weights[f"{name}.bias"] = _normal(random, (d,), 0.2)


def _normal(random: np.random.Generator, shape: tuple[int, ...], scale: float) -> Floats:
    return (scale * random.standard_normal(shape)).astype(np.float32)


def _sinusoids(positions: int, width: int) -> Floats:
    steps = np.exp(-np.log(10_000.0) / (width // 2 - 1) * np.arange(width // 2))
    angles = np.arange(positions)[:, None] * steps[None]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


def _untouched(_: str, x: Floats) -> Floats:
    return x


@dataclass(frozen=True, slots=True)
class Model:
    """A model's programs; each returns its outputs by name, in the order of the program's signature."""

    sizes: Sizes
    weights: Weights

    def encoder(self, mel: Floats, tap: Tap = _untouched) -> dict[str, Floats]:
        """Encode a spectrogram (bins, frames) to features (1, T, d)."""
        w, sizes = self.weights, self.sizes
        x = tap("mel", mel.T)
        x = tap("conv1", _gelu(_conv(x, w["encoder.conv1.weight"], w["encoder.conv1.bias"], 1)))
        x = tap("conv2", _gelu(_conv(x, w["encoder.conv2.weight"], w["encoder.conv2.bias"], 2)))
        x = tap("embedded", x + w["encoder.embed_positions.weight"][: sizes.positions])
        for i in range(sizes.encoder_layers):
            name = f"encoder.layers.{i}"
            normed = tap(f"{name}.norm1", self._norm(x, f"{name}.self_attn_layer_norm"))
            q, k, v = self._project(normed, f"{name}.self_attn")
            attended = self._attend(q, k, v, None, f"{name}.self_attn", tap)
            x = tap(f"{name}.add1", x + attended)
            x = self._feed_forward(x, name, tap)
        return {"features": self._norm(x, "encoder.layer_norm")[None]}

    def cross_kv(self, features: Floats, tap: Tap = _untouched) -> dict[str, Floats]:
        """Project features (1, T, d) to keys (H, D, T) and values (H, T, D) of every decoder layer."""
        x = tap("features", features[0])
        keys, values = {}, {}
        for i in range(self.sizes.decoder_layers):
            name = f"decoder.layers.{i}.encoder_attn"
            keys[f"cross_k_{i}"] = self._heads(self._linear(x, f"{name}.k_proj")).swapaxes(1, 2)
            values[f"cross_v_{i}"] = self._heads(self._linear(x, f"{name}.v_proj"))
        return {name: np.ascontiguousarray(x) for name, x in (keys | values).items()}

    def decode(self, inputs: dict[str, Floats], tap: Tap = _untouched) -> dict[str, Floats]:
        """Run `step` or `prefill`: logits, then new keys (H, D, P), then new values (H, P, D).

        Args:
            inputs: x (1, P, d), mask (1, P, N + P), self_k_i, self_v_i, cross_k_i and cross_v_i, and
                pick (1, R, P) for `prefill`.
            tap: see `Tap`.
        """
        x = inputs["x"][0]
        keys, values = {}, {}
        for i in range(self.sizes.decoder_layers):
            name = f"decoder.layers.{i}"
            normed = tap(f"{name}.norm1", self._norm(x, f"{name}.self_attn_layer_norm"))
            q, k, v = self._project(normed, f"{name}.self_attn")
            new_k, new_v = k.swapaxes(1, 2), v
            keys[f"new_k_{i}"], values[f"new_v_{i}"] = new_k, new_v
            all_k = np.concatenate([inputs[f"self_k_{i}"], new_k], axis=2).swapaxes(1, 2)
            all_v = np.concatenate([inputs[f"self_v_{i}"], new_v], axis=1)
            mask = inputs["mask"]
            x = tap(
                f"{name}.add1", x + self._attend(q, all_k, all_v, mask, f"{name}.self_attn", tap)
            )
            normed = tap(f"{name}.norm2", self._norm(x, f"{name}.encoder_attn_layer_norm"))
            q = self._heads(self._linear(normed, f"{name}.encoder_attn.q_proj"))
            cross_k = inputs[f"cross_k_{i}"].swapaxes(1, 2)
            cross_v = inputs[f"cross_v_{i}"]
            attended = self._attend(q, cross_k, cross_v, None, f"{name}.encoder_attn", tap)
            x = tap(f"{name}.add2", x + attended)
            x = self._feed_forward(x, name, tap)
        x = self._norm(x, "decoder.layer_norm")
        if "pick" in inputs:
            x = inputs["pick"][0] @ x
        outputs = {"logits": x @ self.weights["decoder.embed_tokens.weight"].T, **keys, **values}
        return {name: np.ascontiguousarray(x, np.float32) for name, x in outputs.items()}

    def _feed_forward(self, x: Floats, name: str, tap: Tap) -> Floats:
        normed = tap(f"{name}.norm3", self._norm(x, f"{name}.final_layer_norm"))
        inner = tap(f"{name}.gelu", _gelu(self._linear(normed, f"{name}.fc1")))
        return tap(f"{name}.add3", x + self._linear(inner, f"{name}.fc2"))

    def _project(self, x: Floats, name: str) -> tuple[Floats, Floats, Floats]:
        q, k, v = (self._heads(self._linear(x, f"{name}.{p}_proj")) for p in "qkv")
        return q, k, v

    def _attend(
        self, q: Floats, k: Floats, v: Floats, mask: Floats | None, name: str, tap: Tap
    ) -> Floats:
        """Attend with q (H, P, D) to k and v (H, T, D), and project the result."""
        scores = (q / np.float32(q.shape[2] ** 0.5)) @ k.swapaxes(1, 2)
        if mask is not None:
            scores = scores + mask
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=2, keepdims=True)
        attended = tap(f"{name}.softmax", scores) @ v
        joined = attended.swapaxes(0, 1).reshape(q.shape[1], -1)
        return self._linear(tap(f"{name}.attended", joined), f"{name}.out_proj")

    def _heads(self, x: Floats) -> Floats:
        """(P, d) to (H, P, D)."""
        return x.reshape(len(x), self.sizes.heads, -1).swapaxes(0, 1)

    def _linear(self, x: Floats, name: str) -> Floats:
        bias = self.weights.get(f"{name}.bias")
        y = x @ self.weights[f"{name}.weight"].T
        return y if bias is None else y + bias

    def _norm(self, x: Floats, name: str) -> Floats:
        centred = x - x.mean(axis=1, keepdims=True)
        deviation = np.sqrt(np.mean(centred * centred, axis=1, keepdims=True) + np.float32(1e-5))
        return centred / deviation * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]


def _conv(x: Floats, weight: Floats, bias: Floats, stride: int) -> Floats:
    """Convolve x (frames, channels in) with a kernel of 3 and zero padding of 1."""
    padded = np.pad(x, ((1, 1), (0, 0)))
    n = (len(x) - 1) // stride + 1
    parts = (padded[k : k + stride * (n - 1) + 1 : stride] @ weight[:, :, k].T for k in range(3))
    return (sum(parts) + bias).astype(np.float32)


def _gelu(x: Floats) -> Floats:
    """GELU with the error function; its approximation (Abramowitz and Stegun 7.1.26) is within 1.5e-7."""
    z = np.abs(x) * np.float32(0.5**0.5)
    t = 1 / (1 + np.float32(0.3275911) * z)
    poly = t * (
        0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429)))
    )
    erf = np.sign(x) * (1 - poly * np.exp(-z * z))
    return (0.5 * x * (1 + erf)).astype(np.float32)
