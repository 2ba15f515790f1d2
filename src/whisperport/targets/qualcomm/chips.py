"""The chips and the generations of their NPU as data, each value with its source.

The NPU is the Hexagon Tensor Processor (HTP). Programs were compiled and simulated here for it; nothing
was run on a chip.
"""

from collections.abc import Mapping
from dataclasses import dataclass

EXECUTORCH = "executorch 1.5.1, the vendor's own backends/qualcomm/serialization/qc_schema.py"
COMPILED = "compiled here with onnxruntime-qnn 2.7.0"
FLOAT, W8A16 = "fp16", "w8a16"


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One generation of the HTP.

    Attributes:
        number: number in the vendor's documents and in the provider's `htp_arch`, such as 75 for v75.
        precisions: precisions that it computes in; the first is the default.
        source: of the precisions.
    """

    number: int
    precisions: tuple[str, ...]
    source: str

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
    f"it; w8a16: {COMPILED}",
)
V69 = Architecture(
    number=69,
    precisions=(FLOAT, W8A16),
    source=f"{COMPILED}; a maintainer says that fp16 needs v73 (microsoft/onnxruntime#21848): try fp16 on "
    "the device first",
)
V73 = Architecture(number=73, precisions=(FLOAT, W8A16), source=f"{COMPILED}; onnxruntime#21848")
V75 = Architecture(number=75, precisions=(FLOAT, W8A16), source=f"{COMPILED} and simulated")
V79 = Architecture(number=79, precisions=(FLOAT, W8A16), source=COMPILED)
V81 = Architecture(number=81, precisions=(FLOAT, W8A16), source=COMPILED)

_SOURCES = {
    "soc_model": EXECUTORCH,
    "architecture": EXECUTORCH,
    "vtcm_mib": EXECUTORCH,
    "marketing_name": "from memory",
}

CHIPS = (
    Chip(
        name="qcm6490",
        marketing_name="QCM6490 and QCS6490, as in Rubik Pi 3",
        soc_model=93,
        architecture=V68,
        vtcm_mib=2,
        sources=_SOURCES,
    ),
    Chip(
        name="sm8450",
        marketing_name="Snapdragon 8 Gen 1",
        soc_model=36,
        architecture=V69,
        vtcm_mib=8,
        sources=_SOURCES,
    ),
    Chip(
        name="sm8550",
        marketing_name="Snapdragon 8 Gen 2",
        soc_model=43,
        architecture=V73,
        vtcm_mib=8,
        sources=_SOURCES,
    ),
    Chip(
        name="sm8650",
        marketing_name="Snapdragon 8 Gen 3",
        soc_model=57,
        architecture=V75,
        vtcm_mib=8,
        sources=_SOURCES,
    ),
    Chip(
        name="sm8750",
        marketing_name="Snapdragon 8 Elite",
        soc_model=69,
        architecture=V79,
        vtcm_mib=8,
        sources=_SOURCES,
    ),
    Chip(
        name="sm8850",
        marketing_name="Snapdragon 8 Elite Gen 5",
        soc_model=87,
        architecture=V81,
        vtcm_mib=8,
        sources=_SOURCES,
    ),
    Chip(
        name="sc8380xp",
        marketing_name="Snapdragon X Elite",
        soc_model=60,
        architecture=V73,
        vtcm_mib=8,
        sources=_SOURCES,
    ),
)
