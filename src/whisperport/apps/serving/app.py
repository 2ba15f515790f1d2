"""The web application of a server: routes, and what every request passes."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send

from whisperport.apps.serving.api_error import SERVER, ApiError
from whisperport.apps.serving.guard import Guard
from whisperport.apps.serving.metrics import CONTENT_TYPE
from whisperport.apps.serving.models import model_routes
from whisperport.apps.serving.service import Service
from whisperport.apps.serving.transcriptions import Endpoint
from whisperport.apps.serving.web_page import page_routes

READY_TIMEOUT_S = 20.0  # a clip of 1 s on a slow board
NOT_ALLOWED = "Method not allowed for this URL"


def create_app(service: Service, further: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the application.

    Args:
        service: what is served.
        further: more routes. An endpoint may raise `ApiError` or any `WhisperportError`, which the
            application answers; the key, the host and the origin were checked before.
    """
    audio = "/v1/audio"
    routes = [
        Route(f"{audio}/transcriptions", Endpoint(service, "transcribe"), methods=["POST"]),
        Route(f"{audio}/translations", Endpoint(service, "translate"), methods=["POST"]),
        *model_routes(service),
        *_operation_routes(service),
        *page_routes(service),
        *further,
    ]
    middleware = [Middleware(Guard, service=service)]
    if origins := service.options.allowed_origins:
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["authorization", "content-type"],
        )
        middleware.insert(0, cors)

    async def http_error(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = NOT_ALLOWED if error.status_code == 405 else error.detail
        return ApiError(error.status_code, message, headers=error.headers).response()

    async def not_found(scope: Scope, receive: Receive, send: Send) -> None:
        address = _meant(scope, routes)
        raise ApiError(404, f"Unknown URL: the address is {address}" if address else "Unknown URL")

    handlers = {HTTPException: http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # an unknown URL is a 404
    app.router.default = not_found  # of a WebSocket too, which starlette closes without a reason
    return app


def _operation_routes(service: Service) -> list[Route]:
    """Return the routes for those who operate a server: `/health`, `/ready` and `/metrics`."""

    async def health(_: Request) -> JSONResponse:
        """The process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(_: Request) -> JSONResponse:
        """The bundle was verified, requests are accepted, and a clip was decoded lately, or just now."""
        if not await run_in_threadpool(service.readiness.check, READY_TIMEOUT_S):
            closing = service.scheduler.admission.closed
            message = "The server is shutting down" if closing else "No clip can be decoded now"
            code = "shutting_down" if closing else "not_ready"
            raise ApiError(503, message, kind=SERVER, code=code, headers={"retry-after": "5"})
        return JSONResponse({"status": "ready", **service.about})

    async def all_metrics(_: Request) -> Response:
        return Response(service.metrics.text(), headers={"content-type": CONTENT_TYPE})

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", all_metrics)]


def _meant(scope: Scope, routes: Sequence[BaseRoute]) -> str | None:
    """Return the path that a client meant which has doubled or trailing slashes, or no or several /v1.

    It is told, not redirected: many clients repeat a POST that is redirected as a GET.
    """
    parts = [part for part in scope["path"].split("/") if part]
    while parts[:1] == ["v1"]:
        parts.pop(0)
    rest = "/".join(parts)
    for address in (f"/v1/{rest}", f"/{rest}") if rest else ():
        corrected = {**scope, "path": address}
        if any(route.matches(corrected)[0] is not Match.NONE for route in routes):
            return address
    return None
