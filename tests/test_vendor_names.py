"""A vendor is one folder: no other file of the package names it, except the list of targets."""

import importlib
import re
from pathlib import Path

import pytest

import whisperport

ROOT = Path(whisperport.__file__).parent
LIST = ROOT / "targets" / "__init__.py"
# Libraries that run on any CPU, and whose formats, .pte and .tflite, compilers of several vendors read.
NOT_VENDORS = {"xnnpack", "litert", "onnx", "tflite"}
# Vendor -> files that may contain its name.
EXCEPTIONS = {
    "openvino": [
        # It recognizes checkpoints on model hubs that another tool converted, by their file names.
        "model/checkpoint/other_forms.py",
    ]
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
