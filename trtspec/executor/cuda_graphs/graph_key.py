"""`GraphKey`: which steps one captured graph serves."""

from __future__ import annotations

from typing import NamedTuple

from ..draft_lens.step_costs import StepShape
from ..request import StepPlan
from .context_inputs import ContextInputs


class GraphKey(NamedTuple):
    """What a graph is captured for."""

    batch_size: int  # of a context pass: its shape's contexts
    num_drafts: int  # K', verified
    draft_len: int  # proposed
    all_greedy: bool = True
    has_filters: bool = False
    context_tokens: int = 0  # of a context pass
    num_beside: int = 0  # of a context pass: generations in it
    num_logprobs: int | None = None
    shapes_logits: bool = False
    is_guided: bool = False
    mean_verified: int | None = None  # drafts of each request; None: by `EngineShape`
    reads_missed: bool = False  # no step: the pass over rows that the head has missed

    @classmethod
    def of(cls, plan: StepPlan, batch_size: int, context_tokens: int = 0) -> GraphKey:
        """Returns the key of a step of generations, or of a pass over prompts."""
        return cls(
            batch_size=batch_size,
            num_drafts=plan.num_drafts,
            draft_len=plan.draft_len,
            all_greedy=plan.batch.all_greedy,
            has_filters=plan.batch.has_filters,
            context_tokens=context_tokens,
            num_logprobs=plan.batch.num_logprobs,
            shapes_logits=plan.batch.shapes_logits,
            is_guided=plan.batch.is_guided,
            mean_verified=plan.mean_verified,
        )

    @classmethod
    def of_contexts(cls, plan: StepPlan, inputs: ContextInputs) -> GraphKey:
        return cls.of(plan, inputs.num_contexts, inputs.num_tokens)

    @classmethod
    def of_shape(cls, shape: StepShape) -> GraphKey:
        """Returns the key of a step that neither verifies nor proposes drafts."""
        return cls(shape.size, 0, 0, shape.all_greedy)

    def with_length(self, length: int, most: int | None) -> GraphKey:
        """Returns the key of the same step with a length that is chosen while serving.

        Args:
            length: drafts that are verified and proposed. With `most`: that are verified, of each
                request on average.
            most: drafts that are proposed; None: as many as are verified.
        """
        if most is None or length in (0, most):
            return self._replace(num_drafts=length, draft_len=length, mean_verified=None)
        return self._replace(num_drafts=most, draft_len=most, mean_verified=length)

    @property
    def length(self) -> int:
        """What `with_length` was given."""
        return self.draft_len if self.mean_verified is None else self.mean_verified

    @classmethod
    def of_missed(cls, batch_size: int) -> GraphKey:
        return cls(batch_size, 0, 0, reads_missed=True)

    @classmethod
    def at_start(cls, num_drafts: int, batch_size: int, context_tokens: int = 0) -> list[GraphKey]:
        """Returns the keys to capture at start: greedy and sampled, without filters."""
        greedy = cls(batch_size, num_drafts, num_drafts, context_tokens=context_tokens)
        return [greedy, greedy._replace(all_greedy=False)]
