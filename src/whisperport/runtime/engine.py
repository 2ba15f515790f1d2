"""A loaded bundle: its programs and tables, which nothing changes after loading; numpy only."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from whisperport.bundle import Bundle
from whisperport.checks import UNCACHED_DECODER
from whisperport.dims import Dims
from whisperport.errors import BundleError
from whisperport.generation import Generation
from whisperport.runner import Array, Runner
from whisperport.runtime.cache import Floats
from whisperport.runtime.decoder import Decoder
from whisperport.runtime.finite import check_outputs
from whisperport.runtime.trial import ensure_tried
from whisperport.runtime.uncached_decoder import UncachedDecoder
from whisperport.signatures import CacheForm, form_of
from whisperport.targets import RunOptions, get_target
from whisperport.targets.options import by_target
from whisperport.window import Window

PREFILL = "prefill_"

RunnerWrapper = Callable[[Runner], Runner]
"""Puts a runner around another: one that times it, for instance."""


class Engine:
    """The loaded programs and tables of a bundle. It holds no state, so any number of threads may use it.

    The state of one call is a `Decoder`, from `decoder()`.
    """

    def __init__(
        self,
        dims: Dims,
        generation: Generation,
        runners: Mapping[str, Runner],
        embedding: Array,
        positions: Array,
        window: Window | None = None,
    ) -> None:
        """
        Args:
            embedding: (V, d) float32 or float16.
            positions: of the decoder, (N, d) float32 or float16.
            window: where it is not the checkpoint's own.

        Raises:
            BundleError: a program is missing.
        """
        self.dims = dims
        self.window = window
        self.audio_frames = (
            2 * window.audio_positions if window else dims.n_frames
        )  # of 10 ms, in a window
        self.latest_timestamp = (
            window.audio_positions if window else None
        )  # of 20 ms; None: no limit
        self.generation = generation
        self.encoder = _required(runners, "encoder")
        self.cross_kv = _required(runners, "cross_kv")
        self.step = _required(runners, "step")
        self.align = _required(runners, "align")
        self.cache_form = CacheForm(**form_of(self.step.spec, dims, window))
        self._prefills = _prefills(runners)
        self._full = runners.get(UNCACHED_DECODER)
        self._embedding = embedding
        self._positions = positions

    def decoder(self) -> Decoder:
        """New decoder state over these programs: one for each call."""
        return Decoder(self)

    def uncached_decoder(self) -> UncachedDecoder | None:
        """The same decoder without a cache, where the bundle has it: for measuring, and verifying it."""
        return UncachedDecoder(self._full, self._embedding, self._positions) if self._full else None

    def encode(self, mel: Floats) -> Floats:
        """mel (n_mels, 2T) to features (T, d); the encoder may read it as channels-first 4-D.

        Raises:
            NumericalError: the encoder returned a NaN or an infinity.
        """
        (wanted,) = self.encoder.spec.inputs
        batch = mel[None] if len(wanted.shape) == 3 else mel[None, :, None]
        outputs = self.encoder.run({wanted.name: np.ascontiguousarray(batch)})
        check_outputs("encoder", outputs)
        features: Floats = outputs["features"][0]
        return features

    def prefill_for(self, count: int) -> tuple[Runner, int]:
        """The smallest prefill that reads `count` tokens in one run, or else the largest; and its P."""
        fitting = [rows for rows in self._prefills if rows >= count]
        rows = min(fitting) if fitting else max(self._prefills)
        return self._prefills[rows], rows

    def embed_tokens(self, tokens: Sequence[int], start: int) -> Floats:
        """Embedding plus position of tokens from position `start` on: (P, d) float32."""
        rows: Floats = self._embedding[list(tokens)].astype(np.float32)
        rows += self._positions[start : start + len(tokens)]
        return rows

    def logits_of(self, rows: Floats) -> Floats:
        """Logits (S, V) of rows (S, d), through the embedding."""
        logits: Floats = rows @ self._embedding.astype(np.float32, copy=False).T
        return logits


def load_engine(
    bundle: Bundle,
    options: RunOptions | None = None,
    wrap_runner: RunnerWrapper = lambda runner: runner,
) -> Engine:
    """Load every program of a bundle on its own target.

    The programs of a bundle of unknown origin first pass a trial run; see `runtime/trial.py`.

    Args:
        wrap_runner: given every runner, returns the one that the engine uses.

    Raises:
        MissingPackageError: a target's runtime is not installed.
        BundleError: a program is missing, cannot be read, or failed its trial run; or the bundle was
            replaced while it was loaded.
        UsageError: an option that no target of the bundle has.
    """
    manifest, options = bundle.manifest, options or RunOptions()
    names = tuple(dict.fromkeys(entry.target for entry in manifest.programs))
    _check_options(options, names)
    ensure_tried(bundle, options)
    with bundle.unchanged():
        used = {name: wrap_runner(runner) for name, runner in load_runners(bundle, options).items()}
        embedding, positions = bundle.embedding(), bundle.positions()
    return Engine(manifest.dims, manifest.generation, used, embedding, positions, manifest.window)


def load_runners(bundle: Bundle, options: RunOptions) -> dict[str, Runner]:
    """Load every program of a bundle on its own target, by its name, without a trial run.

    Raises:
        MissingPackageError: a target's runtime is not installed.
        BundleError: a program cannot be read.
    """
    programs = bundle.manifest.programs
    runners: dict[str, Runner] = {}
    for name in dict.fromkeys(entry.target for entry in programs):
        entries = [entry for entry in programs if entry.target == name]
        runners |= get_target(name).load(bundle.folder, entries, options)
    return runners


def _check_options(options: RunOptions, targets: Sequence[str]) -> None:
    """Raises UsageError for an option that no target of the bundle has, or a value out of range."""
    by_target(options.options, {name: get_target(name).run_options for name in targets})


def _required(runners: Mapping[str, Runner], name: str) -> Runner:
    if name not in runners:
        raise BundleError(
            f"the bundle has no program `{name}`",
            why=f"it has {', '.join(sorted(runners)) or 'none'}",
            hint="export it again",
        )
    return runners[name]


def _prefills(runners: Mapping[str, Runner]) -> dict[int, Runner]:
    """Rows taken at once -> program, for every `prefill_P`."""
    found = {
        runner.spec.inputs[0].shape[1]: runner
        for name, runner in runners.items()
        if name.startswith(PREFILL)
    }
    if not found:
        _required(runners, f"{PREFILL}P")
    return found
