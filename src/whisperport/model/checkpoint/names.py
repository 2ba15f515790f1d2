"""Translate tensor names between Hugging Face and openai-whisper, and short model names to hub ids."""

import re
from collections.abc import Mapping

from torch import Tensor

# Hugging Face's name, without the prefix `model.` -> openai-whisper's name.
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

# Modules of one layer, Hugging Face's name -> openai-whisper's name; `.weight` or `.bias` follows.
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

KEY_BIAS = ".key.bias"  # end of a name that no weight has: Whisper's keys have no bias
EMBEDDING = "decoder.token_embedding.weight"  # openai-whisper's name of the token embedding
PROJECTION = "proj_out.weight"  # Hugging Face's name of the output projection, which equals it
_ALWAYS_PRESENT = "encoder.conv1.weight"  # every model has it; both libraries use this name
_TOP_HUGGINGFACE = {openai: huggingface for huggingface, openai in _TOP.items()}
_IN_LAYER_HUGGINGFACE = {openai: huggingface for huggingface, openai in _IN_LAYER.items()}
_HUGGINGFACE_LAYER = re.compile(r"(encoder|decoder)\.layers\.(0|[1-9]\d{0,3})\.(.+)\.(weight|bias)")
_OPENAI_LAYER = re.compile(r"(encoder|decoder)\.blocks\.(0|[1-9]\d{0,3})\.(.+)\.(weight|bias)")


def from_huggingface(name: str) -> str | None:
    """Translate a Hugging Face tensor name to openai-whisper's name.

    `model.decoder.layers.0.fc1.bias` becomes `decoder.blocks.0.mlp.0.bias`. None: the name is not known.
    """
    name = name.removeprefix("model.")
    if match := _HUGGINGFACE_LAYER.fullmatch(name):
        side, layer, module, kind = match.groups()
        openai = _IN_LAYER.get(module)
        return f"{side}.blocks.{layer}.{openai}.{kind}" if openai else None
    return _TOP.get(name)


def strip_wrapper_prefix(tensors: Mapping[str, Tensor], *, own: str = "") -> dict[str, Tensor]:
    """Remove the prefix that a training wrapper added to tensor names: `module.`, `_orig_mod.`, `model.`.

    The prefix is the text before the name of a tensor that every Whisper model has. Names without the
    prefix do not change.

    Args:
        tensors: name -> tensor.
        own: prefix of the library's own names, which is not removed.
    """
    before = next(
        (n.removesuffix(_ALWAYS_PRESENT) for n in tensors if n.endswith(_ALWAYS_PRESENT)), ""
    )
    wrapper = before.removesuffix(own)
    unwrapped = {}
    for name, tensor in tensors.items():
        bare = name.removeprefix(wrapper)
        unwrapped[name if bare in tensors else bare] = tensor
    return unwrapped


def to_huggingface(name: str) -> str:
    """Translate an openai-whisper tensor name to Hugging Face's name.

    `decoder.blocks.0.mlp.0.bias` becomes `model.decoder.layers.0.fc1.bias`.

    Raises:
        KeyError: the name is not known.
    """
    if match := _OPENAI_LAYER.fullmatch(name):
        side, layer, module, kind = match.groups()
        return f"model.{side}.layers.{layer}.{_IN_LAYER_HUGGINGFACE[module]}.{kind}"
    return f"model.{_TOP_HUGGINGFACE[name]}"


HUB_IDS = {
    "tiny": "openai/whisper-tiny",
    "tiny.en": "openai/whisper-tiny.en",
    "base": "openai/whisper-base",
    "base.en": "openai/whisper-base.en",
    "small": "openai/whisper-small",
    "small.en": "openai/whisper-small.en",
    "medium": "openai/whisper-medium",
    "medium.en": "openai/whisper-medium.en",
    "large-v1": "openai/whisper-large",  # large-v1 has this name on the hub
    "large-v2": "openai/whisper-large-v2",
    "large-v3": "openai/whisper-large-v3",
    "large": "openai/whisper-large-v3",  # the same model as in openai-whisper
    "large-v3-turbo": "openai/whisper-large-v3-turbo",
    "turbo": "openai/whisper-large-v3-turbo",
    "distil-small.en": "distil-whisper/distil-small.en",
    "distil-medium.en": "distil-whisper/distil-medium.en",
    "distil-large-v2": "distil-whisper/distil-large-v2",
    "distil-large-v3": "distil-whisper/distil-large-v3",
    "distil-large-v3.5": "distil-whisper/distil-large-v3.5",
}


_ENDS = re.compile(r"(\.T|\.half|\.u?int8|_merged_\d+|_quantized|/(MatMul|Gemm|Add|Conv)(_\d+)?)+$")
_KINDS = {"MatMul": "weight", "Gemm": "weight", "Add": "bias"}


def from_exported(name: str, side: str) -> str | None:
    """Translate the name of an array, or of the node that reads it, in an exported file; None: not known.

    `layers.0.fc1.bias_merged_0` of a decoder becomes `decoder.blocks.0.mlp.0.bias`, and so does the node
    `/model/decoder/layers.0/fc1/Add`.

    Args:
        name: as an exporter writes it.
        side: encoder or decoder: which of the two a name means that does not say it.
    """
    stem = _ENDS.sub("", name)
    if name.startswith("/"):
        kind = _KINDS.get(name.rpartition("/")[2].partition("_")[0])
        if kind is None:
            return None
        stem = f"{stem[1:].replace('/', '.')}.{kind}"
    stem = stem.removeprefix("self.").removeprefix("model.")
    if _OPENAI_LAYER.fullmatch(stem) or stem in _TOP_HUGGINGFACE:
        return stem
    if stem == PROJECTION:
        return EMBEDDING
    return from_huggingface(stem) or from_huggingface(f"{side}.{stem}")
