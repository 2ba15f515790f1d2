"""The .pte file and the tokenizer that ExecuTorch's own runner of speech models loads."""

from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.executorch_runner.folder import MOST_TOKENS, unsupported, write
from whisperport.build.layouts.executorch_runner.rules import READER, RULES
from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint


def _profile(_checkpoint: "Checkpoint") -> DecodingProfile:
    return DecodingProfile(
        padding="audio",
        prompts=False,
        suppresses=False,
        suppresses_at_start=False,
        windows=False,
        max_tokens=MOST_TOKENS,
    )


LAYOUT = Layout(
    title="folder of model.pte and the tokenizer's files",
    precisions=("fp32", "w8"),
    apps=apps(
        App(
            name="executorch-runner",
            packages=("torch>=2.13,<2.14", "executorch>=1.5,<1.6"),
            module="executorch",
            script=Path(__file__).with_name("client.py"),
            profile_of=_profile,
            drops=(
                "the app is written in C++: here, its loop in Python calls ExecuTorch's runtime",
                "one window: longer audio is rejected",
                "the model itself chooses language, task and timestamps",
                f"at most {MOST_TOKENS} tokens unless the app asks for more",
                "no suppressed tokens, and no fallback for loops",
            ),
        ),
    ),
    write=write,
    reader=READER,
    rules=RULES,
    unsupported=unsupported,
)
