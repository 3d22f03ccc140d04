"""The layer of logits, whose vocabulary the ranks share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..distributed.logits import ShardedLogits
from ..distributed.parallel import Parallel
from .linear import Linear


def vocabulary_head(size: int, vocab_size: int, parallel: Parallel) -> Linear:
    """Returns an lm_head of this rank's tokens; the last rank's may end in rows of no token."""
    rows = -(-vocab_size // parallel.size)
    return Linear(size, rows, bias=False, shard=parallel.shard(full=vocab_size))


def sharded(logits: Tensor, lm_head: Any, parallel: Parallel) -> Tensor | ShardedLogits:
    """Returns what `lm_head` made, [R, P]: all logits, or this rank's part of them."""
    shard = getattr(lm_head, "shard", None)
    if shard is None or shard.count == 1:
        return logits
    return ShardedLogits(logits, shard.full, parallel.comm)
