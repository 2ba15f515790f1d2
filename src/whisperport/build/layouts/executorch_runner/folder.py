"""Write what ExecuTorch's runner of speech models loads: a .pte file for XNNPACK, and a tokenizer.

Source: pytorch/executorch@cff6f4dd, extension/asr/runner/seq2seq_runner.cpp, which calls the methods, and
examples/models/whisper/main.cpp, which names the start token.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.huggingface_files import write_json
from whisperport.build.layouts.pte import (
    audio_of,
    complete_tokenizer,
    method,
    packed_audio,
    token_decoder,
)

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

MODEL, TOKENIZER, SETTINGS = "model.pte", "tokenizer.json", "tokenizer_config.json"
ENCODE, DECODE, END = "encoder", "text_decoder", "get_eos_ids"
START = 50258  # the id with which the app begins each text
MOST_TOKENS = 128  # of a text, by default
WINDOW_S = 30  # to which the app's preprocessor fills each piece of audio


def unsupported(checkpoint: "Checkpoint", _precision: str) -> str:
    """Return why the app cannot run a checkpoint; empty: it can."""
    dims, start = checkpoint.dims, checkpoint.generation.start_of_transcript
    if start != START:
        return f"its text begins with the id {start}; the app begins each text with {START}"
    if dims.window_s != WINDOW_S:
        return f"its window is {dims.window_s:g} s; the app gives {WINDOW_S} s"
    if dims.n_text_ctx < MOST_TOKENS:
        return f"its decoder has {dims.n_text_ctx} positions; the app decodes {MOST_TOKENS} tokens"
    return ""


def write(checkpoint: "Checkpoint", precision: str, folder: Path) -> None:
    """Write model.pte, tokenizer.json and tokenizer_config.json.

    The app gives `text_decoder` a token, what `encoder` returned, and the token's position. The cache has
    room for all positions of the checkpoint, since the app may ask for more tokens than by default.

    Args:
        checkpoint: its weights are copied.
        precision: fp32, or w8: matrices of 8 bits, inputs rounded in each run.
        folder: an empty folder.

    Raises:
        LoweringError: ExecuTorch could not lower a method.
        MissingPackageError: ExecuTorch is not installed.
    """
    from whisperport.targets.cpu.xnnpack.lowering import import_executorch, lower_to_pte

    import_executorch()  # before minutes of work
    import torch

    from whisperport.model.network.whisper import build_model
    from whisperport.model.network.with_state import AudioSecond

    model, dims = build_model(checkpoint), checkpoint.dims
    encode = packed_audio(ENCODE, model, precision)
    decode = token_decoder(DECODE, checkpoint, model, precision, dims.n_text_ctx)
    mel = torch.zeros(1, dims.n_mels, dims.n_frames)
    token, position = torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    programs = {
        ENCODE: method(ENCODE, encode, (mel,)),
        DECODE: method(DECODE, AudioSecond(decode), (token, audio_of(model), position)),
    }
    end = checkpoint.generation.end_of_text
    lower_to_pte(programs, folder / MODEL, {END: end})
    write_json(folder / TOKENIZER, complete_tokenizer(checkpoint))
    names = dict.fromkeys(("bos_token", "eos_token"), "<|endoftext|>")
    write_json(folder / SETTINGS, {**names, "tokenizer_class": "WhisperTokenizer"})
