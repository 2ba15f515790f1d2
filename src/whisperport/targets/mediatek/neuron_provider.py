"""MediaTek's execution provider of ONNX Runtime, as data. This project has never run it."""

from whisperport.targets.execution_provider import ExecutionProvider

GUIDE = "MediaTek's Genio community, guide of the NeuronExecutionProvider"
USERS = "second-hand: users' projects on Genio 520 and Genio 720, with ONNX Runtime 1.20.2"
STATIC = "quantize statically, with QuantizeLinear and DequantizeLinear (QDQ)"

NEURON = ExecutionProvider(
    name="NeuronExecutionProvider",
    precision="fp16",
    min_opset=13,
    unsupported={
        "DynamicQuantizeLinear": STATIC,
        "MatMulInteger": STATIC,
        "ConvInteger": STATIC,
    },
    options={
        "NEURON_FLAG_USE_FP16": "compute in float16; the NPU does not run float32",
        "NEURON_FLAG_MIN_GROUP_SIZE": "smallest number of nodes that are given to the NPU together",
        "NEURON_FLAG_OPTIMIZATION_STRING": "options of MediaTek's compiler",
        "NEURON_FLAG_USE_NCHW": "layout with channels first",
        "NEURON_FLAG_CPU_DISABLED": "forbid Neuron's own CPU device",
        "NEURON_FLAG_CPU_ONLY": "use Neuron's own CPU device only",
        "NEURON_FLAG_MDLA_ONLY": "use the MDLA only",
        "NEURON_FLAG_FORCE_SKIP_OPS_STRING": "operators that stay on ONNX Runtime's CPU provider",
    },
    defaults={
        "NEURON_FLAG_USE_FP16": "1",
        "NEURON_FLAG_OPTIMIZATION_STRING": "--opt=3 --num-mdla=1 --reshape-to-4d",
    },
    # With 0, a large BatchMatMul on Genio 720 was wrong by up to 29; with 100 it stayed on the CPU.
    trials=({"NEURON_FLAG_MIN_GROUP_SIZE": "0"}, {"NEURON_FLAG_MIN_GROUP_SIZE": "100"}),
    sources={
        "precision": f'{GUIDE}: "the NPU does not support FP32 execution"',
        "min_opset": f"{GUIDE}: Softmax of older opsets is rejected",
        "unsupported": f"{GUIDE}: 8-bit models must be QDQ, not dynamically quantized",
        "options": f"{GUIDE}; {USERS}",
        "trials": USERS,
    },
)
