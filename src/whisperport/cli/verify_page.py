"""HTML pages of `verify`: the error of each program, and what it does to the words, with the audio."""

import base64
import io
import wave
from collections.abc import Iterator, Sequence
from difflib import SequenceMatcher

from whisperport.audio import SAMPLE_RATE
from whisperport.cli.checks_table import measured
from whisperport.diagnosis.layers import LayerComparison, layer_sentences
from whisperport.program.checks import Check
from whisperport.system.page import bar, facts, html_page, prose, table, text, verdict, within
from whisperport.text import normalize
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.report import ClipText, Report

MAX_AUDIO = 6_000_000  # characters of all clips' audio in a page: about 140 s
MAX_CLIPS = 200
FULL_DB = 140.0  # of a bar: float32 has no more

_STYLE = """
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
        f"{name} {one}" for name, one in (*report.machine.items(), *report.versions.items())
    )
    body = (
        _verdict(report, failed, command)
        + "<h2>Error of each program</h2>\n<p>The ratio of signal to error of its worst clip, against "
        "PyTorch in float32: a longer bar is a smaller error.</p>\n"
        + table(
            ("program", "worst clip", "", "measured", "result"),
            map(_program, _worst(report.checks)),
        )
        + _texts(report.texts, clips)
        + f"<details><summary><b>All {len(report.checks)} comparisons, with their rules</b></summary>\n"
        + table(
            ("level", "program", "compared", "measured", "rule", "result"),
            map(_check, report.checks),
        )
        + f"</details>\n<p class=dim>{text(machine)}</p>\n"
    )
    return html_page(f"Verification of {report.subject}", body, _STYLE)


def layers_page(layers: Sequence[LayerComparison]) -> str:
    """Return the page of a comparison of layers: complete, without scripts and without other files."""
    *_, sentence = layer_sentences(layers)
    rows = [
        (
            text(layer.name),
            bar(0.0 if layer.problem else layer.sqnr_db / FULL_DB),
            "" if layer.problem else f"{layer.sqnr_db:.1f} dB",
            text(layer.problem or ", ".join(layer.causes)),
        )
        for layer in layers
    ]
    kind = "bad" if sentence.startswith("The error begins") else "good"
    headings = ("layer", "", ">signal to error", "causes")
    return html_page("Layers of a device", verdict(sentence, kind, "") + table(headings, rows))


def _verdict(report: Report, failed: Sequence[Check], command: str) -> str:
    total, failures = len(report.checks), report.failures()
    differ = [one for one in report.texts if _differs(one)]
    words = (
        f"{len(report.texts) - len(differ)} of {len(report.texts)} transcripts are those of float32"
    )
    shown = dict[str, str]()
    last = {"Words": text(f"{words}.") if report.texts else ""}
    if not failures:
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


def _worst(checks: Sequence[Check]) -> Iterator[Check]:
    """Yield the worst comparison of arrays of each program."""
    arrays = [check for check in checks if check.level == "arrays" and "sqnr_db" in check.value]
    for program in dict.fromkeys(check.program for check in arrays):
        own = [check for check in arrays if check.program == program]
        yield min(own, key=lambda check: (check.passed, check.value["sqnr_db"]))


def _program(check: Check) -> tuple[str, ...]:
    filled = bar(check.value["sqnr_db"] / FULL_DB, "" if check.passed else "bad")
    return (
        text(check.program),
        text(check.what),
        filled,
        text(measured(check.value)),
        _result(check),
    )


def _check(check: Check) -> tuple[str, ...]:
    columns = (check.level, check.program, check.what, measured(check.value), check.rule)
    return (*map(text, columns), _result(check))


def _result(check: Check) -> str:
    return "pass" if check.passed else f'<b class="bad">FAIL</b>: {prose(check.reason)}'


def _texts(texts: Sequence[ClipText], clips: dict[str, ReferenceClip]) -> str:
    """Return the transcripts, those that differ first, with their audio as far as it fits."""
    if not texts:
        return ""
    ordered = sorted(texts, key=lambda one: not _differs(one))[:MAX_CLIPS]
    audio, _ = within((_audio(clips.get(one.clip)) for one in ordered), MAX_AUDIO)
    players = [*audio, *[""] * (len(ordered) - len(audio))]
    shown = (_clip(one, player) for one, player in zip(ordered, players, strict=True))
    more = len(texts) - len(ordered)
    return (
        "<h2>Words of each clip</h2>\n<p>What the bundle transcribes. Words that differ are marked; what "
        "PyTorch transcribes in float32 instead is below them.</p>\n"
        + "".join(shown)
        + (f"<p>{more} more clips are not shown.</p>\n" if more else "")
    )


def _clip(found: ClipText, player: str) -> str:
    differs = "differs from float32" if _differs(found) else "as float32"
    correct = ""
    if found.correct and _normalized(found, found.correct) != _normalized(found, found.expected):
        correct = f'<p class="dim" dir="auto">The correct transcript: {text(found.correct)}</p>'
    elif found.correct:
        differs += ", which is correct" if not _differs(found) else ""
    absent = '<p class="dim">The audio is left out, to keep the page small.</p>'
    return (
        f'<section class="clip"><h3>{text(found.clip)} <span class="dim">{differs}</span></h3>'
        f'{player or absent}<p class="words" dir="auto">{_aligned(found)}</p>{correct}</section>\n'
    )


def _normalized(found: ClipText, transcript: str) -> str:
    return normalize(transcript, split_letters=found.unit == "characters")


def _differs(found: ClipText) -> bool:
    return _normalized(found, found.text) != _normalized(found, found.expected)


def _aligned(found: ClipText) -> str:
    """Return the words of the bundle as HTML; those that differ stand above the reference's words."""
    by_letters = found.unit == "characters"
    actual, expected = (list(t) if by_letters else t.split() for t in (found.text, found.expected))
    a_keys, b_keys = ([normalize(word) for word in words] for words in (actual, expected))
    between, shown = "" if by_letters else " ", list[str]()
    for kind, a, b, c, d in SequenceMatcher(None, a_keys, b_keys, autojunk=False).get_opcodes():
        ours, theirs = (between.join(map(text, one)) for one in (actual[a:b], expected[c:d]))
        if kind == "equal":
            shown.append(ours)
        else:
            shown.append(
                f'<span class="differ"><ins>{ours or "–"}</ins><span class="hidden"> instead of </span>'
                f"<del>{theirs or '–'}</del></span>"
            )
    return between.join(shown) or "–"


def _audio(clip: ReferenceClip | None) -> str:
    """Return a player with a clip's audio in it; empty: there is none."""
    if clip is None:
        return ""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(SAMPLE_RATE)
        out.writeframes(clip.samples.astype("<i2").tobytes())
    data = base64.b64encode(file.getvalue()).decode()
    return (
        f'<audio controls preload="metadata" aria-label="{text(clip.name)}" '
        f'src="data:audio/wav;base64,{data}"></audio>'
    )
