"""Weights of a checkpoint as numpy arrays, one at a time: the whole is never copied."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

Floats = NDArray[np.float32]


def weight(checkpoint: "Checkpoint", name: str) -> Floats:
    """Return a weight by openai-whisper's name, float32; it may be the checkpoint's own memory."""
    array: Floats = checkpoint.weights[name].detach().float().contiguous().numpy()
    return array


def is_widened(checkpoint: "Checkpoint", name: str) -> bool:
    """Return whether a weight takes less memory than in float32, so that `weight` copies it."""
    return checkpoint.weights[name].element_size() < np.dtype(np.float32).itemsize


def half(checkpoint: "Checkpoint", name: str) -> NDArray[np.float16]:
    """Return a weight by openai-whisper's name, float16; it may be the checkpoint's own memory."""
    array: NDArray[np.float16] = checkpoint.weights[name].detach().half().contiguous().numpy()
    return array


def is_half_precision(checkpoint: "Checkpoint") -> bool:
    """Return whether float16 holds every weight exactly, as where a checkpoint was published in it."""
    return all(is_half(checkpoint, name) for name in checkpoint.weights)


def is_half(checkpoint: "Checkpoint", name: str) -> bool:
    """Return whether float16 holds a weight exactly."""
    import torch

    tensor = checkpoint.weights[name]
    return tensor.dtype == torch.float16 or torch.equal(tensor.half().float(), tensor.float())


def quantized_rows(array: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round each row of a matrix (n, …) to 8 bits; return the integers and each row's factor (n,).

    A row is its integers divided by its factor: 127 / its largest absolute value, or 1 if all are zero.
    Source: OpenNMT/CTranslate2@0d8bcd3, python/ctranslate2/specs/model_spec.py.
    """
    rows = array.reshape(len(array), -1)
    largest = np.abs(rows).max(axis=1)
    largest[largest == 0] = 127
    factor = (127 / largest).astype(np.float32)
    return np.rint(rows * factor[:, None]).astype(np.int8).reshape(array.shape), factor


def decoded_together(tokens: Sequence[int], n_prompt: int) -> Iterator[Sequence[int]]:
    """Yield the prompt, and then each token alone, as an app decodes them."""
    yield tokens[:n_prompt]
    yield from ([token] for token in tokens[n_prompt:])
