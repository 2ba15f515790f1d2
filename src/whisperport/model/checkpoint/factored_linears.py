"""Multiply the factored weights of lite-whisper.

Its encoder computes a linear layer as (x @ weight1) @ weight2 + bias, with weight1 (in, r) and weight2
(r, out). Multiplied, they are a matrix as in every other checkpoint, so that all programs can be made from
it. It is larger than the factors: the encoder is as large as that of the original model again. The layer of
the keys has a bias as well, unlike Whisper's. It adds the same number to all scores of a query, which the
softmax cancels, and is left out.
Source: efeslab/LiteASR@da5be85, src/lite_whisper/modeling_lite_whisper.py
"""

from collections.abc import Mapping

from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.names import from_huggingface
from whisperport.model.checkpoint.tensor_check import expected_shapes
from whisperport.model.checkpoint.untrusted import shorten
from whisperport.program.dims import Dims


def multiplied(
    tensors: Mapping[str, Tensor], dims: Dims, *, where: str
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Return the tensors with a matrix in place of each pair of factors, and a warning if there are any.

    Args:
        tensors: transformers' name -> tensor.
        dims: sizes of the model.
        where: the checkpoint, for the error.

    Raises:
        CheckpointError: two factors do not give a matrix of the size that the model has there.
    """
    shapes = expected_shapes(dims)
    dense = dict(tensors)
    before = after = count = 0
    for name, first in tensors.items():
        module = name.removesuffix(".weight1")
        second = tensors.get(f"{module}.weight2")
        if module == name or second is None or f"{module}.weight" in tensors:
            continue  # a factor that is left is reported as unexpected
        shape = shapes.get(from_huggingface(f"{module}.weight") or "")
        if (*second.shape[1:], *first.shape[:1]) != shape or first.shape[1:] != second.shape[:1]:
            raise CheckpointError(
                f"the factors of a weight in `{where}` do not fit",
                why=f"those of {shorten(module)} are {tuple(first.shape)} and {tuple(second.shape)}; the "
                f"weight has the shape {shape}",
                hint="save the checkpoint again",
            )
        matrix = (first.float() @ second.float()).T.contiguous().to(first.dtype)
        dense[f"{module}.weight"] = matrix
        for surplus in ("weight1", "weight2", *(["bias"] if module.endswith(".k_proj") else [])):
            dense.pop(f"{module}.{surplus}", None)
        count, before, after = (
            count + 1,
            before + first.nbytes + second.nbytes,
            after + matrix.nbytes,
        )
    if not count:
        return dense, ()
    warning = (
        f"{count} weights are stored as two factors each; they are multiplied, and take {after >> 20} MiB "
        f"instead of {before >> 20} MiB"
    )
    return dense, (warning,)
