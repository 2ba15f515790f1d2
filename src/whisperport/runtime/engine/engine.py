"""A loaded bundle: its programs and tables, which do not change after loading. Uses numpy only.

`in_standard_form` runs a program of the `rank4` variant as one of the usual form. The two forms differ in
leading axes of size 1 only, so an array of one form is a view of an array of the other: no input, no part
of a cache and no output is copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import final

import numpy as np

from whisperport.errors import BundleError
from whisperport.program.bundle import Bundle, Manifest
from whisperport.program.bundle.origin import is_trusted
from whisperport.program.dims import Dims
from whisperport.program.generation import Generation
from whisperport.program.masks import MASKED
from whisperport.program.program_kind import (
    COARSE_PROJECTION,
    CROSS_KV,
    ENCODER,
    PREFILL,
    UNCACHED_DECODER,
    VOCAB_PROJECTION,
)
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.signatures import CacheForm, form_of, standard_form
from whisperport.program.window import UNVERIFIED, ShortWindows, Window
from whisperport.runtime.engine.adapters import (
    AdaptedRunner,
    AdapterMatrices,
    matrices_for,
    no_adapter,
)
from whisperport.runtime.engine.coarse import CoarseProjection
from whisperport.runtime.engine.finite import check_outputs
from whisperport.runtime.engine.loading import load_runners
from whisperport.runtime.engine.scores import Floats
from whisperport.runtime.engine.uncached_decoder import UncachedDecoder
from whisperport.targets import RunOptions, get_target
from whisperport.targets.target_options import by_target

RunnerWrapper = Callable[[Runner], Runner]
"""Wraps a runner in another one, for example one that measures its time."""


class Engine:
    """The loaded programs and tables of a bundle. It has no state, so any number of threads may use it.

    `Decoder(engine)` holds the state of one call.

    Attributes:
        audio_frames: mel frames of 10 ms in a window that may hold audio.
        latest_timestamp: the last timestamp of a window, in units of 20 ms; None: no limit.
        batch_step: the program `step_B`, which decodes a token of each of B texts; None: there is none.
        short_caches: whether all programs read caches with room for few tokens.
        short_windows: the windows that may be shorter; None: none may.
        coarse: computes coarse logits of hidden states; None: the bundle has no program for that.
    """

    def __init__(
        self,
        dims: Dims,
        generation: Generation,
        runners: Mapping[str, Runner],
        embedding: Array,
        positions: Array,
        window: Window | None = None,
        masks: Mapping[str, float] | None = None,
        short_windows: ShortWindows | None = None,
        silence: Array | None = None,
    ) -> None:
        """
        Args:
            dims: sizes of the checkpoint.
            generation: special token ids and suppressed tokens.
            runners: loaded programs by name.
            embedding: token embedding, (V, d) float32 or float16.
            positions: position embedding of the decoder, (N, d) float32 or float16.
            window: the bundle's window; None: the checkpoint's own of 30 s.
            masks: program -> number that hides a token from it; other programs: -30000. Default: None,
                -30000 for all programs.
            short_windows: lengths that the programs may read; they are ignored if a program can read only
                one. Default: None, none.
            silence: the encoder's output for a window of silence, (T, d) float32 or float16; None: the
                encoder computes it before the first short window.

        Raises:
            BundleError: a program is missing.
        """
        self.dims = dims
        self.window = window
        self._runners = runners
        self.audio_frames = 2 * window.audio_positions if window else dims.n_frames
        self.latest_timestamp = window.audio_positions if window else None
        self.generation = generation
        self._use(runners)
        self.cache_form = CacheForm(**form_of(self.step.spec, dims, window))
        decoding = [self.step, self.align, *self._prefills.values()]
        if self.batch_step is not None:
            decoding.append(self.batch_step)
        self.short_caches = all(runner.free_axes for runner in decoding)
        can_be_short = window is None and self.encoder.free_axes and self.cross_kv.free_axes
        self.short_windows = short_windows if can_be_short else None
        self._silence = silence
        self._uncached = runners.get(UNCACHED_DECODER)
        self._masks = dict(masks or {})
        self._embedding = embedding
        self._positions = positions
        coarse = runners.get(COARSE_PROJECTION)
        self.coarse = CoarseProjection(coarse, embedding, self.project) if coarse else None

    def adapted(self, adapter: AdapterMatrices) -> "Engine":
        """Return an engine with an adapter: the same programs and tables, in the same memory.

        Its windows have the checkpoint's length, because shorter ones were verified without the adapter.

        Args:
            adapter: for the bundle that this engine runs.
        """
        engine = copy(self)
        engine._use(
            {
                name: runner.adapted(adapter) if isinstance(runner, AdaptedRunner) else runner
                for name, runner in self._runners.items()
            }
        )
        engine.short_windows = None
        return engine

    def _use(self, runners: Mapping[str, Runner]) -> None:
        """Run these programs, by name."""
        self.encoder = _of_each_length(runners, ENCODER)
        runners = {name: in_standard_form(runner) for name, runner in runners.items()}
        self.cross_kv = _of_each_length(runners, CROSS_KV)
        self.step = _required(runners, "step")
        self.align = _required(runners, "align")
        self._prefills = _prefills(runners)
        results = {
            out.name for r in (self.step, *self._prefills.values()) for out in r.spec.outputs
        }
        self._projection = _required(runners, VOCAB_PROJECTION) if "hidden" in results else None
        self.batch_step = _batch_step(runners)

    def uncached_decoder(self) -> UncachedDecoder | None:
        """Return the decoder without KV cache; None if the bundle has none.

        It is for measuring what a cache saves, and for verifying the program.
        """
        return (
            UncachedDecoder(self._uncached, self._embedding, self._positions)
            if self._uncached
            else None
        )

    def encode(self, mel: Floats) -> Floats:
        """Run the encoder on one window. Its input may be 3-D or channels-first 4-D.

        Args:
            mel: log-mel spectrogram, (n_mels, 2T) float32; T is a number of `positions_for`.

        Returns:
            Features (T, d).

        Raises:
            NumericalError: the encoder returned a NaN or an infinity.
        """
        (tensor,) = self.encoder.spec.inputs
        batch = mel[None] if len(tensor.shape) == 3 else mel[None, :, None]
        outputs = self.encoder.run({tensor.name: np.ascontiguousarray(batch)})
        check_outputs("encoder", outputs)
        features: Floats = outputs["features"][0]
        return features

    def positions_for(self, n_frames: int) -> int:
        """Return the positions of the shortest window for mel frames of audio after which there is none."""
        shortest = self.short_windows.shortest(n_frames) if self.short_windows else None
        return min(shortest or self.dims.n_audio_ctx, self.dims.n_audio_ctx)

    @cached_property
    def silence(self) -> Floats:
        """The encoder's output for a window of silence, (T, d)."""
        if self._silence is not None:
            return self._silence.astype(np.float32)
        return self.encode(np.zeros((self.dims.n_mels, self.dims.n_frames), np.float32))

    def mask_of(self, runner: Runner) -> float:
        """Return the number that the mask of a program adds to the scores of hidden tokens."""
        return self._masks.get(runner.spec.name, MASKED)

    @property
    def step_mask(self) -> float:
        """The number that hides a token from `step` and from `step_B`, which read the same masks."""
        runners = [self.step] if self.batch_step is None else [self.step, self.batch_step]
        return min(map(self.mask_of, runners))

    @property
    def batch_size(self) -> int:
        """How many texts can be decoded together; 1 if the bundle has no program for that."""
        return 1 if self.batch_step is None else self.batch_step.spec.kind.batch

    def prefill_for(self, count: int) -> tuple[Runner, int]:
        """Return the smallest prefill program that reads `count` tokens in one run, and its size P.

        If no program is large enough, the largest is returned.
        """
        fitting = [rows for rows in self._prefills if rows >= count]
        rows = min(fitting) if fitting else max(self._prefills)
        return self._prefills[rows], rows

    def embed_tokens(self, tokens: Sequence[int], start: int) -> Floats:
        """Return embedding plus position of P tokens from position `start` on, (P, d) float32."""
        rows: Floats = self._embedding[list(tokens)].astype(np.float32)
        rows += self._positions[start : start + len(tokens)]
        return rows

    def embed_token(self, token: int, position: int, row: Floats) -> None:
        """Write embedding plus position of one token to `row`, (d,) float32."""
        np.add(self._embedding[token], self._positions[position], out=row, dtype=np.float32)

    def logits_from(self, outputs: Mapping[str, Array]) -> Floats:
        """Return the logits (R, V) of the outputs of `step` or `prefill`, which the caller may change.

        A program that returns hidden states in place of logits is followed by `vocab_projection`.

        Raises:
            NumericalError: the hidden states or their logits contain a NaN or an infinity.
        """
        logits: Floats | None = outputs.get("logits")
        return self.project(outputs["hidden"][0]) if logits is None else logits

    def project(self, hidden: Floats) -> Floats:
        """Run the program `vocab_projection` on each of the hidden states (R, d): logits (R, V).

        Raises:
            ValueError: the bundle has no such program.
            NumericalError: the program returned a NaN or an infinity.
        """
        if self._projection is None:
            raise ValueError(f"the bundle has no program {VOCAB_PROJECTION!r}")
        rows: list[Floats] = []
        for row in hidden:
            outputs = self._projection.run({"hidden": row[None, None]})
            check_outputs(VOCAB_PROJECTION, outputs)
            pieces = [piece[0] for piece in outputs.values()]
            rows.append(pieces[0] if len(pieces) == 1 else np.concatenate(pieces, axis=1))
        return rows[0] if len(rows) == 1 else np.concatenate(rows)

    @property
    def projects(self) -> bool:
        """Whether the vocabulary projection is a program of its own."""
        return self._projection is not None

    def logits_of(self, rows: Floats) -> Floats:
        """Multiply hidden states (S, d) by the embedding: logits (S, V)."""
        logits: Floats = rows @ self._embedding.astype(np.float32, copy=False).T
        return logits


def load_engine(
    bundle: Bundle,
    options: RunOptions | None = None,
    wrap_runner: RunnerWrapper = lambda runner: runner,
    *,
    encoder: bool = True,
) -> Engine:
    """Load every program of a bundle with its target's runtime.

    The programs of a bundle of unknown origin first pass a trial run; see `runtime/trial.py`.

    Args:
        bundle: an open bundle.
        options: threads, trust and the targets' options; None: defaults.
        wrap_runner: called with each runner; returns the runner that the engine uses.
        encoder: False does not load the encoder, whose output then comes from elsewhere.

    Raises:
        MissingPackageError: a target's runtime is not installed.
        BundleError: a program is missing, cannot be read, or failed its trial run; or the bundle was
            replaced while it was loaded.
        UsageError: no target of the bundle has one of the options, or its value is out of range.
    """
    manifest, options = bundle.manifest, options or RunOptions()
    names = tuple(dict.fromkeys(entry.target for entry in manifest.programs))
    by_target(
        options.options, {name: get_target(name).run_options for name in names}
    )  # checks them
    if not (options.trust or is_trusted(bundle)):
        from whisperport.runtime.engine.trial import ensure_tried  # starts processes; seldom needed

        ensure_tried(bundle, options)
    short = None if options.adapter else _short_windows(manifest, options)
    options = replace(options, short_windows=short is not None)
    with bundle.unchanged():
        loaded = load_runners(bundle, options, encoder=encoder)
        used = {name: wrap_runner(runner) for name, runner in loaded.items()}
        if manifest.adapters or options.adapter:
            used = _with_adapter(used, manifest, options)
        # As plain arrays: indexing an `np.memmap` takes several times as long.
        embedding, positions = np.asarray(bundle.embedding()), np.asarray(bundle.positions())
        silence = bundle.silence() if short else None
    return Engine(
        manifest.dims,
        manifest.generation,
        used,
        embedding,
        positions,
        window=manifest.window,
        masks={entry.spec.name: entry.placement.mask for entry in manifest.programs},
        short_windows=short,
        silence=silence,
    )


def _with_adapter(
    runners: Mapping[str, Runner], manifest: Manifest, options: RunOptions
) -> dict[str, Runner]:
    """Return the programs with the adapter of the options, or with none."""
    folder, dims, low_rank = options.adapter, manifest.dims, manifest.adapters
    read = matrices_for(folder, manifest) if folder else None
    assert low_rank
    adapter = read or no_adapter(dims, low_rank)
    return {
        name: AdaptedRunner(runner, dims, low_rank, adapter)
        if adapter.inputs(name, dims, low_rank)
        else runner
        for name, runner in runners.items()
    }


def _short_windows(manifest: Manifest, options: RunOptions) -> ShortWindows | None:
    """Return the short windows that a user allows: those that the bundle verified, if any."""
    if options.short_windows is None:
        return manifest.short_windows
    lengths = manifest.lengths
    unverified = replace(UNVERIFIED, positions=lengths) if lengths else UNVERIFIED
    return (manifest.short_windows or unverified) if options.short_windows else None


def _required(runners: Mapping[str, Runner], name: str) -> Runner:
    if name not in runners:
        raise BundleError(
            f"the bundle has no program `{name}`",
            why=f"its programs are: {', '.join(sorted(runners)) or 'none'}",
            hint="export the bundle again",
        )
    return runners[name]


def _of_each_length(runners: Mapping[str, Runner], name: str) -> Runner:
    """Return a program of audio; it reads each length for which there is a program of its own, too."""
    longest = _required(runners, name)
    shorter = [r for r in runners.values() if r.spec.kind.positions and r.spec.kind.name == name]
    return _LengthsRunner(longest, shorter) if shorter else longest


@final
class _LengthsRunner(Runner):
    """A program of audio over one program for each length of audio."""

    def __init__(self, longest: Runner, shorter: Sequence[Runner]) -> None:
        super().__init__(longest.spec, nullcontext())  # each program has its own lock
        runners = (*shorter, longest)
        self._by_shape = {runner.spec.inputs[0].shape: runner for runner in runners}
        self._shapes: dict[str, set[tuple[int, ...]]] = {}
        for tensor in (t for r in runners for t in (*r.spec.inputs, *r.spec.outputs)):
            self._shapes.setdefault(tensor.name, set()).add(tensor.shape)
        self.free_axes = {name: _free_axis(shapes) for name, shapes in self._shapes.items()}

    def _fits(self, name: str, stated: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return shape in self._shapes[name]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        runner = self._by_shape[inputs[0].shape]
        return [*runner.run({runner.spec.inputs[0].name: inputs[0]}).values()]


def _free_axis(shapes: Iterable[tuple[int, ...]]) -> int:
    """Return the axis in which shapes differ."""
    return next(axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len({*sizes}) > 1)


def _batch_step(runners: Mapping[str, Runner]) -> Runner | None:
    """Return the program `step_B` with the most rows; None if there is none."""
    batched = [runner for runner in runners.values() if runner.spec.kind.is_batch]
    return max(batched, key=lambda runner: runner.spec.kind.batch, default=None)


def _prefills(runners: Mapping[str, Runner]) -> dict[int, Runner]:
    """Return every `prefill_P` program by P, the number of tokens that it reads in one run."""
    kinds = {runner.spec.kind: runner for runner in runners.values()}
    prefills = {kind.tokens: runner for kind, runner in kinds.items() if kind.name == PREFILL}
    if not prefills:
        _required(runners, f"{PREFILL}_P")
    return prefills


def in_standard_form(runner: Runner) -> Runner:
    """Return a runner whose signature is in the usual form: `runner` itself if its signature is."""
    spec = standard_form(runner.spec)
    return runner if spec == runner.spec else _StandardRunner(runner)


@final
class _StandardRunner(Runner):
    """A runner of the usual form, over one whose arrays have further leading axes."""

    def __init__(self, inner: Runner) -> None:
        super().__init__(standard_form(inner.spec), inner.run_lock)
        self.inner = inner
        self.given = [tensor.shape for tensor in inner.spec.inputs]
        self._returned = [tensor.shape for tensor in self.spec.outputs]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        reshaped = [array.reshape(shape) for array, shape in zip(inputs, self.given, strict=True)]
        return self.returned(self.inner._run(reshaped))

    def binding(self) -> Binding:
        return _StandardBinding(self)

    def returned(self, outputs: Sequence[Array]) -> list[Array]:
        """Check the outputs of the inner runner, and return them in the usual form."""
        checked = self.inner.named(outputs).values()
        return [array.reshape(shape) for array, shape in zip(checked, self._returned, strict=True)]


@final
class _StandardBinding(Binding):
    """A binding that binds views of its arrays to the inner runner."""

    def __init__(self, runner: _StandardRunner) -> None:
        super().__init__(runner)
        self._standard, self._inner = runner, runner.inner.binding()
        self._given: list[Array | None] = [None] * len(runner.given)
        ranks = zip(runner.inner.spec.inputs, runner.spec.inputs, strict=True)
        self._leading = {
            own.name: (slice(None),) * (len(inner.shape) - len(own.shape)) for inner, own in ranks
        }

    @property
    def copies(self) -> bool:
        return self._inner.copies

    def changed(self, name: str, part: Part) -> None:
        self._inner.changed(name, (*self._leading[name], *part))

    def _bind(self, name: str, array: Array) -> None:
        index = self._index[name]
        self._given[index] = view = array.reshape(self._standard.given[index])
        self._inner.bind(name, view)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        reshaped: list[Array] = [
            inputs[index].reshape(self._standard.given[index]) if array is None else array
            for index, array in enumerate(self._given)
        ]
        return self._standard.returned(self._inner._run(reshaped))
