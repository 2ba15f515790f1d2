"""Estimate whether a model fits the machines of a target, and how long it takes there.

Nothing is run. Least times follow from a machine's published peak speeds: the larger of operations / speed
and bytes / bandwidth, see `build.work`. No program reaches a peak speed: real times are longer. Predicted
times follow from times that were published, see `build.predicted_times`.

A vendor's compiler may estimate the programs that it compiled. A bundle with such programs is planned with
these estimates, unless an option asks for the machines of a target.

Each program is loaded with its own weights, and each decode program with its own state. The memory of
activations is not known.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from whisperport.build.predicted_times import Prediction, predict
from whisperport.build.work import (
    BYTES,
    Part,
    cross_kv_weights,
    decoder_weights,
    encoder_operations,
    encoder_weights,
    state_numbers,
    token_numbers,
    token_operations,
)
from whisperport.errors import UsageError
from whisperport.program.bundle import MANIFEST, Bundle, Manifest, ProgramEntry
from whisperport.program.dims import Dims, published_dims
from whisperport.program.program_kind import STEP, kind_of
from whisperport.system.option import Option, check_ranges
from whisperport.targets import TARGETS, Target, get_target
from whisperport.targets.base import Machine
from whisperport.targets.compiler import Estimate
from whisperport.targets.preflight import requires_torch

PROGRAMS: Mapping[Part, tuple[str, str]] = {  # of each part; a bundle may lack the second
    "encoder": ("encoder", "cross_kv"),
    "token": (STEP, "vocab_projection"),
}
DECODE = ("prefill_4", "prefill_64", "step", "align")  # decode programs of an export
MAX_BATCH, MAX_CORES = 4096, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Options of `plan`.

    Raises:
        UsageError: a number is out of range.
    """

    target: Annotated[
        str | None,
        Option(
            "Target whose machines are listed",
            metavar="NAME",
            default="those of the bundle; of a checkpoint, all with published times",
        ),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16", "w8a16"] | None,
        Option("Precision of weights and state", default="the target's default"),
    ] = None
    batch: Annotated[int, Option("Number of texts that are decoded together", 1, MAX_BATCH)] = 1
    tensor_parallel: Annotated[
        int, Option("Number of cores that compute one model together", 1, MAX_CORES)
    ] = 1

    def __post_init__(self) -> None:
        check_ranges(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class MachinePlan:
    """The estimate for one machine. Memory and times are those of one core.

    Attributes:
        machine: name of the machine.
        cores: number of its cores.
        models: number of models that it can run concurrently, each on R cores.
        memory_bytes: memory of a core.
        weights_bytes: weights of all programs, of one core.
        state_bytes: self- and cross-attention K/V of all decode programs, of one core.
        fits: whether weights, state and what the vendor's software takes fit the memory; without
            activations, which are not known.
        largest_batch: largest B that fits; 0: none.
        encoder_s: least time of the encoder with the cross-attention K/V, for a window of one text.
        encoder_limit: "compute" or "memory", which of the two gives this time.
        token_s: least time of one token of each of the B texts.
        token_limit: as `encoder_limit`.
        source: documents of the machine's figures.
    """

    machine: str
    cores: int
    models: int
    memory_bytes: float
    weights_bytes: int
    state_bytes: int
    fits: bool
    largest_batch: int
    encoder_s: float
    encoder_limit: str
    token_s: float
    token_limit: str
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramEstimate:
    """The estimate of one compiled program by its vendor's compiler. It is not a time of a device.

    Attributes:
        program: name of the program.
        target: name of its target.
        precision: the program's precision.
        compiler: name of the compiler.
        estimate: what it estimated.
    """

    program: str
    target: str
    precision: str
    compiler: str
    estimate: Estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The result of `plan`; true if the model fits at least one machine, or its memory was not compared.

    Attributes:
        target: name of the target; of predicted and compiled programs, the names of all.
        precision: precision of weights and state; of predicted and compiled programs, those of all.
        batch: B.
        tensor_parallel: R.
        heads: number of heads of the encoder and of the decoder.
        padded_heads: heads that are computed for nothing, because R does not divide them.
        machines: the estimate for each machine that has at least R cores; none for compiled programs.
        compiled: the compilers' estimates of a bundle's compiled programs, of those that have one.
        predicted: times that follow from published ones, for one text.
    """

    target: str
    precision: str
    batch: int
    tensor_parallel: int
    heads: tuple[int, int]
    padded_heads: int
    machines: tuple[MachinePlan, ...]
    compiled: tuple[ProgramEstimate, ...] = ()
    predicted: tuple[Prediction, ...] = ()

    def __bool__(self) -> bool:
        if self.machines:
            return any(machine.fits for machine in self.machines)
        return bool(self.predicted or self.compiled)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The values of R that divide the heads of both sides, so that no head is padding."""
        return tuple(r for r in range(1, min(self.heads) + 1) if not any(h % r for h in self.heads))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"estimate": True, **asdict(self), "degrees": list(self.degrees)}


def plan(source: str | os.PathLike[str], options: PlanOptions | None = None) -> Plan:
    """Predict times of a model on a target's machines, or estimate memory and least times. Nothing is run.

    Args:
        source: a bundle; a checkpoint, as `load_checkpoint` takes it; or the name of a model of OpenAI,
            such as `turbo`, whose published sizes need no download.
        options: see `PlanOptions`. Default: None, all defaults.

    Raises:
        UsageError: the machines of the target are not known, or it has no such precision.
        BundleError: the bundle is damaged.
        CheckpointError: the checkpoint does not exist or is damaged.
        MissingPackageError: a checkpoint is given, and torch is not installed.
    """
    options = options or PlanOptions()
    dims, programs, placed, compiled = _read(source)
    if compiled and options == PlanOptions():
        return _without_machines(dims, compiled=compiled)
    names = [options.target] if options.target else _names(placed)
    predicted = _predicted(names, dims, {} if options.target else placed, options)
    target = next((target for target in map(get_target, names) if target.machines), None)
    if target and (options.target or placed or not predicted):
        precision = options.precision or target.spec.runs.precisions[0]
        if precision not in _precisions(target):
            raise UsageError(
                f"`{target.spec.name}` has no estimate for the precision `{precision[:40]}`",
                why="the estimate needs a precision in which the target stores weights and state",
                hint=f"choose one of {', '.join(_precisions(target))} with `--precision`",
            )
        return replace(plan_of(dims, target, precision, programs, options), predicted=predicted)
    if predicted:
        return _without_machines(dims, predicted=predicted)
    raise _unknown(names, options)


def plan_of(
    dims: Dims, target: Target, precision: str, programs: Sequence[str], options: PlanOptions
) -> Plan:
    """Estimate a model of these sizes; see `plan`.

    Args:
        programs: names of the decode programs. A `step` with another batch than B is replaced by one
            with B rows.
    """
    cores = options.tensor_parallel
    heads = (dims.n_audio_head, dims.n_text_head)
    machines = [machine for machine in target.machines if machine.cores >= cores]
    estimates = (_on_machine(machine, dims, precision, programs, options) for machine in machines)
    return Plan(
        target=target.spec.name,
        precision=precision,
        batch=options.batch,
        tensor_parallel=cores,
        heads=heads,
        padded_heads=max(-(-h // cores) * cores - h for h in heads),
        machines=tuple(estimates),
    )


def _on_machine(
    machine: Machine, dims: Dims, precision: str, programs: Sequence[str], options: PlanOptions
) -> MachinePlan:
    size, cores, batch = BYTES[precision], options.tensor_parallel, options.batch
    speed, bandwidth = machine.flops[precision], machine.bandwidth
    decode = [name for name in programs if kind_of(name).name != STEP]
    row = size * state_numbers(dims, cores)
    weights = size * (
        encoder_weights(dims, cores)
        + cross_kv_weights(dims, cores)  # the program of its own, beside the encoder
        + sum(decoder_weights(dims, cores, program=name) for name in (*decode, "step"))
    )
    free = machine.memory_bytes - machine.reserved_bytes - weights - len(decode) * row
    encoder = _least(
        encoder_operations(dims, cores) / speed,
        size * encoder_weights(dims, cores) / bandwidth,
    )
    token = _least(
        batch * token_operations(dims, cores) / speed,
        size * token_numbers(dims, cores, batch) / bandwidth,
    )
    return MachinePlan(
        machine=machine.name,
        cores=machine.cores,
        models=machine.cores // cores,
        memory_bytes=machine.memory_bytes,
        weights_bytes=weights,
        state_bytes=(len(decode) + batch) * row,
        fits=free >= batch * row,
        largest_batch=max(0, int(free // row)),
        encoder_s=encoder[0],
        encoder_limit=encoder[1],
        token_s=token[0],
        token_limit=token[1],
        source=machine.source,
    )


def _least(compute_s: float, memory_s: float) -> tuple[float, str]:
    return (compute_s, "compute") if compute_s >= memory_s else (memory_s, "memory")


def _listed(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(names))


def _estimates(manifest: Manifest) -> tuple[ProgramEstimate, ...]:
    """Return what compilers estimated of a bundle's programs."""
    programs = []
    for entry in manifest.programs:
        compiler = get_target(entry.target).compiler
        estimate = compiler.estimate(entry.facts.target_facts) if compiler else None
        if compiler and estimate:
            programs.append(
                ProgramEstimate(
                    program=entry.spec.name,
                    target=entry.target,
                    precision=entry.precision,
                    compiler=compiler.title,
                    estimate=estimate,
                )
            )
    return tuple(programs)


def _without_machines(
    dims: Dims,
    *,
    compiled: tuple[ProgramEstimate, ...] = (),
    predicted: tuple[Prediction, ...] = (),
) -> Plan:
    parts: tuple[ProgramEstimate | Prediction, ...] = (*compiled, *predicted)
    return Plan(
        target=_listed(part.target for part in parts),
        precision=_listed(part.precision for part in parts),
        batch=1,
        tensor_parallel=1,
        heads=(dims.n_audio_head, dims.n_text_head),
        padded_heads=0,
        machines=(),
        compiled=compiled,
        predicted=predicted,
    )


def _predicted(
    names: Iterable[str], dims: Dims, placed: Mapping[str, ProgramEntry], options: PlanOptions
) -> tuple[Prediction, ...]:
    """Predict both parts on each target; of a bundle, each on the target and in the precision that it has.

    Args:
        placed: program -> its entry in the bundle; empty: there is no bundle.
    """
    if (options.batch, options.tensor_parallel) != (1, 1):
        return ()  # one text was measured
    predicted: list[Prediction] = []
    for target in map(get_target, names):
        if not placed:
            precision = options.precision or target.spec.runs.precisions[0]
            predicted += predict(target, dims, precision)
            continue
        for part, programs in PROGRAMS.items():
            entries = [placed[program] for program in programs if program in placed]
            if entries and all(entry.target == target.spec.name for entry in entries):
                precision = options.precision or entries[0].precision
                predicted += (p for p in predict(target, dims, precision) if p.part == part)
    return tuple(predicted)


def _read(
    source: str | os.PathLike[str],
) -> tuple[Dims, tuple[str, ...], Mapping[str, ProgramEntry], tuple[ProgramEstimate, ...]]:
    """Return a model's sizes, names of its decode programs, a bundle's programs, compilers' estimates."""
    path = Path(source)
    if (path / MANIFEST).is_file():
        manifest = Bundle.open(path, check_hashes=False).manifest
        placed = {entry.spec.name: entry for entry in manifest.programs}
        decode = tuple(name for name in placed if kind_of(name).reads == "caches")
        return manifest.dims, decode, placed, _estimates(manifest)
    if not path.exists() and (known_dims := published_dims(os.fspath(source))):
        return known_dims, DECODE, {}, ()
    with requires_torch("read a checkpoint"):
        from whisperport.model.checkpoint import load_checkpoint
    return load_checkpoint(source if isinstance(source, str) else path).dims, DECODE, {}, ()


def _names(placed: Mapping[str, ProgramEntry]) -> list[str]:
    """Return the targets of a bundle, `step`'s first, which runs once per token; without one, all known."""
    if not placed:
        return _known()
    first = [placed[STEP].target] if STEP in placed else []
    return list(dict.fromkeys([*first, *(entry.target for entry in placed.values())]))


def _precisions(target: Target) -> list[str]:
    """Return the precisions in which a target stores weights and state, of those that are estimated."""
    return [precision for precision in target.spec.runs.precisions if precision in BYTES]


def _known() -> list[str]:
    """Return the names of the targets of which times can be estimated."""
    return [
        target.spec.name
        for target in TARGETS
        if target.machines or any(times.fitted for times in target.published)
    ]


def _unknown(names: Sequence[str], options: PlanOptions) -> UsageError:
    """Return an error: nothing is known of the target, of these options, or of a bundle's targets."""
    which = "the target" if options.target else "the bundle's target"
    precisions = dict.fromkeys(
        times.precision for name in names for times in get_target(name).published if times.fitted
    )
    if precisions:
        return UsageError(
            "there is no estimate with these options"
            if len(names) > 1
            else f"there is no estimate for the target `{names[0]}` with these options",
            why=f"times were published in {', '.join(precisions)}, for one text on one core",
            hint="choose one of these with `--precision`, without `--batch` and `--tensor-parallel`",
        )
    return UsageError(
        f"there is no estimate for {which} `{names[0]}`",
        why="an estimate needs published times, or the memory and the peak speeds of machines",
        hint=f"choose one of {', '.join(_known())} with `--target`",
    )
