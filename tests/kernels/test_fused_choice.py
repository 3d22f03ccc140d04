"""Which tensors the fused products take, and which they leave to other kernels."""

from __future__ import annotations

import torch

from trtspec.layers.fused import _takes_rope
from trtspec.ops.layer.rope import CacheWrite, Rope


def test_a_table_that_begins_between_two_numbers_is_left_to_other_kernels() -> None:
    """Cosines are read two at a time: an address that is no multiple of 8 bytes would fault."""
    memory = torch.zeros(2 * 16 * 8 + 1)
    positions, keys = torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2, 8)
    to = CacheWrite(keys, keys, positions, 0)
    for first, is_taken in ((0, True), (1, False), (2, True)):
        table = memory[first : first + 16 * 8].view(16, 8)
        assert table.data_ptr() % 8 == first % 2 * 4
        assert _takes_rope(Rope(table, positions), to, torch.float32) == is_taken
