"""Pickles and files of torch.save that ask for code, or for tensors that lie about their size."""

import io
import os
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

PROOF = "pickle-ran"  # a file that hostile code would make in the folder outside


class Call:
    """Pickled as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def hostile_call(random: Random, outside: str) -> Call:
    """Something that would leave a file outside if it ran."""
    proof = os.path.join(outside, PROOF)
    return random.choice(
        (
            Call(os.system, f"touch {proof}"),
            Call(open, proof, "w"),
            Call(eval, f"open({proof!r}, 'w')"),
            Call(exec, f"open({proof!r}, 'w')"),
            Call(os.mkdir, proof),
            Call(__import__, "antigravity"),
            Call(bytearray, 10**11),
        )
    )


def hostile_tensor(random: Random) -> Any:
    """A tensor that is not a plain dense one on the CPU, or larger than what is stored."""
    import torch

    tiny = torch.zeros(1)
    return random.choice(
        (
            lambda: tiny.expand(10**11),
            lambda: tiny.as_strided((70, 16), (0, 0)),
            lambda: torch.zeros(70, 16, device="meta"),
            lambda: torch.zeros(70, 16).to_sparse(),
            lambda: torch.zeros(70, 16).to_sparse_csr(),
            lambda: torch.quantize_per_tensor(torch.zeros(70, 16), 1.0, 0, torch.qint8),
            lambda: torch.full((70, 16), float("nan")),
            lambda: torch.zeros(70, 16, dtype=torch.complex64),
            lambda: torch.zeros(70, 16, dtype=torch.int64),
            lambda: torch.zeros((0, 16)),
            lambda: torch.zeros([1] * 60),
            lambda: torch.zeros(70, 16, dtype=torch.float8_e4m3fn),
            lambda: torch.nn.Parameter(torch.zeros(70, 16)),
        )
    )()


def hours_to_hash() -> bytes:
    """A pickle of {name: 1}: the name is a tuple of the same two tuples, and so on, forty levels deep."""
    levels = (b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(40))
    return b"\x80\x02}(X\x01\x00\x00\x00aq\x00" + b"".join(levels) + b"K\x01u."


def saved(value: Any, random: Random) -> bytes:
    """By torch.save, as a zip archive or in the format from before there was one."""
    import torch

    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=random.random() < 0.8)
    return file.getvalue()


def pickled(value: Any, random: Random) -> bytes:
    """By any protocol."""
    return pickle.dumps(value, protocol=random.randint(0, pickle.HIGHEST_PROTOCOL))
