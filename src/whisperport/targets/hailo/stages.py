"""The stages of Hailo's compiler: parse, optimize, emulate, compile. Run by `toolchain/driver.py`.

This script needs the vendor's SDK (`hailo_sdk_client`) and does not import whisperport: a copy of it is
the `stages.py` of a work folder. Tests compare its calls with recorded signatures of the SDK.

    encoder.onnx ─parse─► parsed.har ─optimize─► optimized.har ─compile─► encoder.hef
                 encoder.alls, calibration arrays ─┘              │
                                            emulated inputs ─emulate─► emulated outputs
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def version() -> str:
    """Return the SDK's version, "" if it is unknown.

    Raises:
        ImportError: the SDK is not installed.
    """
    import hailo_sdk_client

    return str(getattr(hailo_sdk_client, "__version__", ""))


def check(version: str, settings: Mapping[str, Any]) -> str:
    """Return why this version of the SDK does not support the chip; "" if it does.

    Args:
        settings: `chip`, its name; `compiler`, the major and minor number of the oldest version that
            supports the chip. The installed version must have the same major number.
    """
    oldest = settings["compiler"]
    found = [int(number) for number in re.findall("[0-9]+", version)[:2]]
    if found and not (found[0] == oldest[0] and found >= list(oldest)):
        return (
            f"{settings['chip']} needs version {oldest[0]}.{oldest[1]} or a later {oldest[0]}.x; "
            f"version {version} is installed"
        )
    return ""


def _parse(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import hailo_sdk_client

    runner = hailo_sdk_client.ClientRunner(hw_arch=settings["chip"])
    runner.translate_onnx_model(str(folder / f"{program['name']}.onnx"), program["name"])
    runner.save_har(str(folder / "parsed.har"))


def _optimize(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import hailo_sdk_client

    runner = hailo_sdk_client.ClientRunner(har=str(folder / "parsed.har"))
    runner.load_model_script(str(folder / f"{program['name']}.alls"))
    calibration = _arrays(program["settings"]["calibration"], folder)
    runner.optimize(calibration, work_dir=str(folder))
    runner.save_har(str(folder / "optimized.har"))


def _emulate(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Run the quantized program on the CPU. The emulator returns outputs in the order of the graph.

    Source: hailocs/hailo-whisper@347d8a0, evaluation/hailo/hailo_sdk_decoder.py.
    """
    import hailo_sdk_client
    import numpy as np

    own_settings = program["settings"]
    runner = hailo_sdk_client.ClientRunner(har=str(folder / "optimized.har"))
    given = _arrays(own_settings["emulation"], folder)
    with runner.infer_context(hailo_sdk_client.InferenceContext.SDK_QUANTIZED) as context:
        made = runner.infer(context, given)
    if isinstance(made, Mapping):  # name of the output's layer -> array
        made = list(made.values())
    outputs = made if isinstance(made, (list, tuple)) else [made]
    if len(outputs) != len(own_settings["emulated"]):
        raise ValueError(
            f"the emulator returned {len(outputs)} outputs; expected {len(own_settings['emulated'])}"
        )
    for file, output in zip(own_settings["emulated"], outputs):  # noqa: B905  # Python 3.9 has no `strict`
        np.save(folder / file, np.asarray(output, np.float32), allow_pickle=False)


def _compile(folder: Path, program: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    import hailo_sdk_client

    runner = hailo_sdk_client.ClientRunner(har=str(folder / "optimized.har"))
    hef = runner.compile()
    runner.save_har(str(folder / "compiled.har"))
    (folder / f"{program['name']}.hef").write_bytes(hef)


def _arrays(files: Any, folder: Path) -> Any:
    """Memory-map one array, or one array per input layer by the layer's name."""
    import numpy as np

    if isinstance(files, str):
        return np.load(folder / files, mmap_mode="r", allow_pickle=False)
    return {layer: _arrays(file, folder) for layer, file in files.items()}


STAGES: Mapping[str, Callable[[Path, Mapping[str, Any], Mapping[str, Any]], None]] = {
    "parse": _parse,
    "optimize": _optimize,
    "emulate": _emulate,
    "compile": _compile,
}
