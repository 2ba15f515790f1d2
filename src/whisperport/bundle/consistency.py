"""Whether the parts of a manifest agree with each other, checked before anything is loaded.

Each part alone may be a valid one, as `manifest` checks it. Together they must describe one model that
the runtime can run: the programs' signatures follow from the sizes, token ids lie in the vocabulary, and
the memory that the sizes ask for is in proportion to the files.
"""

import math
from collections.abc import Iterator
from typing import Any, NoReturn

from whisperport.bundle.manifest import MANIFEST, Manifest
from whisperport.bundle.program_entry import ProgramEntry
from whisperport.bundle.strict_json import Field
from whisperport.errors import BundleError
from whisperport.generation import Generation
from whisperport.signatures import KvLayout, expected_signature, form_of
from whisperport.spec import ProgramSpec, TensorSpec

# Inputs and outputs of a program may have MAX_EXPANSION times the bytes of all files, and MIN_BYTES in any
# case. Those of `step` of whisper-tiny have 0.3 times, of large-v3 in 4 bits 0.8 times.
MAX_EXPANSION = 16
MIN_BYTES = 64 * 2**20
ITEM_BYTES = {"float32": 4, "float16": 2}

SPECIAL = ("start_of_transcript", "end_of_text", "start_of_previous", "no_speech", "no_timestamps")
LISTS = ("suppressed", "suppressed_at_start")
MAPPINGS = ("languages", "tasks")


def check_consistent(manifest: Manifest) -> None:
    """Compare the parts of a manifest with each other.

    Programs with a name that this version does not know are rejected: their signature cannot be
    checked, and loading them would run a compiler over a graph that nothing uses.

    Raises:
        BundleError: naming the field that does not agree with the rest.
    """
    _check_tokens(manifest)
    _check_alignment_heads(manifest)
    for i, entry in enumerate(manifest.programs):
        _check_signature(f"programs[{i}]", entry, manifest)
        _check_memory(entry.spec, manifest)
    _check_form(manifest)


def _check_tokens(manifest: Manifest) -> None:
    generation, n_vocab = manifest.generation, manifest.dims.n_vocab
    for path, token in _tokens(generation):
        if token >= n_vocab:
            _reject(path, f"is {token}; the vocabulary has ids 0 to {n_vocab - 1}")
    # What is below `end_of_text` is text, and what is above `no_timestamps` is a timestamp: the search
    # compares the two, so that neither may be empty.
    if not 0 < generation.end_of_text < generation.no_timestamps:
        _reject(
            "generation.end_of_text",
            f"is {generation.end_of_text}; expected a token between text and timestamps, "
            f"1 to {generation.no_timestamps - 1}",
        )
    if generation.timestamp_begin >= n_vocab:
        _reject(
            "generation.no_timestamps",
            f"is {generation.no_timestamps}, the last id of the vocabulary; timestamps come after it",
        )
    if generation.start_of_transcript == generation.end_of_text:
        _reject("generation.start_of_transcript", "is the same token as `end_of_text`")
    if generation.start_of_transcript == generation.no_timestamps:
        _reject("generation.start_of_transcript", "is the same token as `no_timestamps`")


def _tokens(generation: Generation) -> Iterator[tuple[str, int]]:
    """Every token id, after the path of its field."""
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
        expected = expected_signature(entry.spec, manifest.dims, manifest.window, heads)
    except ValueError as error:
        raise BundleError(
            f"{MANIFEST} is not valid: field `{path}.spec` describes no known program",
            why=str(error),
            hint="pip install --upgrade whisperport, if a newer one wrote the bundle; otherwise write "
            "the bundle again",
        ) from error
    _compare(f"{path}.spec.inputs", entry.spec.inputs, expected.inputs)
    _compare(f"{path}.spec.outputs", entry.spec.outputs, expected.outputs)


def _compare(path: str, found: tuple[TensorSpec, ...], expected: tuple[TensorSpec, ...]) -> None:
    if len(found) != len(expected):
        _reject(path, f"has {len(found)} tensors; expected {len(expected)} for these `dims`")
    for i, (one, wanted) in enumerate(zip(found, expected, strict=True)):
        for part in ("name", "shape", "dtype"):
            value, right = getattr(one, part), getattr(wanted, part)
            if value != right:
                _reject(
                    f"{path}[{i}].{part}",
                    f"is {str(value)[:80]!r}; expected {str(right)!r} for these `dims`, `window`, "
                    "`generation.alignment_heads` and this program's caches of layer 0",
                )


def _check_memory(spec: ProgramSpec, manifest: Manifest) -> None:
    """The sizes agree by now, so that the tensors are those which the runtime allocates."""
    stored = sum(file.bytes for file in manifest.files.values())
    limit = MIN_BYTES + MAX_EXPANSION * stored
    tensors = (*spec.inputs, *spec.outputs)
    needed = sum(ITEM_BYTES[tensor.dtype] * math.prod(tensor.shape) for tensor in tensors)
    if needed > limit:
        _reject(
            "dims",
            f"asks for {needed} bytes of inputs and outputs of `{spec.name}`; expected at most {limit} "
            f"for files of {stored} bytes",
        )


def _check_form(manifest: Manifest) -> None:
    """One cache serves all decode programs, and `cross_kv` returns what they take: in one form."""
    first: dict[
        str, tuple[str, Any]
    ] = {}  # field of the form -> program that was listed first, and its
    for i, entry in enumerate(manifest.programs):
        for name, found in form_of(entry.spec, manifest.dims, manifest.window).items():
            program, expected = first.setdefault(name, (entry.spec.name, found))
            if found != expected:
                _reject(
                    f"programs[{i}].spec",
                    f"has `{name}` as {_named(found)}; `{program}` has it as {_named(expected)}",
                )


def _named(form: KvLayout | str) -> str:
    if isinstance(form, str):
        return form
    return f"{form.dtype} (heads, {'width, rows' if form.axis == 2 else 'rows, width'})"


def _reject(path: str, why: str) -> NoReturn:
    Field(None, path, MANIFEST).reject(why)
