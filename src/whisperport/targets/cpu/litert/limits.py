"""The operators of a TFLite file that LiteRT's XNNPACK delegate supports, and their limits."""

from whisperport.program.spec import Limit

SOURCE = "google-ai-edge/LiteRT@038d2a2 tflite/delegates/xnnpack/xnnpack_delegate.cc, "
TFLITE = frozenset({"tflite"})
# By the names of `whisperport check`; capital letters are names of TFLite's schema.
OPERATORS = frozenset(
    [
        *(
            "abs",
            "add",
            "amax",
            "cat",
            "ceil",
            "constant_pad_nd",
            "conv",
            "cos",
            "div",
            "elu",
            "exp",
        ),
        *(
            "floor",
            "gelu",
            "linear",
            "log",
            "matmul",
            "maximum",
            "mean",
            "minimum",
            "mul",
            "neg",
            "relu",
        ),
        *("reshape", "rsqrt", "sigmoid", "sin", "slice", "softmax", "split", "sqrt", "square"),
        *("squared_difference", "sub", "sum", "tanh", "transpose", "unsqueeze"),
        *(
            "ASSIGN_VARIABLE",
            "AVERAGE_POOL_2D",
            "DEPTHWISE_CONV_2D",
            "DEPTH_TO_SPACE",
            "DEQUANTIZE",
        ),
        *("HARD_SWISH", "LEAKY_RELU", "MAX_POOL_2D", "PRELU", "QUANTIZE", "READ_VARIABLE"),
        *("REDUCE_MIN", "RELU6", "RELU_N1_TO_1", "RESIZE_BILINEAR", "ROUND", "SPACE_TO_DEPTH"),
        *("TRANSPOSE_CONV", "VAR_HANDLE"),
    ]
)
LIMITS = (
    Limit(rule="WP101", value=OPERATORS, formats=TFLITE, source=SOURCE + "VisitNode"),
    Limit(
        rule="WP212",
        value=frozenset({"float32", "float16", "int8", "uint8"}),
        formats=TFLITE,
        source=SOURCE + "CheckTensorFloat32OrQUInt8Type",
    ),
    Limit(
        rule="WP301",
        operators=frozenset({"linear"}),
        formats=TFLITE,
        source="LiteRT 2.3.0 lists FULLY_CONNECTED with a computed weight outside of XNNPACK",
    ),
    Limit(
        rule="WP305",
        operators=frozenset({"slice"}),
        value=("step", frozenset({"1"})),
        formats=TFLITE,
        source="LiteRT 2.3.0 lists STRIDED_SLICE with steps of 2 outside of XNNPACK",
    ),
    Limit(
        rule="WP311",
        operators=frozenset({"cat"}),
        value=5,
        formats=TFLITE,
        source="LiteRT 2.3.0 lists CONCATENATION of 6 tensors outside of XNNPACK, and not of 5",
    ),
)
