"""Ask LiteRT's plugin for MediaTek which operators of a TFLite file it accepts.

    file.tflite ─► apply_plugin_main --cmd=partition ─► partitioned.tflite, and a line per subgraph
                        │ loads
                        ├─ libLiteRtCompilerPlugin_MediaTek.so   MediaTek's list of operators and types
                        └─ libneuron_adapter.so                  our stub: a version, nothing else

The first two are in the package ai-edge-litert. MediaTek's compiler is not, so that nothing is compiled:
the plugin compares operators and types with its list. The list is the same for every SoC of the plugin.
"""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, final

from whisperport.errors import LoweringError, ProgramError
from whisperport.system.child import Limits, StoppedError, run_limited
from whisperport.system.progress import begin_stage
from whisperport.system.regular_file import other_kind
from whisperport.targets.partitioner import Declined, Partition, Partitioner
from whisperport.targets.vendors.mediatek.chips import Chip

PACKAGE, MODULE = "ai-edge-litert", "ai_edge_litert"
TOOL = "tools/apply_plugin_main"
PLUGINS = "vendors/mediatek/compiler"
PLUGIN = f"{PLUGINS}/libLiteRtCompilerPlugin_MediaTek.so"
STUB = Path(__file__).with_name("neuron_adapter_stub.c")
COMPILERS = ("cc", "gcc", "clang")
BUILD_S = 60  # time limit to build the stub, which takes 0.05 s

# A partition of the embedded model's step, 29 MB, took 0.2 s and 0.15 GB.
MEMORY_BYTES, MEMORY_PER_BYTE = 2 * 10**9, 8
SECONDS, SECONDS_PER_GB = 60, 120

# "Partitioned subgraph<0>, selected 213 ops, from a total of 213 ops. resulted in 1 partitions."
_ANSWER = re.compile(
    r"Partitioned subgraph<(\d{1,9})>, selected (\d{1,9}) ops, from a total of (\d{1,9}) ops\. "
    r"resulted in (\d{1,9}) partitions"
)
_ERROR = re.compile(r"^ERROR: (?:\[[^\]]*\] )?(.+)$", re.MULTILINE)

# Types of google-ai-edge/LiteRT@1551136, litert/vendors/mediatek/compiler/MediaTek_Neuro_Compiler.md; an
# int64 is supported as a constant only.
_DTYPES = frozenset({"float32", "float16", "int32", "int16", "int8", "uint8", "int4", "bool"})


@final
class LiteRtPartitioner(Partitioner):
    """LiteRT's partitioner for the SoC of one board."""

    suffix: ClassVar[str] = ".tflite"

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self.title = f"MediaTek's LiteRT partitioner for {chip.litert_soc or chip.soc}"

    def recognizes(self, head: bytes) -> bool:
        return head[4:8] == b"TFL3"

    def unavailable(self) -> str:
        if not self._chip.litert_soc:
            return f"LiteRT's plugin does not have {self._chip.soc}, the SoC of {self._chip.board}"
        folder = _package_folder()
        if folder is None:
            return f'{PACKAGE} is not installed; pip install "whisperport[litert]" installs it'
        if not (folder / TOOL).is_file() or not (folder / PLUGIN).is_file():
            return f"this build of {PACKAGE} has no plugin for MediaTek; the one for x86-64 Linux has it"
        if _c_compiler() is None:
            return (
                f"there is no C compiler ({', '.join(COMPILERS)}), which builds a small library for it; "
                "install gcc or clang"
            )
        return ""

    def partition(self, path: Path) -> Partition:
        if reason := self.unavailable():
            raise LoweringError(f"{self.title} cannot be asked on this machine", why=reason)
        if kind := other_kind(path) or ("" if path.exists() else "missing"):
            raise ProgramError(
                f"{path} is not a TFLite file",
                why=f"the path is {kind}",
                hint="give a .tflite file",
            )
        size = path.stat().st_size
        limits = Limits(
            MEMORY_BYTES + MEMORY_PER_BYTE * size, SECONDS + SECONDS_PER_GB * size / 1e9
        )
        job = f"{__name__}:ask"
        arguments = {"path": os.fspath(path.resolve()), "soc": self._chip.litert_soc.lower()}
        try:
            answer = run_limited(job, arguments, limits)
        except StoppedError as error:
            raise ProgramError(
                f"{self.title} did not finish with {path.name}",
                why=f"{error}; the limits are {limits}",
                hint="convert the model again; `whisperport check` without a partitioner reads the file "
                "with the same rules",
            ) from error
        return Partition(
            total=answer["total"],
            partitions=answer["partitions"],
            declined=tuple(Declined(*fields) for fields in answer["declined"]),
            runtime={PACKAGE: answer["version"]},
        )


def ask(path: str, soc: str) -> dict[str, Any]:
    """Ask the plugin about a file. Runs in a child process with limits; returns JSON.

    Args:
        path: a `.tflite` file.
        soc: the plugin's name of the SoC, such as "mt8189".

    Raises:
        ProgramError: the file is damaged, or the partitioner crashed on it.
        LoweringError: the stub could not be built, or the answer is not understood.
    """
    from importlib.metadata import version

    from whisperport.model.inspection.read_tflite import list_operators

    begin_stage("reading the file")
    before = list_operators(Path(path))
    with tempfile.TemporaryDirectory(prefix="whisperport-") as temporary:
        folder = Path(temporary)
        _build_stub(folder)
        begin_stage("asking the partitioner")
        output = _run(Path(path), soc, folder)
        answers = _numbers(output)
        for index, (_, total, _) in answers.items():
            expected = len(before[index]) if index < len(before) else 0
            if total != expected:
                raise _not_understood(
                    f"it counted {total} operators in subgraph {index}, which has {expected}",
                    output,
                )
        after = list_operators(folder / "partitioned.tflite")[len(before) :]
    delegated = Counter(
        (operator.name, operator.tensor) for subgraph in after for operator in subgraph
    )
    declined = []
    for operator in (operator for index in answers for operator in before[index]):
        if delegated[operator.name, operator.tensor]:
            delegated[operator.name, operator.tensor] -= 1
        else:
            declined.append((operator.name, operator.tensor, _reason(operator.dtypes)))
    accepted, total, partitions = map(sum, zip(*answers.values(), strict=True))
    if len(declined) != total - accepted:
        raise _not_understood(
            f"it accepted {accepted} of {total} operators, and {len(declined)} are not in its result",
            output,
        )
    return {
        "total": total,
        "partitions": partitions,
        "declined": declined,
        "version": version(PACKAGE),
    }


def _reason(dtypes: Sequence[str]) -> str:
    unknown = [dtype for dtype in dtypes if dtype not in _DTYPES]
    if unknown:
        return f"the plugin's list does not have this operator, or not with the type {unknown[0]}"
    return "the plugin's list does not have this operator, or not with these types"


def _numbers(output: str) -> dict[int, tuple[int, int, int]]:
    """Return subgraph -> numbers of accepted operators, of operators, and of partitions.

    A file can have several subgraphs: one per signature, and those for control flow.
    """
    answers = {int(index): numbers for index, *numbers in _ANSWER.findall(output)}
    if 0 not in answers:
        raise _not_understood("its answer has no line about the first subgraph", output)
    return {
        index: (int(accepted), int(total), int(partitions))
        for index, (accepted, total, partitions) in sorted(answers.items())
    }


def _run(path: Path, soc: str, folder: Path) -> str:
    """Run the partitioner, and return its output; its result is `partitioned.tflite` in the folder."""
    package = _package_folder()
    assert package is not None  # `unavailable` has checked it
    command = [
        os.fspath(package / TOOL),
        "--cmd=partition",
        "--soc_manufacturer=MediaTek",
        f"--soc_model={soc}",
        f"--libs={package / PLUGINS}",
        "--mediatek_use_get_supported_operations=false",
        f"--model={path}",
        f"--o={folder / 'partitioned.tflite'}",
    ]
    (folder / "dla").mkdir()  # the plugin deletes it; by default, it makes one in /tmp
    environment = os.environ | {
        "LD_LIBRARY_PATH": f"{folder}:{package}",
        "MTKNN_ADAPTER_DLA_DIR": os.fspath(folder / "dla"),
        "TMPDIR": os.fspath(folder),
    }
    completed = subprocess.run(
        command, capture_output=True, env=environment, cwd=folder, stdin=subprocess.DEVNULL
    )
    output = (completed.stderr + b"\n" + completed.stdout).decode("utf-8", "replace")
    if completed.returncode < 0:
        raise ProgramError(
            f"MediaTek's LiteRT partitioner crashed on {path.name}",
            why=f"its process was ended by {signal.Signals(-completed.returncode).name}",
            hint="convert the model again; the file may be damaged",
        )
    if completed.returncode:
        raise ProgramError(
            f"MediaTek's LiteRT partitioner rejects {path.name}",
            why=_last_error(output) or f"it ended with exit status {completed.returncode}",
            hint="convert the model again with `whisperport lower` or `whisperport export`",
        )
    return output


def _build_stub(folder: Path) -> None:
    """Build the library that the plugin asks for a version; see neuron_adapter_stub.c."""
    compiler = _c_compiler()
    assert compiler is not None  # `unavailable` has checked it
    library = folder / "libneuron_adapter.so"
    command = [compiler, "-shared", "-fPIC", "-o", os.fspath(library), os.fspath(STUB)]
    try:
        completed = subprocess.run(
            command, capture_output=True, timeout=BUILD_S, stdin=subprocess.DEVNULL
        )
        reason = (
            ""
            if completed.returncode == 0
            else _first_line(completed.stderr) or "it printed nothing"
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    if reason or not library.is_file():
        raise LoweringError(
            f"the C compiler {compiler} cannot build a shared library",
            why=reason or f"it wrote no {library.name}",
            hint="install gcc with the headers of the C library, or name another compiler with the "
            "environment variable CC",
        )


def _c_compiler() -> str | None:
    """Return the C compiler: that of the environment variable CC, or the system's; None: there is none."""
    named = os.environ.get("CC", "").split()[:1]
    return next(filter(None, map(shutil.which, (*named, *COMPILERS))), None)


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec(MODULE) if sys.platform == "linux" else None
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def _not_understood(why: str, output: str) -> LoweringError:
    return LoweringError(
        "the answer of MediaTek's LiteRT partitioner is not understood",
        why="; ".join(filter(None, (why, _last_error(output)))),
        hint=f"{PACKAGE} may be newer than this version of whisperport: install ai-edge-litert 2.3.0",
    )


def _last_error(output: str) -> str:
    errors = _ERROR.findall(output)
    return errors[-1].strip()[:200] if errors else ""


def _first_line(text: bytes) -> str:
    lines = text.decode("utf-8", "replace").strip().splitlines()
    return lines[0][:200] if lines else ""
