"""Each slot's tokens so far, prompt and output, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from ..ops.tokens.history import append_tokens
from ..utils import copy_to_device
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


def admit_text(state: dict[str, Tensor], slot: int, token_ids: Sequence[int]) -> None:
    """Writes the tokens of a request that enters a slot."""
    # torch.tensor takes four times as long for a list.
    tokens = torch.from_numpy(np.array(token_ids, dtype=np.int32))
    copy_to_device(tokens, state["history"][slot, : len(tokens)])
    state["history_lens"][slot : slot + 1].fill_(len(tokens))  # goes with the kernel: no copy


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
    if meta is not None and meta.num_contexts == 0:
        width = min(meta.max_kv_len + max_draft_len + 2, width)
    return history[inputs.step.slot_ids, :width]
