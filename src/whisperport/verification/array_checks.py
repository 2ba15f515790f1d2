"""Compare what a bundle's programs return for one clip with the arrays of the reference.

The decoder reads the tokens of the reference, whichever it would choose: its logits are comparable then.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from whisperport.program.checks import VOCAB_PROJECTION, Check
from whisperport.program.program_kind import CROSS_KV, ENCODER, UNCACHED_DECODER, kind_of
from whisperport.runtime import Decoder, Engine, Step
from whisperport.runtime.engine.scores import Scores
from whisperport.runtime.engine.uncached_decoder import UncachedDecoder
from whisperport.verification.array_comparison import Comparison, compare
from whisperport.verification.batch_check import bound_check, sum_checks
from whisperport.verification.precision import coarsest
from whisperport.verification.reference import Reference, ReferenceClip, reference_mel
from whisperport.verification.tokens import compare_logits, reported, token_gate
from whisperport.verification.tolerances import limit_of


def clip_checks(
    decoder: Decoder,
    features: np.ndarray,
    clip: ReferenceClip,
    reference: Reference,
    precision: Mapping[str, str],
) -> Iterator[Check]:
    """Compare the arrays of one clip.

    If the encoder is less precise than float32, the decoder runs on the features of the reference:
    otherwise the encoder's error would appear in every program.

    Args:
        decoder: of the bundle.
        features: (T, d) of the clip, as the bundle's encoder returned them.
        clip: one whose reference has arrays.
        reference: of the bundle.
        precision: program -> its precision.

    Raises:
        NumericalError: a program returned a NaN or an infinity.
    """
    of_encoder = precision["encoder"]
    of_decoder = coarsest(
        p for name, p in precision.items() if kind_of(name).name not in (ENCODER, UNCACHED_DECODER)
    )
    exact = of_encoder == "fp32"
    own = reference.loss(of_decoder, "logits")
    gate = limit_of(of_decoder, own)
    yield Check.of(
        "arrays", "encoder", clip.name, compare_features(features, clip, reference, of_encoder)
    )

    yield from _length_checks(decoder.engine, clip, reference, precision)
    input_features = features if exact else clip.features
    forced_scores = _forced_scores(decoder, input_features, clip)
    logits = _logits(forced_scores)
    first = compare("logits", logits[:1], clip.logits[:1], gate)
    yield Check.of("arrays", "prefill", clip.name, first)
    if len(logits) > 1:
        later = compare("logits", logits[1:], clip.logits[1:], gate)
        yield Check.of("arrays", "step", clip.name, later)
        yield from sum_checks("step", clip.name, forced_scores)
        ends = compare("logits", _prompted_logits(decoder, clip), clip.logits[[0, -1]], gate)
        yield Check.of("arrays", "prefill, longer", clip.name, ends)
    scores, hidden = _aligned(decoder, clip)
    if clip.scores.size:
        near = compare("scores", scores[:, :, : clip.scores.shape[2]], clip.scores, gate)
        yield Check.of("arrays", "align", f"{clip.name}, attention scores", near)
    aligned = compare("logits", decoder.engine.logits_of(hidden), clip.logits, gate)
    yield Check.of("arrays", "align", clip.name, aligned)
    if decoder.engine.projects:
        projected = compare("logits", decoder.engine.project(hidden), clip.logits, gate)
        yield Check.of("arrays", VOCAB_PROJECTION, clip.name, projected)
    if decoder.engine.coarse:
        yield bound_check(decoder.engine.coarse, hidden, clip)
    tokens = token_gate(of_decoder, own)
    forced = compare_logits(logits, clip.logits, tokens)
    what = clip.name if exact else f"{clip.name}, reference's features"
    yield Check.of("tokens", "prefill + step", f"{what}, forced", forced)
    if not exact:
        logits = _logits(_forced_scores(decoder, features, clip))
        forced = compare_logits(logits, clip.logits, tokens)
        yield reported(Check.of("tokens", "prefill + step", f"{clip.name}, forced", forced))
    if without := decoder.engine.uncached_decoder():
        of_uncached = precision[UNCACHED_DECODER]
        uncached = compare(
            "logits",
            _uncached_logits(without, input_features, clip),
            clip.uncached_logits,
            limit_of(of_uncached, reference.loss(of_uncached, "logits")),
        )
        yield Check.of("arrays", UNCACHED_DECODER, clip.name, uncached)


def _length_checks(
    engine: Engine, clip: ReferenceClip, reference: Reference, precision: Mapping[str, str]
) -> Iterator[Check]:
    """Compare `encoder_T` with the reference, and `cross_kv_T` with the first rows of `cross_kv`."""
    if engine.short_windows is None or not clip.short_features:
        return
    mel = reference_mel(engine.dims, clip)
    complete = engine.cross_kv.run({"features": clip.features[None]})
    for positions, expected in clip.short_features.items():
        name = f"{ENCODER}_{positions}"
        if name in precision:
            own = precision[name]
            gate = limit_of(own, reference.loss(own, "features"), encoder=True)
            features = engine.encode(mel[:, : 2 * positions])
            compared = compare("features", features, expected, gate, 0, clip.frames, {})
            yield Check.of("arrays", name, clip.name, compared)
        name = f"{CROSS_KV}_{positions}"
        if name in precision:
            gate = limit_of(precision[name], reference.loss(precision[name], "logits"))
            inputs = {"features": np.ascontiguousarray(clip.features[None, :positions])}
            outputs = engine.cross_kv.run(inputs)
            first = {k: complete[k][tuple(map(slice, rows.shape))] for k, rows in outputs.items()}
            actual, first_rows = (
                np.concatenate([*map(np.ravel, a.values())]) for a in (outputs, first)
            )
            compared = compare("keys and values", actual, first_rows, gate)
            yield Check.of("arrays", name, clip.name, compared)


def compare_features(
    features: np.ndarray, clip: ReferenceClip, reference: Reference, precision: str
) -> Comparison:
    """Compare the features (T, d) of a clip with the reference, and with what else they could be."""
    gate = limit_of(precision, reference.loss(precision, "features"), encoder=True)
    wrong_references = other_features(clip, reference)
    return compare("features", features, clip.features, gate, 0, clip.frames, wrong_references)


def other_features(clip: ReferenceClip, reference: Reference) -> dict[str, np.ndarray]:
    """Return what the features of a clip must not be: the stored features of the others, by name."""
    return {
        f"the features of {other_clip.name}": other_clip.features
        for other_clip in reference.clips
        if other_clip.features.shape == clip.features.shape and other_clip.name != clip.name
    }


def _forced_scores(decoder: Decoder, features: np.ndarray, clip: ReferenceClip) -> list[Scores]:
    """Return K scores: after the prompt, and after each of the reference's first K - 1 tokens."""
    decoder.start_window(features)
    scores = [Scores(decoder.prefill(clip.prompt)[0].copy())]
    for token in clip.tokens[: len(clip.logits) - 1]:
        scored = decoder.score(Step(token, decoder.cache))
        assert isinstance(scored, Scores)  # the step is exact
        scores.append(scored.copy())
    return scores


def _logits(scores: Sequence[Scores]) -> np.ndarray:
    return np.stack([each.logits for each in scores])


def _prompted_logits(decoder: Decoder, clip: ReferenceClip) -> np.ndarray:
    """Return the first and last of the forced logits, (2, V), computed with all tokens in one prompt."""
    decoder.cache.clear()
    last, first = decoder.prefill(_forced_tokens(clip), second_index=len(clip.prompt) - 1)
    return np.stack([first, last])


def _aligned(decoder: Decoder, clip: ReferenceClip) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores (A, S, T) of the alignment heads and the hidden states (K, d) of the forced logits.

    Both are computed by the `align` program.
    """
    scores, hidden = decoder.align(_forced_tokens(clip))
    return scores, hidden[len(clip.prompt) - 1 :]


def _uncached_logits(
    decoder: UncachedDecoder, features: np.ndarray, clip: ReferenceClip
) -> np.ndarray:
    """Return the forced logits of the decoder without KV cache, as many as the reference has."""
    decoder.start_window(features)
    logits = [decoder.prefill(clip.prompt)[0]]
    logits += [decoder.step(token) for token in clip.tokens[: len(clip.uncached_logits) - 1]]
    return np.stack(logits)


def _forced_tokens(clip: ReferenceClip) -> tuple[int, ...]:
    return (*clip.prompt, *clip.tokens[: len(clip.logits) - 1])
