"""Parts of an answer that both endpoints have: log probabilities, usage, acceptance, JSON."""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring
from typing import Any

from ..api.outputs import Logprob, SpecStats
from ..api.text_stream import TextStream
from ..errors import EngineError, QueueFullError, RequestError
from ..executor.request import Request
from ..frontend.async_front import AsyncFront, OutputStream
from ..frontend.outputs import Piece
from .config import ServerConfig
from .errors import ApiError, of_library, refused
from .protocol import GenerationRequest
from .sampling import grammar_field
from .token_names import TokenName, TokenNames

LEAST_LOGPROB = -9999.0  # JSON has no infinity
Json = dict[str, Any]
_LINE_ENDS = re.compile("[\x85\u2028\u2029]")
"""Ends of lines to Python's `splitlines`, and so to clients, that JSON does not escape."""


def dumped(value: Any) -> str:
    return _one_line(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def text_of(value: str) -> str:
    """Returns a text as `dumped` writes it, at a tenth of the cost."""
    return _one_line(encode_basestring(value))


def _one_line(text: str) -> str:
    """Returns JSON that no client takes for two lines."""
    if text.isascii():
        return text
    return _LINE_ENDS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def event_of(value: Any) -> bytes:
    """Returns one server-sent event."""
    return f"data: {dumped(value)}\n\n".encode("utf-8", "replace")


@dataclass(frozen=True)
class Header:
    """The fields that all chunks of an answer share."""

    kind: str  # "chat.completion", "text_completion"
    model: str
    prefix: str
    created: int = field(default_factory=lambda: int(time.time()))
    number: str = field(default_factory=lambda: uuid.uuid4().hex)

    def fields(self, is_chunk: bool = False) -> Json:
        is_chat_chunk = is_chunk and self.kind == "chat.completion"
        return {
            "id": f"{self.prefix}-{self.number}",
            "object": "chat.completion.chunk" if is_chat_chunk else self.kind,
            "created": self.created,
            "model": self.model,
        }


def chat_logprobs(names: TokenNames, piece: Piece, count: int) -> list[Json]:
    """Returns entries of `choices[].logprobs.content`."""
    pairs = zip(piece.token_ids, piece.logprobs or [], strict=False)
    return [
        _entry(names[token], known[token])
        | {"top_logprobs": [_entry(names[t], p) for t, p in top_of(known, count)]}
        for token, known in pairs
    ]


def _entry(name: TokenName, known: Logprob) -> Json:
    return {"token": name.text, "logprob": finite(known.logprob), "bytes": name.bytes}


def logprobs_by_text(names: TokenNames, known: dict[int, Logprob], count: int) -> dict[str, float]:
    """Returns an entry of `choices[].logprobs.top_logprobs` of completions.

    Its keys are texts. Where two tokens have the same, the less likely one is `token_id:7`.
    """
    top: dict[str, float] = {}
    for token, logprob in top_of(known, count):
        text = names[token].text
        top[f"token_id:{token}" if text in top else text] = finite(logprob.logprob)
    return top


def top_of(known: dict[int, Logprob], count: int) -> list[tuple[int, Logprob]]:
    """Returns the `count` likeliest tokens. `known` has them and the chosen one."""
    return sorted(known.items(), key=lambda item: item[1].rank)[:count]


def prompt_logprobs_of(names: TokenNames, request: Request, count: int) -> list[Json | None]:
    """Returns `prompt_logprobs` as vLLM has it: a prompt's log probabilities by token id."""
    return [
        None
        if entry is None
        else {
            str(token): {
                "logprob": finite(known.logprob),
                "rank": known.rank,
                "decoded_token": names[token].text,
            }
            for token, known in entry.items()
        }
        for entry in prompt_entries(request, count)
    ]


def prompt_entries(request: Request, count: int) -> list[dict[int, Logprob] | None]:
    """Returns the log probabilities of a request's prompt, once there is a token."""
    assert request.prompt_logprobs is not None
    return request.prompt_logprobs.entries(request.prompt_token_ids, count)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


class TokenTexts:
    """The text of each token of one output, for a page that colours them.

    Together they are the output's text, and a stop string that ended it. A character of several
    tokens is the last one's, also where the output ends inside it.
    """

    def __init__(self, tokenizer: Any):
        self._stream = TextStream(tokenizer)
        self._length = 0

    def of(self, piece: Piece) -> list[Json]:
        """Returns the tokens of a piece: text, and 0 or the number of the accepted draft."""
        tokens: list[Json] = [
            {"text": self.add(token), "source": source}
            for token, source in zip(piece.token_ids, piece.sources or [], strict=False)
        ]
        if tokens and piece.finish_reason is not None:
            tokens[-1]["text"] += self._stream.final()[self._length :]
        return tokens

    def add(self, token: int) -> str:
        """Returns the text that a token adds."""
        self._stream.extend_with([token])
        text = self._stream.safe_text()
        start, self._length = self._length, len(text)
        return text[start:]


def usage_of(prompts: Sequence[Sequence[Request]], counts: Sequence[int]) -> Json:
    """Returns `usage`.

    Args:
        prompts: the requests of each prompt. counts: tokens of each completion.
    """
    num_prompt = sum(len(requests[0].prompt_token_ids) for requests in prompts)
    cached = sum(requests[0].cached_tokens or 0 for requests in prompts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": sum(counts),
        "total_tokens": num_prompt + sum(counts),
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def metrics_of(llm: AsyncFront, requests: Sequence[Request]) -> Json | None:
    """Returns `metrics`, what a request's drafts were worth; None without speculation."""
    stats: SpecStats = llm.facts.acceptance.stats(requests)
    if llm.facts.acceptance.max_draft_len == 0:
        return None
    asked, accepted = stats.num_draft_tokens, stats.num_accepted_draft_tokens
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.acceptance_length,
            "draft_acceptance_rate": accepted / asked if asked else 0.0,
            "acceptance_histogram": stats.acceptance_histogram,
            "num_spec_steps": stats.num_steps,
            "num_draft_tokens": asked,
            "num_accepted_draft_tokens": accepted,
            "forced_acceptance": stats.forced_acceptance,
        }
    }


async def start(streams: Sequence[OutputStream], config: ServerConfig, prompt_field: str) -> None:
    """Queues the requests. If one is refused, the others are cancelled.

    Args:
        prompt_field: the field of the request that holds the prompt.

    Raises:
        ApiError: with the reason.
    """
    try:
        for stream in streams:
            await stream.start()
        _check_size(streams, config)
    except BaseException as error:
        for stream in streams:
            stream.cancel()
        if isinstance(error, RequestError | QueueFullError | EngineError):
            raise of_library(error, prompt_field) from None
        raise


def _check_size(streams: Sequence[OutputStream], config: ServerConfig) -> None:
    """Refuses log probabilities of prompts that take long to write. Each choice may have them."""
    total = 0
    for stream in streams:
        first, *others = stream.requests
        if (count := first.sampling_params.prompt_logprobs) is not None:
            total += (count + 1) * len(first.prompt_token_ids) * (1 + len(others))
    if total > config.max_prompt_logprobs:
        raise refused(
            "prompt_logprobs",
            f"{total} log probabilities of prompts are asked for, by 'prompt_logprobs' or 'echo' "
            f"with 'logprobs': this server allows {config.max_prompt_logprobs}. Send fewer prompts "
            "at a time.",
        )


async def next_pieces(stream: OutputStream, asked: GenerationRequest) -> list[tuple[int, Piece]]:
    """Waits for news. Returns what is new of an answer; [] once all is read.

    Raises:
        ApiError: the engine failed, or a request did.
    """
    try:
        pieces = await stream.pieces()
    except EngineError as error:
        raise of_library(error) from None
    return _checked(stream, asked, pieces)


def new_pieces(stream: OutputStream, asked: GenerationRequest) -> list[tuple[int, Piece]]:
    """Returns what is new by now, as `next_pieces` does; [] if nothing is."""
    try:
        pieces = stream.take()
    except EngineError as error:
        raise of_library(error) from None
    return _checked(stream, asked, pieces)


def _checked(
    stream: OutputStream, asked: GenerationRequest, pieces: list[tuple[int, Piece]]
) -> list[tuple[int, Piece]]:
    for index, piece in pieces:
        if piece.finish_reason in ("error", "cancelled"):
            stream.cancel()
            raise failure_of(asked, stream.requests[index])
    return pieces


def failure_of(asked: GenerationRequest, request: Request) -> ApiError:
    """Returns the error of a request that failed, or was cancelled."""
    if request.finish_reason == "cancelled":
        return ApiError(503, "The request was cancelled: the server ends.", code="cancelled")
    message, field = request.error or "The request failed.", grammar_field(asked)
    if field is not None and not request.output_token_ids:
        return ApiError(400, message, param=field)  # its grammar is wrong
    return ApiError(500, message)
