"""Prompts and the prefix cache: what a request takes over from it, and what it leaves to others."""

from __future__ import annotations

from ..state.kv_cache import KVCacheManager
from ..state.prefix_search import PrefixHit, PrefixQuery
from .embeds import content_of, reusable_tokens
from .request import Request


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
        limit = request.num_context_tokens - max(1, self.rewritten)
        return cache.find(
            PrefixQuery(chain, request.tokens_between, limit, request.cut_before_image)
        )

    def is_being_computed(self, request: Request, hit: PrefixHit, computing: set[bytes]) -> bool:
        """Whether running prompts are about to compute half or more of what the request lacks."""
        assert request.prefix is not None
        if request.lacks_prompt_logprobs:  # it takes nothing over
            return False
        keys, end = request.prefix.keys, hit.num_blocks
        while end < len(keys) and keys[end] in computing:
            end += 1
        gained = end * self.kv_cache.page_size - hit.num_tokens
        return gained > 0 and 2 * gained >= request.num_context_tokens - hit.num_tokens

    def keys_to_publish(self, request: Request) -> list[bytes]:
        """Returns the keys of the request's blocks that it will publish."""
        chain = request.prefix
        if chain is None or not self.kv_cache.is_current(chain):
            return []
        end = len(chain.keys)
        if chain.max_published is not None:
            end = chain.max_published // chain.page_size
        return chain.keys[chain.num_published : end]

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
