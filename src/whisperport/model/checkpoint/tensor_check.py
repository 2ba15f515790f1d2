"""Compare the tensors in a checkpoint with those that its sizes require."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from whisperport.errors import CheckpointError
from whisperport.program.dims import Dims
from whisperport.program.untrusted import checked_dims, shorten

Shape = tuple[int, ...]

_DTYPES = frozenset({torch.float32, torch.float16, torch.bfloat16})
_LISTED = 12  # largest number of names of each kind in one message


def expected_shapes(dims: Dims) -> dict[str, Shape]:
    """Return the shape of every tensor of a model of these sizes, by openai-whisper's names."""
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


def dims_of_tensors(
    weights: Mapping[str, Tensor],
    heads: Callable[[int], tuple[int, int]],
    *,
    what: str,
    error: Callable[[str], CheckpointError],
) -> Dims:
    """Infer the sizes of a model from the shapes of its tensors, by openai-whisper's names.

    Args:
        weights: the tensors.
        heads: returns the numbers of heads of encoder and decoder, on which no shape depends, for a width.
        what: what happened if a size is wrong, for the error.
        error: makes the error for a tensor that is missing or has another rank.

    Raises:
        CheckpointError: a tensor is missing, or a size is out of range.
    """

    def shape(name: str, rank: int) -> tuple[int, ...]:
        stored_shape = tuple(weights[name].shape) if name in weights else ()
        if len(stored_shape) != rank:
            raise error(f"`{name}` is missing or not of rank {rank}")
        return stored_shape

    def layers(side: str) -> int:
        return len({name.split(".")[2] for name in weights if name.startswith(f"{side}.blocks.")})

    width, n_mels, _ = shape("encoder.conv1.weight", 3)
    n_vocab, text_width = shape("decoder.token_embedding.weight", 2)
    n_audio_head, n_text_head = heads(width)
    sizes = {
        "n_mels": n_mels,
        "n_audio_ctx": shape("encoder.positional_embedding", 2)[0],
        "n_audio_state": width,
        "n_audio_head": n_audio_head,
        "n_audio_layer": layers("encoder"),
        "n_text_ctx": shape("decoder.positional_embedding", 2)[0],
        "n_text_state": text_width,
        "n_text_head": n_text_head,
        "n_text_layer": layers("decoder"),
        "n_vocab": n_vocab,
        "n_audio_ffn": shape("encoder.blocks.0.mlp.0.weight", 2)[0],
        "n_text_ffn": shape("decoder.blocks.0.mlp.0.weight", 2)[0],
    }
    return checked_dims(sizes, what=what, keys={})


def _block(
    prefix: str, d: int, inner: int, attentions: Sequence[str]
) -> Iterator[tuple[str, Shape]]:
    for attention in attentions:
        for module in ("query", "key", "value", "out"):
            yield f"{prefix}.{attention}.{module}.weight", (d, d)
            if module != "key":  # Whisper's keys have no bias: it would cancel in the softmax
                yield f"{prefix}.{attention}.{module}.bias", (d,)
        yield f"{prefix}.{attention}_ln.weight", (d,)
        yield f"{prefix}.{attention}_ln.bias", (d,)
    yield f"{prefix}.mlp.0.weight", (inner, d)
    yield f"{prefix}.mlp.0.bias", (inner,)
    yield f"{prefix}.mlp.2.weight", (d, inner)
    yield f"{prefix}.mlp.2.bias", (d,)
    yield f"{prefix}.mlp_ln.weight", (d,)
    yield f"{prefix}.mlp_ln.bias", (d,)


def reject_incomplete_model(names: Iterable[str], *, where: str) -> None:
    """Reject a checkpoint that has only an encoder or only a decoder.

    Args:
        names: names of its tensors.
        where: the checkpoint, for the error.

    Raises:
        CheckpointError: it does.
    """
    sides = {name.partition(".")[0] for name in names} & {"encoder", "decoder"}
    if len(sides) == 1:
        (there,) = sides
        absent = "decoder" if there == "encoder" else "encoder"
        raise CheckpointError(
            f"`{where}` holds no {absent}",
            why=f"all of its tensors belong to the {there}: it may be an audio classifier or a draft model",
            hint="give a checkpoint with encoder and decoder",
        )


def check_tensors(
    weights: Mapping[str, Tensor],
    dims: Dims,
    *,
    where: str,
    unexpected: Sequence[str] = (),
    original_name: Callable[[str], str] = str,
) -> None:
    """Check names, shapes, dtypes and values of all tensors.

    Args:
        weights: openai-whisper's name -> tensor.
        dims: sizes of the model.
        where: the checkpoint, for the error.
        unexpected: names in the file that have no openai-whisper name.
        original_name: translates an openai-whisper name to the name in the file.

    Raises:
        CheckpointError: tensors are missing or unexpected, have another shape or dtype, or are not
            finite. The error lists them.
    """
    shapes = expected_shapes(dims)
    missing = [original_name(name) for name in shapes if name not in weights]
    unknown = [*unexpected, *(original_name(name) for name in weights if name not in shapes)]
    misshaped, mistyped, well_formed = [], [], []
    for name, shape in shapes.items():
        if name not in weights:
            continue
        stored_shape = tuple(weights[name].shape)
        if stored_shape != shape:
            misshaped.append(f"{original_name(name)} (expected {shape}, found {stored_shape})")
        elif weights[name].dtype not in _DTYPES:
            mistyped.append(
                f"{original_name(name)} ({str(weights[name].dtype).removeprefix('torch.')})"
            )
        else:
            well_formed.append(name)
    faults = [
        listing("missing", missing),
        listing("unexpected", unknown),
        listing("of another shape", misshaped),
        listing("not float32, float16 or bfloat16", mistyped),
    ]
    if any(faults):
        raise CheckpointError(
            f"the tensors in `{where}` do not match its sizes",
            why="; ".join(fault for fault in faults if fault),
            hint="save the model in float32: `model.float()`"
            if faults[:3] == ["", "", ""]
            else "check that weights and sizes belong to one checkpoint, and that all files were saved",
        )
    not_finite = [
        original_name(name) for name in well_formed if not bool(torch.isfinite(weights[name]).all())
    ]
    if not_finite:
        raise CheckpointError(
            f"weights in `{where}` are not finite",
            why=listing("with NaN or infinity", not_finite),
            hint="use an earlier checkpoint of the training, or convert from float32 to bfloat16",
        )


def listing(kind: str, names: Sequence[str]) -> str:
    """Return the number of tensors of a kind and the first of their names; empty: there are none."""
    if not names:
        return ""
    listed = ", ".join(shorten(name) for name in names[:_LISTED])
    rest = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{len(names)} {kind}: {listed}{rest}"
