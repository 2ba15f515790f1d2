"""All targets. To add one, add it to `TARGETS`; entry points are not used."""

from whisperport.errors import UsageError
from whisperport.targets.aws_neuron.target import AwsNeuron
from whisperport.targets.base import RunOptions, Target
from whisperport.targets.ethos_u.chips import NPUS
from whisperport.targets.ethos_u.target import EthosU
from whisperport.targets.hailo.chips import HAILO8, HAILO8L, HAILO10H
from whisperport.targets.hailo.target import Hailo
from whisperport.targets.litert.target import LiteRt
from whisperport.targets.mediatek.chips import CHIPS as BOARDS
from whisperport.targets.mediatek.target import Genio
from whisperport.targets.onnxruntime import OnnxRuntime
from whisperport.targets.openvino.target import OpenVino
from whisperport.targets.qualcomm.chips import CHIPS as SNAPDRAGONS
from whisperport.targets.qualcomm.target import Qualcomm
from whisperport.targets.rockchip.chips import CHIPS as ROCKCHIPS
from whisperport.targets.rockchip.target import Rockchip
from whisperport.targets.xnnpack.target import Xnnpack

TARGETS: tuple[Target, ...] = (
    OnnxRuntime(),
    Xnnpack(),
    LiteRt(),
    OpenVino(),
    Hailo(HAILO8),
    Hailo(HAILO8L),
    Hailo(HAILO10H),
    *map(Genio, BOARDS),
    *map(Qualcomm, SNAPDRAGONS),
    *map(Rockchip, ROCKCHIPS),
    *map(EthosU, NPUS),
    AwsNeuron(),
)

__all__ = ["PROFILERS", "RUNTIMES", "TARGETS", "RunOptions", "Target", "get_target"]

# What measures compiled programs of a format that only one target has.
PROFILERS = tuple(target.profiler for target in TARGETS if target.profiler is not None)
# Packages that run programs without a vendor's compiler.
RUNTIMES = tuple(dict.fromkeys(one.spec.runtime for one in TARGETS if one.compiler is None))


def get_target(name: str) -> Target:
    """Return the target called `name`.

    Raises:
        UsageError: there is no such target.
    """
    for target in TARGETS:
        if target.spec.name == name:
            return target
    raise UsageError(
        f"there is no target `{name}`",
        hint=f"targets are {', '.join(target.spec.name for target in TARGETS)}",
    )
