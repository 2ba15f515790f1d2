"""The Genio boards and their NPUs as data, each value with its source.

Nothing here was run: this project had neither MediaTek's SDK nor a board. A value is first-hand if
MediaTek's own documentation states it. All others are marked `second-hand`: they come from users' projects,
or from boards' makers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Engine = Literal["mdla", "vpu"]

GUIDE = "mediatek.gitlab.io/…/aiot-dev-guide/…/ml-guide/neuron-sdk"
MDLA_3_0_GUIDE = f"{GUIDE}/mt8188, MDLA 3.0 Guidelines"
MDLA_2_0_GUIDE = f"{GUIDE}/mt8195, MDLA 2.0 Guidelines"
MODEL_ZOO = "second-hand: superLin006/MTK_model_zoo@942c4fb"
MODEL_ZOO_OPERATORS = (
    f"{MODEL_ZOO} .claude/doc/mtk_mdla_operators.md, copied from the manual of NeuroPilot 8.0.10"
)
RADXA = "second-hand: docs.radxa.com, NIO 12L, NPU usage, introduction"
KERNEL = (
    "Linux, arch/arm64/boot/dts/mediatek: mt8365-evk, mt8370-genio-510-evk, mt8390-genio-700-evk, …"
)
LITERT = "ai-edge-litert 2.3.0, aot/vendors/mediatek/target.py, SocModel"


@dataclass(frozen=True, slots=True, kw_only=True)
class Npu:
    """One generation of the NPU: what its compiler is told, and what it supports.

    Attributes:
        name: name in MediaTek's documents, such as "MDLA 3.0".
        engine: "mdla", the accelerator of neural networks; or "vpu", the signal processor alone.
        arch: value of the compiler's `--arch`.
        plan_target: name of the engine in the compiler's execution plan, such as "MDLA_3_0".
        l1_kb: size of the engine's first memory in KiB, for `--l1-size-kb`; None: not known, so that the
            compiler uses its own default.
        cores: number of engines, for `--num-mdla`.
        sdks: major versions of NeuroPilot that compile for it, the oldest first.
        per_channel: TFLite operators that may have one scale per channel.
        w8a16: whether an operator may have 16-bit activations and 8-bit weights.
        transformer: whether the vendor's documents list what attention needs: True, False, or None if they
            do not tell.
        sources: name of a field -> the document that its value comes from.
    """

    name: str
    engine: Engine
    arch: str
    plan_target: str
    l1_kb: int | None
    cores: int
    sdks: tuple[int, ...]
    per_channel: frozenset[str]
    w8a16: bool
    transformer: bool | None
    sources: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One board: its SoC, and its NPU.

    Attributes:
        name: name of the target, such as "genio720".
        board: name of the board, such as "Genio 720".
        soc: number of the SoC, such as "MT8391".
        litert_soc: SoC that LiteRT's partitioner has for this NPU, such as "MT8189"; empty: none.
        npu: the generation of its NPU.
    """

    name: str
    board: str
    soc: str
    litert_soc: str
    npu: Npu


PER_CHANNEL = frozenset(
    {"CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED", "PRELU", "TRANSPOSE_CONV"}
)
CONTRACT_SDK = (
    "second-hand: users' build logs name NeuroPilot 6 and 7 for MT8188 and 8.0.10 for MT8371"
)

VPU = Npu(
    name="VPU",
    engine="vpu",
    arch="vpu",
    plan_target="VPU",
    l1_kb=None,
    cores=1,
    sdks=(6,),
    per_channel=frozenset({"CONV_2D", "DEPTHWISE_CONV_2D"}),
    w8a16=False,
    transformer=False,
    sources={
        "engine": f"{GUIDE}: some platforms have no MDLA; Genio 350 has the VPU alone (inferred)",
        "arch": "inferred: the architecture of the VPU in MediaTek's examples",
        "sdks": "inferred: the version of the boards of its time",
        "per_channel": f"{GUIDE}: VPU, convolutions only",
        "w8a16": f"{GUIDE}: VPU, unsigned and signed 8-bit, or fp16",
        "transformer": f"{GUIDE}: VPU, no list of operators that attention needs (inferred)",
    },
)
MDLA_2_0 = Npu(
    name="MDLA 2.0",
    engine="mdla",
    arch="mdla2.0",
    plan_target="MDLA_2_0",
    l1_kb=None,
    cores=2,
    sdks=(6, 7),
    per_channel=PER_CHANNEL,
    w8a16=False,
    transformer=False,
    sources={
        "cores": RADXA,
        "sdks": CONTRACT_SDK + " (inferred for MT8195)",
        "per_channel": MDLA_2_0_GUIDE,
        "w8a16": f"{MDLA_2_0_GUIDE}: 16-bit, but no 16-bit activation with 8-bit weight",
        "transformer": f"{RADXA}: MDLA 2.0 does not support transformer-based generative models",
    },
)
MDLA_3_0 = Npu(
    name="MDLA 3.0",
    engine="mdla",
    arch="mdla3.0",
    plan_target="MDLA_3_0",
    l1_kb=None,
    cores=1,
    sdks=(6, 7),
    per_channel=PER_CHANNEL,
    w8a16=True,
    transformer=None,
    sources={
        "cores": "inferred: the compiler's default of --num-mdla",
        "sdks": CONTRACT_SDK,
        "per_channel": MDLA_3_0_GUIDE,
        "w8a16": f"{MDLA_3_0_GUIDE}: symmetric 16-bit activation with symmetric 8-bit weight",
        "transformer": f"{MDLA_3_0_GUIDE}: its list has neither BATCH_MATMUL nor GELU",
    },
)
MDLA_5_3 = Npu(
    name="MDLA 5.3",
    engine="mdla",
    arch="mdla5.3,edma3.6",
    plan_target="MDLA_5_3",
    l1_kb=256,
    cores=1,
    sdks=(8,),
    per_channel=PER_CHANNEL,
    w8a16=True,
    transformer=True,
    sources={
        "arch": f"{MODEL_ZOO} sense-voice, compile_dla: mdla5.3,edma3.6 for MT8371",
        "l1_kb": f"{MODEL_ZOO} sense-voice, compile_dla: 256 for MT8371",
        "cores": f"{MODEL_ZOO} sense-voice, compile_dla: 1 for MT8371",
        "sdks": CONTRACT_SDK,
        "per_channel": f"{MDLA_3_0_GUIDE} (inferred for MDLA 5.3)",
        "w8a16": f"{MDLA_3_0_GUIDE} (inferred for MDLA 5.3)",
        "transformer": MODEL_ZOO_OPERATORS,
    },
)

# Sources of `litert_soc`: `KERNEL`; MT8189 for MT8371 and MT8391, MT8188 for MT8370 and MT8390: inferred.
GENIO350 = Chip(name="genio350", board="Genio 350", soc="MT8365", litert_soc="", npu=VPU)
GENIO510 = Chip(name="genio510", board="Genio 510", soc="MT8370", litert_soc="MT8188", npu=MDLA_3_0)
GENIO520 = Chip(name="genio520", board="Genio 520", soc="MT8371", litert_soc="MT8189", npu=MDLA_5_3)
GENIO700 = Chip(name="genio700", board="Genio 700", soc="MT8390", litert_soc="MT8188", npu=MDLA_3_0)
GENIO720 = Chip(name="genio720", board="Genio 720", soc="MT8391", litert_soc="MT8189", npu=MDLA_5_3)
GENIO1200 = Chip(name="genio1200", board="Genio 1200", soc="MT8395", litert_soc="", npu=MDLA_2_0)

CHIPS = (GENIO350, GENIO510, GENIO520, GENIO700, GENIO720, GENIO1200)
