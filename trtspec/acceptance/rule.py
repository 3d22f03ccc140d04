"""`Rule`: how the drafts of a step are drawn, judged, and which kernel does both in one call.

A rule's `judge` is torch: the CPU path, and the oracle of the kernel. What it leaves open (masking
past the accepted length, the shape of what comes out) is done once, in `apply`.

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
    """How drafts of sampled requests come from logits; a greedy one's are the best tokens."""

    BEST = "the drafter's best token"
    COUPLED = "with the noise that the target's sample at that position will be drawn with"
    REMEMBERED = "with noise of their own, from a distribution that is kept until they are judged"


@dataclass(frozen=True)
class Candidates:
    """What a rule judges: the target's logits and the drafts of one step."""

    logits: Tensor  # [C + G*(K'+1), V], masked and shaped
    drafts: Tensor  # [G, K'] int32, -1 is "no draft here"
    max_draft_len: int  # K
    memory: DraftMemory | None  # what the drafts were drawn from, where somebody remembered it
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

    tokens: Tensor  # [B, K'+1] int32, what comes out at each position if it is reached
    lens: Tensor  # [B] int32, 1 … K'+1: the accepted path (`metadata/accepted_path.py`)
    bad_rows: Tensor  # [C + G*(K'+1)] bool, the row held NaN


class Rule(ABC):
    """One row of `rules.RULES`, or a wrapper around one (`Relaxed`, `Forced`).

    To write one, write `judge` and `accept`; it has no kernel then. Rules keep nothing between
    steps but what `allocate_state` makes.
    """

    drawn: Drawn = Drawn.BEST
    state_names: ClassVar[tuple[str, ...]] = ()
    """What `allocate_state` makes."""

    @property
    def keeps_seeded_text(self) -> bool:
        """Whether a seeded text is the same as without speculation."""
        return self.drawn is not Drawn.REMEMBERED

    @abstractmethod
    def judge(self, given: Candidates) -> Judged:
        """Chooses the target's tokens and accepts drafts, in torch."""

    @abstractmethod
    def accept(self, given: Candidates, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Accepts by the target's tokens [C + G*(K'+1)] int32, whoever chose them.

        Returns:
            (tokens [B, K'+1] int32, lens [B] int32), as in `Judged`.
        """

    def by_kernel(self, given: Candidates, forced_len: int = 0) -> Accepted | None:
        """All of `apply` in one call of kernels; None where they do not serve.

        Args:
            forced_len: accept this many tokens in every generation, at most K'+1; 0 is off.
        """
        return None

    def apply(self, given: Candidates) -> Accepted:
        """Accepts the drafts of a step, by kernels where they serve."""
        served = self.by_kernel(given)
        return self.finish(given, self.judge(given)) if served is None else served

    def finish(self, given: Candidates, judged: Judged) -> Accepted:
        """Masks what lies past each length and updates the rule's state."""
        tokens = mask_after(judged.tokens, judged.lens).to(torch.int32)
        self.update(given, tokens, judged.lens)
        unused = given.max_draft_len - given.num_drafts
        return Accepted(
            tokens=nn.functional.pad(tokens, (0, unused), value=-1),
            lens=judged.lens,
            num_accepted_drafts=judged.lens - 1,
            bad_requests=per_request(judged.bad_rows, given.num_contexts, given.num_drafts),
        )

    # -- state by slot -------------------------------------------------------------------------
    def allocate_state(self, num_slots: int, device: torch.device) -> dict[str, Tensor]:
        """Tensors with a leading slot dimension, the last slot scratch. None by default."""
        return {}

    def admit(  # noqa: B027 - most rules keep nothing
        self, state: dict[str, Tensor], slot: int, prompt: Sequence[int], output: Sequence[int]
    ) -> None:
        """Writes the state of a request that enters `slot`, with its output if it was preempted."""

    def update(self, given: Candidates, tokens: Tensor, lens: Tensor) -> None:  # noqa: B027
        """Lets the state follow the accepted tokens [B, K'+1] int32 of lens [B]."""


def greedy_kernel(
    given: Candidates, forced_len: int, relaxed: RelaxedRule | None = None
) -> Accepted | None:
    """The CUDA kernel for batches in which every request is greedy."""
    return accept_greedy(
        given.logits, given.drafts, given.num_contexts, given.max_draft_len, forced_len, relaxed
    )


def sampled_kernel(
    given: Candidates, forced_len: int, *, is_remembered: bool = False, is_block: bool = False
) -> Accepted | None:
    """The Triton kernels for batches with sampled requests.

    Args:
        is_remembered: judge by what the drafts were drawn from, where it was kept; otherwise a
            draft is accepted while it is the target's sample.
        is_block: judge the drafts of a request together.
    """
    kernels, sampling = sampling_kernels(given.logits), given.sampling
    if kernels is None or given.num_drafts >= MAX_ROWS_PER_REQUEST:
        return None
    if sampling.temperatures.shape[0] != given.logits.shape[0]:
        return None
    memory = given.memory if is_remembered else None
    return kernels.accept_sampled(
        given.logits,
        given.drafts,
        given.num_contexts,
        given.max_draft_len,
        sampling,
        forced_len=forced_len,
        memory=memory,
        slots=None if memory is None else given.step.slot_ids,
        is_block=is_block,
    )


def per_request(rows: Tensor, num_contexts: int, num_drafts: int) -> Tensor:
    """[C + G*(K+1)] bool -> [B] bool: any row of the request.

    Rows of rejected drafts count too: their NaN stands in the KV cache, where a masked read
    multiplies it by zero, which is NaN again.
    """
    generations = rows[num_contexts:].view(-1, num_drafts + 1).any(-1)
    return torch.cat([rows[:num_contexts], generations])
