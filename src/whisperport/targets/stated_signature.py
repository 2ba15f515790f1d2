"""Compare the signature that a runtime states for a loaded program with the manifest."""

from collections.abc import Sequence

from whisperport.errors import BundleError
from whisperport.program.spec import ProgramSpec, TensorSpec


def expect_counts(program: str, spec: ProgramSpec, inputs: int, outputs: int) -> None:
    """Check the numbers of inputs and outputs.

    Args:
        program: what was loaded, for errors: its file, or its name.
        spec: the program's signature in the manifest.
        inputs: number of inputs that the runtime states.
        outputs: number of outputs that the runtime states.

    Raises:
        BundleError: they differ.
    """
    if (inputs, outputs) != (len(spec.inputs), len(spec.outputs)):
        raise other_signature(
            program,
            f"it has {inputs} inputs and {outputs} outputs; "
            f"expected {len(spec.inputs)} and {len(spec.outputs)}",
        )


def expect_tensor(
    program: str,
    tensor: TensorSpec,
    shape: Sequence[int | str | None],
    dtype: str,
    *,
    fits: bool,
) -> None:
    """Check one input or output.

    Args:
        program: what was loaded, for errors.
        tensor: the input or output in the manifest.
        shape: that the runtime states; an axis without a number has any size.
        dtype: the runtime's name of the dtype, for errors.
        fits: whether the runtime's dtype is that of the manifest.

    Raises:
        BundleError: the shape or the dtype differs.
    """
    same = len(shape) == len(tensor.shape) and all(
        stated == expected or not isinstance(stated, int)
        for stated, expected in zip(shape, tensor.shape, strict=True)
    )
    if not (same and fits):
        raise other_signature(
            program,
            f"{tensor.name[:80]!r} is {list(shape)} {dtype[:40]}; "
            f"expected {list(tensor.shape)} {tensor.dtype}",
        )


def other_signature(program: str, why: str) -> BundleError:
    """Return the error for a program whose signature differs from the manifest."""
    return BundleError(
        f"{program} has another signature than the manifest lists",
        why=why,
        hint="export the bundle again",
    )
