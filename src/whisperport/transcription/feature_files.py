"""Transcribe files of features: the encoder's output, as a device wrote it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

from whisperport.bundle import Bundle
from whisperport.diagnosis.stored_features import FeatureStorage, read_features, storage_by_example
from whisperport.errors import UsageError
from whisperport.exporting.model_bundle import open_bundle
from whisperport.system.option import Option
from whisperport.system.progress import Progress, ProgressCallback
from whisperport.transcription.feature_session import check_options, checked_features
from whisperport.transcription.options import TranscribeOptions
from whisperport.transcription.plausible_features import check_plausible
from whisperport.transcription.transcriber import Transcriber
from whisperport.transcription.transcript import Transcript
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
    stages: Progress = lambda _: None,
    recognized: Progress = lambda _: None,
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
        stages: called with a line for each stage before.
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
            opened, Path(stored.like), stored.clip, run=options.run, progress=stages
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
