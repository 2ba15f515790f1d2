"""Verify a bundle: run it on its reference clips, and compare the results with the reference."""

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from whisperport.errors import NumericalError, UsageError
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.writing import check_rewritable
from whisperport.program.checks import Check, Level
from whisperport.program.low_rank import LowRank
from whisperport.program.window import ShortWindows
from whisperport.runtime import Decoded, DecodeOptions, Decoder, decode_window, load_engine
from whisperport.speech.text import Tokenizer
from whisperport.system.progress import Counted, begin_stage
from whisperport.targets import RUNTIMES, RunOptions
from whisperport.verification.adapter_check import adapter_checks
from whisperport.verification.array_checks import clip_checks
from whisperport.verification.batch_check import batch_checks
from whisperport.verification.error_rate import unit_of
from whisperport.verification.evidence import record_evidence
from whisperport.verification.machine import machine, versions
from whisperport.verification.precision import coarsest, precisions
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel
from whisperport.verification.report import ClipText, Report
from whisperport.verification.short_windows import check_short_windows
from whisperport.verification.tokens import compare_tokens, reported
from whisperport.verification.word_check import (
    MAX_CHANGE,
    Transcribed,
    no_evidence,
    undecided,
    word_check,
)

PACKAGES = ("whisperport", "numpy", *RUNTIMES, "torch")


def verify(
    bundle: Bundle | str | os.PathLike[str],
    *,
    run: RunOptions | None = None,
    clips: Sequence[str] = (),
    record: bool = False,
) -> Report:
    """Run a bundle on its reference clips, and compare arrays, tokens, words and isolation.

    This needs the runtimes of the bundle's targets. It needs torch only if one of them does.

    Args:
        bundle: the bundle or its folder.
        run: threads and target options; None: the defaults.
        clips: names of the reference's clips to run; empty: all. A simulator may need minutes per clip.
        record: add the result to the evidence in the bundle's manifest, failures too. The most recent run
            of a program decides whether it counts as verified. Default: False.

    Raises:
        BundleError: the bundle is damaged; or with `record`, another process writes it or it is not
            writable.
        UsageError: the reference has no clip of such a name.
        MissingPackageError: a target's runtime is not installed.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    if record:
        check_rewritable(opened)
    report = _verified(opened, run, clips)
    if record:
        begin_stage("writing the manifest")
        record_evidence(opened, report, run)
    return report


def _verified(opened: Bundle, run: RunOptions | None, clips: Sequence[str]) -> Report:
    """Run a bundle on its reference clips and compare; see `verify`."""
    started = time.perf_counter()
    reference = _with_clips(Reference.from_arrays(opened.reference()), clips)
    checks, last, texts, short_windows = _session_checks(opened, reference, run)
    if last:
        begin_stage("checking isolation: the last clip in a new session")
        checks.append(_isolation_check(opened, reference, last, run))
    return Report(
        subject=_subject(opened, run),
        checks=tuple(checks),
        machine=machine(),
        versions=versions(PACKAGES),
        seconds=round(time.perf_counter() - started, 3),
        short_windows=short_windows,
        texts=tuple(
            ClipText(
                clip=transcribed.clip.name,
                text=transcribed.text,
                expected=transcribed.expected,
                correct=transcribed.clip.text,
                unit=transcribed.unit,
            )
            for transcribed in texts
        ),
    )


def _with_clips(reference: Reference, names: Sequence[str]) -> Reference:
    """Return the reference with the named clips only; with all clips if no name is given.

    Raises:
        UsageError: there is no clip of such a name, or none of the clips has arrays to compare.
    """
    if not names:
        return reference
    known = [clip.name for clip in reference.clips]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(
            f"the bundle's reference has no clip `{unknown[0][:80]}`",
            hint=f"its clips are {', '.join(known)}",
        )
    kept = tuple(clip for clip in reference.clips if clip.name in names)
    if not any(clip.features.size for clip in kept):
        with_arrays = [clip.name for clip in reference.clips if clip.features.size]
        raise UsageError(
            f"the reference has no arrays of {', '.join(names)[:80]}",
            why="of most clips only tokens and words are stored, and a verification compares arrays too",
            hint=f"clips with arrays are {', '.join(with_arrays)}",
        )
    return replace(reference, clips=kept)


def _subject(bundle: Bundle, run: RunOptions | None) -> str:
    """Return the bundle's name and the run options."""
    options = run.options if run else {}
    return ", ".join(
        [bundle.manifest.name, *(f"{name}={value}" for name, value in options.items())]
    )


def _not_finite(level: Level, what: str, error: NumericalError) -> Check:
    """Return a failed check for a program that returned a NaN or an infinity."""
    return Check(
        level=level,
        program=error.program,
        what=what,
        value={},
        rule="every value is a finite number",
        passed=False,
        reason=f"{error.what}: {error.why}",
    )


class _Session:
    """A loaded bundle. Its encoder runs once per clip."""

    def __init__(self, bundle: Bundle, run: RunOptions | None) -> None:
        run = run or RunOptions()
        if run.short_windows is None:  # they are measured, too
            run = replace(run, short_windows=True)
        self.decoder = Decoder(load_engine(bundle, run))
        self._features: dict[int, np.ndarray] = {}  # identity of a clip -> its features

    def features(self, clip: ReferenceClip) -> np.ndarray:
        """Return the features (T, d) of a reference clip."""
        if id(clip) not in self._features:
            engine = self.decoder.engine
            self._features[id(clip)] = engine.encode(reference_mel(engine.dims, clip))
        return self._features[id(clip)]


def _session_checks(
    bundle: Bundle, reference: Reference, run: RunOptions | None
) -> tuple[list[Check], Decoded | None, list[Transcribed], ShortWindows | None]:
    """Compare arrays, tokens and words in one session.

    The programs are freed at the end: those of two sessions would need twice the memory.

    Returns:
        The checks, the result of the last clip (None: no clip was decoded), the text of each, and the
        windows that may be as short as the audio.
    """
    begin_stage("loading the programs")
    session = _Session(bundle, run)
    precision = precisions(bundle, run)
    checks = list(_array_checks(session, reference, precision))
    checks += _batch_checks(session, reference, precision)
    if bundle.manifest.adapters:
        checks += _adapter_checks(session, bundle.manifest.adapters, reference, precision)
    try:
        decoded = _transcribed(session, reference)
    except NumericalError as error:
        return [*checks, _not_finite("tokens", "transcripts", error)], None, [], None
    texts = _texts(bundle, reference, decoded)
    checks += _decoded_checks(bundle, reference, decoded, texts, coarsest(precision.values()))
    windows = None
    if session.decoder.engine.short_windows is not None:
        begin_stage("decoding the clips in short windows")
        try:
            windows, check = check_short_windows(
                bundle, session.decoder, session.features, texts, reference.max_tokens
            )
        except NumericalError as error:
            check = _not_finite("words", "short windows", error)
        checks.append(check)
    return checks, decoded[-1] if decoded else None, texts, windows


def check_words(
    bundle: Bundle,
    reference: Reference,
    run: RunOptions | None = None,
) -> list[Check]:
    """Transcribe the clips of a reference, which need not be the bundle's own, and compare the words."""
    session = _Session(bundle, run)
    try:
        decoded = _transcribed(session, reference)
    except NumericalError as error:
        return [_not_finite("words", "transcripts", error)]
    precision = coarsest(precisions(bundle, run).values())
    texts = _texts(bundle, reference, decoded)
    checks = _decoded_checks(bundle, reference, decoded, texts, precision)
    return [check for check in checks if check.level == "words"]


def check_decoded_features(
    bundle: Bundle,
    decoder: Decoder,
    features: Sequence[np.ndarray],
    precision: str,
) -> list[Check]:
    """Decode given features with the bundle's decoder, and compare tokens and words.

    Args:
        bundle: the bundle, for its reference.
        decoder: the bundle's decoder.
        features: (T, d) of the reference's clips, in the order of the reference; of the first clips, if
            there are fewer.
        precision: precision that the features were computed in.
    """
    results: list[Decoded] = []
    reference = Reference.from_arrays(bundle.reference())
    reference = replace(reference, clips=reference.clips[: len(features)])
    try:
        for clip, encoded in zip(reference.clips, features, strict=True):
            begin_stage(Counted(f"decoding {clip.name}", len(results), len(features)))
            results.append(_decode(decoder, encoded, clip, reference))
    except NumericalError as error:
        return [_not_finite("words", "transcripts", error)]
    texts = _texts(bundle, reference, results)
    return list(_decoded_checks(bundle, reference, results, texts, precision))


def _texts(bundle: Bundle, reference: Reference, results: list[Decoded]) -> list[Transcribed]:
    """Return the text of every clip."""
    generation = bundle.manifest.generation
    tokenizer = Tokenizer.from_json(bundle.tokenizer_json(), generation)
    return [
        Transcribed(
            clip=clip,
            tokens=decoded.tokens,
            text=tokenizer.decode(decoded.tokens),
            expected=tokenizer.decode([t for t in clip.tokens if t != generation.end_of_text]),
            unit=unit_of(clip.language(generation)),
        )
        for decoded, clip in zip(results, reference.clips, strict=True)
    ]


def _decoded_checks(
    bundle: Bundle,
    reference: Reference,
    results: list[Decoded],
    texts: list[Transcribed],
    precision: str,
) -> Iterator[Check]:
    """Compare the tokens of every clip, and the error rates over the clips that decide."""
    end_of_text = bundle.manifest.generation.end_of_text
    own = reference.loss(precision, "logits")
    luck = {
        transcribed.clip.name: reason
        for transcribed in texts
        if (reason := undecided(transcribed, precision, own))
    }
    for decoded, clip in zip(results, reference.clips, strict=True):
        check = _token_check(decoded, clip, end_of_text, precision)
        yield reported(check, luck[clip.name]) if clip.name in luck and decoded.tokens else check
    sure = [transcribed for transcribed in texts if transcribed.clip.name not in luck]
    if not sure:
        yield no_evidence(texts, luck)
    for unit in sorted({transcribed.unit for transcribed in sure}, reverse=True):
        yield word_check(
            [transcribed for transcribed in sure if transcribed.unit == unit], unit, precision
        )


def _array_checks(
    session: _Session, reference: Reference, precision: Mapping[str, str]
) -> Iterator[Check]:
    """Compare encoder output and teacher-forced logits of the clips whose reference has them."""
    for clip in reference.clips:
        if clip.features.size and clip.logits.size:
            begin_stage(f"comparing arrays of {clip.name}")
            try:
                features = session.features(clip)
                yield from clip_checks(session.decoder, features, clip, reference, precision)
            except NumericalError as error:
                yield _not_finite("arrays", clip.name, error)


def _batch_checks(
    session: _Session, reference: Reference, precision: Mapping[str, str]
) -> Iterator[Check]:
    """Compare the logits of a program `step_B`, if the bundle has one."""
    engine = session.decoder.engine
    if engine.batch_step is not None:
        begin_stage(f"comparing arrays of {engine.batch_size} texts decoded together")
        try:
            yield from batch_checks(engine, reference, precision)
        except NumericalError as error:
            yield _not_finite("arrays", "texts decoded together", error)


def _adapter_checks(
    session: _Session, low_rank: LowRank, reference: Reference, precision: Mapping[str, str]
) -> Iterator[Check]:
    """Compare arrays that are computed with an adapter."""
    begin_stage("comparing arrays with an adapter")
    try:
        yield from adapter_checks(session.decoder.engine, low_rank, reference, precision)
    except NumericalError as error:
        yield _not_finite("arrays", "adapter", error)


def _transcribed(session: _Session, reference: Reference) -> list[Decoded]:
    """Transcribe every clip."""
    decoded = []
    for number, clip in enumerate(reference.clips):
        begin_stage(Counted(f"transcribing {clip.name}", number, len(reference.clips)))
        decoded.append(_transcribe(session, clip, reference))
    return decoded


def _transcribe(session: _Session, clip: ReferenceClip, reference: Reference) -> Decoded:
    return _decode(session.decoder, session.features(clip), clip, reference)


def _decode(
    decoder: Decoder, features: np.ndarray, clip: ReferenceClip, reference: Reference
) -> Decoded:
    """Decode the features (T, d) of a clip with the options that the reference was decoded with."""
    options = DecodeOptions(
        language=clip.language(decoder.engine.generation),
        max_tokens=reference.max_tokens,
        without_timestamps=True,
        repetition_penalty=1.0,  # the reference was decoded without a penalty
    )
    return decode_window(decoder, features, options)


def _token_check(decoded: Decoded, clip: ReferenceClip, end_of_text: int, precision: str) -> Check:
    """Compare the tokens of a clip; at low precision, a difference is only reported."""
    actual = (*decoded.tokens, end_of_text) if decoded.ended else decoded.tokens
    check = Check.of(
        "tokens", "all programs", f"{clip.name}, free", compare_tokens(actual, clip.tokens)
    )
    if precision in MAX_CHANGE or not decoded.tokens or not clip.tokens:
        return check  # no tokens at all is a failure at any precision
    return reported(check)


def _isolation_check(
    bundle: Bundle, reference: Reference, after: Decoded, run: RunOptions | None
) -> Check:
    """Check that the result of the last clip is the same alone and after all other clips."""
    try:
        alone = _transcribe(_Session(bundle, run), reference.clips[-1], reference)
    except NumericalError as error:
        return _not_finite("isolation", f"{reference.clips[-1].name} after others", error)
    same = alone == after
    value = {
        "tokens": len(alone.tokens),
        "avg_logprob_change": alone.avg_logprob - after.avg_logprob,
    }
    return Check(
        level="isolation",
        program="all programs",
        what=f"{reference.clips[-1].name} after others",
        value=value,
        rule="equal to the same clip in a fresh session, to the last bit",
        passed=same,
        reason="" if same else "the clips decoded before changed the result",
    )
