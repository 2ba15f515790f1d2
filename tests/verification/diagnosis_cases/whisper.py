"""Whisper in plain numpy: the spectrogram as a user writes it, and the programs, as integers too.

It shares no code with the package, so that a mistake in one is found by the other: weights are read from a
safetensors file with `struct`, and every operator is a numpy expression. A spectrogram may have a user's
mistakes. The simulated device of the cases runs this model, optionally with integer arithmetic in every
layer.
"""

import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
RATE = 16_000
FFT = 400
Weights = dict[str, Floats]
Tap = Callable[[str, Floats], Floats]
"""Called with the name and the values of every intermediate tensor; returns what the device stores."""

HIDDEN = -30_000.0  # added to the attention scores of hidden tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Spectrogram:
    """How a spectrogram is computed; the defaults are Whisper's."""

    bins: int | None = None  # None: the model's number
    hop: int = 160
    centred: bool = True  # frames are centred, with 200 reflected samples at both ends
    natural_log: bool = False
    floor: bool = True  # values are at least the maximum less 8
    normalized: bool = True  # (x + 4) / 4
    sample_scale: float = 1.0  # 32768: integers were not divided
    transposed: bool = False  # written as (frames, bins)

    def of(self, samples: Floats, bins: int, frames: int) -> Floats:
        """Return the input (bins, frames) that the device reads.

        Args:
            samples: (n,) within [-1, 1], the window without padding.
            bins: number of mel bins of the model's input.
            frames: number of frames of the model's input.
        """
        window = np.zeros(frames * 160, np.float32)
        n = min(len(window), len(samples))
        window[:n] = samples[:n] * np.float32(self.sample_scale)
        log_power = np.log if self.natural_log else np.log10
        power = self._mel_power(window, self.bins or bins)
        x = log_power(np.maximum(power, 1e-10))
        if self.floor:
            x = np.maximum(x, x.max() - 8.0)
        if self.normalized:
            x = (x + 4.0) / 4.0
        return self._in_buffer(x.astype(np.float32), bins, frames)

    def _mel_power(self, window: Floats, bins: int) -> NDArray[np.float64]:
        padded = np.pad(window, FFT // 2, mode="reflect") if self.centred else window
        count = (len(padded) - FFT) // self.hop + 1
        starts = self.hop * np.arange(count)
        hann = np.sin(np.pi * np.arange(FFT) / FFT) ** 2
        spectrum = np.fft.rfft(padded[starts[:, None] + np.arange(FFT)] * hann, axis=1)
        return triangles(bins) @ (np.abs(spectrum) ** 2).T

    def _in_buffer(self, x: Floats, bins: int, frames: int) -> Floats:
        """Cut or pad with zeros to the model's input, as a script does that copies what fits."""
        buffer = np.zeros((bins, frames), np.float32)
        b, f = min(bins, x.shape[0]), min(frames, x.shape[1])
        buffer[:b, :f] = x[:b, :f]
        return buffer.T.reshape(bins, frames).copy() if self.transposed else buffer


@lru_cache(maxsize=8)
def triangles(bins: int) -> NDArray[np.float64]:
    """Triangular filters of unit area, equally spaced on Slaney's mel scale, (bins, 201)."""
    step = np.log(6.4) / 27  # above 1 kHz: 27 steps for a factor of 6.4; below: 66.7 Hz per step
    top = 15 + np.log(8000 / 1000) / step
    mels = np.linspace(0, top, bins + 2)
    corners = np.where(mels < 15, mels * 200 / 3, 1000 * np.exp(step * (mels - 15)))
    hertz = np.arange(FFT // 2 + 1) * RATE / FFT
    left, peak, right = (corners[i : i + bins, None] for i in range(3))
    up, down = (hertz - left) / (peak - left), (right - hertz) / (right - peak)
    return np.maximum(0, np.minimum(up, down)) * 2 / (right - left)


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
