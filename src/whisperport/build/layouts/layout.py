"""What a layout is: the files that another app loads, how the app decodes, and how it is run here."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from whisperport.build.layouts.reading import Reader
from whisperport.build.layouts.rules import LayoutRule

if TYPE_CHECKING:  # it needs torch
    from torch import Tensor

    from whisperport.model.checkpoint.checkpoint import Checkpoint

Floats = NDArray[np.float32]
ALIGNED = "aligned"  # key of the cross-attention of the alignment heads
ATTENTION = "encoder.attention"  # end of a key of what `Layout.logits` adds
Padding = Literal["mel", "audio"]
Compared = Literal["tokens", "text and timestamps", "words"]
"""What a verification in an app compares: as much as the app returns, and as its own features allow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingProfile:
    """How an app decodes. Tokens are compared with those that the checkpoint emits under it.

    Attributes:
        padding: what fills the window after the audio: zeros in the normalized log-mel spectrogram, as in
            openai-whisper's `transcribe`, or silent audio, whose normalized spectrogram is not zero. This
            alone changes the tokens of most clips of a small model.
        prompts: whether there is a prompt; if not, a text begins with the start token alone, and the model
            chooses language, task and timestamps: these are compared, too, and nothing is suppressed.
        timestamps: whether the prompt asks for timestamps.
        suppresses: whether the ids in `Generation.suppressed` are never emitted.
        suppresses_at_start: whether those in `Generation.suppressed_at_start` are not emitted first.
        windows: whether audio after the first window's last timestamp is decoded as well.
        max_tokens: of a window, without the prompt; None: half of the decoder's positions, as in
            openai-whisper.
        tokens_per_s: at most this many per second of the clip; None: no limit.
        counts_prompt: whether the tokens of the prompt count among these.
        piece_s: seconds of audio that are decoded at a time, wherever they end; None: the first window, or
            windows that follow one another as `windows` says.
        words: whether word timestamps are compared; `App.drops` says why those of some apps are not.
    """

    padding: Padding
    prompts: bool = True
    timestamps: bool = True
    suppresses: bool = True
    suppresses_at_start: bool = True
    windows: bool = True
    max_tokens: int | None = None
    tokens_per_s: float | None = None
    counts_prompt: bool = False
    piece_s: float | None = None
    words: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Compilation:
    """What a layout wrote, to be compiled for a chip.

    Attributes:
        app: with one device, the chip.
        checkpoint: whose graphs these are.
        precision: in which the chip computes.
        language: of the calibration audio, as a code.
        folder: of the graphs.
        calibration: an audio file, or a folder of them, if the precision has 8 bits; None: those that come
            with whisperport.
    """

    app: "App"
    checkpoint: "Checkpoint"
    precision: str
    language: str
    folder: Path
    calibration: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """An app that loads a layout, and the client by which it is run here.

    Attributes:
        name: as the user names it.
        packages: what its client needs, as pip or npm takes it.
        module: what its client imports first; a Python package of this name is the client, too. Empty: it
            runs on a device only, and has no client.
        installer: the program that installs them.
        script: file in the layout's folder; `run_client.py` says what it defines.
        devices: on which it is run, one after the other; one empty name: it has no others.
        compile: compiles what the layout wrote, for one of `devices`, the chips. None: the app loads the
            files as they are.
        profile_of: returns how the app decodes a checkpoint.
        compared: what a verification compares.
        drops: what the app does not take from the checkpoint, or limits: one sentence each.
    """

    name: str
    packages: tuple[str, ...]
    module: str
    installer: Literal["pip", "npm"] = "pip"
    script: Path
    devices: tuple[str, ...] = ("",)
    compile: Callable[[Compilation], None] | None = None
    profile_of: "Callable[[Checkpoint], DecodingProfile]"
    compared: Compared = "tokens"
    drops: tuple[str, ...] = ()

    def on(self, device: str) -> "App":
        """Return the app with one device only; empty: with all."""
        return replace(self, devices=(device,)) if device else self


@dataclass(frozen=True, slots=True, kw_only=True)
class Extent:
    """What graphs of fixed sizes take; 0 in each: any, or as Whisper has it.

    Attributes:
        n_frames: of the spectrogram.
        first_position: row of the encoder's table of positions that the first frames get.
        n_tokens: of a text with its prompt.
    """

    n_frames: int = 0
    first_position: int = 0
    n_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The files of one or several apps: what they are, who writes them, and what loads them.

    Attributes:
        title: what is written, for lists.
        precisions: of the weights, the default first.
        suffix: of the only file, such as ".bin"; empty: the layout is a folder.
        apps: app's name -> the app.
        write: writes a checkpoint in a precision to a folder, or to a file.
        unsupported: returns why a checkpoint cannot be written in a precision; empty if it can.
        logits: runs the written graphs here: takes the folder, the precision, a spectrogram (n_mels, 2T),
            S tokens, how many of them the first run decodes, and a dict; returns the logits (S, V) after
            each token, and adds the keys and values that the first run returns, such as "0.decoder.key"
            or, of the audio, "0.encoder.value": (H, n, D) or (n, d); and, if it returns that, the
            cross-attention of a layer for all S tokens, "0." and `ATTENTION`: (H, S, T); or
            that of the alignment heads only, under `ALIGNED`. None: the files hold no graphs.
        emitted: decodes with the graphs here, of files whose app does not run here: takes the path,
            spectrograms, the prompt, the token that ends a text and the most tokens of one; returns the
            tokens of each. None: the apps decode.
        extent: what the graphs take.
        target: that of `whisperport export` which writes programs for the same devices; empty: `convert`
            writes the files.
        weights: reads the weights of files without graphs, under openai-whisper's names; None: they hold
            graphs.
        reader: recognizes such files, whoever wrote them, and reads their arrays.
        rules: what the apps demand of the files.
        warnings: yields what the apps will do with this checkpoint that its user would not expect.
    """

    title: str
    precisions: tuple[str, ...]
    suffix: str = ""
    apps: Mapping[str, App]
    write: "Callable[[Checkpoint, str, Path], None]"
    reader: Reader
    rules: tuple[LayoutRule, ...] = ()
    unsupported: "Callable[[Checkpoint, str], str]" = lambda _checkpoint, _precision: ""
    logits: "Callable[[Path, str, Floats, Sequence[int], int, dict[str, Floats]], Floats] | None" = None
    emitted: "Callable[[Path, Sequence[Floats], Sequence[int], int, int], list[list[int]]] | None" = None
    extent: Extent = Extent()
    target: str = ""
    weights: "Callable[[Path], Mapping[str, Tensor]] | None" = None
    warnings: "Callable[[Checkpoint], Iterator[str]]" = lambda _checkpoint: iter(())


def apps(*entries: App) -> Mapping[str, App]:
    """Return apps by their names."""
    return {app.name: app for app in entries}
