"""`Statistics`: tokens, accepted drafts and seconds, counted by the executor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..api.outputs import EngineStats, PrefixCacheStats, acceptance_stats
from ..metadata.mode import SpeculativeDecodingMode
from ..state.kv_cache import KVCacheManager
from .dead_drafter import HOTTEST, DeadDrafterWatch
from .request import ScheduledBatch, StepRecord
from .results import Applied, LaunchedStep, Outcomes


class Statistics:
    """Totals since the engine started or `reset`, and the watch over a dead drafter."""

    def __init__(
        self, mode: SpeculativeDecodingMode, max_draft_len: int, trained: float | None = None
    ):
        """
        Args:
            trained: the share of first drafts that was accepted at the end of a head's training.
        """
        self.max_draft_len = max_draft_len
        self._mode, self._trained = mode, trained
        self.watch_anew()
        self.reset()

    def watch_anew(self) -> None:
        """Forgets what was seen of drafts."""
        self.dead_drafter_watch = DeadDrafterWatch.for_mode(self._mode, self._trained)

    def reset(self, num_evicted: int = 0) -> None:
        """Begins anew.

        Args:
            num_evicted: blocks of the prefix cache that were evicted before.
        """
        self.generated_tokens = self.decoded_tokens = self.num_preemptions = 0
        self.prefill_seconds = self.decode_seconds = 0.0
        self.queried_tokens = self.hit_tokens = 0
        self._evicted_before = num_evicted
        self.accepted_lens: Counter[int] = Counter()  # accepted drafts -> generation steps

    def add_seconds(self, seconds: float, steps: Sequence[LaunchedStep]) -> None:
        """Counts the time that it took to launch or to wait for the parts of one step."""
        if any(step.batch.generations for step in steps):
            self.decode_seconds += seconds
        else:
            self.prefill_seconds += seconds

    def add_prefixes(self, batch: ScheduledBatch) -> None:
        """Counts what the cache held of requests that begin; of preempted ones nothing."""
        for chunk in batch.contexts:
            if chunk.is_first and not chunk.request.is_counted:
                chunk.request.is_counted = True
                self.queried_tokens += chunk.request.num_context_tokens
                self.hit_tokens += chunk.start

    def add_results(self, results: Sequence[Applied], *, is_forced: bool) -> Outcomes:
        """Counts the results of one step. Returns those of its generations.

        Args:
            is_forced: whether acceptance was forced, so that it says nothing of the drafter.
        """
        outcomes = Outcomes([], [], [])
        first_drafts: list[bool] = []  # whether each was accepted
        for result, num_tokens in results:
            self.generated_tokens += num_tokens
            if not result.is_generation:
                continue
            self.decoded_tokens += num_tokens
            request, accepted, num_asked = result.request, result.num_accepted, result.num_asked
            request.num_steps += 1
            request.accepted_lens[accepted] += 1
            # Forced acceptance needs no drafts.
            request.num_draft_tokens += num_asked if num_asked > accepted else accepted
            outcomes.requests.append(request)
            outcomes.num_asked.append(num_asked)
            outcomes.num_accepted.append(accepted)
            if request.steps is not None and result.num_proposed is not None:
                kv_len = request.num_tokens - num_tokens - 1  # before the step
                # Forced acceptance also accepts where there is no draft.
                proposed = max(result.num_proposed, accepted)
                record = StepRecord(kv_len=kv_len, proposed=proposed, accepted=accepted)
                request.steps.append(record)
            params = request.sampling_params
            # A bias, which drafters do not read, may choose the tokens.
            if num_asked and params.temperature <= HOTTEST and not params.logit_bias_items:
                first_drafts.append(accepted > 0)
        self.accepted_lens.update(outcomes.num_accepted)
        if self.dead_drafter_watch is not None and not is_forced:
            self.dead_drafter_watch.see(first_drafts)
        return outcomes

    def summary(self, forced_acceptance: float | None, kv_cache: KVCacheManager) -> EngineStats:
        acceptance = acceptance_stats(self.accepted_lens, self.max_draft_len)
        seconds = self.decode_seconds
        return EngineStats(
            generated_tokens=self.generated_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=seconds,
            tokens_per_second=self.decoded_tokens / seconds if seconds > 0 else 0.0,
            acceptance_length=acceptance.acceptance_length,
            acceptance_per_position=acceptance.acceptance_per_position,
            num_steps=acceptance.num_steps,
            num_preemptions=self.num_preemptions,
            forced_acceptance=forced_acceptance,
            prefix_cache=PrefixCacheStats(
                queried_tokens=self.queried_tokens,
                hit_tokens=self.hit_tokens,
                cached_blocks=kv_cache.num_known_blocks,
                evicted_blocks=kv_cache.num_evicted_blocks - self._evicted_before,
            ),
        )
