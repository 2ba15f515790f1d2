"""A server as a process: how it ends, and what it leaves; and what its page at `/` consists of.

What the page does is in `test_page_in_browser.py`.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from whisperport.apps.serving import serve
from whisperport.apps.serving.keys import Keys
from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.errors import UsageError
from whisperport.speech.audio import load_audio
from whisperport.speech.text import write_srt
from whisperport.transcription import Transcriber
from whisperport.verification.clips import shipped_audio

from ...embedded import default_bundle
from ...terms import uses

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")
pytestmark = pytest.mark.needs("uvicorn")
CLIP = shipped_audio()[0].path
URL = "/v1/audio/transcriptions"
CLIENTS = Path(__file__).parent / "clients"
# Its packages: openai, srt, webvtt-py, pysubs2, prometheus-client; wyoming, aiohttp, voluptuous.
PYTHON_OF_CLIENTS = os.environ.get("WHISPERPORT_CLIENTS")
HOME_ASSISTANT = os.environ.get("WHISPERPORT_HOME_ASSISTANT")  # an unpacked wheel `homeassistant`
NODE_OF_CLIENTS = os.environ.get("WHISPERPORT_NODE_CLIENTS")  # a folder with openai in node_modules


class Server:
    """A process of `whisperport serve` with the embedded model."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.log, self.temporary = folder / "log", folder / "temporary"
        self.temporary.mkdir()
        command = [sys.executable, "-m", "whisperport", "serve", "--bundle", str(default_bundle())]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--port", "0", "--threads", "1", *arguments],
                stderr=log,
                env=os.environ | {"TMPDIR": str(self.temporary)},
            )
        until = time.monotonic() + 60
        while not (found := re.findall(r"listening on (\S+)", self.log.read_text())):
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until
            time.sleep(0.02)
        self.url = found[0]

    def post(self, data: bytes, **fields: str) -> Any:
        files, fields = {"file": ("x", data)}, {"model": "whisper-1"} | fields
        return httpx.post(f"{self.url}{URL}", data=fields, files=files, timeout=60, trust_env=False)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", trust_env=False).text


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path, "--idle-seconds", "5", "--drain-seconds", "60")
    yield made
    if made.process.poll() is None:
        made.process.kill()
    made.process.wait(30)


def wav_of(seconds: float) -> bytes:
    """Speech as a wav file, larger than what is kept in memory."""
    samples = load_audio(CLIP)
    samples = np.tile(samples, int(seconds * 16_000 / samples.size) + 1)
    data = np.round(samples * 32767).astype("<i2").tobytes()
    head = b"RIFF" + (36 + len(data)).to_bytes(4, "little") + b"WAVEfmt \x10\0\0\0\1\0\1\0"
    head += (16_000).to_bytes(4, "little") + (32_000).to_bytes(4, "little") + b"\2\0\x10\0data"
    return head + len(data).to_bytes(4, "little") + data


def test_a_signal_lets_a_request_finish_and_a_half_open_connection_is_closed(
    server: Server, transcriber: Transcriber
) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    with socket.create_connection(address) as silent:
        silent.settimeout(30)
        assert silent.recv(1) == b""  # closed after `idle_seconds`
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, wav_of(40))
        while "requests_running 1" not in server.metrics():
            time.sleep(0.01)
        server.process.terminate()

        assert answer.result().json()["text"].startswith(transcriber.transcribe(CLIP).text[:20])

    assert server.process.wait(30) == 0
    assert list(server.temporary.iterdir()) == []
    with pytest.raises(httpx.TransportError):
        server.post(CLIP.read_bytes())


def test_what_is_not_http_is_answered_in_openais_shape_once(server: Server) -> None:
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    head = b"HTTP/1.1\r\nhost: localhost\r\n"
    answers = []

    for first, next_one in (
        (b"GET /\xff " + head + b"\r\n", b""),
        (b"POST /none " + head + b"transfer-encoding: chunked\r\n\r\n", b"not a chunk\r\n"),
    ):
        with socket.create_connection(address) as client, client.makefile("rb") as received:
            client.sendall(first)
            answer = received.readline()
            if next_one:
                client.sendall(next_one)
            answers.append(answer + received.read())

    status, _, rest = answers[0].partition(b"\r\n")
    error = json.loads(rest.partition(b"\r\n\r\n")[2])["error"]
    assert (status, error["type"]) == (b"HTTP/1.1 400 Bad Request", "invalid_request_error")
    assert answers[1].startswith(b"HTTP/1.1 404")
    assert answers[1].count(b"HTTP/1.1") == 1
    assert "warning" not in server.log.read_text()


def test_a_second_signal_ends_the_server_at_once(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.post, wav_of(300))
        # An upload that is not admitted yet is refused at the first signal, and a server with nothing else
        # to do may end before the second. The clip of /ready waits too, with a few seconds.
        while not re.search(r"audio_seconds_waiting [12]\d\d", server.metrics()):
            time.sleep(0.01)
        server.process.send_signal(signal.SIGINT)
        time.sleep(0.3)
        assert server.process.poll() is None
        server.process.terminate()

        assert server.process.wait(5) == 128 + signal.SIGTERM
        assert isinstance(answer.exception(30), httpx.TransportError)
    assert list(server.temporary.iterdir()) == []


def test_a_certificate_that_is_none_is_named(transcriber: Transcriber, tmp_path: Path) -> None:
    certificate, key = tmp_path / "chain.pem", tmp_path / "key.pem"
    for path in (certificate, key):
        path.write_text("no PEM file")

    with pytest.raises(UsageError, match=r"chain\.pem") as error:
        serve(transcriber, ServeOptions(port=0, certfile=certificate, keyfile=key))

    assert "key.pem" in error.value.what


def test_an_address_in_use_is_an_error_before_the_bundle_is_loaded() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        options = ServeOptions(port=taken.getsockname()[1])

        with pytest.raises(UsageError, match="cannot listen on"):
            serve("no such model", options)


@pytest.mark.slow
@pytest.mark.parametrize("client", ["python", "node"])
def test_openais_own_clients_get_what_they_expect(server: Server, client: str) -> None:
    if not (where := PYTHON_OF_CLIENTS if client == "python" else NODE_OF_CLIENTS):
        pytest.skip(
            "set WHISPERPORT_CLIENTS and WHISPERPORT_NODE_CLIENTS: see tests/apps/serving/clients"
        )
    python = [where, str(CLIENTS / "openai_python.py")]
    node = ["node", str(CLIENTS / "openai_node.mjs")]
    text = json.loads(server.post(CLIP.read_bytes()).text)["text"]
    arguments = [server.url, str(CLIP), str(shipped_audio()[17].path), text]

    found = subprocess.run(
        [*(python if client == "python" else node), *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"NODE_FOLDER": where, "PYTHONPATH": ""},
    )

    assert found.stdout == "ok\n", found.stderr


@pytest.mark.slow
def test_home_assistants_own_integration_gets_every_text(
    tmp_path: Path, transcriber: Transcriber
) -> None:
    if not (PYTHON_OF_CLIENTS and HOME_ASSISTANT):
        pytest.skip("set WHISPERPORT_CLIENTS and WHISPERPORT_HOME_ASSISTANT: see above")
    server = Server(tmp_path, "--wyoming", "tcp://127.0.0.1:0")
    try:
        while not (port := re.findall(r"tcp://127.0.0.1:(\d+)", server.log.read_text())):
            time.sleep(0.02)
        client = [PYTHON_OF_CLIENTS, str(CLIENTS / "home_assistant.py"), HOME_ASSISTANT]
        text = transcriber.transcribe(CLIP).text.strip()

        found = subprocess.run(
            [*client, "127.0.0.1", port[0], "en", str(CLIP), text],
            capture_output=True,
            text=True,
            timeout=600,
            env=os.environ | {"PYTHONPATH": ""},
        )
    finally:
        server.process.kill()
        server.process.wait(30)

    assert found.stdout == "ok\n", found.stderr


# The page

# The page at `/`: what it consists of. What it does is in `test_page_in_browser.py`.

FILES = {
    file.name: file.read_text("utf-8")
    for file in (files("whisperport.apps.serving") / "page").iterdir()
}
SCRIPTS = {name: text for name, text in FILES.items() if name.endswith(".js")}
STATIC = sorted(FILES.keys() - {"index.html"})


def test_the_page_forbids_all_that_is_not_of_this_server(client: Any) -> None:
    answer = client.get("/")

    policy = answer.headers["content-security-policy"].split("; ")
    assert answer.text == FILES["index.html"]
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert {"default-src 'self'", "frame-ancestors 'none'", "base-uri 'none'"} <= set(policy)
    assert not re.search("unsafe|data:|https?:|[*]", answer.headers["content-security-policy"])


@pytest.mark.parametrize("name", STATIC)
def test_a_file_of_the_page_is_served_with_its_type(client: Any, name: str) -> None:
    types = {"css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}

    answer = client.get(f"/static/{name}")

    assert answer.text == FILES[name]
    assert answer.headers["content-type"].startswith(types[name.rpartition(".")[2]])
    assert "default-src 'self'" in answer.headers["content-security-policy"]


@pytest.mark.parametrize("name", ["", "none.js", "../app.py", "..%2fapp.py", "a/b"])
def test_nothing_else_is_served(client: Any, name: str) -> None:
    assert client.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_file_refers_to_nothing_outside(name: str) -> None:
    found = re.findall(r"\b[a-z]+://[^\"'\s]*", FILES[name])

    assert [url for url in found if url not in ("http://www.w3.org/2000/svg", "https://")] == []


def test_the_page_has_neither_scripts_nor_styles_inside_of_it() -> None:
    html = FILES["index.html"]

    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert re.findall(r"<script[^>]*>([^<]*)", html) == [""]
    for text in SCRIPTS.values():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text)


def test_every_file_is_used_and_every_name_exists() -> None:
    html, text = FILES["index.html"], "".join(SCRIPTS.values())
    served = re.findall(r'"static/([\w.]+)"', html + text)
    imported = re.findall(r'from "\./([\w.]+)"', text)
    ids = set(re.findall(r'id="([\w-]+)"', html))

    assert {*served, *imported} == {*STATIC, "server.json"}
    assert set(re.findall(r'byId\("([\w-]+)"\)', text)) <= ids
    assert {*re.findall(r'(?:for|aria-\w+)="([a-z]+-[a-z-]+)"', html)} <= ids


@pytest.mark.parametrize("keys", [[], ["a-long-key"]])
def test_the_page_needs_no_key_and_knows_whether_the_api_does(
    serving: Callable[..., Any], keys: list[str]
) -> None:
    client = serving(keys=Keys(keys), model_id="my-model", max_body_mib=3)

    assert client.get("/").status_code == 200
    assert client.get("/static/server.json").json() == {
        "model": "my-model",
        "needs_key": bool(keys),
        "max_body_bytes": 3 * 2**20,
        "languages": {"en": "english"},
        "translates": False,
    }


def test_the_page_uses_the_projects_terms() -> None:
    html = re.sub(r"<[^>]*>|&\w+;", " ", FILES["index.html"])
    texts = re.findall(
        r'"([^"\n]* [^"\n]*)"|`([^`]* [^`]*)`|/\*\*(.*?)\*/', "".join(SCRIPTS.values()), re.S
    )

    assert [use.text for use in uses(html)] == []
    assert [use.text for parts in texts for text in parts for use in uses(text)] == []


# What the page does with transcripts, in node: editing, searching, and files without speech.

NODE = shutil.which("node")
WORDS = ["One", "two", "three.", "Four."]
DOCUMENT: dict[str, Any] = {
    "text": "One two three. Four.",
    "segments": [
        {"text": " One two three.", "start": 0, "end": 3},
        {"text": " ", "start": 3, "end": 3},
        {"text": " Four.", "start": 3, "end": 4},
    ],
    "words": [
        {"word": word, "start": n, "end": n + 1, "probability": 0.2} for n, word in enumerate(WORDS)
    ],
}


def evaluated(expression: str, document: dict[str, Any] = DOCUMENT) -> Any:
    """The value of an expression, in which `d` is a document and `page` is the module."""
    with as_file(files("whisperport.apps.serving") / "page" / "formats.js") as path:
        script = (
            f"import * as page from {json.dumps(path.as_uri())};\n"
            f"const d = {json.dumps(document)}; console.log(JSON.stringify({expression}))"
        )
        assert NODE
        command = [NODE, "--input-type=module", "--experimental-default-type=module", "-"]
        found = subprocess.run(command, input=script, capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_an_edited_word_is_in_the_text_its_segment_and_the_words() -> None:
    found = evaluated("page.edited(d, 1, '  too   many ')")

    assert found["text"].split() == ["One", "too", "many", "three.", "Four."]
    assert [one["text"] for one in found["segments"]] == [" One too many three.", " ", " Four."]
    assert found["words"][1] == {"word": "too many", "start": 1, "end": 2, "probability": 1}
    assert [*found["words"][:1], *found["words"][2:]] == [
        *DOCUMENT["words"][:1],
        *DOCUMENT["words"][2:],
    ]
    assert (
        evaluated("page.edited(page.edited(d, 1, 'x y'), 1, 'two').segments")
        == DOCUMENT["segments"]
    )


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_a_word_without_text_is_removed() -> None:
    found = evaluated("page.edited(page.edited(d, 3, ''), 0, ' ')")

    assert found["text"] == "two three."
    assert [one["word"] for one in found["words"]] == ["two", "three."]
    assert evaluated("page.FORMS.txt[1](page.edited(d, 3, ''))") == "One two three.\n"


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_a_segment_whose_words_differ_from_its_text_is_edited_too() -> None:
    document = DOCUMENT | {"words": DOCUMENT["words"][:3]}

    found = evaluated("page.edited(d, 3, 'Five.')", document)

    assert [one["text"] for one in found["segments"]] == [" One two three.", " ", " Five."]
    assert found["words"] == document["words"]


@pytest.mark.skipif(not NODE, reason="node is not installed")
@pytest.mark.parametrize(
    ("text", "places"),
    [
        ("TWO", [[1, 1]]),
        (" two  three", [[1, 2]]),
        ("o t", [[1, 2]]),
        ("e", [[0, 0], [2, 2], [2, 2]]),
        ("three. four", [[2, 3]]),
        ("five", []),
        (" ", []),
        (".*", []),
    ],
)
def test_a_text_is_found_in_one_word_or_several(text: str, places: list[list[int]]) -> None:
    words = "page.segmentsOf(d).flatMap((s) => s.words.map((w, n) => n ? w : {...w, before: ' '}))"

    assert evaluated(f"page.places({words}, {json.dumps(text)})") == places


@pytest.mark.skipif(not NODE, reason="node is not installed")
def test_a_transcript_without_speech_is_written_as_by_the_package() -> None:
    document = DOCUMENT | {"segments": [], "words": [], "text": ""}

    assert evaluated("page.FORMS.srt[1](d)", document) == write_srt([])
    assert evaluated("page.FORMS.vtt[1](d)", document) == "WEBVTT\n\n"
