"""Verify a bundle: run it on its reference clips, and hold every level against the reference."""

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from whisperport.audio import log_mel
from whisperport.bundle import Bundle
from whisperport.checks import UNCACHED_DECODER, Check, Level
from whisperport.dims import Dims
from whisperport.errors import NumericalError
from whisperport.generation import Generation
from whisperport.progress import Progress
from whisperport.runtime import Decoded, DecodeOptions, Decoder, decode_window, load_engine
from whisperport.runtime.uncached_decoder import UncachedDecoder
from whisperport.targets import RunOptions
from whisperport.text import Tokenizer
from whisperport.verification.compare import compare
from whisperport.verification.error_rate import TextErrors, Unit, text_errors, unit_of
from whisperport.verification.machine import machine, versions
from whisperport.verification.precision import coarsest, precisions
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.report import Report
from whisperport.verification.tokens import TOKEN_GATES, compare_logits, compare_tokens
from whisperport.verification.tolerances import GATES, JUDGED_BY_WORDS

RUNTIMES = ("whisperport", "numpy", "onnxruntime", "executorch", "torch")
MAX_CHANGE = {"fp32": 0.001, "fp16": 0.001}  # of WER and CER, absolute; 0.005 for other precisions


def verify(
    bundle: Bundle | str | os.PathLike[str],
    *,
    run: RunOptions | None = None,
    progress: Progress = lambda _: None,
) -> Report:
    """Run a bundle on the reference it carries, and compare arrays, tokens, words, and isolation.

    Needs the runtimes of the bundle's targets, and no torch beyond theirs.

    Raises:
        BundleError: the bundle is damaged.
        MissingPackageError: a target's runtime is not installed.
    """
    started = time.perf_counter()
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle)
    reference = Reference.from_arrays(opened.reference())
    checks, last = _session_checks(opened, reference, run, progress)
    if last:
        progress("clip by clip in a fresh session")
        checks.append(_isolation_check(opened, reference, last, run, progress))
    return Report(
        subject=_subject(opened, run),
        checks=tuple(checks),
        machine=machine(),
        versions=versions(RUNTIMES),
        seconds=round(time.perf_counter() - started, 3),
    )


def _subject(bundle: Bundle, run: RunOptions | None) -> str:
    """The bundle's name, and how its programs were run where that was asked for."""
    options = run.options if run else {}
    return ", ".join(
        [bundle.manifest.name, *(f"{name}={value}" for name, value in options.items())]
    )


def _not_finite(level: Level, what: str, error: NumericalError) -> Check:
    """The check that failed because a program returned a NaN or an infinity: nothing was compared."""
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
    """A loaded bundle, whose encoder runs once on each clip."""

    def __init__(self, bundle: Bundle, run: RunOptions | None) -> None:
        self.decoder = load_engine(bundle, run).decoder()
        self._features: dict[int, np.ndarray] = {}  # identity of a clip -> its features

    def features(self, clip: ReferenceClip) -> np.ndarray:
        """Features (T, d) of a clip of the bundle's reference."""
        if id(clip) not in self._features:
            engine = self.decoder.engine
            self._features[id(clip)] = engine.encode(reference_mel(engine.dims, clip))
        return self._features[id(clip)]


def _session_checks(
    bundle: Bundle, reference: Reference, run: RunOptions | None, progress: Progress
) -> tuple[list[Check], Decoded | None]:
    """Arrays, tokens and words, and what was decoded of the last clip; None: nothing was.

    The session's programs are deleted at the end: those of two sessions would take twice the memory.
    """
    progress("loading the programs")
    session = _Session(bundle, run)
    precision = precisions(bundle, run)
    checks = list(_array_checks(session, reference, precision, progress))
    try:
        decoded = [_transcribe(session, clip, reference, progress) for clip in reference.clips]
    except NumericalError as error:
        return [*checks, _not_finite("tokens", "transcripts", error)], None
    checks += _decoded_checks(bundle, reference, decoded, coarsest(precision.values()))
    return checks, decoded[-1] if decoded else None


def check_decoded_features(
    bundle: Bundle,
    decoder: Decoder,
    features: Sequence[np.ndarray],
    precision: str,
    progress: Progress = lambda _: None,
) -> list[Check]:
    """Tokens and words that a bundle's decoder makes of features that something else has computed.

    Args:
        features: (T, d) of every clip of the bundle's reference, in its order.
        precision: that the features were computed in.
    """
    reference, heard = Reference.from_arrays(bundle.reference()), []
    try:
        for clip, encoded in zip(reference.clips, features, strict=True):
            progress(f"decoding {clip.name}")
            heard.append(_decode(decoder, encoded, clip, reference))
    except NumericalError as error:
        return [_not_finite("words", "transcripts", error)]
    return list(_decoded_checks(bundle, reference, heard, precision))


def _decoded_checks(
    bundle: Bundle, reference: Reference, heard: list[Decoded], precision: str
) -> Iterator[Check]:
    """The tokens of every clip, and the words of all."""
    end = bundle.manifest.generation.end_of_text
    for decoded, clip in zip(heard, reference.clips, strict=True):
        yield _token_check(decoded, clip, end, precision)
    yield from _word_checks(bundle, reference, heard, precision)


def _array_checks(
    session: _Session, reference: Reference, precision: Mapping[str, str], progress: Progress
) -> Iterator[Check]:
    """Encoder output, and logits under teacher forcing, for the clips that hold them."""
    for clip in reference.clips:
        if clip.features.size and clip.logits.size:
            progress(f"comparing arrays of {clip.name}")
            try:
                yield from _clip_checks(session, clip, precision)
            except NumericalError as error:
                yield _not_finite("arrays", clip.name, error)


def _clip_checks(
    session: _Session, clip: ReferenceClip, precision: Mapping[str, str]
) -> Iterator[Check]:
    """The arrays of one clip.

    Behind an encoder that keeps less than the decoder does, the decoder is judged on the reference's
    features: else the encoder's error would be found again in every program.
    """
    decoder, of_encoder = session.decoder, precision["encoder"]
    of_decoder = coarsest(
        p for name, p in precision.items() if name not in ("encoder", UNCACHED_DECODER)
    )
    by_words = of_encoder in JUDGED_BY_WORDS
    gate, encoder_gate = GATES[of_decoder], JUDGED_BY_WORDS.get(of_encoder, GATES[of_encoder])
    features = session.features(clip)
    found = compare("features", features, clip.features, encoder_gate, frame_axis=0)
    yield Check.of("arrays", "encoder", clip.name, found)

    of_all = coarsest([of_decoder, of_encoder])
    given = features if of_all == of_decoder and not by_words else clip.features
    logits = _forced_logits(decoder, given, clip)
    first = compare("logits", logits[:1], clip.logits[:1], gate)
    yield Check.of("arrays", "prefill", clip.name, first)
    if len(logits) > 1:
        later = compare("logits", logits[1:], clip.logits[1:], gate)
        yield Check.of("arrays", "step", clip.name, later)
        ends = compare("logits", _prompted_logits(decoder, clip), clip.logits[[0, -1]], gate)
        yield Check.of("arrays", "prefill, longer", clip.name, ends)
    aligned = compare("logits", _aligned_logits(decoder, clip), clip.logits, gate)
    yield Check.of("arrays", "align", clip.name, aligned)
    if by_words:
        forced = compare_logits(logits, clip.logits, TOKEN_GATES[of_decoder])
        yield Check.of(
            "tokens", "prefill + step", f"{clip.name}, reference's features, forced", forced
        )
    if given is not features:
        logits = _forced_logits(decoder, features, clip)
    forced = compare_logits(logits, clip.logits, TOKEN_GATES[of_all])
    check = Check.of("tokens", "prefill + step", f"{clip.name}, forced", forced)
    yield _reported(check) if by_words else check
    if without := decoder.engine.uncached_decoder():
        rows = _uncached_logits(without, given, clip)
        full = compare("logits", rows, clip.uncached_logits, GATES[precision[UNCACHED_DECODER]])
        yield Check.of("arrays", UNCACHED_DECODER, clip.name, full)


def reference_mel(dims: Dims, clip: ReferenceClip) -> np.ndarray:
    """The spectrogram (n_mels, 2T) of a clip, of one window."""
    return log_mel(clip.audio, dims.n_mels, n_frames=dims.n_frames)


def _forced_logits(decoder: Decoder, features: np.ndarray, clip: ReferenceClip) -> np.ndarray:
    """Logits (K, V) after the prompt and after each of the reference's first K - 1 tokens."""
    decoder.start_window(features)
    rows = [decoder.prefill(clip.prompt)[0].copy()]
    rows += [decoder.step(token).copy() for token in clip.tokens[: len(clip.logits) - 1]]
    return np.stack(rows)


def _prompted_logits(decoder: Decoder, clip: ReferenceClip) -> np.ndarray:
    """The first and the last of those logits, (2, V), with all tokens in one prompt."""
    decoder.cache.clear()
    last, first = decoder.prefill(_forced_tokens(clip), second_index=len(clip.prompt) - 1)
    return np.stack([first, last])


def _aligned_logits(decoder: Decoder, clip: ReferenceClip) -> np.ndarray:
    """All of those logits, (K, V), from the rows of the program that times words."""
    _, rows = decoder.align(_forced_tokens(clip))
    return decoder.engine.logits_of(rows[len(clip.prompt) - 1 :])


def _uncached_logits(
    full: UncachedDecoder, features: np.ndarray, clip: ReferenceClip
) -> np.ndarray:
    """As `_forced_logits`, for as many rows as the reference has of a decoder without a cache."""
    full.start_window(features)
    rows = [full.prefill(clip.prompt)[0]]
    rows += [full.step(token) for token in clip.tokens[: len(clip.uncached_logits) - 1]]
    return np.stack(rows)


def _forced_tokens(clip: ReferenceClip) -> tuple[int, ...]:
    return (*clip.prompt, *clip.tokens[: len(clip.logits) - 1])


def _transcribe(
    session: _Session, clip: ReferenceClip, reference: Reference, progress: Progress
) -> Decoded:
    progress(f"transcribing {clip.name}")
    return _decode(session.decoder, session.features(clip), clip, reference)


def _decode(
    decoder: Decoder, features: np.ndarray, clip: ReferenceClip, reference: Reference
) -> Decoded:
    """What the decoder makes of a clip's features (T, d), as the reference was decoded."""
    options = DecodeOptions(
        language=_language(decoder.engine.generation, clip),
        max_tokens=reference.max_tokens,
        without_timestamps=True,
        repetition_penalty=1.0,  # the reference has no guards
    )
    return decode_window(decoder, features, options)


def _language(generation: Generation, clip: ReferenceClip) -> str:
    """In which the reference was told to hear the clip."""
    codes = {token: code for code, token in generation.languages.items()}
    return next((codes[token] for token in clip.prompt if token in codes), "en")


def _token_check(decoded: Decoded, clip: ReferenceClip, end_of_text: int, precision: str) -> Check:
    """The same tokens; of a precision that may well choose others they are only reported."""
    actual = (*decoded.tokens, end_of_text) if decoded.ended else decoded.tokens
    check = Check.of(
        "tokens", "all programs", f"{clip.name}, free", compare_tokens(actual, clip.tokens)
    )
    if precision in MAX_CHANGE or not decoded.tokens or not clip.tokens:
        return check  # nothing said is no other choice
    return _reported(check)


def _reported(check: Check) -> Check:
    """The same numbers, which are not judged; what could not be compared stays a failure."""
    if not check.value or any(map(math.isnan, check.value.values())):
        return check
    return replace(check, rule="reported: the words decide", passed=True, reason="")


def _word_checks(
    bundle: Bundle, reference: Reference, heard: list[Decoded], precision: str
) -> Iterator[Check]:
    """Error rates of the bundle and of the reference, in words, and in characters for their clips."""
    spoken = [_language(bundle.manifest.generation, clip) for clip in reference.clips]
    units = [unit_of(language) for language in spoken]
    for unit in sorted(set(units), reverse=True) or ["words"]:
        pairs = zip(reference.clips, heard, units, strict=True)
        of_unit = [(clip, said) for clip, said, u in pairs if u == unit]
        yield _word_check(bundle, of_unit, unit, MAX_CHANGE.get(precision, 0.005))


def _word_check(
    bundle: Bundle, heard: list[tuple[ReferenceClip, Decoded]], unit: Unit, limit: float
) -> Check:
    """The difference between the two rates is what is judged: at most `limit`, absolute."""
    tokenizer = Tokenizer.from_json(bundle.tokenizer_json(), bundle.manifest.generation)
    end = bundle.manifest.generation.end_of_text
    ours = theirs = between = TextErrors(unit=unit)
    for clip, decoded in heard:
        text = tokenizer.decode(decoded.tokens)
        expected = tokenizer.decode([token for token in clip.tokens if token != end])
        between += text_errors(text, expected, unit)
        if clip.text:
            ours += text_errors(text, clip.text, unit)
            theirs += text_errors(expected, clip.text, unit)
    change = ours.rate - theirs.rate if ours.length else between.rate
    value = {unit: ours.length or between.length, "change": change, "clips": len(heard)}
    name = ours.name
    if ours.length:
        value |= {name.lower(): ours.rate, f"reference_{name.lower()}": theirs.rate}
    reason = "" if change <= limit else f"{name} rose by {change:.2%}"
    if not value[unit]:
        reason = "the reference holds no words"
    return Check(
        level="words",
        program="all programs",
        what=f"{unit.removesuffix('s')} error rate",
        value=value,
        rule=f"{name} at most {limit:.1%} above the reference's",
        passed=not reason,
        reason=reason,
    )


def _isolation_check(
    bundle: Bundle, reference: Reference, after: Decoded, run: RunOptions | None, progress: Progress
) -> Check:
    """The last clip alone, against the same clip after all others: equal to the last bit."""
    try:
        alone = _transcribe(_Session(bundle, run), reference.clips[-1], reference, progress)
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
        reason="" if same else "what was heard before changed what was heard",
    )
