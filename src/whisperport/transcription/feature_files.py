"""Transcribe files of features: the encoder's output, as a device wrote it.

`check_plausible` finds features that cannot be the encoder's output as they are read, by the bundle's
reference.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np

from whisperport.build.export.bundle_cache import open_bundle
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.runtime import Floats
from whisperport.system.option import Option
from whisperport.system.progress import ProgressCallback
from whisperport.transcription.feature_session import check_options, checked_features
from whisperport.transcription.transcribe_options import TranscribeOptions
from whisperport.transcription.transcriber import Transcriber
from whisperport.transcription.transcript import Transcript
from whisperport.verification.diagnosis.stored_features import (
    FeatureStorage,
    read_features,
    storage_by_example,
)
from whisperport.verification.reference import Reference


@dataclass(frozen=True, slots=True, kw_only=True)
class FeatureOptions:
    """How files store features.

    Attributes:
        storage: dtype, quantization and order. Default: float32 or float16, (T, d).

    Raises:
        UsageError: both `like` and `storage` are set, or `clip` without `like`.
    """

    storage: FeatureStorage = field(default_factory=FeatureStorage)
    like: Annotated[
        str | os.PathLike[str] | None,
        Option(
            "Encoder output that the same device wrote for a reference clip of the bundle; its dtype, "
            "scale and layout are recognized, and used for --features",
            metavar="FILE",
            flag="--features-like",
        ),
    ] = None
    clip: Annotated[
        str,
        Option(
            "Name of the reference clip of --features-like",
            metavar="NAME",
            default="the first reference clip",
            flag="--features-clip",
        ),
    ] = ""

    def __post_init__(self) -> None:
        if self.like is not None and self.storage != FeatureStorage():
            raise UsageError(
                "`like` and `storage` cannot be used together",
                why="both say how the files store features",
                hint="set one of them",
            )
        if self.clip and self.like is None:
            raise UsageError(
                "`clip` requires `like`",
                why="it is the clip whose features the file `like` holds",
                hint="set `like` too",
            )


def transcribe_features(
    files: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    bundle: Bundle | str | os.PathLike[str] | None = None,
    options: TranscribeOptions | None = None,
    stored: FeatureOptions | None = None,
    *,
    progress: ProgressCallback = lambda _done, _of: None,
    recognized: Callable[[str], None] = lambda _: None,
) -> Transcript:
    """Transcribe the encoder's output that a device wrote, with the decoder of a bundle.

    The bundle's encoder is not loaded, unless `stored.like` has to be recognized.

    Args:
        files: a headerless or `.npy` file for each window, in order; each window follows the one before it.
        bundle: a bundle or the name of a model, as in `Transcriber`, of the checkpoint whose encoder the
            device ran.
        options: see `Transcriber.transcribe_features`.
        stored: how the files store features; None: as float32 or float16, (T, d).
        progress: called after every window with the seconds done and the total.
        recognized: called with a sentence for each thing that was recognized by `stored.like`.

    Raises:
        UsageError: a file cannot be read, has another size, or does not hold this encoder's output as it
            is read; or an option needs the audio.
        NumericalError: a file holds a NaN or an infinity.
        BundleError, MissingPackageError, IncompleteError: see `Transcriber`.
    """
    options, stored = options or TranscribeOptions(), stored or FeatureOptions()
    check_options(options)
    paths = [files] if isinstance(files, str | os.PathLike) else list(files)
    opened = open_bundle(bundle)
    storage = stored.storage
    if stored.like is not None:
        storage, sentences = storage_by_example(
            opened, Path(stored.like), stored.clip, run=options.run
        )
        for sentence in sentences:
            recognized(sentence)
    transcriber = Transcriber(opened, options.run, encoder=False)
    dims = transcriber.engine.dims
    shape = (dims.n_audio_ctx, dims.n_audio_state)
    windows = checked_features(
        transcriber.engine, [read_features(Path(path), shape, storage) for path in paths]
    )
    clips = Reference.from_arrays(opened.reference()).clips
    known = [clip.features for clip in clips if clip.features.shape == shape]
    for path, window in zip(paths, windows, strict=True):
        check_plausible(window, known, str(path))
    return transcriber.transcribe_features(windows, options, progress=progress)


# The encoder ends in a layer norm, so the standard deviation of all features hardly depends on the audio:
# measured with the embedded model, 0.1 to 0.6 % for speech, noise, silence and a tone.
LARGEST_RATIO = 2.0
# Correlation of the means of all channels with the reference's: 0.98 or more was measured for speech, noise
# and silence, 0.49 for a pure tone, at most 0.31 for features in another order.
SAME_CHANNELS, OTHER_CHANNELS = 0.8, 0.45


def check_plausible(features: Floats, reference: Sequence[Floats], source: str) -> None:
    """Raise an error if features have another scale than the reference's, or are stored in another order.

    Args:
        features: (T, d), finite.
        reference: features (T, d) of reference clips; none: nothing is checked.
        source: the file, for the error.

    Raises:
        UsageError: the features cannot be right as they are read.
    """
    if not reference:
        return
    deviation, usual = float(features.std()), float(np.mean([window.std() for window in reference]))
    if not usual / LARGEST_RATIO <= deviation <= usual * LARGEST_RATIO:
        raise _implausible(
            source,
            f"their standard deviation is {deviation:.4g}; that of this encoder's output is {usual:.4g} "
            "for any audio: the dtype, the scale or the zero point is wrong",
        )
    means = np.mean([window.mean(axis=0) for window in reference], axis=0)
    swapped = features.reshape(features.shape[::-1]).T
    if (
        _correlation(features.mean(axis=0), means) < OTHER_CHANNELS
        and _correlation(swapped.mean(axis=0), means) > SAME_CHANNELS
    ):
        raise _implausible(
            source,
            f"they are stored as {features.shape[::-1]}, channels by frames, and were read as "
            f"{features.shape}: give `--features-layout channels-frames`",
        )


def _correlation(x: Floats, y: Floats) -> float:
    x, y = x - x.mean(), y - y.mean()
    size = float(np.sqrt(np.square(x).sum() * np.square(y).sum()))
    return float((x * y).sum()) / size if size > 0 else 0.0


def _implausible(source: str, why: str) -> UsageError:
    return UsageError(
        f"the features in {source} are not as this bundle's encoder computes them",
        why=why,
        hint="`whisperport diagnose BUNDLE FILE` finds the cause with the device's output "
        "for a reference clip",
    )
