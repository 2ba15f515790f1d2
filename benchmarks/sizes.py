"""Sizes of Whisper's checkpoints, for models with random weights."""

SIZES = {  # width, heads, layers
    "tiny": (384, 6, 4),
    "base": (512, 8, 6),
    "small": (768, 12, 12),
    "medium": (1024, 16, 24),
    "large-v2": (1280, 20, 32),
    "turbo-narrowed": (640, 10, 32),  # turbo's depth at half of its width
}
DECODER_LAYERS = {"turbo-narrowed": 4}  # where encoder and decoder differ
