"""Run one ONNX file with ONNX Runtime: what the targets whose programs are ONNX share."""

import os
import re
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import zip_longest
from typing import Any

from whisperport.bundle.onnx_graph import OnnxGraph
from whisperport.errors import BundleError, LoweringError, MissingPackageError
from whisperport.runner import Array, Binding, Runner
from whisperport.spec import ProgramSpec
from whisperport.targets.onnx_weights import OnnxWeights

CPU = "CPUExecutionProvider"
ONNX_TYPES = {  # numpy's name -> as ONNX Runtime names the type of a value
    **{
        f"{kind}{bits}": f"tensor({kind}{bits})"
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
    "bool": "tensor(bool)",
    "float16": "tensor(float16)",
    "float32": "tensor(float)",
    "float64": "tensor(double)",
}
IN_PLACE_SINCE = (
    1,
    31,
)  # the version since which sessions use weights of their caller, and copy none


class OnnxRunner(Runner):
    """A session on one execution provider."""

    def __init__(
        self,
        spec: ProgramSpec,
        graph: OnnxGraph,
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
            BundleError: it cannot read the file, or the file has another signature than `spec`.
        """
        super().__init__(spec, nullcontext())  # a session runs in several threads at once
        self._session = _session(graph, threads, provider, weights)
        _check_signature(self._session, spec, graph.name)
        self._weights = weights  # which the session uses in place
        self._in_place = provider == CPU
        self._input_names = [tensor.name for tensor in spec.inputs]
        self._output_names = [tensor.name for tensor in spec.outputs]

    def binding(self) -> Binding:
        """Other providers copy an array when it is bound, and would not see how a cache changes later."""
        return _OnnxBinding(self, self._session) if self._in_place else Binding(self)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        feed = dict(zip(self._input_names, inputs, strict=True))
        outputs: Sequence[Array] = self._session.run(self._output_names, feed)
        return outputs


class _OnnxBinding(Binding):
    """ONNX Runtime wraps the memory of bound arrays once, and not for every run.

    From the second run on: to wrap the arrays of a step takes as long as is then saved in four runs, and
    other programs mostly run once per window.
    """

    def __init__(self, runner: Runner, session: Any) -> None:
        super().__init__(runner)
        self._session = session
        self._wrapped: Any = None  # an `onnxruntime.IOBinding`
        self._runs = 0

    def _bind(self, name: str, array: Array) -> None:
        if self._wrapped:
            self._wrapped.bind_cpu_input(name, array)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self._runs += 1
        if self._runs == 1:
            return super()._run(inputs)
        if self._wrapped is None:
            self._wrap(inputs)
        for index, name in self._unbound.items():
            self._wrapped.bind_cpu_input(name, inputs[index])
        self._session.run_with_iobinding(self._wrapped)
        # The next run writes to the same memory.
        outputs: Sequence[Array] = self._wrapped.copy_outputs_to_cpu()
        return outputs

    def _wrap(self, inputs: Sequence[Array]) -> None:
        self._wrapped = self._session.io_binding()
        for tensor, array in zip(self.runner.spec.inputs, inputs, strict=True):
            self._wrapped.bind_cpu_input(tensor.name, array)
        for tensor in self.runner.spec.outputs:
            self._wrapped.bind_output(tensor.name)


def _session(
    graph: OnnxGraph, threads: int | None, provider: str, weights: OnnxWeights | None
) -> Any:
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
    # Not ONNX Runtime's own format, which it detects by itself, and which is not checked here.
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    in_place = weights if _version(ort.__version__) >= IN_PLACE_SINCE else None
    if not in_place:
        graph.detach()  # checks it, and does not hold it in memory beside the session
    try:
        model = in_place.session_model(graph, settings) if in_place else os.fspath(graph.path)
        session = ort.InferenceSession(model, settings, providers=[provider])
    except BundleError:
        raise
    except Exception as error:  # its own exception classes have no common base but Exception
        raise BundleError(
            f"ONNX Runtime cannot load {graph.name}",
            why=str(error).strip().split("\n")[0],
            hint="export the bundle again with this version of onnxruntime",
        ) from error
    if provider not in session.get_providers():  # it falls back to the CPU silently
        raise LoweringError(
            f"ONNX Runtime did not use `{provider}` for {graph.name}",
            why=f"it used {', '.join(session.get_providers())}",
        )
    return session


def _check_signature(session: Any, spec: ProgramSpec, name: str) -> None:
    """Compare what the session states with the manifest; an axis without a number fits any."""
    outputs = {value.name for value in session.get_outputs()}
    unknown = [tensor.name for tensor in spec.outputs if tensor.name not in outputs]
    inputs = {value.name for value in session.get_inputs()} ^ {t.name for t in spec.inputs}
    if unknown or inputs:
        raise _mismatch(name, f"it differs in {min((*unknown, *inputs))[:80]!r}")
    stated = {value.name: value for value in (*session.get_inputs(), *session.get_outputs())}
    for tensor in (*spec.inputs, *spec.outputs):
        value = stated[tensor.name]
        shape = tuple(
            wanted if stated is None or isinstance(stated, str) else stated
            for wanted, stated in zip_longest(tensor.shape, value.shape, fillvalue=-1)
        )
        if shape != tensor.shape or value.type != ONNX_TYPES.get(tensor.dtype):
            raise _mismatch(
                name,
                f"{tensor.name[:80]!r} is {value.shape} {value.type}; "
                f"expected {list(tensor.shape)} {tensor.dtype}",
            )


def _mismatch(name: str, why: str) -> BundleError:
    return BundleError(
        f"{name} has another signature than the manifest lists",
        why=why,
        hint="export the bundle again",
    )


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
