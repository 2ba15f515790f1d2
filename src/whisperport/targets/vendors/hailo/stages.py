"""The stages of Hailo's compiler: parse, optimize, emulate, compile. Run by `toolchain/driver.py`.

This script needs the vendor's SDK (`hailo_sdk_client`) and does not import whisperport: a copy of it is
the `stages.py` of a work folder. Tests compare its calls with recorded signatures of the SDK.

    encoder.onnx ─parse─► parsed.har ─optimize─► optimized.har ─compile─► encoder.hef
                 encoder.alls, calibration arrays ─┘              │
                                            emulated inputs ─emulate─► emulated outputs
"""

import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any


def version() -> str:
    """Return the SDK's version, "" if it is unknown.

    Raises:
        ImportError: the SDK is not installed.
    """
    import hailo_sdk_client

    return str(getattr(hailo_sdk_client, "__version__", ""))


def _parse(job: Any, kit: Any) -> None:
    import hailo_sdk_client

    runner = hailo_sdk_client.ClientRunner(hw_arch=job.target["chip"])
    runner.translate_onnx_model(str(job.folder / f"{job.name}.onnx"), job.name)
    runner.save_har(str(job.folder / "parsed.har"))


def _optimize(job: Any, kit: Any) -> None:
    import hailo_sdk_client

    runner = hailo_sdk_client.ClientRunner(har=str(job.folder / "parsed.har"))
    runner.load_model_script(str(job.folder / f"{job.name}.alls"))
    added = sixteen_bit_commands(runner, job.settings["sixteen_bit"])
    if added:
        print(added, flush=True)
        runner.load_model_script(added, append=True)
    calibration = _arrays(job.settings["calibration"], job.folder, kit)
    runner.optimize(calibration, work_dir=str(job.folder))
    runner.save_har(str(job.folder / "optimized.har"))


def sixteen_bit_commands(runner: Any, names: Collection[str]) -> str:
    """Return commands of the model script that compute convolutions in 16 bits.

    The compiler numbers its layers; a layer of the parsed graph lists the ONNX nodes that it was made of.
    No SDK was available: `original_names` is what third-party programs read of `get_hn_dict`.

    Args:
        names: of ONNX nodes, and of the tensors that they compute.
    """
    if not names:
        return ""
    made_of = {
        layer.rpartition("/")[2]: record.get("original_names", ())
        for layer, record in runner.get_hn_dict()["layers"].items()
    }
    return "\n".join(
        f"quantization_param({layer}, precision_mode=a16_w16)"
        for layer, nodes in made_of.items()
        if re.fullmatch("conv[0-9]+", layer) and not set(names).isdisjoint(nodes)
    )


def _emulate(job: Any, kit: Any) -> None:
    """Run the quantized program on the CPU. The emulator returns outputs in the order of the graph.

    Source: hailocs/hailo-whisper@347d8a0, evaluation/hailo/hailo_sdk_decoder.py.
    """
    import hailo_sdk_client
    import numpy as np

    own_settings = job.settings
    runner = hailo_sdk_client.ClientRunner(har=str(job.folder / "optimized.har"))
    arrays = _arrays(own_settings["emulation"], job.folder, kit)
    with runner.infer_context(hailo_sdk_client.InferenceContext.SDK_QUANTIZED) as context:
        results = runner.infer(context, arrays)
    if isinstance(results, Mapping):  # name of the output's layer -> array
        results = list(results.values())
    outputs = results if isinstance(results, (list, tuple)) else [results]
    if len(outputs) != len(own_settings["emulated"]):
        raise ValueError(
            f"the emulator returned {len(outputs)} outputs; expected {len(own_settings['emulated'])}"
        )
    for file, output in zip(own_settings["emulated"], outputs):  # noqa: B905  # Python 3.9 has no `strict`
        np.save(job.folder / file, np.asarray(output, np.float32), allow_pickle=False)


def _compile(job: Any, kit: Any) -> None:
    import hailo_sdk_client

    runner = hailo_sdk_client.ClientRunner(har=str(job.folder / "optimized.har"))
    hef = runner.compile()
    runner.save_har(str(job.folder / "compiled.har"))
    (job.folder / f"{job.name}.hef").write_bytes(hef)


def _arrays(files: Any, folder: Path, kit: Any) -> Any:
    """Memory-map one array, or one array per input layer by the layer's name."""
    if isinstance(files, str):
        return kit.load(folder / files)
    return {layer: kit.load(folder / file) for layer, file in files.items()}


STAGES: Mapping[str, Callable[[Any, Any], None]] = {
    "parse": _parse,
    "optimize": _optimize,
    "emulate": _emulate,
    "compile": _compile,
}
