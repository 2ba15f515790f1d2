"""The report about an archive: one HTML file without other files and without a network."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

from whisperport.archive.output_folder import GENERATOR, REPORT, SUMMARY
from whisperport.archive.rows import MARKS, Row
from whisperport.archive.summary import ArchiveSummary, cause_of
from whisperport.system.atomic import write_atomic
from whisperport.system.page import html_page, table, text, within

MAX_SEARCHED = 30_000_000  # characters of rows in the page; a browser is slow with more

_STYLE = """
td.n { width: 1% }
input { font: inherit; width: 100%; padding: .4rem }
.error { color: var(--bad) } .mark { color: var(--mark) }
"""

# `textContent` only: nothing of a row is ever read as HTML.
_SCRIPT = """
const rows = JSON.parse(document.getElementById('rows').textContent);
const table = document.getElementById('found'), count = document.getElementById('count');
const cell = (line, text, kind) => {
  const one = line.insertCell(); one.textContent = text; one.className = kind; };
const show = () => {
  const words = document.getElementById('search').value.toLowerCase().split(/\\s+/).filter(Boolean);
  const found = rows.filter(row => words.every(word => row.join(' ').toLowerCase().includes(word)));
  table.replaceChildren();
  for (const [id, duration, language, text, marks, error] of found.slice(0, 200)) {
    const line = table.insertRow();
    cell(line, id, 'id'); cell(line, duration, 'n'); cell(line, language, '');
    cell(line, error || text, error ? 'error' : ''); cell(line, marks, 'mark');
  }
  count.textContent = found.length + ' of ' + rows.length + ' files' +
    (found.length > 200 ? ', the first 200 are shown' : '');
};
let timer = 0;
document.getElementById('search').addEventListener('input', () => {
  clearTimeout(timer); timer = setTimeout(show, 150); });
show();
"""


def write_report(rows: Iterable[Row], folder: Path, summary: ArchiveSummary) -> None:
    """Write `report.html` and `summary.json`.

    Args:
        rows: with the columns `id`, `path`, `duration`, `language`, `text`, `marks` and `error`.
        folder: output of the archive.
        summary: of the same rows.

    Raises:
        WhisperportError: a file cannot be written.
    """
    values = {"generator": GENERATOR, **asdict(summary), "speed": summary.speed}
    write_atomic(folder / SUMMARY, f"{json.dumps(values, indent=1)}\n".encode())
    write_atomic(folder / REPORT, report(rows, summary).encode())


def report(rows: Iterable[Row], summary: ArchiveSummary) -> str:
    """Return the page."""
    searched, n_missing = _searched(rows)
    missing = f"<p>{n_missing:,} more rows are in the Parquet files only.</p>" if n_missing else ""
    body = (
        f"{_totals(summary)}\n"
        f"{_counts('Errors by cause', summary.errors)}{_counts('Languages', summary.languages)}"
        f"{_counts('Quality marks', summary.marks, MARKS)}"
        '<h2>Search</h2>\n<label for="search">Words in the name, the text, the marks or the error</label>'
        '<input id="search" type="search"><p id="count" role="status"></p>\n'
        '<div class="wide" tabindex="0"><table><thead>'
        "<tr><th>file<th>seconds<th>language<th>text or error<th>marks</thead>"
        f'<tbody id="found"></tbody></table></div>{missing}\n'
        f'<script type="application/json" id="rows">{searched}</script>\n'
    )
    return html_page(f"Archive: {summary.files:,} files", body, _STYLE, _SCRIPT)


def _totals(summary: ArchiveSummary) -> str:
    facts = {
        "Model": summary.model,
        "Audio": _duration(summary.audio_s),
        "Failed": f"{summary.failed:,} files",
        "Last run": f"{summary.run_files:,} files, {_duration(summary.run_audio_s)} of audio in "
        f"{_duration(summary.run_seconds)}: {summary.speed:,.1f} times as fast as real time",
        "Bundle": summary.bundle_sha256,
        "Options": summary.options_sha256,
        "Versions": ", ".join(f"{name} {one}" for name, one in summary.versions.items()),
    }
    return table(("", ""), ((text(name), text(value)) for name, value in facts.items()))


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} hours" if seconds >= 3600 else f"{seconds:.0f} seconds"


def _counts(title: str, counts: Mapping[str, int], about: Mapping[str, str] | None = None) -> str:
    """Return a table of numbers of files; empty if there is nothing to count."""
    if not counts:
        return ""
    rows = (
        (f"{count:,}", text(name), text((about or {}).get(name, "")))
        for name, count in counts.items()
    )
    return f"<h2>{title}</h2>\n{table(('>files', 'name', ''), rows)}\n"


def _searched(rows: Iterable[Row]) -> tuple[str, int]:
    """Return the rows as JSON that can stand in a script element, and how many do not fit."""
    # Without `<`, nothing in it can end the element or begin a comment.
    pieces = (json.dumps(_shown(row)).replace("<", "\\u003c") for row in rows)
    found, n_missing = within(pieces, MAX_SEARCHED)
    return f"[{','.join(found)}]", n_missing


def _shown(row: Row) -> list[str]:
    return [
        row["id"],
        "" if row["duration"] is None else f"{row['duration']:.1f}",
        row["language"] or "",
        row["text"] or "",
        ", ".join(row["marks"]),
        cause_of(row) if row["error"] else "",
    ]
