"""Puts weights of 4 bits together, as products read them, from a checkpoint's tensors."""

from __future__ import annotations

import torch

from ..models.placement import Placement
from ..ops.layer import four_bits
from ..ops.layer.four_bits import FourBitWeight
from ..ops.layer.fp8 import FP8
from ..ops.layer.kv_codes import as_bytes
from .packed_floats import Nvfp4Tensor
from .packed_ints import Int4Tensor
from .tensors import TensorSource


def packed_group(source: TensorSource, placement: Placement) -> int | None:
    """Returns the columns of a group, 16 of NVFP4; None if kernels do not read such a part."""
    scaled = source.scaled
    edges = placement.cut[1:3] if placement.cut is not None and placement.cut.dim == 1 else (0, 0)
    if isinstance(scaled, Nvfp4Tensor):
        group = four_bits.NVFP4_GROUP
    else:
        assert isinstance(scaled, Int4Tensor)
        group = scaled.packed.group
        if scaled.packed.scales.dtype not in ("F16", "BF16"):
            return None  # more digits than an entry has
        if group not in four_bits.GROUPS and group % four_bits.STEP:
            return None
    step = max(group, four_bits.STEP)
    return group if all(edge % step == 0 for edge in edges) else None


class FourBitParts:
    """A weight of 4 bits [out, in] that is put together from the tensors of a checkpoint.

    Args:
        group: columns that share a scale, as `packed_group` says.
    """

    def __init__(self, shape: torch.Size, group: int, device: torch.device):
        out, columns = shape
        groups = -(-columns // group)
        self.group = group
        self.numbers = torch.empty(shape, dtype=torch.uint8, device=device)
        self.is_floats = group == four_bits.NVFP4_GROUP
        kind = FP8 if self.is_floats else torch.float32
        self.scales = torch.empty(out, groups, dtype=kind, device=device)
        self.zeros = torch.empty(out, groups, dtype=torch.uint8, device=device)
        self.row_scales = torch.empty(out, dtype=torch.float32, device=device)

    def place(self, source: TensorSource, placement: Placement) -> None:
        """Puts a tensor, or this rank's part of it, where it belongs.

        Raises:
            CheckpointError: a scale is NaN or infinite.
        """
        rows = slice(placement.start, placement.start + placement.shape[0])
        scaled = source.scaled
        if isinstance(scaled, Nvfp4Tensor):
            numbers, scales, whole = scaled.packed.read()
            self.row_scales[rows] = whole
            parts = [(self.numbers, numbers, 1), (self.scales, scales, self.group)]
        else:
            assert isinstance(scaled, Int4Tensor)
            numbers, zeros = scaled.packed.read(self.numbers.device)
            scales = scaled.packed.read_scales()
            parts = [
                (self.numbers, numbers, 1),
                (self.zeros, zeros, self.group),
                (self.scales, scales, self.group),
            ]
        for to, tensor, columns in parts:
            cut = placement.cut
            if cut is not None:
                by = columns if cut.dim == 1 else 1
                tensor = tensor.narrow(cut.dim, cut.start // by, -(-cut.length // by))
            tensor = placement.arranged(as_bytes(tensor.contiguous()))
            as_bytes(to)[rows] = tensor.to(to.device)

    def packed(self) -> FourBitWeight:
        """Returns the weight, of which every row is there."""
        if self.is_floats:
            return four_bits.from_nvfp4(self.numbers, self.scales, self.row_scales)
        return four_bits.from_integers(self.numbers, self.zeros, self.scales, self.group)
