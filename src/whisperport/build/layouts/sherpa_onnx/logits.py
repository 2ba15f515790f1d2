"""Run the written graphs as sherpa-onnx does, on a spectrogram of this package: an exact check."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from whisperport.build.layouts.arrays import Floats, decoded_together
from whisperport.build.layouts.onnx_graph.session import open_session
from whisperport.build.layouts.sherpa_onnx.folder import DECODER, ENCODER

NAMES = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")


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
        mel: (n_mels, 2T), of any T.
        tokens: the prompt, and the text after it.
        n_prompt: how many the first run decodes; the others follow one by one, with the cache.
        caches: filled with the keys and values of the first run, as `Layout.logits` says.
    """
    # Another script may call the files tiny-encoder.onnx, and leave the number of texts open.
    encoder_path, decoder_path = (
        min(folder.glob(f"*{Path(name).stem}*.onnx")) for name in (ENCODER, DECODER)
    )
    encoder = open_session(encoder_path)
    cross = encoder.run(None, {encoder.get_inputs()[0].name: mel[None]})
    del encoder  # its memory, before the decoder takes more
    decoder = open_session(decoder_path)
    names = [value.name for value in decoder.get_inputs()]
    shapes = ([n if isinstance(n, int) else 1 for n in v.shape] for v in decoder.get_inputs()[1:3])
    rows_kept = [np.zeros(shape, np.float32) for shape in shapes]
    rows: list[Floats] = []
    n_cached = 0
    for new in decoded_together(tokens, n_prompt):
        ids, offset = np.array([new], np.int64), np.array([n_cached], np.int64)
        inputs = dict(zip(names, (ids, *rows_kept, *cross, offset), strict=True))
        new_logits, *rows_kept = decoder.run(None, inputs)[:3]
        rows.append(new_logits[0])
        n_cached += len(new)
        for name, layers in zip(NAMES, (*rows_kept, *cross), strict=True):
            for i, layer in enumerate(layers):
                n = n_cached if "decoder" in name else None
                caches.setdefault(f"{i}.{name}", layer[0, :n])
    return np.concatenate(rows)
