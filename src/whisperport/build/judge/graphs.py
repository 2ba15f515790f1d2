"""Run the graphs of files without their app, and say what they compute if it is not the checkpoint's.

They run in a child process with limits. If the logits are wrong, the checkpoint is run in torch with one
fault after the other that exporters make: the one that gives the same wrong logits is the cause.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.build.inspect import size_of
from whisperport.build.judge.faults import Fault, faults
from whisperport.build.judge.operations import LATER
from whisperport.build.judge.words import ComparedWords, compare_words
from whisperport.build.layouts import recognized
from whisperport.build.layouts.arrays import Floats
from whisperport.build.layouts.exact import LIMIT
from whisperport.build.layouts.huggingface_files import alignment_heads
from whisperport.build.layouts.layout import ALIGNED, ATTENTION, App, Layout
from whisperport.build.layouts.reading import Files
from whisperport.build.layouts.reference import (
    Emitted,
    KnownLogits,
    known_logits,
    reference_of,
    spectrogram,
)
from whisperport.program.checks import Check
from whisperport.runtime import start_tokens
from whisperport.speech.text import Tokenizer
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.locking import temporary_folder
from whisperport.system.progress import begin_stage
from whisperport.verification.clips import Clip
from whisperport.verification.diagnosis.matching import error_of

if TYPE_CHECKING:  # it needs torch
    from whisperport.model.checkpoint.checkpoint import Checkpoint

GRAPHS = "the graphs, without an app"
JOB, EMIT_JOB = f"{__name__}:run_graphs", f"{__name__}:emit_texts"
SECONDS = 600.0
MEMORY = 2 << 30  # bytes, beside four times those of the files
HALF_SAME = 0.5  # of the positions: quantized graphs that are right have that many best tokens
SAME_CACHE = 1e-2  # of the largest key or value: what rounded weights may change
OTHER_CACHE = 0.5  # relative error of keys or values that rounding does not explain
NEARER = 0.6  # of the mean error: a fault that leaves less is named as the nearest
NOTICED = LIMIT / 10  # of the largest logit: below it, rounding alone differs (5e-6 seen)
LONGER = 5  # times the longest text of the checkpoint: a loop is known by then
FIT = 0.1  # of the mean error: a fault may leave so much, as where the weights are rounded


def check_computed(
    layout: Layout,
    path: Path,
    precision: str,
    checkpoint: "Checkpoint",
    clip: Clip,
    *,
    exact: bool,
    swapped: Sequence[str],
) -> Check:
    """Run the graphs on a clip with the tokens that the checkpoint emits, and compare the logits.

    Args:
        layout: it has `logits`.
        path: of its files.
        precision: of their weights.
        checkpoint: of which they were made.
        clip: its first seconds are used.
        exact: whether the weights are those of the checkpoint to the bit.
        swapped: weights whose axes have another order in the files than those of all others.

    Raises:
        StoppedError: the graphs cannot be run.
        MissingPackageError: the package that runs them is not installed.
    """
    checkpoint, known = taken(layout, next(iter(layout.apps.values())), checkpoint, clip)
    dims = checkpoint.dims
    mel = spectrogram(clip.samples, dims.n_mels, dims.n_frames, "mel")[:, : dims.n_frames]
    logits, caches = _run(layout, path, precision, mel, known)
    comparison = _Comparison(checkpoint, mel, known, logits, exact=exact)
    reason = ""
    if not comparison.is_right:
        reason = comparison.cause(caches, swapped)
    elif exact and comparison.error() > NOTICED:
        reason, _ = comparison.nearest(swapped)
    elif not exact:
        reason = comparison.exchanged(caches)
    reason = reason or comparison.wrong_attention(caches)
    return Check(
        level="arrays",
        program=GRAPHS,
        what=f"logits of {clip.name}",
        value={"positions": len(known.tokens), "max_relative": comparison.error()},
        rule=f"logits within {LIMIT:g} of those in eager torch"
        if exact
        else f"after at least {HALF_SAME:.0%} of the tokens, the best token is that of eager torch",
        passed=not reason,
        reason=reason,
    )


def check_words(
    layout: Layout, path: Path, checkpoint: "Checkpoint", clips: Sequence[Clip]
) -> tuple[ComparedWords, Check]:
    """Decode clips with the graphs, whose app does not run here, and compare the words.

    Args:
        layout: it has `emitted`.
        path: of its files.
        checkpoint: of which they were made; it decodes in 30 s, and texts of any length.
        clips: at least one.

    Raises:
        StoppedError, MissingPackageError, ProgramError: as `check_computed`.
    """
    profile = next(iter(layout.apps.values())).profile_of(checkpoint)
    expected = reference_of(checkpoint, profile, clips)
    generation, dims = checkpoint.generation, checkpoint.dims
    prompt = start_tokens(generation, clips[0].language, "transcribe", timestamps=False)
    begin_stage("decoding with the graphs")
    with temporary_folder() as folder:
        names = []
        for number, clip in enumerate(clips):
            names.append(str(folder / f"{number}.npy"))
            mel = spectrogram(clip.samples, dims.n_mels, dims.n_frames, profile.padding)
            np.save(names[-1], mel[:, : dims.n_frames])
        longest = LONGER * max(len(emitted.tokens) for emitted in expected)
        arguments = {
            "path": str(path.absolute()),
            "mels": names,
            "prompt": list(prompt),
            "end": generation.end_of_text,
            "limit": min(dims.n_text_ctx, len(prompt) + longest),
        }
        texts = run_limited(EMIT_JOB, arguments, Limits(MEMORY + 4 * size_of(path), SECONDS))
    tokenizer = Tokenizer.from_json(checkpoint.tokenizer_json.decode(), generation)
    actual = [Emitted(tuple(tokens), tokenizer.decode(tokens), ()) for tokens in texts]
    words = compare_words(clips, expected, actual, timed=False)
    lost = {kind: losses for kind, losses in words.by_kind().items() if kind != "lost timestamps"}
    reason = "; ".join(
        f"{kind} in {len(losses)} of {len(clips)} clips: {losses[0].clip}, {losses[0].reason}"
        for kind, losses in lost.items()
    )
    check = Check(
        level="words",
        program=GRAPHS,
        what=f"words of {len(clips)} clips",
        value={"differ": words.counts.between.errors, "length": words.counts.between.length},
        rule="no text is missing, ends early or loops",
        passed=not reason,
        reason=reason,
    )
    return words, check


def emit_texts(path: str, mels: list[str], prompt: list[int], end: int, limit: int) -> Any:
    """Decode spectrograms with graphs; the job of the child process."""
    layout = recognized(Files(Path(path)))
    assert layout is not None
    assert layout.emitted is not None
    begin_stage("decoding with the graphs")
    return layout.emitted(Path(path), [np.load(name) for name in mels], prompt, end, limit)


def taken(
    layout: Layout, app: App, checkpoint: "Checkpoint", clip: Clip
) -> tuple["Checkpoint", KnownLogits]:
    """Return a checkpoint with the window and positions of graphs, and a text that they can read.

    Args:
        layout: of the graphs; see `Extent`.
        app: decodes the clip.
        checkpoint: of which they were made.
        clip: its first seconds are used.
    """
    from whisperport.model.network.short_window import POSITIONS

    extent, dims = layout.extent, checkpoint.dims
    n_positions = extent.n_frames // 2 or dims.n_audio_ctx
    if n_positions < dims.n_audio_ctx:
        first = extent.first_position
        table = checkpoint.weights[POSITIONS][first : first + n_positions]
        checkpoint = replace(
            checkpoint,
            dims=replace(dims, n_audio_ctx=n_positions),
            weights={**checkpoint.weights, POSITIONS: table},
        )
    known = known_logits(checkpoint, app.profile_of(checkpoint), [clip], ())
    # Positions that are too late by one must be there, too.
    longest = min(dims.n_text_ctx - 1, extent.n_tokens or dims.n_text_ctx)
    return checkpoint, replace(known, tokens=known.tokens[:longest])


def run_graphs(
    path: str, precision: str, mel: str, tokens: list[int], n_prompt: int, out: str
) -> None:
    """Run graphs, and write logits and caches to an .npz file; the job of the child process."""
    layout = recognized(Files(Path(path)))
    begin_stage("running the graphs")
    assert layout is not None
    assert layout.logits is not None
    caches: dict[str, Floats] = {}
    logits = layout.logits(Path(path), precision, np.load(mel), tokens, n_prompt, caches)
    np.savez(out, allow_pickle=False, logits=np.asarray(logits, np.float32), **caches)


def _run(
    layout: Layout, path: Path, precision: str, mel: Floats, known: KnownLogits
) -> tuple[Floats, dict[str, Floats]]:
    """Return the logits, and the keys and values that the first run returned."""
    begin_stage("running the graphs")
    with temporary_folder() as folder:
        np.save(folder / "mel.npy", mel)
        out = folder / "computed.npz"
        arguments = {
            "path": str(path.absolute()),
            "precision": precision,
            "mel": str(folder / "mel.npy"),
            "tokens": list(known.tokens),
            "n_prompt": known.n_prompt,
            "out": str(out),
        }
        run_limited(JOB, arguments, Limits(MEMORY + 4 * size_of(path), SECONDS))
        with np.load(out) as computed:
            caches = dict(computed)
    logits = caches.pop("logits")
    if logits.ndim != 2 or len(logits) != len(known.tokens):
        raise StoppedError(f"the logits have the shape {logits.shape}")
    return logits, caches


def is_cause(reason: str) -> bool:
    """Return whether the reason of a check says what is computed, and not only which logits are wrong."""
    return not reason.startswith(("the first run is", "the first token is", "after "))


class _Comparison:
    """Compares the logits of graphs with what the checkpoint computes, with and without a fault."""

    def __init__(
        self,
        checkpoint: "Checkpoint",
        mel: Floats,
        known: KnownLogits,
        logits: Floats,
        *,
        exact: bool,
    ) -> None:
        import torch

        from whisperport.model.network.whisper import build_model

        # In float32, which every model is: they share this memory.
        weights = {name: tensor.float() for name, tensor in checkpoint.weights.items()}
        self.checkpoint = replace(checkpoint, weights=weights)
        self.known, self.logits, self.exact = known, logits, exact
        self.mel = torch.from_numpy(mel[None])
        self.tokens = torch.tensor(known.tokens)
        self.model = build_model(self.checkpoint)
        self.features = self.model.encode(self.mel)
        self.expected = self.computed(Fault("nothing is wrong"))

    @property
    def is_right(self) -> bool:
        """Whether the logits are the checkpoint's, as far as its weights are."""
        if self.logits.shape != self.expected.shape:
            return False
        if self.exact:
            return self.error() <= LIMIT
        same = self.logits.argmax(axis=1) == self.expected.argmax(axis=1)
        return bool(np.isfinite(self.logits).all() and same.mean() >= HALF_SAME)

    def misplaced(self, caches: Mapping[str, Floats]) -> str:
        """Return in words which keys or values of the first run are others, or in another order."""
        right = self._right_caches()
        for name, array in caches.items():
            if name not in right:
                continue
            n_heads = len(right[name])
            array = _in_heads(array, right[name])
            if not array.any():
                return f"the cache is not written: the first run returns no {_cache(name)}"
            if array.shape != right[name].shape:
                return f"the {_cache(name)} have the sizes {array.shape}, not {right[name].shape}"
            if _is_same(array, right[name]):
                continue
            for output, values in right.items():
                if values.shape == array.shape and _is_same(array, values):
                    return f"in place of the {_cache(name)}, the first run returns the {_cache(output)}"
            order = [
                next((h for h in range(n_heads) if _is_same(array[i], right[name][h])), -1)
                for i in range(n_heads)
            ]
            if min(order) >= 0:
                return f"the {_cache(name)} have their heads in another order: {order}"
        return ""

    def exchanged(self, caches: Mapping[str, Floats]) -> str:
        """Return in words which keys or values of the first run are others, though weights are rounded.

        The best tokens of a short text may be right with them.
        """
        right = self._right_caches()
        wrong = []
        for name in caches.keys() & right.keys():
            array = _in_heads(caches[name], right[name])
            errors = {n: error_of(v, array) for n, v in right.items() if v.shape == array.shape}
            if errors and errors.get(name, 0) > OTHER_CACHE:
                nearest = min(errors, key=errors.__getitem__)
                if errors[nearest] < errors[name] / 2:
                    wrong.append((name, nearest))
        if not wrong:
            return ""
        name, nearest = min(wrong)
        further = f", and {len(wrong) - 1} more are others" if len(wrong) > 1 else ""
        return (
            f"in place of the {_cache(name)}, the first run returns the {_cache(nearest)}{further}"
        )

    def _right_caches(self) -> dict[str, Floats]:
        """Return the keys and values (H, n, D) of the first run, under the names of `Layout.logits`."""
        from whisperport.model.network.whisper import CachedDecoder

        cross = self.model.cross_kv(self.features)
        decoder = CachedDecoder(self.model.decoder, cross)
        decoder(self.tokens[: self.known.n_prompt].tolist())
        return {
            f"{layer}.{side}.{part}": np.ascontiguousarray(
                array.transpose(1, 2) if part == "key" else array
            )
            for side, layers in (("decoder", decoder.caches), ("encoder", cross))
            for layer, pair in enumerate(layers)
            for part, array in zip(("key", "value"), pair, strict=True)
        }

    def wrong_attention(self, caches: Mapping[str, Floats]) -> str:
        """Return in words which cross-attention is another layer's; empty: none is.

        Apps compute word timestamps of what the decoder returns.
        """
        returned = {int(key.split(".")[0]): caches[key] for key in caches if ATTENTION in key}
        if not returned and ALIGNED not in caches:
            return ""
        dims, n_prompt = self.checkpoint.dims, self.known.n_prompt
        heads = [(layer, h) for layer in range(dims.n_text_layer) for h in range(dims.n_text_head)]
        scores = self.model.cross_scores(self.tokens, self.model.cross_kv(self.features), heads)
        weights = scores.softmax(-1).numpy()
        right = weights.reshape(dims.n_text_layer, dims.n_text_head, *weights.shape[1:])
        for layer, array in returned.items():
            if array.shape != right[0].shape:
                return f"the cross-attention of decoder layer {layer} has the sizes {array.shape}"
            for rows, when in ((slice(n_prompt), ""), (slice(n_prompt, None), LATER)):
                errors = np.abs(right - array)[:, :, rows].reshape(len(right), -1).mean(axis=1)
                nearest = int(errors.argmin())
                if layer < len(right) and errors[nearest] < NEARER * errors[layer]:
                    return (
                        f"{when}the cross-attention that is returned for decoder layer {layer} is that of "
                        f"layer {nearest}: word timestamps are wrong"
                    )
        return self._other_heads(caches.get(ALIGNED), heads, weights)

    def _other_heads(
        self, array: Floats | None, heads: Sequence[tuple[int, int]], weights: Floats
    ) -> str:
        """Return in words which head is returned in place of one for word timestamps; empty: none is.

        Args:
            array: (A, S, T) that is returned for the alignment heads; None: the graph returns none.
            heads: all heads, as layer and head.
            weights: (L·H, S, T) what each gives the audio.
        """
        expected = alignment_heads(self.checkpoint)
        if array is None or array.shape != (len(expected), *weights.shape[1:]):
            return ""
        errors = [np.abs(weights - own).reshape(len(weights), -1).mean(axis=1) for own in array]
        nearest = [heads[int(own.argmin())] for own in errors]  # in any order
        missing = [pair for pair in expected if pair not in nearest]
        for pair, own in zip(nearest, errors, strict=True) if missing else ():
            if pair not in expected and own.min() < NEARER * own[heads.index(missing[0])]:
                return (
                    "the cross-attention for word timestamps is that of layer {}, head {}, in place of "
                    "layer {}, head {}".format(*pair, *missing[0])
                )
        return ""

    def error(self, expected: Floats | None = None, rows: slice | None = None) -> float:
        """Return the largest difference, as part of the largest logit."""
        right = self.expected if expected is None else expected
        if self.logits.shape != right.shape:
            return float("inf")
        rows = rows or slice(None)
        largest = float(np.abs(right[rows]).max())
        return float(np.abs(self.logits[rows] - right[rows]).max()) / largest

    def computed(self, fault: Fault) -> Floats:
        """Return the logits (S, V) that the checkpoint computes with a fault."""
        from whisperport.model.network.whisper import build_model

        model = build_model(self.checkpoint)
        fault.change(model)
        features = model.encode(self.mel) if fault.in_encoder else self.features
        logits: Floats = model.logits(
            self.tokens, model.cross_kv(features), positions=fault.positions, mask=fault.mask
        ).numpy()
        return logits

    def nearest(self, swapped: Sequence[str]) -> tuple[str, str]:
        """Return the fault that explains the logits, and that which is nearest; empty: there is none."""
        plain = float(np.abs(self.logits - self.expected).mean())
        limit = min(LIMIT, self.error()) / 10
        nearest = (float("inf"), "")
        for fault in faults(self.checkpoint, self.tokens, self.known.n_prompt, swapped):
            begin_stage(f"looking for the cause: {fault.sentence}")
            try:
                computed = self.computed(fault)
            except (RuntimeError, IndexError):  # sizes that do not fit this checkpoint
                continue
            rows = slice(fault.n_rows)
            left = float(np.abs(self.logits[rows] - computed[rows]).mean())
            if self.error(computed, rows) <= limit:
                return fault.sentence, ""
            nearest = min(nearest, (left, fault.sentence))
        if nearest[0] <= FIT * plain:
            return nearest[1], ""
        return "", nearest[1] if nearest[0] <= NEARER * plain else ""

    def cause(self, caches: Mapping[str, Floats], swapped: Sequence[str]) -> str:
        """Return in words what the graphs compute instead.

        Args:
            caches: keys and values that the first run returned; see `Layout.logits`.
            swapped: see `faults`.
        """
        if self.logits.shape != self.expected.shape:
            return (
                f"the logits are of {self.logits.shape[1]} tokens; the checkpoint has "
                f"{self.expected.shape[1]}"
            )
        if bad := int(np.count_nonzero(~np.isfinite(self.logits).all(axis=1))):
            return f"after {bad} of {len(self.logits)} tokens, logits are infinite or not a number"
        if misplaced := self.misplaced(caches):
            return misplaced
        sentence, nearest = self.nearest(swapped)
        if sentence:
            return sentence
        unknown = self._where(has_caches=bool(caches))
        if nearest and not self.exact:  # of exact weights, the layers are compared
            return f"{unknown}; the nearest fault is: {nearest}"
        return unknown

    def _where(self, *, has_caches: bool) -> str:
        """Return in words which logits are wrong."""
        n_prompt = self.known.n_prompt
        right = np.abs(self.logits - self.expected).max(axis=1)
        right = right <= 10 * LIMIT * float(np.abs(self.expected).max())
        if right[:n_prompt].all():
            cache = "how the cache is read" if has_caches else "the cache"
            return (
                f"the first run is right, and the tokens after it are wrong: {cache}, or the mask or the "
                "positions with a cache"
            )
        if right[0]:
            return "the first token is right, and later ones of its run are wrong: the mask or positions"
        return f"the first run is wrong, by {self.error():.1g} of the largest logit: encoder or decoder"


def _cache(name: str) -> str:
    """Return a cache in words; `Layout.logits` says its names."""
    layer, side, part = name.split(".")
    kind = "self" if side == "decoder" else "cross"
    return f"{part}s of {kind}-attention in decoder layer {layer}"


def _in_heads(array: Floats, right: Floats) -> Floats:
    """Return a cache (H, n, D), also if it was (n, d)."""
    n_heads, _, width = right.shape
    if array.ndim == 2 and array.shape[1] == n_heads * width:
        array = array.reshape(-1, n_heads, width).transpose(1, 0, 2)
    return array


def _is_same(array: Floats, right: Floats) -> bool:
    return bool(np.abs(array - right).max() <= SAME_CACHE * np.abs(right).max())
