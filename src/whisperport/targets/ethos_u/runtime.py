"""Run lowered programs on the CPU with torch. Compiled programs run on a device only."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from whisperport.errors import BundleError, ProgramError
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.stated_signature import expect_counts, expect_tensor

if TYPE_CHECKING:  # boards have no torch
    from whisperport.trace.program import Program


class TorchRunner(Runner):
    """A lowered program, run by torch in float32."""

    def __init__(self, spec: ProgramSpec, path: Path) -> None:
        """
        Args:
            spec: the program's signature in the manifest.
            path: of the lowered file.

        Raises:
            BundleError: the file cannot be read, contains code, or has another signature.
        """
        super().__init__(spec)
        program = _read(path)
        _check_signature(program.spec, spec, path.name)
        self._module: Any = program.exported.module(check_guards=False)
        self._structure = program.exported.call_spec.in_spec

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        import torch
        from torch.utils import _pytree as pytree

        flat = [torch.from_numpy(np.require(array, requirements="W")) for array in inputs]
        arguments, named = pytree.tree_unflatten(flat, self._structure)
        with torch.no_grad():
            outputs = pytree.tree_leaves(self._module(*arguments, **named))
        return [output.numpy() for output in outputs]


def use_threads(threads: int | None) -> None:
    """Set the number of CPU threads of torch in this process; None: torch chooses."""
    import torch

    if threads:
        torch.set_num_threads(threads)


def _read(path: Path) -> "Program":
    from whisperport.trace.pt2 import read_pt2

    try:
        return read_pt2(path)
    except ProgramError as error:
        raise BundleError(
            f"cannot read the lowered program {path.name}",
            why=f"{error.what}: {error.why}",
            hint="export the bundle again with the installed torch",
        ) from error


def _check_signature(found: ProgramSpec, expected: ProgramSpec, file: str) -> None:
    """Compare shapes and dtypes; the names of outputs are in the manifest only."""
    expect_counts(file, expected, len(found.inputs), len(found.outputs))
    for actual, wanted in ((found.inputs, expected.inputs), (found.outputs, expected.outputs)):
        for one, tensor in zip(actual, wanted, strict=True):
            expect_tensor(file, tensor, one.shape, one.dtype, fits=one.dtype == tensor.dtype)
