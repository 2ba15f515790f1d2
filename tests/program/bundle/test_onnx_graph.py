"""An ONNX file reads no file that its program does not list, wherever in the graph the file is named."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from whisperport.errors import BundleError
from whisperport.model.inspection.lowered import inspect_lowered
from whisperport.program.bundle import Bundle, ProgramEntry
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.placement import Placement
from whisperport.program.profiling import ProfileOptions
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.runtime import load_engine
from whisperport.targets import RunOptions, get_target

from ...edited_bundles import copy_of_shipped, program, rehash

ORT = get_target("onnxruntime")
TRUSTED = RunOptions(threads=1, trust=True)
DECODER = ("prefill_4", "prefill_64", "step", "align")
FLOAT = TensorProto.FLOAT

# A whole bundle ----------------------------------------------------------------------------------


def refer_to(folder: Path, name: str) -> None:
    """Make the graphs of the decoder refer to another file than `weights.bin`."""
    for one in DECODER:
        path = folder / "onnxruntime" / f"{one}.onnx"
        model = onnx.load(str(path), load_external_data=False)
        for tensor in model.graph.initializer:
            for entry in tensor.external_data:
                if entry.key == "location":
                    entry.value = name
        path.write_bytes(model.SerializeToString())


def link_that_leads_out(folder: Path) -> None:
    outside = folder.with_name("outside.bin")
    os.link(folder / "onnxruntime/weights.bin", outside)
    (folder / "onnxruntime/other.bin").symlink_to(outside)


def file_that_is_not_listed(folder: Path) -> None:
    os.link(folder / "onnxruntime/weights.bin", folder / "onnxruntime/other.bin")


def file_of_another_program(folder: Path) -> None:
    file_that_is_not_listed(folder)

    def list_it(document: dict[str, Any]) -> None:
        document["files"]["onnxruntime/other.bin"] = {}
        program(document, "encoder")["files"].append("onnxruntime/other.bin")

    rehash(folder, list_it)


@pytest.mark.parametrize("version", ["1.31.0", "1.30.0"])
@pytest.mark.parametrize(
    "put", [link_that_leads_out, file_that_is_not_listed, file_of_another_program]
)
def test_weights_that_the_programs_do_not_list_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, put: Callable[[Path], None], version: str
) -> None:
    folder = copy_of_shipped(tmp_path / "bundle")
    put(folder)
    refer_to(folder, "other.bin")
    rehash(folder)
    bundle = Bundle.open(folder)
    monkeypatch.setattr(onnxruntime, "__version__", version)  # older ones open files by themselves

    with pytest.raises(BundleError, match=r"does not list the file 'onnxruntime/other\.bin'"):
        load_engine(bundle, TRUSTED)


def test_weights_that_a_program_does_not_list_are_not_read_to_inspect_it_either(
    tmp_path: Path,
) -> None:
    folder = copy_of_shipped(tmp_path / "bundle")
    file_that_is_not_listed(folder)
    refer_to(folder, "other.bin")
    rehash(folder)

    with pytest.raises(BundleError, match=r"does not list the file 'onnxruntime/other\.bin'"):
        inspect_lowered(folder, ProfileOptions(programs=("step",)), lambda _: [])


def test_weights_that_the_programs_list_are_read(tmp_path: Path) -> None:
    folder = copy_of_shipped(tmp_path / "bundle")
    file_that_is_not_listed(folder)
    refer_to(folder, "other.bin")

    def list_it(document: dict[str, Any]) -> None:
        document["files"]["onnxruntime/other.bin"] = {}
        for name in DECODER:
            program(document, name)["files"].append("onnxruntime/other.bin")

    rehash(folder, list_it)

    assert load_engine(Bundle.open(folder), TRUSTED)


# One graph ---------------------------------------------------------------------------------------


def external(**entries: str) -> TensorProto:
    tensor = TensorProto(name="w", dims=[2], data_type=FLOAT, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def node(**attributes: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], ["c"], **attributes)


def graph(*nodes: onnx.NodeProto, weights: tuple[TensorProto, ...] = ()) -> onnx.GraphProto:
    x, y = (helper.make_tensor_value_info(name, FLOAT, [2]) for name in "xy")
    nodes = (*nodes, helper.make_node("Identity", ["x"], ["y"]))
    return helper.make_graph(list(nodes), "g", [x], [y], list(weights))


def model(*nodes: onnx.NodeProto, weights: tuple[TensorProto, ...] = ()) -> onnx.ModelProto:
    opset = [helper.make_opsetid("", 20)]
    return helper.make_model(graph(*nodes, weights=weights), ir_version=8, opset_imports=opset)


def sparse(tensor: TensorProto, *, indices: bool = False) -> onnx.SparseTensorProto:
    other = helper.make_tensor("other", FLOAT, [2], [0.0, 0.0])
    values, places = (other, tensor) if indices else (tensor, other)
    return onnx.SparseTensorProto(values=values, indices=places, dims=[2])


def with_sparse_initializer(tensor: TensorProto, *, indices: bool) -> onnx.ModelProto:
    made = model()
    made.graph.sparse_initializer.append(sparse(tensor, indices=indices))
    return made


def with_function(tensor: TensorProto, *, default: bool) -> onnx.ModelProto:
    made = model()
    if default:
        made.functions.add(name="f").attribute_proto.append(helper.make_attribute("a", tensor))
    else:
        made.functions.add(name="f").node.append(node(value=tensor))
    return made


def with_training(tensor: TensorProto) -> onnx.ModelProto:
    made = model()
    made.training_info.add().algorithm.CopyFrom(graph(weights=(tensor,)))
    return made


PLACES: dict[str, Callable[[TensorProto], onnx.ModelProto]] = {
    "initializer": lambda t: model(weights=(t,)),
    "sparse values": lambda t: with_sparse_initializer(t, indices=False),
    "sparse indices": lambda t: with_sparse_initializer(t, indices=True),
    "attribute": lambda t: model(node(value=t)),
    "attribute of several": lambda t: model(node(values=[t])),
    "sparse attribute": lambda t: model(node(sparse_value=sparse(t))),
    "sub-graph": lambda t: model(node(then_branch=graph(weights=(t,)))),
    "sub-graphs": lambda t: model(node(branches=[graph(weights=(t,))])),
    "sub-graph of a sub-graph": lambda t: model(node(body=graph(node(body=graph(node(value=t)))))),
    "function": lambda t: with_function(t, default=False),
    "default in a function": lambda t: with_function(t, default=True),
    "training": with_training,
}


@pytest.fixture
def written(tmp_path: Path) -> Callable[[onnx.ModelProto], OnnxGraph]:
    """Make a graph in `tmp_path`, whose program lists the graph and `sub/listed.bin`."""

    def write(made: onnx.ModelProto, *more: str) -> OnnxGraph:
        (tmp_path / "sub").mkdir()
        for name in ("listed.bin", "unlisted.bin"):
            (tmp_path / "sub" / name).write_bytes(bytes(8))
        (tmp_path / "sub/a.onnx").write_bytes(made.SerializeToString())
        return OnnxGraph.of(tmp_path, entry(("sub/a.onnx", "sub/listed.bin", *more)))

    return write


def entry(files: tuple[str, ...], shape: tuple[int, ...] = (2,)) -> ProgramEntry:
    spec = ProgramSpec("a", (TensorSpec("x", shape),), (TensorSpec("y", shape),))
    return ProgramEntry(spec=spec, placement=Placement("onnxruntime"), method="a", files=files)


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_in_an_unlisted_file_is_found_wherever_it_is(
    written: Callable[..., OnnxGraph], place: str
) -> None:
    made = written(PLACES[place](external(location="unlisted.bin")))

    with pytest.raises(BundleError, match=r"unlisted\.bin"):
        made.read()


@pytest.mark.parametrize("place", PLACES)
def test_a_tensor_in_a_listed_file_is_accepted_wherever_it_is(
    written: Callable[..., OnnxGraph], place: str
) -> None:
    made = written(PLACES[place](external(location="listed.bin", offset="0", length="8")))

    assert made.read().HasField("graph")


@pytest.mark.parametrize(
    "location",
    [
        "/etc/passwd",
        "../sub/listed.bin",
        "./listed.bin",
        "sub/listed.bin",
        "..\\listed.bin",
        "listed.bin\0",
        "",
        ".",
        "..",
        "listed.bin\n",
        "*/_ORT_MEM_ADDR_/*",  # by which ONNX Runtime means an address in its own memory
    ],
)
def test_a_location_that_is_not_the_name_of_a_listed_file_is_rejected(
    written: Callable[..., OnnxGraph], location: str
) -> None:
    made = written(model(weights=(external(location=location),)))

    with pytest.raises(BundleError):
        made.read()


def twice() -> TensorProto:
    tensor = external(location="listed.bin")
    tensor.external_data.add(key="location", value="unlisted.bin")
    return tensor


def stored_inside_as_well() -> TensorProto:
    tensor = external(location="listed.bin")
    tensor.data_location = TensorProto.DEFAULT
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        external(),
        external(offset="0", length="8"),
        external(location="listed.bin", prepacked_0="unlisted.bin"),
        external(location="listed.bin", length="9"),
        external(location="listed.bin", offset="1", length="8"),
        external(location="listed.bin", offset="1e1"),
        twice(),
        stored_inside_as_well(),
    ],
)
def test_a_tensor_that_is_described_wrongly_is_rejected(
    written: Callable[..., OnnxGraph], tensor: TensorProto
) -> None:
    made = written(model(weights=(tensor,)))

    with pytest.raises(BundleError, match="'w'"):
        made.read()


def test_a_listed_file_that_is_a_link_is_rejected_even_inside_of_the_bundle(
    written: Callable[..., OnnxGraph], tmp_path: Path
) -> None:
    """A session looks for external data beside the path that it is given, and not beside the link."""
    made = written(model(weights=(external(location="link.bin"),)), "sub/link.bin")
    (tmp_path / "sub/link.bin").symlink_to("listed.bin")

    with pytest.raises(BundleError, match=r"'link.bin' in bundle .* is a link to another folder"):
        made.read()


def test_a_node_that_names_a_file_of_its_own_is_rejected(
    written: Callable[..., OnnxGraph],
) -> None:
    compiled = helper.make_node(
        "EPContext", ["x"], ["z"], domain="com.microsoft", ep_cache_context="/etc/passwd"
    )

    with pytest.raises(BundleError, match="EPContext"):
        written(model(compiled)).read()


@pytest.mark.parametrize("contents", [b"", b"\0", b"text", b"\x0a\x05onnx", bytes(100)])
def test_what_is_not_onnx_is_rejected(
    written: Callable[..., OnnxGraph], tmp_path: Path, contents: bytes
) -> None:
    made = written(model())
    (tmp_path / "sub/a.onnx").write_bytes(contents)

    with pytest.raises(BundleError, match="cannot be read as ONNX"):
        made.read()


def test_a_pipe_in_place_of_a_graph_is_rejected(
    written: Callable[..., OnnxGraph], tmp_path: Path
) -> None:
    written(model())
    (tmp_path / "sub/a.onnx").unlink()
    os.mkfifo(tmp_path / "sub/a.onnx")

    with pytest.raises(BundleError, match="not a regular file"):
        ORT.load(tmp_path, [entry(("sub/a.onnx",))], TRUSTED)


# Its signature -----------------------------------------------------------------------------------


def test_a_graph_of_another_shape_than_listed_is_rejected_when_it_is_loaded(
    written: Callable[..., OnnxGraph], tmp_path: Path
) -> None:
    written(model())

    assert ORT.load(tmp_path, [entry(("sub/a.onnx",))], TRUSTED)
    with pytest.raises(BundleError, match="another signature") as caught:
        ORT.load(tmp_path, [entry(("sub/a.onnx",), (3,))], TRUSTED)

    assert "'x' is [2] tensor(float); expected [3] float32" in caught.value.why


def test_a_graph_without_a_listed_output_is_rejected_when_it_is_loaded(
    written: Callable[..., OnnxGraph], tmp_path: Path
) -> None:
    made = model()
    made.graph.output[0].name = "x"
    written(made)

    with pytest.raises(BundleError, match="another signature"):
        ORT.load(tmp_path, [entry(("sub/a.onnx",))], TRUSTED)


def test_an_output_of_another_shape_than_stated_is_an_error(
    written: Callable[..., OnnxGraph], tmp_path: Path
) -> None:
    """ONNX Runtime trusts the shape in the file if it cannot infer the shape before the run."""
    made = model()
    del made.graph.node[:]
    made.graph.node.extend(
        [
            helper.make_node("Greater", ["x", "zero"], ["positive"]),
            helper.make_node("Compress", ["x", "positive"], ["y"]),
        ]
    )
    made.graph.initializer.append(helper.make_tensor("zero", FLOAT, [1], [0.0]))
    written(made)
    runner = ORT.load(tmp_path, [entry(("sub/a.onnx",))], TRUSTED)["a"]

    assert runner.run({"x": np.array([1, 2], np.float32)})["y"].tolist() == [1, 2]
    with pytest.raises(BundleError, match=r"'y' as \(1,\) float32") as caught:
        runner.run({"x": np.array([1, -2], np.float32)})

    assert caught.value.why == "its signature states (2,) float32"
