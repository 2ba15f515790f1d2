"""A program with the matrices of an adapter as inputs; see `program/low_rank.py`."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, signature
from typing import Any, cast

import torch
from torch import Tensor, nn

from whisperport.model.checkpoint.names import from_huggingface
from whisperport.program.low_rank import LORA_A, LORA_B, AdaptedLayer


class AdaptedLinear(nn.Module):
    """A linear layer plus x·A·B.

    It is no hook of the layer: ExecuTorch takes all that runs inside of a linear layer for a part of it.
    """

    def __init__(self, layer: nn.Module, a: Tensor, b: Tensor) -> None:
        super().__init__()
        self.layer, self._matrices = layer, (a, b)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output for x (..., in) plus x·A·B."""
        a, b = self._matrices
        rows = x if x.dim() == 3 else x[None]
        added = torch.bmm(torch.bmm(rows, a), b)
        output = cast(Tensor, self.layer(x))
        return output + (added if x.dim() == 3 else added[0])


class Adaptable(nn.Module):
    """A program with the matrices of an adapter as its last arguments.

    `forward` has the arguments of the program's, then the list of all A (1, in, R) and the list of all
    B (1, R, out), one for each layer.

    Args:
        program: the program, with layers of `model`.
        model: a `Whisper` model.
        layers: those that an adapter may change.
    """

    def __init__(
        self, program: nn.Module, model: nn.Module, layers: Sequence[AdaptedLayer]
    ) -> None:
        super().__init__()
        self.program = program
        self._adapted = (
            partial(with_adapter, model),
            tuple(layers),
        )  # `model` is no part of the program
        # torch.export names the inputs of a graph after the parameters.
        own = signature(program.forward)
        further = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in (LORA_A, LORA_B)]

        def forward(*arguments: Any) -> Any:
            return self._run(*arguments)

        parameters = [*own.parameters.values(), *further]
        forward.__signature__ = own.replace(parameters=parameters)  # type: ignore[attr-defined]
        self.forward = forward

    def _run(self, *arguments: Any) -> Any:
        *own, a, b = arguments
        adapted, layers = self._adapted
        with adapted(dict(zip(layers, zip(a, b, strict=True), strict=True))):
            return self.program(*own)


@contextmanager
def with_adapter(
    model: nn.Module, matrices: Mapping[AdaptedLayer, tuple[Tensor, Tensor]]
) -> Iterator[None]:
    """Let a `Whisper` model compute with an adapter, until the block ends.

    Args:
        model: in torch.
        matrices: A (1, in, R) and B (1, R, out) of each layer.
    """
    before: list[tuple[dict[str, nn.Module | None], str, nn.Module]] = []
    try:
        for layer, (a, b) in matrices.items():
            parent, _, name = _own_name(layer.name).rpartition(".")
            modules = model.get_submodule(parent)._modules
            before.append((modules, name, linear := cast(nn.Module, modules[name])))
            modules[name] = AdaptedLinear(linear, a, b)
        yield
    finally:
        for modules, name, linear in before:
            modules[name] = linear


def _own_name(name: str) -> str:
    """Return openai-whisper's name of a layer by its name in transformers."""
    own = from_huggingface(f"{name}.weight")
    assert own is not None
    return own.removesuffix(".weight")
