"""What whisper.cpp demands of a ggml file.

Source: ggml-org/whisper.cpp@233fe1f, src/whisper.cpp, and runs of files that have one fault.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.arrays import weight
from whisperport.build.layouts.checkpoint_rules import (
    Setting,
    checkpoint_rules,
    other_filters,
    token_setting,
)
from whisperport.build.layouts.huggingface_files import text_tokens
from whisperport.build.layouts.reading import Files, Reader
from whisperport.build.layouts.rules import Draft, layout_rule
from whisperport.build.layouts.whisper_cpp.file import BLOCK, F32, tensor_type, write
from whisperport.errors import CheckpointError, ProgramError
from whisperport.program.dims import KNOWN_VOCABULARIES

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

MAGIC_BYTES = 4
NUMBERS = (
    *("n_vocab", "n_audio_ctx", "n_audio_state", "n_audio_head", "n_audio_layer"),
    *("n_text_ctx", "n_text_state", "n_text_head", "n_text_layer", "n_mels", "ftype"),
)
VERSIONS = 1000  # of quantized types, by which the header's type is multiplied and added
# The header's type -> the type of matrices. Source: ggml-org/whisper.cpp@233fe1f, ggml/include/ggml.h.
MATRICES = {0: 0, 1: 1, 2: 2, 3: 3, 7: 8, 8: 6, 9: 7, 24: 30}
CANTONESE = 51866  # size of the vocabulary of large-v3 and turbo
DISTILLED_LAYERS = 2
NEAR = 0.95  # of the values of the first blocks: they are within a step
SIGNS = np.array([0, 0] + [128] * BLOCK, np.uint8)  # of a block, without its scale
# How converters write a block of 8 bits by mistake -> what makes it ggml's: a scale, then the integers.
FORMS: dict[str, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    "the scale is behind the integers, not before them": lambda b: np.roll(b, 2, 1),
    "the two bytes of each scale are exchanged": lambda b: b[:, [1, 0, *range(2, b.shape[1])]],
    "the integers are without a sign, around 128": lambda b: b ^ SIGNS,
}


def is_taken_for_distilled(n_text_layer: int, n_vocab: int) -> bool:
    """Return whether whisper.cpp takes a model of these sizes for one of the first distilled ones.

    Source: ggml-org/whisper.cpp@233fe1f, src/whisper.cpp, `is_distil`.
    """
    return n_text_layer == DISTILLED_LAYERS and n_vocab != CANTONESE


def _write_half(draft: Draft) -> str:
    """Write the file again from what it holds, in float16."""
    from whisperport.model.checkpoint import load_checkpoint

    write(load_checkpoint(str(draft.files.path)), "fp16", draft.files.path)
    return "weights in float16"


@layout_rule("WP751", "All weights are of float32", remedy="fix", repair=_write_half)
def full_precision(files: Files) -> Iterator[tuple[str, str]]:
    """whisper.cpp computes the convolutions from weights of float16. A file whose type is 0 (all weights in
    float32) loads, and the process ends at the first window: "GGML_ASSERT(src0->type == GGML_TYPE_F16)".

    What to do: `whisperport convert CHECKPOINT --for whisper.cpp` writes float16, or 8 bits with
    `--precision w8`.
    """
    if _header(files)["ftype"] == 0:
        yield files.path.name, "its type is 0"


@layout_rule(
    "WP752",
    "The app takes the model for one of the first distilled ones",
    is_warning=True,
    remedy="another app",
)
def distilled(files: Files) -> Iterator[tuple[str, str]]:
    """whisper.cpp decodes every model of two decoder layers without timestamps, unless its vocabulary is
    that of large-v3: "first release distilled models - forcing no_timestamps". Each window becomes one
    segment, and a fine-tune that was trained with timestamps may lose words.

    What to do: use another app, such as faster-whisper, if the timestamps matter.
    """
    header = _header(files)
    if is_taken_for_distilled(header["n_text_layer"], header["n_vocab"]):
        yield files.path.name, f"{DISTILLED_LAYERS} decoder layers, {header['n_vocab']} tokens"


@layout_rule("WP753", "The app does not know a vocabulary of this size", remedy="another app")
def known_vocabulary(files: Files) -> Iterator[tuple[str, str]]:
    """whisper.cpp computes the ids of special tokens from the number of tokens. A fine-tune with added
    tokens shifts them, so that the text is nonsense.

    What to do: use an app that reads the ids from the files, such as faster-whisper.
    """
    size = _header(files)["n_vocab"]
    if size not in KNOWN_VOCABULARIES:
        known = ", ".join(map(str, KNOWN_VOCABULARIES))
        yield files.path.name, f"{size} tokens; known are {known}"


@layout_rule("WP754", "The file does not hold the tensors that the app reads")
def every_tensor(files: Files) -> Iterator[tuple[str, str]]:
    """whisper.cpp loads no file that was cut off, or whose tensors are not Whisper's: "not all tensors
    loaded from model file", "unknown tensor", "failed to load model".

    What to do: download it again, or write it by `whisperport convert CHECKPOINT --for whisper.cpp`.
    """
    from whisperport.model.checkpoint.ggml import read_types

    name = files.path.name
    try:
        types = files.read("", read_types)
    except CheckpointError as error:
        yield name, error.why or str(error)
        return
    if absent := [tensor for tensor, kind in types.items() if kind is None]:
        more = f" and {len(absent) - 1} more" if len(absent) > 1 else ""
        yield name, f"it lacks {absent[0]}{more}"


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    from whisperport.model.checkpoint.ggml import read_sound_and_text

    name = files.path.name
    for key, size in _header(files).items():
        if key != "ftype":
            yield Setting(name, key, size, getattr(checkpoint.dims, key))
    try:
        filters, tokens = files.read("", read_sound_and_text)
    except CheckpointError:
        return  # the comparison of weights says what is wrong
    if reason := other_filters(filters.numpy(), checkpoint.dims.n_mels):
        yield Setting.wrong(name, f"the mel filters are not those of the checkpoint: {reason}")
    yield from _types(files, checkpoint)
    yield from _blocks(files, checkpoint)
    right_tokens = text_tokens(checkpoint)
    if len(tokens) < len(right_tokens):
        reason = (
            f"it lists {len(tokens):,} tokens; the checkpoint has {len(right_tokens):,} of text"
        )
        yield Setting.wrong(name, reason)
    stated, expected = (
        {i: token.decode("utf-8", "backslashreplace") for i, token in enumerate(texts)}
        for texts in (tokens, right_tokens)
    )
    yield from token_setting(name, stated, expected)


def _blocks(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    """Yield the tensors of 8 bits whose blocks have another form than ggml's."""
    from whisperport.model.checkpoint.ggml import read_blocks

    try:
        stored = files.read("", read_blocks)
    except CheckpointError:
        return  # the comparison of weights says what is wrong
    for tensor, blocks in stored.items():
        if tensor not in checkpoint.weights or checkpoint.weights[tensor].numel() < BLOCK * len(
            blocks
        ):
            continue
        right = weight(checkpoint, tensor).reshape(-1)[: BLOCK * len(blocks)].reshape(-1, BLOCK)
        if _is_near(blocks, right):
            continue
        forms = (words for words, change in FORMS.items() if _is_near(change(blocks), right))
        if form := next(forms, ""):
            yield Setting.wrong(files.path.name, f"{tensor}: in its blocks of {BLOCK}, {form}")


def _is_near(blocks: NDArray[np.uint8], right: NDArray[Any]) -> bool:
    """Return whether blocks (n, 34) hold values (n, 32), but for rounding."""
    scale = np.ascontiguousarray(blocks[:, :2]).view(np.float16).astype(np.float32)
    integers = np.ascontiguousarray(blocks[:, 2:]).view(np.int8)
    with np.errstate(all="ignore"):
        return bool(np.mean(np.abs(integers * scale - right) <= np.abs(scale)) > NEAR)


def _types(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    """Yield the tensors whose type is not that which the header says, and a type that is not known."""
    from whisperport.model.checkpoint.ggml import read_types

    name, header_type = files.path.name, _header(files)["ftype"] % VERSIONS
    if header_type not in MATRICES:
        reason = f"ftype is {_header(files)['ftype']}, which is no type of the app's files"
        yield Setting.wrong(name, reason)
        return
    try:
        types = files.read("", read_types)
    except CheckpointError:
        return  # the comparison of weights says what is wrong
    for tensor, kind in types.items():
        shape = checkpoint.weights[tensor].shape if tensor in checkpoint.weights else ()
        right = tensor_type(tensor, shape, MATRICES[header_type])
        right = F32 if header_type == 0 and len(shape) < 3 else right
        if shape and kind not in (right, None):
            reason = (
                f"{tensor} has ggml's type {kind}; by the header's ftype {header_type} it is {right}: "
                '"tensor has wrong size in model file"'
            )
            yield Setting.wrong(name, reason)


RULES = (full_precision, distilled, known_vocabulary, every_tensor, *checkpoint_rules(_settings))


def _header(files: Files) -> Mapping[str, int]:
    return files.read("", _numbers)


def _numbers(path: Path) -> Mapping[str, int]:
    form = f"<{len(NUMBERS)}i"
    try:
        with path.open("rb") as file:
            file.seek(MAGIC_BYTES)
            return dict(
                zip(NUMBERS, struct.unpack(form, file.read(struct.calcsize(form))), strict=True)
            )
    except struct.error as error:
        raise ProgramError(f"{path.name} is truncated", why=str(error)) from error


def _recognize(files: Files) -> bool:
    from whisperport.model.checkpoint.ggml import is_ggml

    return files.path.is_file() and is_ggml(files.path)


def _precisions(files: Files) -> list[str]:
    kind = _header(files)["ftype"]
    return [{0: "fp32", 1: "fp16"}.get(kind, "w8")]


READER = Reader(_recognize, _precisions)
