"""`whisperport plan`"""

import sys
import textwrap
from typing import Any

import click

from whisperport.apps.cli.console import WIDTH, print_json, print_lines, print_table
from whisperport.apps.cli.fields import field_options, field_values
from whisperport.apps.cli.given import Given
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb
from whisperport.build.plan import (
    MachinePlan,
    Plan,
    PlanOptions,
    ProgramEstimate,
)
from whisperport.build.plan import (
    plan as make_plan,
)

HEADINGS = ("machine", "models", "weights", "state", "memory", "largest batch", "encoder", "token")
COMPILED_HEADINGS = ("program", "one run", "cycles", "memory")
GB = 1e9


@click.command(
    cls=Verb, short_help="Estimate memory and least times of a model on a target's machines."
)
@click.argument("source", type=Given("bundle", "checkpoint", as_text=True))
@field_options(PlanOptions, group="Model")
@as_json
def plan(
    source: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Estimate memory and least times of a model on a target's machines. Nothing is run.

    SOURCE is a bundle or a checkpoint. The estimate follows from the model's sizes and from the peak
    speeds that the vendor publishes. Real times are longer. The exit status is 1 if the model fits no
    machine.

    Some vendors' compilers estimate the programs that they compile. For a bundle with such programs, and
    without options, these estimates are listed.

    \b
    Examples:
      $ whisperport plan openai/whisper-large-v3-turbo
      $ whisperport plan openai/whisper-large-v3-turbo --precision bf16 --batch 8 --json
    """
    planned = make_plan(source, PlanOptions(**field_values(PlanOptions, chosen)))
    if as_json:
        print_json(planned.to_json())
    else:
        _print(planned)
    if not planned:
        sys.exit(1)


def _print(planned: Plan) -> None:
    if planned.compiled and not planned.machines:
        _print_compiled(planned)
        return
    cores = planned.tensor_parallel
    print_lines(
        f"{planned.target}, {planned.precision}, batch {planned.batch}, {cores} core"
        f"{'s' if cores > 1 else ''} for each model: an estimate, nothing was run",
        "",
    )
    print_table(HEADINGS, [_row(machine_plan) for machine_plan in planned.machines])
    print_lines("")
    for line in _notes(planned):
        print_lines(*textwrap.wrap(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _print_compiled(planned: Plan) -> None:
    compilers = ", ".join(dict.fromkeys(program.compiler for program in planned.compiled))
    print_lines(
        f"{planned.target}, {planned.precision}: estimates of {compilers}; nothing was run or measured",
        "",
    )
    print_table(COMPILED_HEADINGS, [_compiled_row(program) for program in planned.compiled])
    print_lines("")
    conditions = dict.fromkeys(
        f"{program.target}: {program.estimate.conditions}" for program in planned.compiled
    )
    print_lines(*conditions)


def _compiled_row(program: ProgramEstimate) -> tuple[str, ...]:
    estimate = program.estimate
    memory = (f"{size / 1e6:.4g} MB of {name}" for name, size in estimate.memory_bytes.items())
    return (
        program.program,
        f"{estimate.seconds * 1e3:.4g} ms",
        f"{estimate.cycles / 1e6:.4g} M",
        ", ".join(memory),
    )


def _row(machine_plan: MachinePlan) -> tuple[str, ...]:
    return (
        machine_plan.machine,
        str(machine_plan.models),
        f"{machine_plan.weights_bytes / GB:.2f} GB",
        f"{machine_plan.state_bytes / GB:.2f} GB",
        f"{machine_plan.memory_bytes / GB:.1f} GB",
        str(machine_plan.largest_batch) if machine_plan.largest_batch else "does not fit",
        f"≥ {machine_plan.encoder_s * 1e3:.1f} ms",
        f"≥ {machine_plan.token_s * 1e3:.2f} ms",
    )


def _notes(planned: Plan) -> list[str]:
    heads, cores = planned.heads, planned.tensor_parallel
    notes = [
        "models: how many the machine runs concurrently. weights, state, memory: of one core, for all "
        "programs. Activations are not known and not counted.",
        "encoder, token: the larger of operations / peak speed (compute) and bytes / peak bandwidth "
        "(memory). token: one step, a token of each text. Real times are longer.",
        *_limits(planned.machines),
        f"cores that divide the {heads[0]} and {heads[1]} heads of encoder and decoder: "
        f"{', '.join(map(str, planned.degrees))}.",
    ]
    if planned.padded_heads:
        notes.append(
            f"With {cores} cores, {planned.padded_heads} heads are padding, computed for nothing."
        )
    if cores > 1:
        notes.append(
            "whisperport compiles a program for one core: more need the vendor's own libraries."
        )
    return notes


def _limits(machines: tuple[MachinePlan, ...]) -> list[str]:
    """Return what limits the times, with the machines where the two limits are these."""
    names_by_limits: dict[tuple[str, str], list[str]] = {}
    for machine_plan in machines:
        names_by_limits.setdefault(
            (machine_plan.encoder_limit, machine_plan.token_limit), []
        ).append(machine_plan.machine)
    everywhere = len(names_by_limits) == 1
    return [
        f"The encoder is limited by {encoder}, a token by {token}"
        + ("." if everywhere else f": {', '.join(names)}.")
        for (encoder, token), names in names_by_limits.items()
    ]
