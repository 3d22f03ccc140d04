"""Outputs of requests, and statistics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from ..other_names import NamesAttributes


@dataclass(frozen=True)
class SpecStats:
    """Acceptance of one request.

    acceptance_length: mean accepted tokens (bonus included) over generation steps; 1.0 when there
        was none. acceptance_per_position: entry i is the share of generation steps in which
        draft i was accepted, so acceptance_length = 1 + sum(acceptance_per_position).
    num_steps: generation steps, prefill not counted.
    num_draft_tokens: drafts that those steps were asked to verify. (NGRAM and SA may propose
        fewer.)
    acceptance_histogram: entry i is the number of steps in which i drafts were accepted, 0 … K.
    forced_acceptance: draft tokens accepted by force in every step, bonus not counted, or None. If
        it is set, the other fields say nothing about the drafter.
    """

    acceptance_length: float
    acceptance_per_position: list[float]
    num_steps: int
    forced_acceptance: float | None = None
    num_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)

    @property
    def num_accepted_draft_tokens(self) -> int:
        """Drafts that were accepted, in all steps."""
        return sum(i * steps for i, steps in enumerate(self.acceptance_histogram))


@dataclass(frozen=True)
class Logprob:
    """Log probability and rank of one token at one position, under the model's distribution."""

    logprob: float
    rank: int  # 1 is the likeliest


@dataclass(frozen=True)
class CompletionOutput(NamesAttributes):
    """One completion. The `_diff` fields hold what is new since the previous snapshot."""

    token_ids: list[int]
    text: str
    finish_reason: str | None = None  # "stop", "length", "cancelled", "error"; None while running
    index: int = 0
    token_ids_diff: list[int] = field(default_factory=list)
    text_diff: str = ""
    logprobs: list[dict[int, Logprob]] | None = None
    """Per output token: itself first, then the likeliest asked for. None if none were."""

    OTHER_ATTRIBUTES: ClassVar[Mapping[str, str]] = {
        "cumulative_logprob": "the sum of logprobs",
        "length": "len(token_ids)",
        "stop_reason": "finish_reason",
    }


@dataclass(frozen=True)
class RequestOutput(NamesAttributes):
    """A request's result, or a snapshot of it while it runs."""

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    spec_stats: SpecStats
    finished: bool
    error: str | None = None  # why, when finish_reason is "error"
    cached_tokens: int = 0
    """Tokens of the prompt that were not computed but found in the prefix cache; of n completions
    those of the first."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token: itself first, then the likeliest asked for. None for the first token, which
    nothing is before, and for embeddings. None if none were asked for, and before all are known."""

    OTHER_ATTRIBUTES: ClassVar[Mapping[str, str]] = {
        "avg_decoded_tokens_per_iter": "spec_stats.acceptance_length",
        "finish_reason": "outputs[0].finish_reason",
        "logprobs": "outputs[0].logprobs",
        "meta_info": "outputs and spec_stats",
        "metrics": "spec_stats",
        "num_cached_tokens": "cached_tokens",
        "text": "outputs[0].text",
        "token_ids": "outputs[0].token_ids",
    }


@dataclass(frozen=True)
class PrefixCacheStats:
    """What the prefix cache did for requests since the engine started or `reset_stats`.

    queried_tokens: tokens of prompts that began. hit_tokens: how many of them were found.
    cached_blocks: blocks that a prompt can find now, in use or free. evicted_blocks: those that
        were handed out for something else. Of several KV groups the one with most counts.
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    cached_blocks: int = 0
    evicted_blocks: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of the queried tokens that were found, 0 … 1."""
        return self.hit_tokens / self.queried_tokens if self.queried_tokens else 0.0


@dataclass(frozen=True)
class EngineStats:
    """Totals since the engine started or `reset_stats`.

    prefill_seconds: wall time of launching and waiting for steps that had contexts only.
    decode_seconds: that of all other steps.
    tokens_per_second: tokens from generation rows (all but each request's first) per
        decode second.
    forced_acceptance: draft tokens accepted by force in every step (bonus not counted), or None.
    prefix_cache: what prompts found of earlier ones.
    num_looked_up_drafts: drafts that suffix lookup proposed in place of a network's (`sa_config`).
    """

    generated_tokens: int
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float
    acceptance_length: float
    acceptance_per_position: list[float]
    num_steps: int
    num_preemptions: int
    forced_acceptance: float | None
    prefix_cache: PrefixCacheStats = PrefixCacheStats()
    num_looked_up_drafts: int = 0

    @property
    def tokens_per_second_with_prompts(self) -> float:
        """All generated tokens, each request's first too, over the time of all steps."""
        seconds = self.prefill_seconds + self.decode_seconds
        return self.generated_tokens / seconds if seconds > 0 else 0.0


def acceptance_stats(
    accepted_lens: dict[int, int],
    max_draft_len: int,
    forced: float | None = None,
    num_draft_tokens: int = 0,
) -> SpecStats:
    """Computes acceptance from a histogram {accepted drafts: generation steps}."""
    steps = sum(accepted_lens.values())
    histogram = [accepted_lens.get(i, 0) for i in range(max_draft_len + 1)]
    if steps == 0:
        return SpecStats(1.0, [0.0] * max_draft_len, 0, forced, acceptance_histogram=histogram)
    per_position = [
        sum(count for accepted, count in accepted_lens.items() if accepted > i) / steps
        for i in range(max_draft_len)
    ]
    return SpecStats(
        acceptance_length=1.0 + sum(per_position),
        acceptance_per_position=per_position,
        num_steps=steps,
        forced_acceptance=forced,
        num_draft_tokens=num_draft_tokens,
        acceptance_histogram=histogram,
    )
