"""Compiled files as rknn-toolkit2 2.5.0 writes them, without the compiled program."""

import json
from collections.abc import Sequence
from typing import Any

from whisperport.program.spec import ProgramSpec, TensorSpec

SPEC = ProgramSpec(
    "step",
    (TensorSpec("x", (1, 1, 8)), TensorSpec("mask", (1, 1, 5))),
    (TensorSpec("logits", (1, 70)),),
)


def description(
    spec: ProgramSpec = SPEC, *, chips: Sequence[str] = ("rk3588",), type: str = ""
) -> dict[str, Any]:
    """Return the JSON at the end of a file. In float16, the compiler leaves the type empty."""
    tensors = (*spec.inputs, *spec.outputs)
    ends = [("input", i) for i in range(len(spec.inputs))]
    ends += [("output", i) for i in range(len(spec.outputs))]
    return {
        "graph": [
            {"left": end, "left_tensor_id": i, "right": "norm_tensor", "right_tensor_id": n}
            for n, (end, i) in enumerate(ends)
        ],
        "norm_tensor": [
            {
                "dim_num": len(tensor.shape),
                "dtype": {"qnt_method": "", "qnt_type": type, "vx_type": type},
                "size": list(tensor.shape),
                "tensor_id": n,
                "url": tensor.name,
            }
            for n, tensor in enumerate(tensors)
        ],
        "input_num": len(spec.inputs),
        "output_num": len(spec.outputs),
        "target_platform": list(chips),
        "version": "2.5.0",
    }


def rknn_bytes(described: Any = None, *, program: bytes = b"program!" * 8) -> bytes:
    """Return a complete file with a description."""
    text = json.dumps(description() if described is None else described).encode()
    body = b"X\0\0\0RKNN" + program
    header = b"RKNN" + bytes(4) + (6).to_bytes(8, "little") + len(body).to_bytes(8, "little")
    return header.ljust(64, b"\0") + body + len(text).to_bytes(8, "little") + text
