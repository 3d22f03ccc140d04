"""Gated delta rule (Yang et al., arXiv:2412.06464): a layer's memory is one matrix per head.

For each head, with S [Dk, Dv] and a row's q, k, v, decay a = exp(g) and strength b:

    S <- a S;    S <- S + k (b (v - k S));    out = q S

q, k and v come from a causal convolution over W rows, then SiLU. q and k have length 1, then q is
divided by sqrt(Dk). Several value heads share a key head.

**Memory that rejected drafts leave untouched.** A matrix cannot be set back. So what is not yet
certain does not enter it:
- The first row of a generation is certain, the others are of drafts. The matrix takes in the first
  row alone. The others read it, each with the ones before, and it is not written.
- What rows are made of (the inputs of convolution and gates) is kept by position, R places a slot.
  A rejected row is overwritten, as in a KV cache.
- The next pass begins at a later position. The rows between are of accepted drafts: they are
  computed again from those places, and the matrix takes them in.

So a pass reads and writes each matrix once, however many drafts there are. Kernels are in
`triton_delta_rule.py`, and for generations on Hopper in `csrc/include/trtspec/delta_rule.cuh`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import native
from ...metadata.recurrent import DeltaMemory
from ..launch.dispatch import twin

CHUNK = 64
"""Rows of a prompt that are computed at once."""
HEAD, TAPS, MAX_ROWS = 128, 4, 40
"""Of csrc's kernel: sizes of keys and values, of the convolution; rows, read again and new."""
EPS = 1e-6  # under the roots of lengths of q and k
_KERNELS = "layer.triton_delta_rule"


class DeltaRows(NamedTuple):
    """What T rows are made of. Rows may lie apart, columns may not."""

    mixed: Tensor  # [T, C]: q of Hk heads, k of Hk, v of Hv, before the convolution
    gates: Tensor  # [T, 2 * Hv]: strengths before sigmoid, then decays before softplus


class DeltaWeights(NamedTuple):
    """A layer's weights behind its products."""

    conv: Tensor  # [W, C] float32: of the row W-1 rows before, …, of the row itself
    a_log: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv] float32


class Generations(NamedTuple):
    """G requests that verify drafts: rows behind each other, equally many of each."""

    slots: Tensor  # [G] int64
    firsts: Tensor  # [G] int64, position of each one's first row
    taken_in: Tensor  # [G] int64, how many of its tokens the matrices have taken in


class Contexts(NamedTuple):
    """C contexts, behind each other. Rows behind the last context's are padding. A context whose
    last row is that of the context before has no rows."""

    slots: Tensor  # [C] int64
    last_rows: Tensor  # [C] int64
    positions: Tensor  # [T] int64, consecutive in a context


def places(max_draft_len: int, taps: int) -> int:
    """Returns R: rows that are read again, with those that their convolution sees, are not
    overwritten by the rows of the same pass."""
    return 2 * max_draft_len + taps


class HeadNorm(NamedTuple):
    """What stands behind the delta rule: see `norm_and_gate`."""

    gate: Tensor  # [T, Hv * Dv], before SiLU; rows may lie apart
    weight: Tensor  # [Dv]
    eps: float

    def of_rows(self, rows: slice) -> HeadNorm:
        return self._replace(gate=self.gate[rows])


def read_generations(
    rows: DeltaRows,
    weights: DeltaWeights,
    memory: DeltaMemory,
    requests: Generations,
    norm: HeadNorm,
) -> Tensor:
    """Returns `norm_and_gate` of `delta_generations`, [T, Hv * Dv]; one kernel of csrc where it
    serves."""
    if not _csrc_serves(rows, weights, memory, requests):
        return norm_and_gate(delta_generations(rows, weights, memory, requests), *norm)
    out = rows.mixed.new_empty(norm.gate.shape)
    native.kernels(out).delta_generations(
        *rows, norm.gate, *weights, norm.weight, norm.eps, EPS, *memory, *requests, out
    )
    return out


def _csrc_serves(
    rows: DeltaRows, weights: DeltaWeights, memory: DeltaMemory, requests: Generations
) -> bool:
    """Whether csrc's kernel (`delta_rule.cuh`) takes these."""
    mixed = rows.mixed
    if not mixed.is_cuda or mixed.dtype not in (torch.bfloat16, torch.float16):
        return False
    taps, size = weights.conv.shape[0], memory.mixed.shape[1]
    most = (size - taps) // 2 + mixed.shape[0] // requests.slots.shape[0]
    if memory.matrices.shape[2:] != (HEAD, HEAD) or taps != TAPS or most > MAX_ROWS:
        return False
    is_readable = mixed.stride(0) % 8 == 0 and mixed.data_ptr() % 16 == 0
    return is_readable and native.kernels(mixed) is not None


@twin(_KERNELS)
def delta_generations(
    rows: DeltaRows, weights: DeltaWeights, memory: DeltaMemory, requests: Generations
) -> Tensor:
    """Returns what the rows of G generations read, [T, Hv, Dv] in the dtype of `mixed`.

    The matrices take in accepted rows of earlier passes and the first row of each request.
    """
    slots, firsts, taken_in = requests
    count, taps, size = slots.shape[0], weights.conv.shape[0], memory.mixed.shape[1]
    per_request = rows.mixed.shape[0] // count
    device = slots.device
    own = (firsts[:, None] + torch.arange(per_request, device=device)) % size
    for kept, new in zip(memory[1:], rows, strict=True):
        kept[slots[:, None], own] = new.view(count, per_request, -1)
    again = (firsts - taken_in).clamp(0, (size - taps) // 2)  # [G]
    most = int(again.max())
    first_place = firsts[:, None] - most - (taps - 1)
    positions = first_place + torch.arange(most + taps - 1 + per_request, device=device)
    mixed, gates = (kept[slots[:, None], positions % size] for kept in memory[1:])
    # Places that hold another request's rows, or none, may hold anything.
    is_read = positions >= (firsts - again - (taps - 1)).clamp_min(0)[:, None]
    mixed = mixed.masked_fill(~is_read[..., None], 0)
    q, k, v, g, b = _of_rows(mixed, gates[:, taps - 1 :], weights, memory)
    is_row = positions[:, taps - 1 :] >= (firsts - again)[:, None]
    k, v, g, b = (x.masked_fill(~is_row.view(*is_row.shape, *[1] * (x.dim() - 2)), 0)
                  for x in (k, v, g, b))  # fmt: skip
    state = memory.matrices[slots].masked_fill(_is_new(firsts), 0)
    outs = []
    for i in range(most + per_request):
        state = state * g[:, i].exp()[..., None, None]
        seen = torch.einsum("ghk,ghkv->ghv", k[:, i], state)
        state = state + k[:, i, :, :, None] * ((v[:, i] - seen) * b[:, i, :, None])[:, :, None]
        if i == most:
            memory.matrices[slots] = state
        if i >= most:
            outs.append(torch.einsum("ghk,ghkv->ghv", q[:, i], state))
    return torch.stack(outs, 1).flatten(0, 1).to(rows.mixed.dtype)


@twin(_KERNELS)
def delta_contexts(
    rows: DeltaRows, weights: DeltaWeights, memory: DeltaMemory, requests: Contexts
) -> Tensor:
    """Returns what the rows of C contexts read, [T, Hv, Dv] in the dtype of `mixed`.

    The matrices take in all rows. A context that begins at position 0 begins with zeros.
    """
    taps, size = weights.conv.shape[0], memory.mixed.shape[1]
    out = rows.mixed.new_zeros(rows.mixed.shape[0], *memory.matrices.shape[1::2])
    begin = 0
    for slot, last in zip(requests.slots.tolist(), requests.last_rows.tolist(), strict=True):
        end = last + 1
        if end <= begin:
            continue
        position = int(requests.positions[begin])
        before = torch.arange(position - (taps - 1), position, device=out.device)
        earlier = memory.mixed[slot, before % size].masked_fill((before < 0)[:, None], 0)
        mixed = torch.cat((earlier, rows.mixed[begin:end]))
        of_rows = _of_rows(mixed[None], rows.gates[None, begin:end], weights, memory)
        q, k, v, g, b = (x[0] for x in of_rows)
        state = memory.matrices[slot] if position else torch.zeros_like(memory.matrices[slot])
        out[begin:end], memory.matrices[slot] = _chunks(q, k, v, g, b, state)
        kept = torch.arange(max(begin, end - (taps - 1)), end, device=out.device)
        memory.mixed[slot, requests.positions[kept] % size] = rows.mixed[kept]
        begin = end
    return out


def _is_new(firsts: Tensor) -> Tensor:
    return (firsts == 0)[:, None, None, None]


def _of_rows(
    mixed: Tensor, gates: Tensor, weights: DeltaWeights, memory: DeltaMemory
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns q, k [N, T, Hv, Dk], v [N, T, Hv, Dv], log decays and strengths [N, T, Hv], float32.

    Args:
        mixed: [N, W - 1 + T, C], rows before them included. gates: [N, T, 2 * Hv].
    """
    _, heads, key_dim, value_dim = memory.matrices.shape
    taps, wide = weights.conv.shape[0], mixed.float()
    length = mixed.shape[1] - taps + 1
    total = sum(wide[:, i : i + length] * weights.conv[i] for i in range(taps))
    assert isinstance(total, Tensor)
    # Rounded as the convolution of a model in 16 bits rounds, before and after SiLU.
    x = F.silu(total.to(mixed.dtype)).float()
    keys = (mixed.shape[2] - heads * value_dim) // 2
    q, k, v = x.split([keys, keys, heads * value_dim], dim=-1)
    shared = heads * key_dim // keys  # value heads of a key head
    q, k = (
        (y * torch.rsqrt((y * y).sum(-1, keepdim=True) + EPS)).repeat_interleave(shared, dim=2)
        for y in (t.unflatten(-1, (-1, key_dim)) for t in (q, k))
    )
    strength, decay = gates.float().chunk(2, dim=-1)
    g = -weights.a_log.exp() * F.softplus(decay + weights.dt_bias)
    return q * key_dim**-0.5, k, v.unflatten(-1, (heads, value_dim)), g, strength.sigmoid()


def _chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Returns what T rows of one context read, [T, Hv, Dv], and the matrices after them.

    A chunk's rows are solved at once (the paper's section 3.3). With c the sum of log decays from
    the chunk's beginning on, the rows u that are written solve a triangular system,

        u_i + b_i sum_{j < i} exp(c_i - c_j) (k_i k_j) u_j = b_i (v_i - exp(c_i) k_i S)

    Args:
        q, k: [T, Hv, Dk]. v: [T, Hv, Dv]. g, b: [T, Hv]. state: [Hv, Dk, Dv].
    """
    outs = []
    for parts in zip(*(x.split(CHUNK) for x in (q, k, v, g, b)), strict=True):
        qc, kc, vc, gc, bc = (x.transpose(0, 1) for x in parts)  # [Hv, n, …]
        c = gc.cumsum(1)
        decay = (c[:, :, None] - c[:, None, :]).tril().exp().tril()  # [Hv, n, n]
        system = (kc @ kc.transpose(1, 2)) * decay * bc[:, :, None]
        rows = bc[..., None] * (vc - c.exp()[..., None] * (kc @ state))
        u = torch.linalg.solve_triangular(system, rows, upper=False, unitriangular=True)
        scores = (qc @ kc.transpose(1, 2)) * decay
        outs.append(((qc * c.exp()[..., None]) @ state + scores @ u).transpose(0, 1))
        rest = (c[:, -1:] - c).exp()[..., None]
        state = state * c[:, -1:, None].exp() + (kc * rest).transpose(1, 2) @ u
    return torch.cat(outs), state


@twin(_KERNELS)
def norm_and_gate(x: Tensor, gate: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Returns norm(x) * weight * silu(gate), the norm over each head alone, [T, Hv * Dv].

    Args:
        x: [T, Hv, Dv]. gate: [T, Hv * Dv], whose rows may lie apart. weight: [Dv].
    """
    normed = F.rms_norm(x.float(), x.shape[-1:], eps=eps).to(x.dtype)
    gated = (weight * normed).float().flatten(1) * F.silu(gate.float())
    return gated.to(x.dtype)
