"""The stages of the dummy's compiler. Needs its SDK, and does not import whisperport."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def version() -> str:
    """Return the SDK's version.

    Raises:
        ImportError: the SDK is not installed.
    """
    import dummy_sdk

    return str(dummy_sdk.__version__)


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this version of the SDK does not support the chip; "" if it does."""
    oldest = settings["oldest"]
    return "" if version >= oldest else f"version {oldest} is needed; {version} is installed"


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

    own_settings = program["settings"]
    dummy_sdk.simulate(
        str(folder / f"{program['name']}.dmy"),
        [str(folder / array) for array in own_settings["simulator_inputs"]],
        [str(folder / array) for array in own_settings["simulator_outputs"]],
    )


STAGES = {"quantize": _quantize, "assemble": _assemble, "simulate": _simulate}
