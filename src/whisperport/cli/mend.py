"""`whisperport check --fix`: mend, write, and say what was done."""

import sys
from pathlib import Path

from whisperport.cli.console import Word, print_json, print_lines, print_next, print_table, stages
from whisperport.fixing import Fixed, Step, check_free, fix, write_fixed


def mend(
    program: Path,
    target: str,
    out: Path,
    inputs: tuple[Path, ...],
    *,
    overwrite: bool,
    trust: bool,
    as_json: bool,
) -> None:
    """Exits 1 if a rewrite failed its proof, or something that computes remains."""
    check_free(out, overwrite=overwrite)
    with stages() as say:
        fixed = fix(program, target, inputs=inputs, trust=trust, say=say)
        if fixed.changed:
            say(f"writing {out.name}")
            write_fixed(fixed, out, overwrite=overwrite)
    if as_json:
        written = str(out) if fixed.changed else None
        print_json({**fixed.to_json(), "written": written})
    else:
        _print_fixed(fixed, out)
    print_next(*_next_command(fixed, out if fixed.changed else program))
    if not fixed:
        sys.exit(1)


def _print_fixed(fixed: Fixed, out: Path) -> None:
    print_table(
        ("rewrite", "changed", "declined", "largest error", "proof"), list(map(_row, fixed.steps))
    )
    samples = ", ".join(fixed.samples)
    print_lines("", f"largest error: of the largest value; proved on {samples}", "")
    left = [
        *((proof.sample, proof.comparison.reason) for step in fixed.steps for proof in step.failed),
        *((r.node, r.reason) for step in fixed.steps for r in step.outcome.refused),
        *((r.node, r.reason) for r in (*fixed.remaining, *fixed.lookups)),
    ]
    if left:
        print_table(("where", "what remains, and why"), left)
        print_lines("")
    print_lines(_summary(fixed, out))


def _row(step: Step) -> tuple[str, ...]:
    changed = len(step.outcome.changed)
    proof = "equal" if step.kept else "failed: left out"
    return (
        step.outcome.rewrite,
        str(changed),
        str(len(step.outcome.refused)),
        f"{step.largest_relative:.1e}" if changed else "-",
        proof if changed else "nothing to prove",
    )


def _summary(fixed: Fixed, out: Path) -> str:
    remaining = f"{fixed.target} refuses {_nodes(len(fixed.remaining))} still"
    if fixed.lookups:
        remaining += f", and {len(fixed.lookups)} lookup{'s' * (len(fixed.lookups) != 1)}"
    done = f"{out}: {_nodes(fixed.changed)} replaced" if fixed.changed else "nothing to mend"
    return f"{done}; {remaining}"


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}" if count else "no node"


def _next_command(fixed: Fixed, path: Path) -> tuple[Word, ...]:
    if fixed.remaining and fixed.remaining[0].rule:
        return "explain", fixed.remaining[0].rule
    suffix = ".onnx" if fixed.target == "onnxruntime" else ".pte"
    return "lower", path, "--target", fixed.target, "--out", path.with_suffix(suffix)
