"""The forms of encoder and decoder that scripts of vendors and toolkits write, recognized by their names.

The sources are the scripts themselves:
airockchip/rknn_model_zoo@333f951 examples/whisper · hailocs/hailo-whisper@347d8a0 ·
quic/ai-hub-models@052dc1f qai_hub_models/models/_shared/hf_whisper ·
k2-fsa/sherpa-onnx@125b7a5 scripts/whisper/rknn ·
huggingface/optimum-executorch@0006647 · superLin006/MTK_model_zoo@24b523a whisper/mtk.

The rows are not in the vendors' folders: those of one chip come from several projects, some projects write
for any chip, and what a demo does is a matter of layouts, which no target knows.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from whisperport.build.layouts.graph_pair.pair import Pair
from whisperport.build.layouts.layout import Padding
from whisperport.errors import BundleError

DIGITS = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """What one script writes, and what its demo does with it.

    Attributes:
        name: of the project, as its users call it.
        suffix: of the files; empty: any.
        inputs: names of the decoder's inputs, with `#` for a number; of a format without names, their
            roles; empty: any.
        target: that of `whisperport export` which writes programs for the same devices.
        padding: what fills the window in the demo; see `DecodingProfile`.
        rolls: whether the demo fills a fixed number of tokens with repeated prompts, drops one of these for
            each new token, and then the oldest tokens.
        drops: what the demo does not do, one sentence each.
    """

    name: str
    suffix: str = ""
    inputs: frozenset[str] = frozenset()
    target: str = "onnxruntime"
    padding: Padding = "mel"
    rolls: bool = False
    drops: tuple[str, ...] = ()


NO_TIMES = "no timestamps"
START_ONLY = "only the start token is given: the model itself chooses language and task"

FORMS = (
    Form(
        name="rknn_model_zoo",
        suffix=".onnx",
        inputs=frozenset({"tokens", "audio"}),
        target="rk3588",
        rolls=True,
        drops=(
            "English or Chinese only, with the ids of multilingual models before large-v3",
            "80 mel bins, and the spectrogram is scaled by its largest value before it is cut",
            "a text without end is never stopped",
            NO_TIMES,
        ),
    ),
    Form(
        name="hailo-whisper",
        suffix=".onnx",
        inputs=frozenset({"decoder_input_ids", "encoder_hidden_states"}),
        target="hailo8l",
        padding="audio",
        drops=(START_ONLY, "logits of the last tokens are divided by 1.5 against loops", NO_TIMES),
    ),
    Form(
        name="ai-hub-models",
        inputs=frozenset(
            {
                "input_ids",
                "attention_mask",
                "position_ids",
                "k_cache_self_#_in",
                "v_cache_self_#_in",
            }
            | {"k_cache_cross_#", "v_cache_cross_#"}
        ),
        target="sm8650",
        padding="audio",
        drops=(START_ONLY, "no token is suppressed", NO_TIMES),
    ),
    Form(
        name="sherpa-onnx on an NPU",
        suffix=".onnx",
        inputs=frozenset(
            {"tokens", "offset", "mask", "self_k_#", "self_v_#", "cross_k_#", "cross_v_#"}
        ),
        target="rk3588",
        drops=("the size is read from the file's name: tiny to large", NO_TIMES),
    ),
    Form(
        name="optimum-executorch",
        suffix=".pte",
        inputs=frozenset({"tokens", "features", "position"}),
        target="xnnpack",
        padding="audio",
        drops=(START_ONLY, NO_TIMES),
    ),
    Form(
        name="MTK_model_zoo",
        suffix=".tflite",
        inputs=frozenset({"embeddings", "features"}),
        target="genio720",
        padding="audio",
        drops=("the host looks embeddings up", NO_TIMES),
    ),
)
UNKNOWN = Form(name="an app of its own")

COMPILED = frozenset({".rknn", ".hef", ".dla", ".dlc", ".bin"})
"""Suffixes of files that a vendor's compiler wrote, which may lie beside the graphs."""


def compiled_types(path: Path) -> frozenset[str]:
    """Return the types of a compiled file's inputs and outputs; none if it does not state them."""
    if path.suffix != ".rknn":
        return frozenset()
    from whisperport.targets.vendors.rockchip.rknn_file import read_rknn

    try:
        return read_rknn(path).types
    except BundleError:  # a damaged file has its own rule: it is not read
        return frozenset()


def form_of(pair: Pair) -> Form:
    """Return the form of a pair; `UNKNOWN` if no script is known that writes it."""
    names = {DIGITS.sub("#", value.name) for value in pair.decoder.graph.inputs}
    roles: set[str] = set(pair.roles.values())
    for form in FORMS:
        known = roles if form.suffix in (".pte", ".tflite") else names
        if form.suffix in ("", pair.decoder.suffix) and known == form.inputs:
            return form
    return UNKNOWN
