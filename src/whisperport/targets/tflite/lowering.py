"""Lower programs to a .tflite file with litert_torch; used by all targets whose compilers read .tflite.

A file can hold several programs. Each is a signature with the program's name, and equal weights are stored
once. A signature has the program's names of inputs and outputs, and its subgraph has them in the program's
order, so that tools without names can use positions. int64 inputs and outputs are int32 in the file.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from whisperport.errors import LoweringError, needs
from whisperport.program.spec import ProgramSpec, TensorSpec
from whisperport.system.progress import begin_stage

if TYPE_CHECKING:  # boards have no torch
    from torch import nn

    from whisperport.model.inspection.tflite_signatures import TfliteSignature
    from whisperport.model.trace.program import Program

# The converter replaces 64-bit types: litert_torch 0.10.0, `enable_x64` of `convert`, default False.
STORED_DTYPES = {"int64": "int32", "float64": "float32"}
LONGEST_REASON = 300  # characters; the converter's messages can be pages of MLIR


def lower_to_tflite(
    programs: Sequence["Program"], path: Path, *, target: str, extra: str
) -> "dict[str, TfliteSignature]":
    """Write programs in float32 to one .tflite file, a signature for each.

    The first program is the subgraph that an interpreter runs without a signature.

    Args:
        programs: at least one, with different names.
        path: of the file; its folder is created if it is missing. After an error, the file is deleted.
        target: name of the target, for messages.
        extra: pip extra that installs the converter, for messages.

    Returns:
        Name of a program -> its signature in the file, with its operators.

    Raises:
        MissingPackageError: litert_torch or the package tflite is not installed.
        LoweringError: litert_torch could not convert a program, or the file has another signature.
    """
    from whisperport.model.inspection.quiet import quiet, quiet_natively
    from whisperport.model.trace.shared_copies import shared_node_history, shared_weights

    names = ", ".join(program.name for program in programs)
    with quiet(), quiet_natively():
        converter = _converter(target, extra)
    path.parent.mkdir(exist_ok=True)
    begin_stage(f"lowering {names} to {path.name} for {target}")
    try:
        with quiet(), quiet_natively(), shared_node_history(), shared_weights():
            for program in programs:
                converter.add_signature(
                    program.name, _named(program), sample_kwargs=_zeros(program.spec)
                )
            converter.convert().export(str(path))
        return {program.name: _checked(path, program.spec) for program in programs}
    except BaseException as error:
        path.unlink(missing_ok=True)
        if not isinstance(error, Exception) or isinstance(error, LoweringError):
            raise
        raise LoweringError(  # the converter raises anything, from AssertionError to its own
            f"litert_torch could not convert {names}",
            why=_reason(error),
            hint=f"`whisperport check PROGRAM.pt2 --target {target}` lists nodes without support",
        ) from error


def _converter(target: str, extra: str) -> Any:
    with needs(f"cannot lower for `{target}`: litert_torch is not installed", extra=extra):
        from litert_torch._config import config
        from litert_torch._convert.interface import Converter
    config.show_progress = False  # it prints with rich, on its own console
    return Converter()


def _named(program: "Program") -> "nn.Module":
    """Return a module that takes and returns dictionaries with the program's names.

    litert_torch writes the names of keyword arguments and of a dictionary's keys into the file.
    """
    import torch
    from torch.utils import _pytree as pytree

    inner = program.exported.module(check_guards=False)
    structure = program.exported.call_spec.in_spec
    spec = program.spec

    class Named(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner
            self.training = False  # not by `eval`, which an exported module does not support

        def forward(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
            flat = [tensors[tensor.name] for tensor in spec.inputs]
            arguments, named = pytree.tree_unflatten(flat, structure)
            returned = pytree.tree_leaves(self.inner(*arguments, **named))
            return {t.name: value for t, value in zip(spec.outputs, returned, strict=True)}

    return Named()


def _zeros(spec: ProgramSpec) -> dict[str, Any]:
    import torch

    return {
        tensor.name: torch.zeros(tensor.shape, dtype=getattr(torch, tensor.dtype))
        for tensor in spec.inputs
    }


def _checked(path: Path, spec: ProgramSpec) -> "TfliteSignature":
    """Compare a signature of the file with the program's, names and order included."""
    from whisperport.model.inspection.tflite_signatures import read_signatures

    signature = read_signatures(path).get(spec.name)
    if signature is None:
        raise _other_signature(spec, "the file has no signature with the program's name")
    for side, expected, tensors in (
        ("inputs", spec.inputs, signature.inputs),
        ("outputs", spec.outputs, signature.outputs),
    ):
        stored_tensors = [stored(tensor) for tensor in expected]
        if stored_tensors != list(tensors):
            raise _other_signature(
                spec, f"its {side} are {_listed(tensors)}; expected {_listed(stored_tensors)}"
            )
    return signature


def stored(tensor: TensorSpec) -> TensorSpec:
    """Return how the file states an input or output of a program."""
    return replace(tensor, dtype=STORED_DTYPES.get(tensor.dtype, tensor.dtype))


def _listed(tensors: Iterable[TensorSpec]) -> str:
    return ", ".join(f"{tensor.name} {list(tensor.shape)} {tensor.dtype}" for tensor in tensors)


def _other_signature(spec: ProgramSpec, why: str) -> LoweringError:
    return LoweringError(
        f"litert_torch wrote `{spec.name}` with other inputs or outputs than the program has",
        why=why[:LONGEST_REASON],
        hint="a program must not return one of its inputs, or the same tensor twice",
    )


def _reason(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:LONGEST_REASON]
