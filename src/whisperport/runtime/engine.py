"""One window of sound and its decoder state, over the runners of a bundle; numpy only."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy

import numpy as np

from whisperport.bundle import Bundle
from whisperport.dims import Dims
from whisperport.errors import BundleError, UsageError
from whisperport.generation import Generation
from whisperport.runner import Array, Runner
from whisperport.runtime.cache import Cache, Floats
from whisperport.runtime.without_cache import WithoutCache
from whisperport.targets import RunOptions, get_target
from whisperport.window import Window

PREFILL = "prefill_"
FULL = "decode_full"

Around = Callable[[Runner], Runner]
"""Puts a runner around another: one that times it, for instance."""


class Engine:
    """Runs a bundle's programs and owns the state between them.

    Use: `listen` to a window, then `prefill` the prompt, then `step` token by token. The next
    `listen` forgets everything.
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
        self.sound_frames = 2 * window.sound if window else dims.n_frames  # of 10 ms, in a window
        self.latest_timestamp = window.sound if window else None  # of 20 ms; None: no limit
        self.generation = generation
        self.cache = Cache(dims)
        self._embedding = embedding
        self._positions = positions
        self._encoder = _required(runners, "encoder")
        self._cross_kv = _required(runners, "cross_kv")
        self._step = _required(runners, "step")
        self._align = _required(runners, "align")
        self._prefills = _prefills(runners)
        self._sound: dict[str, Floats] = {}
        self._full = runners.get(FULL)

    def twin(self) -> "Engine":
        """Another engine over the same runners, with a state of its own."""
        twin = copy(self)
        twin.cache, twin._sound = Cache(self.dims), {}
        return twin

    def without_cache(self) -> WithoutCache | None:
        """The same decoder without a cache, where the bundle has it: for measuring, and verifying it."""
        return WithoutCache(self._full, self._embedding, self._positions) if self._full else None

    def encode(self, mel: Floats) -> Floats:
        """mel (n_mels, 2T) to features (T, d); the encoder may take it as an image of one row."""
        (wanted,) = self._encoder.spec.inputs
        whole = mel[None] if len(wanted.shape) == 3 else mel[None, :, None]
        inputs = {wanted.name: np.ascontiguousarray(whole)}
        features: Floats = self._encoder.run(inputs)["features"][0]
        return features

    def listen(self, features: Floats) -> None:
        """Take features (T, d) as the sound to be decoded, and forget every token."""
        self._sound = {}  # not in memory twice: half a gigabyte of large-v3
        self._sound = self._cross_kv.run({"features": np.ascontiguousarray(features[None])})
        self.cache.clear()

    def prefill(
        self, tokens: Sequence[int], *, also: int = 0, cache: Cache | None = None
    ) -> tuple[Floats, Floats]:
        """Decode a prompt at once.

        Args:
            tokens: ids; together with those before they fit the cache.
            also: index of a second token whose logits are wanted.
            cache: what came before, and takes the new rows; None: the engine's own.

        Returns:
            Logits (V,) after the last token, and logits (V,) after token `also`.

        Raises:
            ValueError: no tokens, or more than the cache has room for.
        """
        if not 0 <= also < len(tokens):
            raise ValueError(f"`also` is {also}; the prompt has {len(tokens)} tokens")
        cache = cache or self.cache
        done, second = 0, None
        last: Floats
        while done < len(tokens):
            runner, rows = self._prefill_for(len(tokens) - done)
            count = min(rows, len(tokens) - done)
            wanted = also - done if 0 <= also - done < count else 0
            piece = tokens[done : done + count]
            if len(piece) == 1:  # a step is half of the smallest prefill
                last = self.step(piece[0], cache)
                picked = last.copy()
            else:
                last, picked = self._prefill_piece(runner, rows, piece, wanted, cache)
            if 0 <= also - done < count:
                second = picked
            done += count
        assert second is not None
        return last, second

    def step(self, token: int, cache: Cache | None = None) -> Floats:
        """Decode one token after those of `cache` (None: the engine's own), which takes its row.

        Returns logits (V,), which the caller may change.

        Raises:
            ValueError: the cache is full.
        """
        cache = cache or self.cache
        inputs = {"x": self._rows([token], cache), "mask": cache.mask(1)}
        outputs = self._step.run({**inputs, **cache.arrays, **self._sound})
        cache.store(outputs, 1)
        logits: Floats = outputs["logits"][0]
        return logits

    def align(self, tokens: Sequence[int]) -> tuple[Floats, Floats]:
        """Read tokens from the first on, and see where in the sound the alignment heads look.

        Forgets what was decoded of this window; the sound stays.

        Returns:
            Scores (A, S, T) before the softmax, and rows (S, d) that the embedding turns into logits.

        Raises:
            ValueError: no tokens, or more than the cache has room for.
        """
        if not tokens:
            raise ValueError("no tokens to align")
        self.cache.clear()
        size = self._align.spec.inputs[0].shape[1]
        scores, rows = [], []
        for start in range(0, len(tokens), size):
            piece = tokens[start : start + size]
            inputs = {"x": self._padded(piece, size, self.cache), "mask": self.cache.mask(size)}
            outputs = self._align.run({**inputs, **self.cache.arrays, **self._sound})
            self.cache.store(outputs, len(piece))
            scores.append(outputs["scores"][:, : len(piece)])
            rows.append(outputs["rows"][0, : len(piece)])
        return np.concatenate(scores, axis=1), np.concatenate(rows)

    def logits_of(self, rows: Floats) -> Floats:
        """Logits (S, V) of rows (S, d), through the embedding."""
        logits: Floats = rows @ self._embedding.astype(np.float32, copy=False).T
        return logits

    def _prefill_for(self, count: int) -> tuple[Runner, int]:
        """The smallest prefill that takes `count` tokens at once, or the largest there is."""
        fitting = [rows for rows in self._prefills if rows >= count]
        rows = min(fitting) if fitting else max(self._prefills)
        return self._prefills[rows], rows

    def _prefill_piece(
        self, runner: Runner, rows: int, tokens: Sequence[int], wanted: int, cache: Cache
    ) -> tuple[Floats, Floats]:
        x = self._padded(tokens, rows, cache)
        pick = np.zeros((1, 2, rows), np.float32)
        pick[0, 0, len(tokens) - 1] = pick[0, 1, wanted] = 1
        inputs = {"x": x, "mask": cache.mask(rows), "pick": pick}
        outputs = runner.run({**inputs, **cache.arrays, **self._sound})
        cache.store(outputs, len(tokens))
        return outputs["logits"][0], outputs["logits"][1]

    def _padded(self, tokens: Sequence[int], rows: int, cache: Cache) -> Floats:
        """As `_rows`, followed by zeros: (1, rows, d)."""
        x = np.zeros((1, rows, self.dims.n_text_state), np.float32)
        x[:, : len(tokens)] = self._rows(tokens, cache)
        return x

    def _rows(self, tokens: Sequence[int], cache: Cache) -> Floats:
        """Embedding plus position of the next tokens: (1, P, d) float32."""
        start = cache.length
        if start + len(tokens) > cache.rows:
            raise ValueError(f"{start + len(tokens)} tokens do not fit {cache.rows} positions")
        rows = self._embedding[list(tokens)].astype(np.float32)
        rows += self._positions[start : start + len(tokens)]
        return rows[None]


def load_engine(
    bundle: Bundle, options: RunOptions | None = None, around: Around = lambda runner: runner
) -> Engine:
    """Load every program of a bundle on its own target.

    Args:
        around: given every runner, returns the one that the engine uses.

    Raises:
        MissingPackageError: a target's runtime is not installed.
        BundleError: a program is missing or cannot be read.
        UsageError: an option that no target of the bundle has.
    """
    manifest, options = bundle.manifest, options or RunOptions()
    names = tuple(dict.fromkeys(entry.target for entry in manifest.programs))
    _check_options(options, names)
    runners: dict[str, Runner] = {}
    for name in names:
        entries = [entry for entry in manifest.programs if entry.target == name]
        runners |= get_target(name).load(bundle.folder, entries, options)
    used = {name: around(runner) for name, runner in runners.items()}
    return Engine(
        manifest.dims,
        manifest.generation,
        used,
        bundle.embedding(),
        bundle.positions(),
        manifest.window,
    )


def _check_options(options: RunOptions, targets: Sequence[str]) -> None:
    """Every option is one that some target of the bundle knows."""
    known = sorted(set().union(*(get_target(name).spec.run_options for name in targets)))
    unknown = [name for name in options.options if name not in known]
    if unknown:
        raise UsageError(
            f"no target of this bundle has a run option `{unknown[0]}`",
            hint=f"{', '.join(targets)}: {', '.join(known) or 'no options'}",
        )


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
