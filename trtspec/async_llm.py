"""`AsyncLLM`: an `LLM` for asyncio. One thread runs the engine, many tasks read from it."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Never

from .api.text_stream import TextStream
from .config import DecodingBaseConfig
from .errors import EngineError
from .executor.request import Request
from .frontend.async_front import ENGINE_CALLS, AsyncFront, EngineFacts, check_queue
from .frontend.engine_thread import Bell, EngineThread, Feed, LoopPort
from .frontend.marked_tokenizer import keep_markers
from .frontend.output_stream import Asked
from .llm import LLM


class AsyncLLM(AsyncFront):
    """A model with an optional drafter, for the tasks of one event loop.

        async with AsyncLLM("smollm2-135m") as llm:
            async for output in llm.generate("The sky is", SamplingParams(max_tokens=64)):
                print(output.outputs[0].text_diff, end="")

    A stream that is dropped, closed, or whose task is cancelled aborts its request. A reader that
    is slow finds all that is new in one output.

    Args:
        model: as for `LLM`; or an `LLM`, which nothing else may use from then on.
        speculative_config: as for `LLM`, and so are `engine_arguments`. But prompts start at once
            unless `prefill_batch_size` is given, also on a GPU.
        max_num_requests_in_queue: requests that may wait while `max_batch_size` run. Beyond,
            `QueueFullError` is raised.

    Raises:
        ConfigError, CheckpointError: as `LLM` does.
    """

    def __init__(
        self,
        model: str | Path | LLM,
        speculative_config: DecodingBaseConfig | None = None,
        *,
        max_num_requests_in_queue: int = 1024,
        **engine_arguments: Any,
    ):
        check_queue(max_num_requests_in_queue)  # before a model is loaded
        llm = model
        if not isinstance(llm, LLM):
            if engine_arguments.get("prefill_batch_size") is None:
                engine_arguments["prefill_batch_size"] = 1  # someone waits for each first token
            llm = LLM(llm, speculative_config, **engine_arguments)
        self.llm: LLM = llm
        super().__init__(facts_of(llm), llm.inputs, max_num_requests_in_queue)
        self._engine = EngineThread(llm.executor, llm.lock)
        weakref.finalize(self, self._engine.stop, 1.0)

    async def connect(self) -> None:
        """Does nothing: the engine is here."""

    async def open_requests(self, asked: Asked, bell: Bell) -> list[Feed]:
        requests = await self.in_thread(lambda: make_requests(self.llm, asked))
        feeds = [Feed(request, bell, self.forget, asked.is_whole) for request in requests]
        self._engine.add(feeds)
        return feeds

    def cancel(self, requests: Sequence[Request]) -> None:
        self._engine.cancel(requests)

    def abort_all(self) -> None:
        self._engine.cancel_all()

    async def ask(self, name: str, *arguments: Any) -> Any:
        return await self._engine.call(lambda: call_engine(self.llm, name, arguments))

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        self._engine.bind(LoopPort(loop))

    @property
    def _engine_failure(self) -> str | None:
        return self._engine.failure

    def _close(self) -> None:
        self._engine.stop()
        self.llm.shutdown()

    def __reduce__(self) -> Never:
        raise TypeError(
            "An AsyncLLM holds a device's memory and threads: make another, not a copy."
        )

    async def __aenter__(self) -> AsyncLLM:
        if self.failure is not None:
            raise EngineError(self.failure)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()


def facts_of(llm: LLM) -> EngineFacts:
    """Returns what a front must know of an engine."""
    config = llm.executor.config
    return EngineFacts(
        model_dir=llm.model_dir,
        max_seq_len=config.max_seq_len,
        max_batch_size=config.max_batch_size,
        vocab_size=llm.executor.target.config.vocab_size,
        acceptance=llm.acceptance_of_drafts,
    )


def make_requests(llm: LLM, asked: Asked) -> list[Request]:
    """Makes requests, beside the thread that steps. Raises RequestError if one is not allowed."""
    make = llm.executor.make_request
    requests = [make(asked.ids, params, cache_salt=asked.cache_salt) for params in asked.params]
    for request in requests:
        request.arrived = asked.arrived
        request.sources = [] if asked.keep_sources else None
    if stops := asked.params[0].stop_strings:  # all have the same
        tokenizer = keep_markers(llm.tokenizer, asked.markers)
        for request in requests:
            request.text = TextStream(tokenizer, stops)
    return requests


def call_engine(llm: LLM, name: str, arguments: Sequence[Any]) -> Any:
    """Runs one of `ENGINE_CALLS`, between two steps."""
    assert name in ENGINE_CALLS
    return getattr(llm.executor, name)(*arguments)
