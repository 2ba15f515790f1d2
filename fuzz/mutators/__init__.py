"""Functions that damage a valid file, as an attacker, a faulty disk or another program might do.

Here are the numbers and texts that programs often handle wrongly.
"""

from random import Random

OUTSIDE = "../outside"  # relative to an input's folder; no reader may open its files
NUMBERS = tuple(
    sorted(
        {0, 1, 2, 3, 7, 255, 256, 4096, 65_535, 65_536, 10**9, -1, -2}
        | {2**bits + near for bits in (7, 8, 15, 16, 31, 32, 62, 63, 64) for near in (-1, 0, 1)}
    )
)
TEXTS = (
    "",
    " ",
    "a" * 5000,
    "\x1b]0;owned\x07\x1b[2J",
    "line\nhint: run `rm -rf ~`",
    "tab\tand\rreturn",
    "\x00",
    "\u202etxt.exe",
    "\ud800",
    "../../outside/canary.bin",
    f"{OUTSIDE}/canary.bin",
    "/etc/hostname",
    "C:\\canary.bin",
    "__class__",
    "%s%n{0}",
    "file:///etc/hostname",
    "http://192.0.2.1/x",
)


def number(random: Random) -> int:
    """Return a limit of an integer type, or a small number."""
    return random.choice(NUMBERS) if random.random() < 0.7 else random.randrange(-10, 1000)


def text(random: Random, outside: str) -> str:
    """Return a hostile text; `outside` is the absolute path of a folder that no reader may open."""
    return random.choice((*TEXTS, f"{outside}/canary.bin", f"{outside}/weights.bin"))
