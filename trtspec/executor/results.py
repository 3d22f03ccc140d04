"""`StepReader`: copies a step's outputs to the host without waiting, and reads them later.

It returns one `RequestResult` for each request of the step. `RequestBook` applies them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from ..api.outputs import Logprob
from ..ops.tokens.logprobs import TokenLogprobs
from .forward_step import StepOutputs
from .guide import GuidedBatch, tokens_of
from .request import Request, ScheduledBatch, StepPlan


class LaunchedStep(NamedTuple):
    """A step whose results the host has not read. Tensors are on the host, once `ready`."""

    batch: ScheduledBatch
    yields_token: list[bool]  # per request: False for a chunk inside the prompt
    num_drafts: int  # K', drafts that each generation verifies
    draft_len: int  # drafts that it proposes
    num_asked: list[int]  # per request: drafts its step before was asked for, found or not
    num_proposed: Tensor | None  # [G] drafts that it had to verify, if recorded
    new_tokens: Tensor  # this and the next fields as in StepOutputs
    new_tokens_lens: Tensor
    bad_requests: Tensor
    hidden_states: Tensor | None
    logprobs: TokenLogprobs | None
    drafts: Tensor | None  # [B, K] int32, for the next step, where there are grammars
    guided: GuidedBatch | None  # where there are grammars
    is_replay: bool  # a graph ran it
    ready: torch.cuda.Event | None  # None on CPU


class GuidedDrafts(NamedTuple):
    """The host's part of a step with grammars, and the drafts that the step proposed."""

    batch: GuidedBatch
    drafts: Tensor  # [B, K] int32


class HiddenRows(NamedTuple):
    """Captured and final states of a request's tokens from position `start` on."""

    start: int
    states: Tensor  # [n, (layers + 1) * D]


class RequestResult(NamedTuple):
    """The result of one step for one request."""

    request: Request
    is_generation: bool  # else a part of its prompt
    is_bad: bool  # its logits held NaN, or nothing above -inf
    yields_token: bool  # False for a chunk inside the prompt
    tokens: list[int]  # accepted drafts, then the bonus
    num_asked: int  # drafts that its step before was asked for, found or not
    num_proposed: int | None  # drafts that it verified, if recorded
    logprobs: list[dict[int, Logprob]] | None  # of each token, if asked for
    hidden: HiddenRows | None  # if states are saved

    @property
    def sources(self) -> list[int]:
        """For each token: j if it is accepted draft j, else 0."""
        return [*range(1, len(self.tokens)), 0]


class StepReader:
    """Copies the results of launched steps to the host, and reads them."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"

    def copy(
        self,
        plan: StepPlan,
        outputs: StepOutputs,
        num_proposed: Tensor | None,
        guided: GuidedDrafts | None = None,
        *,
        most_asked: int,
        is_replay: bool = False,
    ) -> LaunchedStep:
        """Starts the copies; on CUDA the host does not wait for them.

        Args:
            plan: of the step, not yet counted as launched.
            num_proposed: [G] drafts to verify; None if no request records them.
            guided: where a request has a grammar.
            most_asked: drafts that it may verify; further ones were dropped.
            is_replay: whether a graph ran it.
        """
        batch, logprobs = plan.batch, outputs.logprobs
        yields_token = [chunk.next_prompt_token < 0 for chunk in batch.contexts]
        yields_token += [True] * len(batch.generations)
        return LaunchedStep(
            batch=batch,
            yields_token=yields_token,
            num_drafts=plan.num_drafts,
            draft_len=plan.draft_len,
            num_asked=[min(request.num_drafts, most_asked) for request in batch.requests],
            num_proposed=None if num_proposed is None else self._to_host(num_proposed),
            new_tokens=self._to_host(outputs.new_tokens),
            new_tokens_lens=self._to_host(outputs.new_tokens_lens),
            bad_requests=self._to_host(outputs.bad_requests),
            hidden_states=(
                None if outputs.hidden_states is None else self._to_host(outputs.hidden_states)
            ),
            logprobs=logprobs.to_host() if logprobs is not None and self.on_gpu else logprobs,
            drafts=None if guided is None else self._to_host(guided.drafts),
            guided=None if guided is None else guided.batch,
            is_replay=is_replay,
            ready=self._record_event(),  # after all copies
        )

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True) if self.on_gpu else tensor

    def _record_event(self) -> torch.cuda.Event | None:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event()
        event.record()
        return event

    def follow(self, launched: LaunchedStep) -> None:
        """Lets the grammars of a step follow its tokens. Waits for the copies."""
        if launched.guided is None or launched.guided.is_read:
            return
        if launched.ready is not None:
            launched.ready.synchronize()
        assert launched.drafts is not None
        launched.guided.read(
            tokens_of(launched.new_tokens, launched.new_tokens_lens, launched.drafts)
        )

    def read(self, launched: LaunchedStep) -> list[RequestResult]:
        """Waits for the copies. Returns one result per request of the step, contexts first."""
        if launched.ready is not None:
            launched.ready.synchronize()
        tokens, lens = launched.new_tokens.tolist(), launched.new_tokens_lens.tolist()
        is_bad, num_proposed = launched.bad_requests.tolist(), _num_proposed(launched)
        logprobs, hidden = _logprobs(launched, tokens, lens), _hidden_rows(launched)
        first_generation = len(launched.batch.contexts)
        yields_token, num_asked = launched.yields_token, launched.num_asked
        return [
            RequestResult(
                request=request,
                is_generation=row >= first_generation,
                is_bad=is_bad[row],
                yields_token=yields_token[row],
                tokens=tokens[row][: lens[row]],
                num_asked=num_asked[row],
                num_proposed=num_proposed[row],
                logprobs=logprobs[row],
                hidden=hidden[row],
            )
            for row, request in enumerate(launched.batch.requests)
        ]


def _num_proposed(launched: LaunchedStep) -> Sequence[int | None]:
    """Returns the drafts that each request verified, where recorded."""
    if launched.num_proposed is None:
        return [None] * len(launched.batch.requests)
    return [None] * len(launched.batch.contexts) + launched.num_proposed.tolist()


def _hidden_rows(launched: LaunchedStep) -> Sequence[HiddenRows | None]:
    """Returns the rows to save of each request. A generation has one row: nothing is drafted."""
    batch, states = launched.batch, launched.hidden_states
    if states is None:
        return [None] * len(batch.requests)
    spans = [(chunk.start, chunk.end - chunk.start) for chunk in batch.contexts]
    spans += [(request.num_tokens - 1, 1) for request in batch.generations]
    ends = accumulate(count for _, count in spans)
    return [
        HiddenRows(start=start, states=states[end - count : end])
        for (start, count), end in zip(spans, ends, strict=True)
    ]


def _logprobs(
    launched: LaunchedStep, tokens: list[list[int]], lens: list[int]
) -> Sequence[list[dict[int, Logprob]] | None]:
    """Returns each request's log probabilities, one entry per new token; None if not asked for."""
    batch, known = launched.batch, launched.logprobs
    if known is None:
        return [None] * len(batch.requests)
    num_contexts = len(batch.contexts)
    columns: list[list[dict[int, Logprob]] | None] = []
    for row, request in enumerate(batch.requests):
        count = request.sampling_params.logprobs
        if count is None or not launched.yields_token[row]:
            columns.append(None)
            continue
        generation = max(0, row - num_contexts)
        first = min(row, num_contexts) + generation * (launched.num_drafts + 1)
        new_tokens = tokens[row][: lens[row]]
        columns.append(
            [_entry(known, first + i, token, count) for i, token in enumerate(new_tokens)]
        )
    return columns


def _entry(known: TokenLogprobs, i: int, token: int, count: int) -> dict[int, Logprob]:
    """Returns the token chosen at logits row `i`, then the `count` likeliest, by token."""
    entry = {token: Logprob(float(known.own[i]), int(known.ranks[i]))}
    pairs = zip(known.top_ids[i].tolist(), known.top[i].tolist(), strict=True)
    for rank, (other, logprob) in enumerate(islice(pairs, count), start=1):
        entry.setdefault(other, Logprob(logprob, rank))
    return entry
