"""Who may use a server, and how much they may send."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.serving.admission import Admission, Speed
from whisperport.apps.serving.keys import Keys
from whisperport.apps.serving.metrics import Metrics
from whisperport.apps.serving.origins import is_allowed_origin, is_known_host, is_local
from whisperport.apps.serving.serve_options import ServeOptions
from whisperport.errors import QueueFullError, UsageError
from whisperport.verification.clips import shipped_audio

# Who may use a server, and how much they may send.

KEY, OTHER = "correct-key", "another-key"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"authorization": "Bearer wrong-key"}, 401),
        ({"authorization": f"Basic {KEY}"}, 401),
        ({"authorization": f"Bearer {KEY}"}, 200),
        ({"authorization": f"bearer {OTHER}"}, 200),
        ({"sec-websocket-protocol": f"realtime, openai-insecure-api-key.{KEY}"}, 200),
    ],
)
def test_the_api_needs_one_of_the_keys(
    serving: Callable[..., Any], headers: dict[str, str], status: int
) -> None:
    client = serving(keys=Keys([KEY, OTHER]))

    for path in ("/v1/models", "/metrics"):
        assert client.get(path, headers=headers).status_code == status
    assert client.get("/health", headers=headers).status_code == 200


def test_a_wrong_key_is_an_error_of_openais_shape(serving: Callable[..., Any]) -> None:
    answer = serving(keys=Keys([KEY])).get("/v1/models")

    assert answer.json() == {
        "error": {
            "message": "No API key provided",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }


def test_keys_come_from_a_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"{KEY}\n\n {OTHER} \n")

    assert all(Keys.load(file, {}).open(key) for key in (KEY, OTHER))
    assert Keys.load(None, {"WHISPERPORT_API_KEY_FILE": str(file)}).open(OTHER)
    assert Keys.load(None, {"WHISPERPORT_API_KEY": KEY}).open(KEY)
    assert not Keys.load(None, {"WHISPERPORT_API_KEY": KEY}).open(None)
    assert not Keys.load(None, {})


@pytest.mark.parametrize("text", ["", "\n", "short", "with a space", "ключ-ключ"])
def test_keys_that_cannot_be_used_are_rejected(tmp_path: Path, text: str) -> None:
    file = tmp_path / "keys"
    file.write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match="API key"):
        Keys.load(file, {})


def test_keys_of_a_missing_file_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read"):
        Keys.load(tmp_path / "none", {})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.2", "example.org", ""])
def test_a_public_address_needs_a_key_or_a_decision(host: str) -> None:
    with pytest.raises(UsageError, match="open to everyone"):
        ServeOptions(host=host)

    assert ServeOptions(host=host, keys=Keys([KEY])).keys
    assert ServeOptions(host=host, allow_open=True).allow_open


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_a_local_address_needs_no_key(host: str) -> None:
    assert is_local(host)
    assert ServeOptions(host=host).host == host


@pytest.mark.parametrize(
    "wrong",
    [
        {"certfile": Path("x")},
        {"allowed_origins": ("*",)},
        {"port": 65536},
        {"max_requests": 0},
        {"max_queue_seconds": float("nan")},
    ],
)
def test_options_that_contradict_or_are_out_of_range_are_rejected(wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        ServeOptions(**wrong)


@pytest.mark.parametrize(
    ("host", "known"),
    [
        ("localhost:8000", True),
        ("127.0.0.1", True),
        ("[::1]:8000", True),
        ("10.0.0.7:80", True),
        ("Captions.example:8000", True),
        ("localhost.", True),
        ("evil.example", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("", False),
        ("[", False),
        ("a@localhost:x", False),
    ],
)
def test_a_foreign_name_in_the_host_header_is_rejected(
    serving: Callable[..., Any], host: str, known: bool
) -> None:
    assert is_known_host(host, {"captions.example"}) == known
    client = serving(allowed_hosts=("captions.example",))
    status = client.get("/health", headers={"host": host}).status_code

    assert status == (200 if known else 403)


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://localhost:8000", True),
        ("https://captions.example", True),
        ("http://captions.example", False),
        ("https://captions.example.evil.example", False),
        ("http://localhost:9000", False),
        ("http://evil.example", False),
        ("null", False),
        ("http://[", False),
        ("file://localhost:8000", False),
    ],
)
def test_a_page_of_another_origin_is_rejected(
    serving: Callable[..., Any], origin: str | None, allowed: bool
) -> None:
    origins = ("https://captions.example",)
    assert is_allowed_origin(origin, "localhost:8000", origins) == allowed
    client = serving(allowed_origins=origins)
    answer = client.get("/health", headers={"origin": origin} if origin else {})

    assert answer.status_code == (200 if allowed else 403)
    if origin in origins:
        assert answer.headers["access-control-allow-origin"] == origin


def test_an_allowed_page_may_ask_before_it_sends_its_key(serving: Callable[..., Any]) -> None:
    client = serving(keys=Keys([KEY]), allowed_origins=("https://captions.example",))
    asks = {
        "origin": "https://captions.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization",
    }

    assert client.options("/v1/audio/transcriptions", headers=asks).status_code == 200
    other = client.options("/v1/audio/transcriptions", headers=asks | {"origin": "http://x"})
    assert other.status_code == 400


def parts(count: int, size: int = 1) -> bytes:
    """A multipart body with many fields."""
    one = b'--b\r\ncontent-disposition: form-data; name="f%d"\r\n\r\n' + b"x" * size + b"\r\n"
    return b"".join(one % number for number in range(count)) + b"--b--\r\n"


FORM = {"content-type": "multipart/form-data; boundary=b"}
UPLOAD = {
    "type": "http",
    "method": "POST",
    "path": "/v1/audio/transcriptions",
    "headers": [(b"host", b"localhost"), (b"content-type", FORM["content-type"].encode())],
    "query_string": b"",
}


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        (parts(200), FORM, 400),
        (parts(1, 100_000), FORM, 400),
        (b"\0" * 3_000_000, FORM, 413),
        (b"no boundary here", FORM, 400),
        (b"--b\r\n", {"content-type": "multipart/form-data"}, 400),
        (b"--b\r\nx: y\r\n\r\n\r\n--b--\r\n", FORM, 400),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 400),
        (b"{}", {"content-type": "application/json"}, 400),
        (b"", {}, 400),
    ],
)
def test_a_body_that_is_too_large_or_no_form_is_rejected(
    serving: Callable[..., Any], body: bytes, headers: dict[str, str], status: int
) -> None:
    client = serving(max_body_mib=1)

    for content in (body, iter([body])):  # with a stated length, and without
        answer = client.post("/v1/audio/transcriptions", content=content, headers=headers)

        assert answer.status_code == status
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("pause_s", [60, 0.01])
def test_a_body_that_does_not_arrive_or_drips_is_given_up(
    serving: Callable[..., Any], pause_s: float
) -> None:
    app, sent = serving(idle_seconds=0.1).app, list[dict[str, Any]]()

    pieces = chain([parts(1, 0).partition(b"\r\n--b--")[0]], repeat(b"x"))

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": next(pieces), "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    asyncio.run(app(UPLOAD, receive, send))

    assert sent[0]["status"] == 408


@pytest.mark.parametrize("ends", ["leaves", "does not read"])
def test_a_client_that_is_gone_is_no_error(
    serving: Callable[..., Any], caplog: pytest.LogCaptureFixture, ends: str
) -> None:
    client = serving(idle_seconds=0.1)

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect" if ends == "leaves" else "http.request", "body": b"x"}

    async def send(_: dict[str, Any]) -> None:
        await asyncio.sleep(60)

    asyncio.run(client.app(UPLOAD, receive, send))

    assert client.service.scheduler.admission.requests == 0
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize(
    ("path", "address"),
    [
        ("/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/v1/audio/transcriptions/", "/v1/audio/transcriptions"),
        ("/v1//audio/transcriptions", "/v1/audio/transcriptions"),
        ("//v1/audio//translations//", "/v1/audio/translations"),
        ("/v1/v1/audio/transcriptions", "/v1/audio/transcriptions"),
        ("/models/org/name", "/v1/models/org/name"),
        ("/v1/health", "/health"),
        ("/v1/chat/completions", None),
        ("/v1/", None),
        ("//", None),
    ],
)
def test_the_right_address_is_told_of_a_url_that_is_nearly_one(
    client: Any, path: str, address: str | None
) -> None:
    answer = client.post(f"http://localhost:8000{path}")

    message = answer.json()["error"]["message"]
    assert answer.status_code == 404
    assert message == (f"Unknown URL: the address is {address}" if address else "Unknown URL")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/audio/transcriptions", 405),
        ("POST", "/v1/v1/audio/transcriptions", 404),
        ("GET", "/health/", 404),
        ("GET", "/v1/models/none", 404),
    ],
)
def test_unknown_urls_and_methods_have_errors_of_openais_shape(
    client: Any, method: str, path: str, status: int
) -> None:
    answer = client.request(method, path)

    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


# What those who operate a server see: models, readiness, metrics and the log.

CLIP = shipped_audio()[0].path.read_bytes()


def post(client: Any, **fields: str) -> Any:
    data = {"model": "whisper-1", "prompt": "secret prompt"} | fields
    return client.post("/v1/audio/transcriptions", data=data, files={"file": ("secret name", CLIP)})


def test_the_models_are_the_bundle_by_each_of_its_names(serving: Any) -> None:
    client = serving(model_id="org/my-model")

    models = client.get("/v1/models").json()

    assert models["object"] == "list"
    assert [one["id"] for one in models["data"]] == ["org/my-model", "default", "whisper-1"]
    one = client.get("/v1/models/org/my-model").json()
    assert one == models["data"][0]
    assert len(one["x_whisperport"]["sha256"]) == 64


def test_a_server_is_ready_when_it_has_decoded(client: Any) -> None:
    assert client.service.scheduler.lanes.last_decoded is None

    assert client.get("/ready").json()["status"] == "ready"

    assert client.service.readiness.is_fresh
    assert client.get("/health").json() == {"status": "ok"}


def test_checks_at_the_same_time_decode_once(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service = client.service
    calls, transcribe = [], service.scheduler.transcribe

    def counted(*arguments: Any, **named: Any) -> Any:
        calls.append(arguments)
        return transcribe(*arguments, **named)

    monkeypatch.setattr(service.scheduler, "transcribe", counted)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(service.readiness.check, [60.0] * 4))

    assert found == [True] * 4
    assert len(calls) == 1


def test_a_server_that_cannot_decode_is_not_ready(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> None:
        raise OSError("the device was unplugged")

    monkeypatch.setattr("whisperport.runtime.engine.engine.Engine.encode", broken)

    answer = client.get("/ready")

    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "not_ready"


def test_metrics_count_requests_and_audio(client: Any) -> None:
    post(client)
    post(client, response_format="xml")
    client.get("/v1/wrong-path-of-a-client")

    answer = client.get("/metrics")

    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    lines = [line.rsplit(" ", 1) for line in answer.text.splitlines() if line[0] != "#"]
    found = {name.removeprefix("whisperport_"): float(value) for name, value in lines}
    path = 'endpoint="/v1/audio/transcriptions"'
    assert found[f'requests_total{{{path},status="200"}}'] == 1
    assert found[f'requests_total{{{path},status="400"}}'] == 1
    assert found["audio_seconds_total"] == pytest.approx(4.739, abs=0.01)
    assert found["e2e_seconds_count"] == 1
    assert found["requests_running"] == 0
    assert "wrong-path" not in answer.text


def test_the_log_has_one_line_without_text(client: Any, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "whisperport.apps.serving")

    text = post(client).json()["text"]

    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("whisp")]
    assert line.startswith("POST /v1/audio/transcriptions 200 ")
    assert " audio=4.74 " in line
    assert " tokens=14 " in line
    assert "secret" not in line
    assert text.split()[0] not in line


def test_labels_and_buckets_are_written_as_prometheus_reads_them() -> None:
    metrics = Metrics()
    metrics.describe(bundle='a "b"\\\n')
    metrics.count("x_total", "X", 2, kind="a")
    for seconds in (0.05, 0.06, 5000):
        metrics.observe("y_seconds", "Y", seconds)

    lines = metrics.text().splitlines()

    assert r'whisperport_info{bundle="a \"b\"\\\n"} 1' in lines
    assert 'whisperport_x_total{kind="a"} 2' in lines
    assert 'whisperport_y_seconds_bucket{le="0.05"} 1' in lines
    assert 'whisperport_y_seconds_bucket{le="0.1"} 2' in lines
    assert 'whisperport_y_seconds_bucket{le="+Inf"} 3' in lines
    assert "whisperport_y_seconds_sum 5000.110000" in lines


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_speed_is_measured_only_while_there_is_work() -> None:
    clock = Clock()
    speed = Speed(clock)

    speed.begin()
    clock.now = 1
    speed.measured(20)
    speed.end()
    clock.now = 100
    speed.begin()
    clock.now = 101
    speed.measured(20)

    assert speed.audio_s_per_s == pytest.approx(20)


def test_a_request_is_accepted_if_the_work_before_it_is_short_enough() -> None:
    clock = Clock()
    admission = Admission(max_queue_s=10, max_requests=3, clock=clock)
    admission.enter("first")
    admission.expect("first", 3600)  # the first is never too long
    with pytest.raises(QueueFullError) as found:
        admission.enter("second")
    assert found.value.retry_after_s == 120

    clock.now = 1
    admission.expect("first", 3300)  # 300 s of audio per second: 11 s are left
    with pytest.raises(QueueFullError) as found:
        admission.check()
    assert found.value.retry_after_s == 1
    clock.now = 2
    admission.expect("first", 3000)

    admission.enter("second")
    admission.enter("third")
    with pytest.raises(QueueFullError):
        admission.enter("fourth")
    admission.leave("third")
    admission.leave("third")
    assert admission.requests == 2
