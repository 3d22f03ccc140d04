"""Logits of which each rank holds a part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .comm import Communicator


@dataclass(frozen=True)
class ShardedLogits:
    """[R, V] logits: this rank has `part` [R, P], those of tokens rank * P … of `vocab_size`.

    A step whose requests are all greedy needs only each rank's best token (`best`); others gather.
    """

    part: Tensor
    vocab_size: int  # V; entries of `part` past it belong to no token
    comm: Communicator

    @property
    def first_index(self) -> int:
        """The token of this rank's first entry."""
        return self.comm.rank * self.part.shape[1]

    @property
    def own(self) -> Tensor:
        """This rank's entries that belong to tokens, [R, <= P]."""
        return self.part[:, : max(0, min(self.part.shape[1], self.vocab_size - self.first_index))]

    @property
    def shape(self) -> tuple[int, int]:
        return self.part.shape[0], self.vocab_size

    @property
    def device(self) -> torch.device:
        return self.part.device

    @property
    def dtype(self) -> torch.dtype:
        return self.part.dtype

    def split(self, rows: int) -> tuple[ShardedLogits, ...]:
        """Returns parts of `rows` rows each, as `Tensor.split` does."""
        return tuple(replace(self, part=part) for part in self.part.split(rows))

    def __add__(self, other: ShardedLogits) -> ShardedLogits:
        """Adds logits that are cut alike."""
        return replace(self, part=self.part + other.part)

    def gathered(self) -> Tensor:
        """Returns the logits of all tokens, [R, V], the same on every rank."""
        parts = self.comm.all_gather(self.part)  # [n, R, P]
        return parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]

    def best(self) -> tuple[Tensor, Tensor]:
        """Chooses the best token of each row from every rank's best, the lowest id among equals.

        Returns:
            (tokens [R] int32, bad [R] bool: the row held NaN, or nothing above -inf).
        """
        own = self.own.float()
        if own.shape[1] == 0:
            own = own.new_full((own.shape[0], 1), float("-inf"))
        is_nan = own.isnan()
        value, index = own.masked_fill(is_nan, float("-inf")).max(-1)
        # Ids are exact in float32: no vocabulary has 2^24 tokens.
        pairs = torch.stack(
            [value, index.float() + self.first_index, is_nan.any(-1).float()], dim=-1
        )
        values, ids, bad = self.comm.all_gather(pairs).unbind(-1)  # [n, R] each
        winner = values.argmax(0, keepdim=True)  # the first rank among equals has the lower ids
        tokens = ids.gather(0, winner)[0].to(torch.int32)
        return tokens, (bad.amax(0) > 0) | ~(values.amax(0) > float("-inf"))


def gather_logits(logits: Tensor | ShardedLogits) -> Tensor:
    """Returns logits [R, V] of all tokens; where each rank has a part, it gathers them."""
    return logits.gathered() if isinstance(logits, ShardedLogits) else logits


def top_tokens(logits: Tensor | ShardedLogits, count: int) -> tuple[Tensor, Tensor]:
    """Chooses the best tokens of each row, the same on every rank.

    A NaN may be among them, and stays one.

    Returns:
        (their logits [R, count], the tokens [R, count] int64), fewer where there are fewer.
    """
    if not isinstance(logits, ShardedLogits):
        return logits.topk(min(count, logits.shape[1]))
    own = logits.own.float()
    values, ids = own.topk(min(count, own.shape[1]))
    room = count - values.shape[1]  # ranks may differ in how many tokens they have
    values = torch.nn.functional.pad(values, (0, room), value=float("-inf"))
    ids = torch.nn.functional.pad(ids + logits.first_index, (0, room))
    pairs = torch.stack([values, ids.float()], dim=-1)  # ids are exact, see `best`
    gathered = logits.comm.all_gather(pairs).transpose(0, 1).flatten(1, 2)  # [R, n * count, 2]
    values, found = gathered[..., 0].topk(min(count, logits.vocab_size))
    return values, gathered[..., 1].gather(1, found).to(torch.int64)
