"""Read the decoding settings of a Hugging Face folder into a `Generation`.

Each setting comes from the first of these sources that has it: generation_config.json, the special tokens
of the tokenizer, config.json, and, if the tokenizer is OpenAI's, openai-whisper's code.
"""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from whisperport.errors import CheckpointError, UsageError
from whisperport.program.dims import KNOWN_VOCABULARIES, Dims
from whisperport.program.generation import Generation
from whisperport.program.untrusted import quoted, read_json_object
from whisperport.speech.text.languages import language_code
from whisperport.speech.text.vocabulary import N_TIMESTAMPS, openai_generation

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TASKS = ("transcribe", "translate")
# Defaults that transformers writes if the ids were not set. They are right for English-only models only.
_UNSET_DEFAULTS = {"decoder_start_token_id": 50257, "eos_token_id": 50256}
_ENGLISH_ONLY = (
    51864  # number of tokens; the tokenizer lists languages too, but they are not trained
)


def read_generation(
    folder: Path, config: Mapping[str, Any], ids: Mapping[str, int], dims: Dims
) -> tuple[Generation, tuple[str, ...]]:
    """Return the decoding settings, and a warning for each setting that is ignored or corrected.

    Args:
        folder: the checkpoint folder.
        config: contents of its config.json.
        ids: token text -> id, from the tokenizer.
        dims: sizes of the model.

    Raises:
        CheckpointError: a file has an impossible token id, or no source has a special token's id.
    """
    path = folder / "generation_config.json"
    return generation_from(read_json_object(path) if path.is_file() else None, config, ids, dims)


def generation_from(
    stated: Mapping[str, Any] | None,
    config: Mapping[str, Any],
    ids: Mapping[str, int],
    dims: Dims,
    *,
    file: str = "generation_config.json",
) -> tuple[Generation, tuple[str, ...]]:
    """Return the decoding settings and warnings; see `read_generation`.

    Args:
        stated: settings under the names of generation_config.json; None: there is no such file.
        config: contents of config.json.
        ids: token text -> id, from the tokenizer.
        dims: sizes of the model.
        file: name of the file that `stated` was read from, for errors.
    """
    reader = _Reader(stated or {}, config, ids, dims, file)
    generation = reader.read(has_own_file=stated is not None)
    return generation, tuple(reader.warnings)


class _Reader:
    """The four sources of the settings, and the warnings."""

    def __init__(
        self,
        stated: Mapping[str, Any],
        config: Mapping[str, Any],
        ids: Mapping[str, int],
        dims: Dims,
        file: str,
    ) -> None:
        self.stated, self.config, self.ids, self.dims = stated, config, ids, dims
        self.file = file
        self.warnings: list[str] = []

    @cached_property
    def openai(self) -> Generation | None:
        """OpenAI's settings, computed only if a setting is nowhere else: they take a second."""
        if self.dims.n_vocab not in KNOWN_VOCABULARIES:
            return None
        openai = openai_generation(self.dims.n_vocab)
        # A fine-tuned model may have another vocabulary of the same size.
        return openai if self.ids.get("<|endoftext|>") == openai.end_of_text else None

    def read(self, *, has_own_file: bool) -> Generation:
        """Read all settings; `has_own_file`: the folder has a generation_config.json."""
        no_timestamps = self.special("no_timestamps", "no_timestamps_token_id", "<|notimestamps|>")
        languages, tasks = self.languages_and_tasks()
        # A generation_config.json without the lists means that no token is suppressed, as in transformers.
        openai = None if has_own_file else self.openai
        suppressed = self.token_list("suppress_tokens", openai.suppressed if openai else ())
        return Generation(
            start_of_transcript=self.special(
                "start_of_transcript", "decoder_start_token_id", "<|startoftranscript|>"
            ),
            end_of_text=self.special("end_of_text", "eos_token_id", "<|endoftext|>"),
            start_of_previous=self.special(
                "start_of_previous", "prev_sot_token_id", "<|startofprev|>"
            ),
            # No file has a key for it. transformers, too, uses the id before <|notimestamps|>.
            no_speech=self.ids.get(
                "<|nospeech|>", self.ids.get("<|nocaptions|>", max(no_timestamps - 1, 0))
            ),
            no_timestamps=no_timestamps,
            languages=languages,
            tasks=tasks,
            suppressed=(*suppressed, *self.ids_after_timestamps(no_timestamps)),
            suppressed_at_start=self.token_list(
                "begin_suppress_tokens", openai.suppressed_at_start if openai else ()
            ),
            alignment_heads=self.alignment_heads(),
            language=self.default_language(languages),
        )

    def special(self, field: str, key: str, token: str) -> int:
        """Return the id of a special token.

        Args:
            field: name of the id in `Generation`.
            key: name of the id in generation_config.json and config.json.
            token: text of the token in the tokenizer.
        """
        stated = self.token_id(self.stated.get(key), key, self.file)
        known = self.token_id(self.ids.get(token), token, "the tokenizer")
        if known is not None and stated != known and stated == _UNSET_DEFAULTS.get(key, known):
            self.warnings.append(
                f"generation_config.json has transformers' default {stated} for `{key}`; "
                f"the id {known} of the tokenizer's {token} is used instead"
            )
            stated = None
        for token_id in (stated, known, self.token_id(self.config.get(key), key, "config.json")):
            if token_id is not None:
                return token_id
        if self.openai is not None:
            return int(getattr(self.openai, field))
        raise CheckpointError(
            f"the checkpoint does not define which token is {token}",
            why=f"generation_config.json and config.json have no `{key}`, and the tokenizer has no {token}",
            hint="copy generation_config.json from the checkpoint that this one was fine-tuned from",
        )

    def token_id(self, value: Any, key: str, where: str) -> int | None:
        """Return a token id from a file after checking it; None if there is none."""
        if value is None or value == []:
            return None
        if isinstance(
            value, list
        ):  # a file may list several end-of-text tokens; the first is OpenAI's
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            why = f"`{key}` is {quoted(value)}; expected a token id"
            raise CheckpointError(f"{where} cannot be used", why=why, hint="correct or remove it")
        if not 0 <= value < self.dims.n_vocab:
            last = self.dims.n_vocab - 1
            why = f"`{key}` is {quoted(value)}; the token ids of the model are 0 to {last}"
            raise CheckpointError(f"{where} cannot be used", why=why, hint="correct or remove it")
        return value

    def languages_and_tasks(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return language code -> token id and task -> token id; empty for English-only models."""
        languages = self.mapping("lang_to_id")
        tasks = self.mapping("task_to_id")
        multilingual = self.stated.get("is_multilingual")
        if not isinstance(multilingual, bool):
            multilingual = bool(languages) or self.dims.n_vocab != _ENGLISH_ONLY
        if not multilingual:
            return {}, {}
        inside = {text: n for text, n in self.ids.items() if n < self.dims.n_vocab}
        if not languages:
            ids = {m[1]: n for text, n in inside.items() if (m := _LANGUAGE.fullmatch(text))}
            languages = dict(sorted(ids.items(), key=lambda item: item[1]))
        if not tasks:
            tasks = {task: inside[f"<|{task}|>"] for task in _TASKS if f"<|{task}|>" in inside}
        return languages, tasks

    def default_language(self, languages: Mapping[str, int]) -> str:
        """Return the code of the language in generation_config.json; empty: detect the language.

        The file may contain a token, a code or a name.
        """
        stated = self.stated.get("language")
        if not isinstance(stated, str) or not languages:
            return ""
        name = stated.removeprefix("<|").removesuffix("|>")
        try:
            code = language_code(name, languages)
        except UsageError:
            code = name
        if code in languages:
            return code
        self.warnings.append(
            f"generation_config.json has the language {quoted(stated)}, which the checkpoint does "
            "not have; the language is detected instead"
        )
        return ""

    def ids_after_timestamps(self, no_timestamps: int) -> range:
        """Return the ids after the last timestamp token, which are suppressed.

        The decoder would take tokens that a fine-tuned model has there for later timestamps.
        """
        after = range(no_timestamps + 1 + N_TIMESTAMPS, self.dims.n_vocab)
        added = [text for text, n in self.ids.items() if n in after]
        if added:
            named = ", ".join(quoted(text) for text in added[:3])
            self.warnings.append(
                f"{len(added)} tokens that were added after the timestamp tokens are suppressed: {named}"
                + (", ..." if len(added) > 3 else "")
            )
        return after

    def mapping(self, key: str) -> dict[str, int]:
        """Return a mapping of generation_config.json: name, without `<|` and `|>`, -> token id."""
        value = self.stated.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{self.file} cannot be used",
                why=f"`{key}` is {quoted(value)}; expected names and token ids",
                hint="correct or remove it",
            )
        ids = {}
        for name, number in value.items():
            token = self.token_id(number, f"{key} {quoted(name)}", self.file)
            if token is not None:
                ids[name.removeprefix("<|").removesuffix("|>")] = token
        return ids

    def token_list(self, key: str, default: tuple[int, ...]) -> tuple[int, ...]:
        """Return a list of token ids from generation_config.json or config.json, or the default."""
        value = self.stated.get(key)
        value = self.config.get(key) if value is None else value
        if value is None:
            return default
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise CheckpointError(
                "the list of suppressed tokens cannot be used",
                why=f"`{key}` is {quoted(value)}; expected a list of token ids",
                hint="correct or remove it in generation_config.json or config.json",
            )
        inside = tuple(item for item in value if 0 <= item < self.dims.n_vocab)
        if len(inside) < len(value):
            self.warnings.append(
                f"`{key}` lists {len(value) - len(inside)} ids that the model does not have; "
                "they are ignored"
            )
        return inside

    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        """Return the (layer, head) pairs of generation_config.json that the decoder has."""
        value = self.stated.get("alignment_heads")
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
            for pair in value
        ):
            raise CheckpointError(
                f"{self.file} cannot be used",
                why=f"`alignment_heads` is {quoted(value)}; expected pairs of layer and head",
                hint="correct or remove it",
            )
        layers, heads = self.dims.n_text_layer, self.dims.n_text_head
        inside = tuple((a, b) for a, b in value if 0 <= a < layers and 0 <= b < heads)
        if len(inside) < len(value):  # distilled models were published with their teacher's heads
            self.warnings.append(
                f"{len(value) - len(inside)} alignment heads are not in this decoder of {layers} "
                f"layers and {heads} heads; they are ignored"
            )
        return inside
