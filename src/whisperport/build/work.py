"""What a Whisper model computes and reads, from its sizes: operations, weights and state.

One model uses R cores: each core computes ⌈H / R⌉ of the H heads, and 1 / R of each feed-forward block
(tensor parallel). Every core computes the convolutions and the vocabulary projection. With w = ⌈H / R⌉ · D,
f = ⌈F / R⌉ and s bytes per number, per core:

    encoder     operations  2·2T·d·3·mels + 2·T·d·3d + L·(8·T·d·w + 4·T²·w + 4·T·d·f) + K·4·T·d·w
                bytes       s · weights of the encoder and of the K cross-attention K/V projections
    one token   operations  B · (K·(12·d·w + 4·d·f) + 2·V·d + 4·K·w·(N + 1 + T))
                bytes       s · (weights of the decoder + B·2·K·w·(2N + T))

L and K are the layers of encoder and decoder, F is the width of a feed-forward block, and B the number of
texts that are decoded together; ARCHITECTURE.md defines the other letters. A token reads the whole
self-attention cache and writes it, because shapes are static. Softmax, norms, activations and the exchange
between cores are not counted.
"""

from typing import Literal

from whisperport.program.dims import Dims

Part = Literal["encoder", "token"]
BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes per number, by precision


def _shares(dims: Dims, cores: int) -> tuple[int, int, int, int]:
    """Return w and f of the encoder, and w and f of the decoder."""
    audio = -(-dims.n_audio_head // cores) * (dims.n_audio_state // dims.n_audio_head)
    text = -(-dims.n_text_head // cores) * dims.text_head_width
    return audio, -(-dims.n_audio_ffn // cores), text, -(-dims.n_text_ffn // cores)


def encoder_weights(dims: Dims, cores: int = 1) -> int:
    """Return the weights of the encoder and of the cross-attention K/V projections, of one core."""
    d = dims.n_audio_state
    w, f, _, _ = _shares(dims, cores)
    stem = 3 * dims.n_mels * d + d + 3 * d * d + d + dims.n_audio_ctx * d
    layer = 4 * d * w + 2 * w + d + 2 * d * f + f + d + 4 * d
    return stem + dims.n_audio_layer * layer + 2 * d + cross_kv_weights(dims, cores)


def cross_kv_weights(dims: Dims, cores: int = 1) -> int:
    """Return the weights of the cross-attention K/V projections, of one core."""
    w = _shares(dims, cores)[2]
    return dims.n_text_layer * (2 * dims.n_audio_state * w + w)


def decoder_weights(dims: Dims, cores: int = 1, *, program: str = "step") -> int:
    """Return the weights of one decode program, of one core. `align` has no vocabulary projection."""
    d = dims.n_text_state
    _, _, w, f = _shares(dims, cores)
    attention = 6 * d * w + 3 * w + 2 * d  # the bias of the output, d numbers, is in each of both
    layer = attention + 2 * d * f + f + d + 6 * d
    vocabulary = 0 if program == "align" else dims.n_vocab * d
    return dims.n_text_layer * layer + 2 * d + vocabulary


def state_numbers(dims: Dims, cores: int = 1) -> int:
    """Return the numbers in the self- and cross-attention K/V of one text, of one core."""
    w = _shares(dims, cores)[2]
    return 2 * dims.n_text_layer * w * (dims.n_text_ctx + dims.n_audio_ctx)


def encoder_operations(dims: Dims, cores: int = 1) -> int:
    """Return the operations of the encoder and of the cross-attention K/V projections, of one core."""
    d, t = dims.n_audio_state, dims.n_audio_ctx
    w, f, text, _ = _shares(dims, cores)
    stem = 2 * 2 * t * d * 3 * dims.n_mels + 2 * t * d * 3 * d
    layer = 8 * t * d * w + 4 * t * t * w + 4 * t * d * f
    return stem + dims.n_audio_layer * layer + dims.n_text_layer * 4 * t * d * text


def token_operations(dims: Dims, cores: int = 1) -> int:
    """Return the operations of one token of one text, of one core."""
    d = dims.n_text_state
    _, _, w, f = _shares(dims, cores)
    attended = dims.n_text_ctx + 1 + dims.n_audio_ctx
    layer = 12 * d * w + 4 * d * f + 4 * w * attended
    return dims.n_text_layer * layer + 2 * dims.n_vocab * d


def token_numbers(dims: Dims, cores: int = 1, batch: int = 1) -> int:
    """Return the numbers that one token of B texts reads and writes, of one core."""
    w = _shares(dims, cores)[2]
    moved = 2 * dims.n_text_layer * w * (2 * dims.n_text_ctx + dims.n_audio_ctx)
    return decoder_weights(dims, cores) + batch * moved


def attention_scores(dims: Dims) -> int:
    """Return the numbers of all softmaxes of the encoder."""
    return dims.n_audio_layer * dims.n_audio_head * dims.n_audio_ctx**2
