"""What those who operate a server see: models, readiness, metrics and the log."""

import logging
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from whisperport.apps.serving.admission import Admission, Speed
from whisperport.apps.serving.metrics import Metrics
from whisperport.errors import QueueFullError
from whisperport.verification.clips import shipped_audio

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
