"""Read an ONNX file without its weights.

Source: field numbers from onnx/onnx.proto, IR version 10 and later.
"""

from typing import BinaryIO

from whisperport.inspection import protobuf_skeleton
from whisperport.inspection.protobuf_skeleton import Walk

IS_EXTERNAL = bytes([14 << 3, 1])  # data_location: EXTERNAL; the data is not in the message
# float_, int32_, string_, int64_, raw_, double_ and uint64_data
TENSOR = Walk(arrays=frozenset({4, 5, 6, 7, 9, 10, 11}), skipped=IS_EXTERNAL)
ATTRIBUTE = Walk(inner={5: TENSOR})
NODE = Walk(inner={5: ATTRIBUTE})
GRAPH = Walk(inner={1: NODE, 5: TENSOR})
MODEL = Walk(inner={7: GRAPH})


def skeleton(file: BinaryIO, size: int) -> bytes:
    """Return the serialized model without its large arrays, which are marked as stored elsewhere.

    Args:
        size: bytes in `file`.

    Raises:
        ValueError: the file is not a protobuf message, or a field that is kept is too large.
    """
    return protobuf_skeleton.skeleton(file, size, MODEL)
