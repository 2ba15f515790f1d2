"""The settings of an adapter of PEFT: of LoRA, with its ranks and scales.

Source: huggingface/peft@5d602fd, docs/source/developer_guides/checkpoint.md and src/peft/tuners/lora.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from whisperport.errors import CheckpointError
from whisperport.program.dims import PUBLISHED
from whisperport.program.untrusted import quoted, read_json_object

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # in order of preference

MERGE = (
    "merge it with PEFT: `PeftModel.merge_and_unload()`, then `save_pretrained` to a new folder, and give "
    "that folder"
)
# Settings with which a sum of two matrices is not all that the adapter changes.
_OTHER_METHODS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
# Values of `init_lora_weights` that do not change the weights of the base when the training begins.
_PLAIN_INITS = (None, True, False, "gaussian", "eva", "orthogonal")
# Parts of an adapted module, as PEFT names them.
A, B, B_BIAS, MAGNITUDE = (
    "lora_A.weight",
    "lora_B.weight",
    "lora_B.bias",
    "lora_magnitude_vector",
)
_WRAPPERS = re.compile(r"\.(default|modules_to_save|base_layer)(?=\.|$)")  # added inside of names
_LORA = re.compile(r"(.+)\.(lora_[AB]\.weight|lora_B\.bias|lora_magnitude_vector)(?:\.weight)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The settings of an adapter that matter for merging it.

    Attributes:
        folder: the adapter's folder.
        base: path, hub id or name of the base.
        base_revision: commit, branch or tag of the base on the hub; None: the default branch.
        ranks, alphas: name of a module, or its end -> r or `lora_alpha`; the name "" stands for all others.
        is_rank_stabilized: `use_rslora`.
        is_dora: `use_dora`.
        ties_weights: the output projection follows the token embedding (`ensure_weight_tying`).
    """

    folder: Path
    base: str
    base_revision: str | None
    ranks: Mapping[str, float]
    alphas: Mapping[str, float]
    is_rank_stabilized: bool
    is_dora: bool
    ties_weights: bool

    def check_base(self, name: str) -> None:
        """Check that the adapter was not trained on another published model.

        Args:
            name: of the checkpoint that it is used with: a path, a hub id or a short name.

        Raises:
            CheckpointError: both are known names, and differ.
        """
        own, other = _published(self.base), _published(name)
        if own and other and own != other:
            raise CheckpointError(
                f"the adapter in `{self.folder}` is for another base",
                why=f"it was trained on {own}; this is {other}",
                hint=f"use it with {own}",
            )

    def scale(self, module: str) -> float:
        """Return the factor of B A for a module, by its name in transformers."""
        rank = self.rank(module)
        return _value(self.alphas, module) / (math.sqrt(rank) if self.is_rank_stabilized else rank)

    def rank(self, module: str) -> int:
        """Return r of a module, by its name in transformers."""
        return int(_value(self.ranks, module))


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter of PEFT."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read adapter_config.json.

    Raises:
        CheckpointError: it is damaged, or describes another method than LoRA and DoRA.
    """
    if not is_adapter(folder):
        raise CheckpointError(
            f"`{folder}` is no adapter of PEFT",
            why=f"it has no file {CONFIG}",
            hint="give the folder that PEFT's `save_pretrained` wrote",
        )
    config = read_json_object(folder / CONFIG)
    method = config.get("peft_type")
    if method != "LORA":
        raise CheckpointError(
            f"`{folder}` holds an adapter of a method that is not supported",
            why=f"its {CONFIG} is of type {quoted(method)}; expected 'LORA'",
            hint=f"{MERGE}; PEFT cannot merge methods that learn a prompt or a prefix",
        )
    variants = [key for key in _OTHER_METHODS if config.get(key)]
    if config.get("init_lora_weights") not in _PLAIN_INITS:
        variants.append("init_lora_weights")
    if variants:
        stated = ", ".join(f"`{key}` {quoted(config[key])}" for key in variants)
        raise CheckpointError(
            f"`{folder}` holds a variant of LoRA that is not supported",
            why=f"its {CONFIG} has {stated}",
            hint=MERGE,
        )
    base, revision = config.get("base_model_name_or_path"), config.get("revision")
    if not isinstance(base, str) or not base or not base.isprintable():
        raise _unusable(
            folder, f"`base_model_name_or_path` is {quoted(base)}", "a path or a hub id"
        )
    if not isinstance(revision, str | None):
        raise _unusable(folder, f"`revision` is {quoted(revision)}", "a name or null")
    return Adapter(
        folder=folder,
        base=base,
        base_revision=revision or None,
        ranks=_numbers(folder, config, "rank_pattern", "r", int),
        alphas=_numbers(folder, config, "alpha_pattern", "lora_alpha", int | float),
        is_rank_stabilized=config.get("use_rslora") is True,
        is_dora=config.get("use_dora") is True,
        ties_weights=config.get("ensure_weight_tying") is True,
    )


def module_and_part(name: str) -> tuple[str, str]:
    """Return the module of a tensor of an adapter, and which part of it the tensor is.

    The part of a tensor that was trained completely is "", and the module is the tensor's own name.
    """
    bare = _WRAPPERS.sub("", name.removeprefix("base_model.model."))
    match = _LORA.fullmatch(bare)
    return (match[1], match[2]) if match else (bare, "")


def weight_file(folder: Path) -> Path:
    """Return the file with the tensors of an adapter.

    Raises:
        CheckpointError: there is none.
    """
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise CheckpointError(
            f"no weights in the adapter `{folder}`",
            why=f"it has none of {', '.join(WEIGHTS)}",
            hint="save the adapter with PEFT's `save_pretrained`",
        )
    return path


def _published(name: str) -> str:
    """Return the short name of a model of OpenAI, or an empty string."""
    short = name.removeprefix("openai/whisper-")
    return short if short in PUBLISHED else ""


def _numbers(
    folder: Path, config: Mapping[str, Any], pattern_key: str, key: str, kind: Any
) -> dict[str, float]:
    """Return the numbers of a pattern by the end of a module's name, and the number of all others by ""."""
    pattern = config.get(pattern_key) or {}
    if not isinstance(pattern, dict):
        raise _unusable(folder, f"`{pattern_key}` is {quoted(pattern)}", "names and numbers")
    numbers = {}
    for name, number in {**pattern, "": config.get(key, 8)}.items():  # 8 is PEFT's default of both
        if isinstance(number, bool) or not isinstance(number, kind) or not 0 < number < 2**31:
            raise _unusable(folder, f"`{key}` is {quoted(number)}", "a positive number")
        # PEFT matches regular expressions. A hostile one runs for hours, so only names are read.
        literal = name.removeprefix("^").removesuffix("$").replace("\\.", ".")
        if re.search(r"[^\w.]", literal):
            raise CheckpointError(
                f"`{folder}` has a pattern that is not supported",
                why=f"`{pattern_key}` has {quoted(name)}; expected names of modules",
                hint=MERGE,
            )
        numbers[f"^{literal}" if name.startswith("^") else literal] = number
    return numbers


def _value(numbers: Mapping[str, float], module: str) -> float:
    """Return the number of the first name that is the module's, or its end from a dot on."""
    for name in numbers:
        if name and (f"^{module}" == name or f".{module}".endswith(f".{name}")):
            return numbers[name]
    return numbers[""]


def _unusable(folder: Path, stated: str, expected: str) -> CheckpointError:
    return CheckpointError(
        f"cannot use {CONFIG} in `{folder}`",
        why=f"{stated}; expected {expected}",
        hint="save the adapter again with PEFT's `save_pretrained`, or correct the value",
    )
