"""The folder of CTranslate2, which faster-whisper loads."""

from pathlib import Path

from whisperport.build.layouts.faster_whisper.folder import write
from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps

LAYOUT = Layout(
    title="folder of CTranslate2: model.bin, vocabulary and tokenizer",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="faster-whisper",
            packages=("faster-whisper>=1.2",),
            module="faster_whisper",
            script=Path(__file__).with_name("client.py"),
            profile_of=lambda _checkpoint: DecodingProfile(padding="mel"),
            drops=(
                "the ids of languages and tasks are looked up by name in tokenizer.json",
                "fp16 is computed in float32 on a CPU",
            ),
        ),
    ),
    write=write,
)
