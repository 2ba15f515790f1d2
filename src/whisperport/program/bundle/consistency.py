"""Check that the parts of a manifest agree with each other, before anything is loaded.

`manifest` checks each part alone. This module checks that they describe one model that the runtime can
run: the programs' signatures follow from the sizes, token ids are in the vocabulary, and the memory that
the sizes require is in proportion to the size of the files.
"""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from whisperport.errors import BundleError
from whisperport.program.bundle.manifest import MANIFEST, Manifest
from whisperport.program.bundle.program_entry import ProgramEntry
from whisperport.program.generation import Generation
from whisperport.program.masks import MASKED
from whisperport.program.program_kind import CROSS_KV, ENCODER
from whisperport.program.signatures import KvLayout, expected_signature, form_of
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.program.strict_json import Field

# Inputs and outputs of a program together may have MAX_EXPANSION times the bytes of all files, or MIN_BYTES
# if that is more. `step` of whisper-tiny has 0.3 times the bytes, `step` of large-v3 in 4 bits 0.8 times.
MAX_EXPANSION = 16
MIN_BYTES = 64 * 2**20
ITEM_BYTES = {"float32": 4, "float16": 2}

SPECIAL = ("start_of_transcript", "end_of_text", "start_of_previous", "no_speech", "no_timestamps")
LISTS = ("suppressed", "suppressed_at_start")
MAPPINGS = ("languages", "tasks")


def check_consistent(manifest: Manifest) -> None:
    """Check that the parts of a manifest agree with each other.

    Programs with an unknown name are rejected: their signature cannot be checked, and nothing uses them.

    Raises:
        BundleError: a field does not agree with the others; the message names the field.
    """
    _check_tokens(manifest)
    _check_alignment_heads(manifest)
    for i, entry in enumerate(manifest.programs):
        _check_signature(f"programs[{i}]", entry, manifest)
        _check_memory(entry.spec, manifest)
        if entry.placement.mask != MASKED and "mask" not in {t.name for t in entry.spec.inputs}:
            _reject(
                f"programs[{i}].placement.mask", "is given, but the program has no input `mask`"
            )
    _check_form(manifest)
    _check_lengths(manifest)


def _check_tokens(manifest: Manifest) -> None:
    generation, n_vocab = manifest.generation, manifest.dims.n_vocab
    for path, token in _tokens(generation):
        if token >= n_vocab:
            _reject(path, f"is {token}; the vocabulary has ids 0 to {n_vocab - 1}")
    # Tokens below `end_of_text` are text, and tokens above `no_timestamps` are timestamps. The decoding
    # search compares the two groups, so neither may be empty.
    if not 0 < generation.end_of_text < generation.no_timestamps:
        _reject(
            "generation.end_of_text",
            f"is {generation.end_of_text}; expected a token between text and timestamps, "
            f"1 to {generation.no_timestamps - 1}",
        )
    if generation.timestamp_begin >= n_vocab:
        _reject(
            "generation.no_timestamps",
            f"is {generation.no_timestamps}, the last id of the vocabulary; expected timestamps after it",
        )
    if generation.start_of_transcript == generation.end_of_text:
        _reject("generation.start_of_transcript", "is the same token as `end_of_text`")
    if generation.start_of_transcript == generation.no_timestamps:
        _reject("generation.start_of_transcript", "is the same token as `no_timestamps`")


def _tokens(generation: Generation) -> Iterator[tuple[str, int]]:
    """All token ids of the manifest, each with the path of its field."""
    for name in SPECIAL:
        yield f"generation.{name}", getattr(generation, name)
    for name in LISTS:
        for i, token in enumerate(getattr(generation, name)):
            yield f"generation.{name}[{i}]", token
    for name in MAPPINGS:
        for key, token in getattr(generation, name).items():
            yield f"generation.{name}.{key}", token


def _check_alignment_heads(manifest: Manifest) -> None:
    layers, heads = manifest.dims.n_text_layer, manifest.dims.n_text_head
    for i, (layer, head) in enumerate(manifest.generation.alignment_heads):
        if layer >= layers or head >= heads:
            _reject(
                f"generation.alignment_heads[{i}]",
                f"is layer {layer}, head {head}; the decoder has {layers} layers of {heads} heads",
            )


def _check_signature(path: str, entry: ProgramEntry, manifest: Manifest) -> None:
    heads = len(manifest.generation.alignment_heads)
    try:
        expected = expected_signature(
            entry.spec, manifest.dims, manifest.window, heads, manifest.adapters
        )
    except ValueError as error:
        raise BundleError(
            f"{MANIFEST} is not valid: field `{path}.spec` does not describe a known program",
            why=str(error),
            hint="if a newer whisperport wrote the bundle: pip install --upgrade whisperport; otherwise "
            "export the bundle again",
        ) from error
    _compare(f"{path}.spec.inputs", entry.spec.inputs, expected.inputs)
    _compare(f"{path}.spec.outputs", entry.spec.outputs, expected.outputs)


def _compare(path: str, tensors: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...]) -> None:
    if len(tensors) != len(expected):
        _reject(path, f"has {len(tensors)} tensors; expected {len(expected)} for these `dims`")
    for i, (tensor, reference) in enumerate(zip(tensors, expected, strict=True)):
        for part in ("name", "shape", "dtype"):
            value, right = getattr(tensor, part), getattr(reference, part)
            if value != right:
                _reject(
                    f"{path}[{i}].{part}",
                    f"is {str(value)[:80]!r}; expected {str(right)!r} for these `dims`, `window`, "
                    "`generation.alignment_heads`, `adapters`, and the caches of layer 0 of this program",
                )


def _check_memory(spec: ProgramSpec, manifest: Manifest) -> None:
    """Check the size of a program's inputs and outputs, which the runtime allocates."""
    stored = sum(file.bytes for file in manifest.files.values())
    limit = MIN_BYTES + MAX_EXPANSION * stored
    tensors = (*spec.inputs, *spec.outputs)
    needed = sum(ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors)
    if needed > limit:
        _reject(
            "dims",
            f"requires {needed} bytes for inputs and outputs of `{spec.name}`; expected at most {limit} "
            f"for files of {stored} bytes",
        )


def _check_form(manifest: Manifest) -> None:
    """Check that all programs have one form of cache: `cross_kv` writes it, decode programs share it."""
    # Field of the form -> the first program that has it, and that program's value.
    first: dict[str, tuple[str, Any]] = {}
    for i, entry in enumerate(manifest.programs):
        for name, value in form_of(entry.spec, manifest.dims, manifest.window).items():
            program, expected = first.setdefault(name, (entry.spec.name, value))
            if value != expected:
                _reject(
                    f"programs[{i}].spec",
                    f"has `{name}` as {_described(value)}; `{program}` has it as {_described(expected)}",
                )


def _check_lengths(manifest: Manifest) -> None:
    """Check that there are programs for each length of a short window, if any, with inputs of one rank."""
    if not (lengths := manifest.lengths):
        return
    kinds = [entry.spec.kind for entry in manifest.programs if entry.spec.kind.positions]
    for name in (ENCODER, CROSS_KV):
        own = tuple(sorted(kind.positions for kind in kinds if kind.name == name))
        if own and own != lengths:
            _reject("programs", f"has `{name}` for {own} positions; expected {lengths}")
    encoders = [entry.spec for entry in manifest.programs if entry.spec.kind.name == ENCODER]
    if len(ranks := {len(spec.inputs[0].shape) for spec in encoders}) > 1:
        _reject("programs", f"has encoders with inputs of {sorted(ranks)} axes; expected one rank")
    if manifest.short_windows and not {*manifest.short_windows.positions} <= {*lengths}:
        _reject("short_windows.positions", f"has a length without programs; expected {lengths}")


def _described(form: KvLayout | str) -> str:
    if isinstance(form, str):
        return form
    return f"{form.dtype} (heads, {'width, rows' if form.axis == 2 else 'rows, width'})"


def _reject(path: str, why: str) -> NoReturn:
    Field(None, path, MANIFEST).reject(why)
