"""Triton kernels of the step's small operations, each with its twin in torch beside it in `ops/`.

One program works on one row: these are bound by launching, not by arithmetic, and what they save
is launches.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def add_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x, residual [..., D] -> (norm of their sum, their sum). The sum is rounded first."""
    size = x.shape[-1]
    flat = x.reshape(-1, size)
    out = torch.empty_like(flat)
    total = flat if residual is None else torch.empty_like(flat)
    _add_rms_norm_kernel[(flat.shape[0],)](
        flat, flat if residual is None else residual.reshape(-1, size), weight, out, total,
        flat.stride(0), 0 if residual is None else residual.reshape(-1, size).stride(0), size, eps,
        HAS_RESIDUAL=residual is not None, BLOCK=triton.next_power_of_2(size),
        num_warps=4 if size <= 2048 else 8,
    )  # fmt: skip
    return out.view(x.shape), total.view(x.shape)


@triton.jit
def _add_rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, x_row, residual_row, size, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < size
    x = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0)
    if HAS_RESIDUAL:
        residual = tl.load(residual_ptr + row * residual_row + d, mask=inside, other=0.0)
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(out_ptr.dtype.element_ty)
        tl.store(total_ptr + row * size + d, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    weight = tl.load(weight_ptr + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * size + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """[T, 2I] holding gate then up -> silu(gate) * up, [T, I]."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, inner), dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(inner))
    _silu_and_mul_kernel[(rows, triton.cdiv(inner, block))](
        gate_up, out, gate_up.stride(0), inner, BLOCK=block, num_warps=4
    )
    return out


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, x_row, inner, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < inner
    gate = tl.load(x_ptr + row * x_row + d, mask=inside, other=0.0)
    up = tl.load(x_ptr + row * x_row + inner + d, mask=inside, other=0.0)
    activated = gate.to(tl.float32) / (1.0 + tl.exp(-gate.to(tl.float32)))
    # Rounded in between, as torch's two operations do.
    value = activated.to(up.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * inner + d, value.to(out_ptr.dtype.element_ty), mask=inside)


def rope_and_write(
    qkv: Tensor, cos: Tensor, sin: Tensor, q_heads: int, k_slots: Tensor, v_slots: Tensor,
    slots: Tensor, keeps_finite: bool,
) -> Tensor:  # fmt: skip
    """Rotates queries and keys, and puts keys and values into the cache.

    Args:
        qkv: [T, Hq + 2 Hkv, D]; cos, sin: [T, 1, D], as `ops/rope.py` makes them.
        k_slots, v_slots: [slots, Hkv, D]; slots: [T] int64, all of them valid.
        keeps_finite: NaN and infinities are read as 0.

    Returns:
        The rotated queries, [T, Hq, D].
    """
    rows, heads, dim = qkv.shape
    kv_heads = k_slots.shape[1]
    q = torch.empty((rows, q_heads, dim), dtype=qkv.dtype, device=qkv.device)
    _rope_and_write_kernel[(rows, heads)](
        qkv, cos, sin, slots, q, k_slots, v_slots,
        qkv.stride(0), qkv.stride(1), k_slots.stride(0), k_slots.stride(1),
        v_slots.stride(0), v_slots.stride(1),
        q_heads=q_heads, kv_heads=kv_heads, dim=dim, KEEPS_FINITE=keeps_finite,
        BLOCK=triton.next_power_of_2(dim), num_warps=1,
    )  # fmt: skip
    return q


@triton.jit
def _rope_and_write_kernel(
    qkv_ptr, cos_ptr, sin_ptr, slot_ptr, q_ptr, k_ptr, v_ptr,
    x_row, x_head, k_row, k_head, v_row, v_head,
    q_heads: tl.constexpr, kv_heads: tl.constexpr, dim: tl.constexpr,
    KEEPS_FINITE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    inside = d < dim
    source = qkv_ptr + row * x_row + head * x_head
    x = tl.load(source + d, mask=inside, other=0.0)
    other = tl.load(source + (d + dim // 2) % dim, mask=inside, other=0.0)
    if KEEPS_FINITE:
        x = tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)
        other = tl.where(tl.abs(other.to(tl.float32)) < float("inf"), other, 0.0)
    if head < q_heads + kv_heads:
        cos = tl.load(cos_ptr + row * dim + d, mask=inside, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + row * dim + d, mask=inside, other=0.0).to(tl.float32)
        # Rounded in between, as torch's two operations do.
        turned = (x.to(tl.float32) * cos).to(q_ptr.dtype.element_ty).to(tl.float32)
        turned = (turned + other.to(tl.float32) * sin).to(q_ptr.dtype.element_ty)
        if head < q_heads:
            tl.store(q_ptr + (row * q_heads + head) * dim + d, turned, mask=inside)
        else:
            slot = tl.load(slot_ptr + row)
            tl.store(k_ptr + slot * k_row + (head - q_heads) * k_head + d, turned, mask=inside)
    else:
        slot = tl.load(slot_ptr + row)
        place = v_ptr + slot * v_row + (head - q_heads - kv_heads) * v_head
        tl.store(place + d, x.to(v_ptr.dtype.element_ty), mask=inside)
