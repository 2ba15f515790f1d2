"""Hold the tensors found in a file against the ones its sizes ask for."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from whisperport.checkpoint.sizes import shortened
from whisperport.dims import Dims
from whisperport.errors import CheckpointError

Shape = tuple[int, ...]

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_LISTED = 12  # names of each kind in one message; the rest are counted


def expected_shapes(dims: Dims) -> dict[str, Shape]:
    """Every tensor of a Whisper of these sizes, by openai-whisper's names."""
    d = dims.n_audio_state
    shapes: dict[str, Shape] = {
        "encoder.conv1.weight": (d, dims.n_mels, 3),
        "encoder.conv1.bias": (d,),
        "encoder.conv2.weight": (d, d, 3),
        "encoder.conv2.bias": (d,),
        "encoder.positional_embedding": (dims.n_audio_ctx, d),
        "encoder.ln_post.weight": (d,),
        "encoder.ln_post.bias": (d,),
        "decoder.token_embedding.weight": (dims.n_vocab, d),
        "decoder.positional_embedding": (dims.n_text_ctx, d),
        "decoder.ln.weight": (d,),
        "decoder.ln.bias": (d,),
    }
    for layer in range(dims.n_audio_layer):
        shapes.update(_block(f"encoder.blocks.{layer}", d, dims.n_audio_ffn, ("attn",)))
    for layer in range(dims.n_text_layer):
        attentions = ("attn", "cross_attn")
        shapes.update(_block(f"decoder.blocks.{layer}", d, dims.n_text_ffn, attentions))
    return shapes


def _block(
    prefix: str, d: int, inner: int, attentions: Sequence[str]
) -> Iterator[tuple[str, Shape]]:
    for attention in attentions:
        for module in ("query", "key", "value", "out"):
            yield f"{prefix}.{attention}.{module}.weight", (d, d)
            if module != "key":  # a bias on the keys would cancel in the softmax; Whisper has none
                yield f"{prefix}.{attention}.{module}.bias", (d,)
        yield f"{prefix}.{attention}_ln.weight", (d,)
        yield f"{prefix}.{attention}_ln.bias", (d,)
    yield f"{prefix}.mlp.0.weight", (inner, d)
    yield f"{prefix}.mlp.0.bias", (inner,)
    yield f"{prefix}.mlp.2.weight", (d, inner)
    yield f"{prefix}.mlp.2.bias", (d,)
    yield f"{prefix}.mlp_ln.weight", (d,)
    yield f"{prefix}.mlp_ln.bias", (d,)


def reject_halves(names: Iterable[str], *, where: str) -> None:
    """Raises CheckpointError for an encoder without a decoder, or a decoder alone."""
    sides = {name.partition(".")[0] for name in names} & {"encoder", "decoder"}
    if len(sides) == 1:
        (there,) = sides
        absent = "decoder" if there == "encoder" else "encoder"
        raise CheckpointError(
            f"`{where}` holds no {absent}",
            why=f"all of its tensors are the {there}'s: it is half of a Whisper, such as one that "
            "classifies sound, or a draft model",
            hint="give a checkpoint that transcribes, with both halves",
        )


def check_tensors(
    weights: Mapping[str, Tensor],
    dims: Dims,
    *,
    where: str,
    unexpected: Sequence[str] = (),
    spell: Callable[[str], str] = str,
) -> None:
    """Raises CheckpointError listing every tensor that is missing, unexpected, mis-shaped, of
    another dtype, or not finite.

    `unexpected` are names the caller could not translate; `spell` writes ours as the file does.
    """
    shapes = expected_shapes(dims)
    missing = [spell(name) for name in shapes if name not in weights]
    unknown = [*unexpected, *(spell(name) for name in weights if name not in shapes)]
    misshaped, mistyped, well_formed = [], [], []
    for name, shape in shapes.items():
        if name not in weights:
            continue
        found = tuple(weights[name].shape)
        if found != shape:
            misshaped.append(f"{spell(name)} (expected {shape}, found {found})")
        elif weights[name].dtype not in _DTYPES:
            mistyped.append(f"{spell(name)} ({str(weights[name].dtype).removeprefix('torch.')})")
        else:
            well_formed.append(name)
    faults = [
        _listing("missing", missing),
        _listing("unexpected", unknown),
        _listing("of another shape", misshaped),
        _listing("not float32, float16 or bfloat16", mistyped),
    ]
    if any(faults):
        raise CheckpointError(
            f"the tensors in `{where}` do not fit the sizes it states",
            why="; ".join(fault for fault in faults if fault),
            hint="save it in float32: `model.float()`"
            if faults[:3] == ["", "", ""]
            else "check that weights and sizes are of one checkpoint, and were saved whole",
        )
    wild = [spell(name) for name in well_formed if not bool(torch.isfinite(weights[name]).all())]
    if wild:
        raise CheckpointError(
            f"weights in `{where}` are not numbers",
            why=_listing("with NaN or infinity", wild),
            hint="take an earlier step of the training, or convert from float32 with bfloat16",
        )


def _listing(kind: str, names: Sequence[str]) -> str:
    if not names:
        return ""
    listed = ", ".join(shortened(name) for name in names[:_LISTED])
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {kind}: {listed}{more}"
