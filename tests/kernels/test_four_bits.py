"""Weights of 4 bits and torch's products with them; csrc's are in `test_gpu_four_bits.py`."""

from __future__ import annotations

import pytest
import torch
from random_four_bits import GROUPS, random_weight

from trtspec.ops.layer import four_bits


@pytest.mark.parametrize("group", GROUPS)
def test_values_are_kept(group: int | str) -> None:
    weight, values = random_weight(48, 384, group)
    assert weight.shape == (48, 384)
    kept = four_bits.dequantize(weight, torch.float32)
    torch.testing.assert_close(kept.double(), values, atol=0, rtol=2**-23)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rows", [0, 1, 19])
def test_products(group: int | str, rows: int) -> None:
    weight, values = random_weight(80, 384, group)
    x, bias, residual = torch.randn(rows, 384), torch.randn(80), torch.randn(rows, 80)
    expected = x.double() @ values.T
    y = four_bits.multiply(x, weight, bias=bias)
    torch.testing.assert_close(y.double(), expected + bias, atol=1e-3, rtol=1e-5)
    before = residual.clone()
    added = four_bits.multiply(x, weight, residual)
    assert added is residual
    torch.testing.assert_close(added.double(), expected + before, atol=1e-3, rtol=1e-5)
