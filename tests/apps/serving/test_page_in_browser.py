"""The page in Debian's chromium."""

import base64
import json
import re
import time
import wave
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.speech.audio import load_audio
from whisperport.speech.text import write_srt, write_txt, write_vtt
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

from ...extent import CHROMIUM, IN_BROWSER
from .test_process import CLIP, URL, Server

sync_api = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
axe_of = pytest.importorskip("axe_playwright_python.sync_playwright")

pytestmark = IN_BROWSER
LONG = next(audio.path for audio in shipped_audio() if audio.seconds > 60)
KEY, NAME = "a-long-key-of-tests", "captions.test"  # the name is not localhost: no microphone
FLAGS = [
    "--headless=new",  # not headless-shell, which has no microphone
    "--no-sandbox",
    "--autoplay-policy=no-user-gesture-required",
    "--use-fake-ui-for-media-stream",
    "--use-fake-device-for-media-stream",
    f"--host-resolver-rules=MAP {NAME} 127.0.0.1",
]
TWO_HOURS, N_WORDS = 7200, 20_000  # seconds, words: an audio book has so many
TASKS = "disabled-by-default-devtools.timeline"  # of Chrome's trace
LONGEST_TASK_MS = 500  # CPU time of the page's thread: what other programs use does not count


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the microphone receives: two clips with pauses."""
    path = tmp_path_factory.mktemp("microphone") / "spoken.wav"
    clips = [audio.path for audio in shipped_audio() if audio.path.name[:2] in ("03", "04")]
    pause = np.zeros(24_000, np.float32)
    write_wav(path, np.concatenate([pause, *(p for c in clips for p in (load_audio(c), pause))]))
    return path


@pytest.fixture(scope="module")
def browser(spoken: Path) -> Iterator[Any]:
    flags = [*FLAGS, f"--use-file-for-fake-audio-capture={spoken}%noloop"]
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=flags, headless=False)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"), "--allowed-host", NAME)
    yield server
    server.process.kill()
    server.process.wait()


@pytest.fixture
def page(browser: Any, server: Server) -> Iterator[Any]:
    page = browser.new_page(viewport={"width": 1200, "height": 800})
    problems: list[str] = []
    page.on("console", lambda message: problems.append(message.text))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(server.url)
    yield page
    page.close()
    assert [text for text in problems if "the server responded with a status" not in text] == []


def test_a_dropped_file_shows_progress_and_its_words(page: Any, transcriber: Transcriber) -> None:
    page.evaluate(
        """() => {
            window.seen = [];
            new MutationObserver(() => {
                const value = document.querySelector("progress")?.getAttribute("value");
                const state = document.querySelector(".state")?.textContent;
                window.seen.push([state, value && Number(value)]);
            }).observe(
                document.getElementById("queue"), {subtree: true, childList: true, attributes: true});
        }"""
    )
    drop(page, LONG)
    page.wait_for_selector(".word")

    seen = page.evaluate("window.seen")
    values = [value for _, value in seen if value]
    segments = transcriber.transcribe(LONG, word_timestamps=True).segments
    assert [state for state, _ in seen if re.fullmatch(r"0:\d\d of 1:16", state)]
    assert [value for value in values if 0 < value < 1]
    assert values == sorted(values)
    assert page.locator(".segment > p").all_inner_texts() == [s.text.strip() for s in segments]
    assert page.locator(".state").inner_text() == "Done · 1:16"


def test_a_word_that_is_clicked_is_played_and_the_next_ones_are_marked(page: Any) -> None:
    chosen = transcribe(page, LONG)
    word = chosen["words"][30]

    page.locator(".word").nth(30).click()
    until(page, "document.querySelector('.word[aria-current]')?.dataset.word === '30'")
    start = playing(page)

    until(page, "Number(document.querySelector('.word[aria-current]').dataset.word) > 31")
    assert word["start"] - 0.02 <= start < word["end"] + 1
    assert not page.evaluate("player.paused")
    assert playing(page) >= chosen["words"][32]["start"]


def test_the_transcript_is_read_with_keys(page: Any) -> None:
    words = transcribe(page, LONG)["words"]
    current = page.locator(".word[aria-current]")
    first = [
        int(n)
        for n in page.eval_on_selector_all(
            ".segment > button", "all => all.map(one => one.dataset.word)"
        )
    ]
    keys = {"ArrowRight": 1, "ArrowDown": first[1], "ArrowUp": 0, "End": first[-1], "Home": 0}

    page.focus("#transcript")
    page.keyboard.press("ArrowRight")
    for key, expected in keys.items():
        page.keyboard.press(key)
        until(page, "!player.seeking")

        assert int(current.get_attribute("data-word")) == expected
        assert playing(page) == pytest.approx(words[expected]["start"], abs=0.01)
    for paused in ("false", "true"):
        page.keyboard.press("Space")
        until(page, f"player.paused === {paused}")


def test_a_transcript_is_searched_edited_and_copied(page: Any) -> None:
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    transcribe(page, LONG)
    before = page.locator(".segment > p").first.inner_text()
    matches = page.locator("#matches")

    page.fill("#search", "living ROOM")
    count = int(matches.inner_text().removeprefix("1 of "))
    page.press("#search", "Enter")
    assert matches.inner_text() == f"2 of {count}"
    page.press("#search", "Shift+Enter")
    assert page.locator(".here").all_inner_texts() == ["living", "room"]
    page.click("#edit")
    page.locator(".word").nth(3).click()
    page.keyboard.type("<b>kitchen</b>")
    page.keyboard.press("Enter")
    page.locator(".word").nth(0).click()
    page.keyboard.type("nothing")
    page.keyboard.press("Escape")
    page.locator(".word").nth(4).click()
    page.keyboard.press("Delete")
    page.keyboard.press("Enter")
    page.wait_for_timeout(300)
    page.click("#copy")

    sync_api.expect(page.locator("#copy")).to_have_text("Copied")
    copied = page.evaluate("navigator.clipboard.readText()")
    expected = before.replace("room", "<b>kitchen</b>").replace(" window,", "")
    assert before.split()[3:5] == ["room", "window,"]
    assert page.locator(".segment > p").first.inner_text() == expected
    assert copied.splitlines()[0] == expected
    assert copied == download(page, "[data-form=txt]")[1]
    assert page.locator("#transcript b").count() == 0
    assert page.evaluate("player.paused")


def test_on_a_phone_the_transcript_comes_first(page: Any) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    sync_api.expect(page.locator("#result")).to_be_hidden()

    transcribe(page, CLIP)

    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert page.evaluate(f"{top.format('#transcript')} < {top.format('#drop')}")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_downloads_are_what_the_package_writes(
    page: Any, server: Server, transcriber: Transcriber
) -> None:
    segments = transcriber.transcribe(LONG, word_timestamps=True).segments
    fields = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
    document = server.post(LONG.read_bytes(), **fields).json()
    transcribe(page, LONG)

    found = {form: download(page, f"[data-form={form}]") for form in ("txt", "srt", "vtt", "json")}

    assert {name for name, _ in found.values()} == {f"19-long.{form}" for form in found}
    assert found["txt"][1] == write_txt(segments)
    assert found["srt"][1] == write_srt(segments)
    assert found["vtt"][1] == write_vtt(segments)
    for name in ("text", "words", "duration", "language"):
        assert json.loads(found["json"][1])[name] == document[name]


def test_files_wait_for_others_and_can_be_cancelled_and_tried_again(
    page: Any, server: Server
) -> None:
    page.set_input_files("#choose", [LONG, LONG, CLIP])
    states = page.locator(".state")
    assert states.nth(2).inner_text() == "Waiting"

    page.get_by_label(f"Cancel {LONG.name}").first.click()

    sync_api.expect(states.nth(0)).to_have_text("Cancelled")
    sync_api.expect(states.nth(2)).to_have_text("Done · 0:04", timeout=60_000)
    sync_api.expect(states.nth(1)).to_have_text("Done · 1:16", timeout=60_000)
    page.click("#again")
    sync_api.expect(states.nth(0)).to_have_text("Done · 1:16", timeout=60_000)
    page.get_by_label(f"Remove {LONG.name}").first.click()
    assert page.locator("#queue li").count() == 2
    statuses = re.findall(rf"POST {URL} (\d+)", server.log.read_text())
    assert statuses[-4:].count("200") == 3  # the one that was cancelled has none


def test_what_is_wrong_with_a_file_is_told(page: Any, tmp_path: Path) -> None:
    file = tmp_path / "text.wav"
    file.write_text("text, not audio")

    page.set_input_files("#choose", file)

    sync_api.expect(page.locator("#summary")).to_contain_text("Unrecognized file format")
    assert page.locator(".state").inner_text() == "Failed"


def test_a_key_is_asked_for_where_the_server_has_one(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(KEY)
    server = Server(tmp_path, "--api-key-file", str(tmp_path / "keys"))
    page = browser.new_page()
    page.goto(server.url)
    page.set_input_files("#choose", CLIP)
    note = page.locator("#key-note")

    for key, text in (("wrong-key", "does not accept"), (KEY, "")):
        page.fill("#key-value", key)
        page.click("#key button")
        if text:
            sync_api.expect(note).to_contain_text(text)
            assert page.locator(".state").inner_text() == "Waiting"

    sync_api.expect(page.locator(".state")).to_have_text("Done · 0:04", timeout=30_000)
    sync_api.expect(page.locator("#key")).to_be_hidden()
    assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
    captions_of(page)
    page.close()
    server.process.kill()
    server.process.wait()


def test_the_microphone_becomes_captions(page: Any) -> None:
    page.evaluate(
        """() => {
            window.tentative = [];
            new MutationObserver(() => {
                const found = document.querySelector(".tentative")?.textContent;
                if (found) window.tentative.push(found);
            }).observe(document.getElementById("spoken"), {subtree: true, childList: true});
        }"""
    )

    lines = captions_of(page)

    assert lines[0] == "Set the hallway temperature to four point zero degrees."
    assert page.evaluate("window.tentative")  # how many: as many as the machine has time for
    assert page.locator(".tentative").count() == 0
    name, text = download(page, "#save-captions")
    assert (name, text.splitlines()) == ("captions.txt", lines)


def test_captions_go_on_after_the_connection_broke(page: Any) -> None:
    page.add_init_script(
        """window.sockets = [];
        window.WebSocket = class extends WebSocket {
            constructor(...all) { super(...all); window.sockets.push(this); }
        };"""
    )
    page.reload()

    def break_once() -> None:
        page.wait_for_timeout(3000)
        page.evaluate("sockets[0].close(3000)")

    lines = captions_of(page, break_once)

    assert page.evaluate("sockets.length") == 2
    assert lines[0] == "Set the hallway temperature to four point zero degrees."


def test_a_page_that_may_not_use_the_microphone_says_so(browser: Any, server: Server) -> None:
    page = browser.new_page()

    page.goto(server.url.replace("127.0.0.1", NAME))

    sync_api.expect(page.locator("#listen")).to_be_disabled()
    sync_api.expect(page.locator("#listen-note")).to_contain_text("https:// pages and on localhost")
    page.close()


def test_a_transcript_of_two_hours_does_not_freeze_the_page(
    browser: Any, page: Any, tmp_path: Path
) -> None:
    file = tmp_path / "two-hours.wav"
    with wave.open(str(file), "wb") as audio:
        audio.setnchannels(1), audio.setsampwidth(1), audio.setframerate(3000)
        audio.writeframes(b"\x80" * 3000 * TWO_HOURS)
    answer(page, long_document())

    browser.start_tracing(page=page, categories=[TASKS])
    page.set_input_files("#choose", file)
    until(page, f"document.querySelectorAll('.word').length === {N_WORDS}")
    shown_ms = longest_task(browser.stop_tracing())
    browser.start_tracing(page=page, categories=[TASKS])
    page.locator(".word").nth(15_000).click()
    until(page, "document.querySelector('.word[aria-current]')?.dataset.word === '15000'")
    page.focus("#transcript")
    for _ in range(5):
        page.keyboard.press("ArrowDown")
    page.mouse.wheel(0, -20_000)
    page.wait_for_timeout(300)
    used_ms = longest_task(browser.stop_tracing())

    print(f"longest task: {shown_ms:.0f} ms of CPU time shown, {used_ms:.0f} ms used")
    assert playing(page) > TWO_HOURS * 0.7
    assert 0 < max(shown_ms, used_ms) < LONGEST_TASK_MS


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=window.hacked=1>",
        "</script><script>window.hacked=1</script>",
        "\u202egpj.exe \x00\x1b[31m {{hacked}} ${hacked} &lt;b&gt; -->",
    ],
)
def test_text_of_a_transcript_is_never_markup(page: Any, text: str) -> None:
    words = [{"word": w, "start": 0, "end": 1, "probability": 0.1} for w in text.split()]
    document = {**EMPTY, "text": text, "language": text, "words": words}
    document["segments"] = [
        {"seek": 0, "start": 0, "end": 1, "text": f" {text}", "truncated": True}
    ]
    answer(page, document, deltas=[text])

    page.set_input_files(
        "#choose", {"name": f"{text}.wav", "mimeType": "audio/wav", "buffer": CLIP.read_bytes()}
    )
    page.wait_for_selector(".word")

    assert page.locator(".segment > p").first.text_content() == text
    assert page.locator("#name").text_content() == f"{text}.wav"
    assert page.evaluate(
        "[window.hacked, document.querySelectorAll('#result img, #result script').length]"
    ) == [None, 1]
    subtitle = download(page, "[data-form=srt]")[1]
    assert subtitle.count("-->") == 1
    assert not re.search("[\x00\x1b\u202e]", subtitle)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1200, 390])
def test_axe_finds_nothing_serious(page: Any, scheme: str, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    page.emulate_media(color_scheme=scheme)
    words = ["one", "two", "three"]
    document = {**EMPTY, "text": " ".join(words)}
    document["segments"] = [{"seek": 0, "start": 0, "end": 3, "text": document["text"]}]
    document["words"] = [
        {"word": word, "start": n, "end": n + 1, "probability": (0.1, 0.5, 0.9)[n]}
        for n, word in enumerate(words)
    ]
    answer(page, document)
    problems = serious(page)

    page.set_input_files("#choose", [CLIP, CLIP])
    page.click("summary")
    page.wait_for_selector(".word")
    problems += serious(page)
    page.click(".word >> nth=2")
    problems += serious(page)
    page.fill("#search", "e")
    page.click("#edit")
    page.click(".word >> nth=1")
    problems += serious(page)
    page.keyboard.press("Escape")
    page.click("#listen")
    page.wait_for_selector(".tentative")
    problems += serious(page)

    assert problems == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


EMPTY: dict[str, Any] = {
    "task": "transcribe",
    "language": "english",
    "duration": TWO_HOURS,
    "text": "",
    "words": [],
    "segments": [],
}


def long_document() -> dict[str, Any]:
    """A transcript of two hours as the server writes it."""
    step = TWO_HOURS / N_WORDS
    words = [
        {"word": f"word{n}", "start": n * step, "end": (n + 1) * step, "probability": n % 10 / 10}
        for n in range(N_WORDS)
    ]
    segments = [
        {
            "seek": first,
            "start": words[first]["start"],
            "end": words[first + 7]["end"],
            "text": "".join(f" word{n}" for n in range(first, first + 8)),
            "tokens": list(range(50_000, 50_030)),
        }
        for first in range(0, N_WORDS, 8)
    ]
    return {**EMPTY, "words": words, "segments": segments, "text": "word" * N_WORDS}


def answer(page: Any, document: dict[str, Any], deltas: list[str] | None = None) -> None:
    """Answer the page's requests with a transcript that no model here produces."""
    texts = deltas or [segment["text"] for segment in document["segments"]]
    events = [{"type": "transcript.text.delta", "delta": text, "end": 1} for text in texts]
    events.append({"type": "transcript.text.done", **document})
    body = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    page.route(f"**{URL}", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def drop(page: Any, path: Path) -> None:
    """Drop a file on the page."""
    page.evaluate(
        """([name, data]) => {
            const bytes = Uint8Array.from(atob(data), (one) => one.charCodeAt(0));
            const dataTransfer = new DataTransfer();
            dataTransfer.items.add(new File([bytes], name, {type: "audio/flac"}));
            for (const type of ["dragenter", "dragover", "drop"])
                document.getElementById("drop").dispatchEvent(
                    new DragEvent(type, {dataTransfer, bubbles: true, cancelable: true}));
        }""",
        [path.name, base64.b64encode(path.read_bytes()).decode()],
    )


def transcribe(page: Any, path: Path) -> dict[str, Any]:
    """Choose a file, and return its document."""
    page.set_input_files("#choose", path)
    page.wait_for_selector(".word", timeout=60_000)
    return dict(json.loads(download(page, "[data-form=json]")[1]))


def download(page: Any, selector: str) -> tuple[str, str]:
    """Click, and return name and text of the file that the browser saves."""
    with page.expect_download() as started:
        page.click(selector)
    return started.value.suggested_filename, started.value.path().read_bytes().decode()


def captions_of(page: Any, meanwhile: Callable[[], None] = lambda: None) -> list[str]:
    """Run the microphone for as long as it receives the first clip, and return the lines."""
    page.click("#listen")
    meanwhile()
    until(page, "document.getElementById('spoken').textContent.includes('zero degrees')", 30)
    page.click("#listen")
    sync_api.expect(page.locator("#listen-note")).to_have_text(
        "The microphone is off.", timeout=30_000
    )
    return [text.strip() for text in page.locator("#spoken p").all_inner_texts()]


def until(page: Any, condition: str, within_s: float = 10) -> None:
    """Wait for a condition. Playwright's own way needs `eval` in the page, which its policy forbids."""
    end = time.monotonic() + within_s
    while not page.evaluate(condition):
        assert time.monotonic() < end, condition
        time.sleep(0.02)


def playing(page: Any) -> float:
    """Where the playback is, in seconds."""
    return float(page.evaluate("player.currentTime"))


def longest_task(trace: bytes) -> float:
    """Return the CPU time, in ms, of the longest task of a page in Chrome's trace."""
    events = json.loads(trace)["traceEvents"]
    pages = {
        (event["pid"], event["tid"])
        for event in events
        if event.get("args", {}).get("name") == "CrRendererMain"
    }
    tasks = [
        event.get("tdur", 0)  # a task that the trace cuts has none
        for event in events
        if event["name"] == "RunTask" and (event["pid"], event["tid"]) in pages
    ]
    return max(tasks) / 1000


def serious(page: Any) -> list[str]:
    """What axe-core finds that is serious or worse."""
    found = axe_of.Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['nodes'][0]['html']}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def write_wav(path: Path, samples: Any) -> None:
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1), file.setsampwidth(2), file.setframerate(16_000)
        file.writeframes((samples * 32767).astype("<i2").tobytes())
