"""`whisperport targets`"""

from dataclasses import asdict
from typing import Any

import click

from whisperport.apps.cli.console import print_json, print_lines, print_next, print_table
from whisperport.apps.cli.shared_options import as_json
from whisperport.apps.cli.verb import Verb
from whisperport.build.doctor import is_installed
from whisperport.program.json_records import to_json
from whisperport.program.spec import TargetSpec
from whisperport.targets import TARGETS, RunOptions, Target
from whisperport.verification.machine import versions
from whisperport.verification.project_evidence import (
    evidence_rows,
    project_evidence,
    project_status,
    status_words,
)


@click.command(
    cls=Verb, short_help="List the targets, their status, and whether their packages are installed."
)
@as_json
def targets(as_json: bool) -> None:
    """List the targets, their status, and whether their packages are installed on this machine.

    The status tells what the whisperport project did with a target on its own machines; the second table
    lists the evidence. It says nothing about your bundles, to which `whisperport verify BUNDLE --record`
    adds evidence.

    \b
    Examples:
      $ whisperport targets
      $ whisperport targets --json
    """
    specs = [target.spec for target in TARGETS]
    if as_json:
        print_json([_to_json(spec) for spec in specs])
        return
    print_table(
        ("target", "description", "status in the whisperport project", "can export", "can run"),
        [
            (
                spec.name,
                spec.summary,
                status_words(spec.name),
                "yes" if is_installed(spec.software.extra) else f"no: [{spec.software.extra}]",
                _can_run(target),
            )
            for target, spec in zip(TARGETS, specs, strict=True)
        ],
    )
    print_lines("", "no: [EXTRA]: this pip extra is not installed; see `whisperport doctor`")
    print_lines(
        "emulated, simulated: in emulation on this CPU, or in the vendor's simulator;",
        "this command does not look for the device",
        "",
    )
    print_table(
        ("target", "evidence of the project", "with", "date", "machine"),
        [(spec.name, *row) for spec in specs for row in evidence_rows(spec.name)],
    )
    lowers = next((spec.name for spec in specs if is_installed(spec.software.extra)), None)
    if lowers:
        print_next("export", "default", "--target", lowers, "--out", "build/default")
    else:
        print_next("doctor")


def _can_run(target: Target) -> str:
    """Whether programs of a target run here: for a target with a device, only what the packages tell."""
    spec = target.spec
    if not spec.runs.emulation:
        return (
            "yes" if is_installed(spec.software.run_extra) else f"no: [{spec.software.run_extra}]"
        )
    if target.run_mode(RunOptions()) == "simulator" and is_installed(spec.software.run_extra):
        return "simulated"
    runtime = spec.software.emulation_runtime
    installed = versions([runtime])[runtime] != "not installed"
    return "emulated" if installed else f"no: [{spec.software.run_extra}]"


def _to_json(spec: TargetSpec) -> dict[str, Any]:
    """One object per target: its records have no field of the same name, so that their facts share it."""
    facts = asdict(spec)
    for record in ("supports", "lowering", "runs", "software"):
        facts |= facts.pop(record)
    return {
        **facts,
        "operators": sorted(spec.supports.operators or ()),
        "project_status": project_status(spec.name),
        "project_evidence": to_json(project_evidence(spec.name)),
    }
