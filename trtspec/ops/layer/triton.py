"""Triton kernels of the step's small operations, each with its twin in torch beside it in `ops/`.

One program works on one row: these are bound by launching, not by arithmetic, and what they save
is launches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.triton import after_previous, dependent_launch

if TYPE_CHECKING:
    from .norm import Norm
    from .rope import Rope


FEW_HEADS = 1024  # heads of all rows that get a program each: few want every multiprocessor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x [..., D] -> its norm over the last dimension, times weight + offset."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty(flat.shape, dtype=x.dtype, device=x.device)
    _rms_norm_kernel[(flat.shape[0],)](
        flat, weight, out, flat.stride(0), size, eps,
        OFFSET=offset, BLOCK=triton.next_power_of_2(size), num_warps=4 if size <= 2048 else 8,
        **dependent_launch(x),
    )  # fmt: skip
    return out.view(x.shape)


def add_normed(
    residual: Tensor, x: Tensor, weight: Tensor, eps: float, offset: float, scalar: Tensor | None
) -> Tensor:
    """As `ops/layer/norm.py` says: residual and x [T, D] -> [T, D]."""
    rows, size = x.shape
    out = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    _add_normed_kernel[(rows,)](
        residual, x, weight, scalar, out, residual.stride(0), x.stride(0), size, eps,
        OFFSET=offset, BLOCK=triton.next_power_of_2(size), num_warps=4 if size <= 2048 else 8,
        **dependent_launch(x),
    )  # fmt: skip
    return out


@triton.jit
def _add_normed_kernel(
    residual_ptr, x_ptr, weight_ptr, scalar_ptr, out_ptr, residual_row, x_row, size, eps,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    kind = out_ptr.dtype.element_ty
    d = tl.arange(0, BLOCK)
    inside = d < size
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    after_previous(PDL)
    x = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    residual = tl.load(residual_ptr + row * residual_row + d, mask=inside, other=0.0)
    # Rounded in between, as torch's operations do.
    total = (x * scale * weight).to(kind).to(tl.float32) + residual.to(tl.float32)
    if scalar_ptr is not None:
        total = total.to(kind).to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)
    tl.store(out_ptr + row * size + d, total.to(kind), mask=inside)


@triton.jit
def _rms_norm_kernel(
    x_ptr, weight_ptr, out_ptr, x_row, size, eps,
    OFFSET: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32) + OFFSET
    after_previous(PDL)
    x = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(
        out_ptr + row * size + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] holding gate then up -> silu(gate) * up, [T, I]."""
    return _activate_and_mul(gate_up, is_gelu=False)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] holding gate then up -> gelu(gate) * up by gelu's approximation with tanh, [T, I]."""
    return _activate_and_mul(gate_up, is_gelu=True)


def _activate_and_mul(gate_up: Tensor, is_gelu: bool) -> Tensor:
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(inner))
    _activate_and_mul_kernel[(rows, triton.cdiv(inner, block))](
        gate_up, out, gate_up.stride(0), inner, IS_GELU=is_gelu, BLOCK=block, num_warps=4,
        **dependent_launch(gate_up),
    )  # fmt: skip
    return out


@triton.jit
def _activate_and_mul_kernel(
    x_ptr, out_ptr, x_row, inner, IS_GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < inner
    gate = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_row + inner + d, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    z = x
    if IS_GELU:  # (1 + tanh(y)) / 2 is the logistic function of 2 y; y = sqrt(2 / pi) (x + …)
        z = 1.5957691216057308 * (x + 0.044715 * x * x * x)
    activated = x / (1.0 + tl.exp(-z))
    # Rounded in between, as torch's two operations do.
    value = activated.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * inner + d, value.to(out_ptr.dtype.element_ty), mask=inside)


def rope_and_write(
    qkv: Tensor, rope: Rope, q_heads: int, k_slots: Tensor, v_slots: Tensor, slots: Tensor,
    scratch_slot: int, qk_norms: tuple[Norm, Norm] | None, keeps_finite: bool,
    norms_values: bool = False,
) -> Tensor:  # fmt: skip
    """As `ops/layer/rope.py` says: qkv [T, Hq + 2 Hkv, D] -> the rotated queries [T, Hq, D]."""
    rows, heads, dim = qkv.shape
    q = torch.empty((rows, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    q_norm, k_norm = qk_norms or (None, None)
    per_program = 1 if rows * heads <= FEW_HEADS else 4
    _rope_and_write_kernel[(rows, triton.cdiv(heads, per_program))](
        qkv, rope.cos_sin, rope.position_ids, slots, q, k_slots, v_slots,
        q if q_norm is None else q_norm.weight, q if k_norm is None else k_norm.weight,
        0.0 if q_norm is None else q_norm.eps, scratch_slot,
        qkv.stride(0), qkv.stride(1), k_slots.stride(0), k_slots.stride(1),
        v_slots.stride(0), v_slots.stride(1),
        q_heads=q_heads, kv_heads=k_slots.shape[1], dim=dim, HAS_NORMS=qk_norms is not None,
        OFFSET=0.0 if q_norm is None else q_norm.offset, NORMS_VALUES=norms_values,
        KEEPS_FINITE=keeps_finite, HEADS=per_program, BLOCK=triton.next_power_of_2(dim),
        num_warps=1, **dependent_launch(qkv),
    )  # fmt: skip
    return q


@triton.jit
def _rope_and_write_kernel(
    qkv_ptr, table_ptr, position_ptr, slot_ptr, q_ptr, k_ptr, v_ptr, q_norm_ptr, k_norm_ptr, eps,
    scratch_slot, x_row, x_head, k_row, k_head, v_row, v_head,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr, HAS_NORMS: tl.constexpr,
    OFFSET: tl.constexpr, NORMS_VALUES: tl.constexpr, KEEPS_FINITE: tl.constexpr,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one row."""
    row = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    kind = q_ptr.dtype.element_ty
    half: tl.constexpr = dim // 2
    d = tl.arange(0, BLOCK)[None, :]
    is_q, is_value = head < q_heads, head >= q_heads + kv_heads
    in_dim = d < dim
    inside = in_dim & (head < q_heads + 2 * kv_heads)
    opposite = (d + half) % dim
    slot = tl.load(slot_ptr + row, cache_modifier=".cg")
    slot = tl.where(slot < 0, scratch_slot, slot)
    position = tl.load(position_ptr + row, cache_modifier=".cg")
    table = table_ptr + position * dim + d % half
    # Rounded as the model's dtype holds them, and in between, as torch's two operations do.
    cos = tl.load(table, mask=in_dim, other=0.0, cache_modifier=".cg").to(kind).to(tl.float32)
    sin = tl.load(table + half, mask=in_dim, other=0.0, cache_modifier=".cg")
    sin = sin.to(kind).to(tl.float32)
    sin = tl.where(d < half, -sin, sin)
    after_previous(PDL)  # which made q, k and v; places are older
    source = qkv_ptr + row * x_row + head * x_head
    x = tl.load(source + d, mask=inside, other=0.0)
    other = tl.load(source + opposite, mask=inside, other=0.0)
    if KEEPS_FINITE:
        x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)
        other = tl.where(tl.abs(other.to(tl.float32)) < float("inf"), other, 0.0)
    place = v_ptr + slot * v_row + (head - q_heads - kv_heads) * v_head
    value = x.to(tl.float32)
    if HAS_NORMS:
        scale = tl.rsqrt(tl.sum(value * value, 1) / dim + eps)[:, None]
    stored = (value * scale).to(kind) if NORMS_VALUES else x
    tl.store(place + d, stored.to(v_ptr.dtype.element_ty), mask=inside & is_value)
    if HAS_NORMS:
        q_weight = tl.load(q_norm_ptr + d, mask=in_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + d, mask=in_dim, other=0.0)
        weight = tl.where(is_q, q_weight, k_weight).to(tl.float32) + OFFSET
        x = (value * scale * weight).to(kind)
        q_weight = tl.load(q_norm_ptr + opposite, mask=in_dim, other=0.0)
        k_weight = tl.load(k_norm_ptr + opposite, mask=in_dim, other=0.0)
        weight = tl.where(is_q, q_weight, k_weight).to(tl.float32) + OFFSET
        other = (other.to(tl.float32) * scale * weight).to(kind)
    turned = (x.to(tl.float32) * cos).to(kind).to(tl.float32)
    turned = (turned + other.to(tl.float32) * sin).to(kind)
    if KEEPS_FINITE:  # a rotation may overflow too
        turned = tl.where(tl.abs(turned.to(tl.float32)) < float("inf"), turned, 0.0)
    tl.store(q_ptr + (row * q_heads + head) * dim + d, turned, mask=inside & is_q)
    place = k_ptr + slot * k_row + (head - q_heads) * k_head
    tl.store(place + d, turned, mask=inside & ~is_q & ~is_value)


def rope_queries(q: Tensor, rope: Rope, norm: Norm) -> Tensor:
    """As `ops/layer/rope.py` says: q [T, Hq, D] -> the same, normed and rotated."""
    rows, heads, dim = q.shape
    out = torch.empty((rows, heads, dim), dtype=q.dtype, device=q.device)
    per_program = 1 if rows * heads <= FEW_HEADS else 4
    _rope_and_write_kernel[(rows, triton.cdiv(heads, per_program))](  # of no keys and values
        q, rope.cos_sin, rope.position_ids, rope.position_ids, out, out, out,
        norm.weight, norm.weight, norm.eps, 0, q.stride(0), q.stride(1), 0, 0, 0, 0,
        q_heads=heads, kv_heads=0, dim=dim, HAS_NORMS=True, OFFSET=norm.offset,
        NORMS_VALUES=False, KEEPS_FINITE=False, HEADS=per_program,
        BLOCK=triton.next_power_of_2(dim), num_warps=1, **dependent_launch(q),
    )  # fmt: skip
    return out


def embed(ids: Tensor, weight: Tensor, scale: float = 1.0) -> Tensor:
    """ids [T] int, read as the nearest one that the table [V, D] has -> [T, D], times scale."""
    vocab, size = weight.shape
    out = torch.empty((ids.shape[0], size), dtype=weight.dtype, device=weight.device)
    block = min(1024, triton.next_power_of_2(size))
    _embed_kernel[(ids.shape[0], triton.cdiv(size, block))](
        ids, weight, out, vocab, size, weight.stride(0), SCALE=scale, BLOCK=block,
        **dependent_launch(weight),
    )  # fmt: skip
    return out


@triton.jit
def _embed_kernel(
    ids_ptr, weight_ptr, out_ptr, vocab, size, weight_row,
    SCALE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(ids_ptr + row).to(tl.int64)
    token = tl.minimum(tl.maximum(token, 0), vocab - 1)
    x = tl.load(weight_ptr + token * weight_row + d, mask=d < size)
    if SCALE != 1.0:
        x = (x.to(tl.float32) * SCALE).to(x.dtype)
    tl.store(out_ptr + row * size + d, x, mask=d < size)


def soft_cross_entropy_(
    logits: Tensor, theirs: Tensor, rows: Tensor, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """As its twin in `soft_cross_entropy.py`."""
    count, vocab = logits.shape
    loss = torch.empty(count, dtype=torch.float32, device=logits.device)
    best = torch.empty(count, dtype=torch.int64, device=logits.device)
    _soft_cross_entropy_kernel[(count,)](
        logits, theirs, rows, counts, loss, best, logits.stride(0), theirs.stride(0), vocab,
        # A thread for every element, or two warps would hold the same one while it is overwritten.
        BLOCK=min(4096, max(256, triton.next_power_of_2(vocab))), num_warps=8,
        **dependent_launch(logits),
    )  # fmt: skip
    return loss, best


@triton.jit
def _soft_cross_entropy_kernel(
    logits_ptr, theirs_ptr, rows_ptr, counts_ptr, loss_ptr, best_ptr, logits_row, theirs_row, vocab,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row, read twice: both normalizers and the best token, then loss and gradient."""
    after_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    z_ptr = logits_ptr + row * logits_row
    t_ptr = theirs_ptr + tl.load(rows_ptr + row) * theirs_row
    counts = tl.load(counts_ptr + row)
    v = tl.arange(0, BLOCK)
    z_max, t_max = float("-inf"), float("-inf")
    z_sum, t_sum = 0.0, 0.0
    best = 0
    for start in range(0, vocab, BLOCK):
        inside = start + v < vocab
        z = tl.load(z_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
        t = tl.load(t_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
        new = tl.max(z, 0)
        if new > z_max:
            best = start + tl.argmax(z, 0)
        new = tl.maximum(new, z_max)
        z_sum = z_sum * tl.exp(z_max - new) + tl.sum(tl.exp(z - new), 0)
        z_max = new
        new = tl.maximum(tl.max(t, 0), t_max)
        t_sum = t_sum * tl.exp(t_max - new) + tl.sum(tl.exp(t - new), 0)
        t_max = new
    normalizer, t_normalizer = z_max + tl.log(z_sum), t_max + tl.log(t_sum)
    cross = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        inside = start + v < vocab
        z = tl.load(z_ptr + start + v, mask=inside, other=0.0).to(tl.float32)
        t = tl.load(t_ptr + start + v, mask=inside, other=float("-inf")).to(tl.float32)
        p = tl.exp(t - t_normalizer)
        cross += p * z
        gradient = tl.where(counts, tl.exp(z - normalizer) - p, 0.0)
        tl.store(z_ptr + start + v, gradient.to(logits_ptr.dtype.element_ty), mask=inside)
    tl.store(loss_ptr + row, tl.where(counts, normalizer - tl.sum(cross, 0), 0.0))
    tl.store(best_ptr + row, best)
