"""The kernels of csrc against float64, and against the torch code that they stand in for."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from matrix import covering
from torch import Tensor

from trtspec import EagleDecodingConfig, MTPDecodingConfig, native
from trtspec.layers import fused
from trtspec.layers.embedding import Embedded
from trtspec.layers.linear import Linear
from trtspec.layers.norm import RMSNorm
from trtspec.metadata import SpecMetadata
from trtspec.ops.layer.activation import GateAndMul
from trtspec.ops.layer.rope import CacheWrite, Rope, apply_rope
from trtspec.ops.step.window import update_window
from trtspec.ops.tokens import greedy as choose
from trtspec.ops.tokens import markov_walk
from trtspec.ops.tokens.markov_walk import MarkovTables
from trtspec.ops.tokens.sample import greedy_tokens
from trtspec.workers import Eagle3OneModelWorker, MTPEagleWorker

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
DTYPES = [torch.bfloat16, torch.float16]
# (in, out): kernels for small, deep, large, and large but narrow weights; not all divide by tiles.
SIZES = [
    (64, 24), (576, 960), (576, 976), (384, 2064), (1536, 576), (1536, 592), (96, 40),
    (2560, 960), (2592, 528), (640, 80), (672, 80), (5120, 96), (5152, 96),
    (4096, 1040), (2048, 4098), (2048, 2048), (6144, 2048), (2048, 4112), (14336, 512),
    (576, 7300), (1024, 4104), (32, 131_080), (1024, 4096), (896, 9728), (4096, 64), (2080, 96),
]  # fmt: skip
ROWS = [1, 3, 8, 9, 16, 17, 32, 33, 64, 65, 100, 130, 150, 190, 256, 257]


def _random(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


def _linear(size: int, out: int, dtype: torch.dtype, bias: bool = False) -> Linear:
    layer = Linear(size, out, bias).cuda().to(dtype)
    assert layer.weight is not None
    layer.weight.data = _random(out, size, dtype=dtype, seed=1) * size**-0.5
    if layer.bias is not None:
        layer.bias.data = _random(out, dtype=dtype, seed=2)
    return layer


def _norm(size: int, dtype: torch.dtype, seed: int = 3) -> RMSNorm:
    norm = RMSNorm(size, 1e-5).cuda()
    norm.weight.data = 1 + 0.3 * _random(size, dtype=dtype, seed=seed)
    return norm


def _exact(x: Tensor, norm: RMSNorm | None = None) -> Tensor:
    """float64, normed."""
    x = x.double()
    if norm is None:
        return x
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps)
    return x * scale * (norm.weight.double() + norm.offset)


def _product(x: Tensor, layer: Linear) -> Tensor:
    assert layer.weight is not None
    bias = None if layer.bias is None else layer.bias.double()
    return F.linear(x, layer.weight.double(), bias)


def _close(ours: Tensor, exact: Tensor) -> None:
    rounding = 2.0 ** (-8 if ours.dtype == torch.bfloat16 else -11)
    worst = (ours.double() - exact).abs().max() / exact.abs().max()
    assert worst < 4 * rounding, worst


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels called: a test must not pass because a fallback ran."""
    calls: list[str] = []
    module = native.kernels(torch.empty(1, device="cuda"))

    class Spy:
        def __getattr__(self, name: str) -> object:
            calls.append(name)
            return getattr(module, name)

    monkeypatch.setattr(native, "kernels", lambda x: Spy() if x.is_cuda else None)
    return calls


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_linear(dtype: torch.dtype, size: tuple[int, int], served: list[str]) -> None:
    plain, biased = (_linear(*size, dtype, bias) for bias in (False, True))
    norm = _norm(size[0], dtype)
    for rows in ROWS:
        x = _random(rows, size[0] + 32, dtype=dtype)[:, : size[0]]  # rows apart in memory
        residual = _random(rows, size[1], dtype=dtype, seed=4)
        _close(fused.linear((x,), plain), _product(_exact(x), plain))
        _close(fused.linear((x,), biased, (norm,)), _product(_exact(x, norm), biased))
        expected = _product(_exact(x), plain) + residual
        before = residual.clone()
        _close(fused.linear((x,), plain, residual=residual), expected)
        assert torch.equal(residual, before)
        out = fused.linear((x,), plain, residual=residual, in_place=True)
        assert out.data_ptr() == residual.data_ptr()
        _close(out, expected)
    assert len(served) == sum(
        3 * (rows <= _most_rows(size, False))
        + (rows <= _most_rows(size, True) and dtype == torch.bfloat16)
        for rows in ROWS
    )


def test_one_output(served: list[str]) -> None:
    """As DSpark's confidence head has it."""
    layer = _linear(640, 1, torch.bfloat16, bias=True)
    for rows in ROWS:
        x = _random(rows, 640)
        _close(fused.linear((x,), layer), _product(_exact(x), layer))
    assert len(served) == sum(rows <= _most_rows((640, 1), False) for rows in ROWS)


@pytest.mark.parametrize("size", SIZES)
def test_norms_with_an_offset(size: tuple[int, int], served: list[str]) -> None:
    """Gemma's: their weights are differences from one."""
    layer, norm = _linear(*size, torch.bfloat16), _norm(size[0], torch.bfloat16)
    norm.weight.data -= 1
    norm.offset = 1.0
    other = _norm(size[0], torch.bfloat16)
    counts = [rows for rows in ROWS if rows <= _most_rows(size, True)]
    for rows in counts:
        x = _random(rows, size[0])
        _close(fused.linear((x,), layer, (norm,)), _product(_exact(x, norm), layer))
    assert served == ["linear"] * len(counts)
    assert fused._kernels((x, x), layer, (norm, other)) is None  # of two with one offset


@pytest.mark.parametrize(
    ("size", "rows"),
    [((1536, 576), 4), ((1536, 576), 100), ((2592, 528), 20), ((96, 40), 5), ((4096, 1040), 3)],
)
def test_a_sum_is_written_twice(size: tuple[int, int], rows: int, served: list[str]) -> None:
    """To the residual's memory, and to some columns of another matrix."""
    layer, x = _linear(*size, torch.bfloat16), _random(rows, size[0])
    residual, out = _random(rows, size[1], seed=4), size[1]
    wide = torch.zeros(rows, 3 * out, device="cuda", dtype=torch.bfloat16)
    expected = _product(_exact(x), layer) + residual
    total = fused.linear(
        (x,), layer, residual=residual, in_place=True, copy_to=wide[:, out : 2 * out]
    )
    _close(total, expected)
    assert torch.equal(wide[:, out : 2 * out], total)
    assert not wide[:, :out].any() and not wide[:, 2 * out :].any()
    assert served == ["linear"]


def _most_rows(size: tuple[int, int], normed: bool, inputs: int = 1, is_gated: bool = False) -> int:
    """As far as the kernels are used for weights of (in, out)."""
    values = size[0] * size[1]
    is_tiled = size[1] % 16 == 0 and (inputs == 1 or normed)
    is_narrow = is_tiled and size[0] <= fused.NARROW
    if values >= (fused.LARGE_NARROW if is_narrow else fused.LARGE):
        is_deep = size[0] >= 2048 and inputs == 1
        in_32 = -(-size[1] // 32)
        blocks = [in_32, -(-size[1] // 48)] if normed else [2 * in_32, in_32 * (size[0] <= 3584)]
        if is_gated:
            blocks = [-(-size[1] // 96), -(-size[1] // 128) * (size[0] <= 2048)]
        if is_deep and size[0] <= 8192 and is_tiled and any(88 <= n <= 132 for n in blocks):
            return 32
        few, many = ((n << 10) // (2 * size[0] + 64) if normed else 16 for n in (104, 140))
        return min(16, many) if is_deep and many > 8 else min(8, few)
    most = fused.MAX_TILED_NORMED_PRODUCTS if normed else fused.MAX_TILED_PRODUCTS
    few, most = 32 if values < fused.LARGE else 16, most // values
    if size[1] % 16:
        return few
    if not normed and 1536 <= size[0] <= 3072 and size[1] <= 704:
        most = max(most, 192)
    if is_gated and size[0] <= 640 and size[1] >= 2048:
        most = max(most, 80 * (132 // -(-size[1] // 48)))
    return max(few, min(256, most))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size", [(64, 48), (1152, 960), (1216, 40), (192, 2064), (8192, 1024), (4096, 96)]
)
def test_two_inputs_with_their_own_norms(
    dtype: torch.dtype, size: tuple[int, int], served: list[str]
) -> None:
    layer, half = _linear(*size, dtype), size[0] // 2
    norms, most = (_norm(half, dtype), _norm(half, dtype, seed=5)), 0
    for rows in ROWS:
        x = [_random(rows, half, dtype=dtype, seed=i) * scale for i, scale in ((0, 1), (1, 30))]
        for chosen in ((), norms):
            parts = [_exact(t, n) for t, n in zip(x, chosen or (None, None), strict=True)]
            _close(fused.linear((x[0], x[1]), layer, chosen), _product(torch.cat(parts, -1), layer))
        most += rows <= min(32, _most_rows(size, False, 2))  # without norms
        most += dtype == torch.bfloat16 and rows <= _most_rows(size, True, 2)
    assert served == ["linear"] * most


def test_a_row_of_two_inputs_does_not_depend_on_the_others() -> None:
    layer = _linear(1152, 960, torch.bfloat16)
    norms = _norm(576, torch.bfloat16), _norm(576, torch.bfloat16, seed=5)
    most = _most_rows((1152, 960), True)
    x0, x1 = _random(most, 576), _random(most, 576, seed=7)
    together = fused.linear((x0, x1), layer, norms)
    for rows in (1, 4, 16, 17, 32, 33, 128, 200):
        alone = fused.linear((x0[:rows], x1[:rows]), layer, norms)
        assert torch.equal(alone, together[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size",
    [
        (64, 32),
        (64, 48),
        (576, 3072),
        (640, 2080),
        (2560, 1024),
        (2048, 4096),
        (2048, 12288),
        (2048, 16384),
        (1024, 6144),
        (896, 9728),
        (1152, 13824),
    ],
)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated(
    dtype: torch.dtype, size: tuple[int, int], bias: bool, is_gelu: bool, served: list[str]
) -> None:
    layer, norm = _linear(*size, dtype, bias), _norm(size[0], dtype)
    between = GateAndMul(is_gelu)
    activation = partial(F.gelu, approximate="tanh") if is_gelu else F.silu
    most = _most_rows(size, True, is_gated=True)
    counts = [rows for rows in (1, 5, 8, 20, 32, 40, 80, 90, 128, 150, 160, 161) if rows <= most]
    for rows in counts:
        x = _random(rows, size[0], dtype=dtype)
        gate, up = _product(_exact(x, norm), layer).chunk(2, dim=-1)
        _close(fused.gated(x, layer, norm, between), activation(gate) * up)
    assert served == (["linear_gated"] * len(counts) if dtype == torch.bfloat16 else [])


@pytest.mark.parametrize("size", [(2048, 4096), (2048, 12288), (4096, 8192)])
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated_without_a_norm(size: tuple[int, int], is_gelu: bool, served: list[str]) -> None:
    """As in EXAONE-4 and OLMo-2, whose norms stand behind their MLPs."""
    layer, between = _linear(*size, torch.bfloat16, True), GateAndMul(is_gelu)
    activation = partial(F.gelu, approximate="tanh") if is_gelu else F.silu
    x = _random(16, size[0])
    gate, up = _product(_exact(x), layer).chunk(2, dim=-1)
    together = fused.gated(x, layer, None, between)
    _close(together, activation(gate) * up)
    for rows in (1, 5, 8, 9):
        assert torch.equal(fused.gated(x[:rows], layer, None, between), together[:rows])
    assert served == ["linear_gated"] * 5
    fused.gated(_random(20, size[0]), layer, None, between)
    assert served.count("linear_gated") == 5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "rows"),
    [
        ((9, 3, 64, 576), 5), ((9, 3, 64, 576), 20), ((9, 3, 64, 576), 130),
        ((32, 8, 128, 4096), 5), ((4, 4, 16, 64), 5), ((4, 4, 16, 64), 70), ((4, 2, 128, 512), 33),
        ((9, 3, 64, 2560), 5), ((24, 4, 64, 576), 100), ((24, 4, 128, 2048), 20),
    ],
)  # fmt: skip
def test_rope_and_cache(
    dtype: torch.dtype, heads: tuple[int, int, int, int], rows: int, served: list[str]
) -> None:
    q_heads, kv_heads, dim, size = heads
    layer = _linear(size, (q_heads + 2 * kv_heads) * dim, dtype, bias=True)
    norm = _norm(size, dtype)
    x = _random(rows, size, dtype=dtype)
    angles = 10 * _random(40, dim // 2, dtype=torch.float32, seed=6)
    rng = random.Random(rows)
    positions = torch.tensor([rng.randrange(40) for _ in range(rows)], device="cuda")
    rope = Rope(torch.cat([angles.cos(), angles.sin()], -1), positions)
    slots = torch.tensor(rng.sample(range(2 * rows), rows), device="cuda")
    slots[2] = -1
    scratch = 2 * rows
    caches = [
        torch.zeros(scratch + 1, 2, kv_heads, dim, dtype=dtype, device="cuda")[:, 1] for _ in "kv"
    ]
    to = CacheWrite(caches[0], caches[1], slots, scratch_slot=scratch)
    q = fused.qkv_rope_and_write((x,), layer, (norm,), rope, q_heads, to)
    assert served == (["linear_rope"] if dtype == torch.bfloat16 else [])
    qkv = _product(_exact(x, norm), layer).view(rows, -1, dim)
    cos, sin = (t.double() for t in rope.rotation(dtype))
    turned = apply_rope(qkv[:, : q_heads + kv_heads], cos, sin)
    _close(q, turned[:, :q_heads])
    _close(caches[0][slots], turned[:, q_heads:])
    _close(caches[1][slots], qkv[:, q_heads + kv_heads :])
    untouched = [i for i in range(scratch) if i not in slots.tolist()]
    assert not any(cache[untouched].any() for cache in caches)
    x[2] = float("nan")
    to = to._replace(keeps_finite=True)
    fused.qkv_rope_and_write((x,), layer, (norm,), rope, q_heads, to)
    assert all(cache.isfinite().all() for cache in caches) and not caches[1][scratch].any()


@pytest.mark.parametrize(
    ("heads", "rows", "has_tiles"),
    [
        ((9, 3, 64, 576), 5, True), ((9, 3, 64, 576), 17, True), ((9, 3, 64, 576), 130, True),
        ((36, 4, 64, 576), 70, True), ((36, 4, 64, 576), 97, True), ((20, 4, 64, 1024), 70, True),
        ((16, 8, 128, 1024), 1, True), ((16, 8, 128, 1024), 16, True),
        ((16, 8, 128, 1024), 33, True), ((16, 8, 128, 2048), 1, False),
        ((16, 8, 128, 2048), 20, False), ((4, 1, 256, 640), 8, True), ((4, 4, 96, 576), 3, True),
        ((24, 4, 96, 576), 100, True), ((8, 2, 32, 576), 5, True), ((4, 1, 224, 448), 9, True),
        ((4, 4, 48, 576), 3, False), ((4, 1, 288, 576), 3, False),
        ((32, 8, 128, 4096), 5, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rope_behind_norms_of_heads(
    heads: tuple[int, int, int, int], rows: int, has_tiles: bool, offset: float, served: list[str]
) -> None:
    """As Qwen3 and Gemma-3 have them."""
    q_heads, kv_heads, dim, size = heads
    kind = torch.bfloat16
    layer, norm = _linear(size, (q_heads + 2 * kv_heads) * dim, kind, bias=True), _norm(size, kind)
    of_heads = _norm(dim, kind, seed=11), _norm(dim, kind, seed=12)
    for each in of_heads:
        each.offset, each.eps = offset, 1e-2
    x, slots = _random(rows, size), torch.randperm(2 * rows, device="cuda")[:rows]
    angles = 10 * _random(40, dim // 2, dtype=torch.float32, seed=6)
    table = torch.cat([angles.cos(), angles.sin()], -1)
    rope = Rope(table, torch.arange(rows, device="cuda") * 7 % 40)
    keys, values = (
        torch.zeros(2 * rows + 1, kv_heads, dim, dtype=kind, device="cuda") for _ in "kv"
    )
    to = CacheWrite(keys, values, slots, scratch_slot=2 * rows)
    q = fused.qkv_rope_and_write((x,), layer, (norm,), rope, q_heads, to, of_heads)
    assert ("linear_rope" in served) == has_tiles
    few = 1 + rows // 3  # whose results do not depend on the others
    own = Rope(table, rope.position_ids[:few])
    of_few = to._replace(slots=slots[:few])
    some = fused.qkv_rope_and_write((x[:few],), layer, (norm,), own, q_heads, of_few, of_heads)
    assert torch.equal(some, q[:few]) or not has_tiles
    heads_of = _product(_exact(x, norm), layer).view(rows, -1, dim)
    normed = _exact(heads_of[:, :q_heads], of_heads[0]), _exact(heads_of[:, q_heads:], of_heads[1])
    cos, sin = (t.double() for t in rope.rotation(kind))
    turned = apply_rope(torch.cat(normed, 1)[:, : q_heads + kv_heads], cos, sin)
    _close(q, turned[:, :q_heads])
    _close(keys[slots], turned[:, q_heads:])
    _close(values[slots], heads_of[:, q_heads + kv_heads :])
    assert not any(
        cache[torch.isin(torch.arange(2 * rows + 1, device="cuda"), slots).logical_not()].any()
        for cache in (keys, values)
    )
    x[0], to = float("nan"), to._replace(keeps_finite=True)
    fused.qkv_rope_and_write((x,), layer, (norm,), rope, q_heads, to, of_heads)
    assert all(cache.isfinite().all() for cache in (keys, values))


@pytest.mark.parametrize(
    "size",
    [
        (576, 960),
        (384, 2064),
        (576, 49152),
        (4096, 2048),
        (1536, 576),
        (576, 3072),
        (2592, 528),
        (1024, 6144),
        (1536, 896),
        (960, 1600),
        (1152, 1536),
        (4096, 6144),
        (2048, 3072),
        (3072, 3072),
        (8192, 2048),
    ],
)
def test_a_row_does_not_depend_on_the_others(size: tuple[int, int]) -> None:
    """What makes bf16 text with speculation that without it, up to attention."""
    layer, norm = _linear(*size, torch.bfloat16), _norm(size[0], torch.bfloat16)
    for norms in ((norm,), ()):
        most, few = _most_rows(size, bool(norms)), 0
        if size[0] * size[1] >= fused.LARGE and most > 16:  # they are tiles above
            few = 16
        elif (
            size[0] >= 1536 and not norms
        ):  # up to `few` rows a cluster of four divides the columns
            processors = torch.cuda.get_device_properties(0).multi_processor_count
            fits = -(-size[1] // 32) * 6 <= processors
            few = 48 if size[0] >= 2048 and not fits else 16  # with `fits` more have another one
        x, ends = _random(most, size[0]), [few, most] if 0 < few < most else [most]
        for first, last in zip([1, few + 1], ends, strict=False):
            together = fused.linear((x[:last],), layer, norms)
            for rows in {*range(first, last, 7), last - 1, 32} & {*range(first, last)}:
                assert torch.equal(fused.linear((x[:rows],), layer, norms), together[:rows])


@pytest.mark.parametrize(
    ("size", "most"),
    [
        ((576, 3072), 160),
        ((960, 5120), 48),
        ((896, 9728), 28),
        ((1024, 6144), 39),
        ((2048, 12288), 32),
    ],
)
def test_a_gated_row_does_not_depend_on_the_others(size: tuple[int, int], most: int) -> None:
    """Five sizes of tiles for SmolLM2's gate and up; of other shapes those of up to 32 rows."""
    layer, norm = _linear(*size, torch.bfloat16), _norm(size[0], torch.bfloat16)
    assert most <= _most_rows(size, True, is_gated=True)
    x, between = _random(most, size[0]), GateAndMul(is_gelu=False)
    together = fused.gated(x, layer, norm, between)
    for rows in (1, 16, 17, 31, 48, 49, 64, 65, 96, 97, 128, 129, 159):
        if rows < most:
            assert torch.equal(fused.gated(x[:rows], layer, norm, between), together[:rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "size", [(4096, 4096), (1536, 4098), (14336, 4096), (4096, 8210), (2048, 32000)]
)
def test_a_row_of_a_large_weight_does_not_depend_on_the_others(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    """Some rows share the kernel's tiles otherwise than few do, or rest in shared memory."""
    layer, most = _linear(*size, dtype), _most_rows(size, False)
    x, residual = _random(most, size[0], dtype=dtype), _random(most, size[1], dtype=dtype, seed=4)
    for added in (None, residual):
        together = fused.linear((x,), layer, residual=added)
        _close(together, _product(_exact(x), layer) + (0 if added is None else added))
        for rows in range(1, most):
            part = None if added is None else added[:rows]
            alone = fused.linear((x[:rows],), layer, residual=part)
            assert torch.equal(alone, together[:rows])


def test_queries_and_keys_of_two_inputs(served: list[str]) -> None:
    """As an EAGLE-3 head has them: embeddings and hidden states side by side, rotated, cached."""
    layer, dim = _linear(1152, 15 * 64, torch.bfloat16), 64
    norms = _norm(576, torch.bfloat16), _norm(576, torch.bfloat16, seed=5)
    angles = 10 * _random(40, dim // 2, dtype=torch.float32, seed=6)
    table, words = torch.cat([angles.cos(), angles.sin()], -1), _random(50, 576)
    for rows in (1, 4, 33, 128):
        ids = torch.arange(-1, rows - 1, device="cuda") * 3
        x = words[ids.clamp(0, 49)], 20 * _random(rows, 576, seed=7)
        rope = Rope(table, torch.arange(rows, device="cuda") % 40)
        slots = torch.arange(rows, device="cuda")
        keys, values = (_random(rows + 1, 3, dim, seed=seed) for seed in (8, 9))
        to = CacheWrite(keys, values, slots, scratch_slot=rows)
        q = fused.qkv_rope_and_write(x, layer, norms, rope, 9, to)
        for given in (ids, ids.int()):
            others = [_random(rows + 1, 3, dim, seed=10) for _ in "kv"]
            inputs = Embedded(given, words), x[1]
            into = to._replace(k_slots=others[0], v_slots=others[1])
            assert torch.equal(fused.qkv_rope_and_write(inputs, layer, norms, rope, 9, into), q)
            assert torch.equal(others[0][:rows], keys[:rows])
            assert torch.equal(others[1][:rows], values[:rows])
            assert torch.equal(fused.linear(inputs, layer, norms), fused.linear(x, layer, norms))
        normed = [_exact(t, norm) for t, norm in zip(x, norms, strict=True)]
        qkv = _product(torch.cat(normed, -1), layer).view(rows, -1, dim)
        cos, sin = (t.double() for t in rope.rotation(torch.bfloat16))
        turned = apply_rope(qkv[:, :12], cos, sin)
        _close(q, turned[:, :9])
        _close(keys[:rows], turned[:, 9:])
        _close(values[:rows], qkv[:, 12:])
    assert served == ["linear_rope", *["linear_rope", "linear", "linear"] * 2] * 4


def test_rows_of_a_table_that_a_kernel_does_not_look_up(served: list[str]) -> None:
    words, ids, hidden = _random(50, 64), torch.tensor([3, 60], device="cuda"), _random(2, 64)
    norms = _norm(64, torch.bfloat16), _norm(64, torch.bfloat16, seed=5)
    layer, inputs = _linear(128, 40, torch.bfloat16), (Embedded(ids, words), hidden)
    rows = words[[3, 49]]
    assert torch.equal(
        fused.linear(inputs, layer, norms), fused.linear((rows, hidden), layer, norms)
    )
    for table, given in ((words.float(), ids), (words[:, :32], ids), (words, ids.repeat(2)[::2])):
        assert fused._table_of((Embedded(given, table), hidden), layer, norms) is None
    assert fused._table_of(inputs, layer, norms) is None  # 40 outputs are not tiles
    assert fused._table_of(inputs, _linear(128, 48, torch.bfloat16), norms) is not None
    assert "linear_rope" not in served


@pytest.mark.parametrize(
    ("size", "rows"), [(2048, 4), (1536, 4), (576, 20), (1536, 100), (2048, 20), (576, 120)]
)
def test_a_chain_of_kernels_in_a_graph(size: int, rows: int) -> None:
    """Kernels that start before their predecessors end still read what those wrote."""
    layers = [_linear(size, size, torch.bfloat16) for _ in range(6)]
    norm = _norm(size, torch.bfloat16)
    x = _random(rows, size)

    def chain() -> Tensor:
        h = x
        for layer in layers * 4:
            inner = fused.linear((h,), layer, (norm,))
            h = fused.linear((inner,), layer, residual=h)
        return h

    eager = chain().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for seed in range(20):
        x.copy_(_random(rows, size, seed=seed))
        graph.replay()
        if seed:
            eager = chain()
        assert torch.equal(captured, eager)
    h = _exact(x)
    for layer in layers * 4:
        h = h + _product(_product(_exact(h, norm), layer), layer)
    assert (captured.double() - h).abs().max() / h.abs().max() < 0.05


def test_a_residual_at_an_odd_address_goes_elsewhere(served: list[str]) -> None:
    layer, x = _linear(576, 960, torch.bfloat16), _random(40, 576)
    for residual in (_random(40, 961)[:, 1:], _random(40, 961)[:, :960]):
        _close(
            fused.linear((x,), layer, residual=residual),
            _product(_exact(x), layer) + residual.double(),
        )
    assert not served


def test_a_norm_and_a_residual_together(served: list[str]) -> None:
    layer, norm = _linear(576, 576, torch.bfloat16), _norm(576, torch.bfloat16)
    x, residual = _random(4, 576), _random(4, 576, seed=4)
    expected = _product(_exact(x, norm), layer) + residual
    _close(fused.linear((x,), layer, (norm,), residual=residual), expected)


def test_tensors_that_the_kernels_do_not_take_go_elsewhere(served: list[str]) -> None:
    layer = _linear(576, 960, torch.bfloat16)
    x = _random(4, 576)
    columns = _random(576, 4).t()  # strided
    _close(fused.linear((columns,), layer), _product(_exact(columns), layer))
    layer.weight.data = layer.weight.data.t().contiguous().t()  # type: ignore[union-attr]
    _close(fused.linear((x,), layer), _product(_exact(x), layer))
    assert served == []
    drafts = torch.randint(50, (3, 4), device="cuda", dtype=torch.int32)
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=3, speculative_model="x"))
    logits = _random(16, 50, dtype=torch.float32)
    drafts.t()[:, 0] = logits[::4].argmax(-1)
    ours = _accepted(worker, logits, drafts.t(), 0, _spec("cuda"))
    twin = _accepted(worker, logits.cpu(), drafts.t().cpu(), 0, _spec("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))


def _spec(device: str, **fields: object) -> SpecMetadata:
    return SpecMetadata(8, 3, 3, device=device, **fields)  # type: ignore[arg-type]


def _accepted(
    worker: Eagle3OneModelWorker | MTPEagleWorker, logits: Tensor, drafts: Tensor, contexts: int,
    spec: SpecMetadata,
) -> list[Tensor]:  # fmt: skip
    tokens, lens = worker.sample_and_accept_draft_tokens(
        logits, drafts, contexts, contexts + drafts.shape[0], spec
    )
    assert spec.bad_requests is not None and spec.num_accepted_draft_tokens is not None
    return [t.cpu() for t in (tokens, lens, spec.bad_requests, spec.num_accepted_draft_tokens)]


@covering(**{
    "dtype": [torch.float32, *DTYPES], "vocab": [11, 1003, 128256],
    "contexts,num_drafts": [(0, 3), (2, 3), (3, 0), (0, 1)],
})  # fmt: skip
def test_acceptance(
    dtype: torch.dtype, vocab: int, contexts: int, num_drafts: int, served: list[str]
) -> None:
    """NaN, infinities and equal maxima among them; the CPU's code is the twin."""
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=3, speculative_model="x"))
    rows = contexts + 5 * (num_drafts + 1)
    for seed in range(6):
        logits = _random(rows, vocab, dtype=dtype, seed=seed).round()  # many equal maxima
        if seed == 1:
            logits[rows // 2, 5] = float("nan")
            logits[0] = float("nan")
        if seed == 2:
            logits[1], logits[rows - 1, 3] = float("-inf"), float("inf")
        best = torch.nan_to_num(logits, nan=float("-inf")).argmax(-1)[contexts:]
        drafts = best.view(5, -1)[:, :num_drafts].to(torch.int32).clone()
        for i in range(min(num_drafts, 3)):
            drafts[i, i] = -1 if i else (int(drafts[i, i]) + 1) % vocab
        ours = _accepted(worker, logits, drafts, contexts, _spec("cuda"))
        twin = _accepted(worker, logits.cpu(), drafts.cpu(), contexts, _spec("cpu"))
        assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True)), (seed, ours, twin)
        assert int(ours[1].max()) == num_drafts + 1
    assert served == ["accept_greedy"] * 6


def test_one_draft_for_each_request_may_have_any_stride(served: list[str]) -> None:
    """As torch says, a dimension of size 1 leaves no gaps."""
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=3, speculative_model="x"))
    logits = _random(5 * 2, 50)
    drafts = logits[::2].argmax(-1).to(torch.int32)[None].t()
    assert drafts.is_contiguous() and drafts.stride() == (1, 5)
    ours = _accepted(worker, logits, drafts, 0, _spec("cuda"))
    twin = _accepted(worker, logits.cpu(), drafts.cpu(), 0, _spec("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))
    assert ours[1].tolist() == [2] * 5 and served == ["accept_greedy"]


def test_forced_acceptance(monkeypatch: pytest.MonkeyPatch, served: list[str]) -> None:
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2")
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=3, speculative_model="x"))
    logits, drafts = _random(1 + 2 * 4, 50), torch.zeros(2, 3, dtype=torch.int32, device="cuda")
    ours = _accepted(worker, logits, drafts, 1, _spec("cuda"))
    twin = _accepted(worker, logits.cpu(), drafts.cpu(), 1, _spec("cpu"))
    assert all(torch.equal(a, b) for a, b in zip(ours, twin, strict=True))
    assert ours[1].tolist() == [1, 3, 3] and served == ["accept_greedy"]


@pytest.mark.parametrize("vocab", [40, 5000])
@pytest.mark.parametrize("forced", [0, 2])
def test_relaxed_acceptance(
    vocab: int, forced: int, served: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", str(forced))
    config = MTPDecodingConfig(
        num_nextn_predict_layers=3, use_relaxed_acceptance_for_thinking=True, relaxed_topk=4,
        relaxed_delta=0.2, begin_thinking_phase_token=1, end_thinking_phase_token=2,
    )  # fmt: skip
    worker, lens = MTPEagleWorker(config), set()
    for seed in range(20):
        logits = 2 * _random(6 * 4, vocab, seed=seed, dtype=torch.float32)
        logits[3, 7] = float("nan")
        order = torch.nan_to_num(logits, nan=float("-inf")).argsort(-1, descending=True)
        generator = torch.Generator("cuda").manual_seed(seed)
        rank = torch.randint(0, 5, (6, 3), device="cuda", generator=generator)
        drafts = order.view(6, 4, vocab)[:, :3].gather(-1, rank[..., None])[..., 0]
        drafts = drafts.to(torch.int32)
        drafts[1, 2] = -1
        results = []
        for device in ("cuda", "cpu"):
            state = {"thinking_deltas": torch.tensor([0.2, -1.0, 0.2, 0.5, 0.2, 0.0, 0.9])}
            state = {name: value.to(device) for name, value in state.items()}
            slots = torch.tensor([5, 1, 0, 2, 3, 6], device=device)
            spec = _spec(device, state=state, slot_ids=slots)
            results.append(_accepted(worker, logits.to(device), drafts.to(device), 0, spec))
            results[-1].append(state["thinking_deltas"].cpu())
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), seed
        lens |= set(results[0][1].tolist())
    assert lens == ({3} if forced else {1, 2, 3, 4}) and served == ["accept_greedy"] * 20


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize(("rows", "vocab"), [(1, 32000), (40, 999), (300, 64), (3, 7)])
def test_draft_choice(dtype: torch.dtype, rows: int, vocab: int, served: list[str]) -> None:
    logits = _random(rows, vocab, dtype=dtype)
    d2t = torch.arange(vocab, device="cuda") * 2
    chosen = logits.argmax(-1)
    assert torch.equal(choose.choose_drafts(logits, None), chosen.to(torch.int32))
    assert torch.equal(choose.choose_drafts(logits, d2t), (chosen + d2t[chosen]).to(torch.int32))
    assert served == ["choose_drafts"] * 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(576, 16384), (576, 49152), (960, 10_000), (1024, 4100)])
def test_largest_output(dtype: torch.dtype, size: tuple[int, int], served: list[str]) -> None:
    layer, d2t = _linear(*size, dtype), 2 * torch.arange(size[1], device="cuda")
    assert layer.weight is not None
    half = size[1] // 2
    layer.weight.data[half : 2 * half] = layer.weight.data[:half].roll(7, 0)  # equals
    norms = (None, _norm(size[0], dtype)) if dtype == torch.bfloat16 else (None,)
    counts = range(1, 9)
    for rows in counts:
        x = _random(rows, size[0] + 32, dtype=dtype, seed=rows)[:, : size[0]]
        x[rows // 2] = float("nan") if rows > 2 else 0.0
        for norm in norms:
            exact = _product(_exact(x, norm), layer)
            logits = fused.linear((x,), layer, () if norm is None else (norm,))
            expected = greedy_tokens(logits.masked_fill(logits.isnan(), float("-inf")))
            found = fused.largest_output(x, layer, norm)
            assert found is not None and torch.equal(found, expected)
            mapped = fused.largest_output(x, layer, norm, d2t)
            assert mapped is not None and torch.equal(mapped, 3 * expected)
            best, own = exact.amax(-1), exact.gather(1, found[:, None].long())[:, 0]
            assert (best - own).nan_to_num().max() <= 2.0**-7 * best.nan_to_num().abs().max()
    most = counts[-1] + 1
    assert fused.largest_output(_random(most, size[0], dtype=dtype), layer, None) is None
    assert served.count("largest_output") == 2 * len(counts) * len(norms)


def test_largest_outputs_one_after_another_in_a_graph() -> None:
    """Each finds the memory between kernels empty, and may start before the one before ends."""
    layer, x = _linear(576, 16384, torch.bfloat16), _random(4, 576)
    powers = torch.tensor([1, 2, 4], device="cuda")  # of 2: nothing is rounded

    def chain() -> list[Tensor]:
        found: list[Tensor] = []
        for rows in (4, 1, 3, 4, 2):
            part = x[:rows] if not found else x[:rows] * powers[found[-1][:1] % 3]
            tokens = fused.largest_output(part.contiguous(), layer, None)
            assert tokens is not None
            found.append(tokens)
        return found

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain()
    for seed in range(20):
        x.copy_(_random(4, 576, seed=seed))
        graph.replay()
        expected = fused.linear((x,), layer).argmax(-1)
        assert all(torch.equal(tokens, expected[: len(tokens)].int()) for tokens in captured)


def _walk_tables(vocab: int, rank: int, dtype: torch.dtype, maps: bool) -> MarkovTables:
    w1 = _random(2 * vocab, rank, dtype=dtype, seed=1)
    w2 = _random(vocab, rank, dtype=dtype, seed=2) * rank**-0.5
    return MarkovTables(w1, w2, torch.arange(vocab, device="cuda") if maps else None)


@covering(
    dtype=DTYPES, rank=[64, 128, 256], vocab=[40, 700, 32_003, 49_152], batch=[1, 3, 8],
    drafts=[1, 2, 7], maps=[False, True],
)  # fmt: skip
def test_walk_in_one_kernel(
    dtype: torch.dtype, rank: int, vocab: int, batch: int, drafts: int, maps: bool,
    served: list[str],
) -> None:  # fmt: skip
    """Against float64, draft by draft. Walks of other numbers of requests went before."""
    tables = _walk_tables(vocab, rank, dtype, maps)
    step = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9}[dtype]
    for requests in (8, batch, 1, batch):
        logits = _random(drafts * requests, vocab, dtype=dtype, seed=requests)
        logits[0, 0] = float("nan")  # never taken
        logits[-1] = float("-inf")  # nothing to take: the first
        before = torch.arange(2 * vocab - 2, 2 * vocab - 2 + requests, device="cuda")
        taken = markov_walk.walk_markov(logits, before.to(torch.int32), tables)
        assert taken.shape == (drafts, requests) and taken.dtype == torch.int32
        tokens = before.clamp(max=2 * vocab - 1)  # some are above W1's
        for own, chosen in zip(logits.double().split(requests), taken.long(), strict=True):
            scores = own + tables.w1.double()[tokens] @ tables.w2.double().T
            scores = scores.masked_fill(scores.isnan(), float("-inf"))
            draft_ids = chosen // 2 if maps else chosen
            short = scores.max(1).values - scores.gather(1, draft_ids[:, None])[:, 0]
            assert bool(((short <= 4 * step) | short.isnan()).all())  # roundings of bias and sum
            tokens = chosen
        assert int(taken[-1, -1]) == 0
    is_too_large = rank * vocab > 5_000_000  # for half of the shared memory
    assert served.count("walk_markov") == (0 if is_too_large else 4)


def test_a_walk_takes_the_first_of_equals() -> None:
    """In one chunk of the vocabulary, and in two."""
    tables = _walk_tables(2000, 64, torch.bfloat16, False)
    for equals in ([5, 9], [1999, 16, 3], [1500, 700, 1501]):
        logits = torch.zeros(4, 2000, dtype=torch.bfloat16, device="cuda")
        logits[:, equals] = 1000.0  # a bias is lost in its rounding
        taken = markov_walk.walk_markov(logits, torch.zeros(1, dtype=torch.int32).cuda(), tables)
        assert taken.flatten().tolist() == [min(equals)] * 4


def _integers(*shape: int, below: int, seed: int = 0) -> Tensor:
    """Whole numbers, whose sums have no rounding in bf16."""
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.randint(1 - below, below, shape, generator=generator, device="cuda")
    return drawn.to(torch.bfloat16)


def test_walks_in_graphs_beside_eager_ones() -> None:
    """Graphs of several sizes share the memory that blocks send in."""
    vocab = 49_152
    w1, w2 = _integers(vocab, 64, below=2), _integers(vocab, 64, below=2, seed=1)
    tables, cases = MarkovTables(w1, w2, None), []
    for batch, drafts in ((1, 7), (8, 3), (2, 1)):
        logits = _integers(drafts * batch, vocab, below=20)
        before = torch.zeros(batch, dtype=torch.int32, device="cuda")
        markov_walk.walk_markov(logits, before, tables)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            taken = markov_walk.walk_markov(logits, before, tables)
        cases.append((graph, logits, before, taken))
    chosen = random.Random(0)
    for seed in range(300):
        graph, logits, before, taken = chosen.choice(cases)
        logits.copy_(_integers(*logits.shape, below=20, seed=seed))
        before.fill_(seed)
        graph.replay()
        twin = markov_walk.walk_by_draft.__wrapped__(logits, before, tables)  # type: ignore[attr-defined]
        assert torch.equal(taken, twin)
        if seed % 3 == 0:
            assert torch.equal(markov_walk.walk_markov(logits, before, tables), twin)


@pytest.mark.parametrize("size", [12, 576])
def test_window(size: int, served: list[str]) -> None:
    hidden, ids = _random(20, size), torch.arange(20, device="cuda") * 3
    last, slots = (torch.tensor(x, device="cuda") for x in ([1, 9, 19], [2, 0, 4]))
    kept = torch.zeros(5, 3, size, dtype=torch.bfloat16, device="cuda")
    tokens = torch.full((5, 3), -7, device="cuda")
    update_window(hidden, ids, last, slots, kept, tokens)
    for row, slot in (([0, 0, 1], 2), ([7, 8, 9], 0), ([17, 18, 19], 4)):
        assert torch.equal(kept[slot], hidden[row]) and torch.equal(tokens[slot], ids[row])
    assert not kept[[1, 3]].any() and (tokens[[1, 3]] == -7).all()
    assert served == ["update_window"]


def test_empty_windows_are_left_alone(served: list[str]) -> None:
    """Vanilla MTP with one module keeps none."""
    hidden, ids = _random(20, 12), torch.arange(20, device="cuda")
    last, slots = (torch.tensor(x, device="cuda") for x in ([1, 9, 19], [2, 0, 4]))
    update_window(hidden, ids, last, slots, hidden.new_empty(5, 0, 12), ids.new_empty(5, 0))
    assert served == ["update_window"]
