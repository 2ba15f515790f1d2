"""Signatures of the vendor's functions from its public sources; neither SDK nor runtime is installed.

Names and arguments only. What is called in another way than recorded raises TypeError in the tests, as
it would there.

    runtime   hailo-ai/hailort@19b0443, hailort/libhailort/bindings/python/platform/hailo_platform/
              pyhailort/pyhailort.py, by class and method, and bindings/python/src/infer_model_api.cpp
    compiler  is not public: hailocs/hailo-whisper@347d8a0, conversion/convert_whisper_encoder.py,
              evaluation/hailo/hailo_sdk_encoder.py and hailo_sdk_decoder.py,
              and callers in hailo-ai/hailo_model_zoo@0044d9a, hailo_model_zoo/core/main_utils.py
"""

import inspect
from collections.abc import Mapping

# Class.method -> parameters, as `def` would have them, without self.
RUNTIME = {
    "Device.scan": "",
    "VDevice.create_params": "",
    "VDevice": "params=None, *, device_ids=None",
    "VDevice.release": "",
    "VDevice.create_infer_model": "hef_source, name=''",
    "HEF": "hef_source",
    "HEF.get_sorted_output_names": "network_group_name=None",
    "InferModel.input": "name=''",
    "InferModel.output": "name=''",
    "InferModel.configure": "",
    "InferStream.set_format_type": "type",
    "ConfiguredInferModel.create_bindings": "input_buffers=None, output_buffers=None",
    "ConfiguredInferModel.run": "bindings, timeout",
    "Bindings.input": "name=''",
    "Bindings.output": "name=''",
    "BoundStream.set_buffer": "buffer",  # of ConfiguredInferModel.Bindings.InferStream
    "BoundStream.get_buffer": "tf_format=False",
}

# Members of what `VDevice.create_params` returns: pyhailort.cpp, and hailo_whisper_pipeline.py in
# hailo-ai/Hailo-Application-Code-Examples@b4cb0f2, runtime/python/speech_recognition/app.
VDEVICE_PARAMS = frozenset(
    {"device_count", "group_id", "multi_process_service", "scheduling_algorithm"}
)

COMPILER = {
    "ClientRunner": "hw_arch=None, har=None",
    "ClientRunner.translate_onnx_model": "onnx_path, model_name, start_node_names=None, "
    "end_node_names=None",
    "ClientRunner.save_har": "path",
    "ClientRunner.load_model_script": "script, append=False",
    "ClientRunner.get_hn_dict": "",
    "ClientRunner.optimize": "calib_data, work_dir=None",
    "ClientRunner.infer_context": "inference_context",
    "ClientRunner.infer": "context, dataset",
    "ClientRunner.compile": "",
}


def bind(recorded: Mapping[str, str], call: str, *args: object, **kwargs: object) -> dict:
    """Bind arguments to the recorded signature, by name; raise TypeError if they do not fit."""
    signature = inspect.signature(eval(f"lambda {recorded[call]}: None"))
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
