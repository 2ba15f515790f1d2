"""Make small valid files of every format with this project and the libraries that users make them with.

Each group of files is made once, when it is first needed, in a folder that is kept.
"""

import argparse
import json
import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from whisperport.program.dims import Dims
from whisperport.program.generation import Generation
from whisperport.speech.text.byte_level import to_byte_characters

DIMS = Dims(
    n_mels=8,
    n_audio_ctx=10,  # 0.2 s
    n_audio_state=16,
    n_audio_head=2,
    n_audio_layer=1,
    n_text_ctx=24,
    n_text_state=16,
    n_text_head=2,
    n_text_layer=2,
    n_vocab=70,
    n_audio_ffn=64,
    n_text_ffn=64,
)
GENERATION = Generation(
    end_of_text=49,
    start_of_transcript=50,
    languages={"en": 51, "de": 52},
    tasks={"transcribe": 53, "translate": 54},
    start_of_previous=55,
    no_speech=56,
    no_timestamps=57,
    suppressed=(*range(10, 20), 50, 53, 54, 55, 56),
    suppressed_at_start=(3, 49),
)
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
SPECIAL: tuple[str, ...] = (
    "endoftext",
    "startoftranscript",
    "en",
    "de",
    "transcribe",
    "translate",
    "startofprev",
)
SPECIAL += ("nospeech", "notimestamps")
OPENAI_VOCABULARY = 51864  # a .pt file has no tokenizer: its vocabulary is one of OpenAI's
CODECS = {  # suffix -> encoder and the sample format that it needs
    "wav": ("pcm_s16le", "s16"),
    "f32.wav": ("pcm_f32le", "flt"),
    "flac": ("flac", "s16"),
    "mp3": ("libmp3lame", "fltp"),
    "ogg": ("libopus", "flt"),
    "oga": ("flac", "s16"),
    "webm": ("libopus", "flt"),
    "mka": ("pcm_s16le", "s16"),
    "m4a": ("aac", "fltp"),
    "aiff": ("pcm_s16be", "s16"),
    "wma": ("wmav2", "fltp"),
    "amr": ("libopencore_amrnb", "s16"),
    "tta": ("tta", "s16"),
    "caf": ("pcm_s16be", "s16"),
    "au": ("pcm_s16be", "s16"),
}


def folder_of(group: str, seeds: Path) -> Path:
    """Return the folder of a group; make it if it does not exist."""
    folder = seeds / group
    if not folder.is_dir():
        partial = seeds / f".{group}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        GROUPS[group](partial)
        partial.rename(folder)
    return folder


def tokenizer_json() -> bytes:
    """Return a tokenizer whose ids 0 to 48 are single letters, followed by Whisper's special tokens."""
    added = [
        {"id": number, "content": f"<|{name}|>", "special": True}
        for number, name in enumerate(SPECIAL, len(LETTERS))
    ]
    vocabulary = {
        to_byte_characters(letter.encode()): number for number, letter in enumerate(LETTERS)
    }
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    return json.dumps(
        {"added_tokens": added, "pre_tokenizer": {"type": "ByteLevel"}, "model": model}
    ).encode()


def _weights(dims: Dims) -> dict[str, Any]:
    """Return random tensors with a gain of about 1, with openai-whisper's names."""
    import torch

    from whisperport.model.checkpoint.tensor_check import expected_shapes

    generator = torch.Generator().manual_seed(0)
    found = {}
    for name, shape in expected_shapes(dims).items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) > 1:
            found[name] = noise / noise[0].numel() ** 0.5
        else:
            found[name] = 0.1 * noise + float("ln" in name and name.endswith("weight"))
    return found


def micro_checkpoint(dims: Dims = DIMS) -> Any:
    """Return a checkpoint of a few kilobytes, with random weights."""
    from whisperport.model.checkpoint.checkpoint import Checkpoint, Source

    return Checkpoint(
        dims=dims,
        generation=GENERATION,
        weights=_weights(dims),
        tokenizer_json=tokenizer_json(),
        source=Source(kind="openai", name="micro", sha256={}),
    )


def _bundle(folder: Path, target: str) -> None:
    """Export a window of 2.4 s, and let ONNX Runtime use one of 1.5 s, as if it had been verified."""
    import numpy as np

    from whisperport.build.export.export import export
    from whisperport.build.export.export_options import ExportOptions
    from whisperport.program.bundle import MANIFEST, SILENCE
    from whisperport.program.bundle.writing import writing_bundle
    from whisperport.program.window import ShortWindows
    from whisperport.targets import RunOptions
    from whisperport.verification.clips import Clip

    dims = replace(DIMS, n_audio_ctx=120)
    random = np.random.default_rng(0)
    hiss = 0.1 * random.standard_normal(16_000)
    options = ExportOptions(
        clips=(Clip("hiss", "", hiss.astype(np.float32)),),
        run=RunOptions(threads=1),
        allow_unverified=True,
    )
    bundle = export(micro_checkpoint(dims), target, folder / "bundle", options)
    if target != "onnxruntime":
        return
    manifest = replace(
        bundle.manifest, short_windows=ShortWindows(positions=(75,), min_logprob=-30.0)
    )
    with writing_bundle(bundle.folder) as writer:
        shutil.copytree(bundle.folder, writer.folder, dirs_exist_ok=True)
        (writer.folder / MANIFEST).unlink()
        silence = random.standard_normal((dims.n_audio_ctx, dims.n_audio_state))
        np.save(writer.folder / SILENCE, silence.astype(np.float16))
        writer.commit(manifest)


def _checkpoint(folder: Path, dims: Dims = DIMS) -> None:
    """Make a checkpoint folder in Hugging Face's format."""
    from safetensors.torch import save_file

    from whisperport.model.checkpoint.huggingface import CONFIG_KEYS
    from whisperport.model.checkpoint.names import to_huggingface

    weights = {to_huggingface(name): tensor for name, tensor in _weights(dims).items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    sizes = {key: getattr(dims, field) for field, key in CONFIG_KEYS.items()}
    known = {"begin_suppress_tokens": [3, 49], "suppress_tokens": list(GENERATION.suppressed)}
    config = {"model_type": "whisper", "activation_function": "gelu", "decoder_start_token_id": 50}
    (folder / "config.json").write_text(json.dumps({**config, **sizes, **known}, indent=1))
    generation = {
        **known,
        "decoder_start_token_id": 50,
        "eos_token_id": 49,
        "no_timestamps_token_id": 57,
        "prev_sot_token_id": 55,
        "is_multilingual": True,
        "lang_to_id": {f"<|{code}|>": number for code, number in GENERATION.languages.items()},
        "task_to_id": dict(GENERATION.tasks),
        "alignment_heads": [[1, 0], [1, 1]],
        "language": "<|en|>",
    }
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=1))
    (folder / "tokenizer.json").write_bytes(tokenizer_json())
    vocabulary = json.loads(tokenizer_json())["model"]["vocab"]
    parts = folder / "parts"  # the same tokenizer as older libraries save it
    parts.mkdir()
    (parts / "vocab.json").write_text(json.dumps(vocabulary))
    (parts / "merges.txt").write_text("#version: 0.2\n")
    added = {f"<|{name}|>": number for number, name in enumerate(SPECIAL, len(LETTERS))}
    (parts / "added_tokens.json").write_text(json.dumps(added))
    decoder = {str(number): {"content": name, "special": True} for name, number in added.items()}
    (parts / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))


def _pt(folder: Path) -> None:
    """Make a `.pt` file as openai-whisper saves it, and a Hugging Face folder without safetensors."""
    import torch

    from whisperport.model.checkpoint.names import to_huggingface

    sizes = asdict(DIMS) | {"n_vocab": OPENAI_VOCABULARY}
    weights = {name: tensor.half() for name, tensor in _weights(Dims(**sizes)).items()}
    stated = {name: size for name, size in sizes.items() if not name.endswith("ffn")}
    torch.save({"dims": stated, "model_state_dict": weights}, folder / "model.pt")
    renamed = {to_huggingface(name): tensor for name, tensor in _weights(DIMS).items()}
    torch.save(renamed, folder / "pytorch_model.bin")


def _adapter(folder: Path) -> None:
    """Make an adapter of PEFT for the checkpoint of a few kilobytes."""
    import torch
    from safetensors.torch import save_file

    from whisperport.program.low_rank import LowRank
    from whisperport.runtime.engine.adapters import all_layers

    layers = all_layers(DIMS, LowRank(2))
    shapes = {f"{e.name}.lora_A.weight": (2, e.n_inputs) for e in layers}
    shapes |= {f"{e.name}.lora_B.weight": (e.n_outputs, 2) for e in layers}
    tensors = {f"base_model.model.{n}": torch.full(shape, 0.1) for n, shape in shapes.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "base_model_name_or_path": "micro", "r": 2, "lora_alpha": 4}
    settings |= {"rank_pattern": {"fc1": 2}, "alpha_pattern": {"fc1": 4}, "use_rslora": False}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def _ctranslate2(folder: Path) -> None:
    from fuzz.conversions import ctranslate2_variables, int8_variables, write_ctranslate2

    settings = {
        "suppress_ids": list(GENERATION.suppressed),
        "suppress_ids_begin": [3, 49],
        "lang_ids": [51, 52],
        "alignment_heads": [[1, 0], [1, 1]],
    }
    variables = ctranslate2_variables(DIMS, _weights(DIMS))
    write_ctranslate2(folder / "float", variables, settings, tokenizer_json())
    write_ctranslate2(folder / "int8", int8_variables(variables), settings, tokenizer_json())


def _ggml(folder: Path) -> None:
    from fuzz.conversions import ggml_bytes

    dims = Dims(**asdict(DIMS) | {"n_vocab": OPENAI_VOCABULARY})
    (folder / "ggml.bin").write_bytes(ggml_bytes(dims, _weights(dims), half=True))


def _onnx(folder: Path) -> None:
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)
    weight = random.standard_normal((16, 24)).astype(np.float32)
    table = random.standard_normal((100, 16)).astype(np.float32)
    stored = {"w": weight, "table": table, "shape": np.array([2, -1]), "yes": np.array(True)}
    branch = [
        helper.make_graph(
            [helper.make_node(op, ["soft"], [name])],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )
        for op, name in (("Relu", "then"), ("Neg", "other"))
    ]
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["found"], axis=0),
        helper.make_node("Add", ["found", "x"], ["sum"]),
        helper.make_node("MatMul", ["sum", "w"], ["h"]),
        helper.make_node("Softmax", ["h"], ["soft"], axis=-1),
        helper.make_node("If", ["yes"], ["chosen"], then_branch=branch[0], else_branch=branch[1]),
        helper.make_node("Reshape", ["chosen", "shape"], ["y"]),
    ]
    inputs = [
        helper.make_tensor_value_info("ids", TensorProto.INT64, [1, 3]),
        helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16]),
    ]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, [2, 36])
    initializers = [numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "graph", inputs, [output], initializers)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)
    onnx.checker.check_model(model)
    onnx.save(model, folder / "inside.onnx")
    onnx.save_model(
        model,
        folder / "outside.onnx",
        save_as_external_data=True,
        location="weights.bin",
        size_threshold=100,
    )


def _block() -> tuple[Any, tuple[Any, ...]]:
    """Make a small decoder: a lookup, two matrix multiplications, attention, and logits."""
    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(100, 16)
            self.norm = nn.LayerNorm(16)
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

        def forward(self, tokens: Any, x: Any) -> tuple[Any, Any]:
            h = self.norm(self.table(tokens) + x)
            h = h + self.second(nn.functional.gelu(self.first(h)))
            first, second = h.split(8, -1)
            return torch.cat([first, second], -1) @ self.table.weight.T, first

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Block().eval(), (torch.zeros(1, 8, dtype=torch.int64), torch.rand(1, 8, 16))


def _pt2(folder: Path) -> None:
    import torch

    module, inputs = _block()
    torch.export.save(torch.export.export(module, inputs, strict=False), folder / "block.pt2")


def _pte(folder: Path) -> None:
    (folder / "block.pte").write_bytes(xnnpack_pte(*_block()))


def xnnpack_pte(module: Any, inputs: tuple[Any, ...]) -> bytes:
    """Lower a module with ExecuTorch's own calls, without any rewrite."""
    import torch
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    from whisperport.model.inspection.quiet import quiet

    with quiet():
        exported = torch.export.export(module, inputs, strict=False)
        edge = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        return bytes(edge.to_executorch().buffer)


def _tflite(folder: Path) -> None:
    (folder / "sum.tflite").write_bytes(product_sum_product(16))


def product_sum_product(width: int) -> bytes:
    """Make a TFLite file: x (4, width), a matrix multiplication, a cumulative sum, a matrix multiplication.

    It is built with the schema in LiteRT's package.
    """
    import flatbuffers  # type: ignore[import-untyped]
    import numpy as np
    from ai_edge_litert import schema_py_generated as tflite

    random = np.random.default_rng(0)
    weight = random.standard_normal((width, width)).astype(np.float32)
    contents = [None, weight, np.zeros(width, np.float32), np.array(1, np.int32), None, None, None]
    names = ["x", "weight", "bias", "axis", "product", "sum", "out"]
    shapes = [[4, width], [width, width], [width], [], *[[4, width]] * 3]
    model, graph = tflite.ModelT(), tflite.SubGraphT()
    model.version, model.subgraphs, model.buffers = 3, [graph], [tflite.BufferT()]
    graph.tensors, graph.inputs, graph.outputs = [], [0], [6]
    for name, shape, content in zip(names, shapes, contents, strict=True):
        tensor, buffer = tflite.TensorT(), tflite.BufferT()
        tensor.name, tensor.shape, tensor.buffer = name, shape, 0
        tensor.type = tflite.TensorType.INT32 if name == "axis" else tflite.TensorType.FLOAT32
        if content is not None:
            buffer.data = np.frombuffer(content.tobytes(), np.uint8)
            model.buffers.append(buffer)
            tensor.buffer = len(model.buffers) - 1
        graph.tensors.append(tensor)
    codes, options = tflite.BuiltinOperator, tflite.BuiltinOptions
    product = (tflite.FullyConnectedOptionsT(), options.FullyConnectedOptions)
    model.operatorCodes, graph.operators = [], []
    for number, (code, inputs, output, (option, kind)) in enumerate(
        [
            (codes.FULLY_CONNECTED, [0, 1, 2], 4, product),
            (codes.CUMSUM, [4, 3], 5, (tflite.CumsumOptionsT(), options.CumsumOptions)),
            (codes.FULLY_CONNECTED, [5, 1, 2], 6, product),
        ]
    ):
        known, operator = tflite.OperatorCodeT(), tflite.OperatorT()
        known.builtinCode, known.deprecatedBuiltinCode, known.version = code, min(code, 127), 1
        operator.opcodeIndex, operator.inputs, operator.outputs = number, inputs, [output]
        operator.builtinOptions, operator.builtinOptionsType = option, kind
        model.operatorCodes.append(known)
        graph.operators.append(operator)
    builder = flatbuffers.Builder(0)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _openvino(folder: Path) -> None:
    import numpy as np
    import openvino as ov
    from openvino import opset13 as ops

    random = np.random.default_rng(0)
    x = ops.parameter([1, 3, 16], np.float32, name="x")
    weight = ops.constant(random.standard_normal((16, 24)).astype(np.float32))
    info = ov.op.util.VariableInfo()
    info.variable_id, info.data_shape, info.data_type = (
        "sum",
        ov.PartialShape([1, 3, 24]),
        ov.Type.f32,
    )
    state = ov.op.util.Variable(info)
    product = ops.matmul(x, weight, False, False)
    added = ops.add(ops.read_value(ops.constant(np.zeros((1, 3, 24), np.float32)), state), product)
    h = ops.softmax(added, -1)
    y = ops.reshape(h, ops.constant(np.array([2, -1])), False)
    model = ov.Model([y.output(0)], [ops.assign(added, state)], [x], "block")
    ov.save_model(model, folder / "block.xml", compress_to_fp16=False)


def _hef(folder: Path) -> None:
    """Write the description of an encoder's network; the header is made for each input."""
    from tests.targets.vendors.hailo.hef_file import described

    shapes = {"net/input": (1, 20, 8)}, {"net/output": (1, 10, 16)}
    (folder / "description").write_bytes(described(1, *shapes))


def _layout(folder: Path) -> None:
    """Make a folder as of an app, with the record of a verification that failed for one of two clips."""
    from hashlib import sha256

    from whisperport.build.layouts.record import (
        KnownClip,
        LayoutRecord,
        Verification,
        hashes,
        record_path,
        write_record,
    )
    from whisperport.build.layouts.reference import Emitted, TimedText
    from whisperport.program.checks import Check
    from whisperport.verification.clips import shipped_clips

    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.onnx").write_bytes(bytes(1000))
    (folder / "config.json").write_text("{}")
    emitted = Emitted((1, 2, 3), " hello", (TimedText(0.0, 1.5, " hello"),), 50)
    clips = shipped_clips(2)
    digests = [sha256(clip.samples.tobytes()).hexdigest() for clip in clips]
    known = zip(clips, digests, strict=True)
    checks = [
        Check(
            level="tokens",
            program="app",
            what=clip.name,
            value={"tokens": 3},
            rule="the same tokens",
            passed=passed,
            reason="" if passed else "another token",
        )
        for clip, passed in zip(clips, (True, False), strict=True)
    ]
    record = LayoutRecord(
        app="faster-whisper",
        precision="fp32",
        exact=True,
        language="en",
        window_s=30.0,
        source={"kind": "openai", "sha256": {}},
        files=hashes(folder),
        clips=tuple(KnownClip(clip.name, "", clip.text, hash, emitted) for clip, hash in known),
        verification=Verification(
            versions={"app": "1"}, machine={"cpu": "x"}, date="2026-01-01", checks=tuple(checks)
        ),
    )
    write_record(record_path(folder), record)


def _layouts(folder: Path, *, of_pte: bool = False) -> None:
    """Write the files of each app that reads a checkpoint of a few kilobytes.

    Args:
        folder: to write to.
        of_pte: those of ExecuTorch's apps, which XNNPACK's compiler makes, in place of all others.
    """
    from whisperport.build.layouts import all_layouts, huggingface_files
    from whisperport.build.layouts.openvino_genai.folder import write_graphs

    with_space = tokenizer_json().replace(b'"W"', json.dumps(to_byte_characters(b" ")).encode())
    checkpoint = replace(micro_checkpoint(), tokenizer_json=with_space)
    for layout in all_layouts():
        app = next(iter(layout.apps))
        if of_pte != ("executorch" in app):
            continue
        path = folder / f"{app}{layout.suffix}"
        if layout.suffix:
            shutil.copyfile(folder_of("ggml", folder.parent) / "ggml.bin", path)
            continue
        path.mkdir()
        if app == "openvino-genai":  # the app would make the graphs of the tokenizer
            write_graphs(checkpoint, "fp32", path)
            (path / "openvino_detokenizer.xml").touch()
            for name in ("config", "generation_config", "tokenizer_json"):
                written = getattr(huggingface_files, name)(checkpoint)
                huggingface_files.write_json(path / f"{name.replace('_json', '')}.json", written)
        else:
            layout.write(checkpoint, "fp32", path)
    if of_pte:
        return
    (folder / "pair").mkdir()
    _pair(folder / "pair")
    (folder / "rknn").mkdir()
    _rknn(folder / "rknn", checkpoint.dims)


def _rknn(folder: Path, dims: Any) -> None:
    """Write compiled files of an encoder and a decoder, without their graphs."""
    from tests.targets.vendors.rockchip.rknn_bytes import description, rknn_bytes

    from whisperport.build.layouts.sherpa_onnx.npu_graphs import Form, signatures

    for spec in signatures(dims, Form("tiny-")).values():
        (folder / f"tiny-{spec.name}.rknn").write_bytes(rknn_bytes(description(spec)))


def _pair(folder: Path) -> None:
    """Write an encoder of 20 s and a decoder of 4 tokens as ONNX graphs of no app."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    random = np.random.default_rng(0)

    def write(name: str, nodes: Sequence[Any], shapes: Any, stored: dict[str, Any]) -> None:
        inputs, outputs = (
            [
                helper.make_tensor_value_info(
                    end, TensorProto.INT64 if end == "tokens" else TensorProto.FLOAT, shape
                )
                for end, shape in ends.items()
            ]
            for ends in shapes
        )
        weights = [
            numpy_helper.from_array(random.standard_normal(shape).astype(np.float32), end)
            for end, shape in stored.items()
        ]
        graph = helper.make_graph(nodes, name, inputs, outputs, weights)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
        onnx.save(model, folder / f"{name}.onnx")

    node = helper.make_node
    nodes = [
        node("Conv", ["x", "conv"], ["rows"], strides=[2], pads=[1, 1]),
        node("Transpose", ["rows"], ["columns"], perm=[0, 2, 1]),
        node("Add", ["columns", "positions"], ["audio"]),
    ]
    shapes: Any = {"x": [1, 80, 2000]}, {"audio": [1, 1000, 8]}
    write("encoder", nodes, shapes, {"conv": (8, 80, 3), "positions": (1000, 8)})
    nodes = [
        node("Gather", ["table", "tokens"], ["embeddings"]),
        node("ReduceMean", ["audio"], ["mean"], axes=[1]),
        node("Add", ["embeddings", "mean"], ["sum"]),
        node("MatMul", ["sum", "projection"], ["logits"]),
    ]
    shapes = {"tokens": [1, 4], "audio": [1, 1000, 8]}, {"logits": [1, 4, 1000]}
    write("decoder", nodes, shapes, {"table": (1000, 8), "projection": (8, 1000)})


def _tables(folder: Path) -> None:
    import numpy as np

    random = np.random.default_rng(0)
    np.save(folder / "table.npy", random.standard_normal((10, 16)).astype(np.float32))
    x, ids = random.standard_normal((1, 3, 16)), np.zeros((1, 3), np.int64)
    np.savez(folder / "plain.npz", x=x, ids=ids)
    np.savez_compressed(folder / "packed.npz", x=x, ids=ids)


def _audio(folder: Path) -> None:
    """Write a rising tone of a third of a second in every format that this FFmpeg can write."""
    import av
    import numpy as np

    rate = 16_000
    t = np.arange(rate // 3) / rate
    tone = (0.4 * np.sin(2 * np.pi * (200 + 200 * t) * t)).astype(np.float32)
    for suffix, (codec, form) in CODECS.items():
        if codec not in av.codecs_available:
            continue
        own = 8_000 if suffix == "amr" else rate
        path = folder / f"tone.{suffix}"
        with av.open(str(path), "w") as container:
            stream: Any = container.add_stream(codec, rate=own, layout="mono")
            if suffix == "wma":  # its encoder has no default
                stream.bit_rate = 64_000
            frame = av.AudioFrame.from_ndarray(tone[None], format="fltp", layout="mono")
            frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
            converter = av.AudioResampler(format=form, layout="mono", rate=own)
            for converted in (*converter.resample(frame), *converter.resample(None)):
                container.mux(stream.encode(converted))
            container.mux(stream.encode(None))
    (folder / "list.m3u8").write_text("#EXTM3U\n#EXT-X-TARGETDURATION:9\n#EXTINF:9,\ntone.wav\n")
    (folder / "list.ffconcat").write_text("ffconcat version 1.0\nfile tone.wav\n")
    (folder / "list.sdp").write_text("v=0\nm=audio 5004 RTP/AVP 0\nc=IN IP4 127.0.0.1\n")
    header = struct.pack("<4sI4s4sIHHIIHH4sI", *_wave64())
    (folder / "tone.wide.wav").write_bytes(header + bytes(6400))


def _wave64() -> tuple[Any, ...]:
    """Return the header of a wav file with 64 channels."""
    form = (1, 64, 16_000, 16_000 * 128, 128, 16)
    return (b"RIFF", 36 + 6400, b"WAVE", b"fmt ", 16, *form, b"data", 6400)


GROUPS: dict[str, Callable[[Path], None]] = {
    "bundle-onnxruntime": lambda folder: _bundle(folder, "onnxruntime"),
    "bundle-xnnpack": lambda folder: _bundle(folder, "xnnpack"),
    "checkpoint": _checkpoint,
    "pt": _pt,
    "adapter": _adapter,
    "ctranslate2": _ctranslate2,
    "ggml": _ggml,
    "onnx": _onnx,
    "pt2": _pt2,
    "pte": _pte,
    "tflite": _tflite,
    "openvino": _openvino,
    "hef": _hef,
    "layout": _layout,
    "layouts": _layouts,
    "layouts-pte": lambda folder: _layouts(folder, of_pte=True),
    "tables": _tables,
    "audio": _audio,
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Make groups of seeds in this process, so that the campaign's process needs less memory."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("seeds", type=Path)
    parser.add_argument("groups", nargs="*", choices=(*GROUPS, []))
    chosen = parser.parse_args(arguments)
    for group in chosen.groups or GROUPS:
        folder_of(group, chosen.seeds)


if __name__ == "__main__":
    main()
