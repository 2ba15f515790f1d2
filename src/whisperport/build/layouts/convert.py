"""Write a checkpoint as the files of another app, and verify them there before they are at their place."""

import os
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from whisperport.build.layouts import app_with_chip, layout_of
from whisperport.build.layouts.arrays import is_half_precision
from whisperport.build.layouts.client import ClientRun, is_installed
from whisperport.build.layouts.huggingface_files import with_heads
from whisperport.build.layouts.layout import App, Compilation, Layout
from whisperport.build.layouts.parts import parts_of
from whisperport.build.layouts.record import (
    LayoutRecord,
    file_of,
    hashes,
    read_record,
    record_path,
    write_record,
)
from whisperport.build.layouts.reference import known_logits, reference_of
from whisperport.build.layouts.verifying import (
    ClipSet,
    compare_without_app,
    doubt_of,
    run_and_compare,
)
from whisperport.build.layouts.writing import check_out, draft_record, writing
from whisperport.errors import (
    BundleError,
    LoweringError,
    MissingPackageError,
    UsageError,
    VerificationError,
    needs,
)
from whisperport.program.bundle.folder import file_sha256
from whisperport.program.json_records import to_json
from whisperport.program.program_kind import STEP
from whisperport.speech.text import language_code
from whisperport.system.option import Option
from whisperport.system.process import return_freed_memory
from whisperport.system.progress import begin_stage
from whisperport.targets import get_target
from whisperport.verification.recording.audio_files import audio_files

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

CALIBRATED = ("w8a8", "w8a16")  # the precisions of apps with ranges of activations


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertOptions:
    """What is written, and with which audio it is verified; each option has its help text beside it.

    Args:
        chip: for which the files are compiled, such as "sm8650"; apps that need one say so. Default: empty.
            Verified files of the same checkpoint, chip, precision and audio are kept.
    """

    precision: Annotated[
        str | None,
        Option(
            "Precision of the weights, such as fp32, fp16 or w8; of files for an NPU, the precision in "
            "which it computes, such as fp16 or w8a16. `whisperport apps` lists those of each app",
            metavar="NAME",
            default="the first one that `whisperport apps` lists for the app; for an NPU, the first one "
            "that it supports",
        ),
    ] = None
    calibration: Annotated[
        Path | None,
        Option(
            "With --precision w8a8 or w8a16: folder of audio files that resemble what the device will "
            "record. Quantization ranges are derived from them",
            metavar="DIR",
            exists=True,
            default="the audio files that come with whisperport",
        ),
    ] = None
    chip: str = ""
    verify_with: Annotated[
        Path | None,
        Option(
            "Verify with the audio files in this folder: the first 30 s of each. A file NAME.txt beside "
            "NAME.wav is its transcript",
            metavar="DIR",
            default="six clips that come with whisperport",
        ),
    ] = None
    language: Annotated[
        str | None,
        Option(
            "Language spoken in the audio files of --verify-with, as a code or a name",
            metavar="LANG",
            default="en, or a language of the checkpoint if it knows no English",
        ),
    ] = None
    allow_unverified: Annotated[
        bool,
        Option(
            "Write the files even if the app is not installed, or returned something else than the "
            "checkpoint emits. They stay marked as unverified"
        ),
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """The files of an app, written and verified.

    Attributes:
        path: their folder, or the only file.
        record: what is known of them.
        run: what the app returned; None: it did not run.
        warnings: what the app does with this checkpoint that its user may not expect.
    """

    path: Path
    record: LayoutRecord
    run: ClientRun | None
    warnings: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether the app returned what the checkpoint emits."""
        return self.record.is_verified

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "path": os.fspath(self.path),
            "warnings": list(self.warnings),
            **self.record.to_json(),
        }


def convert(
    checkpoint: "Checkpoint | str | os.PathLike[str]",
    app: str,
    out: str | os.PathLike[str],
    options: ConvertOptions | None = None,
) -> Converted:
    """Write a checkpoint as the files that another app loads, and verify them in that app.

    Args:
        checkpoint: a checkpoint, or what `load_checkpoint` accepts.
        app: name of the app, as `whisperport apps` lists it; with a chip, also the beginning of a name,
            before a hyphen: the app is the one that has this chip.
        out: folder or file to write; an older one that `convert` wrote is replaced.
        options: what is written. Default: None, all defaults.

    Raises:
        UsageError: there is no such app or precision, or the output would replace something else.
        LoweringError: the app cannot run this checkpoint.
        MissingPackageError: the app is not installed; nothing was read or written.
        VerificationError: the app returned something else; nothing was written.
        CheckpointError, TokenizerError, AudioError, BundleError: the checkpoint or the audio cannot be
            read, or the output cannot be written.
    """
    options = options or ConvertOptions()
    layout, chosen, precision = choose(app, options)
    app, out = chosen.name, Path(out)
    if not options.allow_unverified and not is_installed(chosen):
        raise MissingPackageError(
            f"{app} is not installed, so the files cannot be verified in it",
            why=f"its client needs {', '.join(chosen.packages)}",
            hint=f"whisperport apps --install {app}\nor write the files with --allow-unverified",
        )
    check_out(layout, chosen, out, (checkpoint, options.verify_with))
    with writing(layout, out) as draft:
        begin_stage("reading the checkpoint")
        opened = read_checkpoint(checkpoint)
        if why := layout.unsupported(opened, precision):
            raise LoweringError(
                f"{app} cannot run this checkpoint in {precision}",
                why=why,
                hint="`whisperport apps` lists other apps and precisions",
            )
        language = spoken_language(opened, options.language)
        source = to_json(opened.source)
        clips = ClipSet.of(options.verify_with, language, opened.dims.window_s)
        made_of = _digests(opened, options.calibration)
        if options.chip and (
            kept := _kept(out, chosen, (precision, language, source, clips.digests, made_of))
        ):
            return Converted(path=out, record=kept, run=None, warnings=opened.warnings)
        opened = with_heads(opened)
        return_freed_memory()  # of the model in torch
        warnings = (*opened.warnings, *layout.warnings(opened))
        begin_stage(f"writing the files of {app}")
        layout.write(opened, precision, draft)
        if chosen.compile is not None:
            chosen.compile(
                Compilation(
                    app=chosen,
                    checkpoint=opened,
                    precision=precision,
                    language=language,
                    folder=draft,
                    calibration=options.calibration,
                )
            )
        files = hashes(draft)
        profile = chosen.profile_of(opened)
        expected = reference_of(opened, profile, clips.clips) if is_installed(chosen) else []
        record = LayoutRecord(
            app=app,
            chip=options.chip,
            precision=precision,
            exact=precision == "fp32" or (precision == "fp16" and is_half_precision(opened)),
            language=language,
            window_s=opened.dims.window_s,
            source=source,
            made_of=made_of,
            files=files,
            parts={name: p for name in files if (p := parts_of(file_of(draft, name)))},
            clips=clips.known(expected),
            logits=known_logits(opened, profile, clips.clips, expected) if layout.logits else None,
        )
        compared = (
            opened if layout.weights else None
        )  # graphs are run without its weights in memory
        del opened
        return_freed_memory()
        record = compare_without_app(layout, draft, record, clips.clips, compared)
        run = None
        if is_installed(chosen) and (options.allow_unverified or not record.failures()):
            run, verification = run_and_compare(chosen, draft, record, clips.clips, expected)
            record = replace(record, verification=verification)
        if record.failures() and not options.allow_unverified:
            raise _not_verified(chosen, out, record)
        write_record(draft_record(layout, draft), record)
    warnings = (*warnings, *filter(None, (doubt_of(record),)))
    return Converted(path=out, record=record, run=run, warnings=warnings)


def choose(app: str, options: ConvertOptions) -> tuple[Layout, App, str]:
    """Return the layout, the app with its chip, and the precision that options name.

    Raises:
        UsageError: there is no such app, chip or precision.
    """
    name = app_with_chip(app, options.chip)
    layout = layout_of(name)
    chosen = _with_chip(layout.apps[name], options.chip)
    return layout, chosen, _precision(layout, chosen, options)


def _with_chip(app: App, chip: str) -> App:
    """Return the app with the chip for which its files are compiled.

    Raises:
        UsageError: there is no such chip, or it is not named; or the files are not compiled.
    """
    chips = app.devices if app.compile is not None else ()
    if not (chip or chips):
        return app
    if chip not in chips:
        listed = f"`--chips` takes {', '.join(chips)}" if chips else "omit `--chips`"
        raise UsageError(
            f"{app.name} has no chip `{chip[:40]}`" if chip else f"{app.name} needs a chip",
            why="its files are compiled for one" if chips else "its files are not compiled",
            hint=listed,
        )
    return app.on(chip)


def _kept(out: Path, app: App, expected: tuple[object, ...]) -> LayoutRecord | None:
    """Return the record of files that are there and verified; None: none are, or others are expected."""
    try:
        record = read_record(record_path(out))
    except BundleError:
        return None
    digests = tuple(clip.sha256 for clip in record.clips)
    known = record.precision, record.language, record.source, digests, record.made_of
    is_same = (record.app, (record.chip,)) == (app.name, app.devices) and known == expected
    return record if is_same and record.is_verified and not record.difference(out) else None


def _digests(checkpoint: "Checkpoint", calibration: Path | None) -> tuple[str, ...]:
    """Return `LayoutRecord.made_of`."""
    files = [] if calibration is None else audio_files(calibration)
    return (sha256(checkpoint.tokenizer_json).hexdigest(), *map(file_sha256, files))


def _precision(layout: Layout, app: App, options: ConvertOptions) -> str:
    """Return the precision that is named, or the first one that the chip has.

    Raises:
        UsageError: the app, or the chip, has no such precision; or calibration audio is not used in it.
    """
    rejected = {
        precision: get_target(options.chip).unsupported(STEP, precision) if options.chip else None
        for precision in layout.precisions
    }
    usable = [precision for precision, why in rejected.items() if why is None]
    precision = options.precision or usable[0]
    if unsupported := rejected.get(precision):
        raise UsageError(
            f"{app.name} has no {precision} on {options.chip}",
            why=unsupported.why,
            hint=f"choose one of {', '.join(usable)}",
        )
    if precision not in layout.precisions:
        raise UsageError(
            f"{app.name} has no precision `{precision[:40]}`",
            hint=f"choose one of {', '.join(layout.precisions)}",
        )
    if options.calibration is not None and precision not in CALIBRATED:
        calibrated = " and ".join(CALIBRATED)
        raise UsageError(
            "`--calibration` cannot be used here",
            why=f"files in {precision} have no quantization ranges; those in {calibrated} have",
            hint="omit `--calibration`",
        )
    return precision


def read_checkpoint(checkpoint: "Checkpoint | str | os.PathLike[str]") -> "Checkpoint":
    """Return a checkpoint, read if it is named."""
    with needs("cannot read a checkpoint: torch is not installed", extra="export"):
        from whisperport.model.checkpoint import load_checkpoint
    if isinstance(checkpoint, str | os.PathLike):
        return load_checkpoint(os.fspath(checkpoint))
    return checkpoint


def spoken_language(checkpoint: "Checkpoint", language: str | None) -> str:
    """Return the code of a language that is named; None: English, or one that the checkpoint knows."""
    generation = checkpoint.generation
    if language is None:
        return generation.any_language
    return language_code(language, generation.languages)


def _not_verified(app: App, out: Path, record: LayoutRecord) -> VerificationError:
    failures = record.failures()
    what = f"{app.name} does not return what the checkpoint emits"
    why = f"{len(failures)} of {len(record.checks)} comparisons failed; {failures[0]}"
    if record.verification is None:
        what = f"the files that were written for {app.name} are not those of the checkpoint"
    elif record.without_app:
        why += f". {app.name} decodes differently: {record.without_app[0].program} are the checkpoint's"
    return VerificationError(
        f"{what}, so {out} was not written",
        why=why,
        hint="--allow-unverified writes it anyway, marked as unverified",
    )
