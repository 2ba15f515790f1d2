"""Self-contained HTML pages in one file, for light and dark screens and for paper.

A page has no third-party scripts and needs no network. Functions that return HTML escape their arguments,
except those whose description says that they are HTML.
"""

import base64
import hashlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from whisperport.system.printable import printable
from whisperport.system.regular_file import other_kind

LABELLED = 0.05  # of a strip; a shorter part has no room for its label
MAX_TEXT = 1000  # characters of one text; names in files of unknown origin can be long
SUBGRAPH_COLORS = 5  # neighbours have different ones

HEAD_BYTES = 1024  # of a page; its generator is within them
_DOCTYPE = "<!doctype html>"
_GENERATOR = '<meta name="generator" content="whisperport">'

_STYLE = """
:root { color-scheme: light dark; --bar: #4a7ebb; --rest: #4a7ebb55; --line: #8884;
  --ink: light-dark(#16181d, #e9ebef); --dim: light-dark(#566070, #a6afbd);
  --paper: light-dark(#fff, #14161a); --card: light-dark(#f3f5f8, #1e2127);
  --bad: light-dark(#c0392b, #ff8a7a); --good: light-dark(#217a45, #63c98a);
  --mark: light-dark(#a66300, #f0b35a); --on: light-dark(#fff, #14161a) }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem auto; max-width: 68rem; padding: 0 1rem;
  color: var(--ink); background: var(--paper) }
h1 { font-size: 1.15rem; font-weight: 600; margin: 0 0 .8rem; overflow-wrap: anywhere }
h2 { font-size: 1.25rem; margin: 2.4rem 0 .6rem; overflow-wrap: anywhere }
h3 { font-size: .95rem; margin: 0 0 .3rem; overflow-wrap: anywhere }
p { margin: .5rem 0; overflow-wrap: anywhere }
.dim, dt { color: var(--dim) } .good { color: var(--good) } .bad { color: var(--bad) }
b.mark { color: var(--mark) }
table { border-collapse: collapse; width: 100% } th { text-align: left }
td, th { padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top }
td { overflow-wrap: anywhere; min-width: 5.5rem } td:first-child { min-width: 7.4rem }
td.n { min-width: 0 } .wide { overflow-x: auto }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
th.n { white-space: normal }
code { font: .9em ui-monospace, monospace; background: var(--card); padding: .1em .4em;
  border-radius: .25rem; overflow-wrap: anywhere }
.bar { background: var(--line); height: .7rem; min-width: 4rem; border-radius: .2rem; overflow: hidden;
  position: relative; margin-top: .4rem } td > .bar { min-width: min(10rem, 15vw) }
.bar > b { position: absolute; inset: 0 auto; width: 3px; margin-left: -1px; background: var(--ink);
  outline: 1px solid var(--paper) }
.bar > i { display: block; background: var(--bar); height: 100% } .bar.bad > i { background: var(--bad) }
.bar.mark > i, .bar.hint > i { background: var(--mark) }
.strip { display: flex; height: 3.4rem; margin: .5rem 0; border-radius: .35rem; overflow: hidden;
  background: var(--rest) }
.strip > span { position: relative; overflow: hidden; white-space: nowrap; font-size: 12px;
  line-height: 1.35; padding: .35rem 0; border-right: 1px solid var(--paper) }
.strip > span > i { background: light-dark(#7aa3d6, #3c6aa5); position: absolute; inset: 0 auto 0 0 }
.strip b { position: relative; padding: 0 .45rem; display: block; font-weight: 400;
  overflow: hidden; text-overflow: ellipsis }
.strip .bad b { font-weight: 700 }
.fill { color: var(--on) } .bad.fill { background: var(--bad) } .mark.fill { background: var(--mark) }
.s0 { background: light-dark(#c3daf5, #1f4468) } .s1 { background: light-dark(#c2e8e0, #14504a) }
.s2 { background: light-dark(#dcd3f6, #42366f) } .s3 { background: light-dark(#d3e9c0, #34501f) }
.s4 { background: light-dark(#c9e3ee, #1d4f63) } .idle { background: light-dark(#e2e5ea, #33373f) }
.verdict { background: var(--card); border-left: .45rem solid var(--good); border-radius: .4rem;
  padding: 1rem 1.3rem; margin: .6rem 0 1.2rem }
.verdict.bad { border-color: var(--bad) } .verdict.bad, .verdict.good { color: inherit }
.verdict.mark { border-color: var(--mark) }
.verdict > .big { font-size: clamp(1.25rem, 3.2vw, 1.75rem); line-height: 1.25; font-weight: 650;
  margin: 0 0 .6rem; overflow-wrap: anywhere } .verdict code { background: var(--paper) }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; margin: .6rem 0 0 }
dd { margin: 0; overflow-wrap: anywhere; min-width: 0 }
summary { cursor: pointer } summary:focus-visible { outline: 2px solid var(--bar); outline-offset: 2px }
@media (max-width: 40rem) { dl { grid-template-columns: 1fr } dd { margin-bottom: .4rem } }
@media print { body { margin: 0; max-width: none } h2 { break-after: avoid }
  tr, .verdict { break-inside: avoid } * { print-color-adjust: exact }
  details:not(.node)::details-content { content-visibility: visible; height: auto } }
"""


def html_page(
    title: str, body: str, style: str = "", script: str = "", media: str = "data:"
) -> str:
    """Return a complete page. Its policy allows this style and script, and nothing from a network.

    Args:
        title: text of the title and of the first heading.
        body: HTML below the heading.
        style: further rules of its style sheet.
        script: runs after the body was read. Default: none.
        media: sources of audio that its policy allows.
    """
    shown = text(title)
    policy = f"default-src 'none'; style-src 'unsafe-inline'; media-src {media}"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        policy += f"; script-src 'sha256-{digest}'"
        body += f"<script>{script}</script>"
    return (
        f'{_DOCTYPE}\n<html lang="en"><head><meta charset="utf-8">{_GENERATOR}<title>{shown}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{_STYLE}{style}</style></head>\n<body><main><h1>{shown}</h1>\n{body}</main></body></html>\n"
    )


def is_page(path: str | os.PathLike[str]) -> bool:
    """Return whether a path is a regular file, or a link to one, that begins as `html_page` does.

    Nothing is raised: a file that cannot be read is no page of whisperport, and pages of versions before
    this mark are none either.
    """
    if other_kind(path):  # opening a pipe would block
        return False
    try:
        with Path(path).open("rb") as file:
            head = file.read(HEAD_BYTES)
    except (OSError, ValueError):  # ValueError: a NUL byte in the path
        return False
    return head.startswith(_DOCTYPE.encode()) and _GENERATOR.encode() in head


def text(value: object) -> str:
    """Return text of any origin as HTML: markup and control characters are visible, the end is cut off."""
    shown = printable(str(value))
    return escape(shown if len(shown) <= MAX_TEXT else f"{shown[: MAX_TEXT - 1]}…")


def prose(sentences: str) -> str:
    """Return text as `text` does; what stands between backticks is code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", text(sentences))


def percent(share: float) -> str:
    """Return a share from 0 to 1 in words."""
    return "<0.1%" if 0 < share < 0.001 else f"{share:.1%}"


def bar(share: float, kind: str = "", limit: float | None = None) -> str:
    """Return a bar with a filled part.

    Args:
        share: of the bar that is filled; below 0 counts as 0, and above 1 as 1.
        kind: class of the style sheet, such as "bad".
        limit: where a line stands across the bar, 0 to 1. Default: None, no line.
    """
    line = "" if limit is None else f'<b style="left:{_within_bar(limit):.1%}"></b>'
    return f'<div class="bar {kind}"><i style="width:{_within_bar(share):.1%}"></i>{line}</div>'


def _within_bar(share: float) -> float:
    return min(1.0, max(0.0, share))


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a strip."""

    share: float  # of the strip, 0 to 1
    label: str  # a line break separates two lines
    kind: str  # class of the style sheet; "fill" makes "bad" and "mark" a background
    filled: float = 0.0  # of the part, 0 to 1, in a darker color


def strip(parts: Iterable[Part], about: str, width: float = 1.0) -> str:
    """Return a bar of several parts with their labels.

    Args:
        parts: from left to right.
        about: what it shows, for readers who do not see it.
        width: of the page, 0 to 1.
    """
    return (
        f'<div class="strip" role="img" aria-label="{text(about)}" style="width:{width:.1%}">'
        f"{''.join(map(_part, parts))}</div>\n"
    )


def _part(part: Part) -> str:
    shown = part.label.split("\n") if part.share >= LABELLED else ()
    filled = f'<i style="width:{part.filled:.1%}"></i>' if part.filled else ""
    return (
        f'<span class="{part.kind}" style="width:{part.share:.3%}" title="{text(part.label)}">{filled}'
        f"{''.join(f'<b>{text(line)}</b>' for line in shown)}</span>"
    )


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table.

    Args:
        headings: text of each column; one that begins with ">" is of numbers. Empty: no line of headings.
        rows: the cells of each, as HTML.
    """
    kinds = [' class="n"' if heading.startswith(">") else "" for heading in headings]
    names = [heading.removeprefix(">") for heading in headings]
    cells = (
        f"<{'th' if name else 'td'}{kind}>{text(name)}"  # an empty cell is no heading
        for kind, name in zip(kinds, names, strict=True)
    )
    head = f"<thead><tr>{''.join(cells)}</thead>" if any(headings) else ""
    lines = (
        f"<tr>{''.join(f'<td{kind}>{cell}' for kind, cell in zip(kinds, row, strict=True))}\n"
        for row in rows
    )
    return f'<div class="wide" tabindex="0"><table>{head}<tbody>{"".join(lines)}</tbody></table></div>\n'


def facts(entries: Mapping[str, str]) -> str:
    """Return a list of names, as text, with what they mean, as HTML; empty ones are left out."""
    shown = (f"<dt>{text(name)}<dd>{html}" for name, html in entries.items() if html)
    return f"<dl>{''.join(shown)}</dl>\n"


def verdict(sentence: str, kind: str, html: str) -> str:
    """Return the box at the top of a page, which states the result.

    Args:
        sentence: the result, as text.
        kind: "bad", "mark" or "good".
        html: HTML that follows the sentence.
    """
    return f'<div class="verdict {kind}"><p class="big">{text(sentence)}</p>\n{html}</div>\n'


def within(pieces: Iterable[str], limit: int) -> tuple[list[str], int]:
    """Return the pieces of HTML or JSON that fit in a number of characters, and how many do not."""
    fitting, size, n_missing = list[str](), 0, 0
    for piece in pieces:
        size += len(piece)
        if size <= limit:
            fitting.append(piece)
        else:
            n_missing += 1
    return fitting, n_missing
