"""An engine whose programs run in eager torch: the decoding of a checkpoint without any lowered file."""

import inspect
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from whisperport.program.generation import Generation
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import Engine

if TYPE_CHECKING:  # boards have no torch
    from torch import Tensor

    from whisperport.model.network.whisper import Whisper
    from whisperport.model.trace.program import Untraced


def eager_engine(model: "Whisper", generation: Generation) -> Engine:
    """Return an engine over the model in eager torch, with the programs of every bundle.

    Args:
        model: the model of a checkpoint.
        generation: its decoding settings. Without alignment heads, those of the last layer stand for them:
            the engine decodes, but its word timestamps mean nothing.
    """
    from whisperport.model.trace.variants import untraced_programs
    from whisperport.model.trace.whisper import Parts

    heads = generation.alignment_heads or ((model.dims.n_text_layer - 1, 0),)
    runners = {p.name: EagerRunner(p) for p in untraced_programs(Parts(model, heads))}
    embedding = model.decoder.token_embedding.weight.detach().numpy()
    positions = model.decoder.positional_embedding.detach().numpy()
    return Engine(model.dims, generation, runners, embedding, positions)


class EagerRunner(Runner):
    """Runs a program that is not traced, in eager torch."""

    def __init__(self, program: "Untraced") -> None:
        self._module = program.module.eval()
        self._groups = [len(x) if isinstance(x, list) else 0 for x in program.inputs]
        names = inspect.signature(program.module.forward).parameters
        inputs = [
            _spec(name, tensor)
            for parameter, argument in zip(names, program.inputs, strict=False)
            for name, tensor in _named(parameter, argument)
        ]
        outputs = zip(program.outputs, self._call(program.inputs), strict=True)
        specs = tuple(_spec(name, tensor) for name, tensor in outputs)
        super().__init__(ProgramSpec(program.name, tuple(inputs), specs))

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        import torch

        tensors = iter([torch.from_numpy(array) for array in inputs])
        arguments = [
            [next(tensors) for _ in range(count)] if count else next(tensors)
            for count in self._groups
        ]
        return [tensor.numpy() for tensor in self._call(arguments)]

    def _call(self, arguments: Sequence[Any]) -> "list[Tensor]":
        import torch

        with torch.no_grad():
            return list(_flat(self._module(*arguments)))


def _named(parameter: str, argument: Any) -> "Iterator[tuple[str, Tensor]]":
    """Yield the tensors of an argument by name; the members of a list as `self_k_0`, `self_k_1`."""
    if isinstance(argument, list):
        yield from ((f"{parameter}_{i}", tensor) for i, tensor in enumerate(argument))
    else:
        yield parameter, argument


def _flat(outputs: Any) -> "Iterator[Tensor]":
    if isinstance(outputs, list | tuple):
        for output in outputs:
            yield from _flat(output)
    else:
        yield outputs


def _spec(name: str, tensor: "Tensor") -> TensorSpec:
    return TensorSpec(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
