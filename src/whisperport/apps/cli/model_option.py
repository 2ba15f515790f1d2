"""The options that choose a bundle: `--bundle DIR`, or `--model NAME`, whose bundle is exported once."""

import sys
from pathlib import Path

import click

from whisperport.apps.cli.console import command_line, print_error, print_note, stages
from whisperport.apps.cli.evidence_words import mix_words
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.verb import option, together
from whisperport.apps.cli.watchdog import run_watched
from whisperport.build.export.bundle_cache import (
    VARIABLE,
    bundle_of,
    bundle_of_environment,
    cache_folder,
    cached_bundle,
    is_fastest,
)
from whisperport.errors import UsageError
from whisperport.program.bundle import Bundle
from whisperport.speech.data import embedded_model

WRONG_USAGE = 2  # as click's exit status

model_option = option(
    "--model",
    group="Model",
    type=Given("checkpoint", as_text=True),
    metavar="NAME",
    help="Model to transcribe with: a name such as tiny.en, a checkpoint's folder or file, a hub id, or "
    "default, the small model that comes with whisperport. It is exported once for the CPU and kept in the "
    "user's cache; `export NAME --target auto` replaces it with the fastest verified bundle",
)
model_options = together(
    option(
        "--bundle",
        "-b",
        group="Model",
        type=Given("bundle"),
        metavar="DIR",
        show_default=f"${VARIABLE}; without it, --bundle or --model is required",
        help="Bundle to transcribe with: a folder that `whisperport export` or `import` wrote",
    ),
    model_option,
)


def chosen_bundle(bundle: Path | None, model: str | None) -> Bundle | Path:
    """Return the bundle of `--bundle`, `--model` or the environment. A model is exported if it must be.

    If none is given, the error is printed and the exit status is 2.

    Raises:
        click.UsageError: both options are given.
        WhisperportError: see `bundle_of`.
    """
    if bundle is not None and model is not None:
        raise click.UsageError("--bundle and --model exclude each other")
    if model is not None:
        return bundle_of_model(model)
    if bundle is not None:
        return bundle
    try:
        return bundle_of_environment()
    except UsageError as error:
        print_error(error)
        sys.exit(WRONG_USAGE)


def bundle_of_model(model: str) -> Bundle:
    """Return the bundle of a model from the cache; export it in a child process if it is not there.

    Raises:
        WhisperportError: see `bundle_of`.
    """
    if embedded_model.is_meant(model):
        print_note(f"note: {embedded_model.UNDERSTANDS}")
    bundle = cached_bundle(model)
    if bundle is None:
        folder = cache_folder()
        print_note(f"exporting {model}, once; its bundle is kept in {folder}")
        faster = command_line("export", model, "--target", "auto")
        print_note(f"`{faster}` finds a faster one for this machine")
        with stages():
            bundle = run_watched(bundle_of, model, out=folder / "export")
    assert isinstance(bundle, Bundle)
    if is_fastest(bundle):
        print_note(f"{model}: {mix_words(bundle.manifest)}")
    return bundle


def model_arguments(bundle: Path | None, model: str | None) -> list[str]:
    """Return the command-line arguments that repeat the given `--bundle` or `--model`."""
    if model is not None:
        return ["--model", model]
    return [] if bundle is None else ["--bundle", str(bundle)]
