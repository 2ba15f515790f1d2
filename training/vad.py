"""Write the network of the voice activity detector from that of the Python package silero-vad.

    pip download --no-deps silero-vad==6.2.3 && unzip -j silero_vad-*.whl '*/silero_vad_16k_sequence.onnx'
    python training/vad.py silero_vad_16k_sequence.onnx

The weights are the same. Its four convolutions have only 1 to 4 positions, for each of 128 rows, and ONNX
Runtime computes them at a tenth of the speed of its matrix multiplications. They are matrix multiplications
in the file that this script writes. The largest difference of the probabilities is printed.
"""

import argparse
import hashlib
import lzma
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

SOURCE_SHA256 = "9ccdacc4719d8aa7e45a77536bfabec45a03ba1f2fad5e241ab4060b24238a85"
OUT = (
    Path(__file__).parents[1]
    / "src"
    / "whisperport"
    / "speech"
    / "data"
    / "vad"
    / "silero_vad_16k.onnx.xz"
)
PACKED = [
    {"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": 0, "lp": 2, "pb": 2}
]  # for floats
SAMPLES, WINDOW, STRIDE, BINS = (
    576,
    256,
    128,
    129,
)  # of one row: 64 samples of context and 512 new ones
REFLECTED = 64  # samples after the end
STATE = 128
ROWS = 128

Floats = NDArray[np.float32]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", type=Path, help="silero_vad_16k_sequence.onnx of silero-vad 6.2.3"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    chosen = parser.parse_args()
    if hashlib.sha256(chosen.source.read_bytes()).hexdigest() != SOURCE_SHA256:
        parser.error(f"{chosen.source} is not the file of silero-vad 6.2.3")
    network = rewritten(onnx.load(chosen.source)).SerializeToString()
    chosen.out.write_bytes(lzma.compress(network, filters=PACKED))
    print(f"largest difference: {difference(chosen.source.read_bytes(), network):.1e}")


def rewritten(source: onnx.ModelProto) -> onnx.ModelProto:
    """Return the same network without convolutions."""
    weights = {t.name: numpy_helper.to_array(t) for t in source.graph.initializer}
    graph = Graph()
    power = spectrum(graph, weights["stft.forward_basis_buffer"])  # (N, 4, 129)
    x = layer(graph, power, weights, "encoder.0", taps=(0, 1, 2))
    x = graph.node("Reshape", x, graph.sizes(-1, 4, 128))
    # With a stride of 2, the 2 results are of the positions (before, 0, 1) and (1, 2, 3).
    before = graph.node("Pad", x, graph.sizes(0, 1, 0, 0, 0, 0))
    pair = [graph.node("Slice", before, *graph.span(at, at + 3, axis=1)) for at in (0, 2)]
    x = graph.node("Concat", *(flat(graph, one, 1, 3 * 128) for one in pair), axis=1)
    x = dense(graph, x, weights, "encoder.1", taps=(0, 1, 2))  # (N, 2, 64)
    # The 1 result is of the positions (before, 0, 1), and before it there is nothing.
    x = dense(graph, flat(graph, x, 1, 2 * 64), weights, "encoder.2", taps=(1, 2))
    x = dense(graph, x, weights, "encoder.3", taps=(1,))  # (N, 1, 128), from its own position only
    recurrent = [name for name in weights if "LSTM" in name]
    given = [graph.constant(weights[name]) for name in recurrent]
    x = graph.node("LSTM", x, *given, "", "h", "c", to=("", "hn", "cn"), hidden_size=STATE)
    x = graph.node("Relu", flat(graph, x, STATE))
    x = graph.node("MatMul", x, graph.constant(weights["output.weight"][0]))
    x = graph.node("Sigmoid", graph.node("Add", x, graph.constant(weights["output.bias"])))
    graph.node("Reshape", x, graph.sizes(-1), to=("speech_probs",))
    ports = list(source.graph.input), list(source.graph.output)
    made = helper.make_graph(graph.nodes, "silero_vad", *ports, graph.constants)
    return helper.make_model(
        made, opset_imports=[helper.make_opsetid("", 16)], ir_version=8, producer_name="whisperport"
    )


class Graph:
    """Nodes and constants of a graph, with names of their own."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[TensorProto] = []

    def node(
        self, operator: str, *inputs: str, to: tuple[str, ...] = ("",), **options: object
    ) -> str:
        """Append a node, and return the name of its first output."""
        first = to[0] or f"{operator} {len(self.nodes)}"
        self.nodes.append(helper.make_node(operator, inputs, [first, *to[1:]], **options))
        return first

    def constant(self, values: NDArray[np.generic]) -> str:
        name = f"constant {len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.ascontiguousarray(values), name))
        return name

    def sizes(self, *values: int) -> str:
        return self.constant(np.array(values, np.int64))

    def span(self, start: int, stop: int, axis: int) -> tuple[str, str, str]:
        """Return the inputs of a Slice."""
        return self.sizes(start), self.sizes(stop), self.sizes(axis)


def spectrum(graph: Graph, basis: Floats) -> str:
    """Return the magnitudes (N, 4, 129) of windows of 256 samples, every 128 samples of the input."""
    padded = graph.node("Pad", "input", graph.sizes(0, 0, 0, REFLECTED), mode="reflect")
    halves = graph.node("Reshape", padded, graph.sizes(-1, 5, STRIDE))
    pair = [graph.node("Slice", halves, *graph.span(at, at + 4, axis=1)) for at in (0, 1)]
    windows = graph.node("Concat", *pair, axis=2)
    both = graph.node("MatMul", windows, graph.constant(basis[:, 0].T))
    parts = [graph.node("Slice", both, *graph.span(at, at + BINS, axis=2)) for at in (0, BINS)]
    squares = [graph.node("Mul", part, part) for part in parts]
    return graph.node("Sqrt", graph.node("Add", *squares))


def layer(
    graph: Graph, x: str, weights: dict[str, Floats], name: str, taps: tuple[int, ...]
) -> str:
    """Return a convolution of 3 positions with a stride of 1, with zeros before and after them."""
    padded = graph.node("Pad", x, graph.sizes(0, 1, 0, 0, 1, 0))
    parts = [graph.node("Slice", padded, *graph.span(at, at + 4, axis=1)) for at in taps]
    return dense(graph, graph.node("Concat", *parts, axis=2), weights, name, taps)


def dense(
    graph: Graph, x: str, weights: dict[str, Floats], name: str, taps: tuple[int, ...]
) -> str:
    """Return the multiplication of unfolded positions by the weights of some taps of a convolution."""
    matrix = weights[f"{name}.weight"][:, :, list(taps)].transpose(2, 1, 0)  # tap, in, out
    product = graph.node("MatMul", x, graph.constant(matrix.reshape(-1, matrix.shape[2])))
    bias = graph.constant(weights[f"{name}.bias"])
    return graph.node("Relu", graph.node("Add", product, bias))


def flat(graph: Graph, x: str, *sizes: int) -> str:
    return graph.node("Reshape", x, graph.sizes(-1, *sizes))


def difference(source: bytes, out: bytes) -> float:
    """Return the largest difference of the probabilities, for noise of several levels in turn."""
    sessions = [onnxruntime.InferenceSession(network) for network in (source, out)]
    states = [[np.zeros((1, 1, STATE), np.float32)] * 2 for _ in sessions]
    random, largest = np.random.default_rng(0), 0.0
    for level in (0.0, 0.001, 0.05, 0.5) * 5:
        rows = level * random.standard_normal((ROWS, SAMPLES)).astype(np.float32)
        found = []
        for index, session in enumerate(sessions):
            h, c = states[index]
            probabilities, *states[index] = session.run(None, {"input": rows, "h": h, "c": c})
            found.append(probabilities)
        largest = max(largest, float(np.abs(found[0] - found[1]).max()))
    return largest


if __name__ == "__main__":
    main()
