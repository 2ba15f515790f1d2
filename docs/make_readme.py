"""Run the demo, and write its output and its figures into README.md.

    python docs/make_readme.py

This takes minutes. Run it on an idle machine when a model, a program or a target has changed.
"""

import contextlib
import io
import re
from collections.abc import Sequence
from pathlib import Path

from whisperport.cli.console import stages
from whisperport.cli.demo import print_rows
from whisperport.demo import DemoRow, run_demo
from whisperport.targets import get_target
from whisperport.verification import machine
from whisperport.verification.project_evidence import status_words

README = Path(__file__).parents[1] / "README.md"
TARGETS = ("onnxruntime", "xnnpack", "litert")
HEADINGS = (
    "Target",
    "What it is",
    "Status",
    "Delegated nodes",
    "Parity",
    "Tokens equal",
    "WER",
    "WER (Whisper normalizer)",
    "Encoder",
    "Token",
)


def main() -> None:
    """Run the demo and replace the marked parts of README.md."""
    with stages() as progress:
        rows = run_demo("default", Path("build/demo"), TARGETS, progress=progress)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        print_rows(rows)
    text = README.read_text(encoding="utf-8")
    for name, part in (
        ("demo", f"```text\n{printed.getvalue()}```\n\n{_where()}\n"),
        ("targets", _table(rows)),
    ):
        marked = rf"(?<=<!-- measured: {name} -->\n).*?(?=<!-- end -->)"
        found = re.search(marked, text, re.DOTALL)
        assert found, f"README.md has no mark for {name}"
        text = text[: found.start()] + part + text[found.end() :]
    README.write_text(text, encoding="utf-8")


def _where() -> str:
    on = machine()
    return f"Measured on {on['cpu']}, {on['cores']} cores, {on['python']}."


def _table(rows: Sequence[DemoRow]) -> str:
    heading = f"| {' | '.join(HEADINGS)} |\n{'|---' * len(HEADINGS)}|\n"
    return heading + "".join(_line(row) for row in rows)


def _line(row: DemoRow) -> str:
    spec = get_target(row.target).spec
    equal, of = row.tokens_equal
    cells = (
        f"`{spec.name}`",
        spec.summary,
        status_words(spec.name),
        f"{row.delegated} of {row.delegated + row.undelegated}",
        f"{row.sqnr_db:.0f} dB",
        f"{equal} of {of} clips",
        f"{row.errors.rate:.1%}",
        f"{row.whisper_errors.rate:.1%}",
        f"{row.encoder_ms:.1f} ms",
        f"{row.token_ms:.2f} ms",
    )
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    main()
