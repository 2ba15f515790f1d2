"""Whisper in forms made for other programs: known by their files, so that a refusal names them."""

from pathlib import Path

from whisperport.checkpoint.weight_files import find_weights
from whisperport.errors import CheckpointError

# In a folder, where there are none of the weights that are read: a file, and what it is a sign of.
_FOLDERS = (
    ("adapter_model.*", "a PEFT adapter without the model it belongs to"),
    ("model.bin", "a conversion for CTranslate2 (faster-whisper)"),
    ("weights.npz", "a conversion for MLX"),
    ("ggml*.bin", "a conversion for whisper.cpp"),
    ("*.gguf", "a conversion for whisper.cpp"),
    ("openvino*.xml", "a conversion for OpenVINO"),
    ("*.mlmodelc", "a conversion for Core ML"),
    ("*encoder*.onnx", "a conversion to ONNX"),
    ("onnx/*.onnx", "a conversion to ONNX"),
    ("tf_model.h5", "a checkpoint of TensorFlow"),
    ("flax_model.msgpack", "a checkpoint of Flax"),
)
_FILES = {
    ".gguf": "whisper.cpp",
    ".npz": "MLX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
}
_PROGRAMS = (".onnx", ".tflite", ".pt2", ".pte")
_GGML = b"lmgg"  # the first bytes of whisper.cpp's files
_HINT = "give the checkpoint it was made from"


def reject_other_forms(folder: Path) -> None:
    """Raises CheckpointError for a folder that holds a Whisper, in a form that is not read here."""
    if find_weights(folder) is not None:
        return
    if (folder / "manifest.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"`{folder}` is a bundle, not a checkpoint",
            why="it holds a manifest.json and no config.json",
            hint=f"`whisperport verify {folder}`, or give the checkpoint it was made from",
        )
    for sign, form in _FOLDERS:
        if found := next(folder.glob(sign), None):
            raise CheckpointError(
                f"`{folder}` holds {form}, which cannot be read",
                why=f"it has {found.relative_to(folder)}, and none of the weights that are read",
                hint=_HINT,
            )


def reject_other_file(path: Path) -> None:
    """Raises CheckpointError for a file that is a Whisper, or a part of one, for another program."""
    suffix = path.suffix.lower()
    if suffix in _PROGRAMS:
        raise CheckpointError(
            f"`{path}` is a program, not a checkpoint",
            why=f"a {suffix} file holds a graph that was exported already",
            hint=f"`whisperport check {path} --target NAME`, or give the checkpoint it was made from",
        )
    form = "whisper.cpp" if _is_ggml(path) else _FILES.get(suffix)
    if form is not None:
        raise CheckpointError(
            f"`{path}` is a file of {form}, which cannot be read",
            why="expected a folder as transformers saves it, or a .pt file of openai-whisper",
            hint=_HINT,
        )


def _is_ggml(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_GGML)) == _GGML
    except OSError:
        return False
