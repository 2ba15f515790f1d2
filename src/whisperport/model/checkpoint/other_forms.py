"""Recognize checkpoints in other programs' formats by their files, for errors that name the format."""

import shlex
from pathlib import Path

from whisperport.errors import CheckpointError
from whisperport.model.checkpoint.weight_files import find_weights

# File in a folder without supported weights -> what the folder holds.
_FOLDERS = (
    ("adapter_model.*", "a PEFT adapter without its adapter_config.json"),
    ("weights.npz", "a conversion for MLX"),
    ("*.gguf", "a conversion for whisper.cpp"),
    ("openvino*.xml", "a conversion for OpenVINO"),
    ("*.mlmodelc", "a conversion for Core ML"),
    ("*encoder*.onnx", "a conversion to ONNX"),
    ("onnx/*.onnx", "a conversion to ONNX"),
    ("tf_model.h5", "a TensorFlow checkpoint"),
    ("flax_model.msgpack", "a Flax checkpoint"),
)
_FILES = {
    ".gguf": "whisper.cpp",
    ".npz": "MLX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
}
# Suffix of a file that holds a program -> the command that reads it.
_PROGRAMS = {
    ".onnx": "whisperport check {path} --target NAME",
    ".tflite": "whisperport check {path} --target NAME",
    ".pt2": "whisperport check {path} --target NAME",
    ".pte": "whisperport inspect {path}",
}
_HINT = "give the original checkpoint"


def reject_other_forms(folder: Path) -> None:
    """Reject a folder that holds a bundle, or a Whisper model in a format that is not supported.

    Raises:
        CheckpointError: it does.
    """
    if find_weights(folder) is not None:
        return
    if (folder / "manifest.json").is_file() and not (folder / "config.json").is_file():
        raise CheckpointError(
            f"`{folder}` is a bundle, not a checkpoint",
            why="it holds a manifest.json and no config.json",
            hint=f"run `whisperport verify {folder}`, or give the original checkpoint",
        )
    if ggml := sorted(folder.glob("ggml*.bin")):
        raise CheckpointError(
            f"`{folder}` is not a checkpoint folder",
            why=f"it has {ggml[0].name} of whisper.cpp, which is complete without a folder",
            hint=f"give the file: `{ggml[0]}`",
        )
    for sign, form in _FOLDERS:
        if path := next(folder.glob(sign), None):
            raise CheckpointError(
                f"`{folder}` holds {form}, which is not supported",
                why=f"it has {path.relative_to(folder)}, and no weights in a supported format",
                hint=_HINT,
            )


def reject_other_file(path: Path) -> None:
    """Reject a file that holds a program, or a Whisper model in a format that is not supported.

    Raises:
        CheckpointError: it does.
    """
    suffix = path.suffix.lower()
    command = _PROGRAMS.get(suffix)
    if command is not None:
        raise CheckpointError(
            f"`{path}` is a program, not a checkpoint",
            why=f"a {suffix} file holds an exported graph",
            hint=f"run `{command.format(path=shlex.quote(str(path)))}`, or give the original checkpoint",
        )
    form = _FILES.get(suffix)
    if form is not None:
        raise CheckpointError(
            f"`{path}` is a file of {form}, which is not supported",
            why="expected a folder of transformers or CTranslate2, a .pt file or a ggml file",
            hint=_HINT,
        )
