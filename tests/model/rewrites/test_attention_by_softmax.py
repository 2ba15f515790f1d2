"""Every form of mask, against torch's fused attention; and what is declined."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .conftest import EXACT, operators, random_tensor, reasons, rewritten

NAME = "attention-by-softmax"
Q, K = torch.zeros(1, 3, 5, 8), torch.zeros(1, 3, 7, 8)


class Attention(nn.Module):
    def __init__(self, mask: Tensor | None = None, **options: Any) -> None:
        super().__init__()
        self.register_buffer("mask", mask)
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask, **self.options)


SEEN = torch.tensor([[True, False, True, True, False, True, True]] * 5)


@pytest.mark.parametrize(
    "attention",
    [
        Attention(),
        Attention(is_causal=True),
        Attention(scale=1.0),
        Attention(scale=0.3, is_causal=True),
        Attention(SEEN),
        Attention(SEEN[None, None]),
        Attention(torch.where(SEEN, random_tensor(5, 7), -torch.inf)),
        Attention(torch.where(SEEN, 0.0, torch.finfo(torch.float32).min)),
    ],
    ids=["plain", "causal", "scale 1", "both", "booleans", "rank 4", "infinite", "lowest"],
)
def test_every_mask_is_made_finite_and_agrees(
    attention: Attention, run: Any, largest_error: Any
) -> None:
    before, after, outcome = rewritten(NAME, attention, Q, K, K)

    assert len(outcome.changed) == 1
    assert "aten.softmax.int" in operators(after)
    assert largest_error(run(after), run(before)) <= EXACT
    for tensor in {**after.exported.state_dict, **after.exported.constants}.values():
        assert tensor.dtype == torch.float32
        assert tensor.min() >= -30_000


@pytest.mark.parametrize("kind", [torch.bool, torch.float32])
def test_a_mask_that_is_given_is_handled(kind: torch.dtype, run: Any, largest_error: Any) -> None:
    class Given(nn.Module):
        def forward(self, q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(q, k, k, mask)

    mask = SEEN if kind == torch.bool else torch.where(SEEN, 0.0, -torch.inf)
    before, after, outcome = rewritten(NAME, Given(), Q, K, mask)
    q, k = random_tensor(*Q.shape), random_tensor(*K.shape)

    expected = before.exported.module()(q, k, mask)
    actual = after.exported.module()(q, k, mask)

    assert len(outcome.changed) == 1
    assert largest_error([actual], [expected]) <= EXACT
    assert not any("where" in name or "eq" in name for name in operators(after))


def test_layers_share_one_mask() -> None:
    class Two(nn.Module):
        def forward(self, q: Tensor) -> Tensor:
            once = F.scaled_dot_product_attention(q, q, q, is_causal=True)
            return F.scaled_dot_product_attention(once, once, once, is_causal=True)

    _, after, outcome = rewritten(NAME, Two(), Q)

    assert len(outcome.changed) == 2
    assert len({**after.exported.state_dict, **after.exported.constants}) == 1


@pytest.mark.parametrize(
    ("attention", "reason"),
    [
        (Attention(dropout_p=0.1), "a dropout of 0.1"),
        (Attention(torch.zeros(5, 7, dtype=torch.bool)), "excludes every position"),
        (Attention(torch.full((5, 7), -torch.inf)), "excludes every position"),
    ],
)
def test_it_declines_with_a_reason(attention: Attention, reason: str) -> None:
    before, after, outcome = rewritten(NAME, attention, Q, K, K)

    assert after is before
    assert reason in reasons(outcome)


def test_grouped_queries_are_declined() -> None:
    _, _, outcome = rewritten(NAME, Attention(enable_gqa=True), Q, K[:, :1], K[:, :1])

    assert "grouped queries" in reasons(outcome)


def test_half_precision_is_declined() -> None:
    _, _, outcome = rewritten(NAME, Attention(), Q.bfloat16(), K.bfloat16(), K.bfloat16())

    assert "bfloat16" in reasons(outcome)
