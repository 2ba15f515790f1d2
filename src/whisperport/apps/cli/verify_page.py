"""HTML pages of `verify`: the error of each program, and what it does to the words, with the audio."""

import base64
import io
import math
from collections.abc import Sequence
from difflib import SequenceMatcher

import numpy as np
from numpy.typing import NDArray

from whisperport.apps.cli.checks_table import measured
from whisperport.program.checks import Check
from whisperport.speech.audio.pcm import write_wav
from whisperport.speech.text import normalize
from whisperport.system.page import bar, facts, html_page, prose, table, text, verdict, within
from whisperport.verification.array_comparison import min_sqnr_of
from whisperport.verification.diagnosis.layers import (
    GOOD_DB,
    LayerComparison,
    first_bad_layer,
    layer_sentences,
)
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.report import ClipText, Report

MAX_AUDIO = 6_000_000  # characters of all clips' audio in a page: about 140 s
MAX_CLIPS = 200
FULL_DB = 140.0  # of a bar: float32 has no more

WORDS_STYLE = """
.clip { border: 1px solid var(--line); border-radius: .5rem; padding: .6rem .9rem; margin: .6rem 0;
  break-inside: avoid } .clip audio { width: 100%; height: 2.4rem; margin: .3rem 0 }
.words { font-size: 1.05rem; line-height: 1.7; overflow-wrap: anywhere } .clip .dim { font-weight: 400 }
.differ { display: inline-grid; max-width: 100%; vertical-align: middle;
  line-height: 1.25; padding: 0 .35rem; border-radius: .25rem; background: var(--bad); color: var(--on) }
.differ del { font-size: .8em } .differ ins { text-decoration: none; font-weight: 700 }
.hidden { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%) }
"""


def verify_page(report: Report, reference: Reference, command: str = "") -> str:
    """Return the page of a verification: complete, without scripts and without other files.

    Args:
        report: of the bundle.
        reference: of the bundle, for the audio.
        command: the suggested next command. Default: none.
    """
    failed = [check for check in report.checks if not check.passed]
    clips = {clip.name: clip for clip in reference.clips}
    machine = ", ".join(
        f"{name} {value}" for name, value in (*report.machine.items(), *report.versions.items())
    )
    body = (
        _verdict(report, failed, command)
        + _programs(report.checks)
        + _texts(report.texts, clips)
        + f"<details><summary><b>All {len(report.checks)} comparisons, with their rules</b></summary>\n"
        + table(
            ("level", "program", "compared", "measured", "rule", "result"),
            map(_check, report.checks),
        )
        + f"</details>\n<p class=dim>{text(machine)}</p>\n"
    )
    return html_page(f"Verification of {report.subject}", body, WORDS_STYLE)


def layers_page(layers: Sequence[LayerComparison]) -> str:
    """Return the page of a comparison of layers: complete, without scripts and without other files."""
    *_, sentence = layer_sentences(layers)
    first = first_bad_layer(layers)
    rows = [
        (
            f'<b class="bad">✕ {text(layer.name)}</b>' if layer is first else text(layer.name),
            ""
            if layer.problem
            else bar(layer.sqnr_db / FULL_DB, "bad" if layer is first else "", GOOD_DB / FULL_DB),
            "" if layer.problem else f"{layer.sqnr_db:.1f} dB",
            "" if layer.problem else _distance(layer.sqnr_db - GOOD_DB),
            text(layer.problem or ", ".join(layer.causes)),
        )
        for layer in layers
    ]
    shown = {
        "Layers": text(
            f"{len(layers)} compared, in this order: a layer carries on what is before it"
        ),
        "What to do": text(
            f"compare the weights, the scale and the zero point of {first.name} on the device with those "
            "of the program"
        )
        if first
        else "",
    }
    headings = ("layer", "", ">signal to error", ">above the limit", "causes")
    body = (
        verdict(sentence, "bad" if first else "good", facts(shown))
        + "<p>A longer bar is a smaller error. The line across it is the limit: a layer above "
        f"{GOOD_DB:g} dB is good, whatever is before it.</p>\n"
    )
    return html_page("Layers of a device", body + table(headings, rows))


def _verdict(report: Report, failed: Sequence[Check], command: str) -> str:
    total, failures = len(report.checks), report.failures()
    differ = [clip_text for clip_text in report.texts if differs(clip_text)]
    words = (
        f"{len(report.texts) - len(differ)} of {len(report.texts)} transcripts are those of float32"
    )
    shown = dict[str, str]()
    last = {"Words": text(f"{words}.") if report.texts else "", **_error_rates(report.checks)}
    nearest = min(_limited(report.checks), key=_margin, default=None)
    if not failures:
        if nearest is not None:
            last["Nearest to its limit"] = text(
                f"{nearest.program}, {nearest.what}: {measured(nearest.value)}; {nearest.rule}"
            )
        last |= {"Next": f"<code>{text(command)}</code>" if command else ""}
        return verdict(f"Verified: all {total} comparisons passed.", "good", facts(last))
    if failed:
        worst = failed[0]
        shown = {
            "What": text(f"{worst.program}, {worst.what} ({worst.level})"),
            "How much": text(measured(worst.value)),
            "Why": prose(worst.reason),
            "Rule": text(worst.rule),
        }
        sentence = f"Not verified: {len(failed)} of {total} comparisons failed."
    else:
        sentence = "Not verified: something was not compared."
        shown = {"Why": text(failures[0])}
    return verdict(sentence, "bad", facts(shown | last))


def _error_rates(checks: Sequence[Check]) -> dict[str, str]:
    rates = (check for check in checks if check.level == "words")
    return {
        check.what.capitalize(): text("; ".join(filter(None, (measured(check.value), check.rule))))
        for check in rates
    }


def _limited(checks: Sequence[Check]) -> list[Check]:
    """Return the comparisons of arrays that have an SQNR and a limit of it."""
    arrays = [check for check in checks if check.level == "arrays" and "sqnr_db" in check.value]
    return [check for check in arrays if min_sqnr_of(check.rule) is not None]


def _margin(check: Check) -> float:
    """Return how far the SQNR is above its limit, in dB; a NaN is below every limit."""
    margin = check.value["sqnr_db"] - (min_sqnr_of(check.rule) or 0.0)
    return -math.inf if math.isnan(margin) else margin


def _programs(checks: Sequence[Check]) -> str:
    """Return how far the worst comparison of each program is from its limit."""
    limited = _limited(checks)
    names = dict.fromkeys(check.program for check in limited)
    worst = [
        min((c for c in limited if c.program == name), key=lambda c: (c.passed, _margin(c)))
        for name in names
    ]
    headings = ("program", "", ">measured", ">limit", ">above the limit", "worst clip", "result")
    return (
        "<h2>Distance to the limit</h2>\n<p>The ratio of signal to error (SQNR) of each program's worst "
        "clip, against PyTorch in float32: a longer bar is a smaller error, and the line across it is the "
        f"limit. The complete bar is {FULL_DB:g} dB, as exact as float32.</p>\n"
        + table(headings, map(_program, worst))
    )


def _program(check: Check) -> tuple[str, ...]:
    sqnr_db, limit_db = check.value["sqnr_db"], min_sqnr_of(check.rule) or 0.0
    kind = "" if check.passed else "bad"
    return (
        text(check.program),
        bar(0.0 if math.isnan(sqnr_db) else sqnr_db / FULL_DB, kind, limit_db / FULL_DB),
        f"{sqnr_db:.1f} dB",
        f"{limit_db:g} dB",
        _distance(_margin(check)),
        text(check.what),
        _result(check),
    )


def _distance(margin_db: float) -> str:
    """Return how far a value is above its limit."""
    if not math.isfinite(margin_db):
        return "equal" if margin_db > 0 else "–"
    return f"{margin_db:+.1f} dB" if margin_db >= 0 else f'<b class="bad">{margin_db:+.1f} dB</b>'


def _check(check: Check) -> tuple[str, ...]:
    columns = (check.level, check.program, check.what, measured(check.value), check.rule)
    return (*map(text, columns), _result(check))


def _result(check: Check) -> str:
    return "pass" if check.passed else f'<b class="bad">FAIL</b>: {prose(check.reason)}'


def _texts(texts: Sequence[ClipText], clips: dict[str, ReferenceClip]) -> str:
    """Return the transcripts, those that differ first, with their audio as far as it fits."""
    if not texts:
        return ""
    ordered = sorted(texts, key=lambda clip_text: not differs(clip_text))[:MAX_CLIPS]
    audio, _ = within((_player(clips.get(clip_text.clip)) for clip_text in ordered), MAX_AUDIO)
    players = [*audio, *[""] * (len(ordered) - len(audio))]
    shown = (_clip(clip_text, player) for clip_text, player in zip(ordered, players, strict=True))
    remainder = len(texts) - len(ordered)
    return (
        "<h2>Words of each clip</h2>\n<p>What the bundle transcribes. Words that differ are marked; what "
        "PyTorch transcribes in float32 instead is below them.</p>\n"
        + "".join(shown)
        + (f"<p>{remainder} more clips are not shown.</p>\n" if remainder else "")
    )


def _clip(clip_text: ClipText, player: str) -> str:
    how = "differs from float32" if differs(clip_text) else "as float32"
    correct = ""
    if clip_text.correct and _normalized(clip_text, clip_text.correct) != _normalized(
        clip_text, clip_text.expected
    ):
        correct = f'<p class="dim" dir="auto">The correct transcript: {text(clip_text.correct)}</p>'
    elif clip_text.correct:
        how += ", which is correct" if not differs(clip_text) else ""
    absent = '<p class="dim">The audio is left out, to keep the page small.</p>'
    return (
        f'<section class="clip"><h3>{text(clip_text.clip)} <span class="dim">{how}</span></h3>'
        f'{player or absent}<p class="words" dir="auto">{aligned_words(clip_text)}</p>{correct}</section>\n'
    )


def _normalized(clip_text: ClipText, transcript: str) -> str:
    return normalize(transcript, split_letters=clip_text.unit == "characters")


def differs(clip_text: ClipText) -> bool:
    return _normalized(clip_text, clip_text.text) != _normalized(clip_text, clip_text.expected)


def aligned_words(clip_text: ClipText) -> str:
    """Return the words as HTML; those that differ stand above the reference's words."""
    by_letters = clip_text.unit == "characters"
    actual, expected = (
        list(t) if by_letters else t.split() for t in (clip_text.text, clip_text.expected)
    )
    a_keys, b_keys = ([normalize(word) for word in words] for words in (actual, expected))
    between, shown = "" if by_letters else " ", list[str]()
    for kind, a, b, c, d in SequenceMatcher(None, a_keys, b_keys, autojunk=False).get_opcodes():
        ours, theirs = (between.join(map(text, words)) for words in (actual[a:b], expected[c:d]))
        if kind == "equal":
            shown.append(ours)
        else:
            shown.append(
                f'<span class="differ"><ins>{ours or "–"}</ins><span class="hidden"> instead of </span>'
                f"<del>{theirs or '–'}</del></span>"
            )
    return between.join(shown) or "–"


def _player(clip: ReferenceClip | None) -> str:
    return "" if clip is None else player(clip.name, clip.samples)


def player(name: str, samples: NDArray[np.int16]) -> str:
    """Return a player with a clip's audio in it.

    Args:
        name: of the clip.
        samples: (n,) mono, 16 kHz.
    """
    file = io.BytesIO()
    write_wav(file, samples)
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<audio controls preload="metadata" aria-label="{text(name)}" '
        f'src="data:audio/wav;base64,{data}"></audio>'
    )
