"""The page at `/`: its files, and what it must know of the server."""

from importlib.resources import files
from mimetypes import MimeTypes

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from whisperport.apps.serving.api_error import ApiError
from whisperport.apps.serving.service import Service
from whisperport.speech.text import LANGUAGES

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
