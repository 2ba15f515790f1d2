"""The signatures that a manifest is checked against are those of the programs that are exported."""

from collections.abc import Iterable
from typing import Any

import pytest

from whisperport.model.short_window import SoundPadding
from whisperport.model.whisper import Whisper
from whisperport.programs.for_images import decode_full
from whisperport.programs.program import Program
from whisperport.programs.whisper import whisper_programs
from whisperport.signatures import expected_signature
from whisperport.spec import FullForm, ProgramSpec, TensorSpec
from whisperport.window import Window

from .micro import DIMS

SHORT = Window(positions=DIMS.n_audio_ctx, sound=8, heard=14, padding="features")


def check(programs: Iterable[Program], window: Window | None, heads: int = 1) -> list[str]:
    """Compare each program with its expected signature; returns their names."""
    names = []
    for program in programs:
        assert program.spec == expected_signature(program.spec, DIMS, window, heads)
        names.append(program.spec.name)
    return names


def test_all_programs_of_a_whole_window_have_the_expected_signatures(micro: Any) -> None:
    programs = whisper_programs(micro, [(0, 1), (1, 0), (1, 1)], prefill_rows=(4,))

    names = check(programs, window=None, heads=3)

    assert names == ["encoder", "cross_kv", "prefill_4", "step", "align"]


def test_all_programs_of_a_short_window_have_the_expected_signatures(micro: Any) -> None:
    model = Whisper(DIMS, SHORT).eval().requires_grad_(False)
    model.load_state_dict(micro.state_dict(), strict=False)
    assert isinstance(model.padding, SoundPadding)

    names = check(whisper_programs(model, [(0, 0)], prefill_rows=(2,), image=True), SHORT)

    assert names == ["encoder", "cross_kv", "prefill_2", "step", "align"]


@pytest.mark.parametrize(
    "form", [FullForm(8, "host", 4), FullForm(9, "graph", 1), FullForm(8, "graph", 3)]
)
def test_the_decoder_without_a_cache_has_the_expected_signature(micro: Any, form: FullForm) -> None:
    assert check([decode_full(micro, form)], window=None) == ["decode_full"]


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
        ProgramSpec("decode_full", (), ()),
        ProgramSpec("decode_full", (), (TensorSpec("logits_0", (1,)),)),
        ProgramSpec("decode_full", (TensorSpec("a", ()), TensorSpec("b", (1, 16, 7, 1))), ()),
    ],
)
def test_what_is_no_program_of_ours_has_no_signature(found: ProgramSpec) -> None:
    with pytest.raises(ValueError, match=r"expected|not the name"):
        expected_signature(found, DIMS, None, 1)
