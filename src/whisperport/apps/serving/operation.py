"""The endpoints for those who operate a server: `/health`, `/ready` and `/metrics`."""

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whisperport.apps.serving import metrics
from whisperport.apps.serving.api_error import SERVER, ApiError
from whisperport.apps.serving.service import Service

READY_TIMEOUT_S = 20.0  # a clip of 1 s on a slow board


def operation_routes(service: Service) -> list[Route]:
    """Return the routes."""

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
        return Response(service.metrics.text(), headers={"content-type": metrics.CONTENT_TYPE})

    return [Route("/health", health), Route("/ready", ready), Route("/metrics", all_metrics)]
