"""What a worker needs from models and executor: protocols, and two records."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from torch import Tensor

from ..distributed.logits import ShardedLogits
from ..metadata.accepted_path import AcceptedPath
from ..metadata.attention import AttentionMetadata
from ..metadata.embeds import RowEmbeds
from ..metadata.guided import GuidedDecoder
from ..metadata.spec import SpecMetadata
from ..metadata.step import StepContext
from ..ops.tokens.markov_walk import MarkovTables
from ..ops.tokens.walk import Codebooks, PathCandidates
from ..utils import renamed

__all__ = [
    "BlockDraftModel",
    "DraftInputs",
    "DraftModel",
    "EndedText",
    "GuidedDecoder",
    "LanguageModel",
    "MarkovBias",
    "MaskedDraftModel",
    "PathSelector",
]


class DraftModel(Protocol):
    """A network that drafts from the target's hidden states (an EAGLE head, MTP layers).

    A call is one draft pass. Arguments: input_ids [T] (the token *after* each row), position_ids
    [T], hidden_states [T, H], metadata, step, and at step 0 embeddings in place of some tokens'.
    Returns (what `compute_logits` reads, the feedback), both [T, H], or one tensor that is both.

    A model may also have `best_tokens` and `keeps_rows` (`models/drafters/`): tokens without
    logits, and a pass that computes some rows alone.
    """

    d2t: Tensor | None  # [Vd] offsets from draft to target ids
    advances_positions: bool  # False: query-only drafters at a constant position

    @property
    def layers_to_capture(self) -> tuple[int, ...]: ...

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor: ...

    def __call__(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata,
        step: int,
        inputs_embeds: RowEmbeds | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    def compute_logits(self, hidden: Tensor, step: int) -> Tensor | ShardedLogits: ...

    def kv_group_of_layer(self, layer: int) -> int: ...


def both_outputs(returned: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns a draft model's output as two tensors; a single one is used twice."""
    return (returned, returned) if isinstance(returned, Tensor) else returned


class KvWriter(DraftModel, Protocol):
    """A head whose keys and values can be written alone, late, and in any order.

    That is so while `writes_kv_alone`.
    """

    writes_kv_alone: bool

    def write_kv(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        """Writes keys and values of pass 0's rows; arguments as of the call, but for hidden_states
        [T, n * Ht] as captured."""


class OneLayerDraftModel(KvWriter, Protocol):
    """A head of one layer."""

    def write_kv_of_projected(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        hidden_states: Tensor,
        attn_metadata: AttentionMetadata,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        """Writes keys and values of pass 0's rows and computes nothing else; arguments as of the
        call."""


class MaskedDraftModel(DraftModel, Protocol):
    """A head that proposes several tokens in one pass by reading mask tokens (P-EAGLE)."""

    mask_hidden: Tensor | None  # [H], read in place of a target's state that is not known yet


class MarkovBias(Protocol):
    """A bias of a draft's logits by the token before it."""

    def tables(self, d2t: Tensor | None) -> MarkovTables | None: ...

    def embeddings(self, before: Tensor) -> Tensor: ...

    def first_state(self, hidden: Tensor) -> Tensor: ...

    def __call__(
        self, before: Tensor, hidden: Tensor, state: Tensor
    ) -> tuple[Tensor | ShardedLogits, Tensor]: ...


class Confidence(Protocol):
    """Says how likely drafts are to be accepted, by what is known before they are drawn."""

    def __call__(self, hidden: Tensor, embeddings: Tensor) -> Tensor: ...


class PathSelector(Protocol):
    """A choice among each draft's best tokens by the token before it."""

    @property
    def books(self) -> Codebooks: ...

    def candidates(
        self, logits: Tensor | ShardedLogits, hidden: Tensor, batch: int
    ) -> PathCandidates: ...


class BlockDraftModel(DraftModel, Protocol):
    """A head that drafts a block in one pass, over keys and values of the target's states (DFlash).

    Its call reads no hidden states.
    """

    samples_from_anchor: bool  # the last token's row proposes too
    reads_next_tokens: bool  # a context row reads the token after it
    markov_head: MarkovBias | None  # DSpark's
    confidence_head: Confidence | None  # DSpark's, of some
    candidate_selector: PathSelector | None  # DFlash2's; without both all rows propose at once

    def read_context(
        self,
        hidden_states: Tensor,
        position_ids: Tensor,
        meta: AttentionMetadata,
        next_tokens: Tensor | None = None,
        inputs_embeds: RowEmbeds | None = None,
    ) -> None:
        """Writes keys and values of the target's rows: hidden_states [T, n * Ht] as captured.
        next_tokens [T] are int32 or int64."""


class LanguageModel(Protocol):
    """A model that drafts by itself (mode DRAFT_TARGET): tokens in, hidden states [T, D] out."""

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, meta: AttentionMetadata
    ) -> Tensor: ...

    def compute_logits(self, hidden: Tensor) -> Tensor | ShardedLogits: ...


class EndedText(NamedTuple):
    """The tokens of a request that ended."""

    token_ids: list[int]  # prompt and output
    num_prompt_tokens: int
    salt: str | None  # only requests of the same salt may see it


@dataclass(frozen=True)
class DraftInputs:
    """What `draft` reads: the pass just verified, and its accepted tokens."""

    input_ids: Tensor  # [T] int, contexts' rows then K'+1 per generation
    position_ids: Tensor  # [T] int64
    hidden_states: Tensor | None  # [T, D] of the target
    accepted_tokens: Tensor  # [B, K+1] int32, -1 past the length
    num_accepted_tokens: Tensor  # [B] int32, 1 … K'+1
    attn_metadata: AttentionMetadata | None
    spec_metadata: SpecMetadata
    draft_model: DraftModel | LanguageModel | None
    step: StepContext = field(repr=False)  # `spec_metadata` with every field there

    @property
    def num_contexts(self) -> int:
        """C."""
        return self.step.sizes.num_contexts

    @property
    def path(self) -> AcceptedPath:
        """Returns the accepted rows."""
        return AcceptedPath(self.accepted_tokens, self.num_accepted_tokens)


__getattr__ = renamed(__name__, {"ParallelDraftModel": "MaskedDraftModel"})
