"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..api.outputs import Logprob
from ..errors import EngineError, RequestError
from ..executor.request import Request
from ..frontend.async_front import AsyncFront, OutputStream
from ..frontend.engine_thread import Bell
from ..frontend.outputs import NOTHING_NEW, Piece
from .answers import (
    Header,
    Json,
    TokenTexts,
    dumped,
    event_of,
    finite,
    logprobs_by_text,
    metrics_of,
    new_pieces,
    next_pieces,
    prompt_entries,
    prompt_logprobs_of,
    start,
    text_of,
    usage_of,
)
from .config import ServerConfig
from .errors import ApiError, of_library, refused
from .protocol import CompletionRequest
from .sampling import make_params
from .streams import DONE
from .token_names import TokenNames

Prompt = str | list[int]


class Echo(NamedTuple):
    """A prompt as the answer begins with it."""

    text: str  # of token ids without special tokens, of a text prompt as it was sent
    offsets: list[int] | None = None
    """Characters before each token, where they are asked for and the tokenizer knows them."""


class CompletionEndpoint:
    """Completes prompts.

    Args:
        model_name: in answers.
    """

    def __init__(self, llm: AsyncFront, config: ServerConfig, model_name: str):
        self.llm, self.config, self.model_name = llm, config, model_name
        self.names = TokenNames(llm.tokenizer)

    async def open(self, request: CompletionRequest, arrived: float) -> CompletionAnswer:
        """Queues the prompts. Raises ApiError if one is refused.

        Args:
            arrived: when the request was there, of time.perf_counter().
        """
        is_prompt_alone = request.echo and request.max_tokens == 0
        prompts = _prompts(request, self.config.max_prompts)
        params = make_params(
            request,
            self.config,
            max_tokens=1 if is_prompt_alone else request.max_tokens,  # an engine makes one
            logprobs=request.logprobs,
            prompt_logprobs=_most(request.prompt_logprobs, _num_echoed(request)),
        )
        salt, sources = request.cache_salt, request.include_token_sources
        streams = [
            self.llm.generate(p, params, cache_salt=salt, keep_sources=sources) for p in prompts
        ]
        for stream in streams:
            stream.arrived = arrived
            stream.is_whole = not request.stream
            if request.stream:  # one task reads them all
                stream.bell = streams[0].bell
        try:
            self.llm.check_count(len(streams) * request.n)
            await start(streams, self.config, "prompt")
            echoes = [await self._echo(request, prompt) for prompt in prompts]
        except (RequestError, EngineError) as error:
            raise of_library(error, "prompt") from None
        return CompletionAnswer(self, request, streams, echoes)

    async def _echo(self, request: CompletionRequest, prompt: Prompt) -> Echo:
        if not request.echo:
            return Echo("")
        tokenizer, in_thread = self.llm.tokenizer, self.llm.in_thread
        if not isinstance(prompt, str):
            return Echo(await in_thread(lambda: tokenizer.decode(prompt, skip_special_tokens=True)))
        if request.logprobs is None:
            return Echo(prompt)
        return Echo(prompt, await in_thread(lambda: _offsets(tokenizer, prompt)))


def _prompts(request: CompletionRequest, most: int) -> list[Prompt]:
    given: Any = request.prompt
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not 0 < len(given) <= most:
        raise refused("prompt", f"'prompt' has {len(given)} prompts: give 1 … {most}.")
    return list(given)


def _offsets(tokenizer: Any, text: str) -> list[int] | None:
    """Returns the characters before each of a text's tokens; None if the tokenizer does not say."""
    if not tokenizer.is_fast:
        return None
    known = tokenizer(text, return_offsets_mapping=True, verbose=False)
    offsets, end = [], 0
    for first, last in known["offset_mapping"]:
        # A token that is added has no characters. Some tokenizers leave out a space before a word.
        offsets.append(end if first == last else min(first, end))
        end = max(end, last)
    return offsets


def _num_echoed(request: CompletionRequest) -> int | None:
    """Returns the alternatives of prompt tokens in `choices[].logprobs`; None: it has no prompt."""
    return request.logprobs if request.echo else None


def _most(*counts: int | None) -> int | None:
    return max((count for count in counts if count is not None), default=None)


class _Choice:
    """One completion as it is read.

    Args:
        has_texts: whether the tokens' texts are asked for.
        offset: characters before it.
    """

    def __init__(self, tokenizer: Any, has_texts: bool, offset: int = 0):
        self.texts = TokenTexts(tokenizer) if has_texts else None
        self.num_tokens, self.is_begun = 0, False
        self._offset, self._read = offset, TokenTexts(tokenizer)

    def logprobs(self, names: TokenNames, piece: Piece, count: int) -> Json:
        """Returns `choices[].logprobs` of a piece."""
        return self.entries(names, piece.token_ids, piece.logprobs or [], count)

    def entries(
        self,
        names: TokenNames,
        token_ids: Sequence[int],
        logprobs: Sequence[dict[int, Logprob] | None],
        count: int,
    ) -> Json:
        """The same of any tokens that are next. A prompt's first one has no log probability."""
        entries: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, known in zip(token_ids, logprobs, strict=False):
            entries["tokens"].append(names[token].text)
            entries["token_logprobs"].append(known and finite(known[token].logprob))
            entries["top_logprobs"].append(known and logprobs_by_text(names, known, count))
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
        echoes: Sequence[Echo],
    ):
        self._llm, self._names, self._request = endpoint.llm, endpoint.names, request
        self._streams, self._echoes, self._n = streams, echoes, request.n
        self._num_top = request.logprobs or 0
        tokenizer, has_texts = endpoint.llm.tokenizer, request.include_token_sources
        self._choices = [
            _Choice(tokenizer, has_texts, len(echo.text))
            for echo in echoes
            for _ in range(request.n)
        ]
        self._drops_output = request.max_tokens == 0
        self._header = Header("text_completion", endpoint.model_name, "cmpl")
        self._first: list[tuple[int, int, Piece]] = []
        self._num_open, self.is_done = len(self._choices), False
        options = request.stream_options
        self._has_usage = options is not None and options.include_usage
        self._has_usage_always = options is not None and options.continuous_usage_stats
        self._head = f"data: {dumped(self._header.fields())[:-1]}"

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
            {"index": first + i, "text": self._echoes[number].text, "logprobs": None}
            for i in range(self._n)
        ]
        while pieces := await next_pieces(self._streams[number], self._request):
            for index, piece in pieces:
                entry, choice = choices[index], self._choices[first + index]
                piece = self._kept(piece)
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
        await self._add_prompt(number, choices)
        return choices

    async def _add_prompt(self, number: int, choices: list[Json]) -> None:
        """Adds what is asked of a prompt. A long one takes its time, beside the event loop."""
        asked, names, request = self._request, self._names, self._streams[number].requests[0]
        if (count := asked.prompt_logprobs) is not None:
            known = await asyncio.to_thread(prompt_logprobs_of, names, request, count)
            for choice in choices:
                choice["prompt_logprobs"] = known
        if (count := _num_echoed(asked)) is not None:
            prompt = await asyncio.to_thread(self._echoed, request, count)
            offsets = self._echoes[number].offsets
            if offsets is not None and len(offsets) == len(prompt["text_offset"]):
                prompt["text_offset"] = offsets
            for choice in choices:
                output = choice["logprobs"]
                choice["logprobs"] = {key: prompt[key] + output[key] for key in prompt}

    def _echoed(self, request: Request, count: int) -> Json:
        """Returns `choices[].logprobs` of a prompt."""
        entries, ids = prompt_entries(request, count), request.prompt_token_ids
        return _Choice(self._llm.tokenizer, False).entries(self._names, ids, entries, count)

    def _kept(self, piece: Piece) -> Piece:
        """Returns a piece without the token that was made where none is asked for."""
        if not self._drops_output:
            return piece
        reason = piece.finish_reason and "length"
        return NOTHING_NEW._replace(finish_reason=reason)

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
        try:
            while not (first := self._new()):
                await self.bell.wait()
            self._first = first
        except BaseException:
            self._cancel()
            raise

    # -- streamed --------------------------------------------------------------------------------
    @property
    def bell(self) -> Bell:
        return self._streams[0].bell  # all have this one

    def close(self) -> None:
        self._cancel()

    def _new(self) -> list[tuple[int, int, Piece]]:
        """Returns what is new: the prompt's number, the choice's, the piece."""
        return [
            (number, number * self._n + i, self._kept(piece))
            for number, stream in enumerate(self._streams)
            for i, piece in new_pieces(stream, self._request)
        ]

    def take(self) -> bytes:
        """Returns the server-sent events that are due. `wait` comes first."""
        events = []
        try:
            pieces, self._first = self._first or self._new(), []
            for number, index, piece in pieces:
                events.append(self._event(number, index, piece))
            if self._num_open:
                return b"".join(events)
            if self._has_usage:
                events.append(event_of(self._header.fields() | {"choices": []} | self._totals()))
        except ApiError as error:
            events.append(event_of(error.body()))
        self.is_done = True
        return b"".join([*events, DONE])

    def _event(self, number: int, index: int, piece: Piece) -> bytes:
        """Returns the event of a piece, b"" if there is nothing to say."""
        choice, text, reason = self._choices[index], piece.text, piece.finish_reason
        choice.num_tokens += len(piece.token_ids)
        if not choice.is_begun:
            choice.is_begun, text = True, self._echoes[number].text + text
        has_logprobs, has_texts = self._request.logprobs is not None, choice.texts is not None
        if not (has_logprobs or has_texts or reason):
            if not text:
                return b""
            if not self._has_usage_always:
                return (
                    f'{self._head},"choices":[{{"index":{index},"text":{text_of(text)},'
                    '"logprobs":null,"finish_reason":null}]}\n\n'
                ).encode("utf-8", "replace")
        entry: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        self._num_open -= reason is not None
        if has_logprobs:
            entry["logprobs"] = choice.logprobs(self._names, piece, self._num_top)
        more: Json = {"choices": [entry]}
        if choice.texts is not None:
            more["trtspec"] = {"tokens": choice.texts.of(piece)}
        if self._has_usage_always:
            more["usage"] = self._usage()
        if self._num_open == 0 and not self._has_usage:
            more["metrics"] = metrics_of(self._llm, self._requests())
        return event_of(self._header.fields() | more)
