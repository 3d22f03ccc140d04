"""Weights of 4 or 8 bits that lie packed in words of 32: AWQ, GPTQ, and compressed-tensors'
`pack-quantized`.

A weight is (number - zero) * scale. The columns of a group share a zero and a scale. X is a
module's name, f = 32 / bits, and numbers lie in a word from its low bits on:

    compressed-tensors
        X.weight_packed      [out, in/f]      numbers, along `in`; signed, with 2^(bits-1) added
        X.weight_zero_point  [out/f, groups]  zeros, along `out`, as the numbers; without it 0
        X.weight_scale       [out, groups]
        X.weight_shape       [2]              out, in
    GPTQ
        X.qweight            [in/f, out]      numbers, along `in`
        X.qzeros             [groups, out/f]  zeros, along `out`; one too small in its first format
        X.scales             [groups, out]
    AWQ (gemm)
        X.qweight            [in, out/f]      numbers, along `out`, in the order of `_AWQ_ORDER`
        X.qzeros             [groups, out/f]  zeros, likewise
        X.scales             [groups, out]

`X.g_idx` or `X.weight_g_idx` [in] says which group a column belongs to, if not its neighbours'
(GPTQ's `desc_act`).

Differences of 4 bits are numbers of e4m3, so they are FP8 weights with scales of groups. Ones of
8 bits, and groups that do not lie together, are floats.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..distributed.parallel import Cut
from ..errors import CheckpointError
from .packed import Names, Parts, joined, unfit
from .quantization import FP8, Packing
from .scaled import PackedTensor, as_floats
from .tensors import FLOATS, TensorSource

_CPU = torch.device("cpu")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_INT = "I32"


@dataclass(frozen=True)
class Called:
    """What a module's tensors are called."""

    numbers: str
    scales: str
    zeros: str
    groups: str
    shape: str | None = None

    def of(self, how: Packing) -> Names:
        """Returns those that a weight must have, and those that it may have."""
        are_needed = {self.scales: True, self.zeros: how.has_zeros, self.groups: how.has_groups}
        needed = [name for name, is_needed in are_needed.items() if is_needed]
        others = [name for name, is_needed in are_needed.items() if not is_needed]
        return Names(self.numbers, _INT, needed, [*others, *filter(None, [self.shape])])


_CALLED = {
    "compressed": Called(
        "weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx", "weight_shape"
    ),
    "gptq": Called("qweight", "scales", "qzeros", "g_idx"),
    "awq": Called("qweight", "scales", "qzeros", "g_idx"),
}


@dataclass(frozen=True)
class PackedInts:
    """A weight [out, in] as the checkpoint has it."""

    how: Packing
    shape: tuple[int, int]
    group: int  # columns
    numbers: TensorSource
    scales: TensorSource
    zeros: TensorSource | None
    groups: TensorSource | None
    first_row: int = 0  # of a larger one

    def of_rows(self, start: int, length: int) -> PackedInts:
        """Returns some rows of it."""
        shape = length, self.shape[1]
        return replace(self, shape=shape, first_row=self.first_row + start)

    @property
    def _rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.shape[0])

    def read(self, device: torch.device = _CPU) -> tuple[Tensor, Tensor]:
        """Returns the numbers [out, in] uint8 and the zeros [out, groups], of 4 bits uint8 too.

        (A zero of 2^bits is one: GPTQ's first format can say so.)

        Args:
            device: where words are taken apart.
        """
        numbers = _numbers(self.how, self.numbers.read().to(device))
        return numbers[self._rows, : self.shape[1]], self._read_zeros(device)

    def read_scales(self) -> Tensor:
        """Returns them, [out, groups] float32.

        Raises:
            CheckpointError: one is NaN or infinite.
        """
        scales = self.scales.read().float()
        if bad := int((~torch.isfinite(scales)).sum()):
            raise CheckpointError(
                f"{self.scales.name} in {self.scales.path} holds {bad} scales that are NaN or "
                "infinite. Copy the checkpoint again from its source."
            )
        scales = scales if self.how.form == "compressed" else scales.t()
        return scales[self._rows].contiguous()

    def read_codes(self, cut: Cut | None = None) -> Tensor:
        """Returns number - zero in e4m3, [out, in] or a cut of it; of 4 bits and whole groups."""
        codes = self._differences().to(torch.float8_e4m3fn)
        return codes if cut is None else codes.narrow(cut.dim, cut.start, cut.length)

    def read_floats(self, cut: Cut | None = None) -> Tensor:
        """Returns the weights in float32, [out, in] or a cut of it.

        Raises:
            CheckpointError: a scale is NaN or infinite, or a column is of no group.
        """
        scales = self.read_scales()
        of_column = self._group_of_columns()
        if of_column is None:
            groups = torch.arange(self.shape[1]) // self.group
            floats = self._differences().float() * scales[:, groups]
        else:
            numbers, zeros = self.read()
            floats = (numbers.float() - zeros.float()[:, of_column]) * scales[:, of_column]
        return floats if cut is None else floats.narrow(cut.dim, cut.start, cut.length)

    @property
    def has_whole_groups(self) -> bool:
        """Whether a group is `group` neighbours."""
        return self._group_of_columns() is None

    def _differences(self) -> Tensor:
        """number - zero, [out, in] int16, or int8 if it has room."""
        numbers, zeros = self.read()
        kind = torch.int8 if self.how.bits == 4 else torch.int16
        whole = zeros.repeat_interleave(self.group, 1)[:, : self.shape[1]]
        return numbers.to(kind).sub_(whole.to(kind))

    def _read_zeros(self, device: torch.device) -> Tensor:
        bits = self.how.bits
        if self.zeros is None:
            count = self.scales.shape[-1 if self.how.form == "compressed" else 0]
            middle, kind = 1 << (bits - 1), torch.uint8
            return torch.full((self.shape[0], count), middle, dtype=kind, device=device)
        words = self.zeros.read().to(device)
        if self.how.form == "compressed":
            return _unpacked(words, bits, along=0)[self._rows]
        zeros = _awq_numbers(words) if self.how.form == "awq" else _unpacked(words, bits, along=1)
        if bits == 8:  # 255 and one more is none
            zeros = zeros.to(torch.int16)
        return (zeros + self.how.adds_to_zeros).t()[self._rows].contiguous()

    def _group_of_columns(self) -> Tensor | None:
        """[in] int64; None if groups are whole."""
        if self.groups is None:
            return None
        of_column, count = self.groups.read().long(), -(-self.shape[1] // self.group)
        if bool(((of_column < 0) | (of_column >= count)).any()):
            raise CheckpointError(
                f"{self.groups.name} in {self.groups.path} names groups from "
                f"{int(of_column.min())} to {int(of_column.max())}, but {self.scales.name} has "
                f"{count} (0 to {count - 1}). Copy the checkpoint again from its source."
            )
        is_whole = torch.equal(of_column, torch.arange(self.shape[1]) // self.group)
        return None if is_whole else of_column


@dataclass(frozen=True)
class Int4Tensor(PackedTensor):
    """A weight of 4 bits, as the checkpoint has it."""

    packed: PackedInts

    def rows(self, start: int, length: int) -> TensorSource:
        """As of `ScaledTensor`."""
        return _weight(self.numbers.name, self.packed.of_rows(start, length))


def unpacked(
    sources: dict[str, TensorSource], how: Packing, where: Path
) -> dict[str, TensorSource]:
    """Returns the tensors of a checkpoint with its packed weights as quantised ones, `X.weight`.

    Args:
        where: its config.json, for messages.

    Raises:
        CheckpointError: scales or zeros are missing, of another shape or dtype, or of no weight, or
            a weight is there as floats too.
    """
    called = _CALLED[how.form]

    def weight_of(name: str, numbers: TensorSource, parts: Parts) -> TensorSource:
        zeros, groups, said = map(parts.get, (called.zeros, called.groups, str(called.shape)))
        scales = parts[called.scales]
        own = _own(how, numbers, scales, zeros) if how.may_differ else how
        return _weight(name, _checked(own, numbers, scales, zeros, groups, said))

    return joined(sources, called.of(how), where, weight_of)


def _weight(name: str, packed: PackedInts) -> TensorSource:
    """Returns what readers see of a packed weight."""
    read = packed.read_floats
    floats = replace(
        packed.numbers, name=name, shape=packed.shape, dtype="F32", load=read, load_cut=read
    )
    if packed.how.bits != 4 or not packed.has_whole_groups:
        return floats
    codes = replace(floats, dtype=FP8, load=packed.read_codes, load_cut=packed.read_codes)
    shape = packed.shape[0], -(-packed.shape[1] // packed.group)
    scales = replace(
        packed.scales, shape=shape, dtype="F32", load=packed.read_scales, load_cut=None
    )
    return as_floats(floats, Int4Tensor(codes, scales, shape, (1, packed.group), packed=packed))


# -- shapes ----------------------------------------------------------------------------------------
def _checked(
    how: Packing,
    numbers: TensorSource,
    scales: TensorSource,
    zeros: TensorSource | None,
    groups: TensorSource | None,
    said: TensorSource | None,
) -> PackedInts:
    """Returns the weight of these tensors, whose shapes fit each other.

    Args:
        said: its shape. Without it no word has room left.
    """
    factor, is_rows = 32 // how.bits, how.form == "compressed"
    for tensor, kinds in (
        (numbers, (_INT,)),
        (scales, FLOATS),
        (zeros, (_INT,)),
        (groups, (_INT,)),
    ):
        dims = 1 if tensor is groups else 2
        if tensor is not None and (tensor.dtype not in kinds or len(tensor.shape) != dims):
            raise unfit(tensor, f"must be {dims}-dimensional, of {' or '.join(kinds)}")
        if tensor is not None and 0 in tensor.shape:
            raise unfit(tensor, "must hold numbers")
    if is_rows:
        out, columns = numbers.shape[0], numbers.shape[1] * factor
    elif how.form == "gptq":
        columns, out = numbers.shape[0] * factor, numbers.shape[1]
    else:
        columns, out = numbers.shape[0], numbers.shape[1] * factor
    if said is not None:
        shape = said.read().tolist()
        if said.shape != (2,) or shape[0] != out or -(-shape[1] // factor) * factor != columns:
            raise CheckpointError(
                f"{said.name} in {said.path} is {shape}, but {numbers.name} of "
                f"{list(numbers.shape)} holds [{out}, {columns}] numbers of {how.bits} bits. Copy "
                "the checkpoint again from its source."
            )
        columns = shape[1]
    group = columns if how.group < 1 else min(how.group, columns)
    expected = -(-columns // group)
    _expect(scales, (out, expected) if is_rows else (expected, out), numbers)
    if zeros is not None:
        words = -(-out // factor)
        _expect(zeros, (words, expected) if is_rows else (expected, words), numbers)
    if groups is not None:
        _expect(groups, (columns,), numbers)
    return PackedInts(how, (out, columns), group, numbers, scales, zeros, groups)


def _own(
    how: Packing, numbers: TensorSource, scales: TensorSource, zeros: TensorSource | None
) -> Packing:
    """Returns the bits and the group of one weight of GPTQ's form, as its shapes say; `how` where
    they do not fit, or fit it."""
    if zeros is None or any(len(part.shape) != 2 for part in (numbers, scales, zeros)):
        return how
    (count, out), words = scales.shape, zeros.shape[1]
    bits = next((bits for bits in (4, 8) if words * 32 == out * bits), how.bits)
    columns = numbers.shape[0] * (32 // bits)
    usual = columns if how.group < 1 else how.group
    is_usual = not usual or -(-columns // usual) == count
    own = how.group if is_usual or not count or columns % count else columns // count
    return replace(how, bits=bits, group=own)


def _expect(tensor: TensorSource, shape: tuple[int, ...], of: TensorSource) -> None:
    if tensor.shape != shape:
        raise unfit(tensor, f"must be {list(shape)} for {of.name} of {list(of.shape)}")


# -- words -----------------------------------------------------------------------------------------
def _numbers(how: Packing, words: Tensor) -> Tensor:
    """Returns the numbers [out, in] uint8 of packed words."""
    if how.form == "compressed":
        return _unpacked(words, how.bits, along=1)
    if how.form == "gptq":
        return _pieces(words, how.bits).transpose(0, 1).flatten(1)  # [out, in / f, f]
    return _awq_numbers(words).t().contiguous()


def _pieces(words: Tensor, bits: int) -> Tensor:
    """[..., n] int32 -> [..., n, 32 / bits] uint8, from the low bits on."""
    parts = words.contiguous().view(torch.uint8).unflatten(-1, (-1, 4))
    return parts if bits == 8 else torch.stack((parts & 15, parts >> 4), dim=-1).flatten(-2)


def _unpacked(words: Tensor, bits: int, along: int) -> Tensor:
    """[n, m] int32 -> [n * f, m] or [n, m * f] uint8, by the dimension in which numbers lie."""
    pieces = _pieces(words, bits)
    return pieces.flatten(1) if along == 1 else pieces.transpose(1, 2).flatten(0, 1)


def _awq_numbers(words: Tensor) -> Tensor:
    """[n, m] int32 -> [n, m * 8] uint8."""
    places = torch.tensor(_AWQ_ORDER, device=words.device).argsort()
    return _pieces(words, bits=4)[..., places].flatten(1)
