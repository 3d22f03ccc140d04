"""Prompts and the prefix cache: what a request takes over from it, and what it leaves to others."""

from __future__ import annotations

from functools import partial

from ..state.kv_cache import KVCacheManager
from ..state.prefix_search import PrefixHit, PrefixQuery
from .embeds import content_of, reusable_tokens
from .request import ContextChunk, Request

LEAST_APART = 256
"""The least distance, in tokens, of two ends of blocks at which states of layers with linear
attention are kept. Each takes a pass of its own."""


class Prefixes:
    """The scheduler's side of the prefix cache.

    Args:
        rewritten: KV rows that drafting computes again, before a step's first one.
    """

    def __init__(self, kv_cache: KVCacheManager, rewritten: int):
        self.kv_cache, self.rewritten = kv_cache, rewritten

    def find(self, request: Request) -> PrefixHit:
        """Looks up what the cache holds of a waiting request.

        At least its last token is computed, for its logits and hidden states, and as many more as
        the first draft computes again.
        """
        cache, chain = self.kv_cache, request.prefix
        if chain is None or not cache.is_current(chain):
            limit = reusable_tokens(request, self.rewritten)
            chain = cache.chain(request.cache_salt, content_of(request), limit)
            request.prefix = chain
        if not cache.reuse.is_on:
            return PrefixHit()
        chain.extend(request.tokens_between, request.num_tokens)
        if request.lacks_prompt_logprobs:
            return PrefixHit()
        limit, cut = self._limit(request), request.cut_before_image
        if cache.state_copies is not None:
            cut = partial(self._last_state, request)
        return cache.find(PrefixQuery(chain, request.tokens_between, limit, cut))

    def _last_state(self, request: Request, end: int) -> int:
        """Returns the last position up to `end` at which a state is kept, and no image is cut."""
        copies, chain = self.kv_cache.state_copies, request.prefix
        assert copies is not None and chain is not None
        page = self.kv_cache.page_size
        while end > 0:
            stop = copies.last(chain.keys, min(end // page, len(chain.keys))) * page
            end = request.cut_before_image(stop)
            if end == stop:
                return end
        return 0

    def is_being_computed(self, request: Request, hit: PrefixHit, computing: set[bytes]) -> bool:
        """Whether running prompts are about to compute half or more of what the request lacks."""
        assert request.prefix is not None
        if request.lacks_prompt_logprobs or not computing:  # of the first, it takes nothing over
            return False
        page, keys, end = self.kv_cache.page_size, request.prefix.keys, hit.num_blocks
        if self.kv_cache.state_copies is None:
            while end < len(keys) and keys[end] in computing:
                end += 1
        else:
            last = min(len(keys), self._limit(request) // page)
            end = next((n for n in range(last, end, -1) if keys[n - 1] in computing), end)
        gained = end * page - hit.num_tokens
        return gained > 0 and 2 * gained >= request.num_context_tokens - hit.num_tokens

    def add_awaited(self, request: Request, computing: set[bytes]) -> None:
        """Adds the keys of the blocks that a prompt which runs will publish. With linear attention
        they are those at whose ends it will leave a state, as many as can be kept."""
        chain, copies = request.prefix, self.kv_cache.state_copies
        if chain is None or not self.kv_cache.is_current(chain):
            return
        page = chain.page_size
        if copies is None:
            end = len(chain.keys)
            if chain.max_published is not None:
                end = chain.max_published // page
            computing.update(chain.keys[chain.num_published : end])
            return
        blocks = [stop // page for stop in request.stops if stop // page > chain.num_published]
        if len(computing) + len(blocks) <= copies.num_rows:
            computing.update(chain.keys[n - 1] for n in blocks)

    def _limit(self, request: Request) -> int:
        """Returns how many tokens of its prompt a request may take over at most."""
        return request.num_context_tokens - max(1, self.rewritten)

    def publish(self, request: Request) -> None:
        """Lets other requests find the blocks that no later step of this one writes to."""
        chain = request.prefix
        if chain is None or request.num_tokens < chain.next_at:
            return
        if not self.kv_cache.reuse.is_on:
            return
        computed = request.num_computed
        if request.is_generation:
            computed = max(computed, request.num_tokens - 1)
        settled = request.num_tokens - chain.ahead  # rows whose tokens are known
        final = min(computed + 1 - max(chain.ahead, 1), settled)
        if request.num_missed:  # the head has no keys of these rows yet
            final = min(final, request.first_missed)
        if final // chain.page_size > chain.num_published:
            chain.extend(request.tokens_between, request.num_tokens)
            self.kv_cache.publish(request.request_id, chain, final)

    # -- linear attention ----------------------------------------------------------------------
    def stops(self, request: Request, start: int) -> tuple[int, ...]:
        """Returns where passes over a prompt are to end, so that its state there can be kept: where
        it parts from what was computed before it, which others may do too, and at its last block.

        Args:
            start: tokens that it takes over.
        """
        cache, chain, found = self.kv_cache, request.prefix, []
        if cache.state_copies is None or not cache.reuse.is_on or chain is None:
            return ()
        last = min(self._limit(request) // cache.page_size, len(chain.keys))
        if chain.max_published is not None:
            last = min(last, chain.max_published // cache.page_size)
        for blocks in (min(cache.num_found(chain), last), last):
            stop = blocks * cache.page_size
            if stop - start >= LEAST_APART and request.cut_before_image(stop) == stop:
                start = stop
                if chain.keys[blocks - 1] not in cache.state_copies:
                    found.append(stop)
        return tuple(found)

    def take_over_state(self, request: Request) -> None:
        """Gives an admitted request's slot the state at the end of what it takes over."""
        if self.kv_cache.state_copies is not None and request.num_reused:
            assert request.prefix is not None
            key = request.prefix.keys[request.num_reused // self.kv_cache.page_size - 1]
            self.kv_cache.take_over_state(key, request.slot)

    def keep_state(self, chunk: ContextChunk) -> None:
        """Keeps the state behind a part of a prompt that was launched, where it is to be kept."""
        request, cache = chunk.request, self.kv_cache
        if chunk.end in request.stops:
            chain = request.prefix
            if chain is not None and cache.is_current(chain):
                blocks = chunk.end // cache.page_size
                cache.keep_state(request.request_id, chain.keys[:blocks], request.slot)
