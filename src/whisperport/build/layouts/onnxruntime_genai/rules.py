"""What ONNX Runtime GenAI demands of a folder.

Source: microsoft/onnxruntime-genai@a0c04eb, src/models/whisper.cpp, and runs of folders with one fault.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from whisperport.build.layouts.checkpoint_rules import Setting, checkpoint_rules, settings_of
from whisperport.build.layouts.huggingface_rules import settings
from whisperport.build.layouts.onnx_graph.header import read_header
from whisperport.build.layouts.onnx_graph.stored import stored_arrays
from whisperport.build.layouts.onnxruntime_genai.folder import DECODER, ENCODER, genai_config
from whisperport.build.layouts.reading import Files, Reader
from whisperport.build.layouts.rules import layout_rule

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

FILES, CONFIG, SOUND = (ENCODER, DECODER), "genai_config.json", "audio_processor_config.json"
HEADS, WIDTH = "num_attention_heads", "head_size"


@layout_rule("WP761", "The settings and the graphs state other sizes")
def sizes(files: Files) -> Iterator[tuple[str, str]]:
    """The app makes caches of the sizes in `genai_config.json`.

    What to do: `whisperport convert CHECKPOINT --for onnxruntime-genai`.
    """
    stated = _part(files, "decoder")
    caches = {
        name: axes
        for name, axes in files.read(DECODER, read_header).inputs.items()
        if name.startswith(("past_key_self_", "past_key_cross_")) and len(axes) == 4
    }
    for side in ("self", "cross"):
        count = sum(name.startswith(f"past_key_{side}_") for name in caches)
        if stated.get("num_hidden_layers", count) != count:
            yield CONFIG, f"{str(stated['num_hidden_layers'])[:40]} layers; the decoder has {count}"
            return
    for name, axes in caches.items():
        for key, axis in ((HEADS, 1), (WIDTH, 3)):
            if isinstance(axes[axis], int) and stated.get(key, axes[axis]) != axes[axis]:
                yield CONFIG, f"{key} is {str(stated[key])[:40]}; `{name}` has {axes[axis]}"
                return


def _settings(files: Files, checkpoint: "Checkpoint") -> Iterator[Setting]:
    right = genai_config(checkpoint)["model"]
    keys = ("type", "vocab_size", "context_length", "eos_token_id")
    yield from settings_of(CONFIG, _model(files), right, keys)
    for part in ("encoder", "decoder"):
        keys = (HEADS, WIDTH, "num_hidden_layers", "hidden_size")
        yield from settings_of(CONFIG, _part(files, part), right[part], keys)
    bands = {"n_mel": checkpoint.dims.n_mels}
    for step in _steps(files.json(SOUND)):
        yield from settings_of(SOUND, step, bands)
    yield from settings(files, checkpoint)


def _model(files: Files) -> Mapping[str, Any]:
    model = files.json(CONFIG).get("model")
    return model if isinstance(model, dict) else {}


def _part(files: Files, name: str) -> Mapping[str, Any]:
    part = _model(files).get(name)
    return part if isinstance(part, dict) else {}


def _steps(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield each JSON object that states bands."""
    if isinstance(value, dict):
        if "n_mel" in value:
            yield value
        for member in value.values():
            yield from _steps(member)
    elif isinstance(value, list):
        for entry in value:
            yield from _steps(entry)


RULES = (sizes, *checkpoint_rules(_settings))

READER = Reader(
    lambda files: files.has(CONFIG) and all(map(files.has, FILES)),
    lambda _files: ["fp32"],
    lambda files, _precision: stored_arrays(files, FILES),
)
