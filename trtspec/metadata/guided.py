"""`GuidedStep`: the masks of a step with grammars, and the points at which the host does its part.

    target ─► logits ─► [VerifyPoint] ─► mask, accept ─► [ChosenPoint] ─► first pass of the drafter
                     ─► [DraftPoint 0] ─► mask, draft ─► [ChosenPoint] ─► next pass
                     ─► [DraftPoint 1] ─► mask, draft …

The host knows what a grammar allows, the device what was accepted. So a step with grammars has
points where the host does its part. Eagerly it does so when the step comes there. A captured step
is several graphs, one after another, and the host does its part between them. At a `ChosenPoint` it
goes on at once. So the drafter's next pass runs while the host reads what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from ..distributed.comm import ALONE, Communicator


class GuidedDecoder(Protocol):
    """A caller's object that masks the target's logits in place before a token is chosen."""

    def execute(self, logits: Tensor) -> None: ...


@dataclass(frozen=True)
class VerifyPoint:
    """The host writes the masks of the step's logits. It need not wait for them."""


@dataclass(frozen=True)
class ChosenPoint:
    """The device has left tokens for the host, which notes the point and goes on."""


@dataclass(frozen=True)
class DraftPoint:
    """The host reads what was chosen last, and writes the masks of each request's next draft."""

    depth: int  # 0 for the first draft


Point = VerifyPoint | ChosenPoint | DraftPoint


@dataclass(frozen=True)
class HandedOver:
    """Memory of the host that the device reads and writes too, by rows of requests."""

    tokens: Tensor  # [>= B, K+1] int32, what was accepted
    lens: Tensor  # [>= B] int32
    drafts: Tensor  # [>= B] int32, the last ones
    masks: Tensor  # [>= B, W] int32, of the next drafts; on the CPU it is `GuidedStep.draft_masks`


@dataclass
class GuidedStep:
    """What a step reads of its requests' grammars.

    A mask is a row [W] int32, W = ceil(V / 32): bit t % 32 of word t // 32 allows token t.
    """

    verify_masks: Tensor  # [>= C + G*(K'+1), W], as rows of logits
    draft_masks: Tensor  # [>= B, W], of the draft that is drawn next
    handed_over: HandedOver
    num_masked_drafts: int  # the first ones of each step; the others are free
    host_part: Callable[[Point], None]
    """Called where the host does its part."""
    comm: Communicator = ALONE  # the first rank's masks count
    accepted: tuple[Tensor, Tensor] | None = field(default=None, init=False)
    """Tokens [B, K+1] and lengths [B] that this step accepted, until the host has them."""
