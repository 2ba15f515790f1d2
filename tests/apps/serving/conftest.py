"""Fixtures: the embedded model, loaded once, and a client of its application."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from whisperport.targets import RunOptions
from whisperport.transcription import Transcriber

from ...embedded import default_bundle


@pytest.fixture(scope="session")
def transcriber() -> Transcriber:
    return Transcriber(default_bundle(), RunOptions(threads=1))


@pytest.fixture
def serving(transcriber: Transcriber) -> Iterator[Callable[..., Any]]:
    """`serving(**options)`: a client of an application; `client.service` is what is served.

    `serving(of=transcriber, ...)`: of another bundle than the embedded model's.
    """
    testclient = pytest.importorskip("starlette.testclient")
    pytest.importorskip("python_multipart")
    from whisperport.apps.serving.app import create_app
    from whisperport.apps.serving.serve_options import ServeOptions
    from whisperport.apps.serving.service import Service

    made: list[Service] = []

    def make(of: Transcriber = transcriber, **options: Any) -> Any:
        service = Service(of, ServeOptions(**options))
        made.append(service)
        client = testclient.TestClient(create_app(service), base_url="http://localhost:8000")
        client.service = service
        return client

    yield make
    for service in made:
        service.scheduler.close(0)


@pytest.fixture
def client(serving: Callable[..., Any]) -> Any:
    return serving()
