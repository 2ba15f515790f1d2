"""The stages of the dummy's compiler. Needs its SDK, and nothing of whisperport."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def version() -> str:
    """The SDK's version; ImportError if it is not installed."""
    import dummy_sdk

    return str(dummy_sdk.__version__)


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Why this version of the SDK does not serve the chip; empty if it does."""
    oldest = settings["oldest"]
    return "" if version >= oldest else f"version {oldest} is needed, and {version} is installed"


def _quantize(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import dummy_sdk

    arrays = [str(folder / array) for array in program["settings"]["arrays"]]
    dummy_sdk.measure(arrays, str(folder / "recipe.json"), str(folder / "ranges.json"))


def _assemble(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import dummy_sdk

    dummy_sdk.assemble(
        str(folder / f"{program['name']}.onnx"),
        str(folder / "ranges.json"),
        str(folder / f"{program['name']}.dmy"),
        chip=settings["chip"],
        **program["settings"]["shapes"],
    )


def _simulate(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import dummy_sdk

    told = program["settings"]
    dummy_sdk.simulate(
        str(folder / f"{program['name']}.dmy"),
        [str(folder / array) for array in told["simulator_inputs"]],
        [str(folder / array) for array in told["simulator_outputs"]],
    )


STAGES = {"quantize": _quantize, "assemble": _assemble, "simulate": _simulate}
