"""The ONNX files that sherpa-onnx loads."""

from dataclasses import replace
from pathlib import Path

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.sherpa_onnx.folder import logits, unsupported, write
from whisperport.build.layouts.sherpa_onnx.rules import READER, RULES

FOLDER = Path(__file__).parent
PROFILE = DecodingProfile(
    padding="mel",
    timestamps=False,
    suppresses=False,
    suppresses_at_start=False,
    windows=False,
    tokens_per_s=6,
)
DROPS = (
    "its own log-mel spectrogram, with 10 s of padding, differs a little from Whisper's",
    "no token is suppressed",
    "audio after the first 29.5 s is not decoded, nor more than 6 tokens per second",
    "fp16 is stored, and computed in float32",
)

LAYOUT = Layout(
    title="folder of encoder.onnx, decoder.onnx and tokens.txt",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="sherpa-onnx",
            packages=("sherpa-onnx>=2", "numpy"),
            module="sherpa_onnx",
            script=FOLDER / "client.py",
            profile_of=lambda _checkpoint: replace(PROFILE, words=True),
            compared="words",
            drops=DROPS,
        ),
        App(
            name="sherpa-onnx-node",
            packages=("sherpa-onnx-node@1",),
            module="sherpa-onnx-node",
            installer="npm",
            script=FOLDER / "client.mjs",
            profile_of=lambda _checkpoint: PROFILE,
            compared="words",
            drops=(
                *DROPS,
                "it returns the times of tokens, not of words: they are compared in sherpa-onnx",
            ),
        ),
    ),
    write=write,
    reader=READER,
    rules=RULES,
    logits=logits,
    unsupported=unsupported,
)
