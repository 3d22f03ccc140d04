"""Which tensors the fused products take, and which they leave to other kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from trtspec import native
from trtspec.layers import fused
from trtspec.layers.embedding import Embedded
from trtspec.layers.fused import _takes_rope
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.ops.layer.rope import CacheWrite, Rope, apply_rope


def test_a_table_that_begins_between_two_numbers_is_left_to_other_kernels() -> None:
    """Cosines are read two at a time: an address that is no multiple of 8 bytes would fault."""
    memory = torch.zeros(2 * 16 * 8 + 1)
    positions, keys = torch.zeros(3, dtype=torch.int64), torch.zeros(5, 2, 8)
    to = CacheWrite(keys, keys, positions, 0)
    for first, is_taken in ((0, True), (1, False), (2, True)):
        table = memory[first : first + 16 * 8].view(16, 8)
        assert table.data_ptr() % 8 == first % 2 * 4
        assert _takes_rope(Rope(table, positions), to, torch.float32) == is_taken


def test_which_product_looks_embeddings_up() -> None:
    """One of a small weight and two normed inputs, from a table as the kernel reads it."""
    layer, table = Linear(128, 48, bias=False), torch.zeros(50, 64)
    ids, hidden, norms = torch.arange(2), torch.zeros(2, 64), (RMSNorm(64, 1e-6), RMSNorm(64, 1e-6))

    def is_looked_up(first: Tensor | Embedded, *others: Tensor, layer: Linear = layer) -> bool:
        return fused._table_of((first, *others), layer, norms[: len(others) + 1]) is first

    with torch.inference_mode():
        assert is_looked_up(Embedded(ids, table), hidden)
        assert is_looked_up(Embedded(ids.int(), table), hidden)
        assert not is_looked_up(table[:2], hidden)
        assert not is_looked_up(Embedded(ids, table))
        assert not is_looked_up(Embedded(ids, table.double()), hidden)
        assert not is_looked_up(Embedded(ids, table[:, :32]), hidden)
        assert not is_looked_up(Embedded(ids.short(), table), hidden)
        assert not is_looked_up(Embedded(ids, table), hidden, layer=Linear(128, 40, bias=False))
        large = Linear(128, fused.LARGE_NARROW // 128 // 16 * 16 + 16, bias=False)
        assert not is_looked_up(Embedded(ids, table), hidden, layer=large)
    trained = table.clone().requires_grad_()
    assert not is_looked_up(Embedded(ids, trained), hidden)
    rows = fused._looked_up((Embedded(ids, trained), hidden))[0]
    assert rows.requires_grad and torch.equal(rows, table[:2])


def test_products_of_other_modules() -> None:
    """Whatever maps [T, in] to [T, out] is called as it is."""
    layer, table = torch.nn.Linear(128, 48), torch.randn(50, 64)
    ids, hidden, norms = torch.arange(2), torch.randn(2, 64), (RMSNorm(64, 1e-6), RMSNorm(64, 1e-6))
    of_heads = RMSNorm(8, 1e-6), RMSNorm(8, 1e-6)
    for norm in (*norms, *of_heads):
        norm.weight.data.normal_()
    keys, values = torch.zeros(2, 5, 1, 8)
    to = CacheWrite(keys, values, torch.arange(2), 4)
    rope = Rope(torch.randn(16, 8), torch.arange(2))
    inputs = Embedded(ids, table), hidden
    with torch.inference_mode():
        normed = [norm(x) for norm, x in zip(norms, (table[:2], hidden), strict=True)]
        expected = layer(torch.cat(normed, dim=-1))
        assert torch.equal(fused.linear(inputs, layer, norms), expected)
        q = fused.qkv_rope_and_write(inputs, layer, norms, rope, 4, to, of_heads)
        heads = expected.view(2, 6, 8)
        cos, sin = rope.rotation(torch.float32)
        assert torch.equal(q, apply_rope(of_heads[0](heads[:, :4]), cos, sin))
        assert torch.equal(values[:2], heads[:, 5:])


def test_whose_heads_a_product_norms() -> None:
    """Of one normed input and a small weight, if both norms are alike."""
    layer, x, norm = Linear(64, 6 * 64, bias=False), torch.zeros(2, 64), RMSNorm(64, 1e-6)
    of_heads = RMSNorm(64, 1e-6), RMSNorm(64, 1e-6)

    def is_normed(
        layer: Linear = layer, dim: int = 64, count: int = 1, norms: int = 1, **changes: float
    ) -> bool:
        k_norm = RMSNorm(dim, changes.get("eps", 1e-6), changes.get("offset", 0.0))
        q_norm = of_heads[0] if dim == 64 else RMSNorm(dim, 1e-6)
        return fused._norms_heads((q_norm, k_norm), dim, (x,) * count, layer, (norm,) * norms)

    with torch.inference_mode():
        assert is_normed() and is_normed(dim=32) and is_normed(dim=256)
        assert not is_normed(dim=48) and not is_normed(dim=288)
        assert not is_normed(eps=1e-5) and not is_normed(offset=1.0)
        assert not is_normed(count=2, norms=2) and not is_normed(norms=0)
        assert not is_normed(Linear(2048, 4096, bias=False))
        assert not fused._norms_heads((of_heads[0], of_heads[1].double()), 64, (x,), layer, (norm,))
    of_heads[0].weight.requires_grad_()
    assert not is_normed()


# -- weights in 16 bits, by the rules of decision 029 --------------------------------------------
def rows_served(
    outs: int, columns: int, *, has_norms: bool = False, is_gated: bool = False
) -> list[int]:
    weight = torch.empty(outs, columns, device="meta")
    return [
        rows
        for rows in range(1, fused.MAX_TILED_ROWS + 1)
        if fused._reads_floats(
            weight, (torch.empty(rows, columns, device="meta"),), has_norms, is_gated
        )
    ]


def up_to(most: int) -> list[int]:
    return list(range(1, most + 1))


@pytest.fixture(params=[132, 128, 114, 78, 148])
def room(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """An H200's multiprocessors, and those of other GPUs."""
    monkeypatch.setattr(native, "multiprocessors", lambda device: request.param)
    return int(request.param)


def test_a_small_models_layer(room: int) -> None:
    """SmolLM2-135M's. gate_up has 2 × 64 blocks of 80 × 48, down_proj 3 × 18 × 2 of 64 × 32."""
    assert rows_served(960, 576, has_norms=True) == up_to(256)
    assert rows_served(576, 576) == up_to(256)
    gate_up = 160 if room >= 128 else 250_000_000 // (3072 * 576)
    assert rows_served(3072, 576, has_norms=True, is_gated=True) == up_to(gate_up)
    down = 192 if room >= 108 else 115_000_000 // (576 * 1536)
    assert rows_served(576, 1536) == up_to(down)


def test_a_normed_product_that_is_not_gated_ends_earlier(room: int) -> None:
    assert rows_served(3072, 576, has_norms=True) == up_to(250_000_000 // (3072 * 576))


@pytest.mark.parametrize(
    ("outs", "columns", "has_norms", "is_gated", "blocks"),
    [
        (4096, 2048, True, False, [128, 86]),  # of 32 outputs, of 48
        (3072, 2048, True, False, [96, 64]),
        (6144, 4096, True, False, [192, 128]),
        (2048, 2048, False, False, [128, 64]),  # of 32, two or one of which have all columns
        (2048, 2048 + 32, False, False, [128, 64]),
        (3584, 3584, False, False, [224, 112]),
        (4096, 4096, False, False, [256]),
        (2048, 6144, False, False, [128]),
        (2048, 8192, False, False, [128]),
        (12288, 2048, True, True, [128, 96]),  # of 96, of 128
        (16384, 2048, True, True, [171, 128]),
        (16384, 3072, True, True, [171]),
    ],
)
def test_17_to_32_rows_of_a_large_weight(
    room: int, outs: int, columns: int, has_norms: bool, is_gated: bool, blocks: list[int]
) -> None:
    """Two of three multiprocessors must have a block, and none two."""
    fills = any(2 * room <= 3 * number <= 3 * room for number in blocks)
    served = rows_served(outs, columns, has_norms=has_norms, is_gated=is_gated)
    assert served == up_to(32 if fills else 16)


def test_other_large_weights_end_at_few_rows(room: int) -> None:
    assert rows_served(2048, 8192 + 32) == up_to(16)  # more columns were not measured
    assert rows_served(4098, 2048) == up_to(16)  # outputs are no multiple of 16
    assert rows_served(49152, 576, has_norms=True) == up_to(8)  # too few columns


def test_gate_and_up_without_a_norm_are_large(room: int) -> None:
    """Others were not measured."""
    assert rows_served(8192, 2048, is_gated=True) == up_to(16)
    assert rows_served(13824, 1152, is_gated=True) == up_to(8)
    assert rows_served(3072, 576, is_gated=True) == []
