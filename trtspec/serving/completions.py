"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ..async_llm import AsyncLLM, OutputStream
from ..errors import EngineError, RequestError
from ..frontend.outputs import Piece
from .answers import (
    Header,
    Json,
    TokenTexts,
    event_of,
    finite,
    logprobs_by_text,
    metrics_of,
    next_pieces,
    start,
    usage_of,
)
from .config import ServerConfig
from .errors import ApiError, of_library, refused
from .protocol import CompletionRequest
from .sampling import make_params
from .streams import DONE
from .token_names import TokenNames

Prompt = str | list[int]


class CompletionEndpoint:
    """Completes prompts.

    Args:
        model_name: in answers.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig, model_name: str):
        self.llm, self.config, self.model_name = llm, config, model_name
        self.names = TokenNames(llm.llm.tokenizer)

    async def open(self, request: CompletionRequest, arrived: float) -> CompletionAnswer:
        """Queues the prompts. Raises ApiError if one is refused.

        Args:
            arrived: when the request was there, of time.perf_counter().
        """
        if request.echo and request.logprobs is not None:
            raise refused("echo", "'echo' with 'logprobs' is not supported: leave one out.")
        prompts = _prompts(request, self.config.max_prompts)
        params = make_params(
            request, self.config, max_tokens=request.max_tokens, logprobs=request.logprobs
        )
        salt, sources = request.cache_salt, request.include_token_sources
        streams = [
            self.llm.generate(p, params, cache_salt=salt, keep_sources=sources) for p in prompts
        ]
        for stream in streams:
            stream.arrived = arrived
        try:
            await start(streams)
            echoes = [await self._echo(request, prompt) for prompt in prompts]
        except (RequestError, EngineError) as error:
            raise of_library(error) from None
        return CompletionAnswer(self, request, streams, echoes)

    async def _echo(self, request: CompletionRequest, prompt: Prompt) -> str:
        if not request.echo or isinstance(prompt, str):
            return prompt if request.echo and isinstance(prompt, str) else ""
        tokenizer = self.llm.llm.tokenizer
        return await self.llm.in_thread(lambda: tokenizer.decode(prompt, skip_special_tokens=True))


def _prompts(request: CompletionRequest, most: int) -> list[Prompt]:
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not 0 < len(given) <= most:
        raise refused("prompt", f"'prompt' has {len(given)} prompts: give 1 … {most}.")
    return list(given)


class _Choice:
    """One completion as it is read.

    Args:
        has_texts: whether the tokens' texts are asked for.
    """

    def __init__(self, tokenizer: Any, has_texts: bool):
        self.texts = TokenTexts(tokenizer) if has_texts else None
        self.num_tokens = 0
        self._offset, self._read = 0, TokenTexts(tokenizer)

    def logprobs(self, names: TokenNames, piece: Piece, count: int) -> Json:
        """Returns `choices[].logprobs` of a piece."""
        entries: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, known in zip(piece.token_ids, piece.logprobs or [], strict=False):
            entries["tokens"].append(names[token].text)
            entries["token_logprobs"].append(finite(known[token].logprob))
            entries["top_logprobs"].append(logprobs_by_text(names, known, count))
            entries["text_offset"].append(self._offset)
            self._offset += len(self._read.add(token))
        return entries


class CompletionAnswer:
    """One answer, whole or streamed. Choice i of prompt p has the index p * n + i."""

    def __init__(
        self,
        endpoint: CompletionEndpoint,
        request: CompletionRequest,
        streams: Sequence[OutputStream],
        echoes: Sequence[str],
    ):
        self._llm, self._names, self._request = endpoint.llm, endpoint.names, request
        self._streams, self._echoes, self._n = streams, echoes, request.n
        self._num_top = request.logprobs or 0
        tokenizer, has_texts = endpoint.llm.llm.tokenizer, request.include_token_sources
        self._choices = [_Choice(tokenizer, has_texts) for _ in range(len(streams) * request.n)]
        self._header = Header("text_completion", endpoint.model_name, "cmpl")

    async def whole(self) -> Json:
        """Returns the answer when it is complete."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._all_of(number)) for number in range(len(self._streams))
                ]
        except* ApiError as errors:
            raise errors.exceptions[0] from None
        finally:
            self._cancel()
        choices = [choice for task in tasks for choice in task.result()]
        return self._header.fields() | {"choices": choices} | self._totals()

    async def _all_of(self, number: int) -> list[Json]:
        """Returns the choices of one prompt."""
        first, has_logprobs = number * self._n, self._request.logprobs is not None
        choices: list[Json] = [
            {"index": first + i, "text": self._echoes[number], "logprobs": None}
            for i in range(self._n)
        ]
        while pieces := await next_pieces(self._streams[number], self._request):
            for index, piece in pieces:
                entry, choice = choices[index], self._choices[first + index]
                entry["text"] += piece.text
                entry["finish_reason"] = piece.finish_reason
                choice.num_tokens += len(piece.token_ids)
                if has_logprobs:
                    new = choice.logprobs(self._names, piece, self._num_top)
                    known = entry["logprobs"]
                    entry["logprobs"] = (
                        new if known is None else {key: known[key] + new[key] for key in new}
                    )
                if choice.texts is not None:
                    tokens = entry.setdefault("trtspec", {"tokens": []})["tokens"]
                    tokens += choice.texts.of(piece)
        return choices

    def _requests(self) -> list[Any]:
        return [request for stream in self._streams for request in stream.requests]

    def _totals(self) -> Json:
        return {"usage": self._usage(), "metrics": metrics_of(self._llm, self._requests())}

    def _usage(self) -> Json:
        counts = [choice.num_tokens for choice in self._choices]
        return usage_of([stream.requests for stream in self._streams], counts)

    def _cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def wait(self) -> None:
        """Waits for the first tokens, so that an error before them has a status of its own."""
        self._news: asyncio.Queue[tuple[int, Any]] = asyncio.Queue()
        self._readers = [
            asyncio.create_task(self._read(number, stream))
            for number, stream in enumerate(self._streams)
            if len(self._streams) > 1
        ]
        try:
            self._first = await self._next()
        except BaseException:
            await self._stop()
            raise

    async def _read(self, number: int, stream: OutputStream) -> None:
        """Passes on what is new of one prompt, one piece at a time: a slow client holds it back."""
        try:
            while pieces := await next_pieces(stream, self._request):
                is_taken = asyncio.Event()
                self._news.put_nowait((number, (pieces, is_taken)))
                await is_taken.wait()
        except ApiError as error:
            self._news.put_nowait((number, error))

    async def _next(self) -> tuple[int, list[tuple[int, Piece]]]:
        if len(self._streams) == 1:
            return 0, await next_pieces(self._streams[0], self._request)
        number, news = await self._news.get()
        if isinstance(news, ApiError):
            raise news
        pieces, is_taken = news
        is_taken.set()
        return number, pieces

    async def _stop(self) -> None:
        self._cancel()
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)

    async def events(self) -> AsyncGenerator[bytes]:
        """Yields server-sent events. `wait` comes first."""
        options = self._request.stream_options
        has_usage = options is not None and options.include_usage
        continuous = options is not None and options.continuous_usage_stats
        num_open, (number, pieces) = len(self._choices), self._first
        has_echo = set()
        try:
            while True:
                for i, piece in pieces:
                    index = number * self._n + i
                    choice, text = self._choices[index], piece.text
                    choice.num_tokens += len(piece.token_ids)
                    if self._request.echo and index not in has_echo:
                        has_echo.add(index)
                        text = self._echoes[number] + text
                    num_open -= piece.finish_reason is not None
                    has_more = self._request.logprobs is not None or choice.texts is not None
                    if not (text or has_more or piece.finish_reason):
                        continue
                    entry: Json = {"index": index, "text": text, "logprobs": None}
                    entry["finish_reason"] = piece.finish_reason
                    if self._request.logprobs is not None:
                        entry["logprobs"] = choice.logprobs(self._names, piece, self._num_top)
                    more: Json = {"choices": [entry]}
                    if choice.texts is not None:
                        more["trtspec"] = {"tokens": choice.texts.of(piece)}
                    if continuous:
                        more["usage"] = self._usage()
                    if num_open == 0 and not has_usage:
                        more["metrics"] = metrics_of(self._llm, self._requests())
                    yield event_of(self._header.fields() | more)
                if num_open == 0:
                    break
                number, pieces = await self._next()
            if has_usage:
                yield event_of(self._header.fields() | {"choices": []} | self._totals())
        except ApiError as error:
            yield event_of(error.body())
        finally:
            await self._stop()
        yield DONE
