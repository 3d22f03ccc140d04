"""`build_app`: the endpoints over one engine."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import trtspec

from ..async_llm import AsyncLLM
from ..errors import RequestError, TrtspecError
from ..frontend.async_front import AsyncFront
from .answers import Json
from .chat import ChatEndpoint, conversation_of, tools_of
from .completions import CompletionEndpoint
from .config import ServerConfig
from .endpoint import Answer
from .errors import ApiError, of_library, refused
from .limits import Gate, read_body
from .observe import Observation, add_observability, mount
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from .streams import ClientGone, EventStream, while_connected

logger = logging.getLogger(__name__)
G = TypeVar("G", bound=GenerationRequest)


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
    created = int(time.time())
    chat, completions = ChatEndpoint(llm, config, name), CompletionEndpoint(llm, config, name)

    def check_model(given: str | None) -> None:
        if given not in (None, name):
            message = f"The model {given!r} is not served: this is {name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def generate(
        request: Request, model: type[G], open_answer: Callable[[G, float], Awaitable[Answer]]
    ) -> Response:
        body = await read_body(request, config)
        arrived = time.perf_counter()
        asked = parse(model, body)
        check_model(asked.model)

        async def answer() -> Response:
            opened = await open_answer(asked, arrived)
            if not asked.stream:
                return JSONResponse(await opened.whole())
            await opened.wait()
            return EventStream(opened)

        return await while_connected(request.receive, answer())

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await generate(request, ChatRequest, chat.open)

    @app.post("/v1/completions")
    async def text_completions(request: Request) -> Response:
        return await generate(request, CompletionRequest, completions.open)

    def model_entry() -> Json:
        return {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "trtspec",
            "max_model_len": llm.facts.max_seq_len,
        }

    @app.get("/v1/models")
    async def models() -> Json:
        return {"object": "list", "data": [model_entry()]}

    @app.get("/v1/models/{given:path}")
    async def one_model(given: str) -> Json:
        check_model(given)
        return model_entry()

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Json:
        asked = parse(TokenizeRequest, await read_body(request, config))
        check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise refused("prompt", "Give one of 'prompt' and 'messages'.")
        if asked.messages is not None:
            variables = asked.chat_template_kwargs or {}
            messages = conversation_of(asked.messages)
            tokens = await llm.tokenize_chat(messages, tools_of(asked.tools), variables)
        else:
            tokens = await llm.tokenize(asked.prompt or "")
        limit = llm.facts.max_seq_len
        return {"tokens": tokens.ids, "count": len(tokens.ids), "max_model_len": limit}  # type: ignore[arg-type]

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Json:
        asked = parse(DetokenizeRequest, await read_body(request, config))
        check_model(asked.model)
        tokenizer, vocab = llm.tokenizer, llm.facts.vocab_size
        if tokenizer is None:
            raise RequestError("The model has no tokenizer.")
        wrong = [token for token in asked.tokens if not 0 <= token < vocab]
        if wrong:
            raise refused("tokens", f"'tokens' must be in 0 … {vocab - 1}.")
        text = await llm.in_thread(
            lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False)
        )
        return {"prompt": text}

    @app.get("/health")
    async def health() -> Response:
        if llm.failure is not None:
            return ApiError(503, llm.failure, code="engine_unavailable").response()
        return JSONResponse({"status": "ok"})

    @app.get("/version")
    async def version() -> Json:
        return {"version": trtspec.__version__}

    @app.post("/reset_prefix_cache")
    async def reset_prefix_cache() -> Json:
        await llm.reset_prefix_cache()
        return {"status": "ok"}

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
            message = f"There is no {path!r}: the paths are {', '.join(paths)}."
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
