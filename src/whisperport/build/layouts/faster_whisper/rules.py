"""What faster-whisper demands of a folder of CTranslate2.

Source: faster-whisper 1.2.1, faster_whisper/transcribe.py, and runs with folders that lack one thing.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.checkpoint_rules import (
    Setting,
    checkpoint_rules,
    empty_files,
    settings_of,
    token_setting,
)
from whisperport.build.layouts.faster_whisper.folder import SWITCHES, config, variable_shapes
from whisperport.build.layouts.huggingface_files import (
    alignment_heads,
    all_tokens,
    preprocessor_config,
    tokenizer_json,
    tokens_by_id,
    with_heads,
    write_json,
)
from whisperport.build.layouts.huggingface_rules import (
    CONFIG,
    N_TIMESTAMPS,
    NO_TIMESTAMPS,
    PREPROCESSOR,
    TOKENIZER,
    merges,
    stored_ids,
    tokenizer_setting,
    update,
)
from whisperport.build.layouts.reading import (
    MAX_JSON_BYTES,
    Files,
    Reader,
    early_end,
)
from whisperport.build.layouts.rules import Draft, layout_rule
from whisperport.errors import ProgramError

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

MODEL, VOCABULARY = "model.bin", "vocabulary.json"
DEFAULT_BANDS = 80
# What the app reads in preprocessor_config.json.
SOUND = ("feature_size", "sampling_rate", "hop_length", "chunk_length", "n_fft")
# What CTranslate2 takes for a number that is missing; 0 for all others.
DEFAULTS = {"encoder/num_heads": 8, "decoder/num_heads": 8, "decoder/pre_norm": 1}
# Numbers that matter only with a switch that is off, or that config.json replaces.
WITHOUT_EFFECT = (
    *("alignment_heads", "alignment_layer", "alibi_use_positive_positions", "scale_alibi"),
)
# By their numbers. Source: OpenNMT/CTranslate2@0d8bcd3, include/ctranslate2/ops/activation.h.
ACTIVATIONS = (
    "ReLU",
    "GELU's tanh form",
    "Swish",
    "GELU",
    "GELU's sigmoid form",
    "tanh",
    "sigmoid",
)


def _write_tokenizer(draft: Draft) -> str:
    if draft.checkpoint is None:
        return ""
    write_json(draft.files.path / TOKENIZER, tokenizer_json(draft.checkpoint))
    return f"{TOKENIZER} of the checkpoint"


def _write_vocabulary(draft: Draft) -> str:
    """Write the token of each id from the checkpoint, or from a tokenizer that fits the model."""
    tokens = stored_ids(draft.files.json(TOKENIZER))
    size = _vocabulary_size(draft.files) or 0
    if draft.checkpoint is not None:
        every = tokens_by_id(draft.checkpoint)
    elif NO_TIMESTAMPS in tokens and tokens[NO_TIMESTAMPS] + 1 + N_TIMESTAMPS == size:
        every = all_tokens(tokens, tokens[NO_TIMESTAMPS] + 1, size)
    else:
        return ""
    write_json(draft.files.path / VOCABULARY, every)
    return f"{VOCABULARY}: {len(every)} tokens"


def _write_bands(draft: Draft) -> str:
    """Write the number of mel bands that the encoder takes."""
    bands = _sizes(draft.files)["encoder/conv1/weight"][1]
    update(draft, PREPROCESSOR, {"feature_size": bands})
    return f"{PREPROCESSOR}: feature_size {bands}"


def _write_heads(draft: Draft) -> str:
    """Write heads of the checkpoint; without it, the default of CTranslate2's converter."""
    if draft.checkpoint is not None:
        pairs = alignment_heads(with_heads(draft.checkpoint))
    else:
        layers, count = sorted(_layers(draft.files)), _n_heads(draft.files)
        pairs = [(layer, head) for layer in layers[len(layers) // 2 :] for head in range(count)]
    update(draft, CONFIG, {"alignment_heads": pairs})
    return f"{CONFIG}: {len(pairs)} alignment heads"


@layout_rule("WP741", "There is no tokenizer", remedy="fix --checkpoint", repair=_write_tokenizer)
def tokenizer(files: Files) -> Iterator[tuple[str, str]]:
    """Without `tokenizer.json`, faster-whisper downloads that of OpenAI's tiny. The text of a fine-tune
    with other tokens is then wrong, and without a network loading fails.

    What to do: copy tokenizer.json from the checkpoint, or `whisperport convert CHECKPOINT --for
    faster-whisper`.
    """
    if not files.has(TOKENIZER):
        yield TOKENIZER, "the file is missing"


@layout_rule(
    "WP742",
    "The vocabulary has another number of tokens than the model",
    remedy="fix",
    repair=_write_vocabulary,
)
def vocabulary(files: Files) -> Iterator[tuple[str, str]]:
    """`vocabulary.json` lists the token of each id. With fewer tokens than the model has, CTranslate2 stops
    at a timestamp ("Invalid token ID"). With more, or another model's, loading fails or the text is
    nonsense.

    What to do: take both files from the same checkpoint.
    """
    size = _vocabulary_size(files)
    if size is None:
        return
    tokens = files.read(VOCABULARY, _tokens) if files.has(VOCABULARY) else None
    if tokens is not None and len(tokens) != size:
        yield VOCABULARY, f"{len(tokens)} tokens; the model has {size}"


@layout_rule(
    "WP743",
    "The settings state other mel bands than the encoder takes",
    remedy="fix",
    repair=_write_bands,
)
def bands(files: Files) -> Iterator[tuple[str, str]]:
    """faster-whisper computes `feature_size` bands (`preprocessor_config.json`), or 80 if the file is
    missing. A model that takes 128, such as large-v3 and turbo, then fails with "Invalid input features
    shape".

    What to do: copy preprocessor_config.json from the checkpoint.
    """
    sizes = _sizes(files).get("encoder/conv1/weight")
    stated = files.json(PREPROCESSOR).get("feature_size", DEFAULT_BANDS)
    if sizes and len(sizes) == 3 and stated != sizes[1]:
        source = PREPROCESSOR if files.has(PREPROCESSOR) else f"without {PREPROCESSOR}"
        yield PREPROCESSOR, f"{source}: {stated} bands; the encoder takes {sizes[1]}"


@layout_rule(
    "WP744",
    "An alignment head of CTranslate2's settings is in no layer",
    remedy="fix",
    repair=_write_heads,
)
def heads(files: Files) -> Iterator[tuple[str, str]]:
    """`alignment_heads` in `config.json` are pairs of layer and head, of which word timestamps are
    computed. Those of a distilled model are often copied from the model that it was made of, which has
    more layers.

    What to do: `whisperport convert CHECKPOINT --for faster-whisper` finds the heads of its own layers.
    """
    layers, n_heads = _layers(files), _n_heads(files)
    pairs = files.json(CONFIG).get("alignment_heads")
    for pair in pairs if isinstance(pairs, list) and layers else ():
        is_pair = isinstance(pair, list) and len(pair) == 2
        layer, head = pair if is_pair else (None, None)
        if not (isinstance(layer, int) and layer in layers):
            yield CONFIG, f"{str(pair)[:80]}; the decoder has layers 0 to {max(layers)}"
            return
        if n_heads and not (isinstance(head, int) and 0 <= head < n_heads):
            yield (
                CONFIG,
                f"{str(pair)[:80]}; each layer of the decoder has heads 0 to {n_heads - 1}",
            )
            return


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    yield from _variables(files, checkpoint)
    yield from empty_files(files, CONFIG)
    stated, right = files.json(CONFIG), config(checkpoint)
    decoding = right.keys() - {"lang_ids"}  # by which the app finds what is spoken
    if stated and not right.keys() & stated.keys():
        whose = "; it is transformers' own" if "model_type" in stated else ""
        reason = f"it has no setting of CTranslate2, such as {', '.join(right)}{whose}"
        yield Setting.wrong(CONFIG, reason)
    else:
        yield from settings_of(CONFIG, stated, right, decoding=decoding, may_lack=False)
    sound = preprocessor_config(checkpoint.dims)
    yield from settings_of(PREPROCESSOR, files.json(PREPROCESSOR), sound, SOUND)
    yield from tokenizer_setting(files, checkpoint, shows_special=False)  # it decodes text only
    if files.has(VOCABULARY):
        every = tokens_by_id(checkpoint)
        tokens = files.read(VOCABULARY, _tokens)
        if len(tokens) not in (len(every), checkpoint.generation.timestamp_begin):
            reason = f"it has {len(tokens):,} tokens; the checkpoint has {len(every):,}"
            yield Setting.wrong(VOCABULARY, reason)
        yield from token_setting(VOCABULARY, dict(enumerate(tokens)), dict(enumerate(every)))


def _variables(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    """Yield how the variables of model.bin differ from those that this package writes."""
    from whisperport.model.checkpoint.ctranslate2 import EMBEDDING, PROJECTION
    from whisperport.model.checkpoint.ctranslate2_file import read_model_bin

    tensors = files.read(MODEL, read_model_bin).by_any_name
    expected = {f"decoder/{name}": int(number) for name, number in SWITCHES.items()}
    expected |= {"encoder/num_heads": checkpoint.dims.n_audio_head}
    expected |= {"decoder/num_heads": checkpoint.dims.n_text_head}
    numbers = {name: t.tolist() for name, t in tensors.items() if not t.ndim}
    for name in sorted(expected.keys() | numbers.keys()):
        default = DEFAULTS.get(name, 0)
        stated, right = numbers.get(name, default), expected.get(name, 0)
        if stated == right or name.endswith(("_scale", *WITHOUT_EFFECT)):
            continue
        verb = "is" if name in numbers else "is missing, which is"
        words = f"{name} {verb} {_meaning(name, stated)}"
        yield Setting.wrong(MODEL, f"{words}; the checkpoint has {_meaning(name, right)}")
    shapes = {name: tuple(t.shape) for name, t in tensors.items() if t.ndim}
    right_shapes = variable_shapes(checkpoint)
    for name, sizes in right_shapes.items():
        if name not in shapes:
            yield Setting.wrong(MODEL, f"the variable {name} is missing")
        else:
            yield Setting(MODEL, name, str(shapes[name]), str(sizes))
    if PROJECTION not in shapes:
        reason = f"the variable {PROJECTION} is missing: it is another name of {EMBEDDING}"
        yield Setting.wrong(MODEL, reason)
    for name in sorted(shapes):
        if name.removesuffix("_scale") not in {*right_shapes, PROJECTION}:
            reason = f"the variable {name} is none of Whisper: the app leaves it out"
            yield Setting.wrong(MODEL, reason, is_decoding=True)


def _meaning(name: str, number: object) -> str:
    """Return a switch in words."""
    if name.endswith("/activation") and isinstance(number, int):
        return dict(enumerate(ACTIVATIONS)).get(number, str(number))
    return str(number)


RULES = (merges, tokenizer, vocabulary, bands, heads, *checkpoint_rules(_settings))


def _sizes(files: Files) -> dict[str, tuple[int, ...]]:
    from whisperport.model.checkpoint.ctranslate2_file import read_model_bin

    tensors = files.read(MODEL, read_model_bin).by_any_name
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _layers(files: Files) -> set[int]:
    return {
        int(name.split("/")[1].removeprefix("layer_"))
        for name in _sizes(files)
        if name.startswith("decoder/layer_") and name.split("/")[1][6:].isdecimal()
    }


def _n_heads(files: Files) -> int:
    from whisperport.model.checkpoint.ctranslate2_file import read_model_bin

    return int(files.read(MODEL, read_model_bin).tensors.get("decoder/num_heads", 0))


def _vocabulary_size(files: Files) -> int | None:
    table = _sizes(files).get("decoder/embeddings/weight")
    return table[0] if table else None


def _tokens(path: Path) -> list[str]:
    try:
        if path.stat().st_size > MAX_JSON_BYTES:
            raise ValueError("it is too large")
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        state = early_end(path, b"[]")
        what = f"{path.name} is {state}" if state else f"cannot read {path}"
        raise ProgramError(what, why=str(error)[:200]) from error
    return [token for token in value if isinstance(token, str)] if isinstance(value, list) else []


def _precisions(files: Files) -> list[str]:
    from whisperport.model.checkpoint.ctranslate2_file import read_model_bin

    kinds = {str(t.dtype) for t in files.read(MODEL, read_model_bin).tensors.values() if t.ndim > 1}
    if kinds & {"torch.int8", "torch.int16"}:
        return ["w8"]
    return ["fp16" if kinds & {"torch.float16", "torch.bfloat16"} else "fp32"]


READER = Reader(
    lambda files: files.has(MODEL) and not files.has("model.safetensors"),
    _precisions,
)
