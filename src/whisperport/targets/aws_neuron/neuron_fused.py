"""Fused operators in the modules of `neuron_modules`: one matmul for Q, K and V, and AWS's own kernels.

This file stands alone: it needs torch (2.9 or later) and the standard library. The kernels are functions of
AWS's packages, which are imported when a program is compiled. Where a package is missing, or a kernel does
not support the shapes, the plain operators stay, and `Used` says so. On a CPU, the plain operators run.

    option     replaces                         by
    qkv        three matmuls of each            one matmul with the joined weights; the bias of K is 0
               self-attention layer
    attention  softmax(Q·K)·V of the encoder    `scaled_dot_product_attention_kernel`, NxD Inference
    conv       convolution and GELU at the      `conv1d`, NKI library
               start of the encoder

Sources of the calls: aws-neuron/neuronx-distributed-inference@4bcdc54, experimental/functional/attention/
causal_attention_functions.py; aws-neuron/nki-library@d2ad3a5, nkilib/experimental/conv/conv1d.py. The same
kernels: jimburtoft/neuronx-distributed-inference@6c49162. No kernel was run by this project.

**Tensor parallel.** R devices compute H / R heads each. A linear layer is split into R contiguous parts of
its rows. If the joined weight is [Q; K; V], the first of two devices gets all of Q and half of K, and the
result is wrong (as in 6c49162, for R > 1). `joined_rows` therefore joins the rows device by device, as in
[Q0; K0; V0; Q1; K1; V1]. A `ColumnParallelLinear` with `stride=3` makes the same of [Q; K; V]
(aws-neuron/neuronx-distributed@fbac349, parallel_layers/layers.py, `create_local_weight`).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

OPTIONS = ("qkv", "attention", "conv")
ATTENTION = (
    "neuronx_distributed_inference.experimental.functional.attention.causal_attention_functions"
)
CONV, CONV_TYPES = "nkilib.experimental.conv.conv1d", "nkilib.core.utils.common_types"
HOST = "cpu"  # type of torch device on which no kernel runs
CPU_ONLY = "plain: the program ran on the CPU only"


class Used:
    """Which operators each option used, in words. It is filled while a program is traced."""

    def __init__(self, options: Sequence[str]) -> None:
        self._found: dict[str, list[str]] = {option: [] for option in options}

    def add(self, option: str, what: str) -> None:
        """Note what an option used."""
        if what not in self._found[option]:
            self._found[option].append(what)

    def words(self) -> dict[str, str]:
        """Return option -> what it used."""
        return {option: "; ".join(found) or CPU_ONLY for option, found in self._found.items()}


def fuse(module: nn.Module, options: Sequence[str]) -> Used:
    """Replace operators of a module that `neuron_modules.build` made, in place.

    Args:
        module: the module. If it has no operators of an option, such as `step` of "conv", nothing changes.
        options: names in `OPTIONS`.

    Returns:
        What was used; complete after the module was traced.

    Raises:
        ValueError: an option is unknown.
    """
    if unknown := [option for option in options if option not in OPTIONS]:
        raise ValueError(f"the option {unknown[0]!r} is not one of {OPTIONS}")
    encodes = hasattr(module, "conv1")
    used = Used([one for one in options if encodes or one == "qkv"])
    attentions = [block.attn for block in getattr(module, "blocks", ())]
    if "qkv" in options:
        for attention in attentions:
            _fuse_projections(attention)
        used.add("qkv", f"one matmul in {len(attentions)} layers")
    if encodes and "attention" in options:
        kernel = FlashAttention(used)
        for attention in attentions:
            attention.kernel = kernel
    if encodes and "conv" in options:
        for name in ("conv1", "conv2"):
            setattr(module, name, FusedConv(cast(nn.Conv1d, getattr(module, name)), used))
    return used


# Q, K and V --------------------------------------------------------------------------------------


class JoinedProjections(nn.Module):
    """The projections of a self-attention layer, or of one device's heads of it, as one matmul.

    Args:
        weight: (3·h·D, d) rows of Q, of K, and of V.
        bias: (3·h·D,) the same of the biases.
    """

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project x (B, P, d) to Q, K and V, (B, P, h·D) each."""
        q, k, v = torch.tensor_split(nn.functional.linear(x, self.weight, self.bias), 3, dim=2)
        return q, k, v


def _fuse_projections(attention: Any) -> None:
    """Replace the projections of a `SelfAttention`."""
    q, k, v = attention.query, attention.key, attention.value
    weight = joined_rows(q.weight, k.weight, v.weight, attention.heads)
    bias = joined_rows(q.bias, torch.zeros_like(q.bias), v.bias, attention.heads)
    del attention.query, attention.key, attention.value
    attention.qkv = JoinedProjections(weight, bias)


def joined_rows(query: Tensor, key: Tensor, value: Tensor, heads: int, degree: int = 1) -> Tensor:
    """Join the weights (d, …) or the biases (d,) of Q, K and V, device by device.

    Args:
        heads: H, number of heads.
        degree: R, number of devices. If it does not divide H, heads of zeros are added. They add nothing to
            the result: the output projection has zeros for them too.

    Returns:
        (3·H'·D, …), of which device r gets the r-th of R equal parts; H' is a multiple of R.
    """
    padded = [padded_rows(one, heads, degree) for one in (query, key, value)]
    parts = [one.reshape(degree, -1, *one.shape[1:]) for one in padded]
    return torch.cat(parts, dim=1).flatten(0, 1)


def padded_rows(rows: Tensor, heads: int, degree: int) -> Tensor:
    """Add heads of zeros to (H·D, …) until the number of heads is a multiple of `degree`."""
    missing = -heads % degree * (rows.shape[0] // heads)
    return torch.cat([rows, rows.new_zeros(missing, *rows.shape[1:])])


def fused_state_dict(
    weights: Mapping[str, Tensor], heads: int, degree: int = 1
) -> dict[str, Tensor]:
    """Convert the weights of a Whisper model, with openai-whisper's names, for `degree` devices.

    `attn.query`, `attn.key` and `attn.value` become `attn.qkv`. Cross-attention is not joined, since its
    queries and its keys have different inputs; its heads are padded.
    """
    converted = dict(weights)
    for name in [name for name in weights if name.endswith("attn.query.weight")]:
        layer = name.removesuffix("query.weight")
        out = converted[f"{layer}out.weight"]
        converted[f"{layer}out.weight"] = padded_rows(out.T, heads, degree).T
        if layer.endswith(".cross_attn."):
            for part in ("query.weight", "query.bias", "key.weight", "value.weight", "value.bias"):
                converted[layer + part] = padded_rows(weights[layer + part], heads, degree)
            continue
        q, k, v = (converted.pop(f"{layer}{one}.weight") for one in ("query", "key", "value"))
        q_bias, v_bias = (converted.pop(f"{layer}{one}.bias") for one in ("query", "value"))
        converted[f"{layer}qkv.weight"] = joined_rows(q, k, v, heads, degree)
        zeros = torch.zeros_like(q_bias)
        converted[f"{layer}qkv.bias"] = joined_rows(q_bias, zeros, v_bias, heads, degree)
    return converted


_BY_ROWS = ("attn.qkv", "attn.query", "attn.key", "attn.value", "mlp.0")  # column-parallel layers
_BY_COLUMNS = ("attn.out.weight", "mlp.2.weight")  # row-parallel layers; their bias is added once


def shard(weights: Mapping[str, Tensor], degree: int, rank: int) -> dict[str, Tensor]:
    """Return the weights of one of `degree` devices. Every device has all weights that are not split.

    Args:
        weights: as `fused_state_dict` returns them for `degree`.

    Raises:
        ValueError: a weight cannot be split into equal parts.
    """

    def part(name: str, weight: Tensor) -> Tensor:
        by_rows = any(f"{layer}." in name for layer in _BY_ROWS)
        if not by_rows and not name.endswith(_BY_COLUMNS):
            return weight
        axis = 0 if by_rows else 1
        if weight.shape[axis] % degree:
            raise ValueError(f"{name} {tuple(weight.shape)} cannot be split into {degree} parts")
        return weight.chunk(degree, dim=axis)[rank]

    return {name: part(name, weight) for name, weight in weights.items()}


# Kernels -----------------------------------------------------------------------------------------


class FlashAttention:
    """Attention over all positions by AWS's kernel, which does not write the scores to memory."""

    def __init__(self, used: Used) -> None:
        self._used = used
        self._kernel, self._missing = _kernel(ATTENTION, "scaled_dot_product_attention_kernel")

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor | None:
        """Attend from scaled queries (B, H, T, D) to keys (B, H, D, T) and values (B, H, T, D).

        Returns:
            (B, H, T, D); None: the plain operators must run.
        """

        def run() -> Tensor:
            # A scale of 1: the queries are scaled already. The kernel wants keys as (B, H, T, D).
            keys = k.permute(0, 1, 3, 2)
            return cast(Tensor, self._kernel(q, keys, v, is_causal=False, scale=1.0))

        return _attempt(run, q, "attention", ATTENTION, self._missing, self._used)


class FusedConv(nn.Module):
    """A convolution with GELU by AWS's kernel.

    Args:
        plain: the convolution with GELU, of width 3 and padding 1.
    """

    def __init__(self, plain: nn.Conv1d, used: Used) -> None:
        super().__init__()
        self.plain, self._used = plain, used
        self._kernel, self._missing = _kernel(CONV, "conv1d")
        types, missing = _kernel(CONV_TYPES, "ActFnType")
        self._missing = self._missing or missing
        self._gelu = None if self._missing else types.GELU

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, C, T): (B, d, T / stride)."""

        def run() -> Tensor:
            weight = self.plain.weight.permute(2, 1, 0)  # (3, C, d)
            convolved = self._kernel(
                x,
                weight,
                self.plain.bias,
                stride=self.plain.stride[0],
                padding=(1, 1),
                activation_fn=self._gelu,
            )
            return cast(Tensor, convolved)

        fused = _attempt(run, x, "conv", CONV, self._missing, self._used)
        return cast(Tensor, self.plain(x)) if fused is None else fused


def _kernel(module: str, name: str) -> tuple[Any, str]:
    """Import a function of AWS's packages: the function, or None and why it is missing."""
    try:
        return getattr(importlib.import_module(module), name), ""
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return None, f"plain: {module} cannot be imported: {str(error)[:200]}"


def _attempt(
    run: Callable[[], Tensor], x: Tensor, option: str, module: str, missing: str, used: Used
) -> Tensor | None:
    """Run a kernel on a device's tensors; None if it is missing, or rejects them with an assertion."""
    if x.device.type == HOST:
        return None
    if not missing:
        try:
            result = run()
        except AssertionError as error:
            why = (str(error).splitlines() or ["it gives no reason"])[0][:200]
            missing = f"plain: {module} does not support the program: {why}"
        else:
            used.add(option, f"kernel: {module}")
            return result
    used.add(option, missing)
    return None
