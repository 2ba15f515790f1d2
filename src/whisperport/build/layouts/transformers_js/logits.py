"""Run the written graphs as their apps do, on a spectrogram of this package: an exact check."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.layouts.arrays import Floats, decoded_together
from whisperport.build.layouts.onnx_graph.session import open_session
from whisperport.build.layouts.transformers_js.folder import graph_paths


def logits(
    folder: Path,
    precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    caches: dict[str, Floats],
) -> Floats:
    """Return the logits (S, V) after each of S tokens.

    Args:
        folder: of the layout.
        precision: of its weights.
        mel: (n_mels, 2T).
        tokens: the prompt, and the text after it.
        n_prompt: how many the first run decodes; the others follow one by one, with the cache.
        caches: filled with the keys and values of the first run, as `Layout.logits` says.
    """
    encoder_path, decoder_path = graph_paths(folder, precision)
    if not encoder_path.exists():  # optimum writes them beside the settings
        encoder_path, decoder_path = folder / encoder_path.name, folder / decoder_path.name
    (features,) = open_session(encoder_path).run(None, {"input_features": mel[None]})
    decoder = open_session(decoder_path)
    names = [output.name for output in decoder.get_outputs()]
    # As the apps begin: of batch 0, and without a row.
    inputs: dict[str, Any] = {
        value.name: np.zeros((0, value.shape[1], 0, value.shape[3]), np.float32)
        for value in decoder.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    inputs["encoder_hidden_states"] = features
    rows: list[Floats] = []
    for new in decoded_together(tokens, n_prompt):
        inputs["input_ids"] = np.array([new], np.int64)
        inputs["use_cache_branch"] = np.array([bool(rows)])
        outputs = dict(zip(names, decoder.run(None, inputs), strict=True))
        rows.append(outputs["logits"][0])
        for name, value in outputs.items():
            if name.startswith("present.") and len(value):
                inputs[name.replace("present.", "past_key_values.")] = value
                caches.setdefault(name.removeprefix("present."), value[0])
    return np.concatenate(rows)
