"""Each slot's tokens so far, prompt and output, and whose they are, on the device."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..metadata.attention import AttentionMetadata
from ..ops.tokens.history import BEGUN_WORDS, append_tokens, begin_texts
from ..ops.tokens.ring import OWNER_WORDS
from ..utils import rows_to_tensor, to_device
from .protocols import DraftInputs

STATE_NAMES = ("history", "history_lens")


def allocate_texts(
    num_slots: int, max_seq_len: int, max_draft_len: int, device: torch.device
) -> dict[str, Tensor]:
    """Returns the state, the last slot scratch."""
    # Columns past max_seq_len take tokens beyond the maximum length; the last takes the writes
    # of masked entries. No lookup reads them.
    columns = max_seq_len + max_draft_len + 2
    return {
        "history": torch.zeros(num_slots + 1, columns, dtype=torch.int32, device=device),
        "history_lens": torch.zeros(num_slots + 1, dtype=torch.int64, device=device),
    }


def owner_of(salt: str | None) -> list[int]:
    """Returns the words that stand for a salt: 128 bits of a cryptographic hash."""
    text = b"" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
    size = 8 * OWNER_WORDS
    digest = blake2b(text, digest_size=size, person=b"trtspec texts").digest()
    return [int.from_bytes(digest[i : i + 8], "little", signed=True) for i in range(0, size, 8)]


class BegunText(NamedTuple):
    """The tokens of a request that enters a slot."""

    tokens: np.ndarray  # int32
    salt: str | None = None


class SlotTexts:
    """Writes the texts of requests that enter slots: each at once, or those of a step together.

    Args:
        has_owners: whether the state has an owner for each slot.
    """

    def __init__(self, has_owners: bool = False):
        self.has_owners = has_owners
        self.waits = False
        """Whether texts wait for `write`."""
        self._begun: dict[int, BegunText] = {}  # by slot

    def wait(self, state: dict[str, Tensor]) -> None:
        """Lets texts wait from now on. Compiles the kernel, by an empty text in a new state."""
        self.waits = True
        self._begin(state, torch.zeros(BEGUN_WORDS, dtype=torch.int64), [(0, 0)])

    def admit(self, state: dict[str, Tensor], slot: int, token_ids: Sequence[int]) -> None:
        """Takes the tokens of a request that enters a slot. Its salt is none.

        Raises:
            ValueError: there is no such slot, or no room for them.
        """
        # torch.tensor takes four times as long for a list.
        tokens = np.array(token_ids, dtype=np.int32)
        slots, columns = state["history"].shape
        if not (0 <= slot < slots and len(tokens) <= columns):
            raise ValueError(
                f"No room for {len(tokens)} tokens in slot {slot}: there are {slots} slots of "
                f"{columns} tokens."
            )
        self._begun[slot] = BegunText(tokens)
        if not self.waits:
            self.write(state)

    def set_salt(self, state: dict[str, Tensor], slot: int, salt: str | None) -> None:
        """Sets whose texts the request in a slot may be drafted from."""
        if slot in self._begun:
            self._begun[slot] = self._begun[slot]._replace(salt=salt)
        elif self.has_owners:
            owners = state["owners"]
            owners[slot] = rows_to_tensor(owner_of(salt), torch.int64, owners.device)

    def write(self, state: dict[str, Tensor]) -> None:
        """Writes the texts that wait, on a GPU by one copy and one kernel."""
        begun, self._begun = self._begun, {}
        if begun:
            counts = [(slot, len(text.tokens)) for slot, text in begun.items()]
            self._begin(state, _packed(begun), counts)

    def _begin(
        self, state: dict[str, Tensor], words: Tensor, counts: list[tuple[int, int]]
    ) -> None:
        history, owners = state["history"], state["owners"] if self.has_owners else None
        words = to_device(words, history.device)
        begin_texts(history, state["history_lens"], owners, words, counts)


def _packed(begun: dict[int, BegunText]) -> Tensor:
    """Returns the `words` of `begin_texts`."""
    num_words = BEGUN_WORDS * len(begun)
    heads: list[int] = []
    first = 2 * num_words
    for slot, text in begun.items():
        heads += (slot, first, len(text.tokens), *owner_of(text.salt))
        first += len(text.tokens)
    words = np.zeros((first + 1) // 2, dtype=np.int64)
    words[:num_words] = heads
    tokens = words.view(np.int32)[2 * num_words : first]
    np.concatenate([text.tokens for text in begun.values()], out=tokens)
    return torch.from_numpy(words)


def add_accepted(inputs: DraftInputs) -> Tensor:
    """Adds a step's accepted tokens to its requests' texts. Returns their lengths [B] int64."""
    step = inputs.step
    return append_tokens(
        step.state["history"],
        step.state["history_lens"],
        step.slot_ids,
        inputs.accepted_tokens,
        step.output_lens(inputs.num_accepted_tokens),
    )


def gather_texts(inputs: DraftInputs, max_draft_len: int) -> Tensor:
    """Returns the texts of a step's requests, after `add_accepted`.

    Returns:
        [B, L] int32, L at least their lengths. They may hold anything past their ends.
    """
    history = inputs.step.state["history"]
    # The host's bound of the lengths, so that a short history is not searched at full width. A
    # context's history holds its whole prompt, of which this pass may have read a part only.
    meta, width = inputs.attn_metadata, history.shape[1] - 1
    if isinstance(meta, AttentionMetadata) and meta.num_contexts == 0:
        width = min(meta.max_kv_len + max_draft_len + 2, width)
    return history[inputs.step.slot_ids, :width]
