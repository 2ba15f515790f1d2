"""What transformers.js, onnx-asr and optimum demand of a folder of ONNX files.

Source: huggingface/transformers.js@0cd32e5, onnx-asr 0.12.0, huggingface/optimum-onnx@1939f27, and runs of
each with folders that lack one thing.
"""

import os
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.checkpoint_rules import (
    Setting,
    checkpoint_rules,
    missing_tokens,
    other_filters,
    settings_of,
    token_setting,
)
from whisperport.build.layouts.huggingface_files import (
    all_tokens,
    ids_by_token,
    preprocessor_config,
    write_json,
)
from whisperport.build.layouts.huggingface_rules import (
    CONFIG,
    GENERATION,
    NO_TIMESTAMPS,
    PREPROCESSOR,
    TOKENIZER,
    n_vocab,
    settings,
    stored_ids,
    update,
    write_bands,
)
from whisperport.build.layouts.huggingface_rules import RULES as SETTINGS
from whisperport.build.layouts.onnx_graph.file import Value
from whisperport.build.layouts.onnx_graph.header import (
    OnnxHeader,
    change_model,
    difference,
    read_header,
    rename,
    wrong_convolutions,
)
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.reading import Files, Reader, StoredArray
from whisperport.build.layouts.rules import Draft, LayoutRule, layout_rule
from whisperport.build.layouts.transformers_js.folder import DTYPES, SUFFIXES
from whisperport.build.layouts.transformers_js.graphs import (
    PARTS,
    SIDES,
    decoder_values,
    encoder_values,
    write_merged_decoder,
)
from whisperport.program.dims import LARGEST, Dims

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

OWN, OUTSIDE = "transformers.js_config", "use_external_data_format"
# The app's types -> the end of a file's name. Source: src/utils/dtypes.js of transformers.js.
ENDS = {dtype: SUFFIXES[precision] for precision, dtype in DTYPES.items()} | {
    name: f"_{name}"
    for name in ("int8", "uint8", "q4", "q2", "q1", "q4f16", "q2f16", "q1f16", "bnb4")
}
MERGED, ENCODER = "decoder_model_merged", "encoder_model"
DECODER, WITH_PAST = "decoder_model", "decoder_with_past_model"  # of which it is made
GRAPH_FILE = re.compile(r"\.onnx|\.data$")  # with what it stores in other files
PAST = re.compile(r"past_key_values\.(\d+)\.(decoder|encoder)\.(key|value)")

ONES = dict.fromkeys(
    LARGEST, 1
)  # sizes of a graph of which only names and numbers of axes are read
PAST_LENGTH = "past_decoder_sequence_length"


def _write_layers(draft: Draft) -> str:
    """Write the number of layers whose caches the graph has."""
    layers = draft.sizes.get("decoder_layers")
    if layers is None or layers == draft.files.json(CONFIG).get("decoder_layers"):
        return ""
    update(draft, CONFIG, {"decoder_layers": layers})
    return f"{CONFIG}: decoder_layers {layers}"


def _write_values(draft: Draft) -> str:
    """Write the number of layers, or rename inputs and outputs of which as many are missing as are new."""
    changed = [_write_layers(draft)]
    for file, header, *sides in _signatures(draft.files):
        names: dict[str, str] = {}
        for values, known in zip((header.inputs, header.outputs), sides, strict=True):
            expected = [name for name, *_ in known]
            missing = [name for name in expected if name not in values]
            further = [name for name in values if name not in expected]
            if len(missing) == len(further):
                names |= dict(zip(further, missing, strict=True))
        if names:
            change_model(draft.files.path / file, partial(rename, names=names))
            changed.append(f"{file}: {', '.join(f'{a} is {b}' for a, b in names.items())}")
    return "; ".join(filter(None, changed))


def _write_decoder(draft: Draft) -> str:
    """Write the merged decoder of the checkpoint."""
    if draft.checkpoint is None:
        return ""
    encoder = next(_graphs(draft.files, ENCODER), "")
    name = encoder.replace(ENCODER, MERGED)
    ends = {f"{ENCODER}{end}.onnx": precision for precision, end in SUFFIXES.items()}
    precision = ends.get(encoder.rpartition("/")[2])
    if precision is None:
        return ""
    write_merged_decoder(draft.checkpoint, precision, draft.files.path / name)
    return f"{name} of the checkpoint"


def _write_order(draft: Draft) -> str:
    def sort(model: Any) -> None:
        sides = ((model.graph.input, "past_key_values"), (model.graph.output, "present"))
        for values, prefix in sides:
            ordered = list(values)
            places = [i for i, value in enumerate(ordered) if value.name.startswith(f"{prefix}.")]
            names = _caches(prefix, len(places) // 4)
            caches = sorted((ordered[i] for i in places), key=lambda v: names.index(v.name))
            for i, cache in zip(places, caches, strict=True):
                ordered[i] = cache
            del values[:]
            values.extend(ordered)

    return _changed_models(draft, order, sort, "caches in the order of layers")


def _write_symbols(draft: Draft) -> str:
    def name(model: Any) -> None:
        for value in model.graph.input:
            axes = value.type.tensor_type.shape.dim
            match = PAST.fullmatch(value.name)
            if match and len(axes) == 4 and match[2] == "decoder":
                axes[2].dim_param = PAST_LENGTH
            elif match and len(axes) == 4:
                axes[2].dim_param = "encoder_sequence_length_out"

    return _changed_models(draft, first_cache, name, "the length of the first cache is a symbol")


def _changed_models(
    draft: Draft, rule: LayoutRule, change: Callable[[Any], None], what: str
) -> str:
    names = list(dict.fromkeys(name for name, _ in rule.check(draft.files)))
    for name in names:
        change_model(draft.files.path / name, change)
    return f"{', '.join(names)}: {what}"


def _write_tokens(draft: Draft) -> str:
    """Write the tables of tokens that onnx-asr reads."""
    content = draft.files.json(TOKENIZER)
    tokens, size = stored_ids(content), n_vocab(draft)
    if NO_TIMESTAMPS not in tokens or max(tokens.values()) >= size:
        return ""
    text = content["model"]["vocab"]
    every = all_tokens(tokens, tokens[NO_TIMESTAMPS] + 1, size)
    added = {token: i for i, token in enumerate(every) if text.get(token) != i}
    write_json(draft.files.path / "vocab.json", text)
    write_json(draft.files.path / "added_tokens.json", added)
    return f"vocab.json and added_tokens.json of {TOKENIZER}"


def _move_graphs(draft: Draft) -> str:
    target = draft.files.path / "onnx"
    target.mkdir(exist_ok=True)
    paths = [path for path in draft.files.path.iterdir() if GRAPH_FILE.search(path.name)]
    for path in paths:
        if path.is_file():
            os.replace(path, target / path.name)
    return "the graphs are in the folder `onnx`"


@layout_rule("WP710", "A file that the app looks for is missing")
def needed(files: Files) -> Iterator[tuple[str, str]]:
    """The app fails: "Could not locate file".

    What to do: copy it from the checkpoint, or correct its name.
    """
    for name in (CONFIG, GENERATION, PREPROCESSOR, TOKENIZER):
        if not files.has(name):
            yield name, "the file is missing"
    stated = files.json(CONFIG).get(OWN)
    settings = stated if isinstance(stated, dict) else {}
    for part in (ENCODER, MERGED):
        paths = {PurePosixPath(name).name: name for name in _graphs(files, part)}
        dtype = str(_of_file(settings.get("dtype"), part))
        expected = f"{part}{ENDS.get(dtype, '')}.onnx"
        if dtype in ENDS and paths and expected not in paths:
            there = next(iter(paths))
            yield CONFIG, f"{OWN}.dtype is {dtype}: the app loads {expected}, and there is {there}"
        for name, path in paths.items():
            if files.has(f"{path}_data") and not _of_file(settings.get(OUTSIDE), name, part):
                why = f"{OWN}.{OUTSIDE} is not stated for {name}"
                yield CONFIG, f"{why}: in a browser, the app does not load {name}_data"


def _of_file(setting: object, *names: str) -> object:
    """Return a setting of a file: one for all, or under one of its names; None: there is none."""
    if not isinstance(setting, dict):
        return setting
    return next((setting[name] for name in names if name in setting), None)


@layout_rule(
    "WP711", "The merged decoder is missing", remedy="fix --checkpoint", repair=_write_decoder
)
def merged(files: Files) -> Iterator[tuple[str, str]]:
    """transformers.js and onnx-asr load one decoder for the first tokens and all others, and not optimum's
    `decoder_model.onnx` and `decoder_with_past_model.onnx`: "Could not locate file", of a name with
    "decoder_model_merged".

    What to do: `whisperport convert CHECKPOINT --for transformers.js`.
    """
    if not any(_graphs(files, MERGED)):
        yield f"onnx/{MERGED}.onnx", "the file is missing"
    elif not _precisions(files):
        encoder = next(_graphs(files, ENCODER))
        missing = encoder.replace(ENCODER, MERGED)
        yield missing, f"the file is missing; {encoder} is of another precision than the decoder"
    for name, header in _merged(files):
        has_cache = any(map(PAST.fullmatch, header.inputs))
        if not has_cache and "use_cache_branch" not in header.inputs:
            yield name, f"it is {DECODER}, which takes no cache"
        elif "encoder_hidden_states" not in header.inputs:
            yield name, f"it is {WITH_PAST}, which takes the caches of a first run"


@layout_rule(
    "WP712",
    "A graph lacks an input or an output, or has another one",
    remedy="fix",
    repair=_write_values,
)
def branch(files: Files) -> Iterator[tuple[str, str]]:
    """Apps give and read each by its name, also `use_cache_branch` and each layer's keys and values.

    What to do: `whisperport convert CHECKPOINT --for transformers.js`.
    """
    for name, header, inputs, outputs in _signatures(files):
        if reason := difference(header, inputs, outputs):
            yield name, reason


@layout_rule(
    "WP713",
    "The order of the caches is not the one that optimum expects",
    remedy="fix",
    repair=_write_order,
)
def order(files: Files) -> Iterator[tuple[str, str]]:
    """optimum pairs the caches that it gives and receives by their place, not by name: for each layer the
    decoder's key and value, then the encoder's key and value. In another order, the text is nonsense.

    What to do: `whisperport convert CHECKPOINT --for optimum`.
    """
    for name, header in _merged(files):
        for values, prefix in ((header.inputs, "past_key_values"), (header.outputs, "present")):
            caches = [value for value in values if value.startswith(f"{prefix}.")]
            expected = _caches(prefix, len(caches) // 4)
            if caches != expected and sorted(caches) == sorted(expected):
                place = next(i for i, cache in enumerate(caches) if cache != expected[i])
                yield name, f"{caches[place]} is where {expected[place]} is expected"
                break


@layout_rule(
    "WP714", "The length of the first cache is a number", remedy="fix", repair=_write_symbols
)
def first_cache(files: Files) -> Iterator[tuple[str, str]]:
    """transformers.js makes the first caches from these sizes: a symbol becomes 0, a number stays, so that
    the first cache has 448 rows of zeros.

    What to do: `whisperport convert CHECKPOINT --for transformers.js`.
    """
    for name, header in _merged(files):
        for input_, sizes in header.inputs.items():
            if PAST.fullmatch(input_) and len(sizes) == 4 and isinstance(sizes[2], int):
                yield name, f"{input_} has {sizes[2]} rows"
                break


@layout_rule(
    "WP715",
    "The decoder does not return its cross-attention",
    is_warning=True,
    remedy="fix --checkpoint",
    repair=_write_decoder,
)
def cross_attentions(files: Files) -> Iterator[tuple[str, str]]:
    """transformers.js computes word timestamps from outputs `cross_attentions.I` of all decoder layers.
    Without them: "Model outputs must contain cross attentions to extract timestamps".

    What to do: `whisperport convert CHECKPOINT --for transformers.js`.
    """
    for name, header in _merged(files):
        layers = {match[1] for match in map(PAST.fullmatch, header.inputs) if match}
        missing = [i for i in sorted(layers) if f"cross_attentions.{i}" not in header.outputs]
        if missing:
            yield name, f"no output cross_attentions.{missing[0]}"


@layout_rule(
    "WP716",
    "A file that onnx-asr reads is missing",
    is_warning=True,
    remedy="fix",
    repair=_write_tokens,
)
def onnx_asr_files(files: Files) -> Iterator[tuple[str, str]]:
    """onnx-asr does not read `tokenizer.json`. Folders that transformers 5 saves lack both other files.

    What to do: `whisperport convert CHECKPOINT --for onnx-asr`, or save the tokenizer with transformers 4.
    """
    missing = [name for name in ("vocab.json", "added_tokens.json") if not files.has(name)]
    if missing:
        yield missing[0], "the file is missing"


@layout_rule(
    "WP717",
    "The encoder takes another number of mel bands or frames than the settings say",
    remedy="fix",
    repair=write_bands,
)
def encoder_bands(files: Files) -> Iterator[tuple[str, str]]:
    """It takes 128 bands for large-v3 and turbo, else 80. Apps compute as many as the settings say.

    What to do: take graph and settings from the same checkpoint.
    """
    stated, positions = (
        files.json(CONFIG).get(k) for k in ("num_mel_bins", "max_source_positions")
    )
    for name in _graphs(files, ENCODER):
        sizes = files.read(name, read_header).inputs.get("input_features", [])
        if len(sizes) != 3:
            continue
        if isinstance(sizes[1], int) and stated and sizes[1] != stated:
            yield name, f"{sizes[1]} bands; {CONFIG} has num_mel_bins {stated}"
        elif isinstance(sizes[2], int) and isinstance(positions, int) and sizes[2] != 2 * positions:
            yield name, f"{sizes[2]} frames; {CONFIG} has max_source_positions {positions}"


@layout_rule(
    "WP718",
    "The ONNX files are not in the folder `onnx`",
    is_warning=True,
    remedy="fix",
    repair=_move_graphs,
)
def folder(files: Files) -> Iterator[tuple[str, str]]:
    """transformers.js: "Could not locate file", of the name "onnx/encoder_model.onnx". optimum,
    which writes them beside the settings, loads both.

    What to do: move the .onnx files to a folder `onnx`.
    """
    names = list(_graphs(files, ENCODER))
    if names and not any(name.startswith("onnx/") for name in names):
        yield names[0], "it is not in the folder `onnx`"


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    yield from settings(files, checkpoint)
    sound = preprocessor_config(checkpoint.dims)
    names = ("feature_extractor_type",)  # of the class that transformers.js makes
    stated_sound = files.json(PREPROCESSOR)
    yield from settings_of(PREPROCESSOR, stated_sound, sound, names)
    # The app computes them if the file has none.
    filters = stated_sound.get("mel_filters")
    reason = "" if filters is None else other_filters(_matrix(filters), checkpoint.dims.n_mels)
    if reason:
        yield Setting.wrong(PREPROCESSOR, f"mel_filters are not Whisper's: {reason}")
    right = {i: token for token, i in ids_by_token(checkpoint).items()}
    for name in ("vocab.json", "added_tokens.json"):  # onnx-asr reads these
        stated = {i: token for token, i in files.json(name).items() if isinstance(i, int)}
        yield from token_setting(name, stated, right)
    end = checkpoint.generation.end_of_text  # special tokens are in the other file
    text = {token: i for i, token in right.items() if token and i < end}
    yield from missing_tokens("vocab.json", files.json("vocab.json"), text)
    for file in _graphs(files, ENCODER):
        for reason in wrong_convolutions(files.read(file, read_header)):
            yield Setting.wrong(file, reason)
    for name, header in _merged(files):
        reads = {
            branch: any(match and match[2] == "decoder" for match in map(PAST.fullmatch, inputs))
            for branch, inputs in header.branches.items()
        }
        if reads == {"then_branch": False, "else_branch": True}:
            reason = (
                "its branches are exchanged: the first run reads the cache, and the others do not"
            )
            yield Setting.wrong(name, reason)


def _matrix(value: object) -> NDArray[Any]:
    """Return lists of numbers as a matrix; an empty one if they are none."""
    try:
        matrix = np.array(value, np.float32)
    except (TypeError, ValueError, OverflowError):
        return np.empty((0, 0), np.float32)
    return matrix if matrix.ndim == 2 else np.empty((0, 0), np.float32)


RULES = (
    *SETTINGS,
    *checkpoint_rules(_settings),
    needed,
    merged,
    branch,
    order,
    first_cache,
    cross_attentions,
    onnx_asr_files,
    encoder_bands,
    folder,
)


def _caches(prefix: str, n_layers: int) -> list[str]:
    """Return the names of the caches in their order."""
    return [
        f"{prefix}.{i}.{side}.{part}" for i in range(n_layers) for side in SIDES for part in PARTS
    ]


def _graphs(files: Files, part: str) -> Iterator[str]:
    """Yield the names of the ONNX files of a part, in `onnx/` or beside the settings."""
    for folder in ("onnx", "."):
        if (files.path / folder).is_dir():
            for path in sorted((files.path / folder).glob(f"{part}*.onnx")):
                yield path.relative_to(files.path).as_posix()


def _merged(files: Files) -> Iterator[tuple[str, OnnxHeader]]:
    for name in _graphs(files, MERGED):
        yield name, files.read(name, read_header)


def _signatures(files: Files) -> Iterator[tuple[str, OnnxHeader, list[Value], list[Value]]]:
    """Yield each graph with the inputs that apps give and the outputs that they read."""
    layers = files.json(CONFIG).get("decoder_layers")
    for name in _graphs(files, ENCODER):
        yield name, files.read(name, read_header), *encoder_values(Dims(**ONES))
    for name, header in _merged(files):
        stated = {match[1] for match in map(PAST.fullmatch, header.inputs) if match}
        count = max(1, len(stated))
        if isinstance(layers, int) and layers is not True and layers > 0:
            count = min(layers, 1000)
        inputs, outputs = decoder_values(Dims(**{**ONES, "n_text_layer": count}))
        yield (
            name,
            header,
            inputs,
            [value for value in outputs if not value[0].startswith("cross_attentions.")],
        )


def _recognize(files: Files) -> bool:
    return any(_graphs(files, ENCODER))


def _precisions(files: Files) -> list[str]:
    """Return those in which both parts are there; where the merged decoder is missing, any."""
    parts = (ENCODER, MERGED) if any(_graphs(files, MERGED)) else (ENCODER,)
    by_part = [{name.rpartition("/")[2] for name in _graphs(files, part)} for part in parts]
    return [
        precision
        for precision, end in SUFFIXES.items()
        if all(f"{part}{end}.onnx" in names for part, names in zip(parts, by_part, strict=True))
    ]


def _arrays(files: Files, precision: str) -> Iterator[StoredArray]:
    end = f"{SUFFIXES[precision]}.onnx"
    parts = (ENCODER, MERGED, "decoder_model", "decoder_with_past_model")
    file_names = {f"{part}{end}" for part in parts}
    names = (name for part in parts for name in _graphs(files, part))
    return stored_arrays(files, (n for n in names if n.rpartition("/")[2] in file_names))


def _sizes(files: Files) -> Mapping[str, int]:
    sizes: dict[str, int | str] = {}
    for name in _graphs(files, ENCODER):
        mel = files.read(name, read_header).inputs.get("input_features", [])
        sizes |= {"num_mel_bins": mel[1]} if len(mel) == 3 else {}
    for _, header in _merged(files):
        layers = {match[1] for match in map(PAST.fullmatch, header.inputs) if match}
        sizes |= {"decoder_layers": len(layers)} if layers else {}
        logits = header.outputs.get("logits", [])
        sizes |= {"vocab_size": logits[2]} if len(logits) == 3 else {}
    return {name: size for name, size in sizes.items() if isinstance(size, int) and size > 0}


READER = Reader(_recognize, _precisions, _arrays, _sizes)
