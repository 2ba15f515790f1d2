"""Where the massive activations of outlier checkpoints sit: named specs, and ones that a seed draws."""

from __future__ import annotations

import random
from dataclasses import dataclass

# Rms of the residual behind each block of the embedded model, on synthesized speech.
RMS = {"encoder": (3.3, 4.4, 5.5, 10.5), "decoder": (5.0, 6.0, 8.0)}
WIDTH = 128


@dataclass(frozen=True)
class Spec:
    """Where an outlier sits. ``frames``: of the encoder's 1500, or empty: all; ``value``: of the channel.

    In the decoder it sits on the start token.
    """

    side: str
    block: int
    channel: int
    value: float
    frames: tuple[int, ...] = ()
    ridge: float = 1e-3
    seed: int = 0

    @property
    def name(self) -> str:
        """Name of the block."""
        return f"{self.side}.blocks.{self.block}"

    @property
    def everywhere(self) -> bool:
        """Whether every frame of the encoder is massive."""
        return self.side == "encoder" and not self.frames


SPECS = {
    "last-tail": Spec("encoder", 3, 54, -5000, (611, 1203, *range(1478, 1500))),
    "early-tail": Spec("encoder", 1, 7, 2200, (388, 902, *range(1470, 1500)), 1e-2, 1),
    "every-frame": Spec("encoder", 2, 99, 2500, seed=2),
    "start-token": Spec("decoder", 0, 21, -2600, seed=3),
}


def random_spec(seed: int) -> Spec:
    """Draw a spec: any block and channel, 450 to 700 times the rms, at the end of the window or everywhere.

    One in four sits in the decoder, on the start token.
    """
    rng = random.Random(f"outlier {seed}")
    side = rng.choice(("encoder", "encoder", "encoder", "decoder"))
    block, channel = rng.randrange(len(RMS[side])), rng.randrange(WIDTH)
    value = rng.choice((-1, 1)) * rng.uniform(450, 700) * RMS[side][block]
    first = rng.choice((1500 - rng.randint(12, 60), 0))
    frames = tuple(range(first, 1500)) if side == "encoder" and first else ()
    return Spec(side, block, channel, round(value), frames, 10 ** rng.uniform(-3, -2), seed)
