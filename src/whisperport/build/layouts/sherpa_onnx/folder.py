"""Write the folder that sherpa-onnx loads, and run its graphs as the app does."""

import base64
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from whisperport.build.layouts.arrays import Floats, decoded_together
from whisperport.build.layouts.huggingface_files import alignment_heads, ids_by_token, vocab
from whisperport.build.layouts.layout import ALIGNED
from whisperport.build.layouts.onnx_graph.file import open_session, run_session
from whisperport.build.layouts.sherpa_onnx.graphs import write_decoder, write_encoder
from whisperport.program.generation import Generation
from whisperport.speech.text.byte_level import from_byte_characters, to_byte_characters

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

ENCODER, DECODER, TOKENS = "encoder.onnx", "decoder.onnx", "tokens.txt"
WINDOW = 1500  # positions: sherpa-onnx gives at most 30 s to the encoder
VERSION = 1  # of the layout


def unsupported(checkpoint: "Checkpoint", _precision: str) -> str:
    """Return why sherpa-onnx cannot run a checkpoint; empty: it can."""
    if checkpoint.dims.n_audio_ctx < WINDOW:
        return f"its window is {checkpoint.dims.window_s:g} s; sherpa-onnx encodes up to 30 s in one run"
    return ""


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write encoder.onnx, decoder.onnx and tokens.txt.

    Args:
        checkpoint: its weights are read one at a time.
        precision: fp32; fp16: stored in float16, computed in float32; w8: matrices of 8 bits.
        folder: an empty folder.
    """
    write_encoder(checkpoint, precision, folder / ENCODER, metadata(checkpoint))
    write_decoder(checkpoint, precision, folder / DECODER)
    (folder / TOKENS).write_text(text_tokens(checkpoint), encoding="ascii")


def text_tokens(checkpoint: "Checkpoint") -> str:
    """Return a line "base64 of the bytes, id" for each token before <|endoftext|>."""
    tokens = {i: token for token, i in vocab(checkpoint).items()}
    encoded = (
        (base64.b64encode(from_byte_characters(tokens[i])).decode(), i)
        for i in sorted(tokens)
        if i < checkpoint.generation.end_of_text
    )
    return "".join(f"{text} {i}\n" for text, i in encoded)


def metadata(checkpoint: "Checkpoint") -> dict[str, str]:
    """Return the metadata of the encoder. If a text that sherpa-onnx reads is missing, it ends the process.

    Source: k2-fsa/sherpa-onnx@634265c, csrc/offline-whisper-model.cc; scripts/whisper/export-onnx.py writes
    more than it reads.
    """
    generation, dims = checkpoint.generation, checkpoint.dims
    symbols = sorted(i for i in generation.suppressed if i < generation.end_of_text)
    sizes = {name: size for name, size in asdict(dims).items() if not name.endswith("_ffn")}
    blank = ids_by_token(checkpoint)[to_byte_characters(b" ")]
    values = {
        **sizes,
        "model_type": "whisper",
        "version": VERSION,
        "maintainer": "whisperport",
        "sot_index": 0,  # in sot_sequence
        "sot_prev": generation.start_of_previous,
        "non_speech_tokens": _list(symbols),
        "n_alignment_heads": len(alignment_heads(checkpoint)),
    }
    return {name: str(value) for name, value in values.items()} | ids(generation, blank)


def ids(generation: Generation, blank: int) -> dict[str, str]:
    """Return the ids in the metadata; `blank` is that of the token of a space."""
    # A task that the checkpoint lacks must be there, too.
    transcribe = generation.tasks.get("transcribe", generation.start_of_transcript)
    prompt = [generation.start_of_transcript]
    if generation.is_multilingual:
        prompt += [generation.languages[generation.any_language], transcribe]
    codes = sorted(generation.languages, key=lambda code: generation.languages[code])
    values = {
        "sot": generation.start_of_transcript,
        "sot_sequence": _list(prompt),
        "eot": generation.end_of_text,
        "blank_id": blank,
        "transcribe": transcribe,
        "translate": generation.tasks.get("translate", transcribe),
        "is_multilingual": int(generation.is_multilingual),
        "no_timestamps": generation.no_timestamps,
        "no_speech": generation.no_speech,
        "all_language_tokens": _list([generation.languages[code] for code in codes]),
        "all_language_codes": ",".join(codes),
    }
    return {name: str(value) for name, value in values.items()}


def _list(ids: list[int]) -> str:
    return ",".join(map(str, ids))


NAMES = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")


def logits(
    folder: Path,
    _precision: str,
    mel: Floats,
    tokens: Sequence[int],
    n_prompt: int,
    caches: dict[str, Floats],
) -> Floats:
    """Return the logits (S, V) after each of S tokens, as `Layout.logits` says."""
    # Another script may call the files tiny-encoder.onnx, and leave the number of texts open.
    encoder_path, decoder_path = (
        min(folder.glob(f"*{Path(name).stem}*.onnx")) for name in (ENCODER, DECODER)
    )
    encoder = open_session(encoder_path)
    cross = run_session(encoder, {encoder.get_inputs()[0].name: mel[None]})
    del encoder  # its memory, before the decoder takes more
    decoder = open_session(decoder_path)
    names = [value.name for value in decoder.get_inputs()]
    shapes = ([n if isinstance(n, int) else 1 for n in v.shape] for v in decoder.get_inputs()[1:3])
    rows_kept = [np.zeros(shape, np.float32) for shape in shapes]
    rows: list[Floats] = []
    aligned: list[Floats] = []
    n_cached = 0
    for new in decoded_together(tokens, n_prompt):
        ids, offset = np.array([new], np.int64), np.array([n_cached], np.int64)
        inputs = dict(zip(names, (ids, *rows_kept, *cross, offset), strict=True))
        outputs = run_session(decoder, inputs)
        new_logits, *rows_kept = outputs[:3]
        rows.append(new_logits[0])
        aligned += [array[0] for array in outputs[3:4] if array.ndim == 4]
        n_cached += len(new)
        for name, layers in zip(NAMES, (*rows_kept, *cross), strict=True):
            for i, layer in enumerate(layers):
                n = n_cached if "decoder" in name else None
                caches.setdefault(f"{i}.{name}", layer[0, :n])
    if aligned:
        caches[ALIGNED] = np.concatenate(aligned, axis=1)
    return np.concatenate(rows)
