"""What react-native-executorch demands of a .pte file and its tokenizer.

Source: react-native-executorch 0.10.2 (npm), src/extensions/speech/tasks/whisperSpeechToText.ts,
src/core/schema.ts, cpp/core/model.cpp.
"""

import json
from collections.abc import Iterator

from whisperport.build.layouts.checkpoint_rules import checkpoint_rules
from whisperport.build.layouts.huggingface_rules import stored_ids
from whisperport.build.layouts.pte_rules import AUDIO, POSITION, TOKEN, TwoMethods
from whisperport.build.layouts.react_native_executorch.folder import (
    DECODE,
    ENCODE,
    SCHEMA,
    TOKENIZER,
)
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.rules import layout_rule

METHODS = TwoMethods(ENCODE, DECODE, ("float32", 1), (TOKEN, POSITION, AUDIO))


@layout_rule(
    "WP781", "A method does not have the inputs or the output that the app gives and takes"
)
def signatures(files: Files) -> Iterator[tuple[str, str]]:
    """The app calls `encode(waveform)` and `decode(token, position, what encode returned)`.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    yield from METHODS.wrong_signatures(files)


@layout_rule("WP782", "The file does not say that the waveform has any length")
def schema(files: Files) -> Iterator[tuple[str, str]]:
    """A method `get_model_schema` must return the sizes as JSON: else the app takes the longest waveform
    for the only one, and rejects the model: SCHEMA_MISMATCH.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    file, methods = METHODS.file(files), METHODS.methods(files)
    if SCHEMA not in methods:
        yield file, f"there is no method {SCHEMA}"
        return
    try:
        stated = json.loads(methods[SCHEMA].texts[0])
        kinds = [size["kind"] for size in stated[ENCODE]["inputs"][0]["shape"]]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError):
        yield file, f"{SCHEMA} returns no JSON with the inputs of {ENCODE}"
        return
    if kinds not in (["range"], ["enum"]):
        yield file, f"{SCHEMA} states a waveform of {', '.join(map(str, kinds))[:40]} length"


@layout_rule("WP783", "The tokenizer has another number of tokens than the logits")
def vocabulary(files: Files) -> Iterator[tuple[str, str]]:
    """The app makes room for as many logits as `tokenizer.json` has tokens, with the added ones.

    What to do: `whisperport convert CHECKPOINT --for react-native-executorch`.
    """
    if not files.has(TOKENIZER):
        yield TOKENIZER, "the file is missing"
        return
    n_tokens = len({*stored_ids(files.json(TOKENIZER)).values()})
    n_logits = METHODS.n_logits(files)
    if n_tokens != n_logits:
        yield TOKENIZER, f"{n_tokens} tokens; {METHODS.file(files)} returns {n_logits} logits"


RULES = (signatures, schema, vocabulary, METHODS.projections(), *checkpoint_rules(METHODS.settings))
READER = METHODS.reader()
