"""Simulate the static 8-bit encoder of a bundle's checkpoint, where torch and the checkpoint are here."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from whisperport.errors import WhisperportError
from whisperport.program.bundle import Bundle
from whisperport.speech.data import embedded_model

if TYPE_CHECKING:
    from whisperport.model.network.static_int8 import StaticInt8Encoder

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedEncoder:
    """The static 8-bit encoder of a checkpoint, in several recipes."""

    encoder: "StaticInt8Encoder"

    def features(self, mel: Floats, recipes: Sequence[str]) -> dict[str, Floats]:
        """Return recipe -> features (T, d) of mel (n_mels, 2T); with all recipes if none is named."""
        import torch

        from whisperport.model.network.static_int8 import RECIPES

        batch = torch.from_numpy(np.ascontiguousarray(mel, np.float32))[None]
        names = recipes or tuple(RECIPES)
        return {name: self.encoder.encode(batch, name)[0].numpy() for name in names}

    def sensitive(self) -> str:
        """Return which tensor 8 bits suit least, in one sentence."""
        if (widest := self.encoder.widest) is None:
            return ""
        return (
            f"8 bits suit the output of `{widest.module}` least: its largest value, in channel "
            f"{widest.channel}, is {widest.ratio:,.0f} times the median."
        )


def simulated_encoder(bundle: Bundle, mels: Sequence[Floats]) -> SimulatedEncoder | None:
    """Return the simulation; None without torch, or if the bundle's checkpoint is not on this machine.

    Args:
        bundle: the bundle. Its checkpoint is looked for under the name that `export` was given, and must
            have the same files.
        mels: calibration inputs, (n_mels, 2T) each.
    """
    try:
        import torch

        from whisperport.model.checkpoint import load_checkpoint
        from whisperport.model.network.static_int8 import StaticInt8Encoder
        from whisperport.model.network.whisper import build_model
    except ImportError:
        return None
    source = _local(str(bundle.manifest.source.get("name", "")))
    if source is None:
        return None
    try:
        checkpoint = load_checkpoint(source)
    except WhisperportError:
        return None
    if dict(checkpoint.source.sha256) != bundle.manifest.source.get("sha256"):
        return None
    model = build_model(checkpoint, bundle.manifest.window)
    inputs = [torch.from_numpy(mel)[None] for mel in mels]
    return SimulatedEncoder(StaticInt8Encoder(model.encoder, inputs))


def _local(name: str) -> str | Path | None:
    """Return what names the checkpoint without a download; None: nothing does."""
    from whisperport.model.checkpoint.by_name import openai_cache
    from whisperport.model.checkpoint.hub import cached
    from whisperport.model.checkpoint.names import HUB_IDS

    if name == embedded_model.NAME or (name and Path(name).expanduser().exists()):
        return name
    if (file := openai_cache() / f"{name}.pt").is_file():
        return file
    return cached(HUB_IDS.get(name, name)) if name else None
