"""Bundles that are exported once per test run, by the first worker that needs them, and never changed."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from filelock import FileLock

from whisperport.build.export.export import export
from whisperport.build.export.export_options import ExportOptions
from whisperport.program.bundle import Bundle
from whisperport.program.bundle.origin import record_own
from whisperport.targets import RunOptions

State = dict[str, list[int]]  # file -> size, time of last change


class SharedExports:
    """The bundles of one test run, in a folder that all workers of the run share.

    Args:
        folder: where the bundles are. Another worker may be writing to it.
        checkpoints: name -> a function that loads the checkpoint.
        defaults: name -> the export options of that checkpoint, unless a test gives others.
        smaller: target -> the name of its checkpoint, unless a test gives another; of others it is "tiny".
    """

    def __init__(
        self,
        folder: Path,
        checkpoints: Mapping[str, Callable[[], Any]],
        defaults: Mapping[str, Mapping[str, Any]],
        smaller: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._folder, self._checkpoints, self._defaults = folder, checkpoints, defaults
        self._smaller = smaller
        self._opened: dict[str, Bundle] = {}

    def checkpoint(self, target: str) -> Any:
        """The checkpoint of the bundle for this target, unless a test gives another."""
        return self._checkpoints[self._name(target)]()

    def _name(self, target: str) -> str:
        return self._smaller.get(target, "tiny")

    def __call__(self, target: str, checkpoint: str = "", **options: Any) -> Bundle:
        """A verified bundle. Do not write to its folder: copy it."""
        checkpoint = checkpoint or self._name(target)
        asked = json.dumps([target, checkpoint, sorted(options.items())], default=repr)
        name = f"{checkpoint}-{target}-{hashlib.sha256(asked.encode()).hexdigest()[:8]}"
        if name not in self._opened:
            self._opened[name] = self._open(name, target, checkpoint, options)
        return self._opened[name]

    def _open(self, name: str, target: str, checkpoint: str, options: Mapping[str, Any]) -> Bundle:
        bundle, recorded = self._folder / name, self._folder / f"{name}.json"
        self._folder.mkdir(exist_ok=True)
        with FileLock(self._folder / f"{name}.lock"):
            if not recorded.exists():
                how = {
                    "run": RunOptions(threads=1),
                    **self._defaults.get(checkpoint, {}),
                    **options,
                }
                export(self._checkpoints[checkpoint](), target, bundle, ExportOptions(**how))
                recorded.write_text(json.dumps(_state(bundle)))
        opened = Bundle.open(bundle)
        record_own(opened.manifest)  # each worker has its own records of what its user exported
        return opened

    def changed(self) -> list[str]:
        """Files that a test has changed, added or removed since the export."""
        found = []
        for name in self._opened:
            now = _state(self._folder / name)
            then: State = json.loads((self._folder / f"{name}.json").read_text())
            found += [f"{name}/{f}" for f in {*now, *then} if now.get(f) != then.get(f)]
        return sorted(found)


def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The temporary folder of this test run, which its workers share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def _state(folder: Path) -> State:
    files = [path for path in folder.rglob("*") if path.is_file()]
    stats = {path.relative_to(folder).as_posix(): path.stat() for path in files}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
