"""The folder of CTranslate2, which faster-whisper loads."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.faster_whisper.folder import write
from whisperport.build.layouts.faster_whisper.rules import READER, RULES
from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps

if TYPE_CHECKING:  # it needs torch
    from torch import Tensor


def _weights(path: Path) -> "Mapping[str, Tensor]":
    from whisperport.model.checkpoint.ctranslate2 import read_weights

    return read_weights(path)


LAYOUT = Layout(
    title="folder of CTranslate2: model.bin, vocabulary and tokenizer",
    precisions=("fp32", "fp16", "w8"),
    apps=apps(
        App(
            name="faster-whisper",
            packages=("faster-whisper>=1.2",),
            module="faster_whisper",
            script=Path(__file__).with_name("client.py"),
            profile_of=lambda _checkpoint: DecodingProfile(padding="mel", words=True),
            drops=(
                "the ids of languages and tasks are looked up by name in tokenizer.json",
                "fp16 is computed in float32 on a CPU",
            ),
        ),
    ),
    write=write,
    weights=_weights,
    reader=READER,
    rules=RULES,
)
