"""Run one ONNX file with ONNX Runtime: what the targets whose programs are ONNX share."""

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.runner import Array, Runner
from whisperport.spec import ProgramSpec
from whisperport.targets.onnx_weights import OnnxWeights

CPU = "CPUExecutionProvider"
IN_PLACE = (1, 31)  # the version since which sessions use weights of their caller, and copy none


class OnnxRunner(Runner):
    """A session on one execution provider."""

    concurrent = True

    def __init__(
        self,
        spec: ProgramSpec,
        path: Path,
        threads: int | None,
        provider: str = CPU,
        weights: OnnxWeights | None = None,
    ) -> None:
        """
        Args:
            weights: of this program and others; None: the session reads and keeps its own.

        Raises:
            MissingPackageError: onnxruntime is not installed.
            LoweringError: it has no such provider, or did not use it.
            BundleError: it cannot read the file.
        """
        super().__init__(spec)
        self._session = _session(path, threads, provider, weights)
        self._weights = weights  # which the session uses in place
        self._names = [tensor.name for tensor in spec.inputs]
        self._wanted = [tensor.name for tensor in spec.outputs]

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        feed = dict(zip(self._names, inputs, strict=True))
        outputs: Sequence[Array] = self._session.run(self._wanted, feed)
        return outputs


def _session(path: Path, threads: int | None, provider: str, weights: OnnxWeights | None) -> Any:
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
    settings.intra_op_num_threads = threads or 0
    # Spinning threads make a single session 0-10 % quicker and steal the cores of everything else.
    settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    # A plan of all arrays is one large block more: 50 MB for an encoder of base, and no time saved.
    settings.enable_mem_pattern = False
    settings.log_severity_level = 3
    try:
        in_place = weights if _version(ort.__version__) >= IN_PLACE else None
        model = in_place.give(path, settings) if in_place else os.fspath(path)
        session = ort.InferenceSession(model, settings, providers=[provider])
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


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
