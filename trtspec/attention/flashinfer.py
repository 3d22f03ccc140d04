"""FlashInfer's kernels: XQA for generation rows, its paged prefill (FA2) for contexts.

XQA reads lengths, block tables and a mask of the last keys from the device, so a captured graph
remains valid as sequences grow. Prefill is planned on the host from the contexts' lengths, once per
pass. Shapes that these kernels do not support go to Triton, which is logged once.

FlashInfer compiles a kernel when a shape is first used, in seconds, and stores it on disk. This
needs nvcc, ninja and a C++ compiler, which are looked for when the backend is constructed. The
limits below are those of FlashInfer 0.6.18: `flashinfer/xqa.py` and its `mha.cu`,
`flashinfer/prefill.py` and its `scheduler.cuh`.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..errors import ConfigError
from ..metadata.attention import AttentionMetadata
from .base import CachedLayer
from .triton_backend import TritonAttention

logger = logging.getLogger(__name__)

HALF_DTYPES = (torch.float16, torch.bfloat16)
HEAD_DIMS = (64, 128, 256)  # of both kernels; XQA's other multiples of 16 were not tried
XQA_PAGE_SIZES = (16, 32, 64, 128)
XQA_MAJORS = (9, 10, 12)  # compute capabilities that XQA is compiled for
XQA_TILE = 32  # query rows times heads of a KV head that one of its programs takes
XQA_SCRATCH = 64 << 20  # bytes, for parts of long sequences; `_xqa_refusal` computes the need
XQA_SEMAPHORES = 1 << 16
PREFILL_WORKSPACE = 128 << 20  # bytes, FlashInfer's recommendation
PREFILL_TILE = 128  # the most query rows in a tile of FA2's


class XqaShape(NamedTuple):
    """The sizes that decide whether XQA serves."""

    rows: int  # of a request
    q_heads: int
    kv_heads: int
    dim: int
    page_size: int
    window: int | None
    dtype: torch.dtype
    is_too_narrow: bool  # a block table holds fewer tokens than rows


class FlashInferAttention(TritonAttention):
    name: ClassVar[str] = "flashinfer"
    contexts_on_device: ClassVar[bool] = False  # its prefill is planned on the host
    reads_fp8: ClassVar[bool] = False

    def __init__(self, device: torch.device):
        """Allocates the kernels' scratch memory on `device`, before the KV cache is sized.

        Raises:
            ConfigError: FlashInfer is not installed, or could not compile its kernels here.
        """
        self._xqa, self._prefill = _load()
        properties = torch.cuda.get_device_properties(device)
        self.capability = properties.major, properties.minor
        self.num_sms = properties.multi_processor_count
        # Kernels of one stream share these. XQA leaves its semaphores at zero.
        self._scratch = torch.empty(XQA_SCRATCH, dtype=torch.uint8, device=device)
        zeros = torch.zeros(XQA_SEMAPHORES, dtype=torch.int32, device=device)
        self._semaphores = zeros.view(torch.uint32)
        self._workspace = torch.empty(PREFILL_WORKSPACE, dtype=torch.uint8, device=device)
        self._plans: dict[tuple[Any, ...], _Plan] = {}
        self._takes: dict[tuple[Any, ...], bool] = {}

    def _attend(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        if cached.is_latent:  # latent attention is Triton's
            return super()._attend(q, meta, cached)
        cached, rows = _without_idle_window(cached, meta), meta.num_context_tokens
        if not rows or _changes_scores(cached) or not self._takes_contexts(q, cached):
            return super()._attend(q, meta, cached)
        q = q.contiguous()
        out = torch.empty_like(q)
        pages = (_pages(cached.k_slots, cached), _pages(cached.v_slots, cached))
        plan = self._plan(q, meta, cached)
        plan.wrapper.run(_scaled(q[:rows], cached.scale), pages, out=out[:rows])
        if meta.num_generations:
            self._write_generation(q[rows:], meta, cached, out[rows:])
        return out

    def _write_generation(
        self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer, out: Tensor
    ) -> None:
        out.copy_(self._generation(q, meta, cached))

    # -- generations -------------------------------------------------------------------------------
    def _reads_packed(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> bool:
        return cached.is_latent  # XQA takes as many rows of each request

    def _generation(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> Tensor:
        cached = _without_idle_window(cached, meta)
        if cached.window is not None and meta.window_position_ids is not None:
            return super()._generation(q, meta, cached)  # XQA counts windows from the last row
        capacity = meta.block_tables[cached.kv_group].shape[1] * cached.page_size
        shape = XqaShape(
            rows=meta.rows_per_generation,
            q_heads=q.shape[1],
            kv_heads=cached.kv_heads,
            dim=q.shape[2],
            page_size=cached.page_size,
            window=cached.window,
            dtype=q.dtype,
            is_too_narrow=capacity < meta.rows_per_generation,
        )
        if shape not in self._takes:
            refusal = self._xqa_refusal(shape)
            self._takes[shape] = refusal is None
            heads = shape.q_heads, shape.kv_heads
            _log("XQA", refusal, rows=shape.rows, heads=heads, dim=shape.dim)
        if not self._takes[shape] or _changes_scores(cached):
            return super()._generation(q, meta, cached)
        lengths, mask = _xqa_rows(meta, capacity)
        q = _scaled(q, cached.scale).contiguous()
        out = torch.empty_like(q)
        batch = (-1, 1) if shape.rows == 1 else (-1, 1, shape.rows)
        self._xqa(
            q.view(*batch, *q.shape[1:]),
            _pages(cached.k_slots, cached),
            _pages(cached.v_slots, cached),
            _xqa_table(meta, cached.kv_group),
            lengths,
            out.view(*batch, *q.shape[1:]),
            self._scratch,
            self._semaphores,
            shape.kv_heads,
            shape.page_size,
            sliding_win_size=shape.window or 0,
            sm_count=self.num_sms,
            q_seq_len=shape.rows,
            mask=mask,
        )
        return out

    def _xqa_refusal(self, shape: XqaShape) -> str | None:
        """Returns why XQA cannot serve this shape, or None."""
        per_kv = shape.q_heads // shape.kv_heads
        tiles = -(-shape.rows * per_kv // XQA_TILE)
        # A sequence is cut into parts, so that all programs are at most the multiprocessors times
        # the tiles. A part is a tile of 16-bit numbers, its maxima and its sums.
        part = XQA_TILE * shape.dim * 2 + 2 * 4 * XQA_TILE
        if self.capability[0] not in XQA_MAJORS:
            return f"compute capability {self.capability[0]}.{self.capability[1]}"
        if shape.dtype not in HALF_DTYPES:
            return f"dtype {str(shape.dtype).removeprefix('torch.')}"
        if shape.dim not in HEAD_DIMS:
            return f"head size {shape.dim}"
        if shape.page_size not in XQA_PAGE_SIZES:
            return f"{shape.page_size} tokens per block"
        if per_kv > XQA_TILE:
            return f"{per_kv} query heads per KV head"
        # XQA assumes that the rows are at the sequence's last positions. That does not hold if some
        # are guarded (at position 0). The mask corrects which keys a row sees, but not where its
        # window starts.
        if shape.window is not None and shape.rows > 1:
            return f"a window of {shape.window} with several rows"
        if self.num_sms * tiles > XQA_SEMAPHORES or self.num_sms * tiles * part > XQA_SCRATCH:
            return f"{shape.rows} rows"
        if shape.is_too_narrow:
            return "a text that has room for fewer tokens than rows"
        return None

    # -- contexts ----------------------------------------------------------------------------------
    def _takes_contexts(self, q: Tensor, cached: CachedLayer) -> bool:
        heads, dim = (q.shape[1], cached.kv_heads), q.shape[2]
        shape = "contexts", heads, dim, q.dtype
        if shape not in self._takes:
            refusal = None
            if self.capability < (8, 0):
                refusal = f"compute capability {self.capability[0]}.{self.capability[1]}"
            elif q.dtype not in HALF_DTYPES:
                refusal = f"dtype {str(q.dtype).removeprefix('torch.')}"
            elif dim not in HEAD_DIMS:
                refusal = f"head size {dim}"
            self._takes[shape] = refusal is None
            _log("prefill", refusal, heads=heads, dim=dim)
        return self._takes[shape]

    def _plan(self, q: Tensor, meta: AttentionMetadata, cached: CachedLayer) -> _Plan:
        """Returns the contexts' plan; the first layer of a pass that needs it makes it."""
        heads, dim, kv_heads = q.shape[1], q.shape[2], cached.kv_heads
        kv_group, window, page_size = cached.kv_group, cached.window, cached.page_size
        key = "prefill", kv_group, window, heads, kv_heads, dim, page_size, q.dtype
        plan = self._plans.get(key)
        if plan is None:
            # Float32 memory for sequences that are cut into parts to occupy all multiprocessors.
            tiles = max(1, 2 * self.num_sms // kv_heads)
            needed = heads * tiles * PREFILL_TILE * (dim + 1) * 4 + 1024
            if needed > self._workspace.numel():
                self._workspace = torch.empty(needed, dtype=torch.uint8, device=q.device)
            plan = self._plans[key] = _Plan(self._prefill(self._workspace, "NHD", backend="fa2"))
        # A wrapper holds one plan, which may be another pass's.
        if plan.made_for is not meta.derived.get(key):
            plan.make(
                meta,
                kv_group,
                num_qo_heads=heads,
                num_kv_heads=kv_heads,
                head_dim_qk=dim,
                page_size=page_size,
                causal=True,
                window_left=-1 if window is None else window - 1,
                q_data_type=q.dtype,
            )
            plan.made_for = meta.derived[key] = object()
        return plan


class _Plan:
    """A FlashInfer prefill wrapper, and the pass it is planned for."""

    def __init__(self, wrapper: Any):
        self.wrapper = wrapper
        self.made_for = object()
        self._sent = torch.cuda.Event()

    def make(self, meta: AttentionMetadata, kv_group: int, **shape: Any) -> None:
        """Plans every context of the pass from the lengths that the host knows."""
        page_size = shape["page_size"]
        starts = meta.context_starts or (0,) * meta.num_contexts
        lengths = [s + n for s, n in zip(starts, meta.context_lens, strict=True)]
        pages = [-(-n // page_size) for n in lengths]
        table = meta.block_tables[kv_group]
        # The host may be a step ahead: the copy of the last plan may not have read yet the pinned
        # memory that this plan is about to be written to.
        self._sent.synchronize()
        self.wrapper.plan(
            _indptr(meta.context_lens),
            _indptr(pages),
            torch.cat([table[i, :count] for i, count in enumerate(pages)]),
            torch.tensor([(n - 1) % page_size + 1 for n in lengths], dtype=torch.int32),
            **shape,
        )
        self._sent.record()


def _indptr(counts: tuple[int, ...] | list[int]) -> Tensor:
    """Returns where each part of `counts` starts, and the end: [n + 1] int32 on the host."""
    return torch.tensor([0, *counts]).cumsum(0).to(torch.int32)


def _scaled(q: Tensor, scale: float | None) -> Tensor:
    """Returns q for kernels whose scores are scaled by 1 / sqrt(D)."""
    factor = 1.0 if scale is None else scale * q.shape[2] ** 0.5
    return q if math.isclose(factor, 1.0) else q * factor


def _changes_scores(cached: CachedLayer) -> bool:
    """Whether a layer's scores have a cap or sinks, which our kernels alone compute."""
    return cached.softcap is not None or cached.sinks is not None


def _without_idle_window(cached: CachedLayer, meta: AttentionMetadata) -> CachedLayer:
    """Drops a window that no sequence outgrows: the kernels without one are simpler."""
    is_idle = cached.window is not None and cached.window >= meta.max_seq_len
    return cached._replace(window=None) if is_idle else cached


def _pages(slots: Tensor, cached: CachedLayer) -> Tensor:
    """Views slots [slots, Hkv, D] as [blocks, page size, Hkv, D]."""
    return slots.unflatten(0, (-1, cached.page_size))


def _xqa_table(meta: AttentionMetadata, kv_group: int) -> Tensor:
    """Returns the block table [G, M] int32 without a row stride, which XQA does not know.

    A graph's tables are columns of one tensor.
    """
    key = "xqa table", kv_group
    if key not in meta.derived:
        meta.derived[key] = meta.block_tables[kv_group][meta.num_contexts :].contiguous()
    return meta.derived[key]


def _xqa_rows(meta: AttentionMetadata, capacity: int) -> tuple[Tensor, Tensor | None]:
    """Returns KV lengths [G, 1] uint32, and a mask [G, R, 2 * ceil(R / 32)] uint16 if R > 1.

    Bit j of row i says whether row i sees the j-th of the last R keys. Every row sees all earlier
    keys.

    Args:
        capacity: positions that a block table can hold.
    """
    key = "xqa rows", capacity
    if key in meta.derived:
        return meta.derived[key]
    num_seqs, rows = meta.num_generations, meta.rows_per_generation
    mask = None
    if rows == 1 and capacity >= meta.max_seq_len and meta.kv_lens.dtype == torch.int32:
        lengths = meta.kv_lens[meta.num_contexts :].contiguous()
    else:
        positions = meta.position_ids[meta.num_context_tokens :]
        lengths = torch.empty(num_seqs, dtype=torch.int32, device=positions.device)
        words = 0 if rows == 1 else -(-rows // 32)
        bits = lengths.new_empty((num_seqs, rows, words))
        _rows_kernel[(num_seqs,)](
            positions,
            lengths,
            bits,
            capacity,
            rows=rows,
            words=words,
            ROWS=triton.next_power_of_2(rows),
        )
        mask = bits.view(torch.uint16) if words else None
    meta.derived[key] = lengths.view(torch.uint32)[:, None], mask
    return meta.derived[key]


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]  # the language is Triton's
    position_ptr,
    length_ptr,
    mask_ptr,
    capacity,
    rows: tl.constexpr,
    words: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Stores KV length and mask of one request's rows, from their positions.

    The length ends with the last row that is inside the maximum, but is at least R, which XQA
    requires. So if rows are guarded to position 0, fewer than R rows are at the sequence's end.
    Which of the last R keys a row sees follows from its position alone.
    """
    seq = tl.program_id(0)
    row = tl.arange(0, ROWS)
    is_row = row < rows
    positions = tl.load(position_ptr + seq * rows + row, mask=is_row, other=0).to(tl.int32)
    length = tl.minimum(tl.maximum(tl.max(positions, 0) + 1, rows), capacity)
    tl.store(length_ptr + seq, length)
    for word in tl.static_range(words):
        bit = tl.arange(0, 32)
        last = word * 32 + bit  # index among the last R keys
        seen = (last[None, :] < rows) & (length - rows + last[None, :] <= positions[:, None])
        bits = tl.sum(seen.to(tl.int32) << bit[None, :], 1)
        tl.store(mask_ptr + (seq * rows + row) * words + word, bits, mask=is_row)


def _log(kernel: str, refusal: str | None, **shape: Any) -> None:
    what = ", ".join(f"{name} {value}" for name, value in shape.items())
    if refusal is None:
        logger.info("FlashInfer's %s serves %s; it is compiled at first use.", kernel, what)
    else:
        logger.warning(
            "FlashInfer's %s does not serve %s (%s): Triton does.", kernel, what, refusal
        )


def _load() -> tuple[Callable[..., None], Callable[..., Any]]:
    """Returns FlashInfer's `xqa` and its prefill wrapper.

    Raises:
        ConfigError: the package, or something needed to compile it, is missing.
    """
    if importlib.util.find_spec("flashinfer") is None:
        raise ConfigError(
            "attn_backend='flashinfer' needs the package flashinfer-python: pip install "
            "'trtspec[cuda]', or use attn_backend='triton'."
        )
    missing = [name for name, found in _build_tools().items() if not found]
    if missing:
        raise ConfigError(
            "attn_backend='flashinfer' compiles its kernels at first use and did not find "
            f"{', '.join(missing)}: install the CUDA toolkit and set CUDA_HOME (nvcc), put ninja "
            "and a C++ compiler on PATH, or use attn_backend='triton'."
        )
    try:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper, xqa
    except (ImportError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"attn_backend='flashinfer': the package flashinfer-python cannot be loaded ({error}). "
            "Install it anew, pip install 'trtspec[cuda]', or use attn_backend='triton'."
        ) from error
    return xqa, BatchPrefillWithPagedKVCacheWrapper


def _build_tools() -> dict[str, bool]:
    """Returns which build tools were found, looking where FlashInfer looks."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if home is None:
        found = shutil.which("nvcc")
        home = str(Path(found).parent.parent) if found else "/usr/local/cuda"
    nvcc = os.environ.get("FLASHINFER_NVCC") or str(Path(home) / "bin" / "nvcc")
    return {
        "nvcc": shutil.which(nvcc) is not None,
        "ninja": shutil.which("ninja") is not None,
        "a C++ compiler": shutil.which((os.environ.get("CXX") or "c++").split()[-1]) is not None,
    }
