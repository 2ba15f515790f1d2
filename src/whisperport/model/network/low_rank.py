"""A program with the matrices of an adapter as inputs; see `program/low_rank.py`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from whisperport.model.checkpoint.names import from_huggingface
from whisperport.program.low_rank import LORA_A, LORA_B, AdaptedLayer


class Adaptable(nn.Module):
    """A program that adds x·A·B to the output of some of its linear layers.

    `forward` has the arguments of the program's, then the list of all A (1, in, R) and the list of all
    B (1, R, out), one for each layer.

    Args:
        program: the program.
        layers: those of its linear layers that an adapter may change.
    """

    def __init__(self, program: nn.Module, layers: Sequence[nn.Linear]) -> None:
        super().__init__()
        self.program, self._layers = program, tuple(layers)
        # torch.export names the inputs of a graph after the parameters.
        own = signature(program.forward)
        further = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in (LORA_A, LORA_B)]
        parameters = [*own.parameters.values(), *further]

        def forward(*arguments: Any) -> Any:
            return self._run(*arguments)

        forward.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _run(self, *arguments: Any) -> Any:
        *own, a, b = arguments
        with ExitStack() as hooks:
            for layer, *pair in zip(self._layers, a, b, strict=True):
                hooks.callback(layer.register_forward_hook(partial(_with_product, pair)).remove)
            return self.program(*own)


def layers_of(model: nn.Module, layers: Iterable[AdaptedLayer]) -> list[nn.Linear]:
    """Return the linear layers of a `Whisper` model by their names in transformers."""
    return [cast(nn.Linear, model.get_submodule(_own_name(layer.name))) for layer in layers]


@contextmanager
def with_adapter(
    model: nn.Module, matrices: Mapping[AdaptedLayer, tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Let a `Whisper` model compute with an adapter, until the block ends.

    Args:
        model: in torch.
        matrices: A (1, in, R) and B (1, R, out) of each layer.
    """
    with ExitStack() as hooks:
        for layer, pair in zip(layers_of(model, matrices), matrices.values(), strict=True):
            hooks.callback(layer.register_forward_hook(partial(_with_product, pair)).remove)
        yield


def _own_name(name: str) -> str:
    own = from_huggingface(f"{name}.weight")
    assert own is not None
    return own.removesuffix(".weight")


def _with_product(
    matrices: Sequence[Tensor], _: nn.Module, inputs: tuple[Tensor], output: Tensor
) -> Tensor:
    """Return the output of a layer plus the product of its input and both matrices."""
    a, b = matrices
    rows = inputs[0] if inputs[0].dim() == 3 else inputs[0][None]
    # XNNPACK does not delegate a `matmul` whose second matrix is no constant, and it does a `bmm`.
    return output + torch.bmm(torch.bmm(rows, a), b).reshape(output.shape)
