"""Placement of every program of a checkpoint: choose its target, precision and options."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from whisperport.build.export.export_options import ExportOptions
from whisperport.errors import LoweringError, UsageError
from whisperport.program.placement import Placement
from whisperport.program.program_kind import (
    COARSE_PROJECTION,
    CROSS_KV,
    ENCODER,
    UNCACHED_DECODER,
    VOCAB_PROJECTION,
    kind_of,
)
from whisperport.program.window import shorter_lengths
from whisperport.targets import Target, get_target
from whisperport.targets.target_options import by_target, own_options


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """The placement that a user asks for.

    Args:
        target: name of the target for every program that `programs` does not name.
        programs: program -> name of its target. Default: none.
        precision: precision of the programs on `target`. Default: "", the target's default precision.
        precisions: program -> its precision; overrides `precision`. Default: none.
        options: lowering options of targets, "TARGET.NAME" -> value. Default: none.
    """

    target: str
    programs: Mapping[str, str] = field(default_factory=dict)
    precision: str = ""
    precisions: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Placed:
    """The placement of every program, and the targets with their lowering options.

    Attributes:
        placements: program -> its placement.
        targets: name -> target, for every target that has a program.
    """

    placements: Mapping[str, Placement]
    targets: Mapping[str, Target]

    @property
    def lengths(self) -> tuple[int, ...]:
        """Encoder positions of the programs `encoder_T` and `cross_kv_T`, in rising order."""
        return tuple(sorted({kind_of(name).positions for name in self.placements} - {0}))

    def target_of(self, program: str) -> Target:
        """Return the target that a program is placed on."""
        return self.targets[self.placements[program].target]


def place(
    request: PlacementRequest, programs: Sequence[str], on_request: Sequence[str] = ()
) -> Placed:
    """Choose the target, precision and options of every program.

    A program is placed on the target that the request names for it, or else on `request.target`. If
    `request.target` does not run the program, the program is placed on the fallback target of that target.

    Args:
        request: the placement that the user asks for.
        programs: names of the programs of every bundle.
        on_request: names of further programs, which are placed if the request names them.

    Raises:
        UsageError: a target, program, precision or option does not exist, or a value is out of range.
        LoweringError: a target cannot run a program that is placed on it.
    """
    requested_names = {*request.programs, *request.precisions}
    _check_known(requested_names, (*programs, *on_request))
    programs = (*programs, *(name for name in on_request if name in requested_names))
    names = {program: target_name(program, request) for program in programs}
    configured = _configured(names.values(), request.options)
    placements = {
        program: Placement(
            name,
            _precision(program, configured[name], request),
            own_options(request.options, name),
        )
        for program, name in names.items()
    }
    return Placed(placements, configured)


def place_programs(target: str, options: ExportOptions) -> Placed:
    """Choose the target, precision and options of every program of an export; see `place`."""
    from whisperport.model.trace.variants import program_names

    request = PlacementRequest(
        target=target,
        programs=options.placement,
        precision=options.precision,
        precisions=options.precisions,
        options=options.options,
    )
    request, batch = _with_batch(request, options.batch)
    request, lengths = _with_lengths(request, shorter_lengths(options.windows))
    names = [*program_names(), *batch, *lengths]
    if options.uncached_decoder:
        names.append(UNCACHED_DECODER)
    if COARSE_PROJECTION in request.programs:  # float32 is needed too
        names.append(VOCAB_PROJECTION)
    return place(request, names, [VOCAB_PROJECTION, COARSE_PROJECTION])


def _with_batch(
    request: PlacementRequest, rows: int | None
) -> tuple[PlacementRequest, tuple[str, ...]]:
    """Place the program `step_B` as `step` is placed, unless the user places it.

    Args:
        request: the placement that the user asks for.
        rows: B; None: the default of the target of `step`.

    Returns:
        The request with the program, and its name; no name: the program is not exported.

    Raises:
        UsageError: there is no program for this number of texts.
    """
    from whisperport.model.trace.variants import BATCHES

    target = target_name("step", request)
    rows = get_target(target).spec.lowering.batch if rows is None else rows
    if rows == 1:
        return request, ()
    if rows not in BATCHES:
        raise UsageError(
            f"`batch` is {rows}",
            why=f"expected 1 or one of {', '.join(map(str, BATCHES))}",
            hint="choose one of these numbers of texts",
        )
    name = f"step_{rows}"
    precision = {name: request.precisions["step"]} if "step" in request.precisions else {}
    return replace(
        request,
        programs={name: target, **request.programs},
        precisions={**precision, **request.precisions},
    ), (name,)


def _with_lengths(
    request: PlacementRequest, positions: Sequence[int]
) -> tuple[PlacementRequest, tuple[str, ...]]:
    """Place `encoder_T` and `cross_kv_T` as `encoder` and `cross_kv` are placed, for each length T.

    Args:
        request: the placement that the user asks for.
        positions: the lengths, in encoder positions.

    Returns:
        The request with the programs, and their names: none where the target reads audio of any length.

    Raises:
        UsageError: both programs read audio of any length.
    """
    targets = {name: target_name(name, request) for name in (ENCODER, CROSS_KV)}
    static = of_one_length(lambda name: get_target(targets[name]))
    if positions and not static:
        raise UsageError(
            f"`--windows` is not needed for the target `{request.target}`",
            why="on the CPU it reads audio of any length with the same programs",
            hint="omit `--windows`: the bundle has short windows if their words are verified",
        )
    kinds = {f"{name}_{length}": name for length in positions for name in static}
    precisions = request.precisions
    return replace(
        request,
        programs={**{name: targets[kind] for name, kind in kinds.items()}, **request.programs},
        precisions={
            **{name: precisions[kind] for name, kind in kinds.items() if kind in precisions},
            **precisions,
        },
    ), tuple(kinds)


def of_one_length(target_of: Callable[[str], Target]) -> list[str]:
    """Return those of `encoder` and `cross_kv` whose target does not read audio of any length."""
    return [name for name in (ENCODER, CROSS_KV) if not target_of(name).spec.runs.any_audio]


def target_name(program: str, request: PlacementRequest) -> str:
    """Return the name of the target that a program is placed on.

    Raises:
        UsageError: the target does not exist.
    """
    if program in request.programs:
        return get_target(request.programs[program]).spec.name
    spec = get_target(request.target).spec
    runs_it = not spec.runs.programs or program in spec.runs.programs
    return spec.name if runs_it else spec.runs.fallback


def _configured(names: Iterable[str], options: Mapping[str, str]) -> dict[str, Target]:
    targets = {name: get_target(name) for name in dict.fromkeys(names)}
    chosen = by_target(options, {name: target.lower_options for name, target in targets.items()})
    return {name: target.configured(chosen[name]) for name, target in targets.items()}


def _precision(program: str, target: Target, request: PlacementRequest) -> str:
    spec = target.spec
    if program == COARSE_PROJECTION and program not in spec.runs.further_programs:
        raise UsageError(
            f"the target `{spec.name}` cannot run `{program}`",
            why="the program multiplies by weights of 8 bits with an operator that few runtimes have",
            hint=f"place it with `--placement {program}=onnxruntime`",
        )
    precision = request.precision if spec.name == request.target else ""
    precision = request.precisions.get(program, precision)
    if problem := target.unsupported(program, precision or spec.runs.precisions[0]):
        raise LoweringError(
            f"the target `{spec.name}` does not support `{program}`"
            + (f" in the precision `{precision[:40]}`" if precision else ""),
            why=problem.why,
            hint=problem.hint,
        )
    if precision and precision not in spec.runs.precisions:
        raise UsageError(
            f"the target `{spec.name}` cannot run `{program}` in the precision `{precision[:40]}`",
            hint=f"precisions of `{spec.name}`: {', '.join(spec.runs.precisions)}",
        )
    return precision or spec.runs.precisions[0]


def _check_known(names: Iterable[str], programs: Sequence[str]) -> None:
    for name in sorted(names):
        if name not in programs:
            raise UsageError(
                f"there is no program `{name[:40]}` to place on a target",
                hint=f"the programs are {', '.join(programs)}",
            )
