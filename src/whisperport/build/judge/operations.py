"""Say in words what a graph computes in place of an operation, from the values around it.

What a layer is computed from is right, and its result is not, so that what the exporter changed is between
them. It is tried what gives the graph's value: another activation, a sum with another sign, other scores.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from whisperport.verification.diagnosis.differences import (
    EXPLAINED,
    heads_of,
    listed,
    moved_values,
    value_difference,
)
from whisperport.verification.diagnosis.matching import arrangements, error_of

Array = NDArray[Any]
Form = tuple[str, dict[str, Any]]  # of attention, in words; arguments of `_attention` that differ
INPUT = "the input of "
"""Before the name of a layer: what its weight multiplies. Alone, the name is that of its output."""
LOWEST = np.finfo(np.float32).min  # what a mask adds
LOWEST_HALF = np.float32(np.finfo(np.float16).min)  # or this
BRANCHES = ("attn.out", "mlp.2")
"""Ends of the layers whose outputs are added to the residual."""
OF_AUDIO = ("cross_attn.key", "cross_attn.value")
"""Ends of the decoder's layers that read features, not tokens."""
BIAS = "its bias"
NO_BIAS = f"{BIAS} is missing"
LATER = "after the first run, "
UNCOUNTED = "begins at the first token again: the cache is not counted"
FIT = 0.05  # of the error: an operation that leaves less gives the value
POINTS = (-2.0, -1.0, 0.0, 1.0, 2.0)  # at which an unknown activation is shown
EPSILON = 1e-5  # of Whisper's layer norms
FRAMES = 25  # of 20 ms: masks of frames end at a multiple of it
WIDEST = 64  # tokens that a mask hides, or shows
LEFT = 0.25  # of the error: other positions that leave less are those that are added
SEEN = 1e-2  # of what attention gives all tokens
STEEPEST, LEAST_SMOOTH = 3.0, 0.99  # of an activation: its slope, in this part of its places
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "ReLU": lambda x: np.maximum(x, 0),
    "GELU's tanh form": lambda x: x / 2 * (1 + np.tanh(0.7978845608 * (x + 0.044715 * x**3))),
    "quick GELU, x·sigmoid(1.702x)": lambda x: x / (1 + np.exp(-1.702 * x)),
    "SiLU, x·sigmoid(x)": lambda x: x / (1 + np.exp(-x)),
    "no activation": lambda x: x,
    "tanh": np.tanh,
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "ReLU squared": lambda x: np.maximum(x, 0) ** 2,
}


class Explanation:
    """Says what is computed in place of a value.

    Args:
        expected: output of each layer in eager torch, and under `INPUT` and its name, its input; weights
            and biases of one row, and the tables of positions, by their names.
        head_width: of the attention.
        rows: those of the decoder's tokens that the graph computed.
    """

    def __init__(
        self, expected: Mapping[str, Array], head_width: int, rows: slice = slice(None)
    ) -> None:
        self.expected, self.head_width, self.rows = expected, head_width, rows

    def of(self, name: str, candidates: Sequence[Array]) -> str:
        """Return in words what is computed instead; empty: it is not known.

        Args:
            name: of a value in `expected`.
            candidates: values of the graph, one of which is computed instead; the most probable first.
        """
        right, arrays = self._fitting(name, candidates)
        with np.errstate(all="ignore"):
            errors = [error_of(right, array) for array in arrays]
            variants = [(text, self.cut(name, value)) for text, value in self._variants(name)]
            for array, error in zip(arrays, errors, strict=True):
                limit = FIT * min(error, 1)
                left = [(error_of(value, array), text) for text, value in variants]
                if left and min(left)[0] < limit:
                    return min(left)[1]
                if sentence := self._of_heads(right, array, variants):
                    return sentence
            terms = {label: self.cut(name, term) for label, term in self._terms(name).items()}
            sums = []
            for array, error in zip(arrays, errors, strict=True):
                limit = FIT * min(error, 1)
                if sentence := self._solved(name, array, limit):
                    return sentence
                sums.append(combined(terms, array, limit))
            # What reads a value may scale it, so that a scaled sum is reported last.
            sentences = sorted(filter(None, sums), key=lambda text: "multiplied" in text)
            return sentences[0] if sentences else ""

    def _of_heads(self, right: Array, array: Array, variants: Sequence[tuple[str, Array]]) -> str:
        """Return in words what is computed in some heads of an attention only; empty: it is not known."""
        heads, own = (heads_of(value, self.head_width) for value in (right, array))
        errors = [error_of(a, b) for a, b in zip(heads, own, strict=True)]
        wrong = [head for head, error in enumerate(errors) if error > EXPLAINED]
        if not variants or not 0 < len(wrong) < len(errors):
            return ""
        limit = FIT * min(1, *(errors[head] for head in wrong))
        left = min(
            (error_of(heads_of(value, self.head_width)[wrong], own[wrong]), text)
            for text, value in variants
        )
        which = f"in head{'s' * (len(wrong) > 1)} {listed(wrong)} only, "
        return which + left[1] if left[0] < limit else ""

    def difference(self, name: str, candidates: Sequence[Array]) -> str:
        """Return in words how the nearest value differs, of which `of` knows nothing; empty: anyhow."""
        right, arrays = self._fitting(name, candidates)
        nearest = min(arrays, key=lambda array: error_of(right, array), default=None)
        if nearest is None:
            return ""
        if np.isfinite(nearest).all() and (reason := self._added_row(right, nearest)):
            return reason
        for label, term in self._terms(name).items():
            term = self.cut(name, term)
            if reason := moved_values(term, nearest - right + term):
                return f"{label}: {reason}"
        return value_difference(right, nearest, self.head_width)

    def _added_row(self, right: Array, array: Array) -> str:
        """Return in words which bias is added to each row of a value; empty: not the same to each."""
        added = array - right
        row = added.reshape(-1, added.shape[-1]).mean(axis=0)
        if len(added.reshape(-1, len(row))) < 2 or error_of(added, added * 0 + row) > EXPLAINED:
            return ""
        for name, bias in self.expected.items():
            if name.endswith(".bias") and bias.shape == row.shape:
                for factor, verb in ((1, "added to"), (-1, "subtracted from")):
                    if error_of(factor * bias, row) < EXPLAINED:
                        return f"{name} is {verb} it"
        return "the same row is added to each of its rows"

    def _fitting(self, name: str, candidates: Sequence[Array]) -> tuple[Array, list[Array]]:
        """Return the right value, and those of the graph in each order of axes that has its shape."""
        right = self.cut(name, self.expected[name])
        fitting = (arrangements(right.shape, value) for value in candidates)
        return right, [array for arrays in fitting for array in arrays if array.size]

    def cut(self, name: str, value: Array) -> Array:
        """Return the rows of a value of the decoder that the graph computes."""
        of_audio = name.removeprefix(INPUT).startswith("encoder.")
        of_audio |= name.endswith(OF_AUDIO)
        return value if of_audio or value.ndim < 2 else value[..., self.rows, :]

    def _variants(self, name: str) -> Iterator[tuple[str, Array]]:
        """Yield what exporters compute instead, and the value that it gives."""
        layer, is_input = name.removeprefix(INPUT), name.startswith(INPUT)
        module, _, end = layer.rpartition(".")
        if is_input and end == "out":
            yield from self._attentions(module)
        elif is_input and end in ("2", "conv2"):
            source = f"{module}.{'0' if end == '2' else 'conv1'}"
            yield from _activated(self.expected[source], self.expected[name])
        elif layer == "encoder.blocks.0.attn_ln" and is_input:
            positions = self.expected["encoder.positional_embedding"]
            x, right = self.expected["encoder.conv2"], self.expected[name] - positions
            for sentence, value in _activated(x.transpose(0, 2, 1), right):
                yield sentence, value + positions
        elif is_input and is_norm(layer):
            yield from self._residuals(layer)
        elif not is_input and is_norm(layer):
            yield from self._norms(layer)

    def _terms(self, name: str) -> dict[str, Array]:
        """Return the parts whose sum a value is."""
        layer, right = name.removeprefix(INPUT), self.expected[name]
        if not name.startswith(INPUT):
            bias = self.expected.get(f"{layer}.bias")
            if bias is None:
                return {"its result": right}
            bias = bias[:, None] if "conv" in layer.rpartition(".")[2] else bias
            row = np.broadcast_to(bias, right.shape)
            return {"the part of its weight": right - row, BIAS: row}
        if not is_norm(layer):
            return {"it": right}
        before, branch = self._residual(layer)
        if branch is None:
            return {"it": right}
        residual = f"the residual beside {before}"
        if not before.startswith("the output"):
            side = layer.partition(".")[0]
            residual = "the embedding of tokens" if side == "decoder" else "the output of conv2"
        return {residual: right - branch, before: branch}

    def _residual(self, layer: str) -> tuple[str, Array | None]:
        """Return what is added to the sum that a layer norm reads last: in words, and its value."""
        part, _, rest = layer.partition(".")
        if rest == "blocks.0.attn_ln":
            table = self.expected.get(f"{part}.positional_embedding")
            right = self.expected[INPUT + layer]
            return "the table of positions", None if table is None else np.broadcast_to(
                table[: right.shape[-2]], right.shape
            )
        block, _, end = layer.rpartition(".")
        if end in ("ln", "ln_post"):
            numbers = [
                int(key.split(".")[2]) for key in self.expected if key.startswith(f"{part}.blocks.")
            ]
            source = f"{part}.blocks.{max(numbers, default=0)}.mlp.2"
        elif end == "attn_ln":
            source = f"{part}.blocks.{int(rest.split('.')[1]) - 1}.mlp.2"
        else:
            is_last = end == "mlp_ln" and f"{block}.cross_attn.out" in self.expected
            source = f"{block}.{'cross_attn' if is_last else 'attn'}.out"
        return f"the output of {source}", self.expected.get(source)

    def _residuals(self, layer: str) -> Iterator[tuple[str, Array]]:
        """Yield other sums of what a layer norm reads: of a branch and what it was computed from."""
        before, branch = self._residual(layer)
        source = before.removeprefix("the output of ")
        if branch is None or source == before:
            return
        norm = f"{source.rpartition('.')[0]}_ln"  # of attn.out, cross_attn.out and mlp.2
        if norm in self.expected:
            yield (
                f"the residual is the output of {norm}, not its input",
                self.expected[norm] + branch,
            )
        right = self.expected[INPUT + layer]
        side, _, number, *_ = source.split(".")
        near = tuple(f"{side}.blocks.{int(number) + step}." for step in (-1, 0, 1))
        for name, value in self.expected.items():
            nearby = name.removeprefix(INPUT)
            if not nearby.startswith(near) or value.shape != right.shape:
                continue
            if name != nearby and is_norm(nearby) and nearby not in (norm, layer):
                yield f"the residual is {name}, and not of {norm}", value + branch
            elif nearby.endswith(BRANCHES) and nearby != source:
                yield f"{nearby} is added in place of {source}", right - branch + value

    def _solved(self, name: str, array: Array, limit: float) -> str:
        """Return in words what follows from a value itself: positions, an epsilon, or a function."""
        layer = name.removeprefix(INPUT)
        if name == f"{INPUT}encoder.conv1":
            return self._spectrogram(array, limit)
        if (
            name != layer
            and layer.endswith("blocks.0.attn_ln")
            and (sentence := self._positions(name, array))
        ):
            return sentence
        if name == layer and is_norm(layer):
            return self._epsilon(layer, array, limit)
        if name != layer and layer.endswith(".attn.out") and layer.startswith("decoder."):
            return self._seen(layer.removesuffix(".out"), array)
        if name != layer and layer.endswith(("mlp.2", "conv2")):
            source = f"{layer[:-1]}0" if layer.endswith("mlp.2") else "encoder.conv1"
            return _function(self.cut(name, self.expected[source]), array)
        if name == f"{INPUT}encoder.blocks.0.attn_ln":
            source_value = self.expected["encoder.conv2"].transpose(0, 2, 1)
            return _function(source_value, array - self.expected["encoder.positional_embedding"])
        return ""

    def _spectrogram(self, array: Array, limit: float) -> str:
        """Return in words by what a spectrogram is multiplied, and what is added; empty: something else."""
        mel = self.expected["mel"]
        factor, added = np.polyfit(mel.reshape(-1), array.reshape(-1), 1)
        if error_of(array, factor * mel + added) > limit:
            return ""
        return f"the spectrogram is multiplied by {factor:.4g}, and {added:.4g} is added"

    def _epsilon(self, layer: str, array: Array, limit: float) -> str:
        """Return in words which epsilon gives the output of a layer norm; empty: none does."""
        arrays = self._norm_arrays(layer)
        if arrays is None:
            return ""
        x, weight, bias = self.cut(layer, arrays[0]), *arrays[1:]
        variance, power = x.var(-1), (((array - bias) / weight) ** 2).mean(-1)
        epsilon = float(np.median(variance / power - variance))
        value = (x - x.mean(-1, keepdims=True)) / np.sqrt(variance[..., None] + epsilon)
        if not epsilon > 0 or error_of(value * weight + bias, array) > limit:
            return ""
        return f"the layer norm's epsilon is {epsilon:.2g}, not {EPSILON:g}"

    def _positions(self, name: str, array: Array) -> str:
        """Return in words which positions are added to the embeddings; empty: the right ones, or none."""
        part = name.removeprefix(INPUT).partition(".")[0]
        table = self.expected.get(f"{part}.positional_embedding")
        if table is None:
            return ""
        right = self.expected[name]
        added = array - self.cut(name, right - table[: right.shape[-2]])
        added = added.reshape(-1, table.shape[1])
        places = np.argmax(added @ table.T - (table**2).sum(1) / 2, axis=1)
        expected = self.cut(name, np.arange(right.shape[-2])[None, :, None]).reshape(-1)
        # Embeddings of 8 bits are not what was subtracted.
        limit = max(EXPLAINED, LEFT * error_of(table[expected], added))
        if error_of(table[places], added) > limit or (places == expected).all():
            return ""
        steps = np.unique(places - expected)
        if len(steps) == 1 and abs(steps[0]) == 1:
            return f"the positions are one too {'late' if steps[0] > 0 else 'early'}"
        return f"the positions are {listed(places)}, in place of {listed(expected)}"

    def _seen(self, module: str, array: Array) -> str:
        """Return in words which tokens a token sees, or how much of all; empty: as many as it must.

        What attention gives each key follows from its result if a head has fewer tokens than channels.
        """
        queries, keys, values = (
            heads_of(self.expected[f"{module}.{part}"], self.head_width)
            for part in ("query", "key", "value")
        )
        joined = heads_of(array, self.head_width)
        n = values.shape[1]
        if n > self.head_width or len(joined) != len(values):
            return ""
        attention = joined @ np.linalg.pinv(values.astype(np.float64))  # (H, rows, n)
        if error_of(joined, attention @ values) > EXPLAINED:
            return ""
        scores = queries @ keys.transpose(0, 2, 1) * self.head_width**-0.5 + _causal(n)
        right = _softmax(scores, 2)[:, self.rows]
        last = attention.shape[1] - 1
        seen, expected = (np.abs(part[:, last]).max(axis=0) > SEEN for part in (attention, right))
        if (seen != expected).any():
            shown, must = (listed(np.flatnonzero(part)) for part in (seen, expected))
            return f"the last token sees tokens {shown}, and not {must}"
        if np.abs((sums := attention.sum(axis=2)) - 1).max() > SEEN:
            return f"what attention gives all tokens is {sums[0, last]:.3g}, and not 1"
        return ""

    def _attentions(self, module: str) -> Iterator[tuple[str, Array]]:
        """Yield other forms of attention, and the joined heads (1, n, d) that they give."""
        q, k, v = (self.expected[f"{module}.{part}"] for part in ("query", "key", "value"))
        is_causal = module.startswith("decoder.") and ".attn" in module
        right = {
            "queries": q,
            "keys": k,
            "values": v,
            "scale": float(self.head_width) ** -0.5,
            "mask": _causal(q.shape[-2]) if is_causal else None,
            "head_width": self.head_width,
        }
        forms = [*_scores(right), *_masks(right), *_heads(right)]
        others = list(self._of_other_blocks(module))
        forms += [(f"the {what}", changes) for what, changes in others]
        if is_causal and self.rows.start:
            forms += _cached(right, self.rows.start, others)
        for sentence, changes in forms:
            settings = right | changes
            if settings["queries"].shape == q.shape and settings["values"].shape == v.shape:
                yield sentence, _attention(**settings)

    def _of_other_blocks(self, module: str) -> Iterator[Form]:
        """Yield keys, values and both of the attention of the same kind in each other block."""
        begin, _, rest = module.partition(".blocks.")
        end = rest.partition(".")[2]
        for layer in self.expected:
            other = layer.removesuffix(".key")
            if re.fullmatch(rf"{begin}\.blocks\.\d+\.{end}\.key", layer) and other != module:
                keys, values = self.expected[layer], self.expected[f"{other}.value"]
                yield f"keys are those of {layer}", {"keys": keys}
                yield f"values are those of {other}.value", {"values": values}
                yield f"keys and values are those of {other}", {"keys": keys, "values": values}

    def norm_of_another(self, layer: str, array: Array) -> str:
        """Return the other layer norm whose weight and bias a value is normalized with; empty: none.

        Args:
            layer: the norm whose input is normalized.
            array: the value.
        """
        x = self.expected.get(INPUT + layer)
        if x is None:
            return ""
        x = self.cut(INPUT + layer, x)
        normalized = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + EPSILON)
        for name in self.expected:
            arrays = self._norm_arrays(name) if is_norm(name) and name != layer else None
            if arrays is None or arrays[1].shape != x.shape[-1:]:
                continue
            right = normalized * arrays[1] + arrays[2]
            if any(error_of(right, a) < EXPLAINED for a in arrangements(right.shape, array)):
                return name
        return ""

    def _norm_arrays(self, layer: str) -> tuple[Array, Array, Array] | None:
        """Return the input, the weight and the bias of a layer norm; None: one of them is not known."""
        x = self.expected.get(INPUT + layer)
        weight, bias = (self.expected.get(f"{layer}.{kind}") for kind in ("weight", "bias"))
        return None if x is None or weight is None or bias is None else (x, weight, bias)

    def _norms(self, layer: str) -> Iterator[tuple[str, Array]]:
        """Yield other forms of a layer norm, and their outputs."""
        arrays, right = self._norm_arrays(layer), self.expected[layer]
        if arrays is None:
            return
        x, weight, bias = arrays
        centered, variance = x - x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
        root = np.sqrt(variance + EPSILON)
        n = x.shape[-1]
        unbiased = np.sqrt(variance * n / (n - 1) + EPSILON)
        square = np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON)
        yield (
            "it is the root mean square norm: the mean is not subtracted",
            x / square * weight + bias,
        )
        yield "the mean is not subtracted", x / root * weight + bias
        yield "the variance is divided by n - 1, not n", centered / unbiased * weight + bias
        yield "the variance is not divided by", centered * weight + bias
        yield (
            "the epsilon is outside of the root",
            centered / (np.sqrt(variance) + EPSILON) * weight + bias,
        )
        places = (x - x.mean(-2, keepdims=True)) / np.sqrt(x.var(-2, keepdims=True) + EPSILON)
        yield "it normalizes over the places, not the channels", places * weight + bias
        yield "the layer norm is missing", x
        yield "the layer norm's weight is not used", (right - bias) / weight + bias


def combined(terms: Mapping[str, Array], array: Array, limit: float) -> str:
    """Return in words with which factors a value is the sum of terms; empty: it is not, or all are 1.

    Args:
        terms: in words -> its value.
        array: the sum.
        limit: its relative error, at most.
    """
    flat = np.stack([term.reshape(-1) for term in terms.values()]).astype(np.float64)
    if not np.isfinite(array).all() or not array.any():
        return ""
    factors, *_ = np.linalg.lstsq(flat.T, array.reshape(-1).astype(np.float64), rcond=None)
    if error_of(array, (factors @ flat).reshape(array.shape)) > limit:
        return ""
    pairs = zip(terms, factors, strict=True)
    return "; ".join(
        f"{label} {_multiplied(factor)}" for label, factor in pairs if abs(factor - 1) >= EXPLAINED
    )


def _multiplied(factor: float) -> str:
    if abs(factor) < EXPLAINED:
        return "is missing"
    if abs(factor + 1) < EXPLAINED:
        return "has the wrong sign"
    twice = ", or added twice" if abs(factor - 2) < EXPLAINED else ""
    return f"is multiplied by {factor:.4g}{twice}"


def _activated(x: Array, right: Array) -> Iterator[tuple[str, Array]]:
    """Yield other activations of a value, and what they give; `right` is its GELU."""
    for name, function in ACTIVATIONS.items():
        yield f"{name} is computed in place of GELU", function(x)
    yield "GELU is computed twice", ACTIVATIONS["GELU's tanh form"](right)


def _function(x: Array, array: Array) -> str:
    """Return in words what a value is as a function of another, place by place; empty: it is none."""
    order = np.argsort(x.reshape(-1))
    inputs, outputs = x.reshape(-1)[order], array.reshape(-1)[order]
    steps, rises = np.diff(inputs), np.abs(np.diff(outputs))
    if not np.isfinite(outputs).all() or np.mean(rises <= STEEPEST * steps + 1e-5) < LEAST_SMOOTH:
        return ""
    shown = ", ".join(
        f"f({point:g}) = {np.interp(point, inputs, outputs):.2f}"
        for point in POINTS
        if inputs[0] <= point <= inputs[-1]
    )
    return f"another activation is computed in place of GELU: {shown}"


def _scores(right: Mapping[str, Any]) -> Iterator[Form]:
    """Yield what is computed from the scores, or in place of them."""
    queries, keys, values, scale = (right[key] for key in ("queries", "keys", "values", "scale"))
    width = queries.shape[-1]
    yield "the scores are not divided by the root of a head's width", {"scale": 1.0}
    yield "the scores are divided by the root of the model's width", {"scale": width**-0.5}
    yield "the scores are divided twice by the root of a head's width", {"scale": scale**2}
    yield "the scores have the wrong sign", {"scale": -scale}
    yield "keys and values are exchanged", {"keys": values, "values": keys}
    yield "the keys are used in place of the values, too", {"values": keys}
    yield "the values are used in place of the keys, too", {"keys": values}
    yield "queries and keys are exchanged", {"queries": keys, "keys": queries}
    yield "the heads are joined without their order of axes", {"is_joined": False}
    yield "the softmax is over the queries, not the keys", {"axis": 1}
    yield "the softmax is over queries and keys, not the keys alone", {"axis": (1, 2)}
    yield "the softmax is over all heads, queries and keys", {"axis": (0, 1, 2)}
    yield "the scores' softmax is missing", {"axis": None}
    for power in (-0.75, -0.25, 0.25, 0.75):
        sentence = f"the scores are multiplied by a head's width to the power of {power:g}"
        yield sentence, {"scale": scale * float(right["head_width"]) ** power}
    for step in (1, 1.5):
        for power in range(-4, 5):
            if (factor := step * 2.0**power) != 1:
                yield f"the scores are multiplied by {factor:g}", {"scale": scale * factor}
    for part, array in (("queries", queries), ("keys", keys), ("values", values)):
        n, d = array.shape[-2:]
        apart = array.reshape(1, n, right["head_width"], -1).swapaxes(2, 3).reshape(array.shape)
        yield (
            f"the heads of the {part} are every {d // right['head_width']}th channel",
            {part: apart},
        )
        shape = (1, d // right["head_width"], n, right["head_width"])
        joined = array.reshape(shape).swapaxes(1, 2).reshape(array.shape)
        yield f"the {part} are split into heads without their order of axes", {part: joined}


def _masks(right: Mapping[str, Any]) -> Iterator[Form]:
    """Yield other masks of self-attention, and keys and values that the right one would hide."""
    keys, values, n = right["keys"], right["values"], right["queries"].shape[-2]
    if right["mask"] is None:
        if keys.shape == right["queries"].shape:
            yield "the attention is causal: later places are hidden", {"mask": _causal(n)}
        else:
            yield from _hidden_frames(n, keys.shape[-2])
        return
    yield "the mask is missing: a token sees later ones", {"mask": None}
    yield "the mask is behind the softmax, not before it", {"is_late": True}
    yield "the mask lets a token see the next one", {"mask": _causal(n, 1)}
    for low in (LOWEST, LOWEST_HALF):  # of which a token that sees nothing shows which
        without_itself = np.maximum(_causal(n, -1), low)
        yield "the mask hides the token itself, too", {"mask": without_itself}
        yield "the mask is inverted: a token sees later ones only", {"mask": without_itself.T}
    yield "a token sees itself only", {"mask": np.where(np.eye(n) > 0, 0, LOWEST)}
    yield "the newest key is before the earlier ones", {"keys": np.roll(keys, 1, 1)}
    yield "the newest value is before the earlier ones", {"values": np.roll(values, 1, 1)}
    for added in (-1, -10, -100):
        mask = np.triu(np.full((n, n), added, np.float32), 1)
        yield f"the mask adds {added:g}: later tokens are not hidden", {"mask": mask}
    yield "the mask is transposed", {"mask": _causal(n).T}
    for count in range(1, min(n, WIDEST)):
        early = np.where(np.arange(n) < count, LOWEST, 0)
        yield f"the mask hides the first {count} tokens", {"mask": np.minimum(_causal(n), early)}
        before = np.minimum(_causal(n), _causal(n, -count - 1).T)
        yield f"a token sees itself and the {count} before it only", {"mask": before}


def _hidden_frames(n: int, n_keys: int) -> Iterator[Form]:
    """Yield masks that hide the first or the last frames from cross-attention, in steps of 0.5 s."""
    for count in range(FRAMES, n_keys, FRAMES):
        is_first = np.broadcast_to(np.arange(n_keys) < count, (n, n_keys))
        yield f"a token sees the first {count} frames only", {"mask": np.where(is_first, 0, LOWEST)}
        yield f"the first {count} frames are hidden", {"mask": np.where(is_first, LOWEST, 0)}


def _cached(right: Mapping[str, Any], n_cached: int, others: Sequence[Form]) -> Iterator[Form]:
    """Yield other keys and values of the tokens in the cache.

    Args:
        right: arguments of `_attention`.
        n_cached: tokens in the cache.
        others: keys and values of other blocks.
    """

    def joined(old: Array, new: Array) -> Array:
        return np.concatenate([old[:, :n_cached], new[:, n_cached:]], 1)

    keys, values = right["keys"], right["values"]
    yield (
        "keys and values of the cache are exchanged",
        {"keys": joined(values, keys), "values": joined(keys, values)},
    )
    for key, array in (("keys", keys), ("values", values)):
        yield f"the {key} of the cache are 0", {key: joined(array * 0, array)}
        for step, word in ((-1, "early"), (1, "late")):
            moved = np.roll(array[:, :n_cached], step, 1)
            moved[:, -1 if step < 0 else 0] = 0
            sentence = f"the {key} of the cache are one place too {word}"
            yield sentence, {key: joined(moved, array)}
    for what, changes in others:
        old = {key: joined(array, right[key]) for key, array in changes.items()}
        yield f"the cache's {what}", old
    n = keys.shape[1]
    again = np.concatenate([_causal(n)[:n_cached], _causal(n)[: n - n_cached]])
    yield f"the mask {UNCOUNTED}", {"mask": again}
    new = np.where(np.arange(n) < n_cached, 0, LOWEST)
    yield "the new tokens are hidden, also from themselves", {"mask": right["mask"] + new}


def _heads(right: Mapping[str, Any]) -> Iterator[Form]:
    """Yield other numbers of heads, whose scores are scaled by their own width or by the right one."""
    head_width, width = right["head_width"], right["queries"].shape[-1]
    for new_width in (head_width // 2, head_width * 2, width):
        if 0 < new_width <= width and width % new_width == 0 and new_width != head_width:
            sentence = f"attention has {width // new_width} heads, and not {width // head_width}"
            for scale in (right["scale"], float(new_width) ** -0.5):
                yield sentence, {"head_width": new_width, "scale": scale}


def _attention(
    *,
    queries: Array,
    keys: Array,
    values: Array,
    scale: float,
    mask: Array | None,
    head_width: int,
    axis: int | tuple[int, ...] | None = 2,
    is_joined: bool = True,
    is_late: bool = False,
) -> Array:
    """Return the joined heads (1, n, d) of queries (1, n, d), keys and values (1, S, d).

    Args:
        queries, keys, values: of all heads.
        scale: of the scores.
        mask: (n, S), added to them; None: none is.
        head_width: of one head.
        axis: of the scores (H, n, S) over which the softmax is; None: there is none.
        is_joined: whether the heads' axes are ordered before they are joined.
        is_late: whether the mask hides what the softmax returns.
    """
    q, k, v = (heads_of(x, head_width) for x in (queries, keys, values))
    scores = q @ k.transpose(0, 2, 1) * np.float32(scale)
    if mask is not None and not is_late:
        scores = scores + mask
    if axis is not None:
        scores = _softmax(scores, axis)
    if mask is not None and is_late:
        scores = np.where(mask < 0, 0, scores)
    joined = scores @ v
    joined = joined.transpose(1, 0, 2) if is_joined else joined
    return np.ascontiguousarray(joined).reshape(1, q.shape[1], -1).astype(np.float32)


def _softmax(scores: Array, axis: int | tuple[int, ...]) -> Array:
    powers = np.exp(scores - scores.max(axis, keepdims=True))
    weights: Array = powers / powers.sum(axis, keepdims=True)
    return weights


def _causal(n: int, later: int = 0) -> Array:
    """Return a mask (n, n) that shows a token itself, those before it, and some later ones."""
    return np.triu(np.full((n, n), LOWEST, np.float32), 1 + later)


def is_norm(layer: str) -> bool:
    """Return whether a layer is a layer norm, by the end of its name."""
    return layer.rpartition(".")[2] in ("attn_ln", "cross_attn_ln", "mlp_ln", "ln", "ln_post")
