"""The report about an archive: one HTML file without other files and without a network."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from urllib.parse import quote

from whisperport.apps.archive.output_folder import GENERATOR, REPORT, SUMMARY, check_folder
from whisperport.apps.archive.rows import CODES, MARKS, Row
from whisperport.apps.archive.summary import ArchiveSummary
from whisperport.system.atomic import write_atomic
from whisperport.system.page import facts, html_page, prose, table, text, verdict, within
from whisperport.system.printable import printable

MAX_SEARCHED = 30_000_000  # characters of rows in the page; a browser is slow with more
REPORTED = (*("id", "path", "duration", "language", "confidence", "text", "marks", "error"),)
_NO_AUDIO = ("missing", "not-a-file", "unreadable")
MEDIA = "'self' file: data:"  # the files beside the page, wherever it is opened

_STYLE = """
input { font: inherit; width: 100%; padding: .5rem .6rem; border: 1px solid var(--line);
  border-radius: .4rem; color: inherit; background: var(--card) }
#found { list-style: none; margin: 0; padding: 0 }
#found > li { display: grid; grid-template-columns: minmax(0, 19rem) minmax(0, 1fr); gap: .3rem 1.5rem;
  padding: .8rem 0; border-bottom: 1px solid var(--line) }
#found a { color: inherit; font-weight: 600; overflow-wrap: break-word }
#found p { margin: 0; overflow-wrap: break-word; max-width: 42rem }
#found p + p { margin-top: .3rem } .small { font-size: .85rem }
#found audio { width: 100%; height: 2.2rem; margin-top: .3rem }
#found button { font: inherit; font-size: .85rem; color: inherit; background: var(--card);
  border: 1px solid var(--line); border-radius: .4rem; padding: .15rem .7rem; margin-top: .3rem;
  display: block; cursor: pointer }
.tables { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr));
  gap: 0 2.5rem; align-items: start } .tables .n { width: 4rem }
#found .error { color: var(--bad) } #found .mark { color: var(--mark) }
@media (max-width: 40rem) { #found > li { grid-template-columns: minmax(0, 1fr) } }
"""

# `textContent` only: nothing of a row is ever read as HTML. A name may break after a separator.
_SCRIPT = """
const rows = JSON.parse(document.getElementById('rows').textContent);
rows.sort((one, other) => one[0] < other[0] ? -1 : 1);
const list = document.getElementById('found'), count = document.getElementById('count');
const add = (parent, kind, text, style) => {
  const one = document.createElement(kind); one.textContent = text;
  if (style) one.className = style;
  parent.append(one); return one; };
const named = (parent, name, href) => {
  const link = add(parent, href ? 'a' : 'strong', '');
  if (href) link.href = href;
  for (const piece of name.split(/(?<=[_-])/)) link.append(piece, document.createElement('wbr')); };
const playable = (parent, name, href) => {
  const button = add(parent, 'button', 'Play');
  button.setAttribute('aria-label', 'Play ' + name);
  button.addEventListener('click', () => {
    for (const other of document.querySelectorAll('audio')) other.pause();
    const audio = document.createElement('audio');
    audio.controls = true; audio.src = href; button.replaceWith(audio);
    audio.addEventListener('error', () => audio.replaceWith('The browser cannot play this file.'));
    audio.play().catch(() => {}); }); };
const show = () => {
  const words = document.getElementById('search').value.toLowerCase().split(/\\s+/).filter(Boolean);
  const found = rows.filter(row => words.every(word => row.join(' ').toLowerCase().includes(word)));
  list.replaceChildren();
  for (const [id, facts, text, marks, code, error, href] of found.slice(0, 200)) {
    const line = add(list, 'li', ''), file = add(line, 'div', ''), result = add(line, 'div', '');
    const end = id.lastIndexOf('/') + 1;
    named(file, id.slice(end) || id, href);
    if (end) add(file, 'p', id.slice(0, end), 'dim small');
    if (facts) add(file, 'p', facts, 'dim small');
    if (href && (text || !code)) playable(file, id, href);
    if (code) add(result, 'p', code + ': ' + error, 'error');
    if (text) add(result, 'p', text);
    if (marks) add(result, 'p', marks, 'mark small');
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
        rows: with the columns of `REPORTED`.
        folder: output of the archive.
        summary: of the same rows.

    Raises:
        UsageError: a file of the user has appeared in the place of one of them.
        WhisperportError: a file cannot be written.
    """
    values = {"generator": GENERATOR, **asdict(summary), "speed": summary.speed}
    files = {
        SUMMARY: f"{json.dumps(values, indent=1)}\n",
        REPORT: report(rows, folder, summary),
    }
    for name, content in files.items():
        check_folder(folder)
        write_atomic(folder / name, content.encode())


def report(rows: Iterable[Row], folder: Path, summary: ArchiveSummary) -> str:
    """Return the page, with links to the audio from the folder that it will be in."""
    searched, n_missing = _searched(rows, folder.absolute())
    missing = f"<p>{n_missing:,} more rows are in the Parquet files only.</p>" if n_missing else ""
    counts = (
        _counts("Errors", "code", summary.errors, CODES),
        _counts("Quality marks", "mark", summary.marks, MARKS),
        _counts("Languages", "language", summary.languages, {}),
    )
    body = (
        f'{_first(summary)}<div class="tables">{"".join(counts)}</div>\n'
        '<h2>Files</h2>\n<p><label for="search">Search for words in the name, the text, the marks or the '
        'error</label></p>\n<input id="search" type="search"><p id="count" role="status"></p>\n'
        f'<ul id="found"></ul>{missing}\n{_details(summary)}'
        f'<script type="application/json" id="rows">{searched}</script>\n'
    )
    return html_page(f"Archive: {summary.files:,} files", body, _STYLE, _SCRIPT, MEDIA)


def _first(summary: ArchiveSummary) -> str:
    """Return what a reader sees first."""
    n_transcribed = summary.files - summary.failed
    sentence = f"{n_transcribed:,} of {summary.files:,} files have been transcribed"
    if not summary.failed:
        sentence = f"All {summary.files:,} files have been transcribed"
    entries = {
        "Audio": text(_duration(summary.audio_s)),
        "Model": text(summary.model),
        "Failed": f"{summary.failed:,} files; <code>--retry-failed</code> transcribes them again"
        if summary.failed
        else "",
        "Last run": text(
            f"{summary.run_files:,} files, {_duration(summary.run_audio_s)} of audio in "
            f"{_duration(summary.run_seconds)}: {summary.speed:,.1f} times as fast as real time"
            if summary.run_files
            else "no files: all had a row"
        ),
    }
    return verdict(sentence, "mark" if summary.failed else "good", facts(entries))


def _details(summary: ArchiveSummary) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in summary.versions.items())
    entries = {
        "Bundle, SHA-256": f"<code>{text(summary.bundle_sha256)}</code>",
        "Options, SHA-256": f"<code>{text(summary.options_sha256)}</code>",
        "Versions": text(versions),
    }
    return f"<h2>Made with</h2>\n{facts(entries)}"


def _duration(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} hours" if seconds >= 3600 else f"{seconds:.0f} seconds"


def _counts(title: str, kind: str, counts: Mapping[str, int], meanings: Mapping[str, str]) -> str:
    """Return a table of numbers of files; empty if there is nothing to count."""
    if not counts:
        return ""
    rows = (
        (
            f"{count:,}",
            f"{text(name)}<br><span class='dim small'>{prose(meanings[name])}</span>"
            if name in meanings
            else text(name),
        )
        for name, count in counts.items()
    )
    return f"<section><h2>{title}</h2>\n{table(('>files', kind), rows)}</section>\n"


def _searched(rows: Iterable[Row], folder: Path) -> tuple[str, int]:
    """Return the rows as JSON that can stand in a script element, and how many do not fit."""
    # Without `<`, nothing in it can end the element or begin a comment.
    pieces = (json.dumps(_shown(row, folder)).replace("<", "\\u003c") for row in rows)
    fitting, n_missing = within(pieces, MAX_SEARCHED)
    return f"[{','.join(fitting)}]", n_missing


def _shown(row: Row, folder: Path) -> list[str]:
    error = row["error"] or {"code": "", "what": "", "why": ""}
    confidence = row["confidence"]
    shown = (
        "" if row["duration"] is None else f"{row['duration']:.1f} s",
        row["language"] or "",
        "" if confidence is None else f"confidence {confidence:.0%}",
    )
    return [
        printable(row["id"]),
        " · ".join(part for part in shown if part),
        row["text"] or "",
        ", ".join(row["marks"]),
        error["code"],
        ": ".join(part for part in (error["what"], error["why"]) if part),
        "" if error["code"] in _NO_AUDIO else audio_link(row["path"], folder),
    ]


def audio_link(path: str, folder: Path) -> str:
    """Return the address of a file in a page in `folder`; empty if its name is not UTF-8.

    It is relative, so that it holds on this machine, and where page and audio are moved or served together.
    """
    if "\\udc" in path:  # see `stored`
        return ""
    return f"./{quote(os.path.relpath(path, folder))}"
