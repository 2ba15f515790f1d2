"""Matrices of an adapter as inputs of programs, so that a bundle runs with any adapter.

An adapter (LoRA) adds x·A·B to what a linear layer computes from x. A bundle whose manifest has `adapters`
has both matrices of each layer as the last inputs of its programs: `lora_a_i` (1, in, R) and `lora_b_i`
(1, R, out), in the order of `adapted_layers`. R is the same for all layers; an adapter of a lower rank is
padded with zeros. Matrices of zeros leave the base as it is.
"""

from dataclasses import dataclass
from typing import Annotated

from whisperport.errors import UsageError
from whisperport.program.dims import Dims
from whisperport.program.program_kind import (
    ALIGN,
    CROSS_KV,
    ENCODER,
    PREFILL,
    STEP,
    ProgramKind,
    kind_of,
)
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.program.strict_json import Field

LORA_A, LORA_B = "lora_a", "lora_b"
MAX_RANK = 256
# Names in transformers of the layers that an adapter may change, as PEFT's `target_modules` has them.
MODULES = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")

_SELF = tuple(f"self_attn.{name}" for name in MODULES[:4])
_FEED_FORWARD = ("fc1", "fc2")
_IN_LAYER = {  # kind of program -> the side that it is of, and its layers inside of each block
    ENCODER: ("encoder", (*_SELF, *_FEED_FORWARD)),
    CROSS_KV: ("decoder", ("encoder_attn.k_proj", "encoder_attn.v_proj")),
    **dict.fromkeys(
        (STEP, PREFILL, ALIGN),
        (
            "decoder",
            (*_SELF, "encoder_attn.q_proj", "encoder_attn.out_proj", *_FEED_FORWARD),
        ),
    ),
}


def _rank(rank: Field) -> int:
    return rank.integer(1, MAX_RANK)


def _module(name: Field) -> str:
    return name.one_of(MODULES)


@dataclass(frozen=True, slots=True)
class LowRank:
    """Which adapters the programs of a bundle take.

    Attributes:
        rank: R, the highest rank, 1 to `MAX_RANK`.
        modules: names of the layers that may be adapted, of `MODULES`.
    """

    rank: Annotated[int, _rank]
    modules: tuple[Annotated[str, _module], ...] = MODULES


def parse_low_rank(text: str) -> LowRank:
    """Read a rank and names of layers, such as "16" or "16:q_proj,v_proj".

    Raises:
        UsageError: it has another form.
    """
    number, colon, names = text.partition(":")
    modules = tuple(names.split(",")) if colon else MODULES
    is_rank = number.isascii() and number.isdigit() and 1 <= int(number[:9]) <= MAX_RANK
    if not is_rank or not {*modules} <= {*MODULES}:
        raise UsageError(
            f"the adapters that programs take are {text[:60]!r}",
            why=f"expected a rank of 1 to {MAX_RANK}, and after a colon layers of {', '.join(MODULES)}",
            hint="such as `16`, or `16:q_proj,v_proj` as in PEFT's `target_modules`",
        )
    return LowRank(int(number), tuple(name for name in MODULES if name in modules))


@dataclass(frozen=True, slots=True)
class AdaptedLayer:
    """A linear layer that an adapter may change.

    Attributes:
        name: in transformers, such as "model.decoder.layers.0.self_attn.q_proj".
        n_inputs, n_outputs: sizes of the layer.
    """

    name: str
    n_inputs: int
    n_outputs: int


def adapted_layers(kind: ProgramKind, dims: Dims, low_rank: LowRank) -> tuple[AdaptedLayer, ...]:
    """Return the layers of a program that an adapter may change, in the order of its inputs."""
    if kind.name not in _IN_LAYER:
        return ()
    side, modules = _IN_LAYER[kind.name]
    count, wide = (
        (dims.n_audio_layer, dims.n_audio_ffn)
        if side == "encoder"
        else (dims.n_text_layer, dims.n_text_ffn)
    )
    width = dims.n_audio_state
    sizes = {"fc1": (width, wide), "fc2": (wide, width)}
    return tuple(
        AdaptedLayer(f"model.{side}.layers.{index}.{module}", *sizes.get(module, (width, width)))
        for index in range(count)
        for module in modules
        if module.rpartition(".")[2] in low_rank.modules
    )


def adapter_inputs(program: str, dims: Dims, low_rank: LowRank | None) -> tuple[TensorSpec, ...]:
    """Return the inputs of a program for an adapter: all A, then all B; none without `low_rank`."""
    if low_rank is None:
        return ()
    layers, rank = adapted_layers(kind_of(program), dims, low_rank), low_rank.rank
    return (
        *(TensorSpec(f"{LORA_A}_{i}", (1, each.n_inputs, rank)) for i, each in enumerate(layers)),
        *(TensorSpec(f"{LORA_B}_{i}", (1, rank, each.n_outputs)) for i, each in enumerate(layers)),
    )


def is_adapter_input(name: str) -> bool:
    """Return whether an input of a program is a matrix of an adapter."""
    return name.startswith((f"{LORA_A}_", f"{LORA_B}_"))


def without_adapter(spec: ProgramSpec) -> ProgramSpec:
    """Return a signature without the inputs for an adapter."""
    inputs = tuple(tensor for tensor in spec.inputs if not is_adapter_input(tensor.name))
    return ProgramSpec(spec.name, inputs, spec.outputs)
