"""The signatures that a manifest is checked against are those of the programs that are exported."""

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import pytest

from whisperport.model.network.short_window import AudioPadding
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Program
from whisperport.model.trace.variants import whisper_programs
from whisperport.model.trace.whisper import Parts, prefill, uncached_decoder, vocab_projection
from whisperport.program.signatures import (
    CacheForm,
    KvLayout,
    expected_signature,
    form_of,
    roles,
    standard_form,
)
from whisperport.program.spec import ProgramSpec, TensorSpec, UncachedForm
from whisperport.program.window import Window

from ..extent import core_or_all
from ..micro import DIMS

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
