"""The folder of OpenVINO files that OpenVINO GenAI's WhisperPipeline loads, on a CPU or an NPU."""

from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.openvino_genai.folder import logits, write
from whisperport.build.layouts.openvino_genai.rules import READER, RULES

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

FOLDER = Path(__file__).parent
PACKAGES = ("openvino-genai>=2026.4", "openvino-tokenizers>=2026.4", "transformers>=4.57")


# Prompt and end of a text. With word timestamps, a text that leaves no room for them ends the process where
# the NPU's plug-in rewrites the graphs.
AROUND_TEXT = 4 + 1


def _profile(checkpoint: "Checkpoint") -> DecodingProfile:
    return DecodingProfile(
        padding="audio", max_tokens=checkpoint.dims.n_text_ctx - AROUND_TEXT, words=True
    )


LAYOUT = Layout(
    title="folder of OpenVINO files: encoder, stateful decoder, tokenizer",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="openvino-genai",
            packages=PACKAGES,
            module="openvino_genai",
            script=FOLDER / "client.py",
            # As in the client. The NPU's plug-in rewrites the graphs as for an NPU, which is not needed.
            devices=("CPU", "NPUW on the CPU", "NPUW on the CPU, static pipeline"),
            compared="text and timestamps",
            profile_of=_profile,
            drops=(
                "an NPU decodes 448 tokens, prompt and end included: with word timestamps, more end it",
                "it returns no ids: they are made of its text and timestamps",
            ),
        ),
    ),
    write=write,
    logits=logits,
    reader=READER,
    rules=RULES,
)
