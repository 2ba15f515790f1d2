"""The folder of ONNX files that ONNX Runtime GenAI loads."""

from pathlib import Path

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.onnxruntime_genai.folder import logits, unsupported, write
from whisperport.build.layouts.onnxruntime_genai.rules import READER, RULES

LAYOUT = Layout(
    title="folder of ONNX files: encoder, decoder, settings and tokenizer",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="onnxruntime-genai",
            packages=("onnxruntime-genai>=0.18", "numpy"),
            module="onnxruntime_genai",
            script=Path(__file__).with_name("client.py"),
            profile_of=lambda _checkpoint: DecodingProfile(
                padding="audio",
                timestamps=False,
                suppresses=False,
                suppresses_at_start=False,
                windows=False,
            ),
            drops=(
                "no token is suppressed, and the caller writes the prompt",
                "audio after the first 30 s is not decoded unless the caller cuts it",
                "it has no rules of timestamps, and no word timestamps on a CPU",
                "fp16 is stored, and computed in float32",
            ),
        ),
    ),
    write=write,
    reader=READER,
    rules=RULES,
    logits=logits,
    unsupported=unsupported,
)
