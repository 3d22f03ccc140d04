"""`Request`: its tokens, parameters and state on the host; `ScheduledBatch`, `StepPlan`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from typing import NamedTuple

from ..api.embeds_prompt import EmbedsPrompt
from ..api.outputs import Logprob
from ..api.sampling_params import MAX_LOGPROBS, SamplingParams
from ..api.text_stream import TextStream
from ..guided.grammar import Grammar
from ..metadata.guided import Point
from ..state.prefix import PrefixChain
from .logprobs import PromptLogprobs


class RequestState(Enum):
    WAITING = auto()  # no slot, no KV; also after preemption
    CONTEXT = auto()  # has a slot, part of its prompt may be computed
    GENERATION = auto()
    FINISHED = auto()


class StepRecord(NamedTuple):
    """One generation step of one request."""

    kv_len: int  # tokens in its KV cache before the step
    proposed: int  # drafts the step verified
    accepted: int  # how many of them were accepted


@dataclass(eq=False)
class Request:
    request_id: int
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    max_total_tokens: int  # prompt and output together, from max_tokens and the engine's limit
    end_ids: frozenset[int] = frozenset()  # tokens that end its output
    embeds: EmbedsPrompt | None = None  # of a prompt that is not all text
    images: tuple[tuple[int, int], ...] = ()  # [start, end) of those that one pass must hold
    arrived: float = 0.0  # when a server had it, of time.perf_counter(); 0.0: when it is queued
    output_token_ids: list[int] = field(default_factory=list)
    state: RequestState = RequestState.WAITING
    slot: int = -1
    num_computed: int = 0  # context tokens launched so far, with those that were reused
    num_reused: int = 0  # context tokens whose KV was found in the cache at the last admission
    cached_tokens: int | None = None  # the same at the first admission; None before it
    is_counted: bool = False  # its prompt is in `Statistics`, whatever preempts it later
    cache_salt: str | None = None  # requests of other salts share no blocks with it
    prefix: PrefixChain | None = None  # keys of its blocks, if it may share them
    stops: tuple[int, ...] = ()  # where passes over its prompt end, so that its state can be kept
    past_upper: int = 0  # upper bound of valid KV tokens; exact when nothing is in flight
    num_drafts: int = 0  # drafts its last launched step was asked for
    num_missed: int = 0  # rows that the head reads later (`metadata/missed.py`)
    first_missed: int = 0  # a lower bound of the first one's position
    num_in_flight: int = 0  # launched steps whose tokens the host has not read
    finish_reason: str | None = None
    error: str | None = None
    has_wrong_grammar: bool = False  # which is why it failed
    is_poisoned: bool = False  # its KV holds NaN: cleared before the blocks go to another
    text: TextStream | None = None  # set where stop strings are checked
    grammar: Grammar | None = None  # once it is compiled, of a request that has one
    next_drafts: list[int] = field(default_factory=list)  # [K] in its slot, if it has a grammar
    num_steps: int = 0  # generation steps read
    accepted_lens: Counter[int] = field(default_factory=Counter)  # accepted drafts -> steps
    num_draft_tokens: int = 0  # drafts that those steps were asked to verify
    num_read: int = 0  # output tokens whose step is read to its end
    logprobs: list[dict[int, Logprob]] | None = None  # per output token, if asked for
    prompt_logprobs: PromptLogprobs | None = None  # if asked for
    sources: list[int] | None = None  # per output token, if asked for: which draft it was, or 0
    steps: list[StepRecord] | None = None  # kept if `PyExecutor.record_steps` was set

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    def tokens_between(self, start: int, end: int) -> list[int]:
        """Returns the known tokens at positions [start, end), without joining all of them."""
        prompt, output = self.prompt_token_ids, self.output_token_ids
        split = len(prompt)
        return prompt[start:end] + output[max(0, start - split) : max(0, end - split)]

    @property
    def num_context_tokens(self) -> int:
        """Tokens that context passes read: the prompt, or after a preemption all but the last.

        Then the next generation step is the one that would have come without the preemption.
        """
        return self.num_tokens - (1 if self.output_token_ids else 0)

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether its prompt must be computed for them, and nothing taken over from the cache."""
        known = self.prompt_logprobs
        return known is not None and known.num_known < len(self.prompt_token_ids)

    @property
    def is_generation(self) -> bool:
        return self.state is RequestState.GENERATION

    @property
    def is_finished(self) -> bool:
        return self.state is RequestState.FINISHED

    @property
    def ends_with_what_is_in_flight(self) -> bool:
        """Whether the steps in flight yield its last token, so that another step would be wasted.

        Each is taken to yield one token at least. (Parts of prompts but the last yield none, nor
        does the context pass after a preemption. Then the next step may be launched one step late.)
        """
        known = len(self.prompt_token_ids) + len(self.output_token_ids)
        return known + self.num_in_flight >= self.max_total_tokens

    def least_context_tokens(self, first: int) -> int:
        """Returns how many tokens a context pass from `first` on must read: all of an image that is
        next, else one."""
        return next((end - start for start, end in self.images if start == first), 1)

    def cut_before_image(self, end: int) -> int:
        """Returns `end`, or the start of the image that a chunk ending there would cut."""
        return next((start for start, stop in self.images if start < end < stop), end)

    def wait_again(self) -> None:
        """Waits without slot and KV: prompt and output so far are to be computed again."""
        self.state, self.slot = RequestState.WAITING, -1
        self.num_computed = self.num_reused = self.past_upper = self.num_missed = 0

    def start_over(self) -> None:
        """Waits again after an exception, with the output of the steps that were read."""
        self.wait_again()
        del self.output_token_ids[self.num_read :]
        if self.logprobs is not None:
            del self.logprobs[self.num_read :]
        if self.sources is not None:
            del self.sources[self.num_read :]
        self.text = None if self.text is None else self.text.emptied()
        self.error, self.is_poisoned = None, False
        self.num_drafts, self.num_in_flight, self.prefix = 0, 0, None

    def end(self) -> None:
        """Ends after an exception. What a running request alone needs is forgotten."""
        self.state, self.slot = RequestState.FINISHED, -1
        self.embeds = self.grammar = self.prefix = None
        self.num_in_flight = 0

    def append(self, tokens: Sequence[int], stop_checks: Sequence[StopCheck]) -> str | None:
        """Adds a step's tokens. Returns why the request ends, if it does.

        Where one may end it they are added one by one, so that a stop inside an accepted run cuts
        the output where it would have ended without speculation. What a stop check raises is not
        caught.
        """
        output, ends = self.output_token_ids, self.end_ids
        limit = self.max_total_tokens - len(self.prompt_token_ids)
        if not stop_checks and len(output) + len(tokens) < limit and ends.isdisjoint(tokens):
            output += tokens
            return None
        for token in tokens:
            output.append(token)
            if token in ends or any(check(self) for check in stop_checks):
                return "stop"
            if len(output) >= limit:
                return "length"
            if self.is_finished:  # cancelled by its stop check
                break
        return None


StopCheck = Callable[[Request], bool]
"""Asked after every appended token; True ends the request with finish_reason "stop"."""


@dataclass(frozen=True)
class ContextChunk:
    """Tokens [start, end) of a request's prompt (with its output, after a preemption)."""

    request: Request
    start: int
    end: int

    @property
    def token_ids(self) -> list[int]:
        return self.request.tokens_between(self.start, self.end)

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def is_first(self) -> bool:
        return self.start == self.request.num_reused

    @property
    def is_last(self) -> bool:
        return self.end == self.request.num_context_tokens

    @property
    def next_prompt_token(self) -> int:
        """The token after the chunk; -1 if it is not chosen yet."""
        following = self.request.tokens_between(self.end, self.end + 1)
        return following[0] if following else -1

    @property
    def num_prompt_logprobs(self) -> int:
        """Rows from its first on that give log probabilities of the prompt, if asked for.

        It depends on the part alone: all ranks compute the same rows.
        """
        if self.request.sampling_params.prompt_logprobs is None:
            return 0
        return max(0, min(self.end, len(self.request.prompt_token_ids) - 1) - self.start)

    def cut(self, count: int) -> tuple[ContextChunk, ContextChunk]:
        """Returns its first `count` tokens, and the others."""
        middle = self.start + count
        return replace(self, end=middle), replace(self, start=middle)

    def next_prompt_ids(self, count: int) -> list[int]:
        """Returns the prompt's tokens after the first `count` rows, -1 where embeddings stand."""
        first, embeds = self.start + 1, self.request.embeds
        ids = self.request.prompt_token_ids[first : first + count]
        for position in () if embeds is None else embeds.positions.tolist():
            if first <= position < first + count:
                ids[position - first] = -1
        return ids


@dataclass(frozen=True)
class ScheduledBatch:
    """One step's requests, contexts first. What is asked of them does not change."""

    contexts: list[ContextChunk]
    generations: list[Request]

    @cached_property
    def requests(self) -> list[Request]:
        return [chunk.request for chunk in self.contexts] + self.generations

    def first_logits_row(self, number: int, num_drafts: int) -> int:
        """Returns the first row of logits of request `number`: a context has one row, a generation
        K'+1. For the number of requests it is the number of rows."""
        contexts = len(self.contexts)
        return min(number, contexts) + max(0, number - contexts) * (num_drafts + 1)

    @cached_property
    def distinct_params(self) -> list[SamplingParams]:
        """The sampling parameters of its requests, each object once: often all share one."""
        return list({id(p): p for p in [r.sampling_params for r in self.requests]}.values())

    @cached_property
    def num_logprobs(self) -> int | None:
        """Alternatives to return with the tokens of this step; None: no log probabilities."""
        asked = [n for params in self.distinct_params if (n := params.logprobs) is not None]
        if not asked:
            return None
        return next(n for n in (0, 5, MAX_LOGPROBS) if n >= max(asked))  # each is a graph

    @cached_property
    def shapes_logits(self) -> bool:
        return any(params.shapes_logits for params in self.distinct_params)

    @cached_property
    def is_guided(self) -> bool:
        """Whether a request has a grammar."""
        return any(params.guided_decoding is not None for params in self.distinct_params)

    @cached_property
    def num_sampled(self) -> int:
        """Generations that are not greedy."""
        if self.all_greedy:
            return 0
        if not any(params.is_greedy for params in self.distinct_params):
            return len(self.generations)
        return sum(not request.sampling_params.is_greedy for request in self.generations)

    @cached_property
    def all_greedy(self) -> bool:
        return all(params.is_greedy for params in self.distinct_params)

    @cached_property
    def has_filters(self) -> bool:
        return any(params.has_filters for params in self.distinct_params)

    @cached_property
    def has_seeds(self) -> bool:
        """Whether a request is sampled with a seed of its own."""
        return any(
            params.seed is not None and not params.is_greedy for params in self.distinct_params
        )

    @cached_property
    def records_steps(self) -> bool:
        """Whether the steps of a request are recorded."""
        return any(request.steps is not None for request in self.requests)

    def __bool__(self) -> bool:
        return bool(self.contexts or self.generations)


def _nothing_before() -> None:
    """Finishes no launch."""


class StepPlan(NamedTuple):
    """A step as the host knows it: upper bounds, never an accepted count."""

    batch: ScheduledBatch
    num_drafts: int  # K', drafts that each generation verifies
    draft_len: int  # drafts to propose for the next step
    host_part: Callable[[Point], None] | None = None  # called at points, where there are grammars
    reads_missed: bool = False  # the head reads first what it has missed of these requests
    leaves_head: bool = False  # it drafts nothing, and leaves the head's work for later
    share: int | None = None  # drafts of each request that are verified on average, where chosen
    finish_before: Callable[[], None] = _nothing_before
    """Finishes the launch of the step before. Nothing of this one may be launched earlier."""

    @property
    def mean_verified(self) -> int | None:
        """`share`; None where all are verified: where that is as many, and in a pass that also
        reads prompts."""
        if self.share is None or self.batch.contexts or self.share >= self.num_drafts:
            return None
        return self.share

    def count_as_launched(self) -> None:
        """Updates the requests' upper bounds for a step that is launched."""
        rows, draft_len = self.num_drafts + 1, self.draft_len
        for chunk in self.batch.contexts:
            request = chunk.request
            request.num_computed = request.past_upper = chunk.end
            if chunk.is_last:  # also of a preempted request, whose last token is known
                request.state = RequestState.GENERATION
            request.num_drafts = draft_len
            request.num_in_flight += 1
        for request in self.batch.generations:
            request.past_upper += rows
            request.num_drafts = draft_len
            request.num_in_flight += 1
        if self.reads_missed:
            for request in self.batch.generations:
                request.num_missed = 0
        if self.leaves_head:
            for request in self.batch.generations:
                if not request.num_missed:
                    request.first_missed = request.num_tokens - 1
                request.num_missed += 1
