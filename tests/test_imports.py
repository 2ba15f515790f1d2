"""The map of ARCHITECTURE.md: who imports whom, who names a vendor, and what needs no torch."""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import whisperport
from whisperport.build.layouts import all_layouts
from whisperport.program.bundle import Bundle
from whisperport.targets import MODULES

ROOT = Path(whisperport.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path for path in sorted(ROOT.rglob("*.py"))}
PAGE = Path(__file__).parents[1] / "ARCHITECTURE.md"


def read_map(page: str) -> dict[str, list[str]]:
    """Rooms of the map, in its order -> their folders in the map's order."""
    (block,) = re.findall(r"^## The map$.*?^```text\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)
    rooms: dict[str, list[str]] = {}
    for row in block.splitlines():
        name = row.split()[0]
        if row.startswith(" "):
            rooms[next(reversed(rooms))].append(name)
        else:
            rooms[name] = []
    return rooms


# A module imports from the rooms above its own, and from its own.
MAP = read_map(PAGE.read_text(encoding="utf-8"))
RANK = {name: rank for rank, name in enumerate(("errors", *MAP, "__main__"))}
NEEDS_TORCH = "model"
HEAVY = {
    *("torch", "onnx", "onnx_ir", "onnxscript", "executorch", "transformers", "safetensors"),
    *("huggingface_hub", "requests", "torchao", "litert_torch", "ai_edge_quantizer"),
    *("pyarrow", "ray"),
}
# Plugins do not import each other. The other modules of these two folders are what plugins share.
PLUGINS = {tuple(module.split(".")[:2]) for module in MODULES}
REWRITES_SHARE = {"__init__", "graph_edits", "host", "rewrite"}
# Files that stand alone in another environment, which has torch: only functions import them.
STANDALONE = {"targets/vendors/aws_neuron/neuron_modules.py"}


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
            f"imports {'.'.join(name[1:3])}"
            for name in _ours(ast.walk(tree))
            if name[1:3] == ["apps", "cli"] or name[1] == "__main__"
        ]
    if mine not in RANK:
        return [f"`{mine}` is not in the map"]
    folders = MAP.get(mine, [])
    within = file.partition("/")[2].partition("/")[0]
    if file.count("/") > 1 and within not in folders:
        return [f"`{within}` is not in the map of {mine}"]
    found = [f"relative import at line {node.lineno}" for node in _relative(tree)]
    for name in _ours(ast.walk(tree)):
        if name[1] in RANK and RANK[name[1]] > RANK[mine]:
            found.append(f"imports {name[1]}, which is not above it in the map")
        inside = folders[folders.index(within) + 1 :] if within in folders else []
        if name[1] == mine and name[2] in inside:
            found.append(f"imports {name[2]}, which is not above it in the map of {mine}")
        if _is_another_plugin(file, name):
            found.append(f"the plugin imports {'.'.join(name[1:])}, another plugin")
    if file in STANDALONE:
        return found + [f"imports {name[1]}, but stands alone" for name in _ours(ast.walk(tree))]
    return found + (_heavy(tree) if mine != NEEDS_TORCH else [])


def _ours(nodes: Iterable[ast.AST]) -> Iterator[list[str]]:
    return (name for name in modules(nodes) if name[0] == "whisperport" and len(name) > 1)


def _relative(tree: ast.AST) -> list[ast.ImportFrom]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level]


def _is_another_plugin(file: str, name: list[str]) -> bool:
    """Whether a target or a rewrite imports a plugin that it is not a part of."""
    own, other = _plugin(file.removesuffix(".py").split("/")), _plugin(name[1:])
    if name[1:2] == ["targets"] and file.startswith("targets/"):
        return bool(other and other != own) or bool(own and name[2:3] == ["get_target"])
    return bool(own and other and own != other)


def _plugin(path: list[str]) -> str:
    """The plugin that a module, as the parts of its name below the package, is a part of, or nothing."""
    if path[0] == "targets":
        return path[2] if tuple(path[1:3]) in PLUGINS else ""
    is_rewrite = path[:2] == ["model", "rewrites"] and len(path) > 2
    return path[2] if is_rewrite and path[2] not in REWRITES_SHARE else ""


def _heavy(tree: ast.Module) -> list[str]:
    at_import = list(modules(run_at_import(tree.body)))
    found = [f"imports {name[0]} when it is imported" for name in at_import if name[0] in HEAVY]
    return found + [
        f"imports {name[1]}, which needs torch, when it is imported"
        for name in at_import
        if name[:2] == ["whisperport", NEEDS_TORCH]
    ]


def test_imports_point_down() -> None:
    assert len(FILES) > 500
    assert [
        f"{name}: {fault}"
        for name, file in FILES.items()
        for fault in faults(name, file.read_text(encoding="utf-8"))
    ] == []


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("speech/audio/mel.py", "from whisperport.targets import TARGETS", "not above"),
        ("runtime/a.py", "def f():\n    from whisperport.apps.cli import main", "not above"),
        ("model/network/a.py", "from whisperport.model.rewrites import REWRITES", "not above"),
        ("runtime/engine/engine.py", "import torch", "imports torch"),
        ("runtime/engine/engine.py", "class A:\n    import onnx.checker", "imports onnx"),
        ("runtime/a.py", "try:\n    import torch\nexcept ImportError: ...", "imports torch"),
        ("runtime/a.py", "if not TYPE_CHECKING:\n    import torch", "imports torch"),
        ("runtime/a.py", "if TYPE_CHECKING: ...\nelse:\n    import torch", "imports torch"),
        ("targets/base.py", "from whisperport.model.trace.program import Program", "needs torch"),
        ("__init__.py", "from whisperport.model.checkpoint import Checkpoint", "needs torch"),
        ("__init__.py", "from whisperport.apps.cli import main", "imports apps.cli"),
        (
            "targets/cpu/xnnpack/a.py",
            "from whisperport.targets.cpu.onnxruntime import CPU",
            "another plugin",
        ),
        (
            "targets/cpu/xnnpack/a.py",
            "from whisperport.targets import get_target",
            "another plugin",
        ),
        ("targets/base.py", "from whisperport.targets.cpu.xnnpack import FILE", "another plugin"),
        (
            "targets/vendors/hailo/chips.py",
            "from whisperport.targets.cpu.xnnpack import FILE",
            "another plugin",
        ),
        ("model/rewrites/a.py", "from whisperport.model.rewrites.b import b", "another plugin"),
        ("utils/text.py", "import os", "not in the map"),
        ("speech/utils/text.py", "import os", "not in the map"),
        ("helpers.py", "import os", "not in the map"),
        ("speech/audio/mel.py", "from .pcm import SAMPLE_RATE", "relative"),
    ],
)
def test_a_wrong_import_is_found(file: str, source: str, fault: str) -> None:
    assert any(fault in found for found in faults(file, source))


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("runtime/a.py", "if TYPE_CHECKING:\n    import torch"),
        ("targets/cpu/xnnpack/a.py", "def f():\n    import torch"),
        ("targets/cpu/xnnpack/a.py", "from whisperport.targets.base import Target"),
        (
            "targets/vendors/hailo/target.py",
            "from whisperport.targets.vendors.hailo.chips import Chip",
        ),
        ("targets/__init__.py", "import os"),
        ("model/network/encoder.py", "import torch"),
        ("apps/cli/main.py", "import whisperport"),
    ],
)
def test_a_right_import_is_left_alone(file: str, source: str) -> None:
    assert not faults(file, source)


def test_the_map_names_what_is_there_and_nothing_else() -> None:
    there = {file.split("/")[0].removesuffix(".py") for file in FILES} - {"__init__"}

    assert set(RANK) == there
    assert len(MAP) <= 10
    for room, folders in MAP.items():
        inner = {path.name for path in (ROOT / room).iterdir() if (path / "__init__.py").is_file()}
        assert {*folders} == inner


def test_no_modules_import_each_other_in_a_circle_not_for_types_either() -> None:
    known = {_dotted(file): path for file, path in FILES.items()}
    imports = {
        name: {
            found
            for module in _ours(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            if (found := _longest(module, known)) not in ("whisperport", name)
        }
        for name, path in known.items()
    }

    try:
        order = tuple(TopologicalSorter(imports).static_order())
    except CycleError as error:
        pytest.fail(f"in a circle: {' -> '.join(error.args[1])}")

    assert len(order) == len(known)


def _dotted(file: str) -> str:
    return ".".join(("whisperport", *file.removesuffix(".py").split("/"))).removesuffix(".__init__")


def _longest(module: list[str], known: dict[str, Path]) -> str:
    """The longest part of a dotted name that is a module."""
    names = (".".join(module[:length]) for length in range(len(module), 0, -1))
    return next(name for name in names if name in known)


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
        "import whisperport, whisperport.apps.cli\n"
        "names = [name for name in whisperport.__all__ if 'heckpoint' not in name]\n"
        "print(sum(hasattr(whisperport, name) for name in names))"
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(len(whisperport.__all__) - 2)  # those that need torch


# What one transcription does not need, and what would take half of its start.
NOT_TO_TRANSCRIBE = (
    "whisperport.targets.vendors",
    "whisperport.build.search",
    "whisperport.build.layouts",
    "whisperport.verification.diagnosis.diagnosing",
    "jiwer",
)


# And what a bundle that was exported on this machine does not need either, when its programs are loaded.
NOT_TO_LOAD = (
    "whisperport.program.bundle.writing",
    "whisperport.program.bundle.staging",
    "whisperport.runtime.engine.trial",
    "whisperport.targets.compiler",
    "whisperport.targets.toolchain",
)


def test_the_command_that_transcribes_imports_no_target_and_nothing_to_compare() -> None:
    done = on_a_board("import sys, whisperport.apps.cli.transcribe\nprint(*sys.modules)")

    assert done.returncode == 0, done.stderr
    imported = done.stdout.split()
    assert [name for name in imported if name.startswith(NOT_TO_TRANSCRIBE)] == []
    assert "whisperport.apps.cli.transcribe" in imported


def test_a_board_without_torch_verifies_and_transcribes(exported: Any) -> None:
    code = """
import sys
import numpy as np
import whisperport

bundle = whisperport.Bundle.open(sys.argv[1])
whisperport.Transcriber(bundle)
print(*sys.modules)
assert whisperport.verify(bundle)
sound = (0.1 * np.random.default_rng(0).standard_normal(40_000)).astype(np.float32)
decode = whisperport.DecodeOptions(max_tokens=4)
options = whisperport.TranscribeOptions(decode=decode)
print(whisperport.transcribe(sound, bundle, options).duration_s)
"""
    bundle: Bundle = exported("onnxruntime")

    done = on_a_board(code, bundle.folder)

    assert done.returncode == 0, done.stderr
    modules, duration = done.stdout.splitlines()
    assert [name for name in modules.split() if name.startswith(NOT_TO_LOAD)] == []
    assert "whisperport.targets.cpu.onnxruntime" in modules.split()
    assert duration == "2.5"


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


LIST = ROOT / "targets" / "__init__.py"
# Libraries that run on any CPU, and whose formats, .pte and .tflite, compilers of several vendors read.
NOT_VENDORS = {"xnnpack", "litert", "onnx", "tflite"}
# One table recognizes graphs by the names that vendors' scripts give their inputs; rules quote messages.
FORMS, PAIR_RULES = (f"build/layouts/graph_pair/{name}.py" for name in ("forms", "rules"))
# The app runs on the chips of several vendors: a file for each, and its loop.
ON_NPUS = "build/layouts/sherpa_onnx"
# Vendor -> files that may contain its name.
EXCEPTIONS = {
    "hailo": [FORMS],
    "mediatek": [FORMS],
    "qualcomm": [
        PAIR_RULES,
        *(f"{ON_NPUS}/{name}.py" for name in ("npu_client", "qnn")),
    ],
    "rockchip": [FORMS, f"{ON_NPUS}/npu_client.py", f"{ON_NPUS}/rknn.py"],
    "openvino": [
        # It names what has changed in a file of any format.
        "build/layouts/parts.py",
        # It recognizes checkpoints on model hubs that another tool converted, by their file names.
        "model/checkpoint/other_forms.py",
    ],
}
# Vendor -> its folder's folder.
VENDORS = {
    folder.name: folder.parent.name
    for folder in sorted((ROOT / "targets").glob("*/*"))
    if folder.is_dir() and (folder / "__init__.py").is_file() and folder.name not in NOT_VENDORS
}


def naming(name: str, words: tuple[str, ...], root: Path) -> list[str]:
    """Files below `root` that contain a vendor's name anywhere, or, in code, one of its words.

    A word is not part of a longer word of letters: `hef` is in `read_hef`, and not in `chef`.
    """
    pattern = re.compile("|".join(rf"(?<![a-z]){re.escape(word)}(?![a-z])" for word in words))
    found = []
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        try:
            text = path.read_text(encoding="utf-8").lower()
        except UnicodeDecodeError:
            continue  # audio, weights
        in_code = path.suffix == ".py" and words and pattern.search(text)
        if name in text or in_code:
            found.append(path.relative_to(root).as_posix())
    return found


def declared(vendor: str) -> tuple[str, ...]:
    return importlib.import_module(f"whisperport.targets.{VENDORS[vendor]}.{vendor}").VENDOR_WORDS


def test_there_are_vendors():
    assert "hailo" in VENDORS
    assert "hef" in declared("hailo")


@pytest.mark.parametrize("vendor", VENDORS)
def test_only_a_vendors_own_folder_and_the_list_of_targets_name_it(vendor):
    # Also the layout of an app on this vendor's runtime, and the list of layouts.
    layouts = (f"build/layouts/{vendor}", "build/layouts/__init__.py")
    allowed = (f"targets/{VENDORS[vendor]}/{vendor}/", LIST.relative_to(ROOT).as_posix(), *layouts)

    found = naming(vendor, declared(vendor), ROOT)
    outside = [file for file in found if not file.startswith(allowed)]

    assert outside == EXCEPTIONS.get(vendor, [])
    assert allowed[1] in found


# Help texts have examples; a format is described by the app that defines it.
NAMING_APPS = {
    "apps/cli/apps.py",
    "apps/cli/convert.py",
    "apps/cli/export.py",
    "build/layouts/__init__.py",
    "model/checkpoint/ctranslate2.py",
    "model/checkpoint/ggml.py",
    "model/checkpoint/load.py",
    "model/checkpoint/other_forms.py",
}


def test_only_an_apps_own_folder_names_it():
    names = {name for layout in all_layouts() for name in layout.apps}
    names |= {layout.write.__module__.split(".")[3] for layout in all_layouts()}
    assert {"faster-whisper", "faster_whisper"} <= names

    outside = {
        path
        for name in names - VENDORS.keys()
        for path in naming(name, (), ROOT)
        if not re.match(r"build/layouts/\w+/", path)
    }

    assert outside == NAMING_APPS


@pytest.mark.parametrize(
    ("text", "is_found"),
    [
        ("# As Vendor's compiler does", True),
        ("def put_xyzs(): ...", True),
        ("READ_XYZ = 1", True),
        ("xyzzy = 1", False),
    ],
)
def test_a_file_that_names_a_vendor_is_found(tmp_path, text, is_found):
    (tmp_path / "file.py").write_text(text)
    (tmp_path / "weights.bin").write_bytes(b"vendor \xff")
    assert naming("vendor", ("xyz", "xyzs"), tmp_path) == (["file.py"] if is_found else [])
