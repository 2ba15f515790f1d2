"""The decoder with a cache, against the model without one."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from whisperport.model.network.cached_decoder import CachedDecoder
from whisperport.model.network.whisper import Whisper

from ..micro import DIMS

# Sums of 16 float32 products in two orders, through two layers; logits reach 15.
ATOL = 1e-5 * 15

# Few different ids, so that runs often share their first tokens and then part.
runs = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=DIMS.n_text_ctx), min_size=1, max_size=6
)


@given(runs=runs)
@settings(max_examples=60)
def test_logits_after_any_runs_of_tokens_are_those_without_a_cache(
    micro: Whisper, runs: list[list[int]]
) -> None:
    features = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(1))
    cross_kv = micro.cross_kv(features)
    decoder = CachedDecoder(micro.decoder, cross_kv)

    for tokens in runs:
        expected = micro.logits(torch.tensor(tokens), cross_kv)[-1]
        np.testing.assert_allclose(decoder(tokens), expected, atol=ATOL, rtol=0)
