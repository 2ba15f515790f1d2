"""The answers of `judge` in words, and its HTML page: the answers first, then words, rules and weights."""

from collections.abc import Sequence
from dataclasses import replace

from whisperport.apps.cli.compare_page import COMPARE_STYLE, compared_layers, decibels, error_text
from whisperport.apps.cli.console import shortened
from whisperport.apps.cli.verify_page import (
    MAX_AUDIO,
    MAX_CLIPS,
    WORDS_STYLE,
    aligned_words,
    differs,
    player,
)
from whisperport.build.judge.graphs import is_cause
from whisperport.build.judge.identity import Identity
from whisperport.build.judge.judge import WEIGHTS, AppRun, Judgement
from whisperport.build.judge.layers import ComparedGraph
from whisperport.build.layouts.rules import LayoutRule, Problem
from whisperport.speech.audio.pcm import to_int16
from whisperport.system.page import facts, html_page, prose, table, text, verdict, within
from whisperport.verification.clips import Clip

MOST = 4  # weights, problems or clips that an answer names
MAX_REASON = 240  # characters of what is wrong, in the first sentence
MAX_CHARACTERS = 400  # of a text: a loop has thousands
MAX_RULES = 500_000  # characters of the broken rules
MAX_ROWS = 500  # of a table
NPU = "NPU"  # in the name of a device, or in the text of a rule


def verdict_sentence(judgement: Judgement) -> str:
    """Say in one sentence whether something is wrong, and what."""
    identity, runs = judgement.identity, judgement.runs
    causes = []
    if wrong := _wrong_codes(judgement, of_npu=False):
        causes.append(wrong)
    if identity is not None and not identity:
        causes.append(_changed_weights(judgement, identity))
    elif cause := _computed(judgement):
        causes.append(cause)
    if wrong := _wrong_codes(judgement, of_npu=True):
        causes.append(wrong)
    lost = _first_of(judgement, [p for p in judgement.problems if p.is_warning])
    if lost and not causes and not all(runs):  # what an app loses may be why its words differ
        causes.append(lost)
    if failed := [run for run in runs if run.failed]:
        # Why weights could not be read is an answer of its own.
        is_told = causes or failed[0].app == WEIGHTS
        why = "" if is_told else f": {shortened(failed[0].reason, MAX_REASON)}"
        causes.append(f"{_listed([run.name for run in failed])} failed{why}")
    if lossy := [run.name for run in runs if not run and not run.failed]:
        causes.append(f"{_listed(lossy)} returned something else than the checkpoint emits")
    if not causes and not all(judgement.graphs):
        causes.append("the graphs compute something else than the checkpoint")
    if causes:
        return f"Wrong: {'; '.join(causes)}."
    begin, no_rule, nothing = "", "No rule", "Nothing"
    if lost:
        begin, no_rule, nothing = f"Something is lost: {lost}. ", "No other rule", "Nothing else"
    if identity is None and not any(run.checks for run in runs):
        weights = (
            f"As far as is known, {judgement.named}; words"
            if judgement.named
            else "Weights and words"
        )
        return f"{begin}{no_rule} is broken. {weights} were not compared."
    words = "its graphs compute the same" if judgement.graphs else "no app was run"
    if any(run.words is not None for run in runs):
        words = "every app that ran returned what the checkpoint emits"
        if judgement.layout.emitted is not None:
            words = "its graphs, decoded here, emit the same words"
    compared = "weights were not compared with" if identity is None else "the weights are those of"
    return f"{begin}{nothing} is wrong: {compared} {judgement.checkpoint}, and {words}."


def _changed_weights(judgement: Judgement, identity: Identity) -> str:
    """Return how many weights differ, and how: all together if there is one reason, else the first."""
    if not identity.changed:
        return identity.exchanged_files
    first, n_changed = identity.changed[0], len(identity.changed)
    what = first.label if n_changed == 1 else f"{n_changed} weights"
    differ = f"{what} {'is' if n_changed == 1 else 'are'} not as in {judgement.checkpoint}"
    such = "" if n_changed == 1 else f"such as {first.label}, "
    reason = first.reason or first.difference
    whole = identity.replaced or identity.adapted or such + reason
    return f"{differ}: {shortened(whole, MAX_REASON)}"


def _wrong_codes(judgement: Judgement, *, of_npu: bool) -> str:
    """Return the first broken rule and how it is broken, and how many more there are; empty: none.

    Args:
        judgement: of the files.
        of_npu: whether rules are counted that matter to an NPU only, or the others. What is computed
            wrongly often breaks the form that an NPU needs, too.
    """
    rules = _rules(judgement)
    wrong = (p for p in judgement.problems if not p.is_warning)
    return _first_of(judgement, [p for p in wrong if (NPU in rules[p.code].text) == of_npu])


def _first_of(judgement: Judgement, problems: Sequence[Problem]) -> str:
    """Return the first of problems, and how many more rules are broken; empty: there is none."""
    if not problems:
        return ""
    first, n_rules = problems[0], len({problem.code for problem in problems})
    further = f", and {n_rules - 1} more broken rules" if n_rules > 1 else ""
    reason = shortened(f"{first.file}: {first.reason}", MAX_REASON)
    return f"{first.code} ({_rules(judgement)[first.code].title}){further}: {reason}"


def _computed(judgement: Judgement) -> str:
    """Return what graphs compute in place of the checkpoint's logits, or where; empty: it is not known."""
    checks = (check for run in judgement.runs for check in run.checks)
    reason = next((c.reason for c in checks if c.level == "arrays" and not c.passed), "")
    causes = [f"{_place(graph)}: {graph.cause}" for graph in judgement.graphs if graph.cause]
    return next(filter(None, [reason if is_cause(reason) else "", *causes]), reason)


def _place(graph: ComparedGraph) -> str:
    """Return the part of the model, and its first layer that diverges."""
    compared = graph.programs
    if compared is None or compared.first is None:
        return graph.part
    return f"{graph.part}, {compared.values[compared.first].name}"


def answers(judgement: Judgement) -> dict[str, list[str]]:
    """Return each question with the sentences that answer it; without any, it does not apply."""
    further = [name for name in judgement.precisions if name != judgement.precision]
    precision = judgement.precision
    if further:
        precision += f" (not judged: {', '.join(further)}; --precision judges another)"
    apps = ", ".join(judgement.layout.apps)
    return {
        "What it is": [f"{judgement.layout.title}; {precision}; for {apps}"],
        "This checkpoint?": _weights(judgement),
        "Words": _words(judgement.runs),
        "Where": list(map(_where, judgement.graphs)),
        "Lost": [str(_named(p)) for p in judgement.problems if p.is_warning][:MOST],
        NPU: _npu(judgement),
        "What now": _advice(judgement),
    }


def judge_page(judgement: Judgement, command: str = "") -> str:
    """Return the page: complete, without scripts and without other files.

    Args:
        judgement: of the files.
        command: the suggested next command. Default: none.
    """
    broken = any(problem.is_warning for problem in judgement.problems)
    kind = "bad" if not judgement else "mark" if broken else "good"
    shown = {
        question: "<br>".join(map(prose, sentences))
        for question, sentences in answers(judgement).items()
    }
    shown["Next"] = f"<code>{text(command)}</code>" if command else ""
    body = (
        verdict(verdict_sentence(judgement), kind, facts(shown))
        + _clips(judgement)
        + _graphs(judgement)
        + _problems(judgement)
        + _changed(judgement)
        + _comparisons(judgement)
        + _limits(judgement)
    )
    return html_page(f"Judgement of {judgement.path}", body, WORDS_STYLE + COMPARE_STYLE)


def _weights(judgement: Judgement) -> list[str]:
    identity = judgement.identity
    if identity is None and judgement.checkpoint:
        failures = [run.reason for run in judgement.runs if run.app == WEIGHTS]
        reason = next(iter(failures), "converters fold and pack the weights of such files")
        return [f"not compared: {reason}"]
    if identity is None:
        return [str(judgement.named or "not compared: no checkpoint is given")]
    named = [f"differs: {weight}" for weight in identity.changed[:MOST]]
    parts = identity.exchanged_files, identity.replaced, identity.adapted
    named[:0] = filter(None, parts)
    if len(identity.changed) > MOST:
        named.append(f"and {len(identity.changed) - MOST} more")
    return [f"{identity}; compared with {judgement.checkpoint}", *named]


def _words(runs: Sequence[AppRun]) -> list[str]:
    """Say what the apps returned, and what they lost; those with the same answer together."""
    names: dict[str, list[str]] = {}
    for run in (run for run in runs if run.app != WEIGHTS):
        for line in _run_words(run):
            names.setdefault(line, []).append(run.name)
    return [f"{_listed(apps)}: {line}" for line, apps in names.items()]


def _run_words(run: AppRun) -> list[str]:
    if run.words is None:
        return [run.reason]
    losses = [
        f"{kind} in {len(losses)} of {len(run.words.texts)} clips: {losses[0].clip}, {losses[0].reason}"
        for kind, losses in run.words.by_kind().items()
    ]
    return [str(run.words), *losses]


def _where(graph: ComparedGraph) -> str:
    """Say at which layer a graph diverges, or which one the rounding of weights changes most."""
    compared = graph.programs
    if compared is None:
        return f"{graph.part}: not compared: {graph.reason}"
    output = compared.outputs[0]
    result = f"its output: {decibels(output.sqnr_db)}"
    if output.reason:
        result += f" ({output.rule})"
    if compared.first is not None:
        first = compared.values[compared.first]
        cause = f"{graph.cause}; " if graph.cause else ""
        return (
            f"{graph.part}: diverges first at {first.name}: {cause}the error is {error_text(first)}, "
            f"before it at most {first.before:.1e}; {result}"
        )
    if compared.worst is not None:
        worst = compared.values[compared.worst]
        return (
            f"{graph.part}: rounding costs most at {worst.name}: the error grows from "
            f"{worst.before:.1e} to {error_text(worst)}; {result}"
        )
    cause = f"{graph.cause}; " if graph.cause else ""
    return f"{graph.part}: no layer diverges; {cause}{result}"


def _graphs(judgement: Judgement) -> str:
    """Return the layers of each graph that diverges."""
    return "".join(
        f"<h2>Where the {text(graph.part)} goes wrong</h2>\n<p>{text(_where(graph))}</p>\n"
        f"{compared_layers(graph.programs)}"
        for graph in judgement.graphs
        if graph.programs is not None and not graph.programs
    )


def _npu(judgement: Judgement) -> list[str]:
    """Say what an NPU's compiler does with the files, if an app that loads them has such a device."""
    rules = _rules(judgement)
    devices = [name for app in judgement.layout.apps.values() for name in app.devices]
    if not any(NPU in name for name in devices):
        return []
    broken = [
        _named(p) for p in judgement.problems if NPU in rules[p.code].text and not p.is_warning
    ]
    results = [
        f"{run.name}: {'failed' if run.failed else 'it ran'}"
        for run in judgement.runs
        if NPU in run.device
    ]
    return [*broken[:MOST], *results] or ["no rule of an NPU is broken; not run"]


def _advice(judgement: Judgement) -> list[str]:
    """Return what to do about each broken rule, the wrong ones first."""
    rules = _rules(judgement)
    ordered = sorted(judgement.problems, key=lambda problem: problem.is_warning)
    texts = (f"{p.code}: {_what_to_do(rules[p.code], judgement)}" for p in ordered)
    advice = list(dict.fromkeys(texts))[:MOST]
    if not judgement and not any(not p.is_warning for p in judgement.problems):
        advice.insert(0, "write the files again from the checkpoint, with the command below")
    return advice


def _what_to_do(rule: LayoutRule, judgement: Judgement) -> str:
    text = rule.what_to_do.replace("CHECKPOINT", judgement.checkpoint or "CHECKPOINT")
    return text.replace("TARGET", judgement.layout.target or "TARGET")


def _rules(judgement: Judgement) -> dict[str, LayoutRule]:
    return {rule.code: rule for rule in judgement.layout.rules}


def _named(problem: Problem) -> str:
    return f"{problem.code}: {problem.file}: {problem.reason}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _clips(judgement: Judgement) -> str:
    """Return the words of each clip, those that differ with their audio as far as it fits."""
    runs = [run for run in judgement.runs if run.words is not None]
    if not runs:
        return ""
    different = [clip for clip in judgement.clips if _different(clip, runs)][:MAX_CLIPS]
    audio, _ = within((player(c.name, to_int16(c.samples)) for c in different), MAX_AUDIO)
    absent = '<p class="dim">The audio is left out, to keep the page small.</p>'
    players = [*audio, *[absent] * (len(different) - len(audio))]
    sections = [_clip(clip, runs, p) for clip, p in zip(different, players, strict=True)]
    n_same = len(judgement.clips) - len(different)
    same = (
        "" if not n_same else f"<p>{n_same} of {len(judgement.clips)} clips: no word differs.</p>\n"
    )
    return (
        "<h2>Words of each clip</h2>\n<p>What each app returned. Words that differ are marked; below them "
        "is what the checkpoint emits, decoded as the app decodes.</p>\n" + "".join(sections) + same
    )


def _different(clip: Clip, runs: Sequence[AppRun]) -> bool:
    return any(
        entry.clip == clip.name and differs(entry)
        for run in runs
        if run.words is not None
        for entry in run.words.texts
    )


def _clip(clip: Clip, runs: Sequence[AppRun], audio: str) -> str:
    same: list[str] = []
    different: dict[str, list[str]] = {}  # HTML -> the apps that returned it
    correct = ""
    for run in runs:
        assert run.words is not None
        (entry,) = (entry for entry in run.words.texts if entry.clip == clip.name)
        if not differs(entry):
            same.append(run.name)
            continue
        if clip.text and differs(replace(entry, text=clip.text)):  # else it stands below the words
            correct = f'<p class="dim" dir="auto">The transcript: {text(clip.text)}</p>'
        losses = "; ".join(f"{x.kind}: {x.reason}" for x in run.words.losses if x.clip == clip.name)
        shown = replace(entry, text=shortened(entry.text, MAX_CHARACTERS))
        html = (
            f'<span class="bad">{prose(losses)}</span></h3>'
            f'<p class="words" dir="auto">{aligned_words(shown)}</p>'
        )
        different.setdefault(html, []).append(run.name)
    rows = (f"<h3>{text(_listed(names))} {html}" for html, names in different.items())
    agreeing = f'<p class="dim">No word differs: {text(_listed(same))}</p>' if same else ""
    return (
        f'<section class="clip"><h3>{text(clip.name)}</h3>{audio}{"".join(rows)}{agreeing}{correct}'
        "</section>\n"
    )


def _problems(judgement: Judgement) -> str:
    if not judgement.problems:
        return ""
    shown, n_missing = within((_problem(judgement, p) for p in judgement.problems), MAX_RULES)
    remainder = f"<p>{n_missing} more are not shown.</p>\n" if n_missing else ""
    return f"<h2>Broken rules</h2>\n{''.join(shown)}{remainder}"


def _problem(judgement: Judgement, problem: Problem) -> str:
    rule = _rules(judgement)[problem.code]
    kind, result = ("mark", "warning") if problem.is_warning else ("bad", "wrong")
    why, _, _ = rule.text.partition("What to do: ")
    shown = {
        "File": text(problem.file),
        "What": text(problem.reason),
        "Why": prose(" ".join(why.split())),
        "What to do": prose(_what_to_do(rule, judgement)),
    }
    return (
        f'<section class="clip"><h3><b class="{kind}">{text(rule.code)}, {result}</b>: {prose(rule.title)}'
        f"</h3>{facts(shown)}</section>\n"
    )


def _changed(judgement: Judgement) -> str:
    if judgement.identity is None or not judgement.identity.changed:
        return ""
    changed = judgement.identity.changed
    remainder = len(changed) - MAX_ROWS
    return (
        f"<h2>Weights that are not those of {text(judgement.checkpoint)}</h2>\n"
        + table(
            ("weight", "nearest array in the files"),
            ((text(w.label), text(w.difference)) for w in changed[:MAX_ROWS]),
        )
        + (f"<p>{remainder} more are not shown.</p>\n" if remainder > 0 else "")
    )


def _comparisons(judgement: Judgement) -> str:
    rows = [
        (
            text(check.program),
            text(check.what),
            text(check.rule),
            "pass" if check.passed else f'<b class="bad">FAIL</b>: {prose(check.reason)}',
        )
        for run in judgement.runs
        for check in run.checks
    ]
    if not rows:
        return ""
    return (
        f"<details><summary><b>All {len(rows)} comparisons, with their rules</b></summary>\n"
        + table(("app", "compared", "rule", "result"), rows[:MAX_ROWS])
        + "</details>\n"
    )


def _limits(judgement: Judgement) -> str:
    rows = [
        (text(name), "<br>".join(map(prose, app.drops)))
        for name, app in judgement.layout.apps.items()
    ]
    return (
        "<details><summary><b>What each app does not take from any checkpoint, or limits</b></summary>\n"
        + table(("app", ""), rows)
        + "</details>\n"
    )
