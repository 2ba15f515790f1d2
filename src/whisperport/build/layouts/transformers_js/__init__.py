"""The folder of ONNX files that transformers.js, onnx-asr and optimum load."""

import os
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.transformers_js.folder import logits, write
from whisperport.build.layouts.transformers_js.rules import READER, RULES

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

FOLDER = Path(__file__).parent
DEVICES = ("browser", "Node") if os.environ.get("WHISPERPORT_BROWSER") else ("Node",)
ONE_WINDOW = "audio after the first 30 s is not decoded unless the caller cuts it"


def _room(checkpoint: "Checkpoint") -> int:
    """Return how many positions follow the prompt: all can be used, where openai-whisper uses half."""
    return checkpoint.dims.n_text_ctx - checkpoint.generation.n_start_tokens


LAYOUT = Layout(
    title="folder of ONNX files: encoder, merged decoder, settings and tokenizer",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="transformers.js",
            packages=("@huggingface/transformers@4",),
            module="@huggingface/transformers",
            installer="npm",
            script=FOLDER / "client.mjs",
            devices=DEVICES,
            profile_of=lambda checkpoint: DecodingProfile(
                padding="audio", timestamps=False, windows=False, max_tokens=_room(checkpoint)
            ),
            drops=(
                "the language is not detected: it is English unless the caller names another",
                "version 4.3 gives each word the time of the next token, whatever wrote the files: word "
                "timestamps are not compared",
                ONE_WINDOW,
                "fp16 is stored, and computed in float32",
                "it runs in Node, and in the browser that WHISPERPORT_BROWSER names, such as "
                "/usr/bin/chromium",
            ),
        ),
        App(
            name="onnx-asr",
            packages=("onnx-asr>=0.12", "onnxruntime>=1.20"),
            module="onnx_asr",
            script=FOLDER / "onnx_asr_client.py",
            profile_of=lambda checkpoint: DecodingProfile(
                padding="audio",
                timestamps=False,
                suppresses=False,
                suppresses_at_start=False,
                windows=False,
                max_tokens=checkpoint.dims.n_text_ctx - 4,
            ),
            drops=(
                "no token is suppressed",
                "the prompt names a language and the task even to an English-only model",
                "it returns no timestamps of Whisper",
                ONE_WINDOW,
            ),
        ),
        App(
            name="optimum",
            # This package's torch: where pip is set up to find a build for the CPU, it is used here too.
            packages=("torch==2.13.0", "optimum-onnx[onnxruntime]>=0.1"),
            module="optimum",
            script=FOLDER / "optimum_client.py",
            profile_of=lambda checkpoint: DecodingProfile(
                padding="audio", timestamps=False, windows=False, max_tokens=_room(checkpoint)
            ),
            drops=("fp16 is stored, and computed in float32", ONE_WINDOW),
        ),
    ),
    write=write,
    reader=READER,
    rules=RULES,
    logits=logits,
)
