"""The endpoints `/v1/models` and `/v1/models/{id}`."""

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from whisperport.apps.serving.api_error import ApiError, unknown_model
from whisperport.apps.serving.service import Service

OWNER = "whisperport"


def model_routes(service: Service) -> list[Route]:
    """Return the routes of the models that are served: one, by several names."""

    async def all_models(_: Request) -> JSONResponse:
        data = [_model(service, name) for name in service.model_ids]
        return JSONResponse({"object": "list", "data": data})

    async def one_model(request: Request) -> JSONResponse:
        name = request.path_params["name"]
        check_model(service, name)
        return JSONResponse(_model(service, name))

    return [Route("/v1/models", all_models), Route("/v1/models/{name:path}", one_model)]


def check_model(service: Service, name: str) -> None:
    """Check that a model is served.

    Raises:
        ApiError: it is not.
    """
    if name not in service.model_ids:
        message = unknown_model(name, service.model_ids)
        raise ApiError(404, message, code="model_not_found", param="model")


def _model(service: Service, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": OWNER,
        "root": service.model_ids[0],  # as vLLM names the model behind an alias
        "x_whisperport": service.about,
    }
