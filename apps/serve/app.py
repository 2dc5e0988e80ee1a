"""The routes of the server, who may use them, and how everything that goes wrong is told."""

from typing import Annotated

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from mmsdk.apps.serve.completion import LEFT, complete
from mmsdk.apps.serve.refusal import GoneError, RefusedError
from mmsdk.apps.serve.service import Service

__all__ = ["build"]


def build(service: Service) -> FastAPI:
    """The application. Every route but /health wants a key, where there are any."""
    # no pages of documentation: they would load scripts from elsewhere
    app = FastAPI(title="mmsdk", docs_url=None, redoc_url=None, openapi_url=None)
    _tell_errors(app)
    if service.settings.origins:
        pages, headers = list(service.settings.origins), ["Authorization", "Content-Type"]
        app.add_middleware(CORSMiddleware, allow_origins=pages, allow_methods=["GET", "POST"], allow_headers=headers)

    async def tenant(http: Request) -> str:
        return service.tenant(http.headers.getlist("authorization"), http.headers.getlist("origin"))

    allowed = Depends(tenant)

    @app.post("/v1/chat/completions")
    async def completions(http: Request, who: Annotated[str, allowed]) -> Response:
        return await complete(service, http, who)

    @app.get("/v1/models", dependencies=[allowed])
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [_model(service, name) for name in service.models]})

    @app.get("/v1/models/{name:path}", dependencies=[allowed])
    async def model(name: str) -> Response:
        service.adapter(name)
        return JSONResponse(_model(service, name))

    @app.get("/metrics", dependencies=[allowed])
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=service.metrics.content_type)

    @app.get("/health")
    async def health() -> Response:
        told = {"status": "ok" if service.well else "ending", "open_requests": service.open}
        return JSONResponse(told, 200 if service.well else 503)

    return app


def _model(service: Service, name: str) -> dict[str, object]:
    context = service.pipe.vlm.context
    told = {"id": name, "object": "model", "created": service.created, "owned_by": "mmsdk", "context_length": context}
    return told if name == service.name else {**told, "parent": service.name}


def _tell_errors(app: FastAPI) -> None:
    app.add_exception_handler(RefusedError, _refuse)
    app.add_exception_handler(GoneError, _nobody)
    app.add_exception_handler(HTTPException, _astray)
    # starlette raises it again, and uvicorn logs it
    app.add_exception_handler(Exception, _broken)


async def _refuse(http: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    return JSONResponse(error.told, error.status, error.headers)


async def _nobody(http: Request, error: Exception) -> Response:
    return Response(status_code=LEFT)


async def _astray(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = "not_found" if error.status_code == 404 else "not_allowed"
    there = ", ".join(
        f"{way} {route.path}" for route in http.app.routes if isinstance(route, APIRoute) for way in sorted(route.methods or ())
    )
    told = RefusedError(error.status_code, f"{http.method} {http.url.path}: {error.detail}; there is {there}", code)
    return JSONResponse(told.told, error.status_code, error.headers)


async def _broken(http: Request, error: Exception) -> Response:
    return JSONResponse(RefusedError(500, "something broke in the server; its log says what", "internal_error").told, 500)
