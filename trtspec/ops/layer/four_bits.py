"""Weights of 4 bits for the few rows of a decoding step: integers with a zero and a scale for each
group of columns (AWQ, GPTQ), and NVFP4 (e2m1 with an e4m3 scale for each 16).

Activations stay floats. `csrc/include/trtspec/four_bit_linear.cuh` has the product of few rows and
the order in which numbers lie, `weight_tiles.py` that of more rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import native
from ..experts import fp4
from . import weight_tiles

ROWS, STEP = 8, 128  # rows and columns whose numbers lie together
NVFP4_GROUP = 16
GROUPS = 32, 64
"""Of integers, columns that may share a scale; else a multiple of `STEP`."""
_NARROW, _OF_FLOATS = 16, 8  # bytes of a row's scales: of groups below `STEP`, and of NVFP4
CODES = ROWS * STEP // 2  # bytes of a record's numbers
_FOLD = 2.0**8
"""Kernels multiply NVFP4's numbers by 2^-8 times their scales: rows' scales make up for it."""


class FourBitWeight(NamedTuple):
    """A weight [out, in], where 16 divides `out` and 128 `in`, or a stack of such [E, out, in].

    Of 8 rows what they have in 128 columns is a record. A row has 64 bytes of numbers there: four
    pieces of 16, and piece t has words 0 … 3, of columns 32 i + 8 t … 32 i + 8 t + 7 each. Behind
    the rows' numbers are their scales.
    """

    records: Tensor  # [(E,) out / 8, in / 128, bytes] uint8
    row_scales: Tensor | None  # [(E,) out] float32 of NVFP4; integers have none

    @property
    def shape(self) -> tuple[int, ...]:
        """([E,] out, in)."""
        *stack, rows, steps, _ = self.records.shape
        return *stack, rows * ROWS, steps * STEP

    @property
    def scale_bytes(self) -> int:
        """Of a row in a record."""
        return (self.records.shape[-1] - CODES) // ROWS

    def at(self, expert: int) -> FourBitWeight:
        """Returns one weight of a stack, in its memory."""
        scales = None if self.row_scales is None else self.row_scales[expert]
        return FourBitWeight(self.records[expert], scales)


def empty(shape: Sequence[int], group: int, device: torch.device) -> FourBitWeight:
    """Returns room for a stack of weights [E, out, in].

    Args:
        group: columns that share a scale; `NVFP4_GROUP` are NVFP4's.
    """
    count, out, columns = shape
    is_floats = group == NVFP4_GROUP
    scale_bytes = _OF_FLOATS if is_floats else 4 * _entries(group)
    records = count, out // ROWS, columns // STEP, CODES + ROWS * scale_bytes
    return FourBitWeight(
        torch.empty(records, dtype=torch.uint8, device=device),
        torch.empty(count, out, dtype=torch.float32, device=device) if is_floats else None,
    )


def _entries(group: int) -> int:
    """Returns how many scales of integers a row has in a record."""
    return _NARROW // 4 if group < STEP else 1


def from_integers(numbers: Tensor, zeros: Tensor, scales: Tensor, group: int) -> FourBitWeight:
    """Returns the weight (numbers - zeros) * scales.

    Args:
        numbers: [out, in] uint8, 0 to 15. zeros: [out, groups] uint8, 0 to 16.
        scales: [out, groups] of a dtype whose mantissa has at most 15 bits, or floats of such.
        group: columns that share a zero and a scale, of `GROUPS` or a multiple of `STEP`.
    """
    entries = scales.float().contiguous().view(torch.int32) & -256 | zeros.int()  # [out, groups]
    count = _entries(group)  # of 128 columns
    columns = torch.arange(numbers.shape[1] // STEP * count, device=numbers.device)
    entries = entries[:, columns * (STEP // count) // group]
    of_steps = entries.contiguous().view(torch.uint8).unflatten(1, (-1, 4 * count))

    def place(code: Tensor, pair: int, half: int) -> Tensor:
        at = (3 + 4 * pair + 16 * half) % 32
        return code << at | (code >> 32 - at if at > 28 else 0)

    return FourBitWeight(_records(_in_order(numbers, place), of_steps), None)


def from_nvfp4(numbers: Tensor, scales: Tensor, row_scales: Tensor) -> FourBitWeight:
    """Returns the weight numbers * scales * row_scales.

    Args:
        numbers: [out, in] uint8, codes of e2m1. scales: [out, in / 16] float8_e4m3fn, not negative.
        row_scales: [out] float32.
    """
    # Five bits of an exponent have no need of e4m3's smallest numbers, which lack a leading one.
    mantissa, exponent = torch.frexp(scales.float())  # mantissa in [0.5, 1)
    codes = (exponent + _LEAST) * 8 + ((mantissa * 16).int() - 8)
    is_zero = scales.float() == 0
    codes = torch.where(is_zero, 0, codes).to(torch.uint8)
    numbers = numbers.masked_fill(is_zero.repeat_interleave(NVFP4_GROUP, 1), 0)
    of_steps = codes.unflatten(1, (-1, _OF_FLOATS))
    return FourBitWeight(_records(_in_order(numbers, fp4.place), of_steps), row_scales * _FOLD)


_LEAST = 9
"""Added to a scale's exponent, as frexp says it: 2^-9 is the smallest."""


def dequantize(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Returns a weight [out, in], which is no stack, in a float dtype, rounded once."""
    numbers, scales = weight.records.split([CODES, ROWS * weight.scale_bytes], dim=-1)
    words = numbers.contiguous().view(torch.int32).unflatten(-1, (ROWS, 4, 4))
    words = words.transpose(-1, -2)  # [out / 8, steps, 8, i, t]
    scales = scales.contiguous().unflatten(-1, (ROWS, -1))
    if weight.row_scales is None:
        shifts = torch.tensor([3 + 4 * j + 16 * half for j in range(4) for half in (0, 1)])
        ring = (words.long() & 0xFFFFFFFF) * (1 + (1 << 32))
        values = ((ring[..., None] >> shifts.to(words.device)) & 15).flatten(-3).float()
        entries = scales.view(torch.int32)  # [out / 8, steps, 8, groups]
        values = values.unflatten(-1, (entries.shape[-1], -1)) - (entries & 255)[..., None]
        values = values * (entries & -256).view(torch.float32)[..., None]
    else:
        table = torch.tensor([*fp4.MAGNITUDES, *(-x for x in fp4.MAGNITUDES)])
        values = table.to(words.device)[fp4.taken(words).flatten(-3).int()]
        codes = scales.int()
        powers = torch.ldexp((codes % 8 + 8) / 16, codes // 8 - _LEAST)
        values = values.unflatten(-1, (-1, NVFP4_GROUP)) * powers[..., None]
        values = values * (weight.row_scales / _FOLD).view(-1, 1, ROWS, 1, 1)
    return values.flatten(-2).transpose(1, 2).reshape(weight.shape).to(dtype)


def multiply(
    x: Tensor, weight: FourBitWeight, residual: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Returns x [T, in] times the weight transposed, plus bias, [T, out], in x's dtype.

    Args:
        residual: [T, out], to which the product is added, in its memory; it is returned.
    """
    csrc = weight_tiles.kernels(x, residual)
    if csrc is None:
        wide = widen(weight, x.dtype)
        return F.linear(x, wide, bias) if residual is None else residual.addmm_(x, wide.t())

    def launch(x: Tensor, room: Tensor, out: Tensor, adds: bool) -> None:
        csrc.four_bit_tiles(x, weight.records, weight.row_scales, room, out, adds)

    return weight_tiles.multiply(x, weight.shape[0], residual, bias, launch)


def widen(weight: FourBitWeight, dtype: torch.dtype) -> Tensor:
    """Returns what `dequantize` does, by one kernel if there is one for it."""
    csrc = native.kernels(weight.records) if dtype == torch.bfloat16 else None
    if csrc is None:
        return dequantize(weight, dtype)
    out = torch.empty(weight.shape, dtype=dtype, device=weight.records.device)
    csrc.widen_four_bits(weight.records, weight.row_scales, out)
    return out


def _records(codes: Tensor, scales: Tensor) -> Tensor:
    """[out, steps, 64] and [out, steps, bytes] -> [out / 8, steps, 8 * (64 + bytes)]."""
    return torch.cat([_by_eight(codes).flatten(2), _by_eight(scales).flatten(2)], dim=-1)


def _by_eight(x: Tensor) -> Tensor:
    """[out, n, m] -> [out / 8, n, 8, m] in memory."""
    return x.unflatten(0, (-1, ROWS)).transpose(1, 2).contiguous()


def _in_order(numbers: Tensor, place: fp4.Place) -> Tensor:
    """[out, in] -> [out, in / 128, 64].

    Args:
        place: code, pair, half -> its bits of a word.
    """
    parts = numbers.unflatten(1, (-1, 4, 4, 4, 2))  # [out, steps, i, t, pair, half]
    words = torch.zeros(parts.shape[:4], dtype=torch.int32, device=numbers.device)
    for pair in range(4):
        for half in (0, 1):
            words |= place(parts[..., pair, half].int(), pair, half)
    return words.transpose(2, 3).flatten(2).contiguous().view(torch.uint8)
