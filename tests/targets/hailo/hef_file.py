"""Write HEFs of version 1 by the public description: a header and streams, without a program."""

import zlib
from collections.abc import Mapping

from whisperport.targets.hailo.hef import COMMON, MAGIC, TAILS, _message_class


def hef_bytes(
    architecture: int,
    inputs: Mapping[str, tuple[int, int, int]],
    outputs: Mapping[str, tuple[int, int, int]],
    compiler: str = "3.31.0",
) -> bytes:
    hef = _message_class()()
    hef.header.hw_arch, hef.header.sdk_version = architecture, compiler
    group = hef.network_groups.add(network_group_name="net")
    group.sorted_outputs_order.extend(outputs)
    op = group.ops.add()
    for index, (name, shape) in enumerate(inputs.items()):
        _describe(op.input_pads.add(index=index, name=name), shape)
    for index, (name, shape) in enumerate(outputs.items(), len(inputs)):
        _describe(op.output_pads.add(index=index, name=name), shape)
    described, data = hef.SerializeToString(), b"the program"
    body = described + data
    return (
        COMMON.pack(MAGIC, 1, len(described)) + TAILS[1].pack(zlib.crc32(body), len(data), 0) + body
    )


def encoder_hef(architecture: int, frames: int = 200, bins: int = 80, width: int = 64) -> bytes:
    """Make a HEF with an encoder's shapes, by default those of the test checkpoint with a 2 s window."""
    return hef_bytes(
        architecture,
        {"net/input_layer1": (1, frames, bins)},
        {"net/normalization9": (1, frames // 2, width)},
    )


def _describe(pad, shape: tuple[int, int, int]) -> None:
    pad.tensor_shape.height, pad.tensor_shape.width, pad.tensor_shape.features = shape
