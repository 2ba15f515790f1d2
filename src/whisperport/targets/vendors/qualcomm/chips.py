"""The chips and the generations of their NPU as data, each value with its source.

The NPU is the Hexagon Tensor Processor (HTP). Programs were compiled and simulated here for it; nothing
was run on a chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.program.spec import Package, TargetSpec
from whisperport.targets.base import PublishedTimes
from whisperport.targets.onnx.target import onnx_lowering, onnx_runs, onnx_software, onnx_support

EXECUTORCH = "executorch 1.5.1, the vendor's own backends/qualcomm/serialization/qc_schema.py"
COMPILED = "compiled here with onnxruntime-qnn 2.7.0"
FLOAT, W8A16 = "fp16", "w8a16"
PACKAGE, EXTRA = "onnxruntime-qnn", "qualcomm"
SIMULATOR = (f"{PACKAGE}>=2.7,<3", "onnxruntime>=1.24,<2")  # as pip takes it
RAN = "onnxruntime-qnn 2.7.0, v75"
OPSET = 20  # in which GELU is one operator


@dataclass(frozen=True, slots=True, kw_only=True)
class Operand:
    """How w8a16 quantizes the second operand of a matrix multiplication of two activations.

    Attributes:
        quant_type: name in ONNX Runtime's `QuantType`.
        symmetric: its zero point is in the middle of its integers.
        margin: its range, relative to that of the calibration samples.
    """

    quant_type: str
    symmetric: bool
    margin: float


# Compiled and simulated here with onnxruntime-qnn 2.7.0; it rejects QInt16 for v68 and v69. Of 8 bits, the
# margin is small: with 1.0, 1.2 and 2.0, the smallest SQNR of the embedded model's `step`, `prefill_4` and
# `prefill_64` on v68 was 28.7, 29.7 and 24.3 dB.
INT16 = Operand(quant_type="QInt16", symmetric=True, margin=2.0)
UINT8 = Operand(quant_type="QUInt8", symmetric=False, margin=1.2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One generation of the HTP.

    Attributes:
        number: number in the vendor's documents and in the provider's `htp_arch`, such as 75 for v75.
        precisions: precisions that it computes in; the first is the default.
        source: of the precisions.
        operand: the second operand of a matrix multiplication of two activations in w8a16.
        min_rows: smallest number of rows of the first operand for which such a matmul is right.
    """

    number: int
    precisions: tuple[str, ...]
    source: str
    operand: Operand = INT16
    min_rows: int = 1

    @property
    def name(self) -> str:
        """Name in the vendor's documents, such as "v75"."""
        return f"v{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One system on a chip.

    Attributes:
        name: name of the target, such as "sm8650".
        marketing_name: name on the device's box, such as "Snapdragon 8 Gen 3".
        soc_model: the vendor's number of the chip, for the provider's `soc_model`.
        architecture: the generation of its HTP.
        vtcm_mib: size of the HTP's own memory (VTCM) in MiB.
        sources: name of a field -> the document that its value comes from.
    """

    name: str
    marketing_name: str
    soc_model: int
    architecture: Architecture
    vtcm_mib: int
    sources: Mapping[str, str]


V68 = Architecture(
    number=68,
    precisions=(W8A16,),
    source="onnxruntime-qnn#708: v68 has no fp16 or fp32; onnxruntime-qnn 2.7.0 rejects float programs for "
    f"it; w8a16: {COMPILED} and simulated",
    operand=UINT8,
)
V69 = Architecture(
    number=69,
    precisions=(FLOAT, W8A16),
    source=f"{COMPILED}; a maintainer says that fp16 needs v73 (microsoft/onnxruntime#21848): try fp16 on "
    "the device first",
    operand=UINT8,
    # Random matmuls of two activations, the first computed by an operator, simulated here: with 1 to 5
    # rows and 64 columns, -3 to 3 dB; with 6 to 64 rows, 39 to 43 dB, as on v68. In complete programs, the
    # values differ from run to run.
    min_rows=6,
)
V73 = Architecture(number=73, precisions=(FLOAT, W8A16), source=f"{COMPILED}; onnxruntime#21848")
V75 = Architecture(number=75, precisions=(FLOAT, W8A16), source=f"{COMPILED} and simulated")
V79 = Architecture(number=79, precisions=(FLOAT, W8A16), source=COMPILED)
V81 = Architecture(number=81, precisions=(FLOAT, W8A16), source=COMPILED)


def _chip(
    name: str, marketing_name: str, soc_model: int, architecture: Architecture, vtcm_mib: int = 8
) -> Chip:
    return Chip(
        name=name,
        marketing_name=marketing_name,
        soc_model=soc_model,
        architecture=architecture,
        vtcm_mib=vtcm_mib,
        sources={
            "soc_model": EXECUTORCH,
            "architecture": EXECUTORCH,
            "vtcm_mib": EXECUTORCH,
            "marketing_name": "from memory",
        },
    )


CHIPS = (
    _chip("qcm6490", "QCM6490 and QCS6490, as in Rubik Pi 3", 93, V68, vtcm_mib=2),
    _chip("sm8450", "Snapdragon 8 Gen 1", 36, V69),
    _chip("sm8550", "Snapdragon 8 Gen 2", 43, V73),
    _chip("sm8650", "Snapdragon 8 Gen 3", 57, V75),
    _chip("sm8750", "Snapdragon 8 Elite", 69, V79),
    _chip("sm8850", "Snapdragon 8 Elite Gen 5", 87, V81),
    _chip("sc8380xp", "Snapdragon X Elite", 60, V73),
)


# Where Qualcomm measured: "proxy" is its own word for another chip of the same generation.
MEASURED_ON = {
    "qcm6490": "RB3 Gen 2",
    "sm8450": "QCS8450 (proxy)",
    "sm8550": "QCS8550 (proxy)",
    "sm8650": "Galaxy S24",
    "sm8750": "Galaxy S25",
    "sm8850": "8 Elite Gen 5 QRD",
    "sc8380xp": "X Elite CRD",
}
AI_HUB = "ai-hub-models@{}, qai_hub_models/models/whisper_*/perf.yaml"
Milliseconds = tuple[float, ...]
# (precision, software, commit of AI_HUB, models) -> chip -> ms of a window in the encoder, and of a token,
# for each of the models. The encoder of w8a16 depends on the version of the compiler.
MEASURED: Mapping[
    tuple[str, str, str, tuple[str, ...]], Mapping[str, tuple[Milliseconds, Milliseconds]]
] = {
    (FLOAT, "QAIRT 2.43", "b61a009", ("tiny", "base", "small", "large-v3-turbo")): {
        "sm8450": ((46.518, 97.613, 277.29, 1316.109), (2.632, 5.124, 17.533, 16.307)),
        "sm8550": ((17.656, 36.764, 112.849, 579.045), (2.092, 3.93, 12.11, 9.681)),
        "sm8650": ((12.973, 27.1, 84.552, 424.71), (1.659, 3.097, 9.816, 7.65)),
        "sm8750": ((8.885, 18.631, 60.15, 309.862), (1.361, 2.64, 8.347, 6.68)),
        "sm8850": ((7.284, 14.547, 45.005, 248.15), (1.316, 2.475, 7.276, 6.153)),
        "sc8380xp": ((18.28, 37.271, 114.76, 580.261), (1.896, 3.426, 9.783, 8.165)),
    },
    (W8A16, "QAIRT 2.37", "33c3d03", ("small",)): {
        "qcm6490": ((538.284,), (32.683,)),
        "sm8550": ((62.149,), (8.805,)),
        "sm8650": ((45.023,), (6.786,)),
        "sm8750": ((36.68,), (5.133,)),
        "sm8850": ((27.853,), (4.337,)),
        "sc8380xp": ((61.6,), (7.808,)),
    },
    (W8A16, "QAIRT 2.43", "b61a009", ("small",)): {
        "sm8550": ((358.638,), (8.23,)),
        "sm8650": ((268.023,), (6.366,)),
        "sm8750": ((224.015,), (4.74,)),
        "sm8850": ((187.818,), (3.972,)),
        "sc8380xp": ((294.934,), (7.662,)),
    },
}
CONTEXT = 200  # rows of the cache with which a token was measured


def published_times(chip: str) -> tuple[PublishedTimes, ...]:
    """Return what Qualcomm published of a chip. The smallest and the largest model are fitted."""
    return tuple(
        PublishedTimes(
            machine=MEASURED_ON[chip],
            precision=precision,
            software=software,
            source=AI_HUB.format(commit),
            encoder_ms=dict(zip(models, times[chip][0], strict=True)),
            token_ms=dict(zip(models, times[chip][1], strict=True)),
            fitted=(models[0], models[-1]),
            context=CONTEXT,
        )
        for (precision, software, commit, models), times in MEASURED.items()
        if chip in times
    )


def spec_of(chip: Chip) -> TargetSpec:
    """Return the spec of a chip's target."""
    architecture = chip.architecture
    limit = " (not for `step`)" if architecture.min_rows > 1 else ""
    return TargetSpec(
        name=chip.name,
        summary=f"{chip.marketing_name}: Hexagon NPU {architecture.name}, "
        f"{' or '.join(architecture.precisions)}{limit}",
        supports=onnx_support(
            max_rank=5,
            dtypes=frozenset({"float32", "float16", "int32"}),
            domains=frozenset({"com.microsoft"}),
        ),
        lowering=onnx_lowering(),
        runs=onnx_runs(precisions=architecture.precisions),
        software=onnx_software(
            runtime=PACKAGE,
            run_extra=EXTRA,
            packages={EXTRA: (Package("onnxruntime_qnn", PACKAGE),)},
        ),
        sources={
            "formats": "the provider of onnxruntime-qnn compiles ONNX; torch programs are converted first",
            "domains": "QuantizeLinear and DequantizeLinear of 16 bits are com.microsoft's below opset 21",
            "static": "onnxruntime.ai, QNN Execution Provider: no dynamic shapes",
            "dtypes": f"a graph with inputs of each ran in the simulator; int64 did not ({RAN})",
            "max_rank": f"a graph of rank 5 ran in the simulator, one of rank 6 was rejected ({RAN})",
            "precisions": architecture.source,
        },
    )
