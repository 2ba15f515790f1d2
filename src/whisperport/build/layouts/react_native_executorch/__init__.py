"""The .pte file and the tokenizer that react-native-executorch loads."""

from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.react_native_executorch.folder import (
    PIECE_S,
    POSITIONS,
    unsupported,
    write,
)
from whisperport.build.layouts.react_native_executorch.rules import READER, RULES

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint


def _profile(checkpoint: "Checkpoint") -> DecodingProfile:
    return DecodingProfile(
        padding="audio",
        timestamps=False,
        suppresses=False,
        suppresses_at_start=False,
        windows=False,
        max_tokens=POSITIONS - checkpoint.generation.n_start_tokens,
        piece_s=PIECE_S,
    )


LAYOUT = Layout(
    title="folder of model.pte, tokenizer.json and languages.json",
    precisions=("fp32", "w8"),
    apps=apps(
        App(
            name="react-native-executorch",
            packages=("torch>=2.13,<2.14", "executorch>=1.5,<1.6"),
            module="executorch",
            script=Path(__file__).with_name("client.py"),
            profile_of=_profile,
            drops=(
                "the app runs in phones only: here, its loop in Python calls ExecuTorch's runtime",
                f"audio is cut every {PIECE_S} s, also within a word",
                f"at most {POSITIONS} tokens of each piece, with the prompt",
                "no timestamps, no translation, no suppressed tokens, and no fallback for loops",
            ),
        ),
    ),
    write=write,
    reader=READER,
    rules=RULES,
    unsupported=unsupported,
)
