"""Rules for the JSON files of transformers, which several apps read, and how they are corrected.

Of two files that disagree, the one is right that fits the model's own sizes; if that does not tell, both
are written from the checkpoint.
"""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from whisperport.build.layouts import huggingface_files as files_of
from whisperport.build.layouts.checkpoint_rules import (
    Setting,
    default_settings,
    empty_files,
    missing_tokens,
    other_merges,
    settings_of,
    token_setting,
)
from whisperport.build.layouts.huggingface_files import (
    added_tokens,
    alignment_heads,
    generation_config,
    tokenizer_config,
    tokenizer_json,
    vocab,
    with_heads,
    write_json,
)
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import Draft, layout_rule
from whisperport.speech.text import LANGUAGES

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

CONFIG, GENERATION = "config.json", "generation_config.json"
PREPROCESSOR, TOKENIZER = "preprocessor_config.json", "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
CLASSES = ("WhisperTokenizerFast", "TokenizersBackend")  # other names of Whisper's, by the version
START, TRANSCRIBE = "<|startoftranscript|>", "<|transcribe|>"
NO_TIMESTAMPS = "<|notimestamps|>"
NAMED_IDS = {
    "decoder_start_token_id": START,
    "no_timestamps_token_id": NO_TIMESTAMPS,
    "eos_token_id": "<|endoftext|>",
}
"""Setting -> the token that it must be the id of."""
TABLES = ("lang_to_id", "task_to_id")
LANGUAGE_TOKENS = {f"<|{code}|>" for code in LANGUAGES}
N_TIMESTAMPS = 1501  # the last tokens of a vocabulary, which many tokenizers leave out


def _write_merges(draft: Draft) -> str:
    content = draft.files.json(TOKENIZER)
    stored = content["model"]["merges"]
    if any(isinstance(m, list) and any(" " in str(part) for part in m) for m in stored):
        return ""
    content["model"]["merges"] = [" ".join(m) if isinstance(m, list) else m for m in stored]
    write_json(draft.files.path / TOKENIZER, content)
    return f"{TOKENIZER}: each merge is one text"


def _write_ids(draft: Draft) -> str:
    """Write the settings' ids from the tokenizer if it fits the model, or both from the checkpoint."""
    if draft.checkpoint is not None:
        _write_tokenizer(draft.files, draft.checkpoint)
        known, source = generation_config(draft.checkpoint), "the checkpoint"
    else:
        tokens = stored_ids(draft.files.json(TOKENIZER))
        if max(tokens.values()) + 1 not in (n_vocab(draft), n_vocab(draft) - N_TIMESTAMPS):
            return ""
        known, source = _settings_of(tokens), TOKENIZER
    for name in (GENERATION, CONFIG):
        settings = draft.files.json(name)
        keys = [key for key in (*NAMED_IDS, *TABLES) if key in settings and key in known]
        if keys:
            update(draft, name, {key: known[key] for key in keys})
    return f"{GENERATION}: ids of {source}"


def _write_languages(draft: Draft) -> str:
    if draft.checkpoint is not None:
        known = generation_config(draft.checkpoint)
    else:
        known = _settings_of(stored_ids(draft.files.json(TOKENIZER)))
    missing = [key for key in TABLES if not draft.files.json(GENERATION).get(key)]
    if not all(known.get(key) for key in missing):
        return ""
    update(draft, GENERATION, {"is_multilingual": True, **{key: known[key] for key in missing}})
    return f"{GENERATION}: {' and '.join(missing)}"


def write_bands(draft: Draft) -> str:
    """Write the number of mel bands that the model takes to both files that state it."""
    checkpoint = draft.checkpoint
    bands = checkpoint.dims.n_mels if checkpoint else draft.sizes.get("num_mel_bins")
    if bands is None:
        return ""
    update(draft, CONFIG, {"num_mel_bins": bands})
    if draft.files.has(PREPROCESSOR):
        update(draft, PREPROCESSOR, {"feature_size": bands})
    return f"{bands} mel bands in {CONFIG} and {PREPROCESSOR}"


def _write_heads(draft: Draft) -> str:
    if draft.checkpoint is None:
        return ""
    pairs = alignment_heads(with_heads(draft.checkpoint))
    update(draft, GENERATION, {"alignment_heads": pairs})
    return f"{GENERATION}: {len(pairs)} alignment heads of the checkpoint"


def _write_vocabulary(draft: Draft) -> str:
    """Write the model's number of tokens, and if the tokenizer is another model's, the checkpoint's."""
    size, right = draft.files.json(CONFIG).get("vocab_size"), n_vocab(draft)
    changes = []
    if right != size:
        update(draft, CONFIG, {"vocab_size": right})
        changes.append(f"{CONFIG}: vocab_size {right}")
    tokens = stored_ids(draft.files.json(TOKENIZER))
    if draft.checkpoint and (max(tokens.values()) >= right or _missing(tokens)):
        _write_tokenizer(draft.files, draft.checkpoint)
        changes.append(f"{TOKENIZER} of the checkpoint")
    return "; ".join(changes)


def _missing(tokens: Mapping[str, int]) -> list[str]:
    """Return the tokens without which no transcript begins or ends."""
    return [token for token in NAMED_IDS.values() if token not in tokens]


def _write_tokenizer(files: Files, checkpoint: "Checkpoint") -> None:
    """Write the checkpoint's tokenizer to each file that holds one."""
    write_json(files.path / TOKENIZER, tokenizer_json(checkpoint))
    contents = {
        TOKENIZER_CONFIG: tokenizer_config(),
        "vocab.json": vocab(checkpoint),
        "added_tokens.json": added_tokens(checkpoint),
    }
    for name, content in contents.items():
        if files.has(name):
            write_json(files.path / name, content)


def update(draft: Draft, name: str, values: Mapping[str, Any]) -> None:
    """Change members of a JSON file."""
    write_json(draft.files.path / name, {**draft.files.json(name), **values})


def n_vocab(draft: Draft) -> int:
    """Return the model's number of tokens: the checkpoint's, the graph's, or the one in the settings."""
    if draft.checkpoint is not None:
        return draft.checkpoint.dims.n_vocab
    stated = draft.files.json(CONFIG).get("vocab_size")
    return draft.sizes.get("vocab_size", stated if isinstance(stated, int) else 0)


def _settings_of(tokens: Mapping[str, int]) -> dict[str, Any]:
    """Return the ids that settings have, of a tokenizer's tokens."""
    languages = LANGUAGE_TOKENS & tokens.keys()
    tasks = [task for task in ("transcribe", "translate") if f"<|{task}|>" in tokens]
    return {
        **{key: tokens[token] for key, token in NAMED_IDS.items() if token in tokens},
        "lang_to_id": {token: tokens[token] for token in sorted(languages, key=tokens.__getitem__)},
        "task_to_id": {task: tokens[f"<|{task}|>"] for task in tasks},
    }


@layout_rule(
    "WP701",
    "The tokenizer's merges are in a form that older versions do not read",
    is_warning=True,
    remedy="fix",
    repair=_write_merges,
)
def merges(files: Files) -> Iterator[tuple[str, str]]:
    """Current versions of `tokenizers` write each merge as a pair, `["a", "b"]`. Versions before 0.20 read
    `"a b"` only, and fail with "data did not match any variant of untagged enum ModelWrapper". Apps often
    have an older version than the converter.

    What to do: write each pair as one text with a space, which every version reads.
    """
    if any(isinstance(merge, list) for merge in _stored_merges(files.json(TOKENIZER))):
        yield TOKENIZER, 'merges are pairs; old versions: "untagged enum ModelWrapper"'


@layout_rule(
    "WP702", "An id in the settings is not the id of its token", remedy="fix", repair=_write_ids
)
def ids(files: Files) -> Iterator[tuple[str, str]]:
    """`generation_config.json` has the ids of the tokens that begin and end a transcript, and of languages.
    They must be those of `tokenizer.json`. They differ if one of the two files is another model's: the ids
    of large-v3 and turbo are one higher than those of earlier multilingual models, and those of
    English-only models one lower. The app then transcribes nonsense, another language, or nothing.

    What to do: take both files from the same checkpoint.
    """
    tokens = stored_ids(files.json(TOKENIZER))
    if not tokens:
        return
    settings = files.json(GENERATION)
    named = {token: settings.get(key) for key, token in NAMED_IDS.items()}
    languages = settings.get("lang_to_id")
    tasks = settings.get("task_to_id")
    named |= languages if isinstance(languages, dict) else {}
    named |= {f"<|{task}|>": i for task, i in tasks.items()} if isinstance(tasks, dict) else {}
    for token, number in named.items():
        if isinstance(number, int) and token in tokens and tokens[token] != number:
            yield GENERATION, f"{token} is {number}; in {TOKENIZER} it is {tokens[token]}"
            return


@layout_rule(
    "WP703",
    "The settings lack the ids of languages or tasks",
    remedy="fix",
    repair=_write_languages,
)
def languages(files: Files) -> Iterator[tuple[str, str]]:
    """A multilingual model's prompt has the id of a language and of a task. Apps read them from
    `lang_to_id` and `task_to_id` in `generation_config.json`, which settings saved by old versions of
    transformers lack.

    What to do: copy them from the generation_config.json of a model of the same vocabulary, or convert the
    checkpoint with `whisperport convert`, which writes them.
    """
    settings = files.json(GENERATION)
    if not settings or settings.get("is_multilingual") is False:
        return
    tokens = stored_ids(files.json(TOKENIZER))
    if tokens and TRANSCRIBE not in tokens:
        return  # English-only
    missing = [key for key in TABLES if not settings.get(key)]
    if missing:
        yield GENERATION, f"no {' and no '.join(missing)}"


@layout_rule(
    "WP704", "The number of mel bands differs between files", remedy="fix", repair=write_bands
)
def bands(files: Files) -> Iterator[tuple[str, str]]:
    """The app computes a log-mel spectrogram of `feature_size` bands (`preprocessor_config.json`). The
    encoder takes `num_mel_bins` of them (`config.json`): 128 for large-v3 and turbo, 80 for all models
    before. With other bands, an app fails or transcribes nonsense.

    What to do: take both files from the same checkpoint.
    """
    size = files.json(PREPROCESSOR).get("feature_size")
    n_mels = files.json(CONFIG).get("num_mel_bins")
    if size is not None and n_mels is not None and size != n_mels:
        yield PREPROCESSOR, f"feature_size is {size}; {CONFIG} has num_mel_bins {n_mels}"


@layout_rule(
    "WP705",
    "There are no alignment heads",
    is_warning=True,
    remedy="fix --checkpoint",
    repair=_write_heads,
)
def heads(files: Files) -> Iterator[tuple[str, str]]:
    """Word timestamps are computed from the attention of a few heads, which `alignment_heads` in
    `generation_config.json` names. Without them, apps give no word timestamps, or fail when asked for
    them. Distilled models and fine-tunes often lack them.

    What to do: convert the checkpoint with `whisperport convert`, which finds such heads and writes them.
    """
    settings = files.json(GENERATION)
    if settings and not settings.get("alignment_heads"):
        yield GENERATION, "no alignment_heads"


@layout_rule(
    "WP706",
    "An alignment head is in no layer of the decoder",
    remedy="fix --checkpoint",
    repair=_write_heads,
)
def heads_exist(files: Files) -> Iterator[tuple[str, str]]:
    """`alignment_heads` in `generation_config.json` are pairs of layer and head. Those of a distilled model
    are often copied from the model that it was made of, which has more layers. An app then fails:
    "Layer index 6 is out of bounds", or "undefined (reading 'slice')".

    What to do: convert the checkpoint with `whisperport convert`, which finds the heads of its own layers.
    """
    sizes = files.json(CONFIG)
    layers, count = sizes.get("decoder_layers"), sizes.get("decoder_attention_heads")
    pairs = files.json(GENERATION).get("alignment_heads")
    if not (isinstance(layers, int) and isinstance(count, int) and isinstance(pairs, list)):
        return
    for pair in pairs:
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(i) is int for i in pair)):
            yield GENERATION, f"{str(pair)[:80]} is not a layer and a head"
            return
        if not (0 <= pair[0] < layers and 0 <= pair[1] < count):
            yield (
                GENERATION,
                f"layer {pair[0]}, head {pair[1]}; the decoder has {layers} layers of {count} heads: "
                f'"Layer index {pair[0]} is out of bounds"',
            )
            return


@layout_rule(
    "WP707",
    "The tokenizer has fewer tokens than the model, or more",
    remedy="fix",
    repair=_write_vocabulary,
)
def vocabulary(files: Files) -> Iterator[tuple[str, str]]:
    """The last token of `tokenizer.json` must have an id below `vocab_size` in `config.json`, and the
    tokens that begin and end a transcript must be there. Otherwise the tokenizer is another model's.

    What to do: take both files from the same checkpoint.
    """
    tokens, size = stored_ids(files.json(TOKENIZER)), files.json(CONFIG).get("vocab_size")
    if tokens and isinstance(size, int) and max(tokens.values()) >= size:
        yield TOKENIZER, f"its last id is {max(tokens.values())}; the model has {size} tokens"
    elif tokens and (missing := _missing(tokens)):
        yield TOKENIZER, f"it has no token {missing[0]}"


# What no app reads, or reads in another file only, of what is written.
NAMES = ("architectures", "feature_extractor_type", "processor_class", "return_attention_mask")
UNREAD = (*NAMES, "use_cache", "num_hidden_layers", "begin_suppress_tokens")
IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
DECODING = (
    *("suppress_tokens", "begin_suppress_tokens", "alignment_heads", "max_length"),
    *("max_initial_timestamp_index", "return_timestamps", "bos_token_id", "pad_token_id"),
)
# Of transformers' settings of decoding and of audio, those that change the text, with their defaults.
DEFAULTS = {
    "num_beams": 1,
    "do_sample": False,
    "temperature": 1.0,
    "repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "min_length": 0,
    "min_new_tokens": 0,
    "max_new_tokens": None,
    "length_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}
SOUND_DEFAULTS = {"dither": 0.0, "do_normalize": False}


def settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    """Yield what the JSON files say, and what the checkpoint has."""
    yield from empty_files(files, CONFIG, GENERATION, PREPROCESSOR)
    stated, right = files.json(GENERATION), files_of.generation_config(checkpoint)
    sizes, right_sizes = files.json(CONFIG), files_of.config(checkpoint)
    yield from settings_of(
        *(CONFIG, sizes, right_sizes), decoding=(*IDS, "median_filter_width"), unread=UNREAD
    )
    yield from settings_of(GENERATION, stated, right, decoding=DECODING, may_lack=False)
    yield from default_settings(GENERATION, stated, DEFAULTS)
    forced = stated.get("forced_decoder_ids")
    tokens = {i: token for token, i in files_of.ids_by_token(checkpoint).items()}
    for entry in forced if isinstance(forced, list) else ():
        if not (isinstance(entry, list) and len(entry) == 2 and isinstance(entry[1], int)):
            continue
        token, languages = tokens.get(entry[1], f"id {entry[1]}"), right.get("lang_to_id", {})
        if token in (TRANSCRIBE, NO_TIMESTAMPS) or {token} == languages.keys():
            continue
        spoken = ", whatever is spoken" if token in LANGUAGE_TOKENS else ""
        reason = f"forced_decoder_ids: each text begins with {token}{spoken}"
        yield Setting.wrong(GENERATION, reason, is_decoding=True)
    sound, right_sound = files.json(PREPROCESSOR), files_of.preprocessor_config(checkpoint.dims)
    yield from settings_of(
        PREPROCESSOR, sound, right_sound, unread=NAMES, decoding=("padding_side",)
    )
    yield from default_settings(PREPROCESSOR, sound, SOUND_DEFAULTS)
    yield from tokenizer_setting(files, checkpoint)
    yield from _class_settings(files)


def _class_settings(files: Files) -> Iterator[Setting]:
    """Yield what in tokenizer_config.json makes another class of tokenizer, or another end of texts."""
    stated, right = files.json(TOKENIZER_CONFIG), files_of.tokenizer_config()
    for key in ("tokenizer_class", "eos_token", "add_prefix_space"):
        value = stated.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if not (key == "tokenizer_class" and value in CLASSES):
            yield Setting(TOKENIZER_CONFIG, key, value, right[key], is_decoding=True)


def tokenizer_setting(
    files: Files, checkpoint: "Checkpoint", *, shows_special: bool = True
) -> Iterator[Setting]:
    """Yield what in tokenizer.json is not the checkpoint's: tokens, the form of text, and merges.

    Args:
        files: that are judged.
        checkpoint: of which they were made.
        shows_special: whether the text has tokens of the prompt that the file does not call special.
    """
    yield from empty_files(files, TOKENIZER)
    stored, ids_of = stored_ids(files.json(TOKENIZER)), files_of.ids_by_token(checkpoint)
    stated = {i: token for token, i in stored.items()}
    every = dict(enumerate(files_of.tokens_by_id(checkpoint)))
    yield from token_setting(TOKENIZER, stated, every | {i: t for t, i in ids_of.items()})
    # Many tokenizers leave out the timestamps.
    begin = checkpoint.generation.timestamp_begin
    yield from missing_tokens(TOKENIZER, stored, {t: i for t, i in ids_of.items() if i < begin})
    tokenizer, expected = files.json(TOKENIZER), json.loads(checkpoint.tokenizer_json)
    form, right_form = _form_of(tokenizer), _form_of(expected)
    if tokenizer and form != right_form:
        reason = f"the decoder is {form}; the checkpoint has {right_form}: spaces are wrong"
        yield Setting.wrong(TOKENIZER, reason)
    for key in TEXT_STEPS if tokenizer else ():
        steps, right_steps = _steps_of(tokenizer.get(key)), _steps_of(expected.get(key))
        if steps != right_steps:
            reason = (
                f"{key} is {', '.join(steps) or 'missing'}; the checkpoint has "
                f"{', '.join(right_steps) or 'none'}: prompts become other tokens"
            )
            yield Setting.wrong(TOKENIZER, reason, is_decoding=True)
    model, right_model = _model_of(tokenizer), _model_of(expected)
    if tokenizer and model != right_model:
        reason = (
            f"its model is {model}; the checkpoint has {right_model}: prompts become other tokens"
        )
        yield Setting.wrong(TOKENIZER, reason, is_decoding=True)
    special, right_special = _special(tokenizer), _special(expected)
    if changed := [t for t in special if special[t] != right_special.get(t, special[t])]:
        reason = (
            f"`special` of {len(changed):,} added tokens, such as {changed[0]}, is not the "
            "checkpoint's: they are shown in the text, or left out"
        )
        yield Setting.wrong(TOKENIZER, reason, is_decoding=not shows_special)
    merges_, right_merges = _merges_of(tokenizer), _merges_of(expected)
    if tokenizer and merges_ != right_merges:
        yield Setting.wrong(TOKENIZER, other_merges(merges_, right_merges), is_decoding=True)


# What a tokenizer does before it looks for tokens, and to those it has.
MOST_CHARACTERS = 80  # of a model in words
TEXT_STEPS = ("normalizer", "pre_tokenizer", "truncation", "padding")


def _steps_of(step: object) -> list[str]:
    """Return in words the steps of a member of tokenizer.json; defaults are left out."""
    if not isinstance(step, dict):
        return []
    parts = next((v for v in (step.get("normalizers"), step.get("pretokenizers")) if v), None)
    if isinstance(parts, list):
        return [text for part in parts for text in _steps_of(part)]
    settings = [f"{key} {step[key]}" for key in ("add_prefix_space", "max_length") if step.get(key)]
    return [" ".join([str(step.get("type", "set")), *settings])]


def _model_of(tokenizer: Mapping[str, Any]) -> str:
    """Return in words a tokenizer's model, and what it adds to tokens; defaults are left out."""
    model = tokenizer.get("model")
    model = model if isinstance(model, dict) else {}
    keys = ("continuing_subword_prefix", "end_of_word_suffix", "dropout", "byte_fallback")
    settings = [f"{key} {model[key]}" for key in keys if model.get(key)]
    return " ".join([str(model.get("type") or "BPE"), *settings])[:MOST_CHARACTERS]


def _special(tokenizer: Mapping[str, Any]) -> dict[str, bool]:
    """Return each added token, and whether it is left out of the text."""
    added = tokenizer.get("added_tokens")
    return {
        str(token.get("content")): bool(token.get("special"))
        for token in (added if isinstance(added, list) else ())
        if isinstance(token, dict)
    }


def _form_of(tokenizer: Mapping[str, Any]) -> str:
    decoder = tokenizer.get("decoder")
    return str(decoder.get("type")) if isinstance(decoder, dict) else "missing"


def _stored_merges(tokenizer: Mapping[str, Any]) -> list[Any]:
    model = tokenizer.get("model")
    stored = model.get("merges") if isinstance(model, dict) else None
    return stored if isinstance(stored, list) else []


def _merges_of(tokenizer: Mapping[str, Any]) -> list[str]:
    """Return the merges, each as one text."""
    stored = _stored_merges(tokenizer)
    return [" ".join(map(str, m)) if isinstance(m, list) else str(m) for m in stored]


RULES = (merges, ids, languages, bands, heads, heads_exist, vocabulary)
"""Those that need no checkpoint: a layout compares files of its own, too."""


def stored_ids(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    """Return token -> id in a tokenizer.json of any content, special tokens included."""
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            tokens[token["content"]] = token.get("id")
    return {token: i for token, i in tokens.items() if isinstance(i, int)}
