"""The NPUs as data, each value with its source.

Programs were compiled here for the NPU; nothing was run on one.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.program.spec import Lowering, Runs, Software, Support, TargetSpec

VELA = "ethos-u-vela 5.1.0"
EXECUTORCH = "executorch 1.5.1"
W8A16, W8A8 = "w8a16", "w8a8"
BARE_METAL, LINUX = "bare-metal", "linux"
# What drives the NPU -> the compiler's flags. Source of those for Linux: executorch backends/arm/README.md,
# "Direct Drive", at cff6f4d.
DRIVER_FLAGS: Mapping[str, tuple[str, ...]] = {
    BARE_METAL: (),
    LINUX: ("--separate-io-regions", "--cop-format=COP2"),
}
EXTRA = "export"
FALLBACK = "onnxruntime"


@dataclass(frozen=True, slots=True, kw_only=True)
class Npu:
    """One generation of the NPU.

    Attributes:
        name: name of the target, such as "ethos-u85".
        title: Arm's name, such as "Ethos-U85".
        macs: numbers of 8-bit multiply-accumulate units that the NPU can be built with; the first is the
            default.
        system_configs: the compiler's memory systems with this NPU; the first is the default.
        memory_modes: where the compiler can store weights and tensors; the first is the default.
        drivers: what can drive the NPU, a key of `DRIVER_FLAGS`; the first is the default.
        precisions: precisions that Whisper's encoder compiles in; the first is the default.
        sources: name of a field -> the document or measurement that its value comes from.
    """

    name: str
    title: str
    macs: tuple[int, ...]
    system_configs: tuple[str, ...]
    memory_modes: tuple[str, ...]
    drivers: tuple[str, ...]
    precisions: tuple[str, ...]
    sources: Mapping[str, str]

    def accelerator(self, macs: int) -> str:
        """Return the compiler's name of the NPU with a number of MAC units, such as "ethos-u85-256"."""
        return f"{self.name}-{macs}"


_SOURCES = {
    "title": f"{VELA} README",
    "macs": f"{VELA} --accelerator-config; the default is this project's choice",
    "system_configs": f"{VELA} config_files/Arm/vela.ini; the default is that of {EXECUTORCH}",
    "memory_modes": f"{VELA} config_files/Arm/vela.ini; the default is this project's choice",
    "drivers": "executorch backends/arm/README.md at cff6f4d: Linux drives Ethos-U85, experimental",
}
_EIGHT_BITS = (
    f"the encoder compiled here with {VELA}; {EXECUTORCH} backends/arm/operator_support/"
    "ethos_u55_support.py supports matrix multiplications of 8 bits only"
)

U85 = Npu(
    name="ethos-u85",
    title="Ethos-U85",
    macs=(256, 128, 512, 1024, 2048),
    system_configs=(
        "Ethos_U85_SYS_DRAM_Mid",
        "Ethos_U85_SYS_DRAM_High",
        "Ethos_U85_SYS_DRAM_Low",
        "Ethos_U85_SYS_Flash_High",
        "Ethos_U85_SYS_Flash_Low",
    ),
    memory_modes=(
        "Dedicated_Sram_384KB",
        "Dedicated_Sram_512KB",
        "Dedicated_Sram_256KB",
        "Shared_Sram",
        "Sram_Only",
    ),
    drivers=(BARE_METAL, LINUX),
    precisions=(W8A16, W8A8),
    sources={**_SOURCES, "precisions": f"compiled here with {VELA} and {EXECUTORCH}"},
)
U65 = Npu(
    name="ethos-u65",
    title="Ethos-U65",
    macs=(512, 256),
    system_configs=(
        "Ethos_U65_High_End",
        "Ethos_U65_Mid_End",
        "Ethos_U65_Embedded",
        "Ethos_U65_Client_Server",
    ),
    memory_modes=(
        "Dedicated_Sram_384KB",
        "Dedicated_Sram_512KB",
        "Dedicated_Sram_256KB",
        "Shared_Sram",
        "Sram_Only",
    ),
    drivers=(BARE_METAL,),
    precisions=(W8A8,),
    sources={**_SOURCES, "precisions": _EIGHT_BITS},
)
U55 = Npu(
    name="ethos-u55",
    title="Ethos-U55",
    macs=(256, 128, 64, 32),
    system_configs=("Ethos_U55_High_End_Embedded", "Ethos_U55_Deep_Embedded"),
    memory_modes=("Shared_Sram", "Sram_Only"),
    drivers=(BARE_METAL,),
    precisions=(W8A8,),
    sources={**_SOURCES, "precisions": _EIGHT_BITS},
)
NPUS = (U85, U65, U55)


def spec_of(npu: Npu) -> TargetSpec:
    """Return the spec of an NPU's target."""
    return TargetSpec(
        name=npu.name,
        summary=f"Arm {npu.title} NPU: microcontrollers and Linux chips, {' or '.join(npu.precisions)}",
        supports=Support(
            max_rank=6,
            dtypes=frozenset({"float32"}),
            rejects_programs=True,
        ),
        lowering=Lowering(rewrites=("drop-no-ops", "fold-constants"), lowered_suffix=".pt2"),
        runs=Runs(
            fallback=FALLBACK,
            precisions=npu.precisions,
            emulation={"emulate": "on"},
        ),
        software=Software(
            runtime="executorch",
            emulation_runtime="torch",
            extra=EXTRA,
            run_extra=EXTRA,
        ),
        sources={
            "formats": f"{EXECUTORCH} torch.export: Arm's quantizer gets an ExportedProgram",
            "domains": f"{EXECUTORCH} backends/arm: all operators are aten's",
            "static": f"{VELA} compiles graphs of fixed shapes",
            "dtypes": "inputs and outputs are quantized from and to float32 on the CPU",
            "max_rank": f"{EXECUTORCH} backends/arm/arm_vela.py: compiled programs have 6 axes",
            "precisions": npu.sources["precisions"],
        },
    )
