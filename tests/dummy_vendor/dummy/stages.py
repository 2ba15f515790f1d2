"""The stages of the dummy's compiler. Needs its SDK, and does not import whisperport."""

from typing import Any


def version() -> str:
    """Return the SDK's version.

    Raises:
        ImportError: the SDK is not installed.
    """
    import dummy_sdk

    return str(dummy_sdk.__version__)


def _quantize(job: Any, kit: Any) -> None:
    import dummy_sdk

    arrays = [str(job.folder / array) for array in job.settings["arrays"]]
    dummy_sdk.measure(arrays, str(job.folder / "recipe.json"), str(job.folder / "ranges.json"))


def _assemble(job: Any, kit: Any) -> None:
    import dummy_sdk

    dummy_sdk.assemble(
        str(job.folder / f"{job.name}.onnx"),
        str(job.folder / "ranges.json"),
        str(job.folder / f"{job.name}.dmy"),
        chip=job.target["chip"],
        **job.settings["shapes"],
    )


def _simulate(job: Any, kit: Any) -> None:
    import dummy_sdk

    dummy_sdk.simulate(
        str(job.folder / f"{job.name}.dmy"),
        [str(job.folder / array) for array in job.settings["simulator_inputs"]],
        [str(job.folder / array) for array in job.settings["simulator_outputs"]],
    )


STAGES = {"quantize": _quantize, "assemble": _assemble, "simulate": _simulate}
