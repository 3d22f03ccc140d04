"""Attention of DFlash's blocks along whole sequences, without a cache, differentiable.

    keys     [ the sequence's rows, of the target's states | the rows of block 0 | block 1 | … ]
    a row    sees the rows of its document before its block's anchor, and rows of its own block

The anchor is the last token that is known; a block's first row reads it. Blocks are attended in
groups, each with a copy of the sequence's keys. So a row meets the hidden rows of few other blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .dense import DensePass, Keys
from .torch_sdpa import masked_attention

GROUP = 32
"""Blocks of a group, where it divides their number. Of 256 blocks of 8 rows behind 1,024 tokens a
row then meets 1,280 keys in place of 3,072."""


class BlockPass(DensePass):
    """The blocks of a batch, in the place of serving's `AttentionMetadata`.

    Args:
        document_ids: [N, L] int; a block sees rows of its anchor's document alone.
        anchors: [N, A] int64, rows of the sequences.
        block: rows of a block.
        context: by layer, keys and values of the sequences' rows, each [N * L, Hkv, D].
        sees_ahead: by layer, whether a row sees later rows of its block.
        windows_by_row: windows of such layers are counted from each row, else from the last one.
    """

    def __init__(
        self,
        document_ids: Tensor,
        anchors: Tensor,
        block: int,
        context: Sequence[Keys],
        sees_ahead: Sequence[bool],
        windows_by_row: bool = False,
    ):
        self.num_sequences, self.length = document_ids.shape
        self.context, self.sees_ahead = context, sees_ahead
        self.windows_by_row = windows_by_row
        device, self.rows_per_generation = document_ids.device, block
        count = anchors.shape[1]
        self._groups = count // GROUP if count and count % GROUP == 0 else 1
        anchors = anchors.reshape(self.num_sequences * self._groups, -1)
        document_ids = document_ids.repeat_interleave(self._groups, dim=0)
        row = torch.arange(anchors.shape[1] * block, device=device)
        number, self._place = row // block, row % block
        self._anchors = anchors[:, number]  # [N * G, A / G * block], of each row
        self._base = torch.arange(self.length, device=device)
        documents = document_ids.gather(1, self._anchors)
        self._before = (documents[:, :, None] == document_ids[:, None, :]) & (
            self._base < self._anchors[:, :, None]
        )
        self._own = number[:, None] == number[None, :]

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: int,
        window: int | None,
        scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """As `DensePass.attend`, over context and blocks; rows are N * A * block."""
        sides = []
        for of_context, of_blocks in zip(self.context[layer], (k, v), strict=True):
            context = self._rows(of_context, self.num_sequences)
            context = context.repeat_interleave(self._groups, dim=0)
            side = torch.cat([context, self._rows(of_blocks)], dim=2)
            sides.append(side.repeat_interleave(q.shape[1] // k.shape[1], dim=1))
        mask = self._mask_of(layer, window)
        out = masked_attention(self._rows(q), sides[0], sides[1], mask, scale, softcap, sinks)
        return out.transpose(1, 2).flatten(0, 1)

    def _mask_of(self, layer: int, window: int | None) -> Tensor:
        """Returns which keys a row sees, [N * G, 1, R, L + R] bool, R = A / G * block."""
        ahead, before, own = self.sees_ahead[layer], self._before, self._own
        if not ahead:
            own = own & (self._place[None, :] <= self._place[:, None])
        if window is not None:
            from_last = ahead and not self.windows_by_row
            place = self.rows_per_generation - 1 if from_last else self._place
            first = self._anchors + place - window + 1
            before = before & (self._base >= first[:, :, None])
        return torch.cat([before, own.expand(len(before), -1, -1)], dim=-1)[:, None]

    def _rows(self, x: Tensor, parts: int | None = None) -> Tensor:
        """[P * R, H, D] -> [P, H, R, D]; P is N * G where it is not given."""
        parts = self.num_sequences * self._groups if parts is None else parts
        return x.view(parts, -1, *x.shape[1:]).transpose(1, 2)
