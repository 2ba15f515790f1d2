"""The batch step computes for every row what the step computes for that row alone."""

import torch

from whisperport.model.network.batch_decoder import BatchDecode
from whisperport.model.network.decoder import Decode
from whisperport.model.network.whisper import Whisper

ROWS = 3
ATOL = 1e-5  # float32 sums in another order


@torch.no_grad()
def test_each_row_gives_the_outputs_of_the_step_with_its_own_mask_cache_and_audio(
    micro: Whisper,
) -> None:
    """Each row has another number of tokens, and other audio."""
    dims, generator = micro.dims, torch.Generator().manual_seed(0)
    heads, width, n, t = dims.n_text_head, dims.text_head_width, dims.n_text_ctx, 5
    shapes = (heads, width, n), (heads, n, width), (heads, width, t), (heads, t, width)
    caches = [
        [torch.randn(ROWS, *shape, generator=generator) for _ in range(dims.n_text_layer)]
        for shape in shapes
    ]
    x = torch.randn(ROWS, 1, dims.n_text_state, generator=generator)
    mask = torch.zeros(ROWS, 1, n + 1)
    for row, length in enumerate((0, 5, n)):
        mask[row, :, length:n] = -64
    folded = [[layer.flatten(0, 1) for layer in layers] for layers in caches]

    found = BatchDecode(micro.decoder)(x, mask, *folded)

    logits, *new = found
    assert logits.shape == (ROWS, dims.n_vocab)
    for row in range(ROWS):
        own = [[layer[row] for layer in layers] for layers in caches]
        expected, *new_of_row = Decode(micro.decoder)(x[row][None], mask[row][None], *own)
        torch.testing.assert_close(logits[row], expected[0], atol=ATOL, rtol=0)
        for batch, one in zip(new, new_of_row, strict=True):
            part = batch[row * heads : (row + 1) * heads]
            torch.testing.assert_close(part, one, atol=ATOL, rtol=0)


def test_the_batch_step_shares_the_weights_of_the_step(micro: Whisper) -> None:
    own = {p.untyped_storage().data_ptr() for p in Decode(micro.decoder).parameters()}

    assert {p.untyped_storage().data_ptr() for p in BatchDecode(micro.decoder).parameters()} == own
