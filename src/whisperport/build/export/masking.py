"""Choose the number that the mask of each exported program adds to the scores of hidden tokens."""

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from whisperport.build.export.placing import Placed
from whisperport.program.masks import MASKED, default_mask, hiding_mask
from whisperport.program.spec import ProgramSpec
from whisperport.verification.reference import Reference

if TYPE_CHECKING:  # torch is not installed where bundles only run
    from whisperport.model.network.whisper import Whisper

log = logging.getLogger(__name__)


def choose_masks(
    programs: Iterable[ProgramSpec], placed: Placed, model: "Whisper", reference: Reference
) -> dict[str, float]:
    """Return the mask of every program: that of its target, or a lower one if the model's scores need it.

    Args:
        programs: signatures of the exported programs.
        placed: their placements.
        model: the model in torch.
        reference: texts that the scores are measured on; clips without features are not used.
    """
    masks = {
        program.name: _of_target(program.name, placed)
        if any(tensor.name == "mask" for tensor in program.inputs)
        else MASKED
        for program in programs
    }
    if set(masks.values()) <= {MASKED}:
        return masks
    needed = needed_mask(model, reference)
    if max(masks.values()) > needed:
        log.warning(
            "the attention scores of this model need a mask of %g; it costs precision if the decoder is "
            "quantized",
            needed,
        )
    return {name: min(mask, needed) for name, mask in masks.items()}


def needed_mask(model: "Whisper", reference: Reference) -> float:
    """Return the largest mask that hides every token of the reference's texts from every other.

    Args:
        model: the model in torch.
        reference: clips with features and tokens; clips without features are not used.
    """
    from torch import from_numpy

    from whisperport.model.network.score_spread import score_spread

    texts = (
        (model.cross_kv(from_numpy(clip.features)[None]), (*clip.prompt, *clip.tokens))
        for clip in reference.clips
        if clip.features.size
    )
    longest = model.dims.n_text_ctx
    spread = score_spread(model.decoder, ((kv, tokens[:longest]) for kv, tokens in texts))
    return hiding_mask(spread, 2 * longest)


def _of_target(program: str, placed: Placed) -> float:
    spec, precision = placed.target_of(program).spec, placed.placements[program].precision
    return spec.lowering.masks.get(precision, default_mask(precision))
