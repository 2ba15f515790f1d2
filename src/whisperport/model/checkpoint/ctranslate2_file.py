"""Read the variables of an untrusted `model.bin` of CTranslate2.

Layout, little endian: u32 version 6; the model's name; u32 revision; u32 count; for each variable its name,
u8 rank, u32 sizes, u8 dtype, u32 bytes, data; u32 count of aliases; pairs of names. A name is a u16 length
and that many bytes, the last one zero. Source: OpenNMT/CTranslate2@0d8bcd3, src/models/model.cc.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from whisperport.model.checkpoint.binary_reader import BinaryReader
from whisperport.program.untrusted import PLACEHOLDER_BYTES, reject_placeholder, shorten

_VERSION = 6
_REVISION = 3
_NAME = "WhisperSpec"
_MAX_RANK = 3  # of a convolution's weight
_DTYPES = (
    torch.float32,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.float16,
    torch.bfloat16,
)


@dataclass(frozen=True, slots=True)
class Variables:
    """The variables of a file under its own names."""

    tensors: dict[str, Tensor]
    aliases: dict[str, str]  # further name -> name of a variable

    @property
    def by_any_name(self) -> dict[str, Tensor]:
        """The tensors, and those that have a further name: the converter stores equal ones once."""
        return self.tensors | {alias: self.tensors[name] for alias, name in self.aliases.items()}


def read_model_bin(path: Path) -> Variables:
    """Read a file completely.

    Raises:
        CheckpointError: the file is truncated, damaged or inconsistent, or of another version or
            architecture.
    """
    with path.open("rb") as file:
        reject_placeholder(file.read(PLACEHOLDER_BYTES), f"cannot read `{path}`")
    with BinaryReader(path) as reader:
        version = reader.number("I", "the version")
        if version != _VERSION:
            raise reader.error(
                f"it states version {version} of CTranslate2's format; expected {_VERSION}",
                "convert the original checkpoint with CTranslate2 3 or 4",
            )
        name, revision = _name(reader), reader.number("I", "the revision")
        if (name, revision) != (_NAME, _REVISION):
            raise reader.error(
                f"it holds a `{shorten(name)}` of revision {revision}; expected a Whisper model, "
                f"`{_NAME}` of revision {_REVISION}",
                "give a Whisper model converted with CTranslate2 3 or 4",
            )
        tensors: dict[str, Tensor] = {}
        for _ in range(reader.number("I", "the number of variables")):
            name, tensor = _variable(reader)
            if name in tensors:
                raise reader.error(f"the variable `{shorten(name)}` occurs twice")
            tensors[name] = tensor
        aliases: dict[str, str] = {}
        for _ in range(reader.number("I", "the number of aliases")):
            alias, name = _name(reader), _name(reader)
            if alias in tensors or alias in aliases or name not in tensors:
                raise reader.error(f"the alias `{shorten(alias)}` of `{shorten(name)}` is wrong")
            aliases[alias] = name
        if reader.remaining:
            raise reader.error(f"{reader.remaining} bytes follow the last alias")
    return Variables(tensors, aliases)


def _name(reader: BinaryReader) -> str:
    text = reader.text(reader.number("H", "the length of a name"), "a name")
    if not text.endswith("\0"):
        raise reader.error(f"the name {shorten(repr(text))} does not end in a zero byte")
    return text[:-1]


def _variable(reader: BinaryReader) -> tuple[str, Tensor]:
    name = _name(reader)
    rank = reader.number("B", f"the rank of `{shorten(name)}`")
    if rank > _MAX_RANK:
        raise reader.error(f"`{shorten(name)}` has {rank} axes; expected at most {_MAX_RANK}")
    shape = reader.numbers(f"{rank}I", "a shape")
    kind, n_bytes = reader.numbers("BI", "a type")
    if kind >= len(_DTYPES):
        raise reader.error(f"`{shorten(name)}` has the unknown type {kind}")
    before = reader.remaining
    tensor = reader.tensor(_DTYPES[kind], shape, name)
    if before - reader.remaining != n_bytes:
        raise reader.error(
            f"`{shorten(name)}` states {n_bytes} bytes; its shape {shape} has "
            f"{before - reader.remaining}"
        )
    return name, tensor
