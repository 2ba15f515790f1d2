"""Run ONNX files with ONNX Runtime; used by all targets whose programs are ONNX files."""

import logging
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from threading import Lock
from typing import Any

import numpy as np

from whisperport.errors import BundleError, LoweringError, WhisperportError, out_of_memory
from whisperport.program.bundle.onnx_graph import OnnxGraph
from whisperport.program.execution_providers import CPU, POLICIES, Provider
from whisperport.program.runner import Array, Binding, Part, Runner
from whisperport.program.spec import ProgramSpec
from whisperport.targets.onnx.any_tokens import picked
from whisperport.targets.onnx.rounded_audio import LEVELS, OFFSET, SCALE, RoundedState
from whisperport.targets.onnx.weights import JoinedWeights, OnnxWeights, OwnWeights
from whisperport.targets.stated_signature import expect_tensor, other_signature

log = logging.getLogger(__name__)

ON_CPU = Provider()
ONNX_TYPES = {  # numpy's name of a dtype -> ONNX Runtime's name of the tensor type
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
# Lets a session tell which provider has which nodes; since ONNX Runtime 1.24, ignored by older versions.
ASSIGNMENT = "session.record_ep_graph_assignment_info"
# Since this version of ONNX Runtime, sessions can use weights in memory of the caller without a copy.
IN_PLACE_SINCE = (1, 31)
# Since this version or an earlier one, sessions can limit how long threads wait actively.
BRIEF_SPIN_SINCE = (1, 31)
SPIN_US = "20"


class OnnxRunner(Runner):
    """An ONNX program in a session of ONNX Runtime, on one execution provider."""

    def __init__(
        self,
        spec: ProgramSpec,
        graph: OnnxGraph,
        threads: int | None,
        provider: Provider = ON_CPU,
        weights: OnnxWeights | OwnWeights | None = None,
        *,
        spin: bool = False,
        later: bool = False,
    ) -> None:
        """Load the program; with `OwnWeights` that say so, when it is first used.

        Args:
            spec: the program's signature in the manifest.
            threads: CPU threads; None: ONNX Runtime chooses.
            provider: the execution provider.
            weights: for a CPU, weights that several programs share, or those of this one; None: the
                session loads the file.
            spin: whether threads wait actively during a run.
            later: whether the session on shared weights, which are read now, is made when it is first used.

        Raises:
            MissingPackageError: onnxruntime is not installed.
            LoweringError: the execution provider is not on this machine, or ONNX Runtime did not use it.
            BundleError: ONNX Runtime cannot read the file, or its signature differs from `spec`.
        """
        super().__init__(spec, nullcontext())  # a session may run in several threads concurrently
        ort = provider.require()
        settings = session_settings(ort, threads, spin=spin)
        if _version(ort.__version__) < IN_PLACE_SINCE:
            weights = None
        read = partial(_model, graph, settings, provider, weights)
        make = partial(_session, ort, settings, graph.name, provider)
        self._weights = weights  # kept: the session uses the memory of shared weights
        self._name = graph.name
        self._further = picked(spec) if isinstance(weights, JoinedWeights) else {}
        self._rounding = weights.rounding if isinstance(weights, OwnWeights) else None
        self._rounded = weights.rounded if isinstance(weights, OwnWeights) else ()
        self._load: Callable[[], Any]
        if isinstance(weights, OwnWeights):
            later = weights.later
            self._load = partial(weights.session, lambda: make(read()))
        else:
            # Without shared weights, the session reads the program's file, which may be replaced later.
            later = later and weights is not None and graph in weights
            self._load = partial(make, read())
        self._lock = Lock()  # held while the session is made
        self._made: Any = None
        if not later:
            self._make()
        if weights is not None:
            self.free_axes = weights.free_axes(graph)
        self.writes_in_place = provider.name == CPU
        self._input_names = [tensor.name for tensor in spec.inputs]
        self._output_names = [tensor.name for tensor in spec.outputs]

    @property
    def _session(self) -> Any:
        """The `onnxruntime.InferenceSession` of the program."""
        if self._made is None:
            self._make()
        return self._made

    def _make(self) -> None:
        """Make the session, unless another thread did, and check it against the manifest's signature."""
        with self._lock:
            if self._made is not None:
                return
            session = self._load()
            replaced = (name + end for name in self._rounded for end in ("", LEVELS, SCALE, OFFSET))
            check_signature(session, self.spec, self._name, {*self._further, *replaced})
            self._made = session
            del self._load  # and with it the graph that it read

    def binding(self) -> Binding:
        """Return a binding that keeps arrays bound between runs.

        Other providers copy an array when it is bound and would miss later changes of a cache, so they
        get the default binding.
        """
        wrap = self._wrapped
        return _OnnxBinding(self, self._session, wrap) if self.writes_in_place else Binding(self)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        feed = dict(self._further)
        for name, array in zip(self._input_names, inputs, strict=True):
            feed |= self.given(name, array)
        outputs: Sequence[Array] = self._session.run(self._output_names, feed)
        return outputs

    def given(self, name: str, array: Array) -> Mapping[str, Array]:
        """Return what the session reads for an input, by the names of its own inputs."""
        if name not in self._rounded or self._rounding is None:
            return {name: array}
        constant = self.roles[name] == "constant"
        return self._rounding(name, array) if constant else self._rounding.rounded(name, array)

    def changing(self, name: str, array: Array) -> RoundedState | None:
        """Return what the session reads for a state that it does not read in place; None: it does."""
        if name not in self._rounded or self._rounding is None or self.roles[name] != "state":
            return None
        return RoundedState(self._rounding, name, array)

    def _run_into(self, inputs: Sequence[Array], outputs: Sequence[Array]) -> None:
        if not self.writes_in_place:
            super()._run_into(inputs, outputs)
            return
        wrapped = self._wrapped()
        for name, array in zip(self._input_names, inputs, strict=True):
            for own, content in self.given(name, array).items():
                wrapped.bind_cpu_input(own, content)
        for name, array in zip(self._output_names, outputs, strict=True):
            _bind_output(wrapped, name, array)
        self._session.run_with_iobinding(wrapped)

    def _wrapped(self) -> Any:
        """Return an `onnxruntime.IOBinding` with what every run reads."""
        wrapped = self._session.io_binding()
        for name, array in self._further.items():
            wrapped.bind_cpu_input(name, array)
        return wrapped


class _OnnxBinding(Binding):
    """A binding for which ONNX Runtime wraps the memory of inputs and outputs once and not in every run.

    It is used from the second run on. Wrapping the arrays of `step` costs as much time as is saved in four
    runs, and most other programs run only once per window.
    """

    def __init__(self, runner: OnnxRunner, session: Any, wrap: Callable[[], Any]) -> None:
        super().__init__(runner)
        self._onnx, self._session, self._new = runner, session, wrap
        self._states: dict[str, RoundedState] = {}
        self._wrapped: Any = None  # an `onnxruntime.IOBinding`
        self._given: dict[int, Array] = {}  # the inputs of the last run that have no array bound
        self._own: list[Array] = []  # the outputs of every run
        self._runs = 0

    @property
    def copies(self) -> bool:
        return False  # only audio, whose changes are reported always

    def changed(self, name: str, part: Part) -> None:
        if name in self._states:
            self._states[name].changed(part)

    def _bind(self, name: str, array: Array) -> None:
        if self._wrapped:
            self._bind_wrapped(name, array)

    def _bind_wrapped(self, name: str, array: Array) -> None:
        state = self._onnx.changing(name, array)
        if state:
            self._states[name] = state
        arrays = state.arrays if state else self._onnx.given(name, array)
        for own, content in arrays.items():
            self._wrapped.bind_cpu_input(own, content)

    def _run(self, inputs: Sequence[Array]) -> Sequence[Array]:
        self._runs += 1
        if self._runs == 1:
            return super()._run(inputs)
        if self._wrapped is None:
            self._wrap(inputs)
        for index, name in self._unbound.items():
            if inputs[index] is not self._given.get(index):
                self._given[index] = inputs[index]
                self._bind_wrapped(name, inputs[index])
        self._session.run_with_iobinding(self._wrapped)
        return self._own

    def _wrap(self, inputs: Sequence[Array]) -> None:
        self._wrapped = self._new()
        for index, tensor in enumerate(self.runner.spec.inputs):
            if index not in self._unbound:
                self._bind_wrapped(tensor.name, inputs[index])
        for tensor in self.runner.spec.outputs:
            self._own.append(np.empty(tensor.shape, tensor.dtype))
            _bind_output(self._wrapped, tensor.name, self._own[-1])


def _bind_output(wrapped: Any, name: str, array: Array) -> None:
    """Let the runs of an `onnxruntime.IOBinding` write an output to an array."""
    wrapped.bind_output(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def cpu_session(threads: int | None, model: bytes) -> Any:
    """Return a session of a small model on the CPU."""
    ort = ON_CPU.require()
    return ON_CPU.session(ort, model, session_settings(ort, threads))


def session_settings(ort: Any, threads: int | None, *, spin: bool = False) -> Any:
    """Return the `SessionOptions` of every session of this project.

    Args:
        ort: the module onnxruntime.
        threads: CPU threads; None: ONNX Runtime chooses.
        spin: whether threads wait actively during a run. A window of tiny then takes 0.9 of the time on an
            idle machine with 2 cores; with 2 other busy processes on it, 1.2 to 1.5 times as long. False:
            they do so for SPIN_US only, where ONNX Runtime can; it then takes 0.93 to 0.95 of the time on
            the idle machine, and 0.98 to 1.02 with the other processes.
    """
    settings = ort.SessionOptions()
    settings.intra_op_num_threads = threads or 0
    brief = not spin and _version(ort.__version__) >= BRIEF_SPIN_SINCE
    settings.add_session_config_entry(
        "session.intra_op.allow_spinning", "1" if spin or brief else "0"
    )
    if brief:
        settings.add_session_config_entry("session.intra_op.spin_duration_us", SPIN_US)
    settings.add_session_config_entry("session.force_spinning_stop", "1")  # at the end of a run
    # Memory patterns allocate one more large block, 50 MB for the encoder of base, and save no time.
    settings.enable_mem_pattern = False
    if _has_shared_arena():
        settings.add_session_config_entry("session.use_env_allocators", "1")
    settings.log_severity_level = 3
    # Accept only ONNX: ONNX Runtime also detects its own format, which is not checked here.
    settings.add_session_config_entry("session.load_model_format", "ONNX")
    return settings


@cache
def _has_shared_arena() -> bool:
    """Give ONNX Runtime one arena for what the runs of all sessions compute, once per process.

    Otherwise each session keeps an arena of its own, as large as its largest run: 60 MB more for tiny.
    """
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo(
        "Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT
    )
    try:
        ort.create_and_register_allocator(memory, None)
    except (
        Exception
    ):  # ONNX Runtime's exceptions have no common base; another library registered one
        return False
    return True


def _model(
    graph: OnnxGraph, settings: Any, provider: Provider, weights: OnnxWeights | OwnWeights | None
) -> bytes | str:
    """Return what a session loads, and change its settings for the weights."""
    if not weights:
        graph.detach()  # checks the graph without keeping it in memory
    with _as_errors(graph.name, provider.name):
        return weights.session_model(graph, settings) if weights else os.fspath(graph.path)


def _session(ort: Any, settings: Any, name: str, provider: Provider, model: bytes | str) -> Any:
    """Return a session of the model of a program's file."""
    if provider.name != CPU:
        settings.add_session_config_entry(ASSIGNMENT, "1")
    with _as_errors(name, provider.name):
        session = provider.session(ort, model, settings)
    used = session.get_providers()
    if provider.name in POLICIES:
        _say_choice(provider.name, used[0])
    elif provider.name not in used:  # ONNX Runtime falls back to the CPU silently
        raise LoweringError(
            f"ONNX Runtime did not use `{provider.name}` for {name}",
            why=f"it used {', '.join(used)}",
            hint=f"check the installation of this provider, or use {CPU}",
        )
    elif provider.name != CPU:
        _warn_if_unused(session, provider.name, name)
    return session


@contextmanager
def _as_errors(name: str, provider: str) -> Iterator[None]:
    """Turn an error of ONNX Runtime, or of reading a file for it, into one of whisperport."""
    try:
        yield
    except WhisperportError:
        raise
    except Exception as error:  # ONNX Runtime's exceptions have no common base class but Exception
        if lack := out_of_memory(error):
            raise lack from error
        if provider != CPU:
            raise LoweringError(
                f"the execution provider `{provider}` cannot load {name}",
                why=str(error).strip().split("\n")[0],
                hint="`whisperport verify BUNDLE --each-program` shows which programs it can run",
            ) from error
        raise BundleError(
            f"ONNX Runtime cannot load {name}",
            why=str(error).strip().split("\n")[0],
            hint="export the bundle again with this version of onnxruntime",
        ) from error


@cache
def _say_choice(policy: str, provider: str) -> None:
    """Tell which provider ONNX Runtime chose, once."""
    log.warning("with `%s`, ONNX Runtime chose %s", policy, provider)


def _warn_if_unused(session: Any, provider: str, name: str) -> None:
    """Warn if the provider declined all nodes, where ONNX Runtime tells it."""
    assigned = getattr(session, "get_provider_graph_assignment_info", None)
    if assigned is not None and provider not in {part.ep_name for part in assigned()}:
        log.warning(
            "`%s` declined all nodes of %s, so that the CPU runs them; `verify --each-program` shows where "
            "nodes run",
            provider,
            name,
        )


def check_signature(
    session: Any, spec: ProgramSpec, name: str, further: Collection[str] = ()
) -> None:
    """Compare a session's signature with the manifest; an axis without a number matches any size.

    Args:
        session: an `onnxruntime.InferenceSession`.
        spec: the program's signature in the manifest.
        name: of the file, for errors.
        further: names of inputs that only the session has, or only the signature.

    Raises:
        BundleError: they differ.
    """
    outputs = {value.name for value in session.get_outputs()}
    unknown = [tensor.name for tensor in spec.outputs if tensor.name not in outputs]
    inputs = {value.name for value in session.get_inputs()} ^ {t.name for t in spec.inputs}
    inputs.difference_update(further)
    if unknown or inputs:
        raise other_signature(
            name, f"the name {min((*unknown, *inputs))[:80]!r} is only in one of them"
        )
    stated = {value.name: value for value in (*session.get_inputs(), *session.get_outputs())}
    for tensor in (t for t in (*spec.inputs, *spec.outputs) if t.name not in further):
        value = stated[tensor.name]
        fits = value.type == ONNX_TYPES.get(tensor.dtype)
        expect_tensor(name, tensor, value.shape, value.type, fits=fits)


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])
