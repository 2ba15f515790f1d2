"""Quantize an encoder with four tools, and run what they make: the programs of `coarse_diagnosis.py`.

| Recipe | ONNX Runtime | ai-edge-quantizer | torchao | NNCF |
|---|---|---|---|---|
| static w8a8, min-max, per tensor | yes | yes | yes | |
| static w8a8, other ranges | percentile, entropy | | histogram (MSE) | quantiles |
| static w8a8, weights per channel, asymmetric | yes | yes | yes | yes |
| dynamic w8d8 | yes | yes | yes | |
| weights in 8 or 4 bits | w4 | w8, w4 | w8, w4 | w4 |

NNCF runs in an interpreter of its own, which runs this file; without one, its programs are left out.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Run = Callable[[Any], Any]
"""mel (1, n_mels, 2T) -> features (1, T, d)."""

GROUP = 32  # weights that share a scale in w4


@dataclass(frozen=True)
class Made:
    """What the tools read: the encoder in each form, and the calibration's spectrograms."""

    encoder: Any  # torch module
    folder: Path
    nncf: str  # interpreter with NNCF; "": none

    @property
    def onnx(self) -> Path:
        return self.folder / "encoder.onnx"

    @property
    def tflite(self) -> Path:
        return self.folder / "encoder.tflite"

    @property
    def mels(self) -> Path:
        """The calibration's spectrograms, (samples, 1, n_mels, 2T)."""
        return self.folder / "calibration.npy"

    def samples(self) -> list[Any]:
        return list(np.load(self.mels))


def onnxruntime_static(method: str, *, channels: bool = False) -> Callable[[Made], Run]:
    def make(made: Made) -> Run:
        from onnxruntime import quantization as q

        class Reader(q.CalibrationDataReader):
            def __init__(self) -> None:
                self.left = iter([{"mel": mel} for mel in made.samples()])

            def get_next(self) -> dict[str, Any] | None:
                return next(self.left, None)

        out = made.folder / "quantized.onnx"
        kind = q.QuantType.QUInt8 if channels else q.QuantType.QInt8
        q.quantize_static(
            made.onnx,
            out,
            Reader(),
            per_channel=channels,
            activation_type=kind,
            weight_type=q.QuantType.QInt8,
            calibrate_method=q.CalibrationMethod[method],
            extra_options={"CalibPercentile": 99.9},
        )
        return run_onnx(out)

    return make


def onnxruntime_dynamic(made: Made) -> Run:
    from onnxruntime import quantization as q

    out = made.folder / "quantized.onnx"
    q.quantize_dynamic(made.onnx, out, weight_type=q.QuantType.QUInt8)
    return run_onnx(out)


def onnxruntime_w4(made: Made) -> Run:
    import onnx
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    quantizer = MatMulNBitsQuantizer(onnx.load(made.onnx), block_size=GROUP, is_symmetric=True)
    quantizer.process()
    quantizer.model.save_model_to_file(str(made.folder / "quantized.onnx"))
    return run_onnx(made.folder / "quantized.onnx")


def nncf(recipe: str) -> Callable[[Made], Run]:
    def make(made: Made) -> Run:
        out = made.folder / "quantized.onnx"
        call = [made.nncf, __file__, recipe, str(made.onnx), str(made.mels), str(out)]
        subprocess.run(call, check=True, capture_output=True)
        return run_onnx(out)

    return make


def run_onnx(path: Path) -> Run:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(path, options)
    return lambda mel: session.run(None, {"mel": mel})[0]


def ai_edge(name: str, **changed: Any) -> Callable[[Made], Run]:
    """Apply a recipe of ai-edge-quantizer by its name; `changed` are values of the weights' settings."""

    def make(made: Made) -> Run:
        from ai_edge_litert.interpreter import Interpreter
        from ai_edge_quantizer import quantizer, recipe

        steps = json.loads(json.dumps(getattr(recipe, name)()))
        for step in steps:
            step["op_config"]["weight_tensor_config"].update(changed)
        tool = quantizer.Quantizer(str(made.tflite), steps)
        ranges = None
        if tool.need_calibration:
            ranges = tool.calibrate({"encoder": [{"mel": mel} for mel in made.samples()]})
        out = made.folder / "quantized.tflite"
        tool.quantize(ranges).export_model(str(out), overwrite=True)
        runner = Interpreter(str(out), num_threads=1).get_signature_runner("encoder")
        (mel_form,) = runner.get_input_details().values()
        ((output, form),) = runner.get_output_details().items()
        return lambda mel: read(form, runner(mel=stored(mel_form, mel))[output])

    return make


def stored(form: Mapping[str, Any], values: Any) -> Any:
    """Return values as a tensor of a .tflite file stores them."""
    if form["dtype"] is np.float32:
        return values
    scale, zero_point = form["quantization"]
    return np.clip(np.rint(values / scale) + zero_point, -128, 127).astype(np.int8)


def read(form: Mapping[str, Any], values: Any) -> Any:
    """Return the float32 values of a tensor of a .tflite file."""
    if form["dtype"] is np.float32:
        return values
    scale, zero_point = form["quantization"]
    return (values.astype(np.float32) - zero_point) * np.float32(scale)


def torchao_static(*, channels: bool = False, histogram: bool = False) -> Callable[[Made], Run]:
    def make(made: Made) -> Run:
        import torch
        from executorch.backends.xnnpack.quantizer import xnnpack_quantizer as x
        from torchao.quantization.pt2e import HistogramObserver
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        mels = [torch.from_numpy(mel) for mel in made.samples()]
        config = x.get_symmetric_quantization_config(is_per_channel=channels)
        if not histogram:
            from torchao.quantization.pt2e import MinMaxObserver

            config = with_observer(config, MinMaxObserver)
        else:
            config = with_observer(config, HistogramObserver)
        quantizer = x.XNNPACKQuantizer().set_global(config)
        graph = torch.export.export(made.encoder, (mels[0],)).module()
        prepared = prepare_pt2e(graph, quantizer)
        with torch.no_grad():
            for mel in mels:
                prepared(mel)
            return run_torch(convert_pt2e(prepared))

    return make


def with_observer(config: Any, observer: Any) -> Any:
    """Return an XNNPACK configuration whose activations have another observer."""
    from dataclasses import replace

    def changed(spec: Any) -> Any:
        made = observer.with_args(eps=2**-12)
        return replace(spec, observer_or_fake_quant_ctr=made)

    return replace(
        config,
        input_activation=changed(config.input_activation),
        output_activation=changed(config.output_activation),
    )


def torchao_linears(config: str) -> Callable[[Made], Run]:
    """Quantize the linears with a configuration of torchao by its name."""

    def make(made: Made) -> Run:
        from copy import deepcopy

        import torch
        from torchao import quantization as q

        if config == "w4":
            chosen = q.IntxWeightOnlyConfig(torch.int4, q.PerGroup(GROUP))
        else:
            chosen = getattr(q, config)()
        encoder = deepcopy(made.encoder)
        q.quantize_(encoder, chosen)
        return run_torch(encoder)

    return make


def run_torch(module: Any) -> Run:
    import torch

    def run(mel: Any) -> Any:
        with torch.no_grad():
            return module(torch.from_numpy(mel)).numpy()

    return run


PROGRAMS: Mapping[tuple[str, str], Callable[[Made], Run]] = {  # recipe, tool -> what makes it
    ("static w8a8, min-max per tensor", "onnxruntime"): onnxruntime_static("MinMax"),
    ("static w8a8, min-max per tensor", "ai-edge-quantizer"): ai_edge(
        "static_wi8_ai8", granularity="TENSORWISE"
    ),
    ("static w8a8, min-max per tensor", "torchao"): torchao_static(),
    ("static w8a8, percentile", "onnxruntime"): onnxruntime_static("Percentile"),
    ("static w8a8, entropy", "onnxruntime"): onnxruntime_static("Entropy"),
    ("static w8a8, histogram (MSE)", "torchao"): torchao_static(histogram=True),
    ("static w8a8, quantiles", "nncf"): nncf("quantiles"),
    ("static w8a8 per channel, asymmetric", "onnxruntime"): onnxruntime_static(
        "MinMax", channels=True
    ),
    ("static w8a8 per channel, asymmetric", "ai-edge-quantizer"): ai_edge("static_wi8_ai8"),
    ("static w8a8 per channel, asymmetric", "torchao"): torchao_static(channels=True),
    ("static w8a8 per channel, asymmetric", "nncf"): nncf("static"),
    ("dynamic w8d8", "onnxruntime"): onnxruntime_dynamic,
    ("dynamic w8d8", "ai-edge-quantizer"): ai_edge("dynamic_wi8_afp32"),
    ("dynamic w8d8", "torchao"): torchao_linears("Int8DynamicActivationInt8WeightConfig"),
    ("w8", "ai-edge-quantizer"): ai_edge("weight_only_wi8_afp32"),
    ("w8", "torchao"): torchao_linears("Int8WeightOnlyConfig"),
    ("w4", "onnxruntime"): onnxruntime_w4,
    ("w4", "ai-edge-quantizer"): ai_edge("weight_only_wi4_afp32"),
    ("w4", "torchao"): torchao_linears("w4"),
    ("w4", "nncf"): nncf("w4"),
}


def with_nncf(recipe: str, source: str, mels: str, out: str) -> None:
    """Quantize an ONNX file with NNCF, in an interpreter that has it."""
    import nncf as n
    import onnx

    model = onnx.load(source)
    if recipe == "w4":
        made = n.compress_weights(
            model,
            mode=n.CompressWeightsMode.INT4_SYM,
            group_size=GROUP,
            all_layers=True,
            ignored_scope=n.IgnoredScope(types=["Conv"]),
        )
    else:
        data = n.Dataset([{"mel": mel} for mel in np.load(mels)])
        made = n.quantize(
            model, data, preset=n.QuantizationPreset.MIXED, advanced_parameters=ranges(recipe)
        )
    onnx.save(made, out)


def ranges(recipe: str) -> Any:
    from nncf.quantization import advanced_parameters as a
    from nncf.quantization import range_estimator as r

    if recipe == "static":
        return None
    quantiles = r.RangeEstimatorParametersSet.MEAN_QUANTILE
    return a.AdvancedQuantizationParameters(activations_range_estimator_params=quantiles)


if __name__ == "__main__":
    with_nncf(*sys.argv[1:])
