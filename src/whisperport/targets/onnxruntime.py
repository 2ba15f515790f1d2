"""ONNX Runtime, on the CPU or any execution provider that is installed."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from whisperport.bundle import ProgramEntry
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.runner import Array, Runner
from whisperport.spec import ProgramSpec, Refusal, TargetSpec
from whisperport.targets.base import RunOptions, Say, Target

if TYPE_CHECKING:  # boards have no torch
    from whisperport.programs.program import Program

FOLDER = "onnxruntime"
CPU = "CPUExecutionProvider"


@final
class OnnxRuntime(Target):
    """Options for running: `provider`, the name of an execution provider (CPUExecutionProvider)."""

    spec = TargetSpec(
        name="onnxruntime",
        summary="ONNX Runtime: any CPU, and its other execution providers where installed",
        status="run here",
        dtypes=frozenset({"float32", "float16", "int64", "int32", "bool"}),
        formats=frozenset({"torch", "onnx"}),
        domains=frozenset({"com.microsoft"}),
        run_options=frozenset({"provider"}),
        extra="export",
        sources={
            "formats": "it reads ONNX; torch programs are written as ONNX first",
            "domains": "onnxruntime docs/ContribOperators.md",
            "static": "it runs dynamic shapes; whisperport's runtime passes static ones",
            "dtypes": "onnx/onnx docs/Operators.md, opset 20: types of Add, MatMul, Gather, Where",
            "max_rank": "none found in ONNX Runtime's CPU kernels; 8 is what other compilers stop at",
        },
    )

    def check(self, program: "Program") -> list[Refusal]:
        from whisperport.targets.graph_check import refusals

        return refusals(program, self.spec)

    def lower(self, programs: Sequence["Program"], folder: Path, say: Say) -> list[ProgramEntry]:
        try:
            from whisperport.programs.onnx import OPSET, SharedWeights, write_onnx
        except ImportError as error:
            raise MissingPackageError(
                "cannot lower for `onnxruntime`: the ONNX exporter is not installed",
                why=str(error),
                hint='pip install "whisperport[export]"',
            ) from error
        (folder / FOLDER).mkdir()
        weights = SharedWeights(folder / FOLDER / "weights.bin")
        entries = []
        for program in programs:
            say(f"{program.name} to ONNX")
            path = folder / FOLDER / f"{program.name}.onnx"
            nodes = write_onnx(program, path, weights)
            entries.append(
                ProgramEntry(
                    spec=program.spec,
                    target=self.spec.name,
                    method=program.name,
                    files=(f"{FOLDER}/{path.name}", f"{FOLDER}/{weights.path.name}"),
                    status=self.spec.status,
                    delegation={
                        "delegated": nodes,
                        "subgraphs": 1,
                        "undelegated": [],
                        "opset": OPSET,
                    },
                )
            )
        return entries

    def load(
        self, folder: Path, entries: Sequence[ProgramEntry], options: RunOptions
    ) -> dict[str, Runner]:
        provider = options.options.get("provider", CPU)
        return {
            entry.spec.name: _OnnxRunner(
                entry.spec, _session(folder / entry.files[0], provider, options)
            )
            for entry in entries
        }


class _OnnxRunner(Runner):
    concurrent = True

    def __init__(self, spec: ProgramSpec, session: Any) -> None:
        super().__init__(spec)
        self._session = session
        self._names = [tensor.name for tensor in spec.inputs]
        self._wanted = [tensor.name for tensor in spec.outputs]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        feed = dict(zip(self._names, inputs, strict=True))
        outputs: Sequence[Array] = self._session.run(self._wanted, feed)
        return outputs


def _session(path: Path, provider: str, options: RunOptions) -> Any:
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise MissingPackageError(
            "cannot use `onnxruntime`: it is not installed, or not for this Python",
            why=str(error),
            hint="pip install --upgrade whisperport",
        ) from error
    if provider not in ort.get_available_providers():
        raise LoweringError(
            f"ONNX Runtime has no execution provider `{provider}` here",
            why=f"installed: {', '.join(ort.get_available_providers())}",
            hint=f"install the onnxruntime package that holds it, or use {CPU}",
        )
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = options.threads or 0
    # Spinning threads make a single session 0-10 % quicker and steal the cores of everything else.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    settings.log_severity_level = 3
    try:
        session = ort.InferenceSession(os.fspath(path), settings, providers=[provider])
    except Exception as error:  # its own exception classes have no common base but Exception
        raise BundleError(
            f"ONNX Runtime cannot load {path.name}",
            why=str(error).strip().split("\n")[0],
            hint="export the bundle again with this version of onnxruntime",
        ) from error
    if provider not in session.get_providers():  # it falls back to the CPU without a word
        raise LoweringError(
            f"ONNX Runtime did not use `{provider}` for {path.name}",
            why=f"it used {', '.join(session.get_providers())}",
        )
    return session
