"""Run compiled files on the chip with rknn-toolkit-lite2, the vendor's Python package for boards.

A program gets float32 arrays in C order and returns float32 arrays; the runtime converts them to the types
of the compiled file. All programs have inputs of rank 3 or lower, for which the runtime does not reorder
axes; for an input of rank 4, the argument `data_format` tells it that the channels come first.

Source: rknn-toolkit-lite2 2.5.0, rknnlite/api/rknn_lite.py. This project has never run it on a chip: tests
compare calls with the signatures of that file.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np

from whisperport.errors import LoweringError, UsageError, needs
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.process import release_with
from whisperport.targets.vendors.rockchip.chips import EXTRA, Chip
from whisperport.targets.vendors.rockchip.rknn_file import check_rknn

CORES = {"auto": 0, "0": 1, "1": 2, "2": 4, "0-1": 3, "0-2": 7}  # value of the option -> core mask
BOARD = Path(
    "/proc/device-tree/compatible"
)  # names of the board and the chip, with NUL between them
MAX_BOARD = 4096  # bytes of it that are read


@final
class RknnRunner(Runner):
    """A compiled program on the NPU; only the process that loaded it may use it."""

    def __init__(self, spec: ProgramSpec, session: Any) -> None:
        """
        Args:
            spec: the program's signature in the manifest.
            session: an `RKNNLite` with the compiled file loaded and the runtime initialized.
        """
        super().__init__(spec)
        self._session, self._formats = session, ["nchw"] * len(spec.inputs)
        release_with(self, session.release)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        arrays = [np.ascontiguousarray(array) for array in inputs]
        outputs = self._session.inference(inputs=arrays, data_format=self._formats)
        if outputs is None or len(outputs) != len(self.spec.outputs):
            raise LoweringError(
                f"`{self.spec.name}` failed on the NPU",
                why="rknn-toolkit-lite2 returned no outputs; it printed the reason above",
                hint="see `dmesg`: the NPU's driver reports a missing memory or a timeout there",
            )
        return [
            np.array(output, tensor.dtype).reshape(tensor.shape)
            for output, tensor in zip(outputs, self.spec.outputs, strict=True)
        ]


def load_rknn_files(
    chip: Chip, specs: Sequence[ProgramSpec], files: Mapping[str, Path], cores: str
) -> dict[str, Runner]:
    """Load compiled programs as `CompiledTarget.load_compiled`; `cores` is a key of `CORES`."""
    _check_cores(chip, cores)
    for spec in specs:
        check_rknn(files[spec.name], chip.name, spec)
    lite = _package(chip)
    _check_board(chip)
    return {
        spec.name: RknnRunner(spec, _session(lite, chip, files[spec.name], cores)) for spec in specs
    }


def _session(lite: Any, chip: Chip, path: Path, cores: str) -> Any:
    """Load one compiled file. The runtime reports failures as return codes, and prints the reason."""
    session = lite()
    call, code = "load_rknn", session.load_rknn(str(path))
    if code == 0:
        # The runtime documents the mask for chips with several cores only.
        masked = {"core_mask": CORES[cores]} if chip.cores > 1 else {}
        call, code = "init_runtime", session.init_runtime(**masked)
    if code != 0:
        session.release()
        raise LoweringError(
            f"the NPU of `{chip.name}` cannot load {path.name}",
            why=f"rknn-toolkit-lite2: {call} returned {code}; it printed the reason above",
            hint="the library /usr/lib/librknnrt.so must be at least as new as the compiler that wrote the "
            "file, and the kernel must have the NPU's driver (`dmesg | grep -i rknpu`)",
        )
    return session


def _package(chip: Chip) -> Any:
    with needs(
        f"cannot run the compiled programs of `{chip.name}`: rknn-toolkit-lite2 is not installed",
        hint=f'on the board, `pip install "whisperport[{EXTRA}]"`; on another machine, emulate them on '
        f"the CPU with `--run-option {chip.name}.emulate=on`",
    ):
        from rknnlite.api import RKNNLite
    return RKNNLite


def _check_cores(chip: Chip, cores: str) -> None:
    """Check that the chip has the chosen cores: bit 0 of the mask is core 0."""
    if CORES[cores] >> chip.cores:
        listed = [name for name, mask in CORES.items() if not mask >> chip.cores]
        raise UsageError(
            f"the option `{chip.name}.cores` cannot be `{cores}`",
            why=f"its NPU has {chip.cores} core{'s' if chip.cores > 1 else ''}",
            hint=f"expected {', '.join(listed)}",
        )


def _check_board(chip: Chip) -> None:
    """Check that this machine has the chip, as far as its device tree names it.

    Raises:
        LoweringError: it names another chip of this vendor.
    """
    try:
        with BOARD.open("rb") as file:
            names = file.read(MAX_BOARD).decode("ascii", "replace").rstrip("\0").split("\0")
    except OSError:
        return
    chips = [name.partition(",")[2] for name in names if name.startswith("rockchip,")]
    if chips and not any(name.startswith(chip.name) for name in chips):
        raise LoweringError(
            f"this board does not have the chip `{chip.name}`",
            why=f"its device tree names {', '.join(chips)[:80]}",
            hint="export a bundle for the board's chip with `whisperport export CHECKPOINT --target …`",
        )
