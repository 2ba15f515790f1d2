"""Whether a checkpoint is larger than what was ever compiled, and what compiling it would take."""

from whisperport.dims import Dims

# Weights of Whisper's encoders without positions. Hailo's toolkit compiles these two and no other.
TINY_WEIGHTS, BASE_WEIGHTS = 7_632_384, 19_822_592

# Of tiny's encoder at 10 s, compiled on a CPU: 7 to 9 contexts, about 21 minutes to partition them.
# Source: ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab, the log in its notebook.
TINY_CONTEXTS, TINY_MINUTES = 8, 21


def too_large(dims: Dims) -> str:
    """Empty up to base's encoder; else an estimate, scaled from tiny's by the number of weights."""
    weights = dims.encoder_weights
    if weights <= BASE_WEIGHTS:
        return ""
    times = weights / TINY_WEIGHTS
    return (
        f"its encoder has {weights / 1e6:.1f} million weights, and the largest known to compile "
        f"{BASE_WEIGHTS / 1e6:.1f}; scaled from the log of tiny's, it would take about "
        f"{TINY_CONTEXTS * times:.0f} contexts, and {TINY_MINUTES * times / 60:.1f} hours to partition them"
    )
