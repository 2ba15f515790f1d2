"""Run compiled programs with the command `neuronrt`: one process, with files for all tensors, per call.

    neuronrt -m hw -a program.dla -i 0.in -i 1.in -o 0.out -o 1.out

Its default device is `null`, which executes nothing, so `-m hw` is always given. `-i` and `-o` are repeated
in the order of the tensors in the .tflite. Sources: the README of a NeuroPilot SDK with the tool's help
("-m <device> can be: null/cmodel/hw, default is null"; "-c: Repeat the inference <num> times"), and the
benchmark scripts of MediaTek's boards, which read `Total inference time = N ms` and pass `-b`, the boost
value. This project has never run it: tests compare calls and files with this help.

Every call starts a process, loads the program and copies all inputs through files. One board's users
measured 195 ms per call where the inference itself takes 134 ms, with another model. This is acceptable for
programs that run once per window, such as the encoder; a program that runs once per token pays it for
each token.
"""

import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated, final

import numpy as np

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.program.runner import Array, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.system.child import Child
from whisperport.targets.target_options import EmulationOptions, Option, check_ranges
from whisperport.targets.vendors.mediatek.device_io import DeviceIo, DeviceTensor

HARDWARE = ("-m", "hw")
TMPFS = Path("/dev/shm")
TAIL_BYTES = 4096  # of the command's output, for errors and for the time
TIME = re.compile(r"Total inference time = ([0-9]+(?:\.[0-9]+)?) ?ms")
WHERE = (
    "it is part of NeuroPilot: Genio's Yocto images contain it; on Ubuntu, `sudo apt install "
    "mediatek-neuron-utils` from ppa:mediatek-genio/genio-public installs it"
)
# What the command's output contains, what happened, and what to do next.
KNOWN = (
    (
        re.compile(r"mismatch\w* runtime|DLA file is V", re.IGNORECASE),
        "the .dla was compiled by another version of NeuroPilot than the board has",
        "compile it with the NeuroPilot version of the board, which `neuronrt -v` prints",
    ),
    (
        re.compile(r"apusys|permission denied|operation not permitted", re.IGNORECASE),
        "the NPU's device node cannot be opened",
        "check the permissions of /dev/apusys*, or run the command as root",
    ),
    (
        re.compile(r"cannot load network|fail\w* to load", re.IGNORECASE),
        "the .dla cannot be loaded",
        "compile it for this board, with the NeuroPilot version of the board",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions(EmulationOptions):
    """Options for running: on the board, or emulated on the CPU with LiteRT.

    Raises:
        UsageError: a number is out of its range.
    """

    neuronrt: Annotated[str, Option("Name or path of the neuronrt command")] = "neuronrt"
    timeout: Annotated[
        int,
        Option("Time limit in seconds of one neuronrt call", low=1, high=3600),
    ] = 60
    files: Annotated[
        Path | None,
        Option(
            "Folder that keeps the raw input and output files of each program's last call, for "
            "`whisperport diagnose`"
        ),
    ] = None
    boost: Annotated[
        int | None,
        Option(
            "Boost value of the NPU's clock (neuronrt's -b); the default passes none",
            low=0,
            high=100,
        ),
    ] = None

    def __post_init__(self) -> None:
        check_ranges(self)


@final
class NeuronrtRunner(Runner):
    """One compiled program that a new process of `neuronrt` runs in every call.

    Attributes:
        last_inference_ms: the inference time of the last call in milliseconds, as neuronrt printed it; None
            if it printed none.
    """

    def __init__(
        self, target: str, spec: ProgramSpec, dla: Path, io: DeviceIo, options: DeviceOptions
    ) -> None:
        """
        Args:
            target: name of the target, for errors.
            dla: the compiled program.
            io: inputs and outputs of the .tflite that was compiled.

        Raises:
            MissingPackageError: the command does not exist.
        """
        super().__init__(spec)
        self._what, self._dla, self._io = f"`{spec.name}` on `{target}`", dla.absolute(), io
        self._options = options
        self._command = _command_path(options.neuronrt, target)
        names = [tensor.name for tensor in io.inputs]
        self._places = [names.index(tensor.name) for tensor in spec.inputs]
        self.last_inference_ms: float | None = None

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        needed = sum(tensor.nbytes for tensor in (*self._io.inputs, *self._io.outputs))
        with tempfile.TemporaryDirectory(prefix="whisperport-", dir=_parent(needed)) as name:
            folder = Path(name)
            for place, array in zip(self._places, inputs, strict=True):
                tensor = self._io.inputs[place]
                tensor.to_device(array, self.spec.name).tofile(folder / f"{place}.in")
            printed = self._call(folder)
            self._keep(folder)
            outputs = {
                tensor.name: self._read(folder / f"{index}.out", tensor, printed)
                for index, tensor in enumerate(self._io.outputs)
            }
        self._check_ran(inputs, outputs)
        time = TIME.findall(printed)
        self.last_inference_ms = float(time[-1]) if time else None
        return self._converted(outputs)

    def _converted(self, outputs: dict[str, Array]) -> list[Array]:
        """Dequantize the outputs, and return them in the order and with the shapes of the signature."""
        by_name = {tensor.name: tensor for tensor in self._io.outputs}
        return [
            by_name[t.name].from_device(outputs[t.name], t.dtype).reshape(t.shape)
            for t in self.spec.outputs
        ]

    def arguments(self, folder: Path) -> list[str]:
        """Return the command line of one call, with the files of a folder."""
        boost = self._options.boost
        return [
            self._command,
            *HARDWARE,
            *("-a", os.fspath(self._dla)),
            *(("-b", str(boost)) if boost is not None else ()),
            *_files("-i", folder, "in", len(self._io.inputs)),
            *_files("-o", folder, "out", len(self._io.outputs)),
        ]

    def _call(self, folder: Path) -> str:
        """Run the command, and return the end of what it printed.

        Raises:
            LoweringError: the command failed, crashed, or exceeded the time limit.
        """
        with (folder / "printed").open("w+b") as output:
            try:
                status = _status(self.arguments(folder), output, self._options.timeout)
            except subprocess.TimeoutExpired as error:
                raise LoweringError(
                    f"neuronrt did not finish {self._what} within {self._options.timeout} s",
                    why=_last_line(_tail(output)),
                    hint="raise the limit with the run option `timeout`, or restart the board if the NPU "
                    "does not answer",
                ) from error
            except OSError as error:
                raise LoweringError(
                    f"neuronrt cannot be started for {self._what}",
                    why=str(error),
                    hint=f"check that {self._command} is executable on this machine",
                ) from error
            printed = _tail(output)
        if status:
            raise self._failed(status, printed)
        return printed

    def _keep(self, folder: Path) -> None:
        """Copy the raw files to the folder of the run option `files`, whatever their sizes.

        Raises:
            LoweringError: a file cannot be written.
        """
        kept = self._options.files
        if kept is None:
            return
        try:
            kept.mkdir(parents=True, exist_ok=True)
            for side, tensors in (("in", self._io.inputs), ("out", self._io.outputs)):
                for index, tensor in enumerate(tensors):
                    source = folder / f"{index}.{side}"
                    target = kept / f"{self.spec.name}.{tensor.name}.{side}.bin"
                    if source.is_file():
                        partial = target.with_name(f".{target.name}.partial")
                        shutil.copyfile(source, partial)
                        partial.replace(target)
        except OSError as error:
            raise LoweringError(
                f"the files of {self._what} cannot be kept in {kept}",
                why=str(error),
                hint="name another folder with the run option `files`",
            ) from error

    def _failed(self, status: int, printed: str) -> LoweringError:
        ended = f"exit status {status}"
        if status < 0:
            ended = f"it crashed with {signal.Signals(-status).name}"
        for pattern, why, hint in KNOWN:
            if pattern.search(printed):
                return LoweringError(
                    f"neuronrt failed on {self._what}: {why}",
                    why=f"{ended}: {_last_line(printed)}",
                    hint=hint,
                )
        return LoweringError(
            f"neuronrt failed on {self._what}",
            why=f"{ended}: {_last_line(printed)}",
            hint="run the same command in a shell to see all messages: "
            + " ".join(self.arguments(Path("."))),
        )

    def _read(self, path: Path, tensor: DeviceTensor, printed: str) -> Array:
        """Read one output file, after a check of its size.

        Raises:
            BundleError: the file is missing, or has another size than the output.
        """
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BundleError(
                f"neuronrt wrote no output `{tensor.name}` for {self._what}",
                why=f"{error.strerror}; the last line that it printed: {_last_line(printed)}",
                hint=f"`neuronrt -a {self._dla} -d` must list {len(self._io.outputs)} outputs",
            ) from error
        if len(data) != tensor.nbytes:
            raise BundleError(
                f"neuronrt wrote {len(data)} bytes for the output `{tensor.name}` of {self._what}",
                why=f"expected {tensor.nbytes} bytes: {list(tensor.shape)} of {tensor.dtype}; the option "
                "`files` keeps the file, and `whisperport diagnose` explains its size",
                hint="compile the .dla again from the .tflite of this bundle",
            )
        kind = np.dtype(tensor.dtype).newbyteorder("<")
        return np.frombuffer(data, kind).astype(tensor.dtype, copy=False).reshape(tensor.shape)

    def _check_ran(self, inputs: Sequence[Array], outputs: dict[str, Array]) -> None:
        """Raise LoweringError if all outputs are zeros although an input is not: nothing was executed."""
        if any(array.any() for array in outputs.values()) or not any(a.any() for a in inputs):
            return
        raise LoweringError(
            f"{self._what} returned only zeros",
            why="neuronrt reported no error; its device `null`, for example, executes nothing and leaves "
            "the outputs empty",
            hint="check that `neuronrt -m hw` is supported by this board, and that the .dla is for its NPU",
        )


def _command_path(command: str, target: str) -> str:
    path = shutil.which(command)
    if path is None:
        raise MissingPackageError(
            f"cannot use `{target}`: the command `{command}` is not installed on this machine",
            why="no executable file of this name is in PATH",
            hint=f"{WHERE}; the run option `{target}.neuronrt=PATH` names another place",
        )
    return path


def _files(option: str, folder: Path, suffix: str, count: int) -> list[str]:
    names = [os.fspath(folder / f"{index}.{suffix}") for index in range(count)]
    return [word for name in names for word in (option, name)]


def _parent(needed: int) -> str | None:
    """Return the folder for temporary files: in memory if it has room; None: the system's default.

    The environment variable TMPDIR chooses another folder, as for other programs.
    """
    if os.environ.get("TMPDIR") or not os.access(TMPFS, os.W_OK | os.X_OK):
        return None
    with suppress(OSError):
        if shutil.disk_usage(TMPFS).free > 2 * needed:
            return os.fspath(TMPFS)
    return None


def _status(arguments: Sequence[str], output: IO[bytes], timeout: float) -> int:
    """Run a command to its end. If it is interrupted or takes too long, its complete group is killed.

    Raises:
        subprocess.TimeoutExpired: it took longer than `timeout` seconds.
        OSError: it cannot be started.
    """
    child = Child(arguments, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
    try:
        return child.process.wait(timeout)
    finally:
        child.end()


def _tail(output: IO[bytes]) -> str:
    output.seek(0, os.SEEK_END)
    output.seek(max(0, output.tell() - TAIL_BYTES))
    return output.read(TAIL_BYTES).decode("utf-8", "replace")


def _last_line(printed: str) -> str:
    lines = [line.strip() for line in printed.splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it printed nothing"
