"""The options of `whisperport transcribe` for features: the encoder's output that a device wrote."""

from pathlib import Path
from typing import Any

import click

from whisperport.cli.fields import field_options, field_values
from whisperport.cli.verb import option, together
from whisperport.diagnosis.stored_features import FeatureStorage
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
    field_options(FeatureOptions, group=FEATURES),
    field_options(FeatureStorage, group=FEATURES),
)


def chosen_features(chosen: dict[str, Any]) -> FeatureOptions:
    """The options about features, among the chosen values.

    Args:
        chosen: values by parameter name, as click parsed them.

    Raises:
        UsageError: values contradict each other.
    """
    storage = FeatureStorage(**field_values(FeatureStorage, chosen))
    return FeatureOptions(storage=storage, **field_values(FeatureOptions, chosen))


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
