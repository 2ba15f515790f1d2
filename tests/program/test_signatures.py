"""Signatures in manifests are those of exported programs; windows of users, and the value of a mask."""

import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from whisperport.errors import UsageError
from whisperport.model.network.short_window import AudioPadding
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts, prefill, uncached_decoder, vocab_projection
from whisperport.program.masks import (
    BOUNDED_MASK,
    MASKED,
    WEAKEST_MASK,
    check_mask,
    default_mask,
    hiding_mask,
)
from whisperport.program.placement import Placement
from whisperport.program.signatures import (
    CacheForm,
    KvLayout,
    expected_signature,
    form_of,
    roles,
    standard_form,
)
from whisperport.program.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.program.window import (
    MARGIN,
    PADDINGS,
    UNVERIFIED,
    ShortWindows,
    Window,
    WindowOptions,
)

from ..extent import core_or_all
from ..micro import DIMS, whisper_dims

NAMES = ("encoder", "cross_kv", "prefill_4", "step", "align")
SHORT = Window(
    positions=DIMS.n_audio_ctx, audio_positions=8, context_positions=14, padding="features"
)


def check(programs: Iterable[Program], window: Window | None, heads: int = 1) -> list[str]:
    """Compare each program with its expected signature; returns their names."""
    names = []
    for program in programs:
        assert program.spec == expected_signature(program.spec, DIMS, window, heads)
        names.append(program.spec.name)
    return names


def test_all_programs_of_a_complete_window_have_the_expected_signatures(micro: Any) -> None:
    programs = whisper_programs(Parts(micro, [(0, 1), (1, 0), (1, 1)]), NAMES)

    names = check(programs, window=None, heads=3)

    assert names == list(NAMES)


RANK4 = {"cross_kv": "rank4", "prefill_4": "rank4", "step": "rank4"}


@pytest.mark.parametrize("window", core_or_all([SHORT], [None, SHORT]))
def test_rank_4_programs_have_the_expected_signatures(micro: Any, window: Window | None) -> None:
    model = Whisper(DIMS, window).eval().requires_grad_(False)
    model.load_state_dict(micro.state_dict(), strict=False)

    programs = list(whisper_programs(Parts(model, [(0, 0)]), tuple(RANK4), RANK4))

    assert check(programs, window) == list(RANK4)
    usual = list(whisper_programs(Parts(model, [(0, 0)]), tuple(RANK4)))
    for program, other in zip(programs, usual, strict=True):
        assert program.spec != other.spec
        assert standard_form(program.spec) == other.spec
        assert standard_form(other.spec) == other.spec
        assert form_of(program.spec, DIMS, window) == form_of(other.spec, DIMS, window)
        assert roles(program.spec) == roles(other.spec)


@pytest.mark.parametrize(
    ("variants", "names"),
    core_or_all(
        [({}, ["step"]), (RANK4, ["prefill_4"])],
        [({}, ["prefill_4", "step"]), (RANK4, ["prefill_4", "step"])],
    ),
)
def test_programs_without_the_projection_have_the_expected_signatures(
    micro: Any, variants: dict[str, str], names: list[str]
) -> None:
    parts = Parts(micro, [(0, 0)], projected=False)

    programs = list(whisper_programs(parts, names, variants))

    assert check(programs, window=None) == names
    rows = {"prefill_4": 2, "step": 1}
    for program in programs:
        assert program.spec.outputs[0].name == "hidden"
        assert program.spec.outputs[0].shape[-2:] == (rows[program.name], 16)


@pytest.mark.parametrize("projected", core_or_all([False], [False, True]))
@pytest.mark.parametrize("rows", core_or_all([2], [2, 8]))
def test_a_batch_step_has_the_expected_signature(micro: Any, rows: int, projected: bool) -> None:
    (program,) = whisper_programs(Parts(micro, [(0, 0)], projected=projected), [f"step_{rows}"])

    assert check([program], window=None) == [f"step_{rows}"]
    assert form_of(program.spec, DIMS, None) == {
        field.name: getattr(CacheForm(), field.name) for field in fields(CacheForm)
    }
    assert set(roles(program.spec).values()) == {"input", "state"}


@pytest.mark.parametrize("variants", core_or_all([RANK4], [{}, RANK4, {"encoder": "nchw"}]))
def test_programs_for_a_length_of_audio_have_the_expected_signatures(
    micro: Any, variants: dict[str, str]
) -> None:
    names = ["encoder_4", "cross_kv_4"]

    programs = list(whisper_programs(Parts(micro, [(0, 0)]), names, variants))

    assert check(programs, window=None) == names
    encoder, cross_kv = (program.spec for program in programs)
    assert encoder.inputs[0].shape[-1] == 2 * 4
    assert cross_kv.outputs[0].shape[-1] == 4
    (longest,) = whisper_programs(Parts(micro, [(0, 0)]), ["cross_kv"], variants)
    assert form_of(cross_kv, DIMS, None) == form_of(longest.spec, DIMS, None)


@pytest.mark.parametrize("name", ["encoder_10", "encoder_0", "cross_kv_11"])
def test_a_length_that_is_not_shorter_than_the_checkpoints_window_is_no_program(name: str) -> None:
    with pytest.raises(ValueError, match=r"positions|no program"):
        expected_signature(ProgramSpec(name, (), ()), DIMS, None, 1)


@pytest.mark.parametrize("name", ["step_1", "step_65", "step_08", "step_"])
def test_a_batch_of_one_row_or_of_too_many_is_no_program(name: str) -> None:
    with pytest.raises(ValueError, match=r"rows|no program"):
        expected_signature(ProgramSpec(name, (), ()), DIMS, None, 1)


@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_the_projection_has_the_expected_signature(micro: Any, pieces: int) -> None:
    assert check([vocab_projection(Parts(micro, []), pieces).traced()], window=None) == [
        "vocab_projection"
    ]


def test_all_programs_of_a_short_window_have_the_expected_signatures(micro: Any) -> None:
    model = Whisper(DIMS, SHORT).eval().requires_grad_(False)
    model.load_state_dict(micro.state_dict(), strict=False)
    assert isinstance(model.padding, AudioPadding)

    parts = Parts(model, [(0, 0)])
    given = ("encoder", "cross_kv", "step", "align")
    programs = [*whisper_programs(parts, given, {"encoder": "nchw"}), prefill(parts, 2).traced()]

    names = check(programs, SHORT)

    assert names == ["encoder", "cross_kv", "step", "align", "prefill_2"]


@pytest.mark.parametrize(
    "form", [UncachedForm(8, "host", 4), UncachedForm(9, "graph", 1), UncachedForm(8, "graph", 3)]
)
def test_the_decoder_without_a_cache_has_the_expected_signature(
    micro: Any, form: UncachedForm
) -> None:
    assert check([uncached_decoder(Parts(micro, [], form)).traced()], window=None) == [
        "uncached_decoder"
    ]


@pytest.mark.parametrize(
    "found",
    [
        ProgramSpec("decoder", (), ()),
        ProgramSpec("", (), ()),
        ProgramSpec("prefill_", (), ()),
        ProgramSpec("prefill_04", (), ()),
        ProgramSpec("prefill_4097", (), ()),
        ProgramSpec("align", (), ()),
        ProgramSpec("align", (TensorSpec("x", (1,)),), ()),
        ProgramSpec("vocab_projection", (), ()),
        ProgramSpec("vocab_projection", (), (TensorSpec("logits", (1, 70)),) * 71),
        ProgramSpec("uncached_decoder", (), ()),
        ProgramSpec("uncached_decoder", (), (TensorSpec("logits_0", (1,)),)),
        ProgramSpec("uncached_decoder", (TensorSpec("a", ()), TensorSpec("b", (1, 16, 7, 1))), ()),
    ],
)
def test_an_unknown_program_has_no_signature(found: ProgramSpec) -> None:
    with pytest.raises(ValueError, match=r"expected|no program named"):
        expected_signature(found, DIMS, None, 1)


# The form of caches ------------------------------------------------------------------------------

HEADS, WIDTH = DIMS.n_text_head, DIMS.text_head_width
HALF_TURNED = CacheForm(
    self_k=KvLayout(1, "float16"),
    self_v=KvLayout(2, "float16"),
    cross_k=KvLayout(1, "float16"),
    cross_v=KvLayout(1, "float32"),
    mask="float16",
)


def in_form(spec: ProgramSpec, form: CacheForm) -> ProgramSpec:
    """The same signature with caches, new rows and mask in another form."""

    def changed(tensor: TensorSpec) -> TensorSpec:
        family = tensor.name.rsplit("_", 1)[0].replace("new", "self")
        if tensor.name == "mask":
            return replace(tensor, dtype=form.mask)
        if family not in {field.name for field in fields(form)}:
            return tensor
        rows = getattr(form, family)
        length = max(set(tensor.shape) - {HEADS, WIDTH}, default=WIDTH)
        return TensorSpec(tensor.name, rows.shape(HEADS, WIDTH, length), rows.dtype)

    return replace(
        spec, inputs=tuple(map(changed, spec.inputs)), outputs=tuple(map(changed, spec.outputs))
    )


@pytest.mark.parametrize("form", [CacheForm(), HALF_TURNED], ids=["usual", "another"])
def test_a_signature_has_its_caches_in_the_form_that_the_program_states(
    micro: Any, form: CacheForm
) -> None:
    for program in whisper_programs(Parts(micro, [(0, 1)]), NAMES):
        spec = in_form(program.spec, form)

        assert spec == expected_signature(spec, DIMS, None, 1)
        for name, value in form_of(spec, DIMS, None).items():
            assert value == getattr(form, name)


def test_a_cache_with_as_many_rows_as_a_head_is_wide_has_the_usual_layout() -> None:
    square = replace(DIMS, n_audio_ctx=WIDTH)
    step = ProgramSpec("step", (TensorSpec("cross_k_0", (HEADS, WIDTH, WIDTH)),), ())

    assert form_of(step, square, None) == {"cross_k": CacheForm().cross_k}


def test_a_dtype_that_no_cache_has_is_not_expected() -> None:
    step = ProgramSpec("step", (TensorSpec("self_k_0", (HEADS, WIDTH, 24), "int8"),), ())

    assert form_of(step, DIMS, None) == {"self_k": KvLayout(2, "float32")}


def test_every_input_of_every_program_has_a_role(micro: Any) -> None:
    programs = {p.name: p for p in whisper_programs(Parts(micro, [(0, 1)]), NAMES)}
    per_window = {f"cross_{kind}_{layer}": "constant" for kind in "kv" for layer in (0, 1)}
    per_token = {f"self_{kind}_{layer}": "state" for kind in "kv" for layer in (0, 1)}
    decoding = {"x": "input", "mask": "input"} | per_window | per_token

    assert roles(programs["encoder"].spec) == {"mel": "input"}
    assert roles(programs["cross_kv"].spec) == {"features": "input"}
    assert roles(programs["step"].spec) == decoding
    assert roles(programs["align"].spec) == decoding
    assert roles(programs["prefill_4"].spec) == decoding | {"pick": "input"}
    full = uncached_decoder(Parts(micro, [], UncachedForm(8))).traced().spec
    assert roles(full) == {"features": "constant", full.inputs[1].name: "input"}


# Windows that users ask for, and the value of a mask

# Windows that users ask for, checked against the checkpoint's sizes.

TWO_HEADS = whisper_dims(8, 1, heads=2)


def test_nothing_asked_for_is_the_checkpoints_own_window() -> None:
    assert WindowOptions().of(TWO_HEADS) is None
    assert WindowOptions(seconds=30, context_s=30, audio_s=30).of(TWO_HEADS) is None


def test_a_short_window_is_padded_to_what_the_decoder_was_trained_on() -> None:
    window = WindowOptions(seconds=10, padding="features").of(TWO_HEADS)

    assert window == Window(
        positions=500, audio_positions=500, context_positions=1500, padding="features"
    )
    assert window.padded == 1000


def test_less_padding_and_less_audio_can_be_asked_for() -> None:
    window = WindowOptions(seconds=10, padding="silence", context_s=14, audio_s=9).of(TWO_HEADS)

    assert window == Window(
        positions=500, audio_positions=450, context_positions=700, padding="silence"
    )


def test_padding_to_the_window_itself_is_none() -> None:
    assert WindowOptions(seconds=5, padding="features", context_s=5).of(TWO_HEADS) == Window(
        positions=250, audio_positions=250, context_positions=250, padding="none"
    )


def test_a_complete_window_may_hold_less_audio() -> None:
    assert WindowOptions(audio_s=28).of(TWO_HEADS) == Window(
        positions=1500, audio_positions=1400, context_positions=1500, padding="none"
    )


@given(st.integers(50, 1500), st.sampled_from(PADDINGS))
def test_every_multiple_of_20_ms_is_a_window(positions: int, padding: str) -> None:
    window = WindowOptions(seconds=positions / 50, padding=padding).of(TWO_HEADS)

    assert (window.positions if window else 1500) == positions


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (WindowOptions(seconds=10.01), "10.01 s"),
        (WindowOptions(seconds=31), "expected 1 to 30 s"),
        (WindowOptions(seconds=0.98), "expected 1 to 30 s"),
        (WindowOptions(seconds=0), "expected 1 to 30 s"),
        (WindowOptions(seconds=-5), "expected 1 to 30 s"),
        (WindowOptions(seconds=math.nan), "expected 1 to 30 s"),
        (WindowOptions(seconds=math.inf), "expected 1 to 30 s"),
        (WindowOptions(seconds=10, audio_s=11), "audio of a window cannot be 11 s"),
        (WindowOptions(seconds=10, audio_s=9.999), "audio of a window cannot be 9.999 s"),
        (
            WindowOptions(seconds=10, padding="features", context_s=9),
            "audio context of 9 s is shorter",
        ),
        (WindowOptions(seconds=10, padding="features", context_s=40), "expected 1 to 30 s"),
        (WindowOptions(seconds=10, padding="mirror"), "no padding `mirror`"),
    ],
)
def test_a_window_that_cannot_be_is_rejected(asked: WindowOptions, words: str) -> None:
    with pytest.raises(UsageError, match=words) as rejected:
        asked.of(TWO_HEADS)

    assert rejected.value.hint


@pytest.mark.parametrize(
    "sizes",
    [
        {"positions": 0, "audio_positions": 0, "context_positions": 5, "padding": "features"},
        {"positions": 5, "audio_positions": 6, "context_positions": 9, "padding": "features"},
        {"positions": 5, "audio_positions": 5, "context_positions": 4, "padding": "features"},
        {"positions": 5, "audio_positions": 5, "context_positions": 5, "padding": "features"},
        {"positions": 5, "audio_positions": 5, "context_positions": 6, "padding": "none"},
        {"positions": 5, "audio_positions": 5, "context_positions": 6, "padding": "mirror"},
    ],
)
def test_sizes_that_contradict_each_other_make_no_window(sizes: dict) -> None:
    with pytest.raises(ValueError, match=r"expected|padding"):
        Window(**sizes)


# The value of a mask: it hides tokens as -inf does, and is no larger than that needs.


def softmax(scores: np.ndarray) -> np.ndarray:
    weights: np.ndarray = np.exp(scores - scores.max())
    return weights / weights.sum()


@given(
    spread=st.floats(0, 2000),
    rows=st.integers(1, 896),
    visible=st.lists(st.floats(-50, 50), min_size=1, max_size=9),
)
def test_hidden_tokens_change_no_weight_of_a_visible_token_in_float32(
    spread: float, rows: int, visible: list[float]
) -> None:
    # given: all hidden scores are as large as the spread allows
    seen = np.array(visible, np.float32)
    hidden = np.full(rows, seen.max() + np.float32(spread), np.float32)

    weights = softmax(np.concatenate([seen, hidden + np.float32(hiding_mask(spread, rows))]))

    # then: half of the last bit of the sum, and the rounding of exp at scores of this size
    alone = softmax(seen)
    np.testing.assert_allclose(weights[: len(seen)], alone, rtol=4e-7)
    assert weights[len(seen) :].sum() < 2**-24


@given(spread=st.floats(0, 1000), more=st.floats(0, 1000), rows=st.integers(1, 896))
def test_a_larger_spread_never_needs_a_weaker_mask(spread: float, more: float, rows: int) -> None:
    assert hiding_mask(spread + more, rows) <= hiding_mask(spread, rows) <= WEAKEST_MASK


@pytest.mark.parametrize("spread", [math.nan, math.inf, -math.inf, 1e30])
def test_scores_that_no_mask_hides_get_the_largest_one(spread: float) -> None:
    assert hiding_mask(spread, 448) == MASKED


def test_the_bounded_mask_hides_a_full_cache_whose_scores_are_40_above_the_visible_ones() -> None:
    assert hiding_mask(40, 448) == BOUNDED_MASK
    assert hiding_mask(41, 448) < BOUNDED_MASK


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
@pytest.mark.parametrize("mask", [MASKED, BOUNDED_MASK])
def test_both_dtypes_hold_both_masks_exactly(dtype: type, mask: float) -> None:
    assert float(dtype(mask)) == mask


def test_a_precision_that_is_not_float32_has_a_bounded_mask() -> None:
    assert default_mask("fp32") == MASKED
    assert {default_mask(p) for p in ("fp16", "w8a8", "w8a16", "anything")} == {BOUNDED_MASK}


@pytest.mark.parametrize(
    "mask", [0.0, 64.0, -1.0, -15.9, -30001.0, math.nan, math.inf, -math.inf, -1e308]
)
def test_a_mask_that_hides_nothing_or_overflows_float16_is_rejected(mask: float) -> None:
    with pytest.raises(ValueError, match="expected -30000 to -16"):
        check_mask(mask)
    with pytest.raises(ValueError, match="expected -30000 to -16"):
        Placement("a", mask=mask)


# Windows that are as short as the rest of the audio allows.


@given(
    st.lists(st.integers(1, 1500), min_size=1, max_size=8, unique=True).map(sorted),
    st.integers(1, 3000),
)
def test_the_shortest_window_that_holds_the_audio_and_the_margin_is_chosen(
    positions: list[int], n_frames: int
) -> None:
    shortest = ShortWindows(positions=tuple(positions), min_logprob=-1.0).shortest(n_frames)

    holding = [count for count in positions if 2 * count - n_frames >= MARGIN]
    assert shortest == (min(holding) if holding else None)


def test_a_window_of_4_5_s_holds_4_s_of_audio() -> None:
    assert [UNVERIFIED.shortest(n) for n in (1, 200, 201, 400, 401, 950, 1950, 1951)] == [
        *(125, 125, 175, 225, 375, 500, 1000),
        None,
    ]


@pytest.mark.parametrize(
    ("positions", "min_logprob"),
    [
        *(((), -1.0), ((500, 250), -1.0), ((250, 250), -1.0)),
        *(((250,), number) for number in (0.1, -math.inf, math.nan)),
    ],
)
def test_lengths_in_another_order_and_impossible_thresholds_are_refused(
    positions: tuple[int, ...], min_logprob: float
) -> None:
    with pytest.raises(ValueError, match="expected"):
        ShortWindows(positions=positions, min_logprob=min_logprob)
