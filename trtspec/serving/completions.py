"""`/v1/completions`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..api.outputs import Logprob
from ..errors import EngineError, RequestError
from ..executor.request import Request
from ..frontend.output_stream import OutputStream
from ..frontend.outputs import NOTHING_NEW, Piece
from .answers import (
    Json,
    TokenTexts,
    event_of,
    finite,
    logprobs_by_text,
    prompt_entries,
    prompt_logprobs_of,
    text_of,
)
from .endpoint import Answer, Endpoint
from .errors import ApiError, of_library, refused
from .protocol import CompletionRequest
from .sampling import make_params
from .token_names import TokenNames

Prompt = str | list[int]


class Echo(NamedTuple):
    """A prompt as the answer begins with it."""

    text: str  # of token ids without special tokens, of a text prompt as it was sent
    offsets: list[int] | None = None
    """Characters before each token, where they are asked for and the tokenizer knows them."""


class CompletionEndpoint(Endpoint):
    """Completes prompts."""

    PROMPT_FIELD = "prompt"

    async def open(self, request: CompletionRequest, arrived: float) -> CompletionAnswer:
        """Queues the prompts. Raises ApiError if one is refused.

        Args:
            arrived: when the request was there, of time.perf_counter().
        """
        is_prompt_alone = request.echo and request.max_tokens == 0
        prompts = _prompts(request, self.config.max_prompts)
        counts = request.prompt_logprobs, _num_echoed(request)
        params = make_params(
            request,
            self.config,
            max_tokens=1 if is_prompt_alone else request.max_tokens,  # an engine makes one
            logprobs=request.logprobs,
            prompt_logprobs=max((n for n in counts if n is not None), default=None),
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
            await self.start(streams)
            echoes = [await self._echo(request, prompt) for prompt in prompts]
        except (RequestError, EngineError) as error:
            raise of_library(error, "prompt") from None
        return CompletionAnswer(self, request, streams, echoes)

    async def _echo(self, request: CompletionRequest, prompt: Prompt) -> Echo:
        if not request.echo:
            return Echo("")
        tokenizer, in_thread = self.llm.tokenizer, self.llm.in_thread
        if tokenizer is None:  # no token has a text
            return Echo("")
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


class LogprobsWriter:
    """Writes `choices[].logprobs` of one text.

    Args:
        count: alternatives of each token.
        offset: characters before it.
    """

    def __init__(self, names: TokenNames, tokenizer: Any, count: int, offset: int = 0):
        self._names, self._count = names, count
        self._offset, self._texts = offset, TokenTexts(tokenizer)

    def of(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, Logprob] | None]
    ) -> dict[str, list[Any]]:
        """Returns what is said of the next tokens. A prompt's first has no log probability."""
        names = self._names
        entries: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, known in zip(token_ids, logprobs, strict=False):
            entries["tokens"].append(names[token].text)
            entries["token_logprobs"].append(known and finite(known[token].logprob))
            top = known and logprobs_by_text(names, known, self._count, token)
            entries["top_logprobs"].append(top)
            entries["text_offset"].append(self._offset)
            self._offset += len(self._texts.add(token))
        return entries


@dataclass
class _Choice:
    """One completion as it is read."""

    texts: TokenTexts | None  # where they are asked for
    logprobs: LogprobsWriter | None
    num_tokens: int = 0
    is_begun: bool = False


class CompletionAnswer(Answer):
    ID_PREFIX = "cmpl"
    KIND = CHUNK_KIND = "text_completion"

    def __init__(
        self,
        endpoint: CompletionEndpoint,
        request: CompletionRequest,
        streams: Sequence[OutputStream],
        echoes: Sequence[Echo],
    ):
        super().__init__(endpoint, request, streams)
        self._request, self._echoes = request, echoes
        self._choices: Sequence[_Choice] = [
            self._choice(echo) for echo in echoes for _ in range(request.n)
        ]
        self._drops_output = request.max_tokens == 0

    def _choice(self, echo: Echo) -> _Choice:
        tokenizer, asked = self._llm.tokenizer, self._request
        texts = TokenTexts(tokenizer) if asked.include_token_sources else None
        logprobs = None
        if asked.logprobs is not None:
            offset = len(echo.text)
            logprobs = LogprobsWriter(self._names, tokenizer, asked.logprobs, offset)
        return _Choice(texts, logprobs)

    async def whole(self) -> Json:
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._all_of(number)) for number in range(len(self._streams))
                ]
        except* (ApiError, EngineError) as errors:
            raise errors.exceptions[0] from None
        finally:
            self.close()
        choices = [choice for task in tasks for choice in task.result()]
        return self._header | {"choices": choices} | self._totals()

    async def _all_of(self, number: int) -> list[Json]:
        """Returns the choices of one prompt."""
        first = number * self._n
        choices: list[Json] = [
            {"index": first + i, "text": self._echoes[number].text, "logprobs": None}
            for i in range(self._n)
        ]
        while pieces := await self._next(self._streams[number]):
            for index, piece in pieces:
                entry, choice = choices[index], self._choices[first + index]
                piece = self._kept(piece)
                entry["text"] += piece.text
                entry["finish_reason"] = piece.finish_reason
                choice.num_tokens += len(piece.token_ids)
                if choice.logprobs is not None:
                    new = choice.logprobs.of(piece.token_ids, piece.logprobs or [])
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
        return LogprobsWriter(self._names, self._llm.tokenizer, count).of(ids, entries)

    def _kept(self, piece: Piece) -> Piece:
        """Returns a piece without the token that was made where none is asked for."""
        if not self._drops_output:
            return piece
        reason = piece.finish_reason and "length"
        return NOTHING_NEW._replace(finish_reason=reason)

    def _event(self, index: int, piece: Piece) -> bytes:
        piece = self._kept(piece)
        choice, text, reason = self._choices[index], piece.text, piece.finish_reason
        choice.num_tokens += len(piece.token_ids)
        if not choice.is_begun:
            choice.is_begun, text = True, self._echoes[index // self._n].text + text
        if choice.logprobs is None and choice.texts is None and reason is None:
            if not text:
                return b""
            if not self._has_usage_always:
                return (
                    f'{self._head},"choices":[{{"index":{index},"text":{text_of(text)},'
                    '"logprobs":null,"finish_reason":null}]}\n\n'
                ).encode("utf-8", "replace")
        entry: Json = {"index": index, "text": text, "logprobs": None, "finish_reason": reason}
        self._num_open -= reason is not None
        if choice.logprobs is not None:
            entry["logprobs"] = choice.logprobs.of(piece.token_ids, piece.logprobs or [])
        more: Json = {"choices": [entry]}
        if choice.texts is not None:
            more["trtspec"] = {"tokens": choice.texts.of(piece)}
        self._add_figures(more)
        return event_of(self._chunk_header | more)
