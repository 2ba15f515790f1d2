"""Check whether a checkpoint is larger than all that are known to compile, and estimate the time."""

from whisperport.program.dims import Dims

# Numbers of weights of Whisper's encoders, without positions. Hailo's toolkit compiles only these two.
TINY_WEIGHTS, BASE_WEIGHTS = 7_632_384, 19_822_592

# The encoder of tiny with a 10 s window has 7 to 9 contexts; partitioning took about 21 minutes on a CPU.
# Source: ktomanek/huggingface_whisper_to_hailo_conversion@fdf1aab, the log in its notebook.
TINY_CONTEXTS, TINY_MINUTES = 8, 21


def too_large(dims: Dims) -> str:
    """Return why an encoder is too large, with an estimate; "" up to the size of base.

    The estimate is proportional to the number of weights, starting from the log of tiny.
    """
    weights = dims.encoder_weights
    if weights <= BASE_WEIGHTS:
        return ""
    times = weights / TINY_WEIGHTS
    return (
        f"its encoder has {weights / 1e6:.1f} million weights; the largest that is known to compile has "
        f"{BASE_WEIGHTS / 1e6:.1f} million. In proportion to a log for tiny, it would need about "
        f"{TINY_CONTEXTS * times:.0f} contexts and {TINY_MINUTES * times / 60:.1f} hours to partition them"
    )
