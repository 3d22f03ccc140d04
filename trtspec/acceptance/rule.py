"""`Rule`: how drafts are drawn and judged, and which kernel judges them in one call.

A rule's `judge` is torch: the CPU path, and the oracle of the kernel. `finish` does what all rules
share: it masks tokens past the accepted length, and pads them to K+1.

Sizes: B requests of which C contexts and G generations, K' <= K drafts verified, V target tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..metadata.draft_memory import DraftMemory
from ..metadata.sampling import SamplingMetadata
from ..metadata.step import StepContext
from ..ops.launch.dispatch import sampling_kernels
from ..ops.tokens.accept import mask_after
from ..ops.tokens.greedy import MAX_ROWS_PER_REQUEST, Accepted, RelaxedRule, accept_greedy


class Drawn(Enum):
    """How drafts of sampled requests come from logits. Greedy requests take the best tokens."""

    BEST = "the drafter's best token"
    COUPLED = "with the noise that the target's sample at that position will be drawn with"
    REMEMBERED = "with noise of their own, from a distribution that is kept until they are judged"


@dataclass(frozen=True)
class Candidates:
    """What a rule judges: the target's logits and the drafts of one step."""

    logits: Tensor  # [C + G*(K'+1), V], masked and shaped
    drafts: Tensor  # [G, K'] int32, -1 is "no draft here"
    max_draft_len: int  # K
    memory: DraftMemory | None  # what the drafts were drawn from; None if it was not kept
    step: StepContext

    @property
    def num_contexts(self) -> int:
        """C."""
        return self.step.sizes.num_contexts

    @property
    def num_drafts(self) -> int:
        """K'."""
        return self.drafts.shape[1]

    @property
    def sampling(self) -> SamplingMetadata:
        """One row per row of logits; perhaps none where all requests are greedy."""
        return self.step.sampling


@dataclass(frozen=True)
class Judged:
    """A rule's verdict."""

    tokens: Tensor  # [B, K'+1] int32, the output at each position, valid up to `lens`
    lens: Tensor  # [B] int32, 1 … K'+1: the accepted path (`metadata/accepted_path.py`)
    bad_rows: Tensor  # [C + G*(K'+1)] bool, the row held NaN


class Rule(ABC):
    """One row of `rules.RULES`, or a wrapper around one (`Relaxed`, `Forced`).

    A rule must write `judge` and `accept`; without `by_kernel` it runs in torch. Between steps it
    keeps nothing but what `allocate_state` returns.
    """

    drawn: Drawn = Drawn.BEST
    state_names: ClassVar[tuple[str, ...]] = ()
    """What `allocate_state` makes."""
    needs_best_tokens_alone: ClassVar[bool] = False
    """Whether `accept` decides over greedy requests by the target's tokens, without logits."""

    @property
    def keeps_seeded_output(self) -> bool:
        """Whether a seeded request's output is the same as without speculation."""
        return self.drawn is not Drawn.REMEMBERED

    @abstractmethod
    def judge(self, candidates: Candidates) -> Judged:
        """Chooses the target's tokens and accepts drafts, in torch."""

    @abstractmethod
    def accept(self, candidates: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Accepts drafts by the target's tokens [C + G*(K'+1)] int32.

        Returns:
            (tokens [B, K'+1] int32, lens [B] int32), as in `Judged`.
        """

    def by_kernel(self, candidates: Candidates, forced_len: int = 0) -> Accepted | None:
        """Does all of `apply` in one call of kernels. Returns None where no kernel serves.

        Args:
            forced_len: accept this many tokens in every generation, at most K'+1; 0 is off.
        """
        return None

    def apply(self, candidates: Candidates) -> Accepted:
        """Accepts the drafts of a step, by a kernel where one serves."""
        accepted = self.by_kernel(candidates)
        return self.finish(candidates, self.judge(candidates)) if accepted is None else accepted

    def finish(self, candidates: Candidates, judged: Judged) -> Accepted:
        """Masks tokens past each length and updates the rule's state."""
        tokens = mask_after(judged.tokens, judged.lens).to(torch.int32)
        self.update(candidates, tokens, judged.lens)
        num_contexts, num_drafts = candidates.num_contexts, candidates.num_drafts
        unused = candidates.max_draft_len - num_drafts
        return Accepted(
            tokens=nn.functional.pad(tokens, (0, unused), value=-1),
            lens=judged.lens,
            num_accepted_drafts=judged.lens - 1,
            bad_requests=per_request(judged.bad_rows, num_contexts, num_drafts),
        )

    # -- state by slot -------------------------------------------------------------------------
    def allocate_state(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        """Returns tensors with a leading slot dimension, the last slot scratch; {} by default."""
        return {}

    def admit(  # noqa: B027 - most rules keep nothing
        self, state: dict[str, Tensor], slot: int, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Writes the state of a request that enters `slot`. A preempted one has output already."""

    def update(self, candidates: Candidates, tokens: Tensor, lens: Tensor) -> None:  # noqa: B027
        """Updates the state by the accepted tokens [B, K'+1] int32 of lens [B]."""


def greedy_kernel(
    candidates: Candidates, forced_len: int, relaxed: RelaxedRule | None = None
) -> Accepted | None:
    """Accepts by the CUDA kernel for batches in which every request is greedy."""
    return accept_greedy(
        candidates.logits,
        candidates.drafts,
        candidates.num_contexts,
        candidates.max_draft_len,
        forced_len,
        relaxed,
    )


def sampled_kernel(
    candidates: Candidates, forced_len: int, *, is_remembered: bool = False, is_block: bool = False
) -> Accepted | None:
    """Accepts by the Triton kernels for batches with sampled requests.

    Args:
        is_remembered: judge by what the drafts were drawn from, if it was kept. Otherwise a draft
            is accepted while it is the target's sample.
        is_block: judge the drafts of a request together.
    """
    kernels, sampling = sampling_kernels(candidates.logits), candidates.sampling
    if kernels is None or candidates.num_drafts >= MAX_ROWS_PER_REQUEST:
        return None
    if sampling.temperatures.shape[0] != candidates.logits.shape[0]:
        return None
    return kernels.accept_sampled(
        candidates.logits,
        candidates.drafts,
        candidates.num_contexts,
        candidates.max_draft_len,
        sampling,
        slots=candidates.step.slot_ids,
        memory=candidates.memory if is_remembered else None,
        forced_len=forced_len,
        is_block=is_block,
    )


def per_request(rows: Tensor, num_contexts: int, num_drafts: int) -> Tensor:
    """Returns whether any row of each request is set: [C + G*(K+1)] bool -> [B] bool.

    Rows of rejected drafts count too. Their NaN is in the KV cache, where a masked read multiplies
    it by zero, which is NaN again.
    """
    generations = rows[num_contexts:].view(-1, num_drafts + 1).any(-1)
    return torch.cat([rows[:num_contexts], generations])
