"""Names: Hugging Face's tensors in openai-whisper's words, and models by their short names."""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

# Whole names, without Hugging Face's leading `model.`.
_TOP = {
    "encoder.conv1.weight": "encoder.conv1.weight",
    "encoder.conv1.bias": "encoder.conv1.bias",
    "encoder.conv2.weight": "encoder.conv2.weight",
    "encoder.conv2.bias": "encoder.conv2.bias",
    "encoder.embed_positions.weight": "encoder.positional_embedding",
    "encoder.layer_norm.weight": "encoder.ln_post.weight",
    "encoder.layer_norm.bias": "encoder.ln_post.bias",
    "decoder.embed_tokens.weight": "decoder.token_embedding.weight",
    "decoder.embed_positions.weight": "decoder.positional_embedding",
    "decoder.layer_norm.weight": "decoder.ln.weight",
    "decoder.layer_norm.bias": "decoder.ln.bias",
}

# Modules inside one layer; `.weight` or `.bias` follows.
_IN_LAYER = {
    "self_attn.q_proj": "attn.query",
    "self_attn.k_proj": "attn.key",
    "self_attn.v_proj": "attn.value",
    "self_attn.out_proj": "attn.out",
    "self_attn_layer_norm": "attn_ln",
    "encoder_attn.q_proj": "cross_attn.query",
    "encoder_attn.k_proj": "cross_attn.key",
    "encoder_attn.v_proj": "cross_attn.value",
    "encoder_attn.out_proj": "cross_attn.out",
    "encoder_attn_layer_norm": "cross_attn_ln",
    "fc1": "mlp.0",
    "fc2": "mlp.2",
    "final_layer_norm": "mlp_ln",
}

_LANDMARK = "encoder.conv1.weight"  # called so by both libraries
_TOP_BACK = {ours: theirs for theirs, ours in _TOP.items()}
_IN_LAYER_BACK = {ours: theirs for theirs, ours in _IN_LAYER.items()}
_THEIR_LAYER = re.compile(r"(encoder|decoder)\.layers\.(0|[1-9]\d{0,3})\.(.+)\.(weight|bias)")
_OUR_LAYER = re.compile(r"(encoder|decoder)\.blocks\.(0|[1-9]\d{0,3})\.(.+)\.(weight|bias)")


def from_huggingface(name: str) -> str | None:
    """`model.decoder.layers.0.fc1.bias` to `decoder.blocks.0.mlp.0.bias`; None: not Whisper's."""
    name = name.removeprefix("model.")
    if match := _THEIR_LAYER.fullmatch(name):
        side, layer, module, kind = match.groups()
        ours = _IN_LAYER.get(module)
        return f"{side}.blocks.{layer}.{ours}.{kind}" if ours else None
    return _TOP.get(name)


def unwrapped(tensors: Mapping[str, Tensor], *, own: str = "") -> dict[str, Tensor]:
    """Without what a training loop's wrapper put before every name: `module.`, `_orig_mod.`, `model.`.

    It is whatever stands before the name of one tensor that every Whisper has; `own` is a prefix of the
    library's own, which stays. A name that has not the wrapper's prefix stays as it is.
    """
    before = next((n.removesuffix(_LANDMARK) for n in tensors if n.endswith(_LANDMARK)), "")
    wrapper = before.removesuffix(own)
    found = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(wrapper)
        found[name if bare in tensors else bare] = tensor
    return found


def to_huggingface(name: str) -> str:
    """`decoder.blocks.0.mlp.0.bias` to `model.decoder.layers.0.fc1.bias`; KeyError: not ours."""
    if match := _OUR_LAYER.fullmatch(name):
        side, layer, module, kind = match.groups()
        return f"model.{side}.layers.{layer}.{_IN_LAYER_BACK[module]}.{kind}"
    return f"model.{_TOP_BACK[name]}"


HUB_IDS = {
    "tiny": "openai/whisper-tiny",
    "tiny.en": "openai/whisper-tiny.en",
    "base": "openai/whisper-base",
    "base.en": "openai/whisper-base.en",
    "small": "openai/whisper-small",
    "small.en": "openai/whisper-small.en",
    "medium": "openai/whisper-medium",
    "medium.en": "openai/whisper-medium.en",
    "large-v1": "openai/whisper-large",  # the hub's name from before there was a second
    "large-v2": "openai/whisper-large-v2",
    "large-v3": "openai/whisper-large-v3",
    "large": "openai/whisper-large-v3",  # as openai-whisper resolves it
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
    "turbo": "openai/whisper-large-v3-turbo",
    "distil-small.en": "distil-whisper/distil-small.en",
    "distil-medium.en": "distil-whisper/distil-medium.en",
    "distil-large-v2": "distil-whisper/distil-large-v2",
    "distil-large-v3": "distil-whisper/distil-large-v3",
    "distil-large-v3.5": "distil-whisper/distil-large-v3.5",
}


def default_checkpoint_folder() -> Path:
    """The small model shipped inside the package, loaded by the name `default`."""
    return Path(__file__).parents[1] / "data" / "model"
