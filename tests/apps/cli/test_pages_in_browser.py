"""The pages of `check`, `inspect`, `verify`, `sensitivity`, `bench` and `compare` in Debian's chromium."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from whisperport.apps.cli.bench_page import bench_page
from whisperport.apps.cli.compare_page import compare_page
from whisperport.apps.cli.inspect_page import inspect_page
from whisperport.apps.cli.sensitivity_page import sensitivity_page
from whisperport.apps.cli.verify_page import layers_page, verify_page
from whisperport.model.inspection.lowered import Inspected
from whisperport.program.bundle import Bundle
from whisperport.verification import Report
from whisperport.verification.diagnosis.layers import LayerComparison
from whisperport.verification.reference import Reference

from ...extent import CHROMIUM, IN_BROWSER
from ...third_party_decoder import third_party_decoder
from . import test_result_pages as made

sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
axe_of = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = IN_BROWSER
MAX_LOAD_S, MAX_BYTES = 2.0, 3_000_000
PAGES = ("check", "fix", "inspect", "verify", "sensitivity", "bench", "compare", "layers", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages")


@pytest.fixture
def pages(folder: Path, run: Callable[..., Any], exported: Callable[..., Any]) -> Path:
    """The pages of a decoder whose vocabulary projection XNNPACK does not run; written once."""
    if (folder / "verify.html").exists():
        return folder
    decoder, lowered = folder / "decoder.pt2", folder / "decoder.pte"
    torch.export.save(third_party_decoder(), decoder)
    xnnpack_of(decoder, lowered)
    target = ("--target", "xnnpack")
    run("check", decoder, *target, "--html", folder / "check.html")
    run("fix", decoder, *target, "-o", folder / "f.pt2", "--html", folder / "fix.html")
    run("inspect", lowered, "--html", folder / "inspect.html")
    bundle: Bundle = exported("onnxruntime")
    report = Report.from_json(bundle.manifest.verification)
    first, *others = report.texts
    report = replace(report, texts=(replace(first, text=f"more {first.text}"), *others))
    page = verify_page(report, Reference.from_arrays(bundle.reference()))
    (folder / "verify.html").write_text(page)
    for name, page in made_pages().items():
        (folder / f"{name}.html").write_text(page)
    return folder


def made_pages() -> dict[str, str]:
    """Pages of results that are not measured here, with everything that they can show."""
    values = (made.value("a", 1e-7), made.value("b", 1e-3, 1e-7), made.value("c", 1e-2, 1e-3))
    limits = [made.limit("encoder", 896, 400), made.limit("step", 2, 4)]
    layers = [LayerComparison(name=f"layer{n}", sqnr_db=db) for n, db in enumerate((60.0, 12.0))]
    return {
        "sensitivity": sensitivity_page("a.onnx", [made.activation(), made.good()], 20.0, "next"),
        "bench": bench_page([made.measured()] * 2, made.RATES, [limits, []], "here", "next"),
        "compare": compare_page(made.programs(*values, outputs=(made.FAILED,)), "next"),
        "layers": layers_page(layers),
        "cpu": inspect_page(Inspected((made.on_cpu(),), ()), "next"),
    }


def xnnpack_of(decoder: Path, lowered: Path) -> None:
    """Lower a program with ExecuTorch's own calls, which fix nothing."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower

    edge = to_edge_transform_and_lower(
        torch.export.load(decoder), partitioner=[XnnpackPartitioner()]
    )
    with lowered.open("wb") as file:
        edge.to_executorch().write_to_file(file)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    yield page
    page.close()
    assert problems == []


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing(page: Any, pages: Path, name: str, scheme: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    page.goto(f"file://{pages}/{name}.html")
    found = [*axe_of.Axe().run(page).response["violations"]]
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    found += axe_of.Axe().run(page).response["violations"]

    assert [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found] == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_small_and_opens_within_two_seconds(page: Any, pages: Path, name: str) -> None:
    file = pages / f"{name}.html"
    started = time.monotonic()

    page.goto(f"file://{file}")

    taken = time.monotonic() - started
    print(f"{name}: {taken:.2f} s, {file.stat().st_size} bytes")
    assert taken < MAX_LOAD_S
    assert file.stat().st_size < MAX_BYTES


@pytest.mark.parametrize(("name", "operator"), [("check", "matmul"), ("inspect", "mm")])
def test_the_undelegated_matmul_is_seen_first(
    page: Any, pages: Path, name: str, operator: str
) -> None:
    page.goto(f"file://{pages}/{name}.html")

    part = page.locator(".strip .bad.fill", has_text=f"✕ {operator}").first
    place = part.bounding_box()
    assert operator in page.locator(".big").first.inner_text()
    assert place["y"] + place["height"] < 800
    assert place["width"] > 1200 / 4
    assert "not a stored constant" in page.locator(".verdict").first.inner_text()


def test_a_refused_node_opens_with_keys_and_tells_why(page: Any, pages: Path) -> None:
    page.goto(f"file://{pages}/check.html")
    node = page.locator("details.node.bad", has_text="matmul").last
    reason = node.get_by_text("not a stored constant")
    sync_api.expect(reason).to_be_hidden()

    node.locator("summary").focus()
    page.keyboard.press("Enter")

    sync_api.expect(reason).to_be_visible()


def test_audio_of_a_clip_is_played(page: Any, pages: Path) -> None:
    page.goto(f"file://{pages}/verify.html")

    length = page.evaluate(
        """() => new Promise((resolve, reject) => {
            const audio = document.querySelector("audio");
            audio.onerror = () => reject(audio.error);
            audio.ontimeupdate = () => audio.currentTime > 0 && resolve(audio.duration);
            audio.muted = true;
            audio.play();
        })"""
    )

    assert length > 0.5
