"""Estimate whether a model fits the machines of a target, and the least time that it can take there.

Nothing is run. All figures follow from the model's sizes and the machine's published peak speeds. One model
uses R cores: each core computes ⌈H / R⌉ of the H heads, and 1 / R of each feed-forward block (tensor
parallel). Every core computes the convolutions and the vocabulary projection. With w = ⌈H / R⌉ · D,
f = ⌈F / R⌉ and s bytes per number, per core:

    encoder     operations  2·2T·d·3·mels + 2·T·d·3d + L·(8·T·d·w + 4·T²·w + 4·T·d·f) + K·4·T·d·w
                bytes       s · weights of the encoder and of the K cross-attention K/V projections
    one token   operations  B · (K·(12·d·w + 4·d·f) + 2·V·d + 4·K·w·(N + 1 + T))
                bytes       s · (weights of the decoder + B·2·K·w·(2N + T))
    least time  the larger of operations / speed and bytes / bandwidth

L and K are the layers of encoder and decoder, F is the width of a feed-forward block, and B the number of
texts that are decoded together; ARCHITECTURE.md defines the other letters. A token reads the whole
self-attention cache and writes it, because shapes are static. Softmax, norms, activations and the exchange
between cores are not counted, and no program reaches a peak speed: real times are longer.

A vendor's compiler may estimate the programs that it compiled. A bundle with such programs is planned with
these estimates, unless an option asks for the machines of a target.

Each program is loaded with its own weights, and each decode program with its own state. The memory of
activations is not known.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from whisperport.errors import UsageError
from whisperport.program.bundle import MANIFEST, Bundle, Manifest
from whisperport.program.dims import Dims, published_dims
from whisperport.program.program_kind import STEP, kind_of
from whisperport.system.option import Option, check_ranges
from whisperport.targets import TARGETS, Target, get_target
from whisperport.targets.base import Machine
from whisperport.targets.compiler import Estimate
from whisperport.targets.preflight import requires_torch

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # bytes per number, by precision
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
            default="that of the bundle; of a checkpoint, the only one whose machines are known",
        ),
    ] = None
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
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
    """The result of `plan`; true if the model fits at least one machine, or was planned with none.

    Attributes:
        target: name of the target.
        precision: precision of weights and state; of compiled programs, the precisions of all.
        batch: B.
        tensor_parallel: R.
        heads: number of heads of the encoder and of the decoder.
        padded_heads: heads that are computed for nothing, because R does not divide them.
        machines: the estimate for each machine that has at least R cores; none for compiled programs.
        compiled: the compilers' estimates of a bundle's compiled programs, of those that have one.
    """

    target: str
    precision: str
    batch: int
    tensor_parallel: int
    heads: tuple[int, int]
    padded_heads: int
    machines: tuple[MachinePlan, ...]
    compiled: tuple[ProgramEstimate, ...] = ()

    def __bool__(self) -> bool:
        return any(machine.fits for machine in self.machines) or bool(
            self.compiled and not self.machines
        )

    @property
    def degrees(self) -> tuple[int, ...]:
        """The values of R that divide the heads of both sides, so that no head is padding."""
        return tuple(r for r in range(1, min(self.heads) + 1) if not any(h % r for h in self.heads))

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {"estimate": True, **asdict(self), "degrees": list(self.degrees)}


def plan(source: str | os.PathLike[str], options: PlanOptions | None = None) -> Plan:
    """Estimate memory and least times of a model on the machines of a target. Nothing is run.

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
        return Plan(
            target=_listed(program.target for program in compiled),
            precision=_listed(program.precision for program in compiled),
            batch=1,
            tensor_parallel=1,
            heads=(dims.n_audio_head, dims.n_text_head),
            padded_heads=0,
            machines=(),
            compiled=compiled,
        )
    target = get_target(_target_name(options.target or "", placed))
    precision = options.precision or target.spec.runs.precisions[0]
    if precision not in target.spec.runs.precisions or precision not in BYTES:
        known = [candidate for candidate in target.spec.runs.precisions if candidate in BYTES]
        raise UsageError(
            f"`{target.spec.name}` has no estimate for the precision `{precision[:40]}`",
            why="the estimate needs a precision in which the target stores weights and state",
            hint=f"choose one of {', '.join(known)} with `--precision`",
        )
    return plan_of(dims, target, precision, programs, options)


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


def _shares(dims: Dims, cores: int) -> tuple[int, int, int, int]:
    """Return w and f of the encoder, and w and f of the decoder."""
    audio = -(-dims.n_audio_head // cores) * (dims.n_audio_state // dims.n_audio_head)
    text = -(-dims.n_text_head // cores) * dims.text_head_width
    return audio, -(-dims.n_audio_ffn // cores), text, -(-dims.n_text_ffn // cores)


def encoder_weights(dims: Dims, cores: int = 1) -> int:
    """Return the weights of the encoder and of the cross-attention K/V projections, of one core."""
    d = dims.n_audio_state
    w, f, _, _ = _shares(dims, cores)
    stem = 3 * dims.n_mels * d + d + 3 * d * d + d + dims.n_audio_ctx * d
    layer = 4 * d * w + 2 * w + d + 2 * d * f + f + d + 4 * d
    return stem + dims.n_audio_layer * layer + 2 * d + cross_kv_weights(dims, cores)


def cross_kv_weights(dims: Dims, cores: int = 1) -> int:
    """Return the weights of the cross-attention K/V projections, of one core."""
    w = _shares(dims, cores)[2]
    return dims.n_text_layer * (2 * dims.n_audio_state * w + w)


def decoder_weights(dims: Dims, cores: int = 1, *, program: str = "step") -> int:
    """Return the weights of one decode program, of one core. `align` has no vocabulary projection."""
    d = dims.n_text_state
    _, _, w, f = _shares(dims, cores)
    attention = 6 * d * w + 3 * w + 2 * d  # the bias of the output, d numbers, is in each of both
    layer = attention + 2 * d * f + f + d + 6 * d
    vocabulary = 0 if program == "align" else dims.n_vocab * d
    return dims.n_text_layer * layer + 2 * d + vocabulary


def state_numbers(dims: Dims, cores: int = 1) -> int:
    """Return the numbers in the self- and cross-attention K/V of one text, of one core."""
    w = _shares(dims, cores)[2]
    return 2 * dims.n_text_layer * w * (dims.n_text_ctx + dims.n_audio_ctx)


def encoder_operations(dims: Dims, cores: int = 1) -> int:
    """Return the operations of the encoder and of the cross-attention K/V projections, of one core."""
    d, t = dims.n_audio_state, dims.n_audio_ctx
    w, f, text, _ = _shares(dims, cores)
    stem = 2 * 2 * t * d * 3 * dims.n_mels + 2 * t * d * 3 * d
    layer = 8 * t * d * w + 4 * t * t * w + 4 * t * d * f
    return stem + dims.n_audio_layer * layer + dims.n_text_layer * 4 * t * d * text


def token_operations(dims: Dims, cores: int = 1) -> int:
    """Return the operations of one token of one text, of one core."""
    d = dims.n_text_state
    _, _, w, f = _shares(dims, cores)
    attended = dims.n_text_ctx + 1 + dims.n_audio_ctx
    layer = 12 * d * w + 4 * d * f + 4 * w * attended
    return dims.n_text_layer * layer + 2 * dims.n_vocab * d


def token_numbers(dims: Dims, cores: int = 1, batch: int = 1) -> int:
    """Return the numbers that one token of B texts reads and writes, of one core."""
    w = _shares(dims, cores)[2]
    moved = 2 * dims.n_text_layer * w * (2 * dims.n_text_ctx + dims.n_audio_ctx)
    return decoder_weights(dims, cores) + batch * moved


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


def _read(
    source: str | os.PathLike[str],
) -> tuple[Dims, tuple[str, ...], str, tuple[ProgramEstimate, ...]]:
    """Return a model's sizes, names of its decode programs, target of its `step`, compilers' estimates."""
    path = Path(source)
    if (path / MANIFEST).is_file():
        manifest = Bundle.open(path, check_hashes=False).manifest
        placed = {entry.spec.name: entry.target for entry in manifest.programs}
        decode = tuple(name for name in placed if kind_of(name).reads == "caches")
        # The target of `step` decides: it runs once per token.
        known = [name for name in placed.values() if name in _planned()]
        target = known[0] if known else placed.get(STEP, "")
        return manifest.dims, decode, target, _estimates(manifest)
    if not path.exists() and (known_dims := published_dims(os.fspath(source))):
        return known_dims, DECODE, "", ()
    with requires_torch("read a checkpoint"):
        from whisperport.model.checkpoint import load_checkpoint
    return load_checkpoint(source if isinstance(source, str) else path).dims, DECODE, "", ()


def _planned() -> Mapping[str, Target]:
    """Return the targets whose machines are known, by name."""
    return {target.spec.name: target for target in TARGETS if target.machines}


def _target_name(chosen: str, placed: str) -> str:
    """Return the name of the target to plan for.

    Args:
        chosen: the one that was asked for; "": none.
        placed: the target of the bundle; "": no bundle, so that it is the only one with known machines.

    Raises:
        UsageError: the machines of this target are not known, or more than one target could be meant.
    """
    known, name = _planned(), chosen or placed
    if not name and len(known) == 1:
        return next(iter(known))
    if name and name not in known:
        get_target(name)  # raises for an unknown name
    if name in known:
        return name
    which = "the target" if chosen else "the bundle's target"
    raise UsageError(
        f"there is no estimate for {which} `{name}`" if name else "no target is given",
        why="an estimate needs the memory and the peak speeds of the target's machines",
        hint=f"choose one of {', '.join(known)} with `--target`",
    )
