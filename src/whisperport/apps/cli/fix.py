"""`whisperport fix`"""

import sys
from pathlib import Path

import click

from whisperport.apps.cli.check_page import fix_page
from whisperport.apps.cli.console import (
    Argument,
    command_line,
    print_json,
    print_lines,
    print_next,
    print_table,
    stages,
)
from whisperport.apps.cli.given import Given, InputPath
from whisperport.apps.cli.judge import print_judgement
from whisperport.apps.cli.shared_options import (
    as_json,
    html_option,
    output_option,
    sizes_option,
    target_name,
    trusting,
)
from whisperport.apps.cli.verb import Verb, option
from whisperport.build.fix import Fixed, RewriteStep, check_free
from whisperport.build.fix import fix as fix_program
from whisperport.errors import UsageError
from whisperport.program.spec import Rejection
from whisperport.system.outputs import Output, check_outputs, write_page
from whisperport.targets import get_target


@click.command(
    cls=Verb,
    short_help="Rewrite the nodes of a program that a target rejects, or repair the files of an app.",
)
@click.argument("program", type=Given("program", "layout", "checkpoint"))
@target_name("Target to fix a program for, not the files of an app", required=False)
@option(
    "--checkpoint",
    group="Input",
    type=Given("checkpoint", as_text=True),
    metavar="CHECKPOINT",
    help="Checkpoint that the files of an app were made of; some repairs need it",
)
@option(
    *("--for", "app"),
    group="Input",
    metavar="APP",
    show_default="every installed app that loads them",
    help="App that runs the repaired files",
)
@sizes_option
@option(
    "--inputs",
    group="Input",
    multiple=True,
    type=InputPath(),
    metavar="FILE.npz",
    help="Additional inputs on which the rewrites are verified, as one array per input name; may be "
    "repeated",
)
@trusting("Load and run PROGRAM without a limit on memory")
@output_option(
    "PATH", None, "Where to write the fixed program, or the repaired copy of an app's files"
)
@option("--overwrite", group="Output", is_flag=True, help="Replace the file or folder at --out")
@html_option("the program's graph before and after its rewrites")
@as_json
def fix(
    program: Path,
    target: str | None,
    sizes: dict[str, int],
    inputs: tuple[Path, ...],
    trust: bool,
    out: Path,
    overwrite: bool,
    html: Path | None,
    as_json: bool,
    **of_app: str | None,
) -> None:
    """Rewrite the nodes of a program that a target rejects, or repair the files of an app.

    With --target, PROGRAM is a .pt2 file of any model. Each rewrite is verified: the program runs in
    PyTorch before and after it, on random inputs, and on speech if an input is a mel spectrogram. A
    rewrite that fails its verification is not applied. Parts that move to the host, such as the token
    embedding lookup, are written to files beside FILE.pt2. The exit status is 1 if a rewrite fails its
    verification, or a rejected node that computes something remains.

    Without --target, PROGRAM is a folder or file that an app loads. What `whisperport judge` finds wrong
    and can be corrected is corrected in a copy, which is judged again; the original is not changed. The
    exit status is 1 if anything is still wrong.

    \b
    Examples:
      $ whisperport fix decoder.pt2 --target xnnpack --out fixed.pt2
      $ whisperport fix their-folder --checkpoint openai/whisper-small --out fixed
    """
    if target is None:
        for flag, value in (("size", sizes), ("inputs", inputs), ("trust", trust), ("html", html)):
            if value:
                raise UsageError(f"`--{flag}` is for programs", hint="give `--target`, too")
        check_free(out, overwrite=overwrite)
        _fix_files(program, out, as_json, **of_app)
        return
    for flag, name in (("checkpoint", of_app["checkpoint"]), ("for", of_app["app"])):
        if name is not None:
            raise UsageError(f"`--{flag}` is for files of an app", hint="leave out `--target`")
    pages = [] if html is None else [Output(html, "--html", "page")]
    check_outputs([Output(out, "--out", "file"), *pages], [program, *inputs])
    check_free(out, overwrite=overwrite)
    with stages() as progress:
        fixed = fix_program(program, target, inputs=inputs, sizes=sizes, trust=trust)
        if fixed.changed:
            beside = [out.with_name(name) for name in fixed.host.files(out.stem)]
            check_outputs([Output(path, "--out", "file") for path in beside], [program, *inputs])
            progress(f"writing {out.name}")
            fixed.write(out, overwrite=overwrite)
    following = _next_command(fixed, out if fixed.changed else program)
    if as_json:
        written = str(out) if fixed.changed else None
        print_json({**fixed.to_json(), "written": written})
    else:
        _print_fixed(fixed, out)
    if html is not None:
        write_page(html, fix_page(fixed, command_line(*following)))
    print_next(*following)
    if not fixed:
        sys.exit(1)


def _fix_files(
    path: Path, out: Path, as_json: bool, *, checkpoint: str | None, app: str | None
) -> None:
    """Repair the files of an app, and print what was changed and how they are judged."""
    with stages():
        fixed = fix_program(path, out=out, checkpoint=checkpoint, app=app)
    if as_json:
        print_json(fixed.to_json())
    else:
        if fixed.changes:
            print_table(("rule", "changed"), list(fixed.changes.items()))
        print_lines("")
        print_judgement(fixed.judgement)
        print_lines("", f"{fixed.path}: repaired" if fixed.path else "nothing was written")
    if not fixed:
        sys.exit(1)


def _print_fixed(fixed: Fixed, out: Path) -> None:
    print_table(
        ("rewrite", "changed", "declined", "min cosine", "min SQNR", "max error", "result"),
        list(map(_row, fixed.steps)),
    )
    samples = ", ".join(fixed.samples)
    print_lines(
        "",
        f"max error is relative to the largest value; verified on {samples}; rule: {fixed.gate.rule}",
        "",
    )
    failed = [output for step in fixed.steps for output in step.equality.failed]
    remaining = [
        *(("", output.sample, output.comparison.reason) for output in failed),
        *((r.rule, r.node, _with_place(r)) for r in (*fixed.remaining, *fixed.lookups)),
    ]
    if remaining:
        print_table(("rule", "where", "remaining problem"), remaining)
        print_lines("")
    if not_replaced := [row for step in fixed.steps for row in _not_replaced(step)]:
        print_table(("rewrite", "node", "why it was not replaced"), not_replaced)
        print_lines("")
        if not fixed.remaining:
            print_lines(f"{fixed.target} rejects none of these nodes: they need no change", "")
    if fixed.unseen:
        rows = [(rejection.node, _with_place(rejection)) for rejection in fixed.unseen]
        print_table(("node", "not seen in programs known to compile"), rows)
        print_lines("")
    if fixed.host and fixed.changed:
        print_lines(*_host_lines(fixed, out), "")
    print_lines(_summary(fixed, out))


def _with_place(rejection: Rejection) -> str:
    return f"{rejection.reason} ({rejection.place})" if rejection.place else rejection.reason


def _not_replaced(step: RewriteStep) -> list[tuple[str, str, str]]:
    """Rows about the nodes that a rewrite did not replace, which the target may support as they are."""
    name = step.outcome.rewrite
    rows = [(name, rejection.node, rejection.reason) for rejection in step.outcome.rejected]
    return [*rows, *([(name, "-", step.left_out)] if step.left_out else [])]


def _row(step: RewriteStep) -> tuple[str, ...]:
    name, changed = step.outcome.rewrite, len(step.outcome.changed)
    declined = str(len(step.outcome.rejected))
    if step.left_out:
        return (name, str(changed), declined, "-", "-", "-", "not applied")
    if not changed:
        return (name, "0", declined, "-", "-", "-", "nothing to verify")
    equality = step.equality
    return (
        name,
        str(changed),
        declined,
        f"{equality.cosine:.6f}",
        f"{equality.sqnr_db:.1f} dB",
        f"{equality.max_relative:.1e}",
        "verified" if step.kept else "failed, not applied",
    )


def _host_lines(fixed: Fixed, out: Path) -> list[str]:
    """Lines about the parts that moved to the host, and the file that describes them."""
    lines = [
        f"the host computes `{lookup.embeddings.name}` {lookup.embeddings.shape} from "
        f"`{lookup.tokens.name}` by embedding lookup"
        + (", and adds the positional embedding" if lookup.positions is not None else "")
        for lookup in fixed.host.lookups
    ]
    lines += [
        f"the host concatenates `{join.output.name}` from {', '.join(join.pieces)}"
        for join in fixed.host.joins
    ]
    return [
        *lines,
        f"the host's part and its tables are described in {out.with_name(f'{out.stem}.host.json')}",
    ]


def _summary(fixed: Fixed, out: Path) -> str:
    remaining = f"{fixed.target} rejects {_nodes(len(fixed.remaining))}"
    if fixed.lookups:
        remaining += f", and {len(fixed.lookups)} lookup{'s' * (len(fixed.lookups) != 1)}"
    if fixed.unseen:
        remaining += f"; {_nodes(len(fixed.unseen))} not seen in programs known to compile"
    outcome = f"{out}: {_nodes(fixed.changed)} replaced" if fixed.changed else "nothing to fix"
    return f"{outcome}; {remaining}"


def _nodes(count: int) -> str:
    return f"{count} node{'s' * (count != 1)}" if count else "no node"


def _next_command(fixed: Fixed, path: Path) -> tuple[Argument, ...]:
    if fixed.remaining and fixed.remaining[0].rule:
        return "explain", fixed.remaining[0].rule
    suffix = get_target(fixed.target).spec.lowering.lowered_suffix
    if not suffix:
        return "check", path, "--target", fixed.target
    return "lower", path, "--target", fixed.target, "--out", path.with_suffix(suffix)
