"""The machines of a target as data, for estimates: their cores, memory and published peak speeds."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """One kind of machine, such as an instance type of a cloud.

    A core is what a program is compiled for. All figures are for one core.

    Attributes:
        name: name of the machine.
        cores: number of cores.
        memory_bytes: memory of the device for one core.
        reserved_bytes: memory that the vendor's own software takes from it.
        bandwidth: peak bandwidth of this memory, in bytes/s.
        flops: precision -> peak speed of dense matrix multiplications, in operations/s.
        source: the documents that the figures come from.
    """

    name: str
    cores: int
    memory_bytes: float
    reserved_bytes: float
    bandwidth: float
    flops: Mapping[str, float]
    source: str
