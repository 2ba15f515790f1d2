"""The faults that exporters make in the graphs of a checkpoint, each as a change of the model in torch.

Some change positions or the mask, others a module. A change is made in a model of its own, whose weights
share the checkpoint's memory.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from whisperport.build.judge.operations import UNCOUNTED

if TYPE_CHECKING:  # it needs torch
    from torch import Tensor

    from whisperport.model.checkpoint.checkpoint import Checkpoint
    from whisperport.model.network.whisper import Whisper
    from whisperport.program.dims import Dims

MOST_LAYERS = 8  # whose keys and values are exchanged, one layer after the other
# What masks of exported graphs hold: the lowest numbers of float16 and float32.
LOWEST = -65504.0, float(np.finfo(np.float32).min)


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault that exporters make.

    Attributes:
        sentence: what the graphs do.
        change: makes the fault in a model of its own.
        in_encoder: whether the encoder is changed, too.
        positions: (S,) of the tokens; None: the right ones.
        mask: (S, S) of self-attention; None: the right one.
        n_rows: how many of the first logits are compared; None: all.
    """

    sentence: str
    change: "Callable[[Whisper], None]" = lambda _model: None
    in_encoder: bool = False
    positions: "Tensor | None" = None
    mask: "Tensor | None" = None
    n_rows: int | None = None


def faults(
    checkpoint: "Checkpoint", tokens: "Tensor", n_prompt: int, swapped: Sequence[str]
) -> Iterator[Fault]:
    """Yield the faults that are tried, the most frequent first.

    Args:
        checkpoint: its sizes are used.
        tokens: (S,), of which the first run decodes `n_prompt`, and then one after the other follows.
        swapped: weights that may be used with their axes swapped.
    """
    import torch

    dims = checkpoint.dims
    places = torch.arange(len(tokens))
    later = places >= n_prompt
    from_0 = torch.where(later, 0, places)
    yield from _of_positions(places, later, from_0, dims.n_text_ctx - 1)
    yield from _of_masks(later, from_0, n_prompt)
    yield from _of_decoder_attention(range(dims.n_text_layer))
    yield from _of_encoder()
    for name in swapped:
        yield Fault(
            f"{name} is used with its axes swapped: no other matrix is stored so",
            partial(_swap_axes, name=name),
            in_encoder=name.startswith("encoder."),
        )
    for sides in (("decoder",), ("encoder",), ("encoder", "decoder")):
        yield from _of_sides(dims, sides)
    yield Fault("the audio does not reach the decoder", _without_audio, in_encoder=True)


def _of_positions(
    places: "Tensor", later: "Tensor", from_0: "Tensor", last: int
) -> Iterator[Fault]:
    """Yield faults in the positions of tokens.

    Args:
        places: (S,) of the tokens: the right positions.
        later: (S,) whether a token is behind the first run.
        from_0: (S,) positions that are 0 there.
        last: position of the checkpoint.
    """
    import torch

    for step, word in ((1, "late"), (-1, "early")):
        shifted = (places + step).clamp(0, last)
        yield Fault(f"the positions of all tokens are one too {word}", positions=shifted)
        yield Fault(
            f"the positions of tokens after the first run are one too {word}",
            positions=torch.where(later, shifted, places),
        )
    yield Fault(
        "the positions of tokens after the first run begin at 0 again: the cache is not counted",
        positions=from_0,
    )


def _of_masks(later: "Tensor", from_0: "Tensor", n_prompt: int) -> Iterator[Fault]:
    """Yield faults in the mask of self-attention, and in the cache, which masks do in one run.

    Args:
        later, from_0: as those of `_of_positions`.
        n_prompt: tokens of the first run.
    """
    import torch

    n = len(later)
    hidden = torch.full((n, n), LOWEST[0])
    causal = hidden.triu(1)
    in_first_run = ~later[:, None] & ~later[None]
    yield Fault(
        "the mask of self-attention is missing: a token sees later ones of the same run",
        mask=torch.where(in_first_run, 0, causal),
    )
    for lowest in LOWEST:
        yield Fault(
            "the mask of self-attention is inverted: a token sees later ones only",
            mask=torch.where(
                in_first_run,
                torch.full((n, n), lowest).tril(0),
                torch.where(later[:, None], causal, -torch.inf),
            ),
            n_rows=n_prompt - 1,
        )
    same_run = torch.eye(n, dtype=torch.bool) | in_first_run
    for positions in (None, from_0):  # where the cache stays empty, its length is 0
        yield Fault(
            "the cache is not read: a token sees those of its own run only",
            mask=torch.where(same_run, causal, hidden),
            positions=positions,
        )
    first = torch.arange(n) == 0
    yield Fault(
        f"the mask of self-attention {UNCOUNTED}",
        mask=torch.where(later[:, None] & ~first[None], LOWEST[0], causal),
    )
    prompt_or_self = same_run | ~later[None]
    yield Fault(
        "the cache is not updated after the first run: a token does not see those between",
        mask=torch.where(prompt_or_self, causal, hidden),
    )


def _of_decoder_attention(layers: Sequence[int]) -> Iterator[Fault]:
    """Yield faults in the decoder's attention, of all layers or of one."""
    for kind, name in (("attn", "self"), ("cross_attn", "cross")):
        scores = f"scores of {name}-attention are not divided by the root of a head's width"
        exchanged = f"keys and values of {name}-attention are exchanged in"
        yield Fault(
            f"{exchanged} every decoder layer", partial(_exchange, kind=kind, layers=layers)
        )
        for layer in layers[:MOST_LAYERS]:
            yield Fault(
                f"{exchanged} decoder layer {layer}", partial(_exchange, kind=kind, layers=[layer])
            )
        for layer in layers[:MOST_LAYERS]:
            yield Fault(
                f"{scores} in decoder layer {layer}",
                partial(_scale, sides=[f"decoder.blocks.{layer}.{kind}"]),
            )


def _of_encoder() -> Iterator[Fault]:
    """Yield faults that only an encoder has."""
    yield Fault("the encoder's attention is causal: a frame sees no later one", _hide_later, True)
    for name in ("conv1", "conv2"):
        for pads, where in (((2, 0), "before"), ((0, 2), "after")):
            yield Fault(
                f"encoder.{name}: the convolution's padding is {where} the frames, not half on each side",
                partial(_pad, name=name, pads=pads),
                in_encoder=True,
            )
        yield Fault(
            f"encoder.{name}: the convolution has the dilation 2, not 1",
            partial(_dilate, name=name),
            in_encoder=True,
        )


def _of_sides(dims: "Dims", sides: Sequence[str]) -> Iterator[Fault]:
    """Yield faults that the encoder, the decoder or both may have."""
    from torch import nn

    part, fault = " and ".join(sides), partial(Fault, in_encoder="encoder" in sides)
    for activation, word in ((nn.GELU("tanh"), "GELU's tanh form"), (nn.ReLU(), "ReLU")):
        instead = f"{part}: {word} is computed in place of GELU"
        blocks = partial(_replace, sides=sides, activation=activation)
        yield fault(instead, blocks)
        if "encoder" in sides:
            behind = f"{instead}, also behind the convolutions"
            yield fault(behind, partial(_replace_all, activation=activation, blocks=blocks))
    for epsilon in (1e-6, 1e-12, 1e-3, 1e-8):
        yield fault(
            f"{part}: the layer norms have the epsilon {epsilon:g} in place of 1e-05",
            partial(_set_epsilon, sides=sides, value=epsilon),
        )
    n_head = dims.n_text_head if sides == ("decoder",) else dims.n_audio_head
    for heads in (n_head // 2, n_head * 2, 1):
        if heads not in (0, n_head) and dims.n_text_state % heads == 0:
            yield fault(
                f"{part}: attention has {heads} heads; the checkpoint has {n_head}",
                partial(_split, sides=sides, heads=heads),
            )
    for exponent, word in ((0.5, "not divided"), (-0.5, "divided twice")):
        yield fault(
            f"{part}: attention scores are {word} by the root of a head's width",
            partial(_scale, sides=sides, exponent=exponent),
        )
    yield fault(f"{part}: no positions are added", partial(_without_positions, sides=sides))


def _part(model: "Whisper", name: str) -> Any:
    return model.get_submodule(name)


def _exchange(model: "Whisper", kind: str, layers: Iterable[int]) -> None:
    for layer in layers:
        attention = _part(model, f"decoder.blocks.{layer}.{kind}")
        attention.key, attention.value = attention.value, attention.key


def _replace(model: "Whisper", sides: Sequence[str], activation: Any) -> None:
    for side in sides:
        for block in _part(model, side).blocks:
            block.mlp[1] = activation


def _replace_all(model: "Whisper", activation: Any, blocks: Callable[["Whisper"], None]) -> None:
    """Replace GELU in the blocks, and where the encoder calls it as a function, behind convolutions."""
    blocks(model)
    encoder = cast(Any, model.encoder)
    encoder.forward = partial(_without_gelu, encoder.forward, activation)


def _without_gelu(forward: Callable[..., Any], activation: Any, mel: "Tensor") -> Any:
    from torch.nn.functional import gelu
    from torch.overrides import TorchFunctionMode

    class InPlaceOfGelu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return activation(*args) if func is gelu else func(*args, **(kwargs or {}))

    with InPlaceOfGelu():
        return forward(mel)


def _set_epsilon(model: "Whisper", sides: Sequence[str], value: float) -> None:
    from torch import nn

    for module in _modules(model, sides, nn.LayerNorm):
        module.eps = value


def _split(model: "Whisper", sides: Sequence[str], heads: int) -> None:
    for module in _attentions(model, sides):
        module.head_width = module.n_head * module.head_width // heads
        module.n_head = heads


def _scale(model: "Whisper", sides: Sequence[str], exponent: float = 0.5) -> None:
    for module in _attentions(model, sides):
        for name in ("weight", "bias"):
            _multiply(module.query, name, module.head_width**exponent)


def _hide_later(model: "Whisper") -> None:
    import torch

    def attend(module: Any, q: "Tensor", k: "Tensor", v: "Tensor") -> "Tensor":
        scores = torch.bmm(q, k)
        later = torch.full_like(scores[0], -torch.inf).triu(1)
        merged: Tensor = module.merge(torch.bmm((scores + later).softmax(-1), v))
        return merged

    for module in _attentions(model, ("encoder",)):
        module.attend = partial(attend, module)


def _pad(model: "Whisper", name: str, pads: tuple[int, int]) -> None:
    from torch import nn

    convolution = cast(Any, getattr(model.encoder, name))
    convolution.padding = (0,)
    setattr(model.encoder, name, nn.Sequential(nn.ConstantPad1d(pads, 0.0), convolution))


def _dilate(model: "Whisper", name: str) -> None:
    convolution = cast(Any, getattr(model.encoder, name))
    convolution.dilation, convolution.padding = (2,), (2,)


def _without_positions(model: "Whisper", sides: Sequence[str]) -> None:
    for side in sides:
        _multiply(_part(model, side), "positional_embedding", 0)


def _swap_axes(model: "Whisper", name: str) -> None:
    from torch import nn

    module, _, kind = name.rpartition(".")
    swapped = getattr(_part(model, module), kind).T.contiguous()
    setattr(_part(model, module), kind, nn.Parameter(swapped, requires_grad=False))


def _attentions(model: "Whisper", sides: Sequence[str]) -> Iterator[Any]:
    from whisperport.model.network.attention import Projections

    return _modules(model, sides, Projections)


def _modules(model: "Whisper", sides: Sequence[str], kind: type) -> Iterator[Any]:
    modules = (module for side in sides for module in _part(model, side).modules())
    return (module for module in modules if isinstance(module, kind))


def _multiply(module: Any, name: str, factor: float) -> None:
    """Multiply a parameter of this model alone: its memory is the checkpoint's."""
    from torch import nn

    setattr(module, name, nn.Parameter(getattr(module, name) * factor, requires_grad=False))


def _without_audio(model: "Whisper") -> None:
    encoder = cast(Any, model.encoder)
    encoder.forward = lambda mel: mel.new_zeros(1, model.dims.n_audio_ctx, model.dims.n_audio_state)
