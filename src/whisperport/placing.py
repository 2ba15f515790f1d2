"""Place every program of a checkpoint on a target, with a precision and options."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from whisperport.errors import UsageError
from whisperport.placement import Placement
from whisperport.targets import Target, get_target
from whisperport.targets.options import by_target, own_options


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementRequest:
    """What a user asks of the placement of programs."""

    target: str  # of every program that is not named below
    programs: Mapping[str, str] = field(default_factory=dict)  # program -> its target
    precision: str = ""  # of the programs on `target`; empty: the target's default
    precisions: Mapping[str, str] = field(default_factory=dict)  # program -> its precision
    options: Mapping[str, str] = field(default_factory=dict)  # "TARGET.NAME" -> value


@dataclass(frozen=True, slots=True)
class Placed:
    """Every program's placement, and the targets, with their options for lowering."""

    placements: Mapping[str, Placement]  # program -> placement
    targets: Mapping[str, Target]  # name -> target, of all that a program is placed on

    def target_of(self, program: str) -> Target:
        """The target that a program is placed on."""
        return self.targets[self.placements[program].target]


def place(request: PlacementRequest, programs: Sequence[str]) -> Placed:
    """Place programs.

    A program goes to the target named for it, else to `request.target`, or to the fallback target of
    that one if it does not run the program.

    Args:
        programs: names of all programs.

    Raises:
        UsageError: no such target, program, precision or option, or an option value out of range.
    """
    for asked in (request.programs, request.precisions):
        _check_known(asked, programs)
    names = {program: _target_of(program, request) for program in programs}
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


def _target_of(program: str, request: PlacementRequest) -> str:
    if program in request.programs:
        return get_target(request.programs[program]).spec.name
    spec = get_target(request.target).spec
    runs_it = not spec.programs or program in spec.programs
    return spec.name if runs_it else spec.fallback


def _configured(names: Iterable[str], options: Mapping[str, str]) -> dict[str, Target]:
    targets = {name: get_target(name) for name in dict.fromkeys(names)}
    chosen = by_target(options, {name: one.lower_options for name, one in targets.items()})
    return {name: one.configured(chosen[name]) for name, one in targets.items()}


def _precision(program: str, target: Target, request: PlacementRequest) -> str:
    spec = target.spec
    asked = request.precision if spec.name == request.target else ""
    asked = request.precisions.get(program, asked)
    if asked and asked not in spec.precisions:
        raise UsageError(
            f"`{spec.name}` cannot run `{program}` in the precision `{asked[:40]}`",
            hint=f"precisions of `{spec.name}`: {', '.join(spec.precisions)}",
        )
    return asked or spec.precisions[0]


def _check_known(asked: Iterable[str], programs: Sequence[str]) -> None:
    for name in asked:
        if name not in programs:
            raise UsageError(
                f"there is no program `{name[:40]}` to place",
                hint=f"programs are {', '.join(programs)}",
            )
