"""`build_app`: the server's application over one engine: routes, observation, limits, errors."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.routing import Route

import trtspec

from ..async_llm import AsyncLLM
from ..errors import TrtspecError
from ..frontend.async_front import AsyncFront
from .config import ServerConfig
from .errors import ApiError, of_library
from .limits import Gate
from .observe import Observation, add_observability, mount
from .routes import Routes
from .streams import ClientGone

logger = logging.getLogger(__name__)


def build_app(
    llm: AsyncFront, config: ServerConfig, observation: Observation | None = None
) -> FastAPI:
    """Returns the server's ASGI application. It shuts the engine down at its end.

    Args:
        observation: of the engine. None: `llm` is an `AsyncLLM`, which is observed from now on.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await llm.connect()
        yield
        await llm.shutdown()

    app = FastAPI(
        title="trtspec",
        version=trtspec.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
    )
    name = config.served_model_name or llm.facts.model_dir.name
    Routes(llm, config, name).add_to(app)
    if observation is not None:
        mount(app, observation)
    else:
        assert isinstance(llm, AsyncLLM)
        add_observability(app, llm, name, plain_step_seconds=config.plain_step_seconds)
    _add_error_handlers(app)
    app.add_middleware(Gate, config=config)
    return app


def _add_error_handlers(app: FastAPI) -> None:
    def on(kind: type[Exception], status: Callable[[Any], ApiError]) -> None:
        async def handle(_: Request, error: Exception) -> Response:
            return status(error).response()

        app.add_exception_handler(kind, handle)

    async def of_http(request: Request, error: HTTPException) -> Response:
        path, message = request.scope["path"][:100], f"{error.detail}."
        headers = dict(error.headers or {})
        if error.status_code == 404:
            paths = sorted({route.path for route in app.routes if isinstance(route, Route)})
            known = ", ".join(paths).replace("{given:path}", "NAME")
            message = f"There is no {path!r}: the paths are {known}."
        elif error.status_code == 405 and "Allow" in headers:
            message = f"{request.method[:20]} of {path!r} is not allowed: use {headers['Allow']}."
        response = ApiError(error.status_code, message).response()
        response.headers.update(headers)
        return response

    app.add_exception_handler(HTTPException, of_http)  # type: ignore[arg-type]
    on(ApiError, lambda error: error)
    on(TrtspecError, of_library)
    # No one reads these; the status is that of other servers.
    on(ClientGone, lambda _: ApiError(499, "The client closed the connection."))
    on(ClientDisconnect, lambda _: ApiError(499, "The client closed the connection."))

    async def unexpected(_: Request, error: Exception) -> Response:
        logger.error("A request failed.", exc_info=error)
        return ApiError(500, "The server failed at this request; its log says why.").response()

    app.add_exception_handler(Exception, unexpected)
