"""Folders that differ from the tiny checkpoint in a stated way."""

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

WEIGHTS = "model.safetensors"


@pytest.fixture
def altered_folder(tiny_checkpoint_folder: Path, tmp_path: Path) -> Callable[..., Path]:
    """`altered_folder({file: changes}, without=[file], weights=function)`: a changed copy.

    Changes are merged into a JSON file, None removes a key; `weights` changes the tensors in place.
    Files left as they are are links.
    """

    def alter(
        changes: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        without: tuple[str, ...] = (),
        weights: Callable[[dict[str, Tensor]], None] | None = None,
    ) -> Path:
        folder = tmp_path / "altered"
        folder.mkdir()
        for path in tiny_checkpoint_folder.iterdir():
            if path.name not in without:
                (folder / path.name).symlink_to(path)
        for name, change in (changes or {}).items():
            data = json.loads((tiny_checkpoint_folder / name).read_text())
            data.update(change)
            (folder / name).unlink()
            kept = {key: value for key, value in data.items() if value is not None}
            (folder / name).write_text(json.dumps(kept))
        if weights is not None:
            tensors = load_file(tiny_checkpoint_folder / WEIGHTS)
            weights(tensors)
            (folder / WEIGHTS).unlink()
            save_file(tensors, folder / WEIGHTS)
        return folder

    return alter


@pytest.fixture
def copied_folder(tiny_checkpoint_folder: Path, tmp_path: Path) -> Path:
    """A copy whose files may be written to."""
    return Path(shutil.copytree(tiny_checkpoint_folder, tmp_path / "copied"))
