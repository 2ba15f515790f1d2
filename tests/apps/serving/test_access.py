"""Who may use a server, and how much they may send."""

import asyncio
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import pytest

from whisperport.apps.serving.keys import Keys
from whisperport.apps.serving.options import ServeOptions
from whisperport.apps.serving.origins import is_allowed_origin, is_known_host, is_local
from whisperport.errors import UsageError

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
