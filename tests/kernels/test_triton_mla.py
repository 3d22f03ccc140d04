"""The Triton kernels of latent attention against their twins: on a GPU as compiled, elsewhere in
Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from latent_pass import ROTATED, make_latent_pass
from matrix import full
from paged_pass import attend
from torch import Tensor

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.errors import ConfigError
from trtspec.layers.norm import RMSNorm
from trtspec.metadata.attention import AttentionMetadata
from trtspec.ops.layer.latent import rope_and_write_latent
from trtspec.ops.layer.rope import CacheWrite, Rope

triton_mla = pytest.importorskip("trtspec.attention.mla", reason="needs triton")
from trtspec.attention.triton_backend import TritonAttention  # noqa: E402
from trtspec.ops.layer import triton_latent  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []


def queries(meta: AttentionMetadata, heads: int, latent: int) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(len(meta.position_ids), heads, latent + ROTATED, generator=generator)
    return q.to(DEVICE)


def both(q: Tensor, meta: AttentionMetadata) -> list[Tensor]:
    backends = TritonAttention(), TorchAttention()
    return [attend(b, q, replace(meta, derived={}), layer=1, scale=0.17) for b in backends]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rows", "heads", "latent", "page", "lengths"),
    [
        (1, 16, 64, 16, [1, 7, 130]),
        (4, 3, 32, 4, [70, 5]),
        (4, 8, 64, 32, [1, 63, 64]),
        (4, 16, 32, 8, [35]),
        (1, 3, 48, 16, [33, 200]),
        (1, 40, 32, 16, [50, 3]),
    ],
)
def test_equals_torch(rows: int, heads: int, latent: int, page: int, lengths: list[int]) -> None:
    meta = make_latent_pass([(n, rows) for n in lengths], latent, page)
    ours, twin = both(queries(meta, heads, latent), meta)
    assert twin.shape == (len(lengths) * rows, heads, latent)
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(("programs", "join_programs"), [(1, 1), (7, 6), (40, 1000)])
def test_any_cut_of_ragged_texts_is_the_same(
    monkeypatch: pytest.MonkeyPatch, programs: int, join_programs: int
) -> None:
    """Requests of one part, of full parts alone, and of full parts and a rest; of several tiles."""
    monkeypatch.setattr(triton_mla, "_programs", lambda _: programs)
    monkeypatch.setattr(triton_mla, "JOIN_PROGRAMS", join_programs)
    meta = make_latent_pass([(n, 3) for n in [1, 120, 29, 13, 60]], 32, 8)
    ours, twin = both(queries(meta, 8, 32), meta)
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)


def _contexts(
    starts: list[int], counts: list[int], generations: list[int], rows: int
) -> AttentionMetadata:
    spans = [*zip(starts, counts, strict=True), *((n, rows) for n in generations)]
    texts = make_latent_pass([(s + n, 1) for s, n in spans], 32, 8)
    positions = torch.cat([torch.arange(s, s + n) for s, n in spans]).to(DEVICE)
    return replace(
        texts, context_lens=tuple(counts), context_starts=tuple(starts),
        num_generations=len(generations), rows_per_generation=rows, position_ids=positions,
        max_kv_len=max(s + n for s, n in spans), derived={},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("heads", [3, 40])
def test_contexts(heads: int) -> None:
    """Whole prompts and later chunks, of one tile and of several, beside generations; rows of more
    heads than a tile has."""
    meta = _contexts([0, 0, 61], [1, 12, 4], [9, 40], 2)
    ours, twin = both(queries(meta, heads, 32), meta)
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)


def test_padded_contexts() -> None:
    """Two prompts in a graph of three with 48 rows: what the device says of their ends counts."""
    meta = _contexts([0, 7], [20, 9], [], 1)
    q = queries(meta, 8, 32)
    twin = both(q, meta)[1]
    padded = replace(
        meta, context_lens=(48, 0, 0), context_starts=(),
        last_context_rows=torch.tensor([19, 28, 28], device=DEVICE),
        position_ids=torch.cat([meta.position_ids, meta.position_ids.new_zeros(19)]),
        block_tables=tuple(torch.cat([t, torch.zeros_like(t[:1])]) for t in meta.block_tables),
        derived={},
    )  # fmt: skip
    q = torch.cat([q, torch.full_like(q[:19], float("nan"))])
    ours = attend(TritonAttention(), q, padded, layer=1, scale=0.17)
    torch.testing.assert_close(ours[:29], twin, atol=2e-5, rtol=1e-4)
    assert not ours[29:].any()


def test_rows_past_the_maximum_length_are_inert() -> None:
    meta = make_latent_pass([(30, 4), (5, 4)], 32, 8, max_seq_len=32)
    assert meta.position_ids.tolist()[:4] == [30, 31, 0, 0]
    ours, twin = both(queries(meta, 3, 32), meta)
    torch.testing.assert_close(ours, twin, atol=2e-5, rtol=1e-4)


def test_a_window_is_refused() -> None:
    meta = make_latent_pass([(30, 1)], 32, 8)
    with pytest.raises(ConfigError, match="window of 8"):
        attend(TritonAttention(), queries(meta, 3, 32), meta, window=8, scale=1.0)


@pytest.mark.parametrize("keeps_finite", [False, True])
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(3, 32, 16), (20, 48, 8)])
def test_rotation_and_cache_write(
    heads: int, latent: int, rotated: int, keeps_finite: bool
) -> None:
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(DEVICE)

    rows, q = 4, noise(4, heads, 24 + rotated)
    x = noise(rows, 7 + latent + rotated)[:, 7:]
    if keeps_finite:
        x[1, 3], x[2, -1] = float("nan"), float("inf")
    norm = RMSNorm(latent, 1e-6).to(DEVICE)
    norm.weight.data = noise(latent)
    rope = Rope(noise(9, rotated), torch.tensor([0, 8, 3, 5], device=DEVICE))
    slots = torch.tensor([5, 2, -1, 7], device=DEVICE)
    results = []
    twin = rope_and_write_latent.__wrapped__  # type: ignore[attr-defined]
    for function in (triton_latent.rope_and_write_latent, twin):
        cache = torch.zeros(9, 1, latent + rotated, device=DEVICE)
        out = torch.zeros(rows, heads, latent + rotated, device=DEVICE)
        to = CacheWrite(cache, cache[..., :latent], slots, 3, keeps_finite)
        function(q[..., 24:], x, norm, rope, out[..., latent:], to)
        results.append((out, cache))
    assert triton_latent.HEADS == 16
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    written = results[1][1].flatten(1).any(dim=1)
    assert written.tolist() == [slot in (2, 3, 5, 7) for slot in range(9)]
    assert not keeps_finite or results[0][1].isfinite().all()


def _shared_memory(*arguments: str) -> dict[str, int]:
    """The bytes of kernels that `compile_triton.py` compiles. The interpreter knows neither types,
    nor what is a constant, nor sizes of memory."""
    root = Path(__file__).parents[2]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "tests/helpers/compile_triton.py", *arguments]
    environment["PYTHONPATH"] = str(root)
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_deepseeks_sizes_compile_for_hopper() -> None:
    """A rank of eight with drafts, and all heads; each over one kind of cache, or over both."""
    cases = ["16,4,bfloat16", "128,1,float8_e4m3fn"]
    if full():
        cases += ["128,1,bfloat16", "16,4,float8_e4m3fn"]
    shared = _shared_memory(*cases)
    for case in cases:
        largest = max(size for name, size in shared.items() if name.startswith(case))
        assert (180_000 if "float8" in case else 200_000) < largest <= 227 * 1024, shared
    assert len(shared) == len(cases) * 4


def test_kernels_of_other_layers_compile_for_hopper() -> None:
    shared = _shared_memory()
    assert len(shared) == 27 + 6  # over an FP8 cache
    assert max(shared.values()) <= 227 * 1024, shared
