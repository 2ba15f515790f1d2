"""The options of `whisperport transcribe` for features: the encoder's output that a device wrote."""

from pathlib import Path
from typing import Any

import click

from whisperport.cli.verb import option, together
from whisperport.diagnosis.stored_features import DTYPES, FeatureStorage
from whisperport.transcription import FeatureOptions

FEATURES = "Features (encoder output of a device)"

feature_options = together(
    option(
        "--features",
        "feature_files",
        group=FEATURES,
        type=click.Path(path_type=Path, dir_okay=False),
        multiple=True,
        metavar="FILE",
        help="Transcribe the encoder's output in FILE, headerless or .npy, in place of AUDIO. FILE "
        "holds one window; repeat the option for the next windows, in order",
    ),
    option(
        "--features-like",
        "like",
        group=FEATURES,
        type=click.Path(path_type=Path, dir_okay=False),
        metavar="FILE",
        help="Encoder output that the same device wrote for a reference clip of the bundle; its dtype, "
        "scale and layout are recognized, and used for --features",
    ),
    option(
        "--features-clip",
        "clip",
        group=FEATURES,
        default="",
        metavar="NAME",
        show_default="the first reference clip",
        help="Name of the reference clip of --features-like",
    ),
    option(
        "--features-dtype",
        "dtype",
        group=FEATURES,
        type=click.Choice(DTYPES),
        show_default="that of an .npy file; else float32 or float16, by the file's size",
        help="Type of the numbers in each --features file",
    ),
    option(
        "--features-scale",
        "scale",
        group=FEATURES,
        type=float,
        metavar="NUMBER",
        show_default="1; integers require it",
        help="Scale of the stored numbers: a feature is (stored - zero point) * scale",
    ),
    option(
        "--features-zero-point",
        "zero_point",
        group=FEATURES,
        type=float,
        default=0.0,
        show_default="0",
        metavar="NUMBER",
        help="Stored number that stands for a feature of 0. Requires --features-scale",
    ),
    option(
        "--features-layout",
        "order",
        group=FEATURES,
        type=click.Choice(["frames-channels", "channels-frames"]),
        default="frames-channels",
        show_default=True,
        help="Order of the axes in each --features file; an .npy file states its own",
    ),
)
STATED = ("like", "clip", "dtype", "scale", "zero_point", "order")


def chosen_features(chosen: dict[str, Any]) -> FeatureOptions:
    """Take the options about features out of the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them; those about features are removed.

    Raises:
        UsageError: values contradict each other.
    """
    like, clip, dtype, scale, zero_point, order = (chosen.pop(name) for name in STATED)
    storage = FeatureStorage(dtype=dtype, scale=scale, zero_point=zero_point, order=order)
    return FeatureOptions(storage=storage, like=like, clip=clip)


def check_features(
    files: tuple[Path, ...], stored: FeatureOptions, audio: str | None, *, live: bool, vad: bool
) -> None:
    """Check that features and audio are not both given.

    Raises:
        click.UsageError: two options exclude each other, or an option about features has no --features.
    """
    if not files:
        if stored != FeatureOptions():
            raise click.UsageError(
                "an option --features-... requires --features with the file to transcribe"
            )
        return
    for given, name in ((audio is not None, "AUDIO"), (live, "--live"), (vad, "--vad")):
        if given:
            raise click.UsageError(
                f"--features and {name} exclude each other: the features are all that is transcribed"
            )
