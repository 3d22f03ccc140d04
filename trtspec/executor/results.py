"""`StepReader`: copies a step's outputs to the host without waiting, and reads them later.

It returns one `RequestResult` for each request of the step. `RequestBook` applies them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..api.outputs import Logprob
from ..ops.tokens.logprobs import TokenLogprobs
from .device_step import PartialLaunch
from .forward_step import StepOutputs
from .guided_batch import GuidedBatch
from .logprobs import LogprobRows, logprob_entry
from .pinned import PinnedBuffer, PinnedBuffers
from .request import Request, ScheduledBatch, StepPlan


class HostOutputs(NamedTuple):
    """`StepOutputs` on the host, once `ready`."""

    new_tokens: np.ndarray
    new_tokens_lens: np.ndarray
    bad_requests: np.ndarray
    hidden_states: Tensor | None
    logprobs: TokenLogprobs | None
    drafts: Tensor | None  # [B, K] int32, for the next step, where there are grammars
    prompt_logprobs: TokenLogprobs | None
    num_verified: Tensor | None
    ready: torch.cuda.Event | None  # None on CPU
    buffer: PinnedBuffer | None  # that the arrays are in


@dataclass(eq=False)
class LaunchedStep:
    """A step whose results the host has not read."""

    batch: ScheduledBatch
    yields_token: list[bool]  # per request: False for a chunk inside the prompt
    num_drafts: int  # K', drafts that each generation verifies
    draft_len: int  # drafts that it proposes
    num_asked: list[int]  # per request: drafts its step before was asked for, found or not
    num_proposed: Tensor | None  # [G] drafts that it had to verify, if recorded
    guided: GuidedBatch | None  # where there are grammars
    is_replay: bool  # a graph ran it
    rows: list[int] | None  # of its requests, as in `PartialLaunch`
    share: int | None  # as of `StepPlan`
    launch_rest: Callable[[], HostOutputs] | None
    """Launches what is left of the step, and the copies of its results; None once that is done."""
    waited: float = 0.0  # seconds that the host waited for its results
    _results: HostOutputs | None = None

    def finish_launch(self) -> None:
        """Launches it to its end, and starts the copies of its results, unless that is done."""
        if self.launch_rest is not None:
            self._results = self.launch_rest()
            self.launch_rest = None

    @property
    def results(self) -> HostOutputs:
        """Returns its results, which may not be ready yet."""
        self.finish_launch()
        assert self._results is not None
        return self._results


class HiddenRows(NamedTuple):
    """Captured and final states of a request's tokens from position `start` on."""

    start: int
    states: Tensor  # [n, (layers + 1) * D]


class PromptPart(NamedTuple):
    """Log probabilities of the prompt's tokens from position `first` on."""

    first: int
    rows: LogprobRows


class RequestResult(NamedTuple):
    """The result of one step for one request."""

    request: Request
    is_generation: bool  # else a part of its prompt
    is_bad: bool  # its logits held NaN, or nothing above -inf
    yields_token: bool  # False for a chunk inside the prompt
    tokens: list[int]  # accepted drafts, then the bonus; up to the end of a grammar
    num_accepted: int  # drafts, up to the end of a grammar
    num_asked: int  # drafts asked for by its previous step; of those shared out, the verified ones
    num_proposed: int | None  # drafts that it verified, if recorded
    # (Both are up to the end of a grammar, too: what is behind it was not judged.)
    logprobs: list[dict[int, Logprob]] | None  # of each token, if asked for
    hidden: HiddenRows | None  # if states are saved
    prompt_logprobs: PromptPart | None  # if asked for

    @property
    def sources(self) -> list[int]:
        """For each token: j if it is accepted draft j, else 0."""
        return [*range(1, self.num_accepted + 1), 0][: len(self.tokens)]

    def first(self, count: int) -> RequestResult:
        """Returns it with the first `count` tokens alone."""
        if count >= len(self.tokens):
            return self
        logprobs = None if self.logprobs is None else self.logprobs[:count]
        accepted, proposed = min(self.num_accepted, count), self.num_proposed
        return self._replace(
            tokens=self.tokens[:count],
            num_accepted=accepted,
            num_asked=min(self.num_asked, accepted),
            num_proposed=None if proposed is None else min(proposed, accepted),
            logprobs=logprobs,
        )


Applied = tuple[RequestResult, int]
"""A result, and how many tokens its request got: an output may end inside the accepted ones."""


class Outcomes(NamedTuple):
    """What became of the drafts of a step's generations, one entry in each list for each."""

    requests: list[Request]
    num_asked: list[int]  # as in RequestResult
    num_accepted: list[int]


class StepReader:
    """Copies the results of launched steps to the host, and reads them."""

    def __init__(self, device: torch.device):
        self.on_gpu = device.type == "cuda"
        self._buffers = PinnedBuffers()

    def copy(
        self,
        plan: StepPlan,
        launch: PartialLaunch,
        num_proposed: Tensor | None,
        guided: GuidedBatch | None = None,
        drafts_of: Callable[[], Tensor] | None = None,
        *,
        most_asked: int,
    ) -> LaunchedStep:
        """Returns the step. `finish_launch` starts its copies; on CUDA the host does not wait.

        Args:
            plan: of the step, not yet counted as launched.
            num_proposed: [G] drafts to verify; None if no request records them.
            guided: where a request has a grammar.
            drafts_of: reads the drafts of such a step from the slots, [B, K] int32.
            most_asked: drafts that it may verify; further ones were dropped.
        """
        batch = plan.batch
        yields_token = [chunk.next_prompt_token < 0 for chunk in batch.contexts]
        yields_token += [True] * len(batch.generations)
        return LaunchedStep(
            batch=batch,
            yields_token=yields_token,
            num_drafts=plan.num_drafts,
            draft_len=plan.draft_len,
            num_asked=[  # min() would take longer
                asked if (asked := request.num_drafts) < most_asked else most_asked
                for request in batch.requests
            ],
            num_proposed=None if num_proposed is None else self._to_host(num_proposed),
            guided=guided,
            is_replay=launch.is_replay,
            rows=launch.rows,
            share=plan.share,
            launch_rest=partial(self._launch_rest, launch, drafts_of),
        )

    def _launch_rest(
        self, launch: PartialLaunch, drafts_of: Callable[[], Tensor] | None
    ) -> HostOutputs:
        outputs = launch.finish()
        hidden, drafts, verified = outputs.hidden_states, None, outputs.num_verified
        arrays, buffer = self._small_to_host(outputs)
        if drafts_of is not None:
            drafts = drafts_of() if outputs.drafts is None else outputs.drafts
        return HostOutputs(
            new_tokens=arrays[0],
            new_tokens_lens=arrays[1],
            bad_requests=arrays[2],
            hidden_states=None if hidden is None else self._to_host(hidden),
            logprobs=self._logprobs_to_host(outputs.logprobs),
            drafts=None if drafts is None else self._to_host(drafts),
            prompt_logprobs=self._logprobs_to_host(outputs.prompt_logprobs),
            num_verified=None if verified is None else self._to_host(verified),
            ready=self._record_event(buffer),  # after all copies
            buffer=buffer,
        )

    def _to_host(self, tensor: Tensor) -> Tensor:
        return tensor.to("cpu", non_blocking=True) if self.on_gpu else tensor

    def _small_to_host(
        self, outputs: StepOutputs
    ) -> tuple[Sequence[np.ndarray], PinnedBuffer | None]:
        """Copies tokens, lengths and marks, by one copy where they are parts of one piece."""
        piece = outputs.piece if self.on_gpu else None
        if piece is None:
            tensors = outputs.new_tokens, outputs.new_tokens_lens, outputs.bad_requests
            return [self._to_host(tensor).numpy() for tensor in tensors], None
        num_bytes = piece.memory.shape[0]
        buffer = self._buffers.take(num_bytes)
        buffer.tensor[:num_bytes].copy_(piece.memory, non_blocking=True)
        return piece.arrays(buffer.memory), buffer

    def _logprobs_to_host(self, logprobs: TokenLogprobs | None) -> TokenLogprobs | None:
        return logprobs.to_host() if logprobs is not None and self.on_gpu else logprobs

    def _record_event(self, buffer: PinnedBuffer | None) -> torch.cuda.Event | None:
        if not self.on_gpu:
            return None
        event = torch.cuda.Event() if buffer is None else buffer.event
        event.record()
        return event

    def follow(self, launched: LaunchedStep) -> None:
        """Lets the grammars of a step follow its tokens. Waits for the copies."""
        if launched.guided is None or launched.guided.is_read:
            return
        results = launched.results
        if results.ready is not None:
            results.ready.synchronize()
        assert results.drafts is not None
        columns = results.new_tokens, results.new_tokens_lens, results.drafts
        launched.guided.read(*(column.tolist() for column in columns))

    def read(self, launched: LaunchedStep) -> list[RequestResult]:
        """Waits for the copies. Returns one result per request of the step, contexts first."""
        results = launched.results
        if results.ready is not None:
            began = time.perf_counter()
            results.ready.synchronize()
            launched.waited = time.perf_counter() - began
        arrays = results.new_tokens, results.new_tokens_lens, results.bad_requests
        rows = slice(None) if launched.rows is None else launched.rows
        all_tokens, lens, is_bad = (array[rows].tolist() for array in arrays)
        tokens = [row[:length] for row, length in zip(all_tokens, lens, strict=True)]
        num_asked, num_proposed = _num_drafts(launched)
        prompts, batch = _prompt_parts(launched), launched.batch
        if results.buffer is not None:  # read, and it stays as it is until another launch
            self._buffers.give(results.buffer)
        for row, part in enumerate(prompts):
            is_bad[row] |= part is not None and part.rows.has_nan
        columns: dict[str, Sequence[Any]] = {
            "request": batch.requests,
            "is_generation": [False] * len(batch.contexts) + [True] * len(batch.generations),
            "is_bad": is_bad,
            "yields_token": launched.yields_token,
            "tokens": tokens,
            "num_accepted": [length - 1 for length in lens],
            "num_asked": num_asked,
            "num_proposed": num_proposed,
            "logprobs": _logprobs(launched, tokens),
            "hidden": _hidden_rows(launched),
            "prompt_logprobs": prompts,
        }
        # Made one by one, by keywords, they would take twice the time.
        entries = zip(*(columns[name] for name in RequestResult._fields), strict=True)
        return [RequestResult._make(entry) for entry in entries]


def _num_drafts(launched: LaunchedStep) -> tuple[Sequence[int], Sequence[int | None]]:
    """Returns the drafts that each request was asked for, and those it verified, where recorded.

    Where a step shares verification out, both are those it verified.
    """
    contexts, proposed = len(launched.batch.contexts), launched.num_proposed
    num_asked, verified = launched.num_asked, launched.results.num_verified
    if verified is not None:
        shares = zip(num_asked[contexts:], verified.tolist(), strict=True)
        num_asked = num_asked[:contexts] + [min(pair) for pair in shares]
    if proposed is None:
        return num_asked, [None] * len(num_asked)
    if verified is not None:
        proposed = torch.minimum(proposed, verified)
    return num_asked, [None] * contexts + proposed.tolist()


def _hidden_rows(launched: LaunchedStep) -> Sequence[HiddenRows | None]:
    """Returns the rows to save of each request. A generation has one row: nothing is drafted."""
    batch, states = launched.batch, launched.results.hidden_states
    if states is None:
        return [None] * len(batch.requests)
    spans = [(chunk.start, chunk.num_tokens) for chunk in batch.contexts]
    spans += [(request.num_tokens - 1, 1) for request in batch.generations]
    ends = accumulate(count for _, count in spans)
    return [
        HiddenRows(start=start, states=states[end - count : end])
        for (start, count), end in zip(spans, ends, strict=True)
    ]


def _prompt_parts(launched: LaunchedStep) -> Sequence[PromptPart | None]:
    """Returns the log probabilities of each request's prompt that the step computed."""
    batch, known = launched.batch, launched.results.prompt_logprobs
    if known is None:
        return [None] * len(batch.requests)
    parts: list[PromptPart | None] = []
    start = 0
    for chunk in batch.contexts:
        count = chunk.request.sampling_params.prompt_logprobs
        end = start + chunk.num_prompt_logprobs
        if count is None or start == end:
            parts.append(None)
        else:
            parts.append(PromptPart(chunk.start + 1, LogprobRows.of(known, start, end, count)))
        start = end
    return parts + [None] * len(batch.generations)


def _logprobs(
    launched: LaunchedStep, tokens: list[list[int]]
) -> Sequence[list[dict[int, Logprob]] | None]:
    """Returns each request's log probabilities, one entry per new token; None if not asked for."""
    batch, known = launched.batch, launched.results.logprobs
    if known is None:
        return [None] * len(batch.requests)
    columns: list[list[dict[int, Logprob]] | None] = []
    for number, request in enumerate(batch.requests):
        count = request.sampling_params.logprobs
        if count is None or not launched.yields_token[number]:
            columns.append(None)
            continue
        rows = enumerate(tokens[number], start=batch.first_logits_row(number, launched.num_drafts))
        columns.append([_entry(known, row, token, count) for row, token in rows])
    return columns


def _entry(known: TokenLogprobs, i: int, token: int, count: int) -> dict[int, Logprob]:
    """Returns the token chosen at logits row `i`, then the `count` likeliest, by token."""
    pairs = zip(known.top_ids[i].tolist(), known.top[i].tolist(), strict=True)
    return logprob_entry(token, float(known.own[i]), int(known.ranks[i]), pairs, count)
