"""The tutorial and the how-tos can be followed: what their commands print is what the pages show.

The blocks of a page run in order, in a new folder that has the package's `src` in it as a copy of the
repository has. A block runs unless it needs a network, a device or a file of the reader's own.

The code of the pages for contributors is registered, and its own tests pass.

`make test-apps` follows the page of apps: a block runs in the environment of the app that it imports.
"""

import math
import os
import re
import shutil
import subprocess
import sys
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from whisperport.build.layouts import all_layouts
from whisperport.build.layouts.environments import command_of
from whisperport.model.inspection.rules import RULES
from whisperport.model.rewrites import REWRITES
from whisperport.program.spec import Limit
from whisperport.verification.clips import shipped_clips

from ..embedded import default_bundle
from ..extent import core_or_all
from ..model.inspection import test_rules
from .pages import ROOT, code_blocks

HOW_TO = "docs/how-to/"
CORE = (f"{HOW_TO}write-subtitles.md",)
OTHERS = (
    "docs/tutorials/first-bundle.md",
    f"{HOW_TO}find-undelegated-nodes.md",
    f"{HOW_TO}fix-a-program.md",
    f"{HOW_TO}lower-a-third-party-model.md",
    f"{HOW_TO}export-your-model.md",
    f"{HOW_TO}measure-speed.md",
    f"{HOW_TO}mediatek-genio.md",
    f"{HOW_TO}place-programs.md",
    f"{HOW_TO}raspberry-pi-hailo.md",
    f"{HOW_TO}share-a-transcriber.md",
    f"{HOW_TO}transcribe-an-archive.md",
    f"{HOW_TO}transcribe-live.md",
    f"{HOW_TO}verify-on-a-board.md",
    f"{HOW_TO}aws-neuron.md",
    "docs/explanation/cross-attention-kv.md",
)
FIRST = f"{HOW_TO}find-undelegated-nodes.md"  # makes the decoder.pt2 of other pages

# Shell lines that need a network, a device, or a file of the reader's own.
NOT_RUN = re.compile(
    r"^(make|pip|ray|source|scp|sudo|hailortcli|arecord|ffmpeg|python3? |cd )"
    r"|^whisperport live$|^whisperport fetch|/shared/|openai/|my-audio|tiny-whisper-encoder"
    r"|talk\.|build/tiny|mine\.pt|(inputs|call)\.npz|encoder\.(onnx|xml)|words-hailo8l talk"
    r"|verify words-hailo8l|words-neuron-on-inf2|=/path/to/|=sdk/|--record"
)
# Python that shows a part: its names are defined elsewhere.
PARTS = re.compile(r"module\.eval\(\)|^torch\.save|greeting\.wav|trace\(\"decoder\", Logits")
BLOCK = re.compile(r"^( *)```(sh|python|js|text)\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
MEASURED = ("whisperport inspect", "whisperport bench")
NUMBER = re.compile(
    r"[≈<]?\d+\.\d[\d.e+-]*( ?%)?( ?(ms|s|MB|MiB|GB|dB|GFLOP|times as fast)\b)?"
    r"|\d[\d.,]*(e-\d+)?( ?(ms|s|MB|MiB|GB|dB|GFLOP|times as fast)\b| ?%)"
)
FIGURE = re.compile(r"[≈<]?(?P<value>[\d,.]+(e[+-]?\d+)?)(?P<unit>.*)")
# How far a printed figure may be from that of the page, by its unit. Counts are in the text, which is
# equal; so is every other figure: shares, sizes, operations, limits.
OF_THE_MACHINE = ("ms", "s", "times as fast", "MiB", "GB")  # times, speed and memory: any
# Torch adds in another order on another CPU. Between its kernels with AVX2 and without, which the variable
# ATEN_CPU_CAPABILITY chooses, `fix` of a decoder of one layer, width 128, differed by 0.2 dB and by
# a factor of 1.1 in the largest error, which is that of one value. The limits leave room for larger ones.
MOST_DB = 1.5  # 1.2 was seen between a processor with AVX-512 and one with AVX2
MOST_FACTOR = 2.0  # of a number with an exponent, which is the largest error of an output
LONGEST = 900  # words: a page that is read before the first change


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and content of each block, without its indentation."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        (match[2], "\n".join(line.removeprefix(match[1]) for line in match[3].splitlines()))
        for match in BLOCK.finditer(text)
    ]


def runs(language: str, code: str) -> str:
    """What of a block is run."""
    if language == "sh":
        return "\n".join(line for line in code.splitlines() if not NOT_RUN.search(line))
    return "" if PARTS.search(code) else code


def run(language: str, code: str, folder: Path) -> str:
    """What a block prints: standard output, or the error if there is none."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "HF_HUB_OFFLINE": "1"}
    environment.pop("COLUMNS", None)
    (folder / "block.py").write_text(code)  # a file: `multiprocessing` needs one
    command = ["bash", "-c", code] if language == "sh" else [sys.executable, "block.py"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    error = [
        line for line in done.stderr.splitlines() if not re.match(r" *\d+\.\d s  |next:", line)
    ]
    printed = done.stdout if done.stdout.strip() else "\n".join(error)
    return printed.replace(f"{ROOT}/", "")  # paths of the package as the project's folder has them


def one_line(text: str) -> str:
    """`text` without the spaces that depend on the width of its figures."""
    return re.sub(r"\s+", " ", text).strip()


def pattern_of(shown: str) -> str:
    """The pattern of what a page shows: each figure is a group, and a line of `…` is any text."""
    parts = re.split(r"^\s*…\s*$", shown, flags=re.MULTILINE)
    return " ?.*? ?".join(_with_groups(one_line(part)) for part in parts)


def _with_groups(text: str) -> str:
    found, end = "", 0
    for match in NUMBER.finditer(text):
        found += re.escape(text[end : match.start()]) + f"({_without_groups(NUMBER.pattern)})"
        end = match.end()
    return found + re.escape(text[end:])


def _without_groups(pattern: str) -> str:
    return re.sub(r"\((?!\?)", "(?:", pattern)


def is_near(shown: str, printed: str) -> bool:
    """Whether a printed figure is that of the page, as far as it is the same on every machine."""
    if shown == printed:
        return True
    pages, here = FIGURE.fullmatch(shown), FIGURE.fullmatch(printed)
    if pages is None or here is None or pages["unit"].strip() != here["unit"].strip():
        return False
    unit = pages["unit"].strip()
    if unit in OF_THE_MACHINE:
        return True
    x, y = (float(one["value"].replace(",", "").rstrip(".")) for one in (pages, here))
    if unit == "dB":
        return abs(x - y) <= MOST_DB
    if "e-" in shown:
        return x == y or 1 / MOST_FACTOR <= x / y <= MOST_FACTOR
    return math.isclose(x, y, rel_tol=1e-5)  # a scale is fitted to features, in float32


def differences(shown: str, printed: str, code: str) -> list[str]:
    """What a page shows that was not printed; in the page, a line of `…` is any text."""
    if code.startswith(MEASURED):  # other nodes may be the most expensive ones on another machine
        lines = [line for line in shown.splitlines() if line.strip() not in ("", "…")]
        fixed = [one_line(line) for line in lines if not re.search(r"\d", line)]
        return [line for line in fixed if line not in one_line(printed)]
    found = re.fullmatch(pattern_of(shown), one_line(printed))
    if found is None:
        return [shown]
    stated = re.fullmatch(pattern_of(shown), one_line(shown))
    assert stated is not None
    pairs = zip(stated.groups(), found.groups(), strict=True)
    return [f"{page} is now {here}" for page, here in pairs if not is_near(page, here)]


@pytest.mark.parametrize("page", core_or_all(CORE, CORE + OTHERS))
def test_the_commands_of_a_page_print_what_it_shows(page, tmp_path):
    (tmp_path / "src").symlink_to(ROOT / "src")
    shutil.copytree(default_bundle(), tmp_path / "build" / "first")
    if page != FIRST:
        needed = "decoder.pt2" in (ROOT / page).read_text(encoding="utf-8")
        for language, code in blocks(FIRST)[: 1 if needed else 0]:
            run(language, code, tmp_path)

    printed, code, wrong, compared = "", "", [], 0
    for language, content in blocks(page):
        if language != "text":
            code = runs(language, content)
            printed = run(language, code, tmp_path) if code.strip() else ""
        elif code.strip():
            compared += 1
            differing = differences(content, printed, code)
            wrong += [(code, differing, printed)] if differing else []

    assert compared
    assert wrong == []


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a  1.5 ms\n…\nend", "a 22.1 ms\nb\nc\nend"),
        ("min SQNR  103.7 dB (limit 60 dB)", "min SQNR  102.9 dB (limit 60 dB)"),
        ("max error  1.7e-05 of the largest", "max error  9.9e-06 of the largest"),
        ("(x - (3)) * 0.04999966. Read", "(x - (3)) * 0.04999967. Read"),
        ("23 of 146 nodes, 53.1% of 12.1 GFLOP", "23 of 146 nodes, 53.1% of 12.1 GFLOP"),
        ("in 3 s, 56.2 times as fast as real time", "in 24 s, 6.9 times as fast as real time"),
    ],
)
def test_what_a_page_shows_may_differ_in_what_depends_on_the_machine(shown, printed):
    assert differences(shown, printed, "whisperport verify x") == []


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        ("a  1.5 ms\n…\nend", "b 22.1 ms\nc\nend"),
        ("step_4  aws-neuron  118  0", "step_4  aws-neuron  120  0"),
        ("min SQNR  103.7 dB (limit 60 dB)", "min SQNR  101.5 dB (limit 60 dB)"),
        ("min SQNR  103.7 dB (limit 80 dB)", "min SQNR  103.7 dB (limit 60 dB)"),
        ("max error  1.7e-05 of the largest", "max error  1.7e-06 of the largest"),
        ("53.1% of 12.1 GFLOP", "53.0% of 12.1 GFLOP"),
        ("WER 0.00%", "WER 1.82%"),
        ("a table of 79.7 MB", "a table of 79.6 MB"),
        ("SQNR 40.1 dB", "SQNR 40.1 ms"),
    ],
)
def test_a_page_that_shows_something_else_is_found(shown, printed):
    assert differences(shown, printed, "whisperport verify x")


def test_a_page_of_measurements_shows_the_lines_that_are_printed():
    assert differences("node  ms\nx  1", "nodes  time\nx  1", "whisperport inspect x")
    assert differences("node  ms\nx  1", "node  ms\nx  7", "whisperport inspect x") == []


APPS_PAGE = f"{HOW_TO}convert-for-an-app.md"
APPS = {app.module: app for layout in all_layouts() for app in layout.apps.values()}
IMPORTS = re.compile(rf"\b(?:import|from) \"?({'|'.join(map(re.escape, APPS))})\b")
READ_SAMPLES = next(code for language, code in blocks(APPS_PAGE) if language == "python")
BROWSER = shutil.which("chromium")
# The package and its WebAssembly from this machine, and what the lines showed, sent back.
WEB_PAGE = """<body></body>
<script type="importmap">{"imports": {"@huggingface/transformers":
  "./node_modules/@huggingface/transformers/dist/transformers.min.js"}}</script>
<script type="module">
  import { env } from "@huggingface/transformers";
  env.backends.onnx.wasm.wasmPaths = "/node_modules/onnxruntime-web/dist/";
  const send = (text) => fetch("/", { method: "POST", body: text });
  addEventListener("error", (event) => send(event.message));
  new MutationObserver(() => send(document.body.textContent)).observe(document.body, { childList: true });
</script>
<script type="module">CODE</script>"""


@pytest.fixture(scope="module")
def apps_folder(tmp_path_factory):
    """The reader's folder: an audio file, and what the page converts, made when a block first needs it."""
    folder = tmp_path_factory.mktemp("apps")
    (folder / "build").mkdir()
    shutil.copy(ROOT / "src/whisperport/speech/data/speech/01-espeak.wav", folder / "talk.wav")
    return folder


def printed_by_app(app, code, folder):
    """What a block prints in the environment of its app, or shows on a page of a browser."""
    command = command_of(app)
    if app.installer == "pip":
        (folder / "block.py").write_text(f"{READ_SAMPLES}\n{code}")
        line = [*command, "-I", "block.py"]
        ended = subprocess.run(line, cwd=folder, capture_output=True, text=True)
        return ended.stdout + ended.stderr
    if BROWSER is None:
        pytest.skip("chromium is not installed")
    (folder / "node_modules").symlink_to(Path(command[-1], "node_modules"))
    (folder / "index.html").write_text(WEB_PAGE.replace("CODE", code))
    return shown_by_browser(folder)


def shown_by_browser(folder):
    """What the page in a folder sends."""
    shown, is_there = [], threading.Event()

    class Handler(SimpleHTTPRequestHandler):
        def do_POST(self):
            shown.append(self.rfile.read(int(self.headers["content-length"])).decode())
            is_there.set()
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        options = [
            "--headless=new",
            "--disable-gpu",
            "--no-sandbox",
            f"--user-data-dir={folder}/user",
        ]
        page = f"http://127.0.0.1:{server.server_port}/"
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        with subprocess.Popen([BROWSER, *options, page], **quiet) as browser:
            is_there.wait(120)
            browser.terminate()
        server.shutdown()
    return "".join(shown)


@pytest.mark.parametrize(
    ("module", "code"),
    [(match[1], code) for _, code in blocks(APPS_PAGE) if (match := IMPORTS.search(code))],
    ids=lambda text: APPS[text].name if text in APPS else "",
)
def test_an_apps_lines_print_what_was_said(module, code, apps_folder):
    # given an app, and the folder that the page's command writes for it
    app = APPS[module]
    if os.environ.get("WHISPERPORT_TEST_APPS") != "1":
        pytest.skip("make test-apps runs it")
    if command_of(app) is None:
        pytest.skip(f"{app.name} is not installed: whisperport apps --install {app.name}")
    for language, lines in blocks(APPS_PAGE):
        for line in lines.splitlines() if language == "sh" else ():
            out = line.partition("--out build/")[2]
            is_read = out and re.search(rf"[\"/]{re.escape(out)}[\"/]", code)
            if is_read and not (apps_folder / "build" / out).exists():
                run(
                    "sh",
                    f"{line.replace('my-finetune', 'default')} --allow-unverified",
                    apps_folder,
                )
    # when the page's lines run
    printed = printed_by_app(app, code, apps_folder)
    # then they print the text of the audio
    assert shipped_clips()[0].text.rstrip(".") in printed


@pytest.mark.parametrize("page", ["add-a-rule.md", "add-a-rewrite.md", "add-a-target.md"])
def test_a_page_for_contributors_is_short(page: str) -> None:
    assert len((ROOT / HOW_TO / page).read_text(encoding="utf-8").split()) <= LONGEST


def test_the_rule_of_the_how_to_finds_what_its_case_says() -> None:
    check, case, limit = code_blocks(ROOT / HOW_TO / "add-a-rule.md", "python")
    cases: dict[str, Any] = {}

    exec(check, {"__name__": "page"})
    exec(case, {**vars(test_rules), "CASES": cases})
    exec(limit, declared := {"Limit": Limit})

    ((code, (value, broken, reason, whole)),) = cases.items()
    (of_a_target,) = declared["LIMITS"]  # type: ignore[misc]
    rule = RULES.pop(code)
    assert of_a_target == Limit(rule=code, value=value, source=of_a_target.source)
    assert [finding.reason for finding in rule.check(broken, of_a_target)] == [reason]
    assert list(rule.check(whole, of_a_target)) == []
    assert rule.what_to_do


def test_the_rewrite_of_the_how_to_passes_its_own_test() -> None:
    rewrite, test = code_blocks(ROOT / HOW_TO / "add-a-rewrite.md", "python")
    known = set(REWRITES)
    namespace = {"__name__": "page", "__package__": "tests.model.rewrites"}

    try:
        exec(rewrite, namespace)
        exec(test, namespace)
        namespace["test_a_square_becomes_a_multiplication"]()  # type: ignore[operator]
    finally:
        added = set(REWRITES) - known
        for name in added:
            del REWRITES[name]

    assert added == {"square-by-multiplication"}
