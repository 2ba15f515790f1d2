"""Make hostile pickles and files of torch.save: calls of functions, and tensors with false sizes."""

import io
import os
import pickle
from collections.abc import Callable
from random import Random
from typing import Any

EVIDENCE = "pickle-ran"  # name of the file that hostile code would make in the folder outside


class Call:
    """An object that is pickled as a call of `function` with `arguments`."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.arguments


def hostile_call(random: Random, outside: str) -> Call:
    """Return a call that would leave a file outside if it ran."""
    evidence = os.path.join(outside, EVIDENCE)
    return random.choice(
        (
            Call(os.system, f"touch {evidence}"),
            Call(open, evidence, "w"),
            Call(eval, f"open({evidence!r}, 'w')"),
            Call(exec, f"open({evidence!r}, 'w')"),
            Call(os.mkdir, evidence),
            Call(__import__, "antigravity"),
            Call(bytearray, 10**11),
        )
    )


def hostile_tensor(random: Random) -> Any:
    """Return a tensor that is not a dense CPU tensor, or that is larger than its stored data."""
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
    """Return a pickle of {name: 1} that takes hours to hash: the name is a tuple nested 40 levels deep."""
    levels = (b"h%ch%c\x86q%c" % (level, level, level + 1) for level in range(40))
    return b"\x80\x02}(X\x01\x00\x00\x00aq\x00" + b"".join(levels) + b"K\x01u."


def saved(value: Any, random: Random) -> bytes:
    """Save with torch.save, as a zip archive or in the older format."""
    import torch

    file = io.BytesIO()
    torch.save(value, file, _use_new_zipfile_serialization=random.random() < 0.8)
    return file.getvalue()


def pickled(value: Any, random: Random) -> bytes:
    """Pickle with a random protocol."""
    return pickle.dumps(value, protocol=random.randint(0, pickle.HIGHEST_PROTOCOL))
