"""What both endpoints share: to queue the requests of an answer, and to stream it."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, Protocol

from ..errors import EngineError, TrtspecError
from ..executor.request import Request
from ..frontend.async_front import AsyncFront
from ..frontend.engine_thread import Bell
from ..frontend.output_stream import OutputStream
from ..frontend.outputs import Piece
from .answers import Json, dumped, event_of
from .config import ServerConfig
from .errors import ApiError, in_fields, of_library, refused
from .protocol import GenerationRequest, StreamOptions
from .sampling import grammar_field
from .streams import DONE
from .token_names import TokenNames


class Endpoint:
    """Takes requests for an engine.

    Args:
        model_name: in answers.
    """

    PROMPT_FIELD: ClassVar[str]
    """The field of a request that holds the prompt."""

    def __init__(self, llm: AsyncFront, config: ServerConfig, model_name: str):
        self.llm, self.config, self.model_name = llm, config, model_name
        self.names = TokenNames(llm.tokenizer)

    async def start(self, streams: Sequence[OutputStream]) -> None:
        """Queues the requests. If one is refused, the others are cancelled.

        Raises:
            ApiError: with the reason.
        """
        try:
            for stream in streams:
                await stream.start()
            self._check_size(streams)
        except BaseException as error:
            for stream in streams:
                stream.cancel()
            if isinstance(error, TrtspecError):
                raise of_library(error, self.PROMPT_FIELD) from None
            raise

    def _check_size(self, streams: Sequence[OutputStream]) -> None:
        """Refuses log probabilities of prompts that take long to write, once for each choice."""
        total, most = 0, self.config.max_prompt_logprobs
        for stream in streams:
            first = stream.requests[0]
            if (count := first.sampling_params.prompt_logprobs) is not None:
                total += (count + 1) * len(first.prompt_token_ids) * len(stream.requests)
        if total > most:
            raise refused(
                "prompt_logprobs",
                f"{total} log probabilities of prompts are asked for, by 'prompt_logprobs' or "
                f"'echo' with 'logprobs': this server allows {most}. Send fewer prompts at a time.",
            )


class AnyChoice(Protocol):
    """One completion as it is read."""

    num_tokens: int


class Answer(ABC):
    """One answer, whole or streamed. Choice i of prompt p has the index p * n + i."""

    ID_PREFIX: ClassVar[str]
    KIND: ClassVar[str]  # `object` of a whole answer
    CHUNK_KIND: ClassVar[str]
    _choices: Sequence[AnyChoice]

    def __init__(
        self,
        endpoint: Endpoint,
        request: GenerationRequest,
        streams: Sequence[OutputStream],
    ):
        self._llm, self._names = endpoint.llm, endpoint.names
        self._streams, self._n = streams, request.n
        self._header: Json = {
            "id": f"{self.ID_PREFIX}-{uuid.uuid4().hex}",
            "object": self.KIND,
            "created": int(time.time()),
            "model": endpoint.model_name,
        }
        self._chunk_header = self._header | {"object": self.CHUNK_KIND}
        self._head = f"data: {dumped(self._chunk_header)[:-1]}"
        self._grammar_field = grammar_field(request)
        options = request.stream_options or StreamOptions()
        self._has_usage = options.include_usage
        self._has_usage_always = options.continuous_usage_stats
        self._first: list[tuple[int, Piece]] = []
        self._num_open, self.is_done = len(streams) * request.n, False

    @abstractmethod
    async def whole(self) -> Json:
        """Returns the answer when it is complete."""

    # -- what is new -----------------------------------------------------------------------------
    async def _next(self, stream: OutputStream) -> list[tuple[int, Piece]]:
        """Waits for news of a prompt's choices. Returns what is new of each; [] once all is read.

        Raises:
            ApiError: a request failed. EngineError: the engine did.
        """
        return self._checked(stream, await stream.pieces())

    def _new(self) -> list[tuple[int, Piece]]:
        """Returns what is new by now, by the choice's index. Raises as `_next`."""
        return [
            (number * self._n + i, piece)
            for number, stream in enumerate(self._streams)
            for i, piece in self._checked(stream, stream.take())
        ]

    def _checked(
        self, stream: OutputStream, pieces: list[tuple[int, Piece]]
    ) -> list[tuple[int, Piece]]:
        for i, piece in pieces:
            if piece.finish_reason in ("error", "cancelled"):
                stream.cancel()
                raise self._failure_of(stream.requests[i])
        return pieces

    def _failure_of(self, request: Request) -> ApiError:
        """Returns the error of a request that failed, or was cancelled."""
        if request.finish_reason == "cancelled":
            return ApiError(503, "The request was cancelled: the server ends.", code="cancelled")
        message = request.error or "The request failed."
        if request.has_wrong_grammar:
            return ApiError(400, in_fields(message), param=self._grammar_field)
        return ApiError(500, message)

    # -- what it cost ----------------------------------------------------------------------------
    def _totals(self) -> Json:
        return {"usage": self._usage(), "metrics": self._metrics()}

    def _usage(self) -> Json:
        prompts = [stream.requests[0] for stream in self._streams]
        num_prompt = sum(len(request.prompt_token_ids) for request in prompts)
        num_output = sum(choice.num_tokens for choice in self._choices)
        cached = sum(request.cached_tokens or 0 for request in prompts)
        return {
            "prompt_tokens": num_prompt,
            "completion_tokens": num_output,
            "total_tokens": num_prompt + num_output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _metrics(self) -> Json | None:
        """Returns what the drafts were worth; None without speculation."""
        acceptance = self._llm.facts.acceptance
        if acceptance.max_draft_len == 0:
            return None
        stats = acceptance.stats([r for stream in self._streams for r in stream.requests])
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

    # -- streamed --------------------------------------------------------------------------------
    async def wait(self) -> None:
        """Waits for the first tokens, so that an error before them has a status of its own."""
        try:
            while not self._first:
                self._first = self._new()
                if not self._first:
                    await self.bell.wait()
        except BaseException:
            self.close()
            raise

    @property
    def bell(self) -> Bell:
        return self._streams[0].bell  # all have this one

    def close(self) -> None:
        for stream in self._streams:
            stream.cancel()

    def take(self) -> bytes:
        """Returns the server-sent events that are due. `wait` comes first."""
        events = []
        try:
            pieces, self._first = self._first, []
            if pieces:
                events += self._beginning()
            events += [self._event(index, piece) for index, piece in pieces or self._new()]
            if self._num_open:
                return b"".join(events)
            if self._has_usage:
                events.append(event_of(self._chunk_header | {"choices": []} | self._totals()))
        except ApiError as error:
            events.append(event_of(error.body()))
        except EngineError as error:
            events.append(event_of(of_library(error).body()))
        self.is_done = True
        return b"".join([*events, DONE])

    def _beginning(self) -> list[bytes]:
        """Returns the events before the first piece's."""
        return []

    @abstractmethod
    def _event(self, index: int, piece: Piece) -> bytes:
        """Returns the event of a piece, b"" if there is nothing to say."""

    def _add_figures(self, chunk: Json) -> None:
        """Adds what else a chunk has; the last one the metrics, if no chunk of usage follows."""
        if self._has_usage_always:
            chunk["usage"] = self._usage()
        if self._num_open == 0 and not self._has_usage:
            chunk["metrics"] = self._metrics()
