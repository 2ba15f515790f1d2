"""The table of variants, and the targets that choose from it."""

from typing import Any

import pytest

from whisperport.model.trace.variants import VARIANTS, whisper_programs
from whisperport.model.trace.whisper import Parts, uncached_decoder
from whisperport.targets import TARGETS, Target


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.spec.name)
def test_every_target_chooses_variants_that_exist(target: Target) -> None:
    assert set(target.spec.lowering.variants.items()) <= set(VARIANTS)


@pytest.mark.parametrize(
    ("variants", "shape"),
    [({}, (1, 8, 20)), ({"encoder": "sequence"}, (1, 8, 20)), ({"encoder": "nchw"}, (1, 8, 1, 20))],
)
def test_a_program_is_traced_in_the_variant_that_is_chosen_or_else_the_default(
    micro: Any, variants: dict[str, str], shape: tuple[int, ...]
) -> None:
    (encoder,) = whisper_programs(Parts(micro, []), ["encoder"], variants)

    assert encoder.spec.inputs[0].shape == shape


def test_the_decoder_without_a_cache_is_not_traced_without_its_form(micro: Any) -> None:
    with pytest.raises(ValueError, match="uncached"):
        uncached_decoder(Parts(micro, []))
