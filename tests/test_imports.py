"""Who may import whom, and what must not be imported where there is no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import whisperport
from whisperport.bundle import Bundle

# Bottom first: a module imports from those named before it, in its own layer too.
LAYERS = (
    (
        "errors",
        "progress",
        "interrupts",
        "ranges",
        "option",
        "program_kind",
        "spec",
        "masks",
        "placement",
        "checks",
        "evidence",
        "dims",
        "generation",
        "window",
        "signatures",
        "regular_file",
        "unpacking",
    ),
    (
        *(
            "atomic",
            "locking",
            "limited",
            "npy_file",
            "audio",
            "text",
            "protobuf",
            "bundle",
            "process",
        ),
        *("embedded_model", "memory", "runner", "host_part", "profiling"),
    ),
    ("checkpoint", "model", "programs", "rewrites", "inspection"),  # the build side: torch
    ("toolchain", "targets"),
    ("runtime", "verification", "calibration", "diagnosis"),
    (
        *(
            "preflight",
            "watchdog",
            "placing",
            "masking",
            "quantizing",
            "fetching",
            "exporting",
            "model_bundle",
            "transcription",
            "live",
            "lowering",
        ),
        *("fixing", "checking", "emulating", "artifacts", "compile_errors", "compiling"),
        *("importing", "inspecting", "planning"),
    ),
    ("bench", "doctor", "fastest", "demo", "providers"),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, name in enumerate(name for layer in LAYERS for name in layer)}
BUILD_SIDE = LAYERS[2]
HEAVY = {
    *("torch", "onnx", "onnx_ir", "onnxscript", "executorch", "transformers", "safetensors"),
    *("huggingface_hub", "requests", "torchao", "litert_torch", "ai_edge_quantizer"),
}
# Plugins do not import each other; what they share is named here.
SHARED = {
    "targets": {
        *("base", "compiler", "importer", "machine", "options", "partitioner"),
        "execution_provider",
        *(
            "onnx_attention",
            "onnx_blocks",
            "onnx_lowering",
            "onnx_runner",
            "onnx_shapes",
            "onnx_target",
            "onnx_own_weights",
            "onnx_weights",
            "program_files",
            "quantizing",
            "stage_report",
            "stated_signature",
            "supported",
        ),
        *("tflite_lowering", "tflite_quantization", "tflite_quantizing", "tflite_runner"),
    },
    "rewrites": {"base", "graph", "host"},
}

# Files that stand alone in another environment, which has torch: only functions import them.
STANDALONE = {"targets/aws_neuron/neuron_modules.py", "targets/aws_neuron/neuron_fused.py"}

ROOT = Path(whisperport.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}


def modules(nodes: Iterable[ast.AST]) -> Iterator[list[str]]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ([*(node.module or "").split("."), alias.name] for alias in node.names)


def run_at_import(nodes: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Statements that run when the file is imported: no function's body, nothing for types only."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from run_at_import(node.orelse)
            continue
        yield node
        yield from run_at_import(ast.iter_child_nodes(node))


def faults(file: str, source: str) -> list[str]:
    """What is wrong with the imports of `file`, a path relative to the package."""
    tree = ast.parse(source)
    mine = file.split("/")[0].removesuffix(".py")
    if mine == "__init__":  # the shop window shows what is below the command line
        return _heavy(tree) + [
            f"imports {name[1]}" for name in _ours(ast.walk(tree)) if name[1] in LAYERS[-1]
        ]
    if mine not in RANK:
        return [f"`{mine}` is in no layer"]
    found = [f"relative import at line {node.lineno}" for node in _relative(tree)]
    for name in _ours(ast.walk(tree)):
        if name[1] == mine:
            if (
                mine in SHARED
                and _is_plugin(file, mine)
                and name[2] not in {*SHARED[mine], file.split("/")[1]}  # a plugin may be a folder
            ):
                found.append(f"the plugin imports {'.'.join(name[1:])}, another plugin")
        elif name[1] not in RANK:
            continue  # `from whisperport import __version__`
        elif RANK[name[1]] > RANK[mine]:
            found.append(f"imports {name[1]}, which is not below it")
    if file in STANDALONE:
        return found + [f"imports {name[1]}, but stands alone" for name in _ours(ast.walk(tree))]
    return found + (_heavy(tree) if mine not in BUILD_SIDE else [])


def _ours(nodes: Iterable[ast.AST]) -> Iterator[list[str]]:
    return (name for name in modules(nodes) if name[0] == "whisperport" and len(name) > 1)


def _relative(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def _is_plugin(file: str, folder: str) -> bool:
    stem = file.split("/")[-1].removesuffix(".py")
    return stem != "__init__" and stem not in SHARED[folder]


def _heavy(tree: ast.Module) -> list[str]:
    at_import = list(modules(run_at_import(tree.body)))
    found = [f"imports {name[0]} when it is imported" for name in at_import if name[0] in HEAVY]
    return found + [
        f"imports {name[1]}, which needs torch, when it is imported"
        for name in at_import
        if name[0] == "whisperport" and name[1:2] and name[1] in BUILD_SIDE
    ]


@pytest.mark.parametrize("file", FILES)
def test_imports_point_down(file: str) -> None:
    assert not faults(file, FILES[file].read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("audio/mel.py", "from whisperport.targets import TARGETS", "not below"),
        ("runtime/cache.py", "def f():\n    from whisperport.cli import main", "not below"),
        ("model/encoder.py", "from whisperport.rewrites import REWRITES", "not below"),
        ("runtime/engine.py", "import torch", "imports torch"),
        ("runtime/engine.py", "class A:\n    import onnx.checker", "imports onnx"),
        ("runtime/engine.py", "try:\n    import torch\nexcept ImportError: ...", "imports torch"),
        ("runtime/engine.py", "if not TYPE_CHECKING:\n    import torch", "imports torch"),
        ("runtime/engine.py", "if TYPE_CHECKING: ...\nelse:\n    import torch", "imports torch"),
        ("targets/base.py", "from whisperport.programs.program import Program", "needs torch"),
        ("__init__.py", "from whisperport.checkpoint import Checkpoint", "needs torch"),
        ("__init__.py", "from whisperport.cli import main", "imports cli"),
        ("targets/xnnpack.py", "from whisperport.targets.onnxruntime import CPU", "another plugin"),
        ("targets/xnnpack.py", "from whisperport.targets import get_target", "another plugin"),
        (
            "targets/hailo/chips.py",
            "from whisperport.targets.xnnpack import FILE",
            "another plugin",
        ),
        ("rewrites/a.py", "from whisperport.rewrites.b import b", "another plugin"),
        ("utils/text.py", "import os", "no layer"),
        ("helpers.py", "import os", "no layer"),
        ("audio/mel.py", "from .pcm import SAMPLE_RATE", "relative"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, fault: str) -> None:
    assert any(fault in found for found in faults(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/engine.py", "if TYPE_CHECKING:\n    import torch"),
        ("targets/xnnpack.py", "def f():\n    import torch"),
        ("targets/xnnpack.py", "from whisperport.targets.base import Target"),
        ("targets/hailo/target.py", "from whisperport.targets.hailo.chips import Chip"),
        ("targets/__init__.py", "from whisperport.targets.xnnpack.target import Xnnpack"),
        ("model/encoder.py", "import torch"),
        ("cli/main.py", "import whisperport"),
    ],
)
def test_a_right_import_is_left_alone(file: str, source: str) -> None:
    assert not faults(file, source)


def test_every_layer_names_something_that_is_there() -> None:
    there = {file.split("/")[0].removesuffix(".py") for file in FILES} - {"__init__"}

    assert set(RANK) == there


BLOCKED = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names}:
            raise ImportError(f"{{name}} is not on this board")

sys.meta_path.insert(0, Blocked())
"""


def on_a_board(code: str, *arguments: object) -> Any:
    """Run `code` in a Python that has nothing of the build side."""
    return subprocess.run(
        [sys.executable, "-c", BLOCKED.format(names=HEAVY) + code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_package_and_the_command_line_import_without_torch() -> None:
    done = on_a_board(
        "import whisperport, whisperport.cli\n"
        "names = [name for name in whisperport.__all__ if 'heckpoint' not in name]\n"
        "names += ['CheckpointError']\n"
        "print(sum(hasattr(whisperport, name) for name in names))"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(whisperport.__all__) - 2)  # those that need torch


def test_a_board_without_torch_verifies_and_transcribes(exported: Any) -> None:
    code = """
import sys
import numpy as np
import whisperport

bundle = whisperport.Bundle.open(sys.argv[1])
assert whisperport.verify(bundle)
sound = (0.1 * np.random.default_rng(0).standard_normal(40_000)).astype(np.float32)
decode = whisperport.DecodeOptions(max_tokens=4)
options = whisperport.TranscribeOptions(decode=decode)
print(whisperport.transcribe(sound, bundle, options).duration_s)
"""
    bundle: Bundle = exported("onnxruntime")

    done = on_a_board(code, bundle.folder)

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "2.5"


@pytest.mark.parametrize(
    "code",
    [
        'whisperport.load_checkpoint("tiny")',
        'whisperport.export("tiny", "onnxruntime", sys.argv[1])',
    ],
)
def test_a_board_without_torch_says_what_to_install(code: str, tmp_path: Path) -> None:
    done = on_a_board(f"import sys, whisperport\n{code}", tmp_path / "out")

    assert "whisperport[export]" in done.stderr.splitlines()[-1]
    assert "MissingPackageError" in done.stderr
