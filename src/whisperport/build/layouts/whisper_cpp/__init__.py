"""The ggml file, which whisper.cpp loads."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from whisperport.build.layouts.layout import App, DecodingProfile, Layout, apps
from whisperport.build.layouts.whisper_cpp.file import unsupported, write
from whisperport.build.layouts.whisper_cpp.rules import (
    DISTILLED_LAYERS,
    READER,
    RULES,
    is_taken_for_distilled,
)

if TYPE_CHECKING:  # it needs torch
    from torch import Tensor

    from whisperport.model.checkpoint.checkpoint import Checkpoint


def _is_taken_for_distilled(checkpoint: "Checkpoint") -> bool:
    return is_taken_for_distilled(checkpoint.dims.n_text_layer, checkpoint.dims.n_vocab)


def _profile(checkpoint: "Checkpoint") -> DecodingProfile:
    timestamps = not _is_taken_for_distilled(checkpoint)
    limit = checkpoint.dims.n_text_ctx // 2 - 4
    return DecodingProfile(
        padding="audio", timestamps=timestamps, suppresses=False, max_tokens=limit
    )


def _warnings(checkpoint: "Checkpoint") -> Iterator[str]:
    if _is_taken_for_distilled(checkpoint):
        yield (
            f"whisper.cpp takes a model of {DISTILLED_LAYERS} decoder layers for one of the first "
            "distilled models, and never asks it for timestamps: each window is one segment"
        )


def _weights(path: Path) -> "Mapping[str, Tensor]":
    from whisperport.model.checkpoint.ggml import read_weights

    return read_weights(path)


LAYOUT = Layout(
    title="file of ggml",
    precisions=("fp16", "w8"),
    suffix=".bin",
    apps=apps(
        App(
            name="whisper.cpp",
            packages=("pywhispercpp>=1.5",),
            module="pywhispercpp",
            script=Path(__file__).with_name("client.py"),
            profile_of=_profile,
            compared="text and timestamps",
            drops=(
                "ids of special tokens follow from the size of the vocabulary",
                "suppressed tokens and alignment heads are not in the file",
                "it returns text and timestamps, no ids",
            ),
        ),
    ),
    write=write,
    weights=_weights,
    reader=READER,
    rules=RULES,
    unsupported=unsupported,
    warnings=_warnings,
)
