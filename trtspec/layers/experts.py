"""A mixture of experts: which experts each row goes to, and the weighted sum of what they return.

The routing is DeepSeek-V3's (arXiv:2412.19437, section 2.1.2), which GLM-4-MoE shares; with one
group, softmax scores and no bias it is the classic one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..ops.launch.dispatch import moe_kernels
from ..ops.launch.machine import INVARIANT_ROWS
from ..ops.layer.activation import silu_and_mul
from .linear import Linear

MAX_ROUTER_ROWS = 16
"""For up to so many rows the scores are a kernel of ours: cuBLAS has few programs for them."""
MIN_LIBRARY_ROWS = 64
"""Rows an expert, on average, from which on torch's `grouped_mm` is faster than our kernel."""


def route(
    logits: Tensor, bias: Tensor | None, top_k: int, *, scoring: str = "sigmoid", n_group: int = 1,
    topk_group: int = 1, normalize: bool = True, scale: float = 1.0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The experts of each row and their weights, ([T, top_k] int64, [T, top_k] float32).

    Args:
        logits: [T, E] float32.
        bias: [E] float32, added to the scores for the choice, not for the weights; or None.
        scoring: "sigmoid" of each logit or "softmax" over all.
        n_group, topk_group: experts come from the `topk_group` of `n_group` groups whose two best
            scores have the largest sums.
        normalize: weights sum to 1 before `scale` is applied.
    """
    kernels = moe_kernels(logits)
    if kernels is not None:
        return kernels.route(
            logits, bias, top_k, scoring=scoring, n_group=n_group, topk_group=topk_group,
            normalize=normalize, scale=scale,
        )  # fmt: skip
    scores = logits.sigmoid() if scoring == "sigmoid" else logits.softmax(-1)  # [T, E]
    choice = scores if bias is None else scores + bias
    if n_group > 1:
        grouped = choice.unflatten(-1, (n_group, -1))  # [T, G, E/G]
        groups = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_group, dim=-1).indices
        inside = torch.zeros_like(grouped[..., 0], dtype=torch.bool).scatter_(-1, groups, True)
        choice = grouped.masked_fill(~inside[..., None], -torch.inf).flatten(-2)
    ids = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, ids)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * scale


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] times weight [E, D], [T, E] in float32 whatever the model's dtype: as transformers
    computes DeepSeek's. (Gemma's it rounds, so that near-ties in bf16 may go another way.) On the
    CPU few rows are filled up, so that a row's logits do not depend on their number
    (`layers/linear.py` says why)."""
    rows, kernels = x.shape[0], moe_kernels(x)
    if kernels is not None and 0 < rows <= MAX_ROUTER_ROWS:
        return kernels.router_logits(x, weight)
    if not x.is_cuda and rows < INVARIANT_ROWS:
        x = F.pad(x, (0, 0, 0, INVARIANT_ROWS - rows))
    return F.linear(x.float(), weight.float())[:rows]


class Experts(nn.Module):
    """E gated networks. `gate_up_proj` [E, 2I, D], `down_proj` [E, D, I]; after `pack()` on CPU
    each expert's packed `Linear`s replace them.

    Args:
        gate_and_mul: what stands between the two products, [n, 2I] -> [n, I].
    """

    def __init__(
        self, num_experts: int, size: int, inner: int,
        gate_and_mul: Callable[[Tensor], Tensor] = silu_and_mul,
    ):  # fmt: skip
        super().__init__()
        self.num_experts, self.size, self.inner = num_experts, size, inner
        self.gate_and_mul = gate_and_mul
        self.gate_up_proj: nn.Parameter | None = nn.Parameter(
            torch.empty(num_experts, 2 * inner, size), requires_grad=False
        )
        self.down_proj: nn.Parameter | None = nn.Parameter(
            torch.empty(num_experts, size, inner), requires_grad=False
        )
        self._packed: list[tuple[Linear, Linear]] = []

    def pack(self) -> None:
        """Packs every expert as `Linear.pack` does; does nothing off the CPU."""
        if self.gate_up_proj is None or self.gate_up_proj.device.type != "cpu":
            return
        assert self.down_proj is not None
        self._packed = [
            (_packed(up), _packed(down))
            for up, down in zip(self.gate_up_proj.data, self.down_proj.data, strict=True)
        ]
        self.gate_up_proj = self.down_proj = None

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum over each row's experts of weight times expert(x), added up in float32.

        Args:
            x: [T, D]. ids, weights: [T, k] int64 and float32, as `route` returns them.

        Returns:
            [T, D], x's dtype.
        """
        if not x.is_cuda:
            return self._expert_by_expert(x, ids, weights)
        assert self.gate_up_proj is not None and self.down_proj is not None
        stacked = self.gate_up_proj, self.down_proj
        return grouped_experts(x, ids, weights, *stacked, self.gate_and_mul)

    def _expert_by_expert(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Only the experts that were chosen, each over its rows. A row is summed in the order of
        its experts, whatever rows are beside it. (Asking which were chosen is free on the CPU.)"""
        out = torch.zeros(x.shape, dtype=torch.float32)
        for expert in ids.unique().tolist():
            rows, choices = (ids == expert).nonzero(as_tuple=True)
            y = self._expert(expert, x[rows]).float() * weights[rows, choices, None]
            out = out.index_add(0, rows, y)
        return out.to(x.dtype)

    def _expert(self, expert: int, x: Tensor) -> Tensor:
        """x [n, D] -> [n, D]."""
        if self._packed:
            gate_up, down = self._packed[expert]
            return down(self.gate_and_mul(gate_up(x)))
        assert self.gate_up_proj is not None and self.down_proj is not None
        inner = self.gate_and_mul(F.linear(x, self.gate_up_proj[expert]))
        return F.linear(inner, self.down_proj[expert])


def _packed(weight: Tensor) -> Linear:
    with torch.device("meta"):
        linear = Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    linear.pack()
    return linear


def grouped_experts(
    x: Tensor, ids: Tensor, weights: Tensor, gate_up_proj: Tensor, down_proj: Tensor,
    gate_and_mul: Callable[[Tensor], Tensor] = silu_and_mul,
) -> Tensor:  # fmt: skip
    """`Experts.forward` as two grouped products over the rows sorted by expert; nothing waits."""
    rows, ends, places = sort_by_expert(ids, gate_up_proj.shape[0])
    inner = gate_and_mul(grouped_matmul(x[rows], gate_up_proj, ends))  # [T*k, I]
    return combine(grouped_matmul(inner, down_proj, ends), places, weights)


def grouped_matmul(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows x [N, K] in the order of their experts, each times its own of weight [E, M, K].

    Args:
        ends: [E] int32, where each expert's rows end.
    """
    is_many = x.shape[0] >= MIN_LIBRARY_ROWS * weight.shape[0]
    kernels = None if is_many and has_grouped_mm(x, weight) else moe_kernels(x)
    if kernels is not None:
        return kernels.grouped_matmul(x, weight, ends)
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends)


def has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether torch's `grouped_mm` is one kernel for these; else it asks the host for `ends`."""
    if not x.is_cuda or x.dtype != torch.bfloat16:
        return False
    is_aligned = x.shape[1] % 8 == 0 and weight.shape[1] % 8 == 0  # rows of 16 bytes
    return is_aligned and torch.cuda.get_device_capability(x.device)[0] in (9, 10)


def sort_by_expert(ids: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The (row, choice) pairs of ids [T, k] in the order of their experts, of which there are
    `count`.

    Returns:
        The row of each sorted pair, [T*k] int64; where each expert's pairs end, [E] int32; the
        place of each pair in that order, [T*k] int64.
    """
    kernels = moe_kernels(ids)
    if kernels is not None:
        return kernels.sort_by_expert(ids, count)
    by_expert, order = ids.flatten().sort(stable=True)
    experts = torch.arange(count, device=ids.device)
    ends = torch.searchsorted(by_expert, experts, right=True, out_int32=True)
    pairs = torch.arange(len(order), device=ids.device)
    return order // ids.shape[1], ends, torch.empty_like(order).scatter_(0, order, pairs)


def combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """What the experts returned, y [T*k, D] in sorted order, times weights [T, k] and added up in
    float32: [T, D], y's dtype."""
    kernels = moe_kernels(y)
    if kernels is not None:
        return kernels.combine(y, places, weights)
    chosen = y[places].unflatten(0, weights.shape).float()  # [T, k, D]
    return (chosen * weights[..., None]).sum(1).to(y.dtype)
