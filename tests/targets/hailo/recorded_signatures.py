"""Signatures of the vendor's functions from its public sources; neither SDK nor runtime is installed.

Names and arguments only. What is called in another way than recorded raises TypeError in the tests, as
it would there.

    runtime   hailo-ai/hailort@19b0443, hailort/libhailort/bindings/python/platform/hailo_platform/
              pyhailort/pyhailort.py, by class and method, and bindings/python/src/infer_model_api.cpp
    compiler  is not public: hailocs/hailo-whisper@347d8a0, conversion/convert_whisper_encoder.py and
              evaluation/hailo/hailo_sdk_encoder.py,
              and callers in hailo-ai/hailo_model_zoo@0044d9a, hailo_model_zoo/core/main_utils.py
"""

import inspect
from dataclasses import dataclass


@dataclass(frozen=True)
class Recorded:
    """The signature of one call."""

    call: str  # Class.method
    parameters: str  # as `def` would have them, without self
    source: str

    @property
    def signature(self) -> inspect.Signature:
        return inspect.signature(eval(f"lambda {self.parameters}: None"))


PYHAILORT = "pyhailort.py, {}"
ENCODER = "convert_whisper_encoder.py, HailoWhisperEncoder.{}"
ZOO = "hailo_model_zoo/core/main_utils.py, {}"
EMULATED = "evaluation/hailo/hailo_sdk_encoder.py and hailo_sdk_decoder.py of hailocs/hailo-whisper"

RUNTIME = (
    Recorded("Device.scan", "", PYHAILORT.format("class Device")),
    Recorded("VDevice.create_params", "", PYHAILORT.format("class VDevice")),
    Recorded("VDevice", "params=None, *, device_ids=None", PYHAILORT.format("class VDevice")),
    Recorded("VDevice.release", "", PYHAILORT.format("class VDevice")),
    Recorded(
        "VDevice.create_infer_model", "hef_source, name=''", PYHAILORT.format("class VDevice")
    ),
    Recorded("HEF", "hef_source", PYHAILORT.format("class HEF")),
    Recorded(
        "HEF.get_sorted_output_names",
        "network_group_name=None",
        PYHAILORT.format("class HEF"),
    ),
    Recorded("InferModel.input", "name=''", PYHAILORT.format("class InferModel")),
    Recorded("InferModel.output", "name=''", PYHAILORT.format("class InferModel")),
    Recorded("InferModel.configure", "", PYHAILORT.format("class InferModel")),
    Recorded(
        "InferStream.set_format_type", "type", PYHAILORT.format("class InferModel.InferStream")
    ),
    Recorded(
        "ConfiguredInferModel.create_bindings",
        "input_buffers=None, output_buffers=None",
        PYHAILORT.format("class ConfiguredInferModel"),
    ),
    Recorded(
        "ConfiguredInferModel.run",
        "bindings, timeout",
        PYHAILORT.format("class ConfiguredInferModel"),
    ),
    Recorded("Bindings.input", "name=''", PYHAILORT.format("class ConfiguredInferModel.Bindings")),
    Recorded("Bindings.output", "name=''", PYHAILORT.format("class ConfiguredInferModel.Bindings")),
    Recorded(
        "BoundStream.set_buffer",
        "buffer",
        PYHAILORT.format("class ConfiguredInferModel.Bindings.InferStream"),
    ),
    Recorded(
        "BoundStream.get_buffer",
        "tf_format=False",
        PYHAILORT.format("class ConfiguredInferModel.Bindings.InferStream"),
    ),
)

# Members of what `VDevice.create_params` returns: pyhailort.cpp, and hailo_whisper_pipeline.py in
# hailo-ai/Hailo-Application-Code-Examples@b4cb0f2, runtime/python/speech_recognition/app.
VDEVICE_PARAMS = frozenset(
    {"device_count", "group_id", "multi_process_service", "scheduling_algorithm"}
)

COMPILER = (
    Recorded("ClientRunner", "hw_arch=None, har=None", ENCODER.format("__init__")),
    Recorded(
        "ClientRunner.translate_onnx_model",
        "onnx_path, model_name, start_node_names=None, end_node_names=None",
        ENCODER.format("parse_models") + "; HailoWhisperDecoder.parse_models",
    ),
    Recorded("ClientRunner.save_har", "path", ENCODER.format("parse_models")),
    Recorded(
        "ClientRunner.load_model_script",
        "script, append=False",
        ENCODER.format("quantize_model") + "; " + ZOO.format("optimize_full_precision_model"),
    ),
    Recorded(
        "ClientRunner.optimize", "calib_data, work_dir=None", ENCODER.format("quantize_model")
    ),
    Recorded("ClientRunner.infer_context", "inference_context", EMULATED),
    Recorded("ClientRunner.infer", "context, dataset", EMULATED),
    Recorded("ClientRunner.compile", "", ENCODER.format("compile_model")),
)


def bind(recorded: tuple[Recorded, ...], call: str, *args: object, **kwargs: object) -> dict:
    """Bind arguments to the recorded signature, by name; raise TypeError if they do not fit."""
    (found,) = [one for one in recorded if one.call == call]
    bound = found.signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
