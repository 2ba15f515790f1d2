"""One window at a time over a bundle's runners."""

from typing import Any

import numpy as np
import pytest
import torch

from whisperport.errors import BundleError
from whisperport.model.network.whisper import Whisper
from whisperport.runtime import Decoder, Engine

from ...micro import DIMS, GENERATION


def engine_of(micro: Whisper, runners: dict[str, Any]) -> Engine:
    embedding = micro.decoder.token_embedding.weight.numpy()
    positions = micro.decoder.positional_embedding.numpy()
    return Engine(DIMS, GENERATION, runners, embedding, positions)


@pytest.mark.parametrize("program", ["encoder", "cross_kv", "step", "prefill_4", "align"])
def test_a_program_that_is_missing_is_named(
    micro: Whisper, eager_runners: Any, program: str
) -> None:
    runners = eager_runners(micro, (4,))
    del runners[program]

    with pytest.raises(BundleError, match=program.replace("_4", "_P")) as missing:
        engine_of(micro, runners)

    assert all(name in missing.value.why for name in runners)


def test_a_prompt_runs_in_the_smallest_program_that_takes_it(
    micro: Whisper, eager_runners: Any, audio: Any
) -> None:
    runners, used = eager_runners(micro, (4, 7)), []
    for name, rows in (("step", 1), ("prefill_4", 4), ("prefill_7", 7)):
        run = runners[name]._run
        runners[name]._run = lambda x, run=run, rows=rows: used.append(rows) or run(x)
    decoder = Decoder(engine_of(micro, runners))

    for count in (1, 4, 5, 7, 8, 12):
        decoder.start_window(audio(0))
        decoder.prefill([1] * count)

    assert used == [1, 4, 7, 7, 7, 1, 7, 7]


@pytest.mark.parametrize(("tokens", "second_index"), [([], 0), ([1, 2], 2), ([1, 2], -1)])
def test_a_row_that_is_not_in_the_prompt_is_rejected(
    micro_decoder: Any, audio: Any, tokens: list[int], second_index: int
) -> None:
    decoder = micro_decoder()
    decoder.start_window(audio(0))

    with pytest.raises(ValueError, match="`second_index`"):
        decoder.prefill(tokens, second_index=second_index)


def test_a_new_window_forgets_the_last_one(micro_decoder: Any, audio: Any) -> None:
    decoder, fresh = micro_decoder(), micro_decoder()
    decoder.start_window(audio(1))
    decoder.prefill([1, 2, 3])
    decoder.step(4)

    for e in (decoder, fresh):
        e.start_window(audio(2))

    np.testing.assert_array_equal(decoder.prefill([5, 6])[0], fresh.prefill([5, 6])[0])


def test_two_decoders_of_one_engine_do_not_share_a_cache(micro_decoder: Any, audio: Any) -> None:
    first, alone = micro_decoder(), micro_decoder()
    second = Decoder(first.engine)
    for decoder in (first, second, alone):
        decoder.start_window(audio(0))

    steps = []
    for token in range(6):
        first.step(token)
        steps.append((second.step(token + 1), alone.step(token + 1)))
        first.step(token)

    for interleaved, expected in steps:
        np.testing.assert_array_equal(interleaved, expected)


def test_a_table_in_float16_is_read_as_float32(micro: Whisper, eager_runners: Any) -> None:
    embedding = micro.decoder.token_embedding.weight.numpy().astype(np.float16)
    positions = micro.decoder.positional_embedding.numpy().astype(np.float16)
    halved = Decoder(Engine(DIMS, GENERATION, eager_runners(micro), embedding, positions))
    full = Decoder(
        Engine(
            DIMS, GENERATION, eager_runners(micro), embedding.astype("f4"), positions.astype("f4")
        )
    )
    features = np.zeros((DIMS.n_audio_ctx, DIMS.n_audio_state), np.float32)
    for decoder in (halved, full):
        decoder.start_window(features)

    np.testing.assert_array_equal(halved.step(7), full.step(7))


def test_a_spectrogram_of_another_size_is_rejected(micro_decoder: Any) -> None:
    with pytest.raises(ValueError, match=r"'mel' as \(1, 8, 20\) float32"):
        micro_decoder().engine.encode(np.zeros((8, 21), np.float32))


@pytest.mark.parametrize("count", [1, 5, 6, 13])
def test_aligned_rows_are_those_of_one_pass(
    micro: Whisper, micro_decoder: Any, audio: Any, count: int
) -> None:
    """In pieces of five rows, the last one padded."""
    decoder, tokens = micro_decoder(), list(range(count))
    features = torch.from_numpy(audio(0))[None]
    one_pass = micro.logits(torch.tensor(tokens), micro.cross_kv(features)).numpy()
    decoder.start_window(audio(0))
    decoder.prefill([9, 9, 9])  # forgotten

    scores, rows = decoder.align(tokens)

    assert scores.shape == (3, count, DIMS.n_audio_ctx)
    # Sums of 16 float32 products in two orders, through two layers; logits reach 15.
    np.testing.assert_allclose(decoder.engine.logits_of(rows), one_pass, atol=1e-5 * 15)


def test_alignment_scores_are_those_of_the_heads_asked_for(
    micro: Whisper, micro_decoder: Any, audio: Any
) -> None:
    decoder, tokens = micro_decoder(), [1, 2, 3, 4, 5, 6, 7]
    features = torch.from_numpy(audio(0))[None]
    seen: list[torch.Tensor] = []
    hooks = [
        block.cross_attn.query.register_forward_hook(lambda *call: seen.append(call[-1]))
        for block in micro.decoder.blocks
    ]
    micro.logits(torch.tensor(tokens), micro.cross_kv(features))
    for hook in hooks:
        hook.remove()

    decoder.start_window(audio(0))
    scores, _ = decoder.align(tokens)

    width = DIMS.text_head_width
    for of_head, (layer, head) in zip(scores, [(0, 1), (1, 0), (1, 1)], strict=True):
        cut = slice(head * width, (head + 1) * width)
        keys = micro.decoder.blocks[layer].cross_attn.key(features)[0, :, cut]
        expected = seen[layer][0, :, cut] @ keys.T / width**0.5
        np.testing.assert_allclose(of_head, expected, atol=1e-4)  # scores reach 10


def test_nothing_to_align_is_rejected(micro_decoder: Any, audio: Any) -> None:
    decoder = micro_decoder()
    decoder.start_window(audio(0))

    with pytest.raises(ValueError, match="no tokens"):
        decoder.align([])
