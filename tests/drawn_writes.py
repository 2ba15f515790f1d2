"""Programs that write in place, through views and not, in any order: drawn by hypothesis."""

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

Step = tuple[str, int, int]  # what, of which tensor, and a number
Function = Callable[[Tensor, Tensor], Any]


class Calls(nn.Module):
    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.function(x, y)


def drawn_writes() -> st.SearchStrategy[list[Step]]:
    kinds = st.sampled_from(("slice", "select", "transpose", "view", "write", "use", "copy"))
    return st.lists(st.tuples(kinds, st.integers(0, 5), st.integers(0, 6)), min_size=3, max_size=9)


def function_of(drawn: list[Step], *, constant: bool = False) -> Function:
    """A function of two tensors (1, 8, 8) that does these steps with the first, or also with a constant."""

    def run(x: Tensor, y: Tensor) -> Tensor:
        tensors = [torch.relu(x), *([torch.ones(8, 8) + 1.0] if constant else [])]
        for kind, place, number in drawn:
            one = tensors[place % len(tensors)]
            if kind == "slice" and one.dim() and one.shape[0] > 1:
                tensors.append(one[: max(1, number % one.shape[0])])
            elif kind == "select" and one.dim() > 1:
                tensors.append(one[number % one.shape[0]])
            elif kind == "transpose" and one.dim() > 1:
                tensors.append(one.transpose(0, 1))
            elif kind == "view" and one.is_contiguous():
                tensors.append(one.view(-1))
            elif kind == "write":
                one.mul_(2.0 if number % 2 else torch.sigmoid(y.flatten()[number]))
            elif kind == "copy":
                one.copy_(torch.sigmoid(one))
            elif kind == "use":
                tensors.append(one + 1.0)
        kept = tensors if constant else tensors[::2]
        return sum((one.sum() for one in kept), torch.zeros(()))

    return run
