"""`Scheduler`: continuous batching with chunked prefill and preemption.

It decides which requests run in the next step; the executor launches it. It uses only what the host
knows without reading the device: upper bounds of lengths, never an accepted count.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice

from ..config import ExecutorConfig
from ..state.kv_cache import KVCacheManager
from ..state.prefix_search import PrefixHit
from ..workers.base import SpecWorkerBase
from .draft_lens.draft_len import DraftLen
from .prefixes import Prefixes
from .request import ContextChunk, Request, RequestState, ScheduledBatch

COST_OF_PASS, COST_OF_JOINED_PASS = 1.0, 0.5
"""How many steps a pass over prompts delays generations by: apart from them, and with them in it
(`CudaGraphs.run_both`)."""


class Scheduler:
    """Holds the waiting queue and the running requests (oldest first)."""

    def __init__(
        self,
        config: ExecutorConfig,
        kv_cache: KVCacheManager,
        max_draft_len: int,
        worker: SpecWorkerBase,
    ):
        self.config, self.kv_cache = config, kv_cache
        self.rows = max_draft_len + 1  # KV rows a verification pass writes
        self.extra_kv = worker.num_extra_kv_tokens  # KV rows drafting writes past those
        self.extra_kv_at_rest = worker.num_extra_kv_tokens_at_rest
        self.most_drafts = max_draft_len
        """What the step scheduled last verifies or proposes at most."""
        self.rewritten = worker.num_rewritten_tokens
        self.prefixes = Prefixes(kv_cache, self.rewritten)
        self.has_windows = any(window is not None for window in kv_cache.windows)
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.idle_slot_steps = 0
        """Steps of slots that were free for a waiting request since prompts last started."""
        self.pass_cost = COST_OF_PASS
        """Of the last pass over prompts that there were generations beside."""
        self._free_slots = list(range(config.max_batch_size - 1, -1, -1))
        self._last = ScheduledBatch([], [])
        """The last batch of generations alone, until one of its requests leaves. The next one is
        mostly the same: then what is known of the requests together need not be asked again."""

    def needed_tokens(self, request: Request) -> int:
        """Returns the tokens of KV to hold before another generation step of `request`."""
        return min(request.past_upper + self._rows_ahead, self.config.max_seq_len)

    @property
    def _rows_ahead(self) -> int:
        """Rows of KV that the next step of a generation writes, past those in flight."""
        extra = self.extra_kv if self.most_drafts else self.extra_kv_at_rest
        return self.most_drafts + 1 + extra

    @property
    def _next_waiting(self) -> Iterable[Request]:
        """Returns the requests that the next step may start."""
        return islice(self.waiting, self.config.max_batch_size)

    def schedule(self, draft_len: DraftLen) -> tuple[ScheduledBatch, list[Request]]:
        """Returns the next batch, and the requests to preempt first.

        When there are requests to preempt the batch is empty: the executor must read what is in
        flight, call `preempt` for each and schedule again.

        Args:
            draft_len: says how many drafts the step may have, and whether it may have none where
                blocks run out.
        """
        self.most_drafts = draft_len.bound(self._next_waiting)
        if self.has_windows:
            self._release_behind_windows()
        self.idle_slot_steps += min(len(self._free_slots), len(self.waiting))
        started = [
            r for r in self.running
            if r.state is RequestState.CONTEXT and r.num_computed < r.num_context_tokens
        ]  # fmt: skip
        may_start = bool(self.waiting) and self._may_start()
        if started or may_start:
            self._trim_all()
        for_prompts = self._tokens_for_prompts(started, may_start)
        generations, budget = self._schedule_generations(for_prompts)
        short = self._reserve_all(generations, draft_len)
        if short:
            return ScheduledBatch([], []), self._youngest_beside(short[0])
        contexts = self._chunks_of(started, budget)
        if may_start and len(contexts) == len(started):
            contexts += self._start_waiting(budget - sum(c.num_tokens for c in contexts))
        if not contexts and not generations:
            stuck = self._stuck_contexts()
            if stuck:
                return ScheduledBatch([], []), stuck
        if contexts:
            return ScheduledBatch(contexts, generations), []
        if generations != self._last.generations:
            self._last = ScheduledBatch([], generations)
        return self._last, []

    def note_pass(self, is_joined: bool) -> None:
        """Notes of a step with prompts and generations whether they were one pass."""
        self.pass_cost = COST_OF_JOINED_PASS if is_joined else COST_OF_PASS

    def _release_behind_windows(self) -> None:
        """Gives back blocks that no row of a later step sees (the ledger in state/kv_cache.py)."""
        for request in self.running:
            past = request.num_computed  # in a prompt, the tokens launched
            if request.is_generation:  # the tokens read, whose last one has no KV yet
                past = request.num_tokens - 1
            self.kv_cache.release_behind(
                request.request_id, past - self.rewritten, request.num_computed
            )

    def _schedule_generations(self, for_prompts: int) -> tuple[list[Request], int]:
        """Returns generation requests within the token budget, and what is left of it.

        `for_prompts` tokens of the budget are left to the next prompt.
        """
        budget, rows = self.config.max_num_tokens, self.most_drafts + 1
        longest = self.config.max_seq_len
        ready = [
            request
            for request in self.running
            if request.is_generation
            and not request.ends_with_what_is_in_flight
            # It may be past the end if all in flight is accepted, and is read first. Without a row
            # inside, drafting would write at the first positions, in blocks that others share.
            and (request.past_upper < longest or not request.num_in_flight)
        ]
        chosen = ready[: max(0, budget - for_prompts) // rows]
        return chosen, budget - rows * len(chosen)

    def _tokens_for_prompts(self, started: list[Request], may_start: bool) -> int:
        """Returns the tokens that generations must leave to the next prompt.

        Without chunking that is all of the prompt; with it, all of an image that is next. 0: any
        number will do, or no prompt can start. There is room for an image and one generation at
        least (`embeds.check_embeds`), so that blocks become free.
        """
        if started:
            first = started[0].num_computed
            least = self._least_tokens(started[0], first)
            held = self._held_after(first + least)
            return least if self.kv_cache.has_room(started[0].request_id, held) else 0
        if not may_start:
            return 0
        request = self.waiting[0]
        if self._may_chunk(request) and not request.images:
            return 0
        hit = self.prefixes.find(request)
        least = self._least_tokens(request, hit.num_tokens)
        most = min(request.num_context_tokens, hit.num_tokens + self.config.max_num_tokens)
        return least if least and self._can_admit(request, hit, most) else 0

    def _least_tokens(self, request: Request, first: int) -> int:
        """Returns how many tokens of its prompt, from `first` on, must be computed in one pass.

        0: any number will do.
        """
        if not self._may_chunk(request):
            return request.num_context_tokens - first
        least = request.least_context_tokens(first)
        return least if least > 1 else 0

    def _may_start(self) -> bool:
        """Whether prompts may start now: enough slots are free, or no generation would be delayed.

        A step with prompts is slower for all its generations. So a few steps with many prompts
        each cost less than many steps with one. With "auto" prompts wait until free slots have
        idled, together, as many steps as a pass over prompts costs all generations.
        """
        free = len(self._free_slots)
        if not free:
            return False
        generating = sum(r.state is RequestState.GENERATION for r in self.running)
        if not generating:
            return True
        if self.config.prefill_batch_size != "auto":
            return free >= self._least_free
        return free >= len(self.waiting) or self.idle_slot_steps >= self.pass_cost * generating

    @property
    def _least_free(self) -> int:
        """How many slots must be free for prompts to start beside generations, if that is fixed."""
        size = self.config.prefill_batch_size
        return size if isinstance(size, int) else 1

    def _may_chunk(self, request: Request) -> bool:
        """Whether its prompt may be chunked: by the config, or because after a preemption it is
        longer than a pass."""
        return self.config.enable_chunked_prefill or bool(request.output_token_ids)

    def _held_after(self, num_tokens: int) -> int:
        """Returns the KV tokens to hold for a context that has computed `num_tokens`."""
        return min(num_tokens + self.rows + self.extra_kv, self.config.max_seq_len)

    def _can_admit(self, request: Request, hit: PrefixHit, num_tokens: int) -> bool:
        """Whether blocks are free for it, and one more for each running request."""
        assert request.prefix is not None
        held, spare = self._held_after(num_tokens), len(self.running)
        return self.kv_cache.fits(request.prefix, hit, held, spare)

    def _chunks_of(self, started: list[Request], budget: int) -> list[ContextChunk]:
        """Returns the next parts of prompts that have begun, up to the first that does not fit."""
        chunks: list[ContextChunk] = []
        for request in started:
            chunk = self._chunk(request, budget)
            if chunk is None:
                break
            chunks.append(chunk)
            budget -= chunk.num_tokens
        return chunks

    def _start_waiting(self, budget: int) -> list[ContextChunk]:
        """Admits waiting requests, oldest first. Those whose prompt another one is about to compute
        wait for it."""
        chunks: list[ContextChunk] = []
        later: list[Request] = []
        computing: set[bytes] = set()  # keys of blocks that running prompts compute
        for request in self.running if self.waiting else []:
            if request.state is RequestState.CONTEXT:
                self.prefixes.add_awaited(request, computing)
        while self.waiting and len(self._free_slots) > len(later) and budget > 0:
            request = self.waiting[0]
            hit = self.prefixes.find(request)
            may_wait = len(self._free_slots) >= self._least_free  # else it would wait for long
            if may_wait and self.prefixes.is_being_computed(request, hit, computing):
                later.append(self.waiting.popleft())
                continue
            chunk = self._start(request, hit, budget)
            if chunk is None:
                break
            self.waiting.popleft()
            self.running.append(request)
            request.state, request.slot = RequestState.CONTEXT, self._free_slots.pop()
            self.prefixes.take_over_state(request)
            chunks.append(chunk)
            self.idle_slot_steps = 0
            self.prefixes.add_awaited(request, computing)
            budget -= chunk.num_tokens
        self.waiting.extendleft(reversed(later))
        self.kv_cache.make_copies()
        return chunks

    def _start(self, request: Request, hit: PrefixHit, budget: int) -> ContextChunk | None:
        """Takes over what the cache holds of a waiting request, and blocks for its first chunk.

        Returns None, with nothing changed, where budget or blocks do not suffice.
        """
        assert request.prefix is not None
        shorter = hit.without_copy(self.kv_cache.page_size)
        for found in dict.fromkeys((hit, shorter, PrefixHit())):
            start = request.cut_before_image(found.num_tokens)
            if start != found.num_tokens:
                continue
            request.stops = self.prefixes.stops(request, start)
            end = self._end_of_chunk(request, start, budget)
            if end is not None and self._can_admit(request, found, end):
                held = self._held_after(end)
                self.kv_cache.adopt(request.request_id, request.prefix, found, held)
                request.num_computed = request.num_reused = start
                if request.cached_tokens is None:
                    request.cached_tokens = start
                return ContextChunk(request, start, end)
        return None

    def _chunk(self, request: Request, budget: int) -> ContextChunk | None:
        """Returns the request's next tokens within budget and free blocks, or None."""
        start = request.num_computed
        end = self._end_of_chunk(request, start, budget)
        if end is None or not self._reserve(request, self._held_after(end)):
            return None
        return ContextChunk(request, start, end)

    def _end_of_chunk(self, request: Request, start: int, budget: int) -> int | None:
        """Returns where a part of its prompt ends, or None if none fits into the budget."""
        total = request.num_context_tokens
        end = request.cut_before_image(min(total, start + budget))
        if end <= start or (end < total and not self._may_chunk(request)):
            return None
        return next((stop for stop in request.stops if start < stop < end), end)

    def _reserve_all(self, generations: list[Request], draft_len: DraftLen) -> list[Request]:
        """Reserves blocks for the next step. Returns the requests for which there are none.

        Where blocks run out, those that generations turned out not to need are taken back. If that
        is not enough the step drafts nothing, where `draft_len` allows it.
        """
        short = self._reserve_each(generations)
        if short:
            self._trim_all()
            short = self._reserve_each(generations)
        if short and self.most_drafts and draft_len.may_rest(self._next_waiting):
            self.most_drafts = 0  # rather than preempt
            self._trim_all()
            short = self._reserve_each(generations)
        return short

    def _reserve_each(self, generations: list[Request]) -> list[Request]:
        """Returns those for whose next step there are no blocks."""
        held, ahead = self.kv_cache.capacity, self._rows_ahead
        growing = [r for r in generations if r.past_upper + ahead > held[r.request_id]]  # few
        return [r for r in growing if not self._reserve(r, self.needed_tokens(r))]

    def _reserve(self, request: Request, num_tokens: int) -> bool:
        return self.kv_cache.reserve(request.request_id, num_tokens)

    def _youngest_beside(self, short: Request) -> list[Request]:
        """Returns the youngest request whose blocks would serve one that lacks some."""
        owner_of = self.kv_cache.owner_of
        owner = owner_of(short.request_id)
        return [r for r in self.running if owner_of(r.request_id) == owner][-1:]

    def _stuck_contexts(self) -> list[Request]:
        """Returns the request to preempt when half-prefilled ones hold blocks that others need: the
        youngest."""
        all_idle = all(r.num_in_flight == 0 for r in self.running)
        return self.running[-1:] if all_idle and len(self.running) > 1 else []

    def _trim_all(self) -> None:
        """Takes back the blocks that generations turned out not to need, but for those that the
        next step would take again."""
        capacity, page = self.kv_cache.capacity, self.kv_cache.page_size
        for request in self.running:
            if request.is_generation:
                held = request.past_upper + self.extra_kv
                if not request.ends_with_what_is_in_flight:
                    held = max(held, self.needed_tokens(request))
                if held + page <= capacity[request.request_id]:  # mostly it has no block too many
                    self.kv_cache.trim(request.request_id, held)

    # -- leaving -------------------------------------------------------------------------------
    def preempt(self, request: Request) -> None:
        """Takes back slot and blocks. The request waits and recomputes prompt and output so far."""
        self._leave(request)
        self.release_blocks(request)
        request.wait_again()
        self.waiting.appendleft(request)

    def start_over(self, requests: list[Request]) -> None:
        """Makes these requests wait again, oldest first, with all slots and blocks free.

        It does not rely on anything that an exception may have left half done.
        """
        self.kv_cache.start_over()
        self._free_slots = list(range(self.config.max_batch_size - 1, -1, -1))
        self.running, self.waiting = [], deque(requests)
        self._last = ScheduledBatch([], [])
        for request in requests:
            request.start_over()

    def finish(self, request: Request) -> None:
        """Takes back the slot, and the blocks unless a step in flight writes to them."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self._leave(request)
        request.state = RequestState.FINISHED
        if request.num_in_flight == 0:
            self.release_blocks(request)

    def release_blocks(self, request: Request) -> None:
        if request.is_poisoned:
            self.kv_cache.scrub(request.request_id)
        elif self.has_windows:  # zeroes blocks that the prompt's last row did not see
            computed = request.num_computed
            self.kv_cache.release_behind(request.request_id, computed, computed)
        self.kv_cache.free(request.request_id)

    def _leave(self, request: Request) -> None:
        self.running.remove(request)
        self._free_slots.append(request.slot)
        request.slot = -1
        self._last = ScheduledBatch([], [])
