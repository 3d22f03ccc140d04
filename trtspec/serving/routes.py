"""`Routes`: what each path answers. Those of metrics and the live page are in `observe.py`."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.responses import JSONResponse, Response

import trtspec

from ..errors import RequestError
from ..frontend.async_front import AsyncFront
from .answers import Json
from .chat import ChatEndpoint, conversation_of, tools_of
from .completions import CompletionEndpoint
from .config import ServerConfig
from .endpoint import Answer
from .errors import ApiError, refused
from .limits import read_body
from .protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
    parse,
)
from .streams import EventStream, while_connected

G = TypeVar("G", bound=GenerationRequest)


class Routes:
    """Answers requests with one engine.

    Args:
        name: of the model, as clients give it.
    """

    def __init__(self, llm: AsyncFront, config: ServerConfig, name: str):
        self.llm, self.config, self.name = llm, config, name
        self.created = int(time.time())
        self.chat = ChatEndpoint(llm, config, name)
        self.completion = CompletionEndpoint(llm, config, name)

    def add_to(self, app: FastAPI) -> None:
        app.post("/v1/chat/completions")(self.chat_completions)
        app.post("/v1/completions")(self.completions)
        app.get("/v1/models")(self.models)
        app.get("/v1/models/{given:path}")(self.model)
        app.post("/tokenize")(self.tokenize)
        app.post("/detokenize")(self.detokenize)
        app.get("/health")(self.health)
        app.get("/version")(self.version)
        app.post("/reset_prefix_cache")(self.reset_prefix_cache)

    # -- generation ----------------------------------------------------------------------------
    async def chat_completions(self, request: Request) -> Response:
        return await self._generate(request, ChatRequest, self.chat.open)

    async def completions(self, request: Request) -> Response:
        return await self._generate(request, CompletionRequest, self.completion.open)

    async def _generate(
        self, request: Request, model: type[G], open_answer: Callable[[G, float], Awaitable[Answer]]
    ) -> Response:
        body = await read_body(request, self.config)
        arrived = time.perf_counter()
        asked = parse(model, body)
        self._check_model(asked.model)

        async def answer() -> Response:
            opened = await open_answer(asked, arrived)
            if not asked.stream:
                return JSONResponse(await opened.whole())
            await opened.wait()
            return EventStream(opened)

        return await while_connected(request.receive, answer())

    # -- the model -----------------------------------------------------------------------------
    def _check_model(self, given: str | None) -> None:
        if given not in (None, self.name):
            message = f"The model {given!r} is not served: this is {self.name!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def models(self) -> Json:
        return {"object": "list", "data": [self._model_entry()]}

    async def model(self, given: str) -> Json:
        self._check_model(given)
        return self._model_entry()

    def _model_entry(self) -> Json:
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "trtspec",
            "max_model_len": self.llm.facts.max_seq_len,
        }

    # -- tokens --------------------------------------------------------------------------------
    async def tokenize(self, request: Request) -> Json:
        asked = parse(TokenizeRequest, await read_body(request, self.config))
        self._check_model(asked.model)
        if (asked.prompt is None) == (asked.messages is None):
            raise refused("prompt", "Give one of 'prompt' and 'messages'.")
        if asked.messages is not None:
            variables = asked.chat_template_kwargs or {}
            messages = conversation_of(asked.messages)
            tokens = await self.llm.tokenize_chat(messages, tools_of(asked.tools), variables)
        else:
            tokens = await self.llm.tokenize(asked.prompt or "")
        limit = self.llm.facts.max_seq_len
        return {"tokens": tokens.ids, "count": len(tokens.ids), "max_model_len": limit}  # type: ignore[arg-type]

    async def detokenize(self, request: Request) -> Json:
        asked = parse(DetokenizeRequest, await read_body(request, self.config))
        self._check_model(asked.model)
        tokenizer, vocab = self.llm.tokenizer, self.llm.facts.vocab_size
        if tokenizer is None:
            raise RequestError("The model has no tokenizer.")
        wrong = [token for token in asked.tokens if not 0 <= token < vocab]
        if wrong:
            raise refused("tokens", f"'tokens' must be in 0 … {vocab - 1}.")
        text = await self.llm.in_thread(
            lambda: tokenizer.decode(asked.tokens, skip_special_tokens=False)
        )
        return {"prompt": text}

    # -- the server ----------------------------------------------------------------------------
    async def health(self) -> Response:
        if self.llm.failure is not None:
            return ApiError(503, self.llm.failure, code="engine_unavailable").response()
        return JSONResponse({"status": "ok"})

    async def version(self) -> Json:
        return {"version": trtspec.__version__}

    async def reset_prefix_cache(self) -> Json:
        await self.llm.reset_prefix_cache()
        return {"status": "ok"}
