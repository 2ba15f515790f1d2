"""What the files of a Hugging Face folder say about decoding, as one `Generation`.

Order of trust: generation_config.json, the tokenizer's own special tokens, config.json, and last,
where the tokenizer is OpenAI's, what OpenAI's own code says.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from whisperport.checkpoint.json_file import read_json_object
from whisperport.checkpoint.sizes import quoted
from whisperport.checkpoint.tokenizer_files import KNOWN_VOCABULARIES
from whisperport.dims import Dims
from whisperport.errors import CheckpointError, UsageError
from whisperport.generation import Generation
from whisperport.text.languages import language_code
from whisperport.text.vocabulary import N_TIMESTAMPS, openai_generation

_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TASKS = ("transcribe", "translate")
# What transformers writes for a multilingual model too when nobody set them: the English-only ids.
_NEVER_SET = {"decoder_start_token_id": 50257, "eos_token_id": 50256}
_ENGLISH_ONLY = 51864  # its tokenizer lists the languages too; they were never trained


def read_generation(
    folder: Path, config: Mapping[str, Any], ids: Mapping[str, int], dims: Dims
) -> tuple[Generation, tuple[str, ...]]:
    """The settings, and a sentence for each thing left out.

    Raises CheckpointError when a file states an impossible id, or none says where decoding starts.
    """
    path = folder / "generation_config.json"
    stated = read_json_object(path) if path.is_file() else {}
    reader = _Reader(stated, config, ids, dims)
    generation = reader.read(has_own_file=path.is_file())
    return generation, tuple(reader.warnings)


class _Reader:
    """One reading; it only exists to carry the four sources and the warnings from call to call."""

    def __init__(
        self,
        stated: Mapping[str, Any],
        config: Mapping[str, Any],
        ids: Mapping[str, int],
        dims: Dims,
    ) -> None:
        self.stated, self.config, self.ids, self.dims = stated, config, ids, dims
        self.openai: Generation | None = None
        if dims.n_vocab in KNOWN_VOCABULARIES:
            openai = openai_generation(dims.n_vocab)
            # A fine-tune may have the size of OpenAI's vocabulary and not its contents.
            if ids.get("<|endoftext|>") == openai.end_of_text:
                self.openai = openai
        self.warnings: list[str] = []

    def read(self, *, has_own_file: bool) -> Generation:
        no_timestamps = self.special("no_timestamps", "no_timestamps_token_id", "<|notimestamps|>")
        languages, tasks = self.languages_and_tasks()
        # A generation_config.json without the lists means none: so transformers decodes it.
        openai = None if has_own_file else self.openai
        suppressed = self.listed("suppress_tokens", openai.suppressed if openai else ())
        return Generation(
            start_of_transcript=self.special(
                "start_of_transcript", "decoder_start_token_id", "<|startoftranscript|>"
            ),
            end_of_text=self.special("end_of_text", "eos_token_id", "<|endoftext|>"),
            start_of_previous=self.special(
                "start_of_previous", "prev_sot_token_id", "<|startofprev|>"
            ),
            # No file has a key for it; transformers too takes the id before <|notimestamps|>.
            no_speech=self.ids.get(
                "<|nospeech|>", self.ids.get("<|nocaptions|>", max(no_timestamps - 1, 0))
            ),
            no_timestamps=no_timestamps,
            languages=languages,
            tasks=tasks,
            suppressed=(*suppressed, *self.after_times(no_timestamps)),
            suppressed_at_start=self.listed(
                "begin_suppress_tokens", openai.suppressed_at_start if openai else ()
            ),
            alignment_heads=self.alignment_heads(),
            language=self.own_language(languages),
        )

    def special(self, field: str, key: str, token: str) -> int:
        stated = self.token_id(self.stated.get(key), key, "generation_config.json")
        known = self.token_id(self.ids.get(token), token, "the tokenizer")
        if known is not None and stated != known and stated == _NEVER_SET.get(key, known):
            self.warnings.append(
                f"generation_config.json has transformers' default {stated} for `{key}`; "
                f"the tokenizer's {token}, {known}, is used"
            )
            stated = None
        for found in (stated, known, self.token_id(self.config.get(key), key, "config.json")):
            if found is not None:
                return found
        if self.openai is not None:
            return int(getattr(self.openai, field))
        raise CheckpointError(
            f"the checkpoint does not say which token is {token}",
            why=f"generation_config.json and config.json have no `{key}`, the tokenizer no {token}",
            hint="copy generation_config.json of the checkpoint this one was trained from",
        )

    def token_id(self, value: Any, key: str, where: str) -> int | None:
        if value is None or value == []:
            return None
        if isinstance(value, list):  # several ends of text are allowed; the first is OpenAI's
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int):
            why = f"`{key}` is {quoted(value)}; expected a token id"
            raise CheckpointError(f"{where} cannot be used", why=why, hint="correct or remove it")
        if not 0 <= value < self.dims.n_vocab:
            why = f"`{key}` is {quoted(value)}; the model has tokens 0 to {self.dims.n_vocab - 1}"
            raise CheckpointError(f"{where} cannot be used", why=why, hint="correct or remove it")
        return value

    def languages_and_tasks(self) -> tuple[dict[str, int], dict[str, int]]:
        languages = self.mapping("lang_to_id")
        tasks = self.mapping("task_to_id")
        multilingual = self.stated.get("is_multilingual")
        if not isinstance(multilingual, bool):
            multilingual = bool(languages) or self.dims.n_vocab != _ENGLISH_ONLY
        if not multilingual:
            return {}, {}
        inside = {text: n for text, n in self.ids.items() if n < self.dims.n_vocab}
        if not languages:
            found = {m[1]: n for text, n in inside.items() if (m := _LANGUAGE.fullmatch(text))}
            languages = dict(sorted(found.items(), key=lambda item: item[1]))
        if not tasks:
            tasks = {task: inside[f"<|{task}|>"] for task in _TASKS if f"<|{task}|>" in inside}
        return languages, tasks

    def own_language(self, languages: Mapping[str, int]) -> str:
        """What `generation_config.json` says is heard unless told otherwise: a token, a code or a name."""
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
            "not know; it is detected instead"
        )
        return ""

    def after_times(self, no_timestamps: int) -> range:
        """Ids behind the last time. What a fine-tune has added there would be taken for later times."""
        after = range(no_timestamps + 1 + N_TIMESTAMPS, self.dims.n_vocab)
        added = [text for text, n in self.ids.items() if n in after]
        if added:
            named = ", ".join(quoted(text) for text in added[:3])
            self.warnings.append(
                f"{len(added)} tokens that were added behind the times are never said: {named}"
                + (", ..." if len(added) > 3 else "")
            )
        return after

    def mapping(self, key: str) -> dict[str, int]:
        value = self.stated.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise CheckpointError(
                "generation_config.json cannot be used",
                why=f"`{key}` is {quoted(value)}; expected names and token ids",
                hint="correct or remove it",
            )
        found = {}
        for name, number in value.items():
            token = self.token_id(number, f"{key} {quoted(name)}", "generation_config.json")
            if token is not None:
                found[name.removeprefix("<|").removesuffix("|>")] = token
        return found

    def listed(self, key: str, otherwise: tuple[int, ...]) -> tuple[int, ...]:
        value = self.stated.get(key)
        value = self.config.get(key) if value is None else value
        if value is None:
            return otherwise
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise CheckpointError(
                "the list of suppressed tokens cannot be used",
                why=f"`{key}` is {quoted(value)}; expected a list of token ids",
                hint="correct or remove it in generation_config.json or config.json",
            )
        inside = tuple(item for item in value if 0 <= item < self.dims.n_vocab)
        if len(inside) < len(value):
            self.warnings.append(
                f"`{key}` lists {len(value) - len(inside)} ids the model does not have; left out"
            )
        return inside

    def alignment_heads(self) -> tuple[tuple[int, int], ...]:
        value = self.stated.get("alignment_heads")
        if value is None:
            return ()
        if not isinstance(value, list) or not all(
            isinstance(pair, list) and len(pair) == 2 and all(type(n) is int for n in pair)
            for pair in value
        ):
            raise CheckpointError(
                "generation_config.json cannot be used",
                why=f"`alignment_heads` is {quoted(value)}; expected pairs of layer and head",
                hint="correct or remove it",
            )
        layers, heads = self.dims.n_text_layer, self.dims.n_text_head
        inside = tuple((a, b) for a, b in value if 0 <= a < layers and 0 <= b < heads)
        if len(inside) < len(value):  # distilled models were published with their teacher's heads
            self.warnings.append(
                f"{len(value) - len(inside)} alignment heads are not in this decoder of {layers} "
                f"layers and {heads} heads; left out"
            )
        return inside
