"""Measure how often `compare` names the layer in which a fault was injected.

    python -m benchmarks.answers.compare [--cases 200] [--seed 0] [--work FOLDER] [--only ...]

Each case draws a program (one of 12: nine architectures, and a second random configuration of three of
them, with random weights), a pair of formats, and one fault in one node of one of the two files: a changed
weight, a swapped axis, a wrong epsilon, or a quantized layer. `compare` is right if the layer that it names
is the module of this node. A fault that changes the outputs by less than 1e-5 of their size is drawn again.
One of twelve cases has no fault; then no layer may be named. FOLDER keeps the exported programs for another
run. Writes `results/answers.json`, and prints every answer.
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
warnings.simplefilter("ignore")

import numpy as np  # noqa: E402
import onnx  # noqa: E402
import torch  # noqa: E402
from onnx import helper, numpy_helper  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from whisperport.build.compare import CompareOptions, compare  # noqa: E402
from whisperport.model.inspection.quiet import quiet, quiet_natively  # noqa: E402
from whisperport.model.inspection.read_onnx import read_onnx  # noqa: E402
from whisperport.verification import versions  # noqa: E402
from whisperport.verification.diagnosis.recording import opened  # noqa: E402

from ..record import record  # noqa: E402

# Pairs of formats, with the fault in the file of the format with *, and how often each is drawn.
PAIRS = {
    "pt2/pt2*": 6,
    "pt2/onnx*": 4,
    "onnx/pt2*": 3,
    "onnx/onnx*": 4,
    "pt2*/tflite": 2,
    "onnx*/tflite": 1,
}
MIN_EFFECT = 1e-5  # of a fault: relative change of the outputs
FAULTS = ("weight", "axis", "epsilon", "quantized")
NO_FAULT = "none"
WITHOUT_FAULT = 12  # one of so many cases has no fault

Model = tuple[nn.Module, tuple[Tensor, ...]]


class Positional(nn.Module):
    """Calls a model of transformers with one tensor, and returns one tensor."""

    def __init__(self, model: nn.Module, name: str, **constants: Any) -> None:
        super().__init__()
        self.model, self.name, self.constants = model, name, constants

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        further = {"encoder_hidden_states": others[0]} if others else {}
        found = self.model(**{self.name: x}, **further, **self.constants)
        result: Tensor = found[0]
        return result


def whisper_encoder(draw: random.Random) -> Model:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    return Positional(WhisperEncoder(_whisper(draw, WhisperConfig)), "input_features"), (
        torch.randn(1, 80, 100),
    )


def whisper_decoder(draw: random.Random) -> Model:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperDecoder

    config = _whisper(draw, WhisperConfig)
    model = Positional(WhisperDecoder(config), "input_ids", use_cache=False)
    return model, (torch.randint(0, 50, (1, 7)), torch.randn(1, 50, config.d_model))


def _whisper(draw: random.Random, config: Any) -> Any:
    width, heads = draw.choice([(32, 2), (48, 3), (64, 4)])
    layers = draw.randint(1, 3)
    return config(
        d_model=width,
        encoder_layers=layers,
        decoder_layers=layers,
        encoder_attention_heads=heads,
        decoder_attention_heads=heads,
        encoder_ffn_dim=2 * width,
        decoder_ffn_dim=4 * width,
        vocab_size=60,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        attn_implementation=_attention(draw),
    )


def own_encoder(draw: random.Random) -> Model:
    from whisper.model import AudioEncoder

    width, heads = draw.choice([(32, 2), (64, 4)])
    return AudioEncoder(80, 50, width, heads, draw.randint(1, 3)), (torch.randn(1, 80, 100),)


def own_decoder(draw: random.Random) -> Model:
    from whisper.model import TextDecoder

    width, heads = draw.choice([(32, 2), (64, 4)])
    model = TextDecoder(60, 32, width, heads, draw.randint(1, 3))
    nn.init.normal_(model.positional_embedding, std=0.1)
    return model, (torch.randint(0, 50, (1, 6)), torch.randn(1, 20, width))


def bert(draw: random.Random) -> Model:
    from transformers import BertConfig, BertModel

    width, heads = draw.choice([(32, 2), (48, 4)])
    config = BertConfig(
        vocab_size=60,
        hidden_size=width,
        num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=heads,
        intermediate_size=2 * width,
        max_position_embeddings=32,
        attn_implementation=_attention(draw),
    )
    return Positional(BertModel(config), "input_ids"), (torch.randint(0, 60, (1, 9)),)


def vit(draw: random.Random) -> Model:
    from transformers import ViTConfig, ViTModel

    width = draw.choice([32, 48])
    config = ViTConfig(
        hidden_size=width,
        num_hidden_layers=draw.randint(1, 3),
        num_attention_heads=4,
        intermediate_size=2 * width,
        image_size=32,
        patch_size=8,
        attn_implementation=_attention(draw),
    )
    return Positional(ViTModel(config), "pixel_values"), (torch.randn(1, 3, 32, 32),)


def conformer(draw: random.Random) -> Model:
    from transformers import Wav2Vec2ConformerConfig
    from transformers.models.wav2vec2_conformer.modeling_wav2vec2_conformer import (
        Wav2Vec2ConformerEncoder,
    )

    width = draw.choice([32, 48])
    config = Wav2Vec2ConformerConfig(
        hidden_size=width,
        num_hidden_layers=draw.randint(1, 2),
        num_attention_heads=2,
        intermediate_size=2 * width,
        conv_depthwise_kernel_size=7,
        position_embeddings_type=None,
    )
    return Positional(Wav2Vec2ConformerEncoder(config), "hidden_states"), (
        torch.randn(1, 20, width),
    )


class Block(nn.Module):
    """A residual block of convolutions with batch norms."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.relu(x + self.second(torch.relu(self.norm(self.first(x)))))
        return result


def cnn(draw: random.Random) -> Model:
    channels = draw.choice([8, 16])
    blocks = [Block(channels) for _ in range(draw.randint(1, 4))]
    stem = nn.Conv2d(3, channels, 5, stride=2, padding=2)
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
    return nn.Sequential(stem, nn.ReLU(), *blocks, *head), (torch.randn(1, 3, 24, 24),)


class Mlp(nn.Module):
    """Layers of drawn kinds and widths, each of them a module."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        width = draw.choice([24, 40])
        self.layers = nn.ModuleList()
        for _ in range(draw.randint(3, 9)):
            self.layers.append(
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, width),
                    draw.choice([nn.GELU, nn.SiLU, nn.Tanh])(),
                )
            )
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def mlp(draw: random.Random) -> Model:
    model = Mlp(draw)
    return model, (torch.randn(1, 11, model.width),)


def _attention(draw: random.Random) -> str:
    return draw.choice(["sdpa", "eager"])


ARCHITECTURES: tuple[Callable[[random.Random], Model], ...] = (
    whisper_encoder,
    whisper_decoder,
    own_encoder,
    own_decoder,
    bert,
    vit,
    conformer,
    cnn,
    mlp,
)


SEVERAL = (
    own_encoder,
    cnn,
    mlp,
)  # the architectures with two configurations: the fastest to export


@dataclass
class Case:
    """One drawn program and fault, and what `compare` answered."""

    number: int
    architecture: str
    pair: str
    fault: str
    detail: str = ""
    truth: str = ""  # module with the fault; empty: none
    named: str = ""
    joined: tuple[str, ...] = ()  # modules that one of the programs computes in one operator
    error: float = 0.0
    matched: int = 0
    kept: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    failure: str = ""

    @property
    def right(self) -> bool:
        """Whether the layer was named, alone or as one of two that one operator computes."""
        named = {self.named, *(self.joined if len(self.joined) <= 2 else ())}
        return self.truth in named and not self.failure


class NoFaultError(Exception):
    """The program has no place for the drawn fault."""


def changed(weight: np.ndarray, fault: str, draw: random.Random) -> tuple[np.ndarray, str]:
    """Return a weight with a fault, and what was done."""
    if fault == "quantized":
        bits = draw.choice([8, 8, 4])
        scale = np.abs(weight).max() / (2 ** (bits - 1) - 1)
        return (np.rint(weight / scale) * scale).astype(weight.dtype), f"{bits} bits"
    if fault == "axis":
        if weight.ndim != 2 or weight.shape[0] != weight.shape[1]:
            raise NoFaultError
        return np.ascontiguousarray(weight.T), "weight transposed"
    kind = draw.choice(["1.01 times", "2 times", "noise", "one row"])
    weight = weight.copy()
    if kind == "noise":
        noise = np.random.default_rng(draw.randrange(2**31)).standard_normal(weight.shape)
        weight += (0.05 * np.abs(weight).mean() * noise).astype(weight.dtype)
    elif kind == "one row":
        weight[: 1 + len(weight) // 8] *= 2
    else:
        weight *= float(kind.split()[0])
    return weight, kind


def fault_in_pt2(source: Path, out: Path, fault: str, draw: random.Random) -> tuple[str, str]:
    """Copy a .pt2 with a fault in one node; return the node's module, and what was done."""
    exported = torch.export.load(source)
    aten = torch.ops.aten
    weighted = {
        aten.linear.default: 1,
        aten.conv1d.default: 1,
        aten.conv2d.default: 1,
        aten.conv1d.padding: 1,
        aten.conv2d.padding: 1,
    }
    norms = {aten.layer_norm.default: 4, aten.batch_norm.default: 7}
    parameters = {
        **exported.graph_signature.inputs_to_parameters,
        **exported.graph_signature.inputs_to_buffers,
    }
    insert = fault == "axis" and draw.random() < 0.5
    softmax = fault == "axis" and not insert and draw.random() < 0.5
    others = {} if fault == "quantized" else {aten.embedding.default: 0, aten.layer_norm.default: 2}
    kinds = norms if fault == "epsilon" else {**weighted, **others}
    if softmax:
        kinds = {aten.softmax.int: 1}
    nodes = [
        node
        for node in exported.graph.nodes
        if node.target in kinds and module_of(node) and "pooler" not in module_of(node)
    ]
    if not nodes:
        raise NoFaultError
    node = draw.choice(nodes)
    if fault == "epsilon":
        epsilon = draw.choice([1e-2, 1e-3, 1e-4])
        arguments = list(node.args) + [1e-5] * (norms[node.target] + 1 - len(node.args))
        arguments[norms[node.target]] = epsilon
        node.args = tuple(arguments)
        detail = f"{epsilon:g}"
    elif softmax:
        node.args = (node.args[0], -2, *node.args[2:])
        detail = "softmax over another axis"
    elif insert:
        shape = node.meta["val"].shape
        with exported.graph.inserting_after(node):
            turned = exported.graph.call_function(aten.transpose.int, (node, -1, -2))
        with exported.graph.inserting_after(turned):
            back = exported.graph.call_function(aten.reshape.default, (turned, list(shape)))
        for made, value in ((turned, node.meta["val"].transpose(-1, -2)), (back, node.meta["val"])):
            made.meta = {**node.meta, "val": value}
        node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not turned)
        for spec in exported.graph_signature.output_specs:
            if spec.arg.name == node.name:
                spec.arg.name = back.name
        detail = "output read transposed"
    else:
        place = kinds[node.target]
        given = node.args[place] if len(node.args) > place else None
        name = parameters.get(getattr(given, "name", ""))
        if name is None:
            raise NoFaultError
        node = next(one for one in exported.graph.nodes if given in one.all_input_nodes)
        weight, detail = changed(exported.state_dict[name].detach().numpy(), fault, draw)
        exported._state_dict[name] = nn.Parameter(torch.from_numpy(weight), requires_grad=False)
    exported.graph_module.recompile()
    torch.export.save(exported, out)
    return module_of(node), detail


def module_of(node: Any) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def fault_in_onnx(source: Path, out: Path, fault: str, draw: random.Random) -> tuple[str, str]:
    """Copy an .onnx with a fault in one node; return the node's module, and what was done."""
    model = onnx.load(source)
    graph = model.graph
    modules = {one.name: node.module for node in read_onnx(source).nodes for one in node.outputs}
    stored = {one.name: one for one in graph.initializer}
    choice = draw.random()
    kinds = {"MatMul", "Gemm", "Conv"}
    if fault == "epsilon":
        kinds = {"LayerNormalization", "BatchNormalization"}
    elif fault == "axis" and choice < 0.25:
        kinds = {"Softmax"}
    elif fault == "weight":
        kinds |= {"Gather", "LayerNormalization"}
    nodes = [
        node
        for node in graph.node
        if node.op_type in kinds
        and modules.get(node.output[0])
        and "pooler" not in modules[node.output[0]]
    ]
    if not nodes:
        raise NoFaultError
    node = draw.choice(nodes)
    module = modules[node.output[0]]
    if fault == "epsilon":
        epsilon = draw.choice([1e-2, 1e-3, 1e-4])
        kept = [one for one in node.attribute if one.name != "epsilon"]
        del node.attribute[:]
        node.attribute.extend([*kept, helper.make_attribute("epsilon", epsilon)])
        detail = f"{epsilon:g}"
    elif node.op_type == "Softmax":
        del node.attribute[:]
        node.attribute.append(helper.make_attribute("axis", -2))
        detail = "softmax over another axis"
    elif fault == "axis" and choice < 0.6:
        detail = "output read transposed"
        inserted(graph, node, read_transposed(source, node))
    elif fault == "quantized" and choice < 0.4:
        detail = "output in 8 bits"
        name = node.output[0]
        graph.initializer.extend(
            [
                numpy_helper.from_array(np.array(0.05, np.float32), f"{name}_step"),
                numpy_helper.from_array(np.array(0, np.int8), f"{name}_zero"),
            ]
        )
        inserted(
            graph,
            node,
            [
                ("QuantizeLinear", [f"{name}_step", f"{name}_zero"], {}),
                ("DequantizeLinear", [f"{name}_step", f"{name}_zero"], {}),
            ],
        )
    else:
        weights = [name for name in node.input if name in stored and stored[name].dims]
        if not weights:
            raise NoFaultError
        name = draw.choice(weights)
        first = next(one for one in graph.node if name in one.input)
        module = modules.get(first.output[0], "")
        weight, detail = changed(numpy_helper.to_array(stored[name]), fault, draw)
        if weight.dtype != np.float32 or not module:
            raise NoFaultError
        stored[name].CopyFrom(numpy_helper.from_array(weight, name))
    onnx.save(model, out)
    return module, detail


def read_transposed(source: Path, node: Any) -> list[tuple[str, list[str], dict[str, Any]]]:
    values = {one.name: one for node in read_onnx(source).nodes for one in node.outputs}
    shape = values[node.output[0]].shape or ()
    if len(shape) < 2 or 1 in shape[-2:]:
        raise NoFaultError
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    return [("Transpose", [], {"perm": order}), ("Reshape", [f"shape {list(shape)}"], {})]


def inserted(graph: Any, node: Any, made: list[tuple[str, list[str], dict[str, Any]]]) -> None:
    """Insert nodes between a node and those that read it; the new nodes are of the same module."""
    name = node.output[0]
    current = node.output[0] = f"{name}_before"
    place = list(graph.node).index(node) + 1
    for step, (operator, further, attributes) in enumerate(made):
        for one in further:
            if one.startswith("shape "):
                shape = np.array(json.loads(one[6:]), np.int64)
                graph.initializer.append(numpy_helper.from_array(shape, f"{name}_shape"))
        further = [f"{name}_shape" if one.startswith("shape ") else one for one in further]
        output = name if step == len(made) - 1 else f"{name}_{step}"
        added = helper.make_node(
            operator, [current, *further], [output], f"{name}_{operator}", **attributes
        )
        added.metadata_props.extend(node.metadata_props)
        graph.node.insert(place + step, added)
        current = output


FAULT_IN = {"pt2": fault_in_pt2, "onnx": fault_in_onnx}


def base(work: Path, architecture: int, configuration: int, form: str) -> Path:
    """Return the program of an architecture and a configuration in a format; export it if it is new."""
    path = work / f"{ARCHITECTURES[architecture].__name__}_{configuration}.{form}"
    if path.exists():
        return path
    draw = random.Random(f"{architecture} {configuration}")
    torch.manual_seed(draw.randrange(2**31))
    model, inputs = ARCHITECTURES[architecture](draw)
    model = disturbed(model.eval())
    with quiet(), quiet_natively(), torch.no_grad():
        if form == "pt2":
            torch.export.save(torch.export.export(model, inputs), path)
        elif form == "onnx":
            exported = torch.export.load(base(work, architecture, configuration, "pt2"))
            torch.onnx.export(exported, (), path, dynamo=True, verbose=False, external_data=False)
        else:
            import litert_torch

            litert_torch.convert(model, inputs).export(str(path))
    return path


def effect(a: Path, b: Path) -> float:
    """Return the relative difference of the outputs of two files of one format."""
    with opened(str(a)) as one, opened(str(b)) as other:
        inputs = (one.random or random_inputs(one))(1)
        x, y = (
            np.concatenate([out.ravel() for out in form.record(inputs).outputs])
            for form in (one, other)
        )
    return float(np.linalg.norm(y - x) / np.linalg.norm(x))


def random_inputs(one: Any) -> Callable[[int], Any]:
    from whisperport.model.inspection.inputs import inputs_for, table_rows

    return lambda seed: inputs_for(one.graph.inputs, None, seed=seed, rows=table_rows(one.graph))


def run(number: int, seed: int, work: Path) -> Case:
    """Draw one case, write its two programs, and compare them."""
    draw = random.Random(f"{seed} {number}")
    architecture, configuration = number % len(ARCHITECTURES), 0
    pair = draw.choices(list(PAIRS), list(PAIRS.values()))[0]
    fault = draw.choice(FAULTS) if number % WITHOUT_FAULT else NO_FAULT
    if ARCHITECTURES[architecture] in SEVERAL and "tflite" not in pair:  # to convert takes minutes
        configuration = draw.randrange(2)
    case = Case(number, f"{ARCHITECTURES[architecture].__name__}", pair, fault)
    try:
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for form in pair.split("/"):
                file = base(work, architecture, configuration, form.rstrip("*"))
                if form.endswith("*") and fault != NO_FAULT:
                    file = faulty(case, file, Path(folder), draw)
                files.append(file)
            started = time.perf_counter()
            found = compare(*files, CompareOptions(trust=True, seed=number))
        case.seconds = time.perf_counter() - started
        case.matched, case.kept = len(found.values), found.kept
        if found.first is not None:
            case.named = found.values[found.first].fault
            case.joined = found.values[found.first].modules
            case.error = found.values[found.first].error
    except Exception as error:  # any failure is a result
        case.failure = f"{type(error).__name__}: {error}"[:300]
    return case


def faulty(case: Case, file: Path, folder: Path, draw: random.Random) -> Path:
    """Return a copy with a fault that changes the outputs; another fault if the drawn one cannot."""
    for _ in range(40):
        out = folder / f"faulty{file.suffix}"
        try:
            case.truth, case.detail = FAULT_IN[file.suffix[1:]](file, out, case.fault, draw)
            if effect(file, out) >= MIN_EFFECT:
                return out
        except NoFaultError:
            case.fault = draw.choice(FAULTS)
    raise RuntimeError("no fault changes the outputs")


def disturbed(model: nn.Module) -> nn.Module:
    """Add to every weight a drawn value: norms and biases begin at 1 and 0, which hides faults."""
    for one in model.parameters():
        with torch.no_grad():
            one += 0.1 * torch.randn_like(one)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.copy_(0.5 + torch.rand_like(buffer))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description="How often `compare` names the layer with a fault."
    )
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--work", type=Path, help="keeps the exported programs; default: a new folder"
    )
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of single cases")
    chosen = parser.parse_args()
    cases = []
    with (
        tempfile.TemporaryDirectory() as temporary,
        ProcessPoolExecutor(
            chosen.processes, multiprocessing.get_context("spawn"), prepare
        ) as pool,
    ):
        work = chosen.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        numbers = chosen.only or range(chosen.cases)
        for case in pool.map(run, numbers, repeat(chosen.seed), repeat(work)):
            cases.append(case)
            show(case)
            if not chosen.only:
                write(cases, chosen)
    for group, (right, of) in counted(cases).items():
        print(f"{group:18s} {right:4d} of {of}")


def prepare() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)


def show(case: Case) -> None:
    mark = "right" if case.right else "WRONG"
    print(
        f"{case.number:4d} {mark} {case.architecture} {case.pair} {case.fault} ({case.detail}): "
        f"{case.truth or '-'}; named {case.named or '-'}, error {case.error:.2g}, "
        f"{case.matched} of {case.kept} matched, {case.seconds:.1f} s {case.failure}",
        flush=True,
    )


def counted(cases: list[Case]) -> dict[str, tuple[int, int]]:
    """Return for each group of cases how many answers were right, and how many cases it has."""
    of, right = Counter[str](), Counter[str]()
    for case in cases:
        first = "all with a fault" if case.fault != NO_FAULT else "without a fault"
        for group in (first, case.pair, case.fault, case.architecture):
            of[group] += 1
            right[group] += case.right
        if case.right and case.named != case.truth:
            of["as the second of two"] += 1
            right["as the second of two"] += 1
    return {group: (right[group], count) for group, count in of.items()}


def write(cases: list[Case], chosen: argparse.Namespace) -> None:
    result = {
        "seed": chosen.seed,
        "versions": versions(("torch", "onnx", "onnxruntime", "ai-edge-litert", "transformers")),
        "right_of": counted(cases),
    }
    record("answers", f"compare_seed_{chosen.seed}", result)


if __name__ == "__main__":
    main()
