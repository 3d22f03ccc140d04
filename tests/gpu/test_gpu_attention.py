"""The attention kernel of csrc against float64, for all that it serves."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import pytest
import torch
from matrix import spread
from torch import Tensor

from trtspec import native
from trtspec.attention import csrc_kernels, triton_generations
from trtspec.attention.base import CachedLayer
from trtspec.attention.csrc_kernels import Cluster
from trtspec.attention.online_softmax import kernel_arguments
from trtspec.attention.split_kv import Tables
from trtspec.layers import fused
from trtspec.layers.linear import Linear
from trtspec.ops.layer.rope import CacheWrite, Rope

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs the kernels of csrc (Hopper, nvcc)"),
]
TOLERANCE = {torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Case(NamedTuple):
    q: Tensor
    cached: CachedLayer
    tables: Tables
    rows: int


class Way(NamedTuple):
    """How keys are cut."""

    dim: int
    cluster: Cluster


SIZES = [Cluster(1, 4), Cluster(1, 8), Cluster(2, 8), Cluster(4, 8), Cluster(8, 8)]
WAYS = [
    *(Way(dim, cluster) for dim in (64, 128) for cluster in SIZES),
    *(Way(256, Cluster(size, 4)) for size in (1, 2, 4, 8)),
    Way(64, Cluster(2, 4)),
    Way(64, Cluster(16, 4)),
]


def name_of(way: Way) -> str:
    return "-".join(map(str, (way.dim, *way.cluster)))


@pytest.fixture(params=WAYS, ids=name_of)
def way(request: pytest.FixtureRequest) -> Way:
    return request.param


def make(
    lengths: list[int],
    rows: int,
    kv_heads: int = 2,
    per_kv: int = 4,
    page_size: int = 32,
    window: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    at_last: bool = False,
    dim: int = 128,
) -> Case:
    """Requests of those lengths (their rows included), in pages dealt out at random.

    Wide heads are fewer where the kernel would not serve as many.
    """
    if dim == csrc_kernels.WIDE:
        per_kv = min(per_kv, csrc_kernels.MAX_PAIRS[dim] // rows)
    torch.manual_seed(sum(lengths) + rows)
    pages = [-(-length // page_size) for length in lengths]
    order = list(range(sum(pages) + 3))
    random.Random(1).shuffle(order)
    table = torch.zeros((len(lengths), max(pages)), dtype=torch.int32)
    for row, count in enumerate(pages):
        table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
    # Another layer lies between: heads are dense, rows are not.
    slots = torch.randn(2, (sum(pages) + 3) * page_size, 2 * kv_heads, dim).to("cuda", dtype)
    starts = [length - (1 if at_last else rows) for length in lengths]
    steps = torch.zeros(rows) if at_last else torch.arange(rows)
    positions = (torch.tensor(starts)[:, None] + steps[None, :]).long().flatten()
    q = torch.randn(len(lengths) * rows, kv_heads * per_kv, dim).to("cuda", dtype)
    k, v = (x[:, :kv_heads] for x in slots)
    cached = CachedLayer(k_slots=k, v_slots=v, page_size=page_size, window=window)
    return Case(q, cached, Tables(table.cuda(), positions.cuda()), rows)


def reference(case: Case) -> Tensor:
    q, cached, tables, rows = case
    per_kv = q.shape[1] // cached.kv_heads
    out = torch.empty(q.shape, dtype=torch.float64)
    sinks = torch.full((q.shape[1],), -torch.inf, dtype=torch.float64)
    sinks = (sinks if cached.sinks is None else cached.sinks.cpu().double())[:, None]
    request_of = torch.arange(len(q)) // rows
    if tables.starts is not None:
        counts = tables.starts.diff().cpu().long()
        request_of = torch.arange(len(counts)).repeat_interleave(counts)
    slots = [x.cpu().double() for x in (cached.k_slots, cached.v_slots)]
    for i, position in enumerate(tables.positions.tolist()):
        first = 0 if cached.window is None else max(position - cached.window + 1, 0)
        n = torch.arange(first, position + 1)
        pages = tables.blocks[request_of[i]].cpu()[n // cached.page_size].long()
        at = pages * cached.page_size + n % cached.page_size
        k, v = (x[at].repeat_interleave(per_kv, 1) for x in slots)
        scores = torch.einsum("hd,nhd->hn", q[i].cpu().double(), k) * q.shape[2] ** -0.5
        weights = torch.cat((scores, sinks), 1).softmax(-1)[:, :-1]
        out[i] = torch.einsum("hn,nhd->hd", weights, v)
    return out


def attend(case: Case, way: Way) -> Tensor:
    """By the kernel with that cluster, whatever `attend` would choose."""
    q, cached, tables, rows = case
    out = torch.empty_like(q)
    layer, queries = kernel_arguments(q, cached, out)
    assert layer.dim == way.dim
    args = native.kernels(q), queries, cached, tables, layer, rows
    csrc_kernels.attend_clusters(*args, way.cluster)
    return out


def check(case: Case, way: Way) -> None:
    out = attend(case, way)
    assert torch.equal(out, attend(case, way)), "the same bits every time"
    error = (out.cpu().double() - reference(case)).abs().max()
    assert error < TOLERANCE[case.q.dtype]


def lengths(count: int, longest: int) -> list[int]:
    rng = random.Random(count)
    return [rng.randint(24, longest) for _ in range(count)]


@spread(
    heads=[(1, 1), (2, 4), (3, 3), (8, 2)], rows=[1, 2, 4, 8], count=[1, 3, 33, 70],
    page_size=[16, 32, 128], window=[None, 5, 200], dtype=[torch.bfloat16, torch.float16], of=WAYS,
)  # fmt: skip
def test_equals_float64(
    heads: tuple[int, int], rows: int, count: int, page_size: int, window: int | None,
    dtype: torch.dtype, of: Way,
) -> None:  # fmt: skip
    case = make(lengths(count, 700), rows, *heads, page_size, window, dtype, dim=of.dim)
    check(case, of)


@spread(
    heads=[(1, 1), (2, 4), (8, 8)], rows=[1, 4], longest=[40, 700], window=[None, 128],
    dtype=[torch.bfloat16, torch.float16], of=WAYS,
)  # fmt: skip
def test_sinks(
    heads: tuple[int, int], rows: int, longest: int, window: int | None, dtype: torch.dtype, of: Way
) -> None:
    """Of scores' size, far below them, and so far above that nothing is left."""
    case = make(lengths(9, longest), rows, *heads, window=window, dtype=dtype, dim=of.dim)
    sinks = torch.linspace(-4, 6, case.q.shape[1], device="cuda").to(dtype)
    sinks[0] = 2.0
    check(case._replace(cached=case.cached._replace(sinks=sinks)), of)
    for value in (-300.0, 300.0):
        sinks.fill_(value)
        check(case._replace(cached=case.cached._replace(sinks=sinks)), of)


@pytest.mark.parametrize("length", [16, 17, 63, 64, 65, 128, 255, 1000])
@pytest.mark.parametrize("rows", [1, 4])
def test_every_length(length: int, rows: int, way: Way) -> None:
    check(make([length], rows, dim=way.dim), way)
    check(make([length, 16, length], rows, per_kv=3, dim=way.dim), way)


@pytest.mark.parametrize("way", [Way(64, Cluster(16, 4)), Way(128, Cluster(8, 8))], ids=name_of)
def test_very_long_texts(way: Way) -> None:
    check(make([40_000, 16, 39_999], 4, per_kv=3, dim=way.dim), way)


def test_one_long_request_beside_many_short_ones(way: Way) -> None:
    check(make([9000, *[40] * 40], 4, dim=way.dim), way)


def test_rows_that_are_all_at_the_last_position(way: Way) -> None:
    check(make(lengths(5, 300), 8, at_last=True, dim=way.dim), way)


def test_requests_with_different_numbers_of_rows(way: Way) -> None:
    case = make(lengths(40, 900), 4, dim=way.dim)
    counts = [1 + i % 4 for i in range(40)]
    keep = [4 * i + j for i, count in enumerate(counts) for j in range(count)]
    starts = torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32)
    tables = case.tables._replace(positions=case.tables.positions[keep], starts=starts)
    check(case._replace(q=case.q[keep], tables=tables), way)


@pytest.mark.parametrize("has_starts", [False, True])
def test_rows_in_parts_have_the_same_bits(
    has_starts: bool, way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters share a request's rows, or one has all of them."""
    most = csrc_kernels.MAX_PAIRS[way.dim] // 2
    case = make(lengths(5, 900), most, per_kv=2, window=300, dim=way.dim)
    if has_starts:
        counts = [most, 1, 2, most - 1, 3]
        keep = [most * i + j for i, count in enumerate(counts) for j in range(count)]
        starts = torch.tensor([0, *counts]).cumsum(0).to("cuda", torch.int32)
        tables = case.tables._replace(positions=case.tables.positions[keep], starts=starts)
        case = case._replace(q=case.q[keep], tables=tables)
    found = []
    for part in (most, most - 1, most // 2, 3, 1):
        monkeypatch.setattr(csrc_kernels, "rows_of_part", lambda *_, part=part: part)
        found.append(attend(case, way))
    check(case, way)
    assert all(torch.equal(out, found[0]) for out in found)


@pytest.mark.parametrize("rows", [1, 8])
def test_windows_of_many_blocks(rows: int, way: Way) -> None:
    check(make([3000, 700, 2000], rows, window=1000, dim=way.dim), way)


@pytest.mark.parametrize("length", [300, 900])
def test_nan_reaches_the_rows_that_see_it_and_no_other_request(length: int, way: Way) -> None:
    case = make([length] * 3, 1, dim=way.dim)
    page = int(case.tables.blocks[1, 4])
    case.cached.k_slots[page * 32 + 3, 0] = float("nan")
    out = attend(case, way)
    assert out[1, :4].isnan().all()
    assert not out[1, 4:].isnan().any() and not out[[0, 2]].isnan().any()


def test_what_lies_behind_the_last_key_does_not_matter(way: Way) -> None:
    case = make([300, 290], 4, dim=way.dim)
    expected = attend(case, way)
    for row, length in enumerate([300, 290]):
        page, offset = int(case.tables.blocks[row, length // 32]), length % 32
        for x in (case.cached.k_slots, case.cached.v_slots):
            x[page * 32 + offset : page * 32 + 32] = float("nan")
    assert torch.equal(attend(case, way), expected)


def test_a_graph_reads_what_the_kernel_before_it_wrote(way: Way) -> None:
    """A product that writes keys and queries, and starts its successor early, for growing texts."""
    case = make([500] * 20, 4, dim=way.dim)
    layer = Linear(256, 12 * way.dim, bias=False).to("cuda", torch.bfloat16)
    assert layer.weight is not None
    torch.nn.init.normal_(layer.weight, std=1 / 16)
    x = torch.randn(80, 256, device="cuda", dtype=torch.bfloat16)
    assert fused._kernels((x,), layer, ()) is not None
    half = torch.ones(1000, way.dim // 2, device="cuda")
    rope = Rope(torch.cat([half, 0 * half], -1), case.tables.positions)  # turns nothing
    slots = torch.zeros(80, dtype=torch.int64, device="cuda")
    to = CacheWrite(case.cached.k_slots, case.cached.v_slots, slots, scratch_slot=0)
    pages = case.tables.blocks.long().repeat_interleave(4, 0)

    def step() -> tuple[Tensor, Tensor]:
        positions = case.tables.positions
        slots.copy_(pages.gather(1, positions[:, None] // 32)[:, 0] * 32 + positions % 32)
        q = fused.qkv_rope_and_write((x,), layer, (), rope, 8, to)
        return q, attend(case._replace(q=q), way)

    case.tables.positions.sub_(300)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, out = step()
    for _ in range(30):
        x.normal_()
        graph.replay()
        error = (out.cpu().double() - reference(case._replace(q=q))).abs().max()
        assert error < TOLERANCE[torch.bfloat16]
        case.tables.positions.add_(3)


@pytest.mark.parametrize(
    ("dim", "cluster", "rows", "requests"),
    [
        (64, (16, 4), 1, 1), (64, (16, 4), 8, 4), (64, (16, 4), 16, 4),
        (64, (4, 8), 1, 5), (64, (4, 8), 4, 18),
        (64, (2, 8), 1, 35), (64, (1, 8), 1, 36), (64, (1, 8), 4, 36),
        (64, (2, 4), 5, 36), (64, (2, 4), 8, 79),
        (64, (1, 8), 4, 80), (64, (1, 8), 1, 128), (64, (1, 4), 1, 129),
        (128, (8, 8), 1, 4), (128, (4, 8), 8, 5), (128, (4, 8), 1, 12), (128, (2, 8), 4, 32),
        (128, (4, 8), 16, 9),
        (128, (1, 8), 1, 33), (128, (1, 8), 4, 80), (128, (1, 4), 8, 81),
        (256, (8, 4), 4, 8), (256, (4, 4), 1, 9), (256, (4, 4), 4, 12), (256, (2, 4), 1, 13),
        (256, (2, 4), 8, 33), (256, (1, 4), 4, 34),
    ],
)  # fmt: skip
def test_each_is_used_where_it_pays(
    dim: int, cluster: tuple[int, int], rows: int, requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, calls = make(lengths(requests, 100), rows, dim=dim), list[Cluster]()
    expected = attend(case, Way(dim, Cluster(*cluster)))
    clusters = csrc_kernels.attend_clusters

    def recording(*args: Any) -> None:
        calls.append(args[6])
        clusters(*args)

    monkeypatch.setattr(csrc_kernels, "attend_clusters", recording)
    assert torch.equal(triton_generations.paged_attention(*case), expected)
    assert calls == [cluster]


@pytest.mark.parametrize(
    ("dim", "longest", "requests", "cluster"),
    [
        (64, 8_000, 36, (1, 8)), (64, 8_300, 36, (2, 8)), (64, 20_000, 31, (4, 8)),
        (64, 40_000, 31, (8, 8)), (128, 4_000, 90, (1, 4)), (128, 4_300, 90, (1, 8)),
        (128, 16_000, 34, (2, 8)), (128, 40_000, 4, (8, 8)),
        (256, 4_300, 90, (2, 4)), (256, 8_300, 20, (4, 4)),
    ],
)  # fmt: skip
def test_longer_texts_have_more_thread_blocks(
    dim: int, longest: int, requests: int, cluster: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    case, calls = make([*[40] * (requests - 1), longest], 1, dim=dim), list[object]()
    monkeypatch.setattr(csrc_kernels, "attend_clusters", lambda *args: calls.append(args[6]))
    triton_generations.paged_attention(*case)
    assert calls == [cluster]


@pytest.mark.parametrize(
    ("dim", "rows", "lengths"),
    [
        (128, 9, [90] * 20),
        (128, 17, [90] * 10),
        (256, 1, [*[40] * 33, 9_000]),
        (64, 17, [90] * 4),
        (64, 9, [90] * 5),
        (64, 1, [40, 66_000]),
        (64, 1, [*[40] * 40, 20_000]),
        (128, 1, [*[40] * 33, 20_000]),
    ],
)
def test_many_rows_and_very_long_texts_are_left_to_triton(
    dim: int, rows: int, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csrc_kernels, "attend_clusters", None)
    triton_generations.paged_attention(*make(lengths, rows, dim=dim))


@pytest.mark.parametrize("change", ["softcap", "sinks", "firsts", "float32", "page_size"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_rest_is_left_to_triton(change: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, cached, tables, rows = make(lengths(40, 100), 1, page_size=32, dim=dim)
    monkeypatch.setattr(csrc_kernels, "attend_clusters", None)
    if change == "softcap":
        cached = cached._replace(softcap=30.0)
    elif change == "sinks":
        cached = cached._replace(sinks=torch.zeros(8, device="cuda"))
    elif change == "firsts":
        tables = tables._replace(firsts=torch.zeros_like(tables.positions))
    elif change == "float32":
        q = q.float()
        cached = cached._replace(k_slots=cached.k_slots.float(), v_slots=cached.v_slots.float())
    else:
        cached = cached._replace(page_size=8)
        tables = tables._replace(blocks=tables.blocks.repeat_interleave(4, 1))
    out = triton_generations.paged_attention(q, cached, tables, rows)
    assert out.isfinite().all()
