"""The pages of `check`, `inspect` and `verify`: what is first, and text that tries to leave its place."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from whisperport.apps.cli.check_page import check_page
from whisperport.apps.cli.graph_page import MAX_GRAPH, Drawn, graph, run_strip
from whisperport.apps.cli.inspect_page import inspect_page
from whisperport.apps.cli.verify_page import MAX_AUDIO, layers_page, verify_page
from whisperport.build.check import Checked
from whisperport.model.inspection.graph import Graph, Node, SourceLine, Value
from whisperport.model.inspection.lowered import Inspected, Plan
from whisperport.model.inspection.rejections import check_graph
from whisperport.program.bundle import Bundle
from whisperport.program.checks import LEVELS, Check
from whisperport.program.profiling import NodeProfile, Profile, by_time
from whisperport.system.page import text
from whisperport.targets import get_target
from whisperport.verification import Report
from whisperport.verification.diagnosis.layers import LayerComparison
from whisperport.verification.reference import Reference, ReferenceClip
from whisperport.verification.report import ClipText

ATTACK = "</script><img src=x onerror=alert(1)>\"'\x1b[31m\u202e"
LARGEST = 3_000_000  # characters of a page


class Tied(nn.Module):
    """Two blocks, and Whisper's vocabulary projection as openai-whisper writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in "ab"
        )
        self.embedding = nn.Embedding(500, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ torch.transpose(self.embedding.weight.to(x.dtype), 0, 1)


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("programs") / "tied.pt2"
    exported = torch.export.export(Tied().eval(), (torch.rand(1, 8, 16),), strict=False)
    torch.export.save(exported, path)
    return path


def expect_safe(page: str) -> None:
    """A page has no markup but its own, and loads nothing."""
    assert not re.search(r"<(script|img)|https?://|\x1b|\u202e", page)
    assert text(ATTACK) in page
    assert "default-src 'none'" in page


def test_text_of_any_origin_is_visible_and_ends() -> None:
    assert text("<b>&\"'\n\x00\u202e") == "&lt;b&gt;&amp;&quot;&#x27;\\n\\x00\\u202e"
    assert len(text("a" * 5000)) == 1000


def test_the_page_of_a_check_begins_with_what_how_much_why_and_what_next(
    run: Any, tied: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"

    ran = run("check", tied, "--target", "xnnpack", "--html", page)

    found = page.read_text()
    first = found.partition("</dl>")[0]
    assert ran.code == 1
    assert re.search(
        r'class="big">xnnpack rejects 3 of \d nodes and 9\d\.\d% of the operations: 9', first
    )
    assert 'class="bad fill"' in first
    assert "✕ matmul" in first
    assert "its weight is computed by <code>transpose</code>" in first
    assert "rewrite <code>matmul-by-linear</code>" in first
    assert f"<code>{ran.err.partition('next: ')[2].strip()}</code>" in first
    assert "<h3>blocks.1</h3>" in found
    assert found.count('<details class="node bad fill"') == 3
    assert not re.search(r"https?://|<script|src=", found)


def test_the_page_of_a_fix_shows_the_program_before_and_after(
    run: Any, tied: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    fixed = ("--out", tmp_path / "fixed.pt2")

    ran = run("fix", tied, "--target", "xnnpack", *fixed, "--html", page)

    found = page.read_text()
    before, _, after = found.partition("<b>After</b>")
    assert ran.code == 0
    assert "xnnpack rejected 3 of" in before
    assert "Of the fixed program, it rejects no node." in before
    assert "✕ matmul" in before
    assert "bad fill" not in after.partition("</div>")[0]
    assert re.search(r"<td>matmul-by-linear<td class=\"n\">1<td", after)


def test_a_page_does_not_replace_the_program(run: Any, tied: Path) -> None:
    ran = run("check", tied, "--target", "xnnpack", "--html", tied)

    assert ran.code == 1
    assert "it is the input" in ran.err


def test_nothing_in_a_graph_is_markup() -> None:
    value = Value(ATTACK, (1, 8))
    nodes = tuple(
        Node(
            f"{n}{ATTACK}",
            ATTACK,
            ATTACK,
            (value,),
            (Value(f"{n}", (1, 8)),),
            custom=True,
            module=f"blocks.0.{ATTACK}",
            source=SourceLine(ATTACK, 7, ATTACK),
        )
        for n in range(3)
    )
    checked = check_graph(Graph(ATTACK, "torch", nodes, (value,), ()), get_target("xnnpack").spec)

    expect_safe(check_page(Checked("xnnpack", (checked, checked)), f"whisperport {ATTACK}"))


@pytest.mark.parametrize("operators", [1, 3_000])
def test_a_page_of_a_large_graph_is_small(operators: int) -> None:
    nodes = tuple(
        Node(
            f"{'node' * 40}{n}",
            f"op{n % operators}",
            "x",
            (),
            (Value(f"{n}", (1, 8)),),
            custom=True,
        )
        for n in range(3_000)
    )
    checked = check_graph(Graph("large", "torch", nodes, (), ()), get_target("xnnpack").spec)

    page = check_page(Checked("xnnpack", (checked,)), "")

    assert len(page) < LARGEST
    assert "rejects 3000 of 3000 nodes" in page
    assert "more blocks are not drawn" in page
    assert re.search("more (are listed with|kinds of nodes are)", page)


def test_long_names_do_not_make_a_page_large() -> None:
    nodes = [
        Drawn("o" * 9000, "n" * 9000, f"blocks.{n}", 1e-3, "bad", 0, "", {"Why": "w" * 900})
        for n in range(1000)
    ]

    assert len(graph(nodes)) < MAX_GRAPH + 100
    assert run_strip(nodes, "all").count("<span") == 1000


def profile(**changes: Any) -> Profile:
    matmul = NodeProfile(
        name=f"native_call_mm.out [3]{changes.pop('name', '')}",
        operator="aten::mm.out",
        where="no delegate",
        delegated=False,
        ms=60.0,
        rule="WP301",
        reason="its weight is computed by `transpose`",
        estimated_gain_ms=50.0,
    )
    linear = NodeProfile(
        name="Linear #1", operator="Linear", where="Npu 1", delegated=True, ms=30.0
    )
    fields: dict[str, Any] = {
        "program": "decoder",
        "runtime": "ExecuTorch",
        "target": "Npu",
        "subgraphs": 1,
        "nodes": by_time([linear, matmul]),
        "overhead_ms": 10.0,
        "run_ms": 100.0,
        "runs": 5,
    }
    return Profile(**(fields | changes))


def test_the_page_of_a_profile_begins_with_what_how_much_why_and_what_next() -> None:
    page = inspect_page(Inspected((profile(),), ()), "whisperport explain WP301")

    first = page.partition("</dl>")[0]
    assert "60.0% of the time is spent in nodes that are not delegated: 60.0% in one mm." in first
    assert "60.0 ms, 60.0% of 100.0 ms per run, median of 5, ExecuTorch" in first
    assert "its weight is computed by <code>transpose</code> (WP301)" in first
    assert "about 50.0 ms, if it were delegated" in first
    assert "<code>whisperport explain WP301</code>" in first
    strip = re.findall(r'<span class="([^"]*)" style="width:([\d.]+)%', first)
    assert strip == [(" s0", "30.000"), ("bad fill", "60.000"), ("idle", "10.000")]


def test_a_profile_that_is_delegated_or_not_measured_has_a_page() -> None:
    one = profile()
    linear = one.nodes[1]
    inside = replace(one, nodes=(linear,), notes=(ATTACK,), program=ATTACK)
    unknown = replace(one, nodes=tuple(replace(n, ms=None) for n in one.nodes), overhead_ms=None)
    plan = Plan(ATTACK, {ATTACK: 3}, (ATTACK,))

    page = inspect_page(Inspected((inside, unknown), (ATTACK,), (plan,)), "")

    expect_safe(page)
    assert "1 of 3 nodes are not delegated" in page
    assert "All 1 nodes run on Npu" in page
    assert "1 of 2 nodes are not delegated." in page


def clip(name: str, seconds: float = 0.1) -> ReferenceClip:
    none = np.empty((0, 0), np.float32)
    samples = np.zeros(int(13_000 * seconds), np.int16)
    return ReferenceClip(name, "", samples, (), (), none, none, none)


def report(*texts: ClipText, **changes: Any) -> Report:
    checks = tuple(
        Check(
            level=level,
            program="encoder",
            what=f"features {ATTACK}",
            value={"sqnr_db": 120.0},
            rule="SQNR ≥ 60 dB",
            passed=True,
        )
        for level in LEVELS
    )
    return Report(subject=ATTACK, checks=checks, texts=texts, **changes)


def said(name: str, text: str, expected: str, unit: Any = "words") -> ClipText:
    return ClipText(clip=name, text=text, expected=expected, correct=expected, unit=unit)


def test_words_that_differ_stand_above_those_of_float32() -> None:
    texts = (
        said("a.wav", "Equal here.", "equal here"),
        said("b.wav", "Turn of light", "Turn off the light"),
    )

    page = verify_page(report(*texts), Reference((clip("a.wav"), clip("b.wav")), 9))

    assert "Verified: all 4 comparisons passed." in page
    assert "1 of 2 transcripts are those of float32." in page
    assert page.index("b.wav <span") < page.index("a.wav <span")  # those that differ are first
    assert page.count("<ins>") == 1
    assert (
        'Turn <span class="differ"><ins>of</ins><span class="hidden"> instead of </span>'
        "<del>off the</del></span> light" in page
    )
    assert page.count('src="data:audio/wav;base64,UklGR') == 2


def test_characters_are_aligned_where_no_spaces_are_written() -> None:
    page = verify_page(report(said("a", "今日は雨", "今日は雪", "characters")), Reference((), 9))

    assert '今日は<span class="differ"><ins>雨</ins>' in page
    assert "The audio is left out" in page


def test_nothing_in_a_report_is_markup() -> None:
    texts = said(ATTACK, f"{ATTACK} a", f"{ATTACK} b")
    failed = Check(
        level="arrays",
        program=ATTACK,
        what=ATTACK,
        value={"sqnr_db": 1.0},
        rule=ATTACK,
        passed=False,
        reason=ATTACK,
    )
    one = report(texts, machine={ATTACK: ATTACK}, versions={ATTACK: ATTACK})
    one = replace(one, checks=(*one.checks, failed))

    page = verify_page(one, Reference((clip(ATTACK),), 9), ATTACK)

    expect_safe(page)
    assert "Not verified: 1 of 5 comparisons failed." in page
    assert page.count("src=&quot;") == 0
    expect_safe(layers_page([LayerComparison(name=ATTACK, sqnr_db=5.0, problem=ATTACK)]))


def test_audio_that_does_not_fit_is_left_out_and_the_page_says_so() -> None:
    texts = [said(f"{n}", "equal", "equal") for n in range(300)]
    texts[299] = said("299", "other", "equal")
    clips = tuple(clip(f"{n}", 30) for n in range(300))

    page = verify_page(report(*texts), Reference(clips, 9))

    assert MAX_AUDIO / 2 < len(page) < MAX_AUDIO + LARGEST
    assert page.index("299 <span") < page.index("0 <span")
    assert page.count("The audio is left out") == 200 - page.count("<audio")
    assert "100 more clips are not shown" in page


def test_the_error_begins_at_a_layer() -> None:
    layers = [LayerComparison(name=f"layer{n}", sqnr_db=db) for n, db in enumerate((60.0, 12.0))]

    page = layers_page(layers)

    assert "The error begins at the layer layer1: its SQNR drops from 60.0 dB to 12.0 dB." in page


def test_a_bundle_has_all_that_its_page_shows(bundle: Path) -> None:
    opened = Bundle.open(bundle)
    found = Report.from_json(opened.manifest.verification)
    reference = Reference.from_arrays(opened.reference())

    page = verify_page(found, reference)

    assert [one.clip for one in found.texts] == [one.name for one in reference.clips]
    assert page.count("<audio") == len(reference.clips)
    assert "Verified: all" in page
    assert Report.from_json(found.to_json()) == found


def test_a_page_of_another_verification_is_refused(run: Any, bundle: Path, tmp_path: Path) -> None:
    ran = run("verify", bundle, "--each-program", "--html", tmp_path / "page.html")

    assert ran.code == 2
    assert "--each-program cannot be used with --record or --html" in ran.err
