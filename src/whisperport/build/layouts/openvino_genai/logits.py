"""Run the written graphs on the CPU, on a spectrogram of this package: an exact check."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from whisperport.build.layouts.arrays import Floats, decoded_together
from whisperport.errors import needs
from whisperport.targets.cpu.openvino.runtime import FLOAT32

STATE = re.compile(r"past_key_values\.(\d+\.decoder\.(?:key|value))")


def logits(
    folder: Path,
    _precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    caches: dict[str, Floats],
) -> Floats:
    """Return the logits (S, V) after each of S tokens.

    Args:
        folder: of the layout.
        mel: (n_mels, 2T).
        tokens: the prompt, and the text after it.
        n_prompt: how many the first run decodes; the others follow one by one, with the states.
        caches: filled with the keys and values of the first run, as `Layout.logits` says.

    Raises:
        MissingPackageError: OpenVINO is not installed.
    """
    with needs("cannot run OpenVINO files: openvino is not installed", extra="openvino"):
        import openvino

    def opened(name: str) -> Any:
        path = folder / f"openvino_{name}_model.xml"
        return openvino.Core().compile_model(path, "CPU", FLOAT32)

    features = opened("encoder")({"input_features": mel[None]})[0]
    request = opened("decoder").create_infer_request()
    has_places = any("cache_position" in i.get_names() for i in request.get_compiled_model().inputs)
    rows: list[Floats] = []
    n_cached = 0
    for piece in decoded_together(tokens, n_prompt):
        inputs = {
            "input_ids": np.array([piece], np.int64),
            "encoder_hidden_states": features,
            "beam_idx": np.zeros(1, np.int32),
        }
        if has_places:  # as some versions of transformers export it
            inputs["cache_position"] = np.arange(n_cached, n_cached + len(piece))
        n_cached += len(piece)
        rows.append(request.infer(inputs)["logits"][0].copy())
        for state in request.query_state():
            if (place := STATE.match(state.name)) and place[1] not in caches:
                caches[place[1]] = state.state.data[0].copy()
    return np.concatenate(rows)
