"""The ONNX files that sherpa-onnx loads."""

from pathlib import Path

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.sherpa_onnx.folder import unsupported, write
from whisperport.build.layouts.sherpa_onnx.logits import logits

LAYOUT = Layout(
    title="folder of encoder.onnx, decoder.onnx and tokens.txt",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="sherpa-onnx",
            packages=("sherpa-onnx>=2", "numpy"),
            module="sherpa_onnx",
            script=Path(__file__).with_name("client.py"),
            profile_of=lambda _checkpoint: DecodingProfile(
                padding="mel",
                timestamps=False,
                suppresses=False,
                suppresses_at_start=False,
                windows=False,
                words=True,
            ),
            compared="words",
            drops=(
                "its own log-mel spectrogram, with 10 s of padding, differs a little from Whisper's",
                "no token is suppressed",
                "audio after the first 29.5 s is not decoded, nor more than 6 tokens per second",
                "fp16 is stored, and computed in float32",
            ),
        ),
    ),
    write=write,
    logits=logits,
    unsupported=unsupported,
)
