"""Which thread blocks attention gets in csrc (tests/gpu/test_gpu_attention.py runs them)."""

from __future__ import annotations

import pytest

from trtspec.attention.csrc_kernels import (
    FEW_PAIRS,
    MAX_PAIRS,
    Cluster,
    best_cluster,
    larger,
    most_pairs,
    rows_of_part,
)
from trtspec.attention.split_kv import Layer

OF_8_WARPS = {Cluster(1, 8), Cluster(2, 8), Cluster(4, 8), Cluster(8, 8)}
COMPILED = {
    64: {Cluster(16, 4), Cluster(2, 4), Cluster(1, 4), *OF_8_WARPS},
    128: {Cluster(1, 4), *OF_8_WARPS},
    256: {Cluster(1, 4), Cluster(2, 4), Cluster(4, 4), Cluster(8, 4)},
}
"""By head size, as csrc/attention_impl.cuh has them."""


@pytest.mark.parametrize("dim", [*COMPILED])
@pytest.mark.parametrize("per_kv", [1, 3, 4, 8])
def test_one_row_and_a_few_have_the_same_cluster(dim: int, per_kv: int) -> None:
    layer = Layer(kv_heads=1, per_kv=per_kv, dim=dim, page_size=32)
    for groups in range(1, 600):
        of_rows = {best_cluster(layer, groups, rows) for rows in range(1, FEW_PAIRS // per_kv + 1)}
        assert len(of_rows) == 1


@pytest.mark.parametrize("dim", [*COMPILED])
def test_every_cluster_is_compiled(dim: int) -> None:
    layer = Layer(kv_heads=1, per_kv=1, dim=dim, page_size=32)
    chosen = {best_cluster(layer, n, rows) for n in range(1, 600) for rows in (1, MAX_PAIRS[dim])}
    assert chosen | {*larger(layer)} <= COMPILED[dim]


@pytest.mark.parametrize("dim", [*COMPILED])
@pytest.mark.parametrize("per_kv", [1, 3, 4, 7, 16])
def test_every_part_is_served(dim: int, per_kv: int) -> None:
    layer = Layer(kv_heads=1, per_kv=per_kv, dim=dim, page_size=32)
    for groups in range(1, 300):
        for rows in range(1, most_pairs(layer, groups) // per_kv + 1):
            part = rows_of_part(layer, groups, rows)
            assert 1 <= part <= rows and part * per_kv <= MAX_PAIRS[dim]


def test_rows_of_few_groups_are_parted_more() -> None:
    layer = Layer(kv_heads=3, per_kv=3, dim=64, page_size=32)
    counts = 1, 4, 5, 8
    for requests, parts in {1: (1, 2, 2, 2), 2: (1, 2, 3, 4), 4: (1, 4, 5, 4)}.items():
        assert tuple(rows_of_part(layer, 3 * requests, rows) for rows in counts) == parts
    wide = Layer(kv_heads=8, per_kv=4, dim=128, page_size=32)
    assert [rows_of_part(wide, groups, 8) for groups in (8, 32, 64)] == [8, 4, 8]
