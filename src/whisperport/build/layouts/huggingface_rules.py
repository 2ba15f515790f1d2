"""Rules for the JSON files of transformers, which several apps read."""

from collections.abc import Iterator, Mapping
from typing import Any

from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import layout_rule

CONFIG, GENERATION = "config.json", "generation_config.json"
PREPROCESSOR, TOKENIZER = "preprocessor_config.json", "tokenizer.json"
START, TRANSCRIBE = "<|startoftranscript|>", "<|transcribe|>"
NAMED_IDS = {
    "decoder_start_token_id": START,
    "no_timestamps_token_id": "<|notimestamps|>",
    "eos_token_id": "<|endoftext|>",
}
"""Setting -> the token that it must be the id of."""


@layout_rule(
    "WP701", "The tokenizer's merges are in a form that older versions do not read", is_warning=True
)
def merges(files: Files) -> Iterator[tuple[str, str]]:
    """Current versions of `tokenizers` write each merge as a pair, `["a", "b"]`. Versions before 0.20 read
    `"a b"` only, and fail with "data did not match any variant of untagged enum ModelWrapper". Apps often
    have an older version than the converter.

    What to do: write each pair as one text with a space, which every version reads, or convert the
    checkpoint again with `whisperport convert`, which does.
    """
    model = files.json(TOKENIZER).get("model")
    stored = model.get("merges") if isinstance(model, dict) else None
    if isinstance(stored, list) and any(isinstance(merge, list) for merge in stored):
        yield TOKENIZER, "merges are pairs"


@layout_rule("WP702", "An id in the settings is not the id of its token")
def ids(files: Files) -> Iterator[tuple[str, str]]:
    """`generation_config.json` has the ids of the tokens that begin and end a transcript, and of languages.
    They must be those of `tokenizer.json`. They differ if one of the two files is another model's: the ids
    of large-v3 and turbo are one higher than those of earlier multilingual models, and those of
    English-only models one lower. The app then transcribes nonsense, another language, or nothing.

    What to do: take both files from the same checkpoint.
    """
    tokens = _ids_by_token(files.json(TOKENIZER))
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


@layout_rule("WP703", "The settings lack the ids of languages or tasks")
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
    tokens = _ids_by_token(files.json(TOKENIZER))
    if tokens and TRANSCRIBE not in tokens:
        return  # English-only
    missing = [key for key in ("lang_to_id", "task_to_id") if not settings.get(key)]
    if missing:
        yield GENERATION, f"no {' and no '.join(missing)}"


@layout_rule("WP704", "The number of mel bands differs between files")
def bands(files: Files) -> Iterator[tuple[str, str]]:
    """The app computes a log-mel spectrogram of `feature_size` bands (`preprocessor_config.json`). The
    encoder takes `num_mel_bins` of them (`config.json`): 128 for large-v3 and turbo, 80 for all models
    before. With other bands, an app fails or transcribes nonsense.

    What to do: take both files from the same checkpoint.
    """
    size = files.json(PREPROCESSOR).get("feature_size")
    taken = files.json(CONFIG).get("num_mel_bins")
    if size is not None and taken is not None and size != taken:
        yield PREPROCESSOR, f"feature_size is {size}; {CONFIG} has num_mel_bins {taken}"


@layout_rule("WP705", "There are no alignment heads", is_warning=True)
def heads(files: Files) -> Iterator[tuple[str, str]]:
    """Word timestamps are computed from the attention of a few heads, which `alignment_heads` in
    `generation_config.json` names. Without them, apps give no word timestamps, or fail when asked for
    them. Distilled models and fine-tunes often lack them.

    What to do: convert the checkpoint with `whisperport convert`, which finds such heads and writes them.
    """
    settings = files.json(GENERATION)
    if settings and not settings.get("alignment_heads"):
        yield GENERATION, "no alignment_heads"


@layout_rule("WP706", "An alignment head is in no layer of the decoder")
def heads_exist(files: Files) -> Iterator[tuple[str, str]]:
    """`alignment_heads` in `generation_config.json` are pairs of layer and head. Those of a distilled model
    are often copied from the model that it was made of, which has more layers. An app then fails with a
    message such as "Layer index 6 out of bounds".

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
                f"layer {pair[0]}, head {pair[1]}; the decoder has {layers} layers of {count} heads",
            )
            return


@layout_rule("WP707", "The tokenizer has fewer tokens than the model, or more")
def vocabulary(files: Files) -> Iterator[tuple[str, str]]:
    """The last token of `tokenizer.json` must have an id below `vocab_size` in `config.json`, and the
    tokens of text must all be there. Otherwise the tokenizer is another model's.

    What to do: take both files from the same checkpoint.
    """
    tokens, size = _ids_by_token(files.json(TOKENIZER)), files.json(CONFIG).get("vocab_size")
    if tokens and isinstance(size, int) and max(tokens.values()) >= size:
        yield TOKENIZER, f"its last id is {max(tokens.values())}; the model has {size} tokens"


RULES = (merges, ids, languages, bands, heads, heads_exist, vocabulary)


def _ids_by_token(tokenizer: Mapping[str, Any]) -> dict[str, int]:
    model, added = tokenizer.get("model"), tokenizer.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    tokens = dict(vocabulary) if isinstance(vocabulary, dict) else {}
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            tokens[token["content"]] = token.get("id")
    return {token: i for token, i in tokens.items() if isinstance(i, int)}
