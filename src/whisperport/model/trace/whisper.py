"""The programs of a Whisper model before they are traced; `variants.py` has the table of them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from whisperport.model.network.coarse_projection import CoarseProjection
from whisperport.model.network.decoder import (
    Align,
    BatchDecode,
    CrossKV,
    Decode,
    Prefill,
    VocabProjection,
)
from whisperport.model.network.encoder import NchwEncoder
from whisperport.model.network.low_rank import Adaptable
from whisperport.model.network.rank4 import Rank4CrossKV, Rank4Decode, Rank4Prefill, UncachedDecoder
from whisperport.model.network.short_window import PaddedCrossKV
from whisperport.model.network.whisper import Whisper
from whisperport.model.trace.program import Untraced
from whisperport.program.dims import Dims
from whisperport.program.low_rank import LowRank, adapted_layers
from whisperport.program.program_kind import kind_of
from whisperport.program.signatures import LOGSUMEXP, PICKED_ROWS
from whisperport.program.spec import UncachedForm

ALIGN_TOKENS = 64  # tokens of a window's text per run of `align`


@dataclass(frozen=True, slots=True)
class Parts:
    """The model and the settings that programs are traced from."""

    model: Whisper
    alignment_heads: Sequence[tuple[int, int]]  # (decoder layer, head); at least one
    uncached: UncachedForm | None = None  # for the decoder without KV cache only
    projected: bool = True  # False: `step` and `prefill` return what `vocab_projection` reads
    batch_projected: bool = True  # False: `step_B` returns that too
    summed: frozenset[str] = frozenset()  # names of the programs that also return `logsumexp`
    low_rank: LowRank | None = None  # the adapters that the programs take as inputs

    @property
    def result(self) -> str:
        """Name of the first output of `step` and `prefill`."""
        return "logits" if self.projected else "hidden"

    def results(self, name: str, *, projected: bool) -> list[str]:
        """Return the names of what a program returns before the new keys and values."""
        if not projected:
            return ["hidden"]
        return ["logits", LOGSUMEXP] if name in self.summed else ["logits"]


def adaptable(parts: Parts, untraced: Untraced) -> Untraced:
    """Return a program with the matrices of an adapter as its last inputs, if it has layers for them."""
    if parts.low_rank is None:
        return untraced
    layers = adapted_layers(kind_of(untraced.name), parts.model.dims, parts.low_rank)
    if not layers:
        return untraced
    rank = parts.low_rank.rank
    a = [torch.zeros(1, layer.n_inputs, rank) for layer in layers]
    b = [torch.zeros(1, rank, layer.n_outputs) for layer in layers]
    module = Adaptable(untraced.module, parts.model, layers)
    return replace(untraced, module=module, inputs=(*untraced.inputs, a, b))


def encoder(parts: Parts) -> Untraced:
    """Return `encoder`: mel (1, n_mels, 2T) to features (1, T, d)."""
    mel = torch.zeros(1, parts.model.dims.n_mels, parts.model.dims.n_frames)
    return Untraced("encoder", parts.model.encoder, (mel,), ["features"])


def nchw_encoder(parts: Parts) -> Untraced:
    """Return `encoder` in its channels-first 4-D form: mel (1, n_mels, 1, 2T) to features (1, T, d)."""
    mel = torch.zeros(1, parts.model.dims.n_mels, 1, parts.model.dims.n_frames)
    return Untraced("encoder", NchwEncoder(parts.model.encoder), (mel,), ["features"])


def cross_kv(parts: Parts) -> Untraced:
    """Return `cross_kv`: features (1, T, d) to the cross-attention K/V of every decoder layer."""
    dims, decoder, padding = parts.model.dims, parts.model.decoder, parts.model.padding
    features = torch.zeros(1, dims.n_audio_ctx, dims.n_audio_state)
    module = CrossKV(decoder) if padding is None else PaddedCrossKV(decoder, padding)
    return Untraced("cross_kv", module, (features,), _layers(dims, "cross_k", "cross_v"))


def rank4_cross_kv(parts: Parts) -> Untraced:
    """Return `cross_kv` with rank-4 K/V: features (1, T, d) to K/V of every decoder layer."""
    dims = parts.model.dims
    features = torch.zeros(1, dims.n_audio_ctx, dims.n_audio_state)
    module = Rank4CrossKV(parts.model.decoder, parts.model.padding)
    return Untraced("cross_kv", module, (features,), _layers(dims, "cross_k", "cross_v"))


def prefill(parts: Parts, tokens: int, *, rank4: bool = False) -> Untraced:
    """Return `prefill_P` with P = `tokens` tokens per run; `rank4`: with attention of rank 4."""
    dims, pick = parts.model.dims, torch.zeros(1, PICKED_ROWS, tokens)
    (x, mask), caches = _tokens(dims, tokens), _caches(parts.model)
    inputs = (x, mask[None], pick, *_rank4(caches)) if rank4 else (x, mask, pick, *caches)
    name = f"prefill_{tokens}"
    names = [*parts.results(name, projected=parts.projected), *_layers(dims, "new_k", "new_v")]
    kind, summed = Rank4Prefill if rank4 else Prefill, LOGSUMEXP in names
    module = kind(parts.model.decoder, projected=parts.projected, summed=summed)
    return Untraced(name, module, inputs, names)


def step(parts: Parts) -> Untraced:
    """Return `step`: one token to its logits (1, V)."""
    dims = parts.model.dims
    inputs = (*_tokens(dims, 1), *_caches(parts.model))
    names = [*parts.results("step", projected=parts.projected), *_layers(dims, "new_k", "new_v")]
    summed = LOGSUMEXP in names
    module = Decode(parts.model.decoder, projected=parts.projected, summed=summed)
    return Untraced("step", module, inputs, names)


def rank4_step(parts: Parts) -> Untraced:
    """Return `step` with rank-4 K/V: one token to its logits (1, 1, V)."""
    dims = parts.model.dims
    x, mask = _tokens(dims, 1)
    inputs = (x, mask[None], *_rank4(_caches(parts.model)))
    names = [parts.result, *_layers(dims, "new_k", "new_v")]
    return Untraced(
        "step", Rank4Decode(parts.model.decoder, projected=parts.projected), inputs, names
    )


def batch_step(parts: Parts, rows: int) -> Untraced:
    """Return `step_B` with B = `rows`: one token of each of B texts to its logits (B, V)."""
    dims = parts.model.dims
    x = torch.zeros(rows, 1, dims.n_text_state)
    mask = torch.zeros(rows, 1, dims.n_text_ctx + 1)
    name = f"step_{rows}"
    projected = parts.batch_projected
    names = [*parts.results(name, projected=projected), *_layers(dims, "new_k", "new_v")]
    module = BatchDecode(parts.model.decoder, projected=projected, summed=LOGSUMEXP in names)
    return Untraced(name, module, (x, mask, *_caches(parts.model, rows)), names)


def align(parts: Parts) -> Untraced:
    """Return `align`: 64 tokens of a window's text to cross-attention scores of the alignment heads."""
    dims, heads = parts.model.dims, sorted(parts.alignment_heads)  # by layer: the order of scores
    inputs = (*_tokens(dims, ALIGN_TOKENS), *_caches(parts.model))
    names = ["rows", "scores", *_layers(dims, "new_k", "new_v")]
    return Untraced("align", Align(parts.model.decoder, heads), inputs, names)


def vocab_projection(parts: Parts, pieces: int = 1) -> Untraced:
    """Return `vocab_projection`: a hidden state (1, 1, d) to logits (1, 1, V), whole or in pieces."""
    hidden = torch.zeros(1, 1, parts.model.dims.n_text_state)
    names = [f"logits_{piece}" for piece in range(pieces)] if pieces > 1 else ["logits"]
    return Untraced(
        "vocab_projection", VocabProjection(parts.model.decoder, pieces), (hidden,), names
    )


def coarse_projection(parts: Parts) -> Untraced:
    """Return `coarse_projection`: a hidden state (1, 1, d) to logits (1, 1, V), and bounds (1, 1, V)."""
    hidden = torch.zeros(1, 1, parts.model.dims.n_text_state)
    module = CoarseProjection(parts.model.decoder)
    return Untraced("coarse_projection", module, (hidden,), ["logits", "bound"])


def uncached_decoder(parts: Parts) -> Untraced:
    """Return `uncached_decoder`, the decoder without KV cache: features and embeddings to logits in pieces.

    Raises:
        ValueError: `parts.uncached` is None.
    """
    dims, form = parts.model.dims, parts.uncached
    if form is None:
        raise ValueError("the decoder without KV cache needs `Parts.uncached`")
    features = torch.zeros(1, dims.n_audio_ctx, dims.n_audio_state)
    embeddings = torch.zeros(1, dims.n_text_state, *form.layout)
    names = [f"logits_{piece}" for piece in range(form.pieces)]
    module = UncachedDecoder(parts.model.decoder, form)
    return Untraced("uncached_decoder", module, (features, embeddings), names)


def _layers(dims: Dims, *names: str) -> list[str]:
    return [f"{name}_{layer}" for name in names for layer in range(dims.n_text_layer)]


def _tokens(dims: Dims, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.zeros(1, count, dims.n_text_state)
    return x, torch.zeros(1, count, dims.n_text_ctx + count)


def _rank4(caches: tuple[list[torch.Tensor], ...]) -> tuple[list[torch.Tensor], ...]:
    return tuple([tensor[None] for tensor in layers] for layers in caches)


def _caches(model: Whisper, rows: int = 1) -> tuple[list[torch.Tensor], ...]:
    dims = model.dims
    heads, width, cached = rows * dims.n_text_head, dims.text_head_width, dims.n_text_ctx
    cross = model.window.context_positions if model.window else dims.n_audio_ctx
    shapes = (
        (heads, width, cached),
        (heads, cached, width),
        (heads, width, cross),
        (heads, cross, width),
    )
    return tuple([torch.zeros(shape) for _ in range(dims.n_text_layer)] for shape in shapes)
