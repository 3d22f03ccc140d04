"""Outputs of requests: what is new of one, its snapshot, n of them joined."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ..api.outputs import CompletionOutput, Logprob, RequestOutput, SpecStats, acceptance_stats
from ..api.text_stream import TextStream
from ..executor.py_executor import PyExecutor
from ..executor.request import Request


class RequestTexts:
    """Stop strings in the text of requests, for the executor.

    It holds no engine, so that there is no reference cycle.
    """

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer

    def text_of(self, request: Request) -> TextStream:
        if request.text is None:
            request.text = TextStream(self.tokenizer, request.sampling_params.stop_strings)
        return request.text

    def hit_stop_string(self, request: Request) -> bool:
        """A `StopCheck` of requests with stop strings."""
        return self.text_of(request).extend(request.output_token_ids)


class Piece(NamedTuple):
    """What is new of one request since its reader last looked."""

    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    sources: list[int] | None  # per token: j for accepted draft j, else 0; if asked for
    finish_reason: str | None


NOTHING_NEW = Piece(text="", token_ids=[], logprobs=None, sources=None, finish_reason=None)


@dataclass(frozen=True)
class Acceptance:
    """What an engine says of its drafts."""

    max_draft_len: int
    forced: float | None  # drafts accepted by force

    @staticmethod
    def of(executor: PyExecutor) -> Acceptance:
        return Acceptance(executor.max_draft_len, executor.forced_acceptance)

    def stats(self, requests: Sequence[Request]) -> SpecStats:
        """Returns the acceptance of requests together. They may be running in another thread."""
        accepted: Counter[int] = Counter()
        for request in requests:
            accepted.update(dict(request.accepted_lens))  # copied at once
        num_draft_tokens = sum(request.num_draft_tokens for request in requests)
        return acceptance_stats(accepted, self.max_draft_len, self.forced, num_draft_tokens)


class OutputReader:
    """Follows one request's output.

    It decodes the text itself, so that a thread that runs the engine need not.
    """

    def __init__(self, request: Request, prompt: str | None, tokenizer: Any):
        self.request, self.prompt = request, prompt
        self._stream = TextStream(tokenizer, request.sampling_params.stop_strings)
        self.num_seen, self._seen_text = 0, 0  # tokens, characters
        self.is_done = False  # the end was taken
        self._prompt_entries: list[dict[int, Logprob] | None] | None = None

    def take(self, num_tokens: int, *, is_finished: bool) -> Piece:
        """Returns what is new.

        Args:
            num_tokens: tokens of the output that may be read. Later ones may be computed again.
        """
        request, first = self.request, self.num_seen
        new = request.output_token_ids[first:num_tokens]
        if new:
            ends = is_finished and self._ends_by(new[-1])
            self._stream.extend_with(new[:-1] if ends else new)
        text = self._stream.final() if is_finished else self._stream.safe_text()
        piece = Piece(
            text=text[self._seen_text :],
            token_ids=new,
            logprobs=None if request.logprobs is None else request.logprobs[first:num_tokens],
            sources=None if request.sources is None else request.sources[first:num_tokens],
            finish_reason=request.finish_reason if is_finished else None,
        )
        self.num_seen, self._seen_text = num_tokens, len(text)
        self.is_done = is_finished
        return piece

    def _ends_by(self, token: int) -> bool:
        """Whether the last token ended the output. As a stop string it is no text then, but where a
        grammar holds, whose text it is part of."""
        params = self.request.sampling_params
        was_stopped = self.request.finish_reason == "stop" and params.guided_decoding is None
        return was_stopped and token in (params.stop_token_ids or ())

    def snapshot(self, piece: Piece, acceptance: Acceptance) -> RequestOutput:
        """Returns the output up to now; `_diff` fields are the piece's, which was taken last."""
        request, count = self.request, self.num_seen
        completion = CompletionOutput(
            token_ids=request.output_token_ids[:count],
            text=self._stream.final() if self.is_done else self._stream.safe_text(),
            finish_reason=request.finish_reason if self.is_done else None,
            token_ids_diff=piece.token_ids,
            text_diff=piece.text,
            logprobs=None if request.logprobs is None else request.logprobs[:count],
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            outputs=[completion],
            spec_stats=acceptance.stats([request]),
            finished=self.is_done,
            error=request.error,
            cached_tokens=request.cached_tokens or 0,
            prompt_logprobs=self._entries_of_prompt(),
        )

    def _entries_of_prompt(self) -> list[dict[int, Logprob] | None] | None:
        request, count = self.request, self.request.sampling_params.prompt_logprobs
        if count is None or request.prompt_logprobs is None or request.lacks_prompt_logprobs:
            return None
        if self._prompt_entries is None:
            known = request.prompt_logprobs
            self._prompt_entries = known.entries(request.prompt_token_ids, count)
        return self._prompt_entries


def join(
    outputs: Sequence[RequestOutput], requests: Sequence[Request], acceptance: Acceptance
) -> RequestOutput:
    """Joins the completions of one prompt to one output."""
    if len(outputs) == 1:
        return outputs[0]
    return replace(
        outputs[0],
        outputs=[replace(o.outputs[0], index=i) for i, o in enumerate(outputs)],
        finished=all(output.finished for output in outputs),
        error=next((output.error for output in outputs if output.error), None),
        spec_stats=acceptance.stats(requests),
    )
