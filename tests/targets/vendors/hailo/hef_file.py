"""Write HEFs by the public description: a header and streams, without a program."""

from collections.abc import Mapping

from whisperport.targets.vendors.hailo.hef import COMMON, MAGIC, TAILS, _message_class

Shapes = Mapping[str, tuple[int, int, int]]


def hef_bytes(
    architecture: int,
    inputs: Shapes,
    outputs: Shapes,
    compiler: str = "3.31.0",
    *,
    version: int = 1,
    description: bytes | None = None,
) -> bytes:
    if description is None:
        description = described(architecture, inputs, outputs, compiler)
    data = b"the program" if version else b""
    tails = {
        0: (0, bytes(16)),
        1: (0, len(data), 0),
        2: (0, len(data), 0, 0),
        3: (0, len(data) - 4, 0, 4, 0, 0),
    }
    form, _ = TAILS[version]
    header = COMMON.pack(MAGIC, version, len(description)) + form.pack(*tails[version])
    return header + description + data


def described(
    architecture: int, inputs: Shapes, outputs: Shapes, compiler: str = "3.31.0"
) -> bytes:
    """Return the description: the streams of one network."""
    hef = _message_class()()
    hef.header.hw_arch, hef.header.sdk_version = architecture, compiler
    op = hef.network_groups.add().ops.add()
    for index, (name, shape) in enumerate(inputs.items()):
        _describe(op.input_pads.add(index=index, name=name), shape)
    for index, (name, shape) in enumerate(outputs.items(), len(inputs)):
        _describe(op.output_pads.add(index=index, name=name), shape)
    return bytes(hef.SerializeToString())


def encoder_hef(architecture: int, frames: int = 200, bins: int = 80, width: int = 64) -> bytes:
    """Make a HEF with an encoder's shapes, by default those of the test checkpoint with a 2 s window."""
    return hef_bytes(
        architecture,
        {"net/input_layer1": (1, frames, bins)},
        {"net/normalization9": (1, frames // 2, width)},
    )


def _describe(pad, shape: tuple[int, int, int]) -> None:
    pad.tensor_shape.height, pad.tensor_shape.width, pad.tensor_shape.features = shape
