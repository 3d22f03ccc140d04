"""Suffix lookup: drafts from the request's own text, and from texts of requests that have ended.

`SuffixLookup` finds them. `LookupBesideNetwork` puts them in place of a network's drafts where a
match is good enough: then a request's drafts of that step are all looked up, and none drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..config import SAEnhancerConfig, SuffixSearchConfig
from ..config.suffix import LONGEST
from ..metadata.draft_memory import DraftMemory
from ..ops.tokens.lookup import Earlier, Lookup, look_up
from ..ops.tokens.ring import (
    BUCKETS_PER_TOKEN,
    OWNER_WORDS,
    PAGE,
    SIZES,
    Ring,
    add_texts,
    ring_pages,
)
from ..ops.tokens.suffix import Continuation
from ..utils import to_device, untouched_zeros
from . import texts
from .protocols import DraftInputs, EndedText

COUNT_IN_TEXT = 16
"""Matches in a request's own text that are compared."""
COUNT_IN_RING = 8
"""Matches of each n-gram size in the ring that are compared."""


class SuffixLookup:
    """Drafts from texts.

    State: every slot's tokens; by slot whose text it is; and a ring of earlier texts. The ring is
    one for all slots (`ops/tokens/ring.py`), and changes outside of steps.
    """

    state_names: tuple[str, ...] = texts.STATE_NAMES

    def __init__(self, config: SuffixSearchConfig, max_draft_len: int):
        self.config, self.max_draft_len = config, max_draft_len
        self._ring_end = 0  # where the next text goes
        self.texts = texts.SlotTexts(has_owners=config.enable_global_pool)

    @property
    def remembers_texts(self) -> bool:
        return self.config.enable_global_pool

    def allocate_state(
        self, num_slots: int, max_seq_len: int, device: torch.device
    ) -> dict[str, Tensor]:
        """Returns the state."""
        state = texts.allocate_texts(num_slots, max_seq_len, self.max_draft_len, device)
        if self.remembers_texts:
            state["owners"] = torch.zeros(
                num_slots + 1, OWNER_WORDS, dtype=torch.int64, device=device
            )
            ring = _empty_ring(self.config.global_pool_tokens // PAGE * PAGE, device)
            if device.type == "cuda":  # compiles the kernel now
                add_texts(ring, torch.empty(0, dtype=torch.int64, device=device), [], 0)
            state |= {f"ring_{name}": tensor for name, tensor in ring._asdict().items()}
            self._ring_end = 0
        return state

    def remember_texts(self, state: dict[str, Tensor], ended: Sequence[EndedText]) -> None:
        """Adds outputs to the ring, each after as much of its prompt as a match counts.

        On a GPU it is one copy and one kernel.
        """
        ring = _ring_of(state)
        size = ring.tokens.shape[0]
        words: list[int] = []
        counts: list[int] = []
        for text in ended:
            first = max(0, text.num_prompt_tokens - self._longest, len(text.token_ids) - size + 1)
            count = len(text.token_ids) - first
            if count > SIZES[0]:
                words += (count, *texts.owner_of(text.salt), *text.token_ids[first:])
                counts.append(count)
        if counts:
            packed = torch.from_numpy(np.array(words, dtype=np.int64))
            add_texts(ring, to_device(packed, ring.tokens.device), counts, self._ring_end)
            pages = sum(ring_pages(count) for count in counts)
            self._ring_end = (self._ring_end + pages * PAGE) % size

    def find(self, inputs: DraftInputs) -> Continuation | None:
        """Adds the step's accepted tokens to the texts, and returns what may follow them.

        None: the step proposes nothing.
        """
        lens = texts.add_accepted(inputs)
        if inputs.step.draft_len == 0:
            return None
        history = texts.gather_texts(inputs, self.max_draft_len)
        earlier, state = None, inputs.step.state
        if self.remembers_texts:
            earlier = Earlier(_ring_of(state), state["owners"][inputs.step.slot_ids])
        return look_up(history, lens, earlier, self._lookup)

    @property
    def _lookup(self) -> Lookup:
        return Lookup(
            longest=self._longest,
            shortest=self.config.min_matching_ngram_size,
            num_in_text=COUNT_IN_TEXT,
            num_in_ring=COUNT_IN_RING,
            max_draft_len=self.max_draft_len,
            decay=self.config.match_decay,
            least=self.config.min_token_prob,
        )

    @property
    def _longest(self) -> int:
        """Tokens of a match that are counted."""
        asked = self.config.max_matching_ngram_size
        return LONGEST if asked == -1 else asked


class LookupBesideNetwork(SuffixLookup):
    """Puts what was found in place of a network's drafts, where a match is good enough.

    The choice reads accepted tokens alone, never the drafts that were drawn. So a request's drafts
    are either certain or drawn from what the network's logits say, and every rule stays lossless.

    State: the lookup's; and by slot how many drafts were looked up so far.
    """

    config: SAEnhancerConfig
    state_names = (*SuffixLookup.state_names, "looked_up")

    def allocate_state(
        self, num_slots: int, max_seq_len: int, device: torch.device
    ) -> dict[str, Tensor]:
        state = super().allocate_state(num_slots, max_seq_len, device)
        return state | {"looked_up": torch.zeros(num_slots + 1, dtype=torch.int64, device=device)}

    def num_looked_up(self, state: dict[str, Tensor]) -> int:
        """Returns how many drafts were looked up so far. Waits for the device."""
        return int(state["looked_up"][:-1].sum())

    def override(
        self, inputs: DraftInputs, drafts: Tensor, memory: DraftMemory | None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the step's drafts [B, K]: a request's are the network's or what was found.

        Args:
            drafts: [B, K] int32, the network's.
            memory: what they were drawn from, if that is remembered. It is changed.

        Returns:
            (the drafts, [B] bool whether they were found; None: nowhere).
        """
        found = self.find(inputs)
        if found is None:
            return drafts, None
        step, is_better = inputs.step, found.match_lens >= self.config.threshold
        if memory is not None and not step.sampling.all_greedy:
            memory.are_certain[step.slot_ids] = is_better
        self._count(inputs, (found.tokens >= 0) & is_better[:, None])
        return torch.where(is_better[:, None], found.tokens, drafts), is_better

    def _count(self, inputs: DraftInputs, are_looked_up: Tensor) -> None:
        """Counts drafts [B, K] bool, but for those after parts of prompts: these are not used."""
        step = inputs.step
        counts = are_looked_up[:, : step.draft_len].sum(1)
        counts = counts * (step.output_lens(inputs.num_accepted_tokens) > 0)
        step.state["looked_up"].index_add_(0, step.slot_ids, counts)


def _empty_ring(size: int, device: torch.device) -> Ring:
    return Ring(
        tokens=untouched_zeros((size,), torch.int32, device),
        owners=untouched_zeros((size // PAGE, OWNER_WORDS), torch.int64, device),
        newest=untouched_zeros((len(SIZES), BUCKETS_PER_TOKEN * size + 1), torch.int32, device),
        before=untouched_zeros((len(SIZES), size), torch.int32, device),
        end=torch.zeros(1, dtype=torch.int64, device=device),
    )


def _ring_of(state: dict[str, Tensor]) -> Ring:
    return Ring(*(state[f"ring_{name}"] for name in Ring._fields))
