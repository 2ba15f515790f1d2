"""The web application of a server: routes, what every request passes, and the page at `/`."""

from collections.abc import Sequence
from importlib.resources import files
from mimetypes import MimeTypes

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
from whisperport.speech.text import LANGUAGES

READY_TIMEOUT_S = 20.0  # a clip of 1 s on a slow board
NOT_ALLOWED = "Method not allowed for this URL"
TYPES = MimeTypes(filenames=())  # Python's own table: the system's is often wrong
TYPES.add_type("text/javascript", ".js")  # RFC 9239, in Python from 3.12
# Nothing from elsewhere, and no script or style inside of the page; `blob:` is a chosen file. Trusted types
# forbid what could read a transcript as markup.
POLICY = (
    "default-src 'self'; media-src blob:; object-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-opener-policy": "same-origin",
    "permissions-policy": "microphone=(self), camera=(), geolocation=()",
}


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


def page_routes(service: Service) -> list[Route]:
    """Return the routes of the page. None needs a key."""
    folder = files("whisperport.apps.serving") / "page"
    contents = {file.name: file.read_bytes() for file in folder.iterdir()}
    generation = service.transcriber.engine.generation
    about = {
        "model": service.model_ids[0],
        "needs_key": bool(service.options.keys),
        "max_body_bytes": service.options.max_body_bytes,
        "languages": {code: LANGUAGES.get(code, code) for code in generation.languages},
        "translates": "translate" in generation.tasks,
    }

    async def page(_: Request) -> Response:
        return _file("index.html")

    async def file(request: Request) -> Response:
        return _file(request.path_params["name"])

    async def server(_: Request) -> JSONResponse:
        return JSONResponse(about)

    def _file(name: str) -> Response:
        if name not in contents:
            raise ApiError(404, "Unknown URL")
        media_type, _ = TYPES.guess_type(name)
        return Response(contents[name], media_type=media_type, headers=HEADERS)

    return [
        Route("/", page),
        Route("/static/server.json", server),
        Route("/static/{name}", file),
    ]
