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
from whisperport.build.predicted_times import Prediction

PREDICTED_HEADINGS = (
    *("target", "machine", "programs", "part"),
    *("predicted", "interval", "published", "memory"),
)
HEADINGS = ("machine", "models", "weights", "state", "memory", "largest batch", "encoder", "token")
COMPILED_HEADINGS = ("program", "one run", "cycles", "memory")
GB = 1e9


@click.command(cls=Verb, short_help="Estimate times and memory of a model on a target's machines.")
@click.argument("source", type=Given("bundle", "checkpoint", as_text=True))
@field_options(PlanOptions, group="Model")
@as_json
def plan(
    source: str,
    as_json: bool,
    **chosen: Any,
) -> None:
    """Estimate times and memory of a model on a target's machines. Nothing is run.

    SOURCE is a bundle or a checkpoint. On machines for which times of other models were published, the
    times of this model are predicted, with an interval that should contain 80% of measured times.

    On machines whose memory and peak speeds are published, the least times of this model are estimated.
    Real times are longer. These machines are listed with --target, or for a bundle that runs there. The
    exit status is 1 if the model fits the memory of no such machine.

    Some vendors' compilers estimate the programs that they compile. For a bundle with such programs, and
    without options, these estimates are listed.

    \b
    Examples:
      $ whisperport plan small
      $ whisperport plan my-finetune --target sm8650 --precision w8a16
      $ whisperport plan openai/whisper-large-v3-turbo --target aws-neuron --batch 8 --json
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
    if planned.predicted:
        _print_predicted(planned)
    if not planned.machines:
        return
    if planned.predicted:
        print_lines("")
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


def _print_predicted(planned: Plan) -> None:
    predicted = planned.predicted
    print_lines("predicted from published times of other models; nothing was run", "")
    print_table(PREDICTED_HEADINGS, [_predicted_row(prediction) for prediction in predicted])
    print_lines("")
    sources = dict.fromkeys(prediction.source for prediction in predicted)
    contexts = dict.fromkeys(str(prediction.context) for prediction in predicted)
    notes = [
        "encoder: one window, with the cross-attention K/V. token: one token of one text. interval: should "
        "contain 80% of measured times. published: of a model of these sizes, if there is one; its token "
        f"was measured with a cache of {', '.join(contexts)} rows. memory: weights and state of this part; "
        "activations are not known.",
        f"Measured by others: {', '.join(sources)}.",
    ]
    if any(prediction.interval_s is None for prediction in predicted):
        notes.append(
            "No interval: one model alone was published, so other sizes were not compared."
        )
    if any(prediction.extrapolated for prediction in predicted):
        notes.append(
            "*: the model has more work than the largest one with a published time, or less than the "
            "smallest; the interval is not tested there."
        )
    for note in notes:
        print_lines(*textwrap.wrap(note, WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def _predicted_row(prediction: Prediction) -> tuple[str, ...]:
    interval, published = prediction.interval_s, prediction.published_s
    return (
        prediction.target,
        prediction.machine,
        f"{prediction.precision}, {prediction.software}",
        prediction.part,
        f"{_ms(prediction.seconds)} ms{'*' if prediction.extrapolated else ''}",
        f"{_ms(interval[0])} to {_ms(interval[1])}" if interval else "-",
        f"{_ms(published)} ms" if published else "-",
        f"{prediction.memory_bytes / 1e6:,.0f} MB",
    )


def _ms(seconds: float) -> str:
    """Return milliseconds with two digits or more: 8.3, 59, 1,740."""
    milliseconds = seconds * 1e3
    return f"{milliseconds:,.0f}" if milliseconds >= 20 else f"{milliseconds:.1f}"


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
