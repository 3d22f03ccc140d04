"""What the kernel of experts of 4 bits is asked to do; its results are compared on a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtspec.ops.experts import fp4, tiles
from trtspec.ops.layer import four_bits

DEVICE = torch.device("meta")


def _x(**changes: Any) -> Any:
    """As rows of 448 columns on a GPU."""
    fields = {"is_cuda": True, "requires_grad": False, "dtype": torch.bfloat16}
    strides, address = changes.pop("strides", (448, 1)), changes.pop("address", 64)
    return SimpleNamespace(
        **{**fields, **changes}, stride=lambda dim: strides[dim], data_ptr=lambda: address
    )


def _weights(inner: int = 448, size: int = 448, count: int = 8) -> Any:
    shapes = torch.Size((count, 2 * inner, size)), torch.Size((count, size, inner))
    return tuple(fp4.empty(shape, DEVICE) for shape in shapes)


@pytest.mark.parametrize(
    ("is_served", "x", "weights", "average"),
    [
        (True, {}, {}, 3.0),
        (True, {"strides": (456, 1)}, {}, 63.9),
        (True, {"requires_grad": True}, {}, 3.0),  # with autograd off, as below
        (False, {"is_cuda": False}, {}, 3.0),
        (False, {"dtype": torch.float16}, {}, 3.0),
        (False, {"strides": (449, 1)}, {}, 3.0),
        (False, {"strides": (896, 2)}, {}, 3.0),
        (False, {"address": 8}, {}, 3.0),
        (False, {}, {}, 64.0),
        (False, {}, {}, 0.0),
        (False, {}, {"inner": 384}, 3.0),
        (False, {}, {"inner": 12352}, 3.0),
        (False, {}, {"size": 384}, 3.0),
        (False, {}, {"count": 1025}, 3.0),
    ],
)
def test_what_it_serves(
    monkeypatch: pytest.MonkeyPatch, is_served: bool, x: Any, weights: Any, average: float
) -> None:
    monkeypatch.setattr(tiles.native, "kernels", lambda x: object())
    with torch.no_grad():
        assert tiles.serve(_x(**x), _weights(**weights), average) is is_served
    if x.get("requires_grad"):
        assert not tiles.serve(_x(**x), _weights(**weights), average)
    monkeypatch.setattr(tiles.native, "kernels", lambda x: None)
    with torch.no_grad():
        assert not tiles.serve(_x(**x), _weights(**weights), average)


@pytest.mark.parametrize("group", [four_bits.NVFP4_GROUP, 32, 128])
@pytest.mark.parametrize(
    ("is_served", "sizes", "average"),
    [
        (True, (512, 512), 23.9),
        (False, (512, 512), 24.0),
        (False, (512, 384), 3.0),
        (True, (7168, 2048), 0.1),
        (False, (512, 14336), 3.0),
    ],
)
def test_which_records_it_serves(
    monkeypatch: pytest.MonkeyPatch,
    group: int,
    is_served: bool,
    sizes: tuple[int, int],
    average: float,
) -> None:
    monkeypatch.setattr(tiles.native, "kernels", lambda x: object())
    size, inner = sizes
    shapes = (8, 2 * inner, size), (8, size, inner)
    weights: Any = tuple(four_bits.empty(shape, group, DEVICE) for shape in shapes)
    assert [weight.shape for weight in weights] == list(shapes)
    x = _x(strides=(size, 1))
    assert tiles.serve(x, weights, average) is is_served
