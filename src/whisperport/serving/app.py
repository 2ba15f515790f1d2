"""The web application of a server: routes, and what every request passes."""

from collections.abc import Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from whisperport.serving.api_error import ApiError
from whisperport.serving.guard import Guard
from whisperport.serving.models import model_routes
from whisperport.serving.operation import operation_routes
from whisperport.serving.service import Service
from whisperport.serving.transcriptions import Endpoint
from whisperport.serving.web_page import page_routes

MESSAGES = {404: "Unknown URL", 405: "Method not allowed for this URL"}


def create_app(service: Service, more: Sequence[BaseRoute] = ()) -> Starlette:
    """Return the application.

    Args:
        service: what is served.
        more: further routes. An endpoint may raise `ApiError` or any `WhisperportError`, which the
            application answers; the key, the host and the origin were checked before.
    """
    audio = "/v1/audio"
    routes = [
        Route(f"{audio}/transcriptions", Endpoint(service, "transcribe"), methods=["POST"]),
        Route(f"{audio}/translations", Endpoint(service, "translate"), methods=["POST"]),
        *model_routes(service),
        *operation_routes(service),
        *page_routes(service),
        *more,
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
        message = MESSAGES.get(error.status_code, error.detail)
        if error.status_code == 404 and (address := _meant(request.url.path, routes)):
            message = f"{message}: the address is {address}"
        return ApiError(error.status_code, message, headers=error.headers).response()

    handlers = {HTTPException: http_error}
    app = Starlette(routes=routes, middleware=middleware, exception_handlers=handlers)
    app.router.redirect_slashes = False  # an unknown URL is a 404
    return app


def _meant(path: str, routes: Sequence[BaseRoute]) -> str | None:
    """Return the path that a client meant which has doubled or trailing slashes, or no or several /v1.

    It is told, not redirected: many clients repeat a POST that is redirected as a GET.
    """
    parts = [part for part in path.split("/") if part]
    while parts[:1] == ["v1"]:
        parts.pop(0)
    rest = "/".join(parts)
    known = [route for route in routes if isinstance(route, Route) and route.path != "/"]
    for address in (f"/v1/{rest}", f"/{rest}"):
        if any(route.path_regex.match(address) for route in known):
            return address
    return None
