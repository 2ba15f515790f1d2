"""AWS's chips and the EC2 instances that have them, as data, each value with its source.

Nothing here was run: this project had neither the SDK nor a device. The sources are pages of
aws-neuron/aws-neuron-sdk at commit 81ce03a (release 2.32.0). What they do not state is None, or is marked
`second-hand` if users' reports state it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from whisperport.targets.base import Machine

RELEASE = "aws-neuron/aws-neuron-sdk@81ce03a (release 2.32.0)"
HARDWARE = f"{RELEASE} about-neuron/arch/neuron-hardware"
COMPILER_GUIDE = f"{RELEASE} compiler/neuronx-cc/api-reference-guide/index.rst"
LNC_GUIDE = f"{RELEASE} about-neuron/arch/neuron-features/logical-neuroncore-config.rst"
MEMORY_GUIDE = f"{RELEASE} neuron-runtime/explore/device-memory.rst"

GIB = 2**30
TERA = 10**12

# Memory of the microcode, of each physical core: "a micro-code overhead of 96MB per physical Neuron Core".
# Source: MEMORY_GUIDE.
MICROCODE_BYTES = 96 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One generation of chips: its cores, its memory, its peak speed, and its names in the SDK.

    Attributes:
        name: the value of `--option aws-neuron.chip`, such as "trn2".
        title: name in AWS's documents, such as "Trainium2".
        core: generation of its cores, such as "NeuronCore-v3".
        cores: number of physical cores.
        lncs: sizes of a logical core, in physical cores, that the compiler supports; first the default.
        memory_bytes: device memory of the chip.
        bandwidth: peak bandwidth of the device memory of the chip, in bytes/s.
        flops: peak speed of the chip's matrix multiplications, dense, in operations/s, by precision.
        compiler_target: the value of the compiler's `--target`.
        sources: name of a field -> the document that its value comes from.
    """

    name: str
    title: str
    core: str
    cores: int
    lncs: tuple[int, ...]
    memory_bytes: int
    bandwidth: float
    flops: Mapping[str, float]
    compiler_target: str
    sources: Mapping[str, str]

    def logical_cores(self, lnc: int) -> int:
        """Return the number of logical cores of the chip, if each has `lnc` physical cores."""
        return self.cores // lnc

    @property
    def has_lnc(self) -> bool:
        """Whether the compiler has an option for the size of a logical core."""
        return len(self.lncs) > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One EC2 instance type, or one server where the documents name no instance type.

    Attributes:
        name: name of the instance type, such as "inf2.xlarge".
        chip: its chips.
        chips: number of its chips.
        source: the document that its values come from.
    """

    name: str
    chip: Chip
    chips: int
    source: str


# The pages of the chips say 820 GiB/s, the architecture guide of NKI 820 GB/s: the lower one.
BANDWIDTH_V2 = f"{RELEASE} nki/guides/architecture/trainium_inferentia2_arch.rst: 820 GB/s"
SOURCES_V2 = {
    "lncs": f"{RELEASE} compiler/error-codes/EARG001.rst: on trn1, only lnc=1 is supported",
    "bandwidth": BANDWIDTH_V2,
    "compiler_target": COMPILER_GUIDE,
}


def _with_v2(name: str, title: str, page: str, **sources: str) -> Chip:
    """Return a chip of NeuronCore-v2; `page` describes it."""
    return Chip(
        name=name,
        title=title,
        core="NeuronCore-v2",
        cores=2,
        lncs=(1,),
        memory_bytes=32 * GIB,
        bandwidth=0.82 * TERA,
        flops={"bf16": 190 * TERA, "fp32": 47.5 * TERA},
        compiler_target=name,
        sources={
            **SOURCES_V2,
            "cores": page,
            "memory_bytes": f"{page}: 32 GiB",
            "flops": f"{page}: 190 (BF16) and 47.5 (FP32) TFLOPS",
            **sources,
        },
    )


INF2 = _with_v2(
    "inf2",
    "Inferentia2",
    f"{HARDWARE}/inferentia2.rst",
    lncs=f"{LNC_GUIDE}: LNC applies only to Trn2 and Trn3",
)
TRN1 = _with_v2("trn1", "Trainium", f"{HARDWARE}/trainium.rst")
TRN2 = Chip(
    name="trn2",
    title="Trainium2",
    core="NeuronCore-v3",
    cores=8,
    lncs=(2, 1),
    memory_bytes=96 * GIB,
    bandwidth=2.9 * TERA,
    flops={"bf16": 667 * TERA, "fp32": 181 * TERA},
    compiler_target="trn2",
    sources={
        "cores": f"{HARDWARE}/trainium2.rst",
        "lncs": f"{LNC_GUIDE}: 2 is the default, 1 the only other value",
        "memory_bytes": f"{HARDWARE}/trainium2.rst: 96 GiB",
        "bandwidth": f"{HARDWARE}/trainium2.rst: 2.9 TB/s",
        "flops": f"{HARDWARE}/trainium2.rst: 667 (BF16) and 181 (FP32) TFLOPS",
        "compiler_target": COMPILER_GUIDE,
    },
)
TRN3 = Chip(
    name="trn3",
    title="Trainium3",
    core="NeuronCore-v4",
    cores=8,
    lncs=(2, 1),
    memory_bytes=144 * GIB,
    bandwidth=4.9 * TERA,
    flops={"bf16": 671 * TERA, "fp32": 183 * TERA},
    compiler_target="trn3",
    sources={
        "cores": f"{HARDWARE}/trainium3.rst",
        "lncs": f"{LNC_GUIDE}: LNC applies to Trn2 and Trn3; the default of trn2 (inferred for trn3)",
        "memory_bytes": f"{HARDWARE}/trainium3.rst: 144 GiB",
        "bandwidth": f"{HARDWARE}/trainium3.rst: 4.9 TB/s (its NKI guide says 4.7 TB/s)",
        "flops": f"{HARDWARE}/trainium3.rst: 671 (BF16) and 183 (FP32) TFLOPS",
        "compiler_target": f"{RELEASE} nki/deep-dives/src/mxfp-matmul/mx_toplevel.py: --target trn3; the "
        "compiler's reference does not list it",
    },
)

FIGURES = ("cores", "memory_bytes", "bandwidth", "flops")  # fields that a `Machine` is made of

CHIPS: Mapping[str, Chip] = {chip.name: chip for chip in (INF2, TRN1, TRN2, TRN3)}

INSTANCES = (
    *(
        Instance(
            name=f"inf2.{size}",
            chip=INF2,
            chips=chips,
            source=f"{HARDWARE}/inf2-arch.rst",
        )
        for size, chips in (("xlarge", 1), ("8xlarge", 1), ("24xlarge", 6), ("48xlarge", 12))
    ),
    *(
        Instance(
            name=f"{family}.{size}",
            chip=TRN1,
            chips=chips,
            source=f"{HARDWARE}/trn1-arch.rst",
        )
        for family, size, chips in (
            ("trn1", "2xlarge", 1),
            ("trn1", "32xlarge", 16),
            ("trn1n", "32xlarge", 16),
        )
    ),
    Instance(
        name="trn2.3xlarge",
        chip=TRN2,
        chips=1,
        source=f"{RELEASE} deploy/files/manifests/daemonset.yaml has its name; one chip: second-hand, "
        "users' reports",
    ),
    *(
        Instance(
            name=name,
            chip=TRN2,
            chips=16,
            source=f"{HARDWARE}/trn2-arch.rst",
        )
        for name in ("trn2.48xlarge", "trn2u.48xlarge")
    ),
    Instance(
        name="trn3 server, Gen1",
        chip=TRN3,
        chips=16,
        source=f"{HARDWARE}/trn3-arch.rst: 4 servers with 16 chips each, 8192 GiB; no instance type",
    ),
    Instance(
        name="trn3 server, Gen2",
        chip=TRN3,
        chips=4,
        source=f"{HARDWARE}/trn3-arch.rst: 36 servers with 4 chips each, 27,648 GiB; no instance type",
    ),
)


def machines() -> tuple[Machine, ...]:
    """Return the figures of one logical core of every instance type, for each size of a logical core.

    A chip's memory and bandwidth are divided among its logical cores. With lnc=1 on trn2 and trn3, two
    cores share one bank of memory, so that one of them may use more of it. Source: MEMORY_GUIDE.
    """
    return tuple(_machine(instance, lnc) for instance in INSTANCES for lnc in instance.chip.lncs)


def _machine(instance: Instance, lnc: int) -> Machine:
    chip = instance.chip
    cores = chip.logical_cores(lnc)
    return Machine(
        name=instance.name + (f", lnc={lnc}" if chip.has_lnc else ""),
        cores=cores * instance.chips,
        memory_bytes=chip.memory_bytes / cores,
        reserved_bytes=MICROCODE_BYTES * lnc,
        bandwidth=chip.bandwidth / cores,
        flops={precision: speed / cores for precision, speed in chip.flops.items()},
        source=f"{instance.source}; {'; '.join(chip.sources[key] for key in FIGURES)}",
    )
