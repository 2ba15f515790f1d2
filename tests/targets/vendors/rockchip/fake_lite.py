"""A fake `rknnlite.api` whose calls have the signatures of rknn-toolkit-lite2 2.5.0.

It computes nothing of a file: a test says what comes out. A call with other arguments than the real package
has is a TypeError.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Compute = Callable[[Sequence[np.ndarray]], list[np.ndarray] | None]


class FakeLite(types.ModuleType):
    """The fake module; `calls` lists all calls in order."""

    def __init__(self, compute: Compute) -> None:
        super().__init__("rknnlite.api")
        self.calls: list[tuple[str, Any]] = []
        self.codes = {"load_rknn": 0, "init_runtime": 0}
        fake = self

        class RKNNLite:
            """The class of the real package, with its own names and defaults."""

            def __init__(self, verbose=False, verbose_file=None):
                pass

            def load_rknn(self, path, key_path=None):
                fake.calls.append(("load_rknn", path))
                return fake.codes["load_rknn"]

            def init_runtime(self, target=None, device_id=None, async_mode=False, core_mask=0):
                fake.calls.append(("init_runtime", core_mask))
                return fake.codes["init_runtime"]

            def inference(
                self,
                inputs,
                data_type=None,
                data_format=None,
                inputs_pass_through=None,
                get_frame_id=False,
                reuse_outputs=False,
            ):
                fake.calls.append(("inference", (data_format, reuse_outputs)))
                assert all(array.flags.c_contiguous for array in inputs)
                return compute(inputs)

            def release(self):
                fake.calls.append(("release", None))

        self.RKNNLite = RKNNLite

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]
