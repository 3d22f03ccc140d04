"""A matrix product with what stands before and after it in a decoder layer.

For the few rows of a decoding step on Hopper each function here is one kernel of `csrc/`; elsewhere
it is the operations one after the other (`ops/layer/`). A decoder layer is four of them:

    hidden [T, D] ─┬─▶ norm ▸ qkv_proj ▸ rotate, write K and V to the cache   qkv_rope_and_write
                   │                        │ q
                   │                    attention
                   └─── + ◀── o_proj ◀──────┘                                 linear, residual
                        │
                        ├─▶ norm ▸ gate_up_proj ▸ silu(gate) * up             gated, gated_mlp
                        └─── + ◀── down_proj ◀──┘                             linear, residual

So the pieces of a decoder do not call their norms and do not add. The contract is:
- Inputs come before their norm, as a tuple: one tensor [T, D], or two whose normed values stand
  side by side (EAGLE-3's embeddings and hidden states). `norms` has one for each, or is empty.
  The first of two may be ids and a table (`Embedded`), which a kernel looks up itself.
- A module that owns a product takes the norm before it: `self_attn((hidden,), (norm,), hidden, …)`.
- `residual` is what the product is added to. With `in_place` the sum takes the residual's memory,
  so a layer returns the stream in the memory of its input. Copy what must outlast it.
- Under autograd nothing is fused and nothing is overwritten.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..distributed.comm import ALONE
from ..ops.launch.tickets import StreamMemory
from ..ops.layer import cublaslt, four_bits, fp8
from ..ops.layer.activation import GateAndMul
from ..ops.layer.copy import copy_rows
from ..ops.layer.fp8 import Fp8Rows
from ..ops.layer.rope import CacheWrite, Rope, rope_and_write
from .embedding import Embedded
from .linear import Linear
from .norm import RMSNorm

Inputs = tuple[Tensor | Embedded, ...]
"""One tensor [T, D], or two that stand side by side."""
Rows = tuple[Tensor, ...]
"""Inputs that have been looked up."""
Norms = tuple[RMSNorm, ...]
"""One for each input, or none."""

LARGE, MAX_ROWS_OF_LARGE = 4 << 20, 8
"""Weights of this many values are read by other kernels than smaller ones, for fewer rows."""
NARROW, LARGE_NARROW = 1024, 9_000_000
"""Of weights with at most `NARROW` columns and a multiple of `TILE` outputs, this many values."""
MAX_ROWS_OF_DEEP, DEEP = 16, 2048
"""More rows of such a weight with this many columns, of one input; and of a narrow one of `LARGE`
values."""
MAX_ROWS, MAX_TILED_ROWS = 32, 256
"""The most rows for small weights. It is `MAX_TILED_ROWS` where outputs are a multiple of `TILE`.
Two inputs then need norms."""
TILE, MAX_TILED_COLUMNS = 16, 16 << 10
MAX_TILED_PRODUCTS, MAX_TILED_NORMED_PRODUCTS = 115_000_000, 250_000_000
"""Above `MAX_ROWS`: rows times values of a weight, without and with a norm, where cuBLAS becomes
faster (decision 029). A norm, and what follows it, are further kernels around cuBLAS."""
MAX_AT_ONCE_COLUMNS, LEAST_WIDE = 640, 2048
"""Columns that all are on their way at once, and outputs of a wide weight with a norm."""
LEAST_DEEP_COLUMNS, MAX_DEEP_COLUMNS, MAX_ROWS_OF_FEW_OUTS = 1536, 3072, 192
"""Of a weight without a norm whose columns a cluster divides. More were not measured."""
MAX_ROWS_OF_FILLING, MAX_COLUMNS_OF_FILLING = 32, 8192
"""More rows of a deep weight of `LARGE` values, of one input, whose blocks fill the GPU. More
columns were not measured."""
MAX_COLUMNS_ALONE, MAX_COLUMNS_OF_WIDEST = 3584, 2048
"""Of blocks that have all columns, without a norm, and of the widest."""
MAX_NORMED_BYTES, MAX_NORMED_BYTES_OF_DEEP = 104 << 10, 140 << 10
"""Of normed rows of a large weight (kMaxResident… in csrc/linear_impl.cuh)."""
MAX_ROWS_OF_FP8 = 8
MAX_RESTING_BYTES = 140 << 10
"""What the kernel for FP8 weights holds of all rows, at most kMaxResting in csrc."""
MAX_ROWS_OF_FOUR_BITS = 16
TILES_OUTPUTS, MAX_HEAD_BLOCKS = 32, 8
"""Outputs of a tile that has norms of heads, and tiles of a head at most."""
_KEYS = StreamMemory(torch.int64, least=MAX_ROWS_OF_LARGE + 1)  # zeros between kernels
MAX_NORMED_BYTES_OF_FOUR_BITS = 68 << 10, 140 << 10
"""What the kernel for weights of 4 bits holds of up to 8 normed rows, and of more."""


def linear(
    inputs: Inputs,
    layer: Any,
    norms: Norms = (),
    residual: Tensor | None = None,
    in_place: bool = False,
    copy_to: Tensor | None = None,
) -> Tensor:
    """Returns layer(normed inputs) + residual, [T, out].

    Where several ranks have parts of the sum, the first adds the residual to its own. Use what is
    returned: the residual's memory is then spent, and may hold a part of the sum.

    Args:
        layer: a `Linear`, or any module that maps [T, in] to [T, out].
        in_place: the sum takes the residual's memory.
        copy_to: [T, out] that takes the sum too.
    """
    is_alone = getattr(layer, "sums_over", ALONE).size == 1
    if is_alone and residual is None and copy_to is None:
        found = _of_table(inputs, layer, norms)
        if found is not None:
            return found
    of_part, rows = copy_to if is_alone else None, _looked_up(inputs)
    out = _over_ranks(
        layer, residual, lambda added: _own_part(rows, layer, norms, added, in_place, of_part)
    )
    if copy_to is not None and not is_alone:
        copy_rows(out, copy_to)
    return out


def _of_table(inputs: Inputs, layer: Any, norms: Norms) -> Tensor | None:
    """Returns a product of two normed inputs whose kernel looks the first one up, [T, out].

    None: look it up before.
    """
    table = _table_of(inputs, layer, norms)
    if table is None:
        return None
    rows = _looked_up((inputs[1], inputs[1]))  # the second stands for the first
    kernels = _kernels(rows, layer, norms)
    if kernels is None:
        return None
    out = rows[0].new_empty(rows[0].shape[0], layer.out_features)
    _, *others = _arguments(rows, norms, layer)
    kernels.linear(table.table, table.ids, *others, None, out, None)
    return out


def _over_ranks(
    layer: Any, residual: Tensor | None, own_part: Callable[[Tensor | None], Tensor]
) -> Tensor:
    """Adds up what `own_part` returns on the ranks that share a layer, the residual once."""
    ranks = getattr(layer, "sums_over", ALONE)
    if ranks.size == 1:
        return own_part(residual)
    return ranks.all_reduce(own_part(residual if ranks.rank == 0 else None))


def _looked_up(inputs: Inputs) -> Rows:
    return tuple(x.rows() if isinstance(x, Embedded) else x for x in inputs)


def largest_output(
    x: Tensor, layer: Any, norm: RMSNorm | None, d2t: Tensor | None = None
) -> Tensor | None:
    """Returns the index of each row's largest output of layer(norm(x)), [T] int32, from one kernel.

    Outputs are compared as the dtype holds them. Of equals the first is taken, a NaN never.

    Args:
        d2t: [out] int64 offsets, which are added to the indices.

    Returns:
        None where no kernel serves: make the outputs (`linear`), and choose.
    """
    norms: Norms = () if norm is None else (norm,)
    kernels = _kernels((x,), layer, norms)
    if kernels is None or layer.weight is None or layer.fp8 is not None or layer.bias is not None:
        return None
    if not _is_narrow(layer.weight, (x,)) or x.shape[0] > MAX_ROWS_OF_LARGE:
        return None
    if layer.shard.count > 1:
        return None
    if d2t is not None and (d2t.dtype != torch.int64 or not d2t.is_contiguous()):
        return None
    tokens = torch.empty(x.shape[0], dtype=torch.int32, device=x.device)
    keys = _KEYS.on(x.device, MAX_ROWS_OF_LARGE + 1)
    kernels.largest_output(x, *_norm(norms), layer.weight, d2t, keys, tokens)
    return tokens


def _own_part(
    inputs: Rows,
    layer: Any,
    norms: Norms,
    residual: Tensor | None,
    in_place: bool,
    copy_to: Tensor | None,
) -> Tensor:
    """`linear` on one rank."""
    kernels = None if norms and residual is not None else _kernels(inputs, layer, norms)
    # A backward pass needs what was there.
    in_place = in_place and not _wants_gradient(layer, norms, *inputs, residual)
    if kernels is None or not (residual is None or _takes_pairs(residual, inputs[0].dtype)):
        total = _unfused(inputs, layer, norms, residual, in_place)
        if copy_to is not None:
            copy_rows(total, copy_to)
        return total
    out = residual
    if out is None or not in_place:
        out = inputs[0].new_empty(inputs[0].shape[0], layer.out_features)
    takes_copy = copy_to is not None and residual is not None and _takes_pairs(copy_to, out.dtype)
    x0, *others = _arguments(inputs, norms, layer)
    kernels.linear(x0, None, *others, residual, out, copy_to if takes_copy else None)
    if copy_to is not None and not takes_copy:
        copy_rows(out, copy_to)
    return out


def _unfused(
    inputs: Rows, layer: Any, norms: Norms, residual: Tensor | None, in_place: bool
) -> Tensor:
    """`linear` on one rank by libraries, with small kernels around them."""
    if _multiplies_codes(layer):
        alone = len(inputs) == 1
        x = inputs[0] if alone else _side_by_side(inputs, norms)
        rows = fp8.quantize_rows(x, norms[0] if norms and alone else None)
        return _of_codes(rows, layer, x.dtype, residual, in_place)
    x = _side_by_side(inputs, norms)
    packed = layer.four_bits if type(layer) is Linear else None
    if packed is not None and norms and is_one_kernel((x,), layer, ()):
        return _own_part((x,), layer, (), residual, in_place, copy_to=None)
    if residual is None:
        return layer(x)
    if in_place and x.is_cuda and layer.bias is None:
        if packed is not None:
            return four_bits.multiply(x, packed, residual)
        if (weight := layer.fp8) is not None:
            return fp8.multiply_floats(x, weight, residual)
        if cublaslt.multiply(x, layer.weight, residual) is not None:
            return residual
        return residual.addmm_(x, layer.weight.t())
    return residual.add_(layer(x)) if in_place else residual + layer(x)


def _multiplies_codes(layer: Any) -> bool:
    """Whether a layer's activations are rounded to FP8."""
    weight = layer.fp8 if type(layer) is Linear else None
    return weight is not None and weight.by_rows


def _of_codes(
    x: Fp8Rows, layer: Linear, dtype: torch.dtype, residual: Tensor | None, in_place: bool
) -> Tensor:
    """`linear` on one rank, of rows in FP8."""
    weight = layer.fp8
    assert weight is not None
    product, by = fp8.product(x, weight, layer.bias, dtype)
    if residual is not None and not in_place:
        residual = residual.clone()
    return fp8.rescale(product, by, dtype, residual)


def gated_mlp(
    hidden: Tensor,
    gate_up: Linear,
    down: Linear,
    norm: RMSNorm | None,
    between: GateAndMul,
    adds: bool,
    copy_to: Tensor | None = None,
) -> Tensor:
    """Returns down(between(gate_up(norm(hidden)))), [T, D].

    Args:
        adds: to hidden, in its memory.
        copy_to: as of `linear`.
    """
    residual, is_swiglu = hidden if adds else None, not between.is_gelu and between.limit is None
    if not (is_swiglu and _multiplies_codes(gate_up) and _multiplies_codes(down)) or (
        norm is None or _kernels((hidden,), gate_up, (norm,), is_gated=True) is not None
    ):
        inner = gated(hidden, gate_up, norm, between)
        return linear((inner,), down, residual=residual, in_place=adds, copy_to=copy_to)
    weight = gate_up.fp8
    assert weight is not None
    rows = fp8.quantize_rows(hidden, norm)
    product, by = fp8.product(rows, weight, gate_up.bias, hidden.dtype)
    codes = fp8.rescaled_swiglu(product, by)
    out = _over_ranks(
        down, residual, lambda added: _of_codes(codes, down, hidden.dtype, added, in_place=True)
    )
    if copy_to is not None:
        copy_rows(out, copy_to)
    return out


def gated(x: Tensor, layer: Linear, norm: RMSNorm | None, between: GateAndMul) -> Tensor:
    """Returns between(layer(norm(x))), [T, I], of a layer whose outputs are gate and up."""
    norms: Norms = () if norm is None else (norm,)
    kernels = _kernels((x,), layer, norms, is_gated=True) if between.limit is None else None
    is_served = not between.is_gelu or layer.fp8 is None  # gelu of FP8 products was not measured
    if not norms:  # as EXAONE-4's; what else csrc has without a norm was not measured
        is_served = layer.fp8 is None and x.dtype == torch.bfloat16
    if kernels is None or layer.out_features % 16 or not is_served:
        return between(linear((x,), layer, norms))
    out = x.new_empty(x.shape[0], layer.out_features // 2)
    kernels.linear_gated(x, *_norm(norms), *_weight(layer), between.is_gelu, out)
    return out


def qkv_rope_and_write(
    inputs: Inputs,
    layer: Linear,
    norms: Norms,
    rope: Rope,
    q_heads: int,
    to: CacheWrite,
    qk_norms: tuple[RMSNorm, RMSNorm] | None = None,
    norms_values: bool = False,
) -> Tensor:
    """Returns the rotated queries of layer(normed inputs), [T, Hq, D]; writes keys and values.

    Args:
        layer: queries, keys and values of all heads.
        rope, q_heads, to, qk_norms, norms_values: as of `rope_and_write`.
    """
    dim, table = to.k_slots.shape[2], _table_of(inputs, layer, norms)
    # The second input then stands for the first, which is of its shape.
    rows = _looked_up(inputs if table is None else (inputs[1], inputs[1]))
    kernels = None if norms_values or dim % 16 else _kernels(rows, layer, norms)
    if kernels is not None and qk_norms is not None:
        kernels = kernels if _norms_heads(qk_norms, dim, rows, layer, norms) else None
    if kernels is None or not _takes_rope(rope, to, rows[0].dtype):
        given = rows if table is None else inputs
        qkv = linear(given, layer, norms).view(-1, layer.out_features // dim, dim)
        return rope_and_write(qkv, rope, q_heads, to, qk_norms, norms_values)
    out = rows[0].new_empty(rows[0].shape[0], q_heads * dim)
    x0, *others = _arguments(rows, norms, layer)
    kernels.linear_rope(
        x0 if table is None else table.table,
        None if table is None else table.ids,
        *others,
        rope.cos_sin,
        rope.position_ids,
        to.slots,
        to.scratch_slot,
        to.k_slots,
        to.v_slots,
        q_heads,
        to.keeps_finite,
        *_head_norms(qk_norms),
        out,
    )
    return out.view(-1, q_heads, dim)


def _head_norms(norms: tuple[RMSNorm, RMSNorm] | None) -> tuple[Tensor | float | None, ...]:
    """Returns the weights of queries and keys, eps and offset as the kernel takes them."""
    if norms is None:
        return None, None, 0.0, 0.0
    return norms[0].weight, norms[1].weight, norms[0].eps, norms[0].offset


def _norms_heads(
    of_heads: tuple[RMSNorm, RMSNorm], dim: int, inputs: Rows, layer: Linear, norms: Norms
) -> bool:
    """Whether the kernel that has the product norms its heads, too: if tiles make it."""
    q_norm, k_norm = of_heads
    weight, x = layer.weight, inputs[0]
    if weight is None or layer.fp8 is not None or len(inputs) != 1 or len(norms) != 1:
        return False
    if _wants_gradient(layer, of_heads) or (q_norm.eps, q_norm.offset) != (
        k_norm.eps,
        k_norm.offset,
    ):
        return False
    weights = q_norm.weight, k_norm.weight
    if any(w.dtype != x.dtype or not w.is_contiguous() or w.data_ptr() % 4 for w in weights):
        return False
    is_some = dim % TILES_OUTPUTS == 0 and dim <= MAX_HEAD_BLOCKS * TILES_OUTPUTS
    return is_some and _is_tiled(weight, 1, has_norms=True)


def _table_of(inputs: Inputs, layer: Any, norms: Norms) -> Embedded | None:
    """Returns the first of two inputs if the kernel of a small weight looks it up itself."""
    first, *others = inputs
    if not isinstance(first, Embedded) or len(others) != 1 or len(norms) != 2:
        return None
    weight = layer.weight if type(layer) is Linear else None
    if not isinstance(others[0], Tensor) or weight is None or layer.fp8 is not None:
        return None
    (ids, table), hidden = first, others[0]
    if torch.is_grad_enabled() and table.requires_grad:
        return None
    is_read = table.dtype == hidden.dtype and table.shape[1] == hidden.shape[1]
    is_read &= table.is_contiguous() and table.data_ptr() % 16 == 0
    is_read &= ids.is_contiguous() and ids.dtype in (torch.int32, torch.int64)
    return first if is_read and _is_tiled(weight, 2, has_norms=True) else None


def _side_by_side(inputs: Rows, norms: Norms) -> Tensor:
    if norms:
        inputs = tuple(norm(x) for norm, x in zip(norms, inputs, strict=True))
    return inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=-1)


def is_one_kernel(inputs: Rows, layer: Any, norms: Norms) -> bool:
    """Whether a kernel takes a product and its norms together."""
    return _kernels(inputs, layer, norms) is not None


def _kernels(inputs: Rows, layer: Any, norms: Norms, is_gated: bool = False) -> Any:
    """Returns the module with the kernels if they serve these tensors, else None."""
    x = inputs[0]
    if not (x.is_cuda and 0 < x.shape[0] <= MAX_TILED_ROWS):
        return None
    if type(layer) is not Linear or (layer.weight is None and layer.records is None):
        return None
    if x.dtype != torch.bfloat16 and (x.dtype != torch.float16 or norms):
        return None  # x times a norm's weight may leave fp16's range before it is scaled
    if len({norm.offset for norm in norms}) > 1:
        return None
    if _wants_gradient(layer, norms, *inputs):
        return None  # the kernels have no derivative
    tensors = [*(norm.weight for norm in norms), *([] if layer.bias is None else [layer.bias])]
    if layer.weight is None:
        is_made = bool(norms) or not is_gated
        if not (is_made and _reads_four_bits(inputs, bool(norms))):
            return None
    elif layer.fp8 is not None:
        if not _reads_fp8(layer, inputs):
            return None
    elif _reads_floats(layer.weight, inputs, bool(norms), is_gated):
        tensors.append(layer.weight)
    else:
        return None
    if any(t.dtype != x.dtype or not t.is_contiguous() or t.data_ptr() % 16 for t in tensors):
        return None
    return native.kernels(x) if all(_is_readable(t, x) for t in inputs) else None


def _takes_tiles(weight: Tensor, count: int, has_norms: bool) -> bool:
    """Whether tiles take a weight's outputs and columns, and this number of inputs."""
    takes_inputs = count == 1 or has_norms
    return takes_inputs and weight.shape[0] % TILE == 0 and weight.shape[1] <= MAX_TILED_COLUMNS


def _least_large(weight: Tensor, count: int, has_norms: bool) -> int:
    """Returns from how many values on a weight is a large one."""
    is_narrow = _takes_tiles(weight, count, has_norms) and weight.shape[1] <= NARROW
    return LARGE_NARROW if is_narrow else LARGE


def _is_tiled(weight: Tensor, count: int, has_norms: bool) -> bool:
    """Whether tiles serve a weight and this number of inputs, if a kernel serves."""
    is_small = weight.numel() < _least_large(weight, count, has_norms)
    return is_small and _takes_tiles(weight, count, has_norms)


def _is_narrow(weight: Tensor, inputs: Rows) -> bool:
    """Whether narrow_linear of csrc serves a weight, if a kernel serves."""
    is_large = weight.numel() >= _least_large(weight, 1, False)
    return is_large and len(inputs) == 1 and weight.shape[1] <= NARROW


def _reads_floats(weight: Tensor, inputs: Rows, has_norms: bool, is_gated: bool) -> bool:
    """Whether a kernel for weights in 16 bits takes these rows, and is the fastest."""
    rows, columns, values = inputs[0].shape[0], weight.shape[1], weight.numel()
    if is_gated and not has_norms and (rows > MAX_ROWS_OF_DEEP or values < LARGE):
        return False
    is_tiled = _takes_tiles(weight, len(inputs), has_norms)
    if values >= _least_large(weight, len(inputs), has_norms):
        is_few, is_deep = rows <= MAX_ROWS_OF_LARGE, columns >= DEEP and len(inputs) == 1
        if rows > (MAX_ROWS_OF_DEEP if is_deep else MAX_ROWS_OF_LARGE):
            is_tiled &= rows <= MAX_ROWS_OF_FILLING and columns <= MAX_COLUMNS_OF_FILLING
            return is_deep and is_tiled and _fills(inputs[0], weight, has_norms, is_gated)
        most_bytes = MAX_NORMED_BYTES if is_few else MAX_NORMED_BYTES_OF_DEEP
        return not has_norms or rows * (2 * columns + 64) <= most_bytes
    most = MAX_TILED_NORMED_PRODUCTS if has_norms else MAX_TILED_PRODUCTS
    is_few = rows <= (MAX_ROWS if values < LARGE else MAX_ROWS_OF_DEEP)
    if is_few or not is_tiled:
        return is_few
    return rows * values <= most or _runs_at_once(inputs[0], weight, has_norms, is_gated)


def _fills(x: Tensor, weight: Tensor, has_norms: bool, is_gated: bool) -> bool:
    """Whether a large weight's tiles have a thread block for two of three multiprocessors at
    least, and no more than one for each (large_tile in csrc)."""
    outs, columns = weight.shape
    if is_gated:
        blocks = [-(-outs // 96), -(-outs // 128) if columns <= MAX_COLUMNS_OF_WIDEST else 0]
    elif has_norms:
        blocks = [-(-outs // 32), -(-outs // 48)]
    else:
        alone = -(-outs // 32)
        blocks = [2 * alone, alone if columns <= MAX_COLUMNS_ALONE else 0]
    room = native.multiprocessors(x.device)
    return any(2 * room <= 3 * number <= 3 * room for number in blocks)


def _runs_at_once(x: Tensor, weight: Tensor, has_norms: bool, is_gated: bool) -> bool:
    """Whether a small weight's largest tiles have a thread block for each multiprocessor at most
    (launch_tiles in csrc)."""
    rows, (outs, columns) = x.shape[0], weight.shape
    if has_norms:
        is_wide = is_gated and outs >= LEAST_WIDE and columns <= MAX_AT_ONCE_COLUMNS
        blocks = -(-rows // 80) * -(-outs // 48)
    else:
        is_wide = rows <= MAX_ROWS_OF_FEW_OUTS
        is_wide &= LEAST_DEEP_COLUMNS <= columns <= MAX_DEEP_COLUMNS
        blocks = -(-MAX_ROWS_OF_FEW_OUTS // 64) * -(-outs // 32) * 2
    return is_wide and blocks <= native.multiprocessors(x.device)


def _reads_fp8(layer: Linear, inputs: Rows) -> bool:
    """Whether the kernel for FP8 weights reads these, and holds these rows."""
    assert layer.weight is not None and layer.scales is not None
    rows, size = inputs[0].shape
    by_rows = layer.scales.shape[1] == 1
    if len(inputs) > 1 or inputs[0].dtype != torch.bfloat16 or size % 64:
        return False
    resting = rows * (size + 64 if by_rows else 2 * size + 16)
    if not 0 < rows <= MAX_ROWS_OF_FP8 or resting > MAX_RESTING_BYTES:
        return False
    if not (by_rows or layer.group % 64 == 0):
        return False
    is_dense = layer.weight.is_contiguous() and layer.scales.is_contiguous()
    return is_dense and layer.weight.data_ptr() % 16 == 0


def _reads_four_bits(inputs: Rows, has_norms: bool) -> bool:
    """Whether the kernel for weights of 4 bits reads these rows, and holds normed ones."""
    rows, size = inputs[0].shape
    if len(inputs) > 1 or inputs[0].dtype != torch.bfloat16 or rows > MAX_ROWS_OF_FOUR_BITS:
        return False
    return not has_norms or rows * (2 * size + 64) <= MAX_NORMED_BYTES_OF_FOUR_BITS[rows > 8]


def _wants_gradient(layer: Any, norms: Norms, *tensors: Tensor | None) -> bool:
    if not torch.is_grad_enabled():
        return False
    weights = [getattr(layer, "weight", None), *(norm.weight for norm in norms)]
    return any(t is not None and t.requires_grad for t in (*weights, *tensors))


def _is_readable(x: Tensor, first: Tensor) -> bool:
    """Whether 16 bytes can be read at each 8th column, and both inputs are of one kind."""
    strides = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return strides and x.shape == first.shape and x.dtype == first.dtype and x.shape[1] % 32 == 0


def _takes_rope(rope: Rope, to: CacheWrite, dtype: torch.dtype) -> bool:
    """Whether the kernels can rotate by this table and write to this cache."""
    indices = rope.position_ids, to.slots
    if any(t.dtype != torch.int64 or not t.is_contiguous() for t in indices):
        return False
    takes_cache = all(_takes_pairs(x, dtype) for x in (to.k_slots, to.v_slots))
    takes_table = rope.cos_sin.dtype == torch.float32 and rope.cos_sin.data_ptr() % 8 == 0
    return takes_cache and takes_table  # of which two numbers are read at a time


def _takes_pairs(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether two numbers at a time can be read and written."""
    is_even = x.data_ptr() % 4 == 0 and all(stride % 2 == 0 for stride in x.stride()[:-1])
    return is_even and x.dtype == dtype and x.stride(-1) == 1


def _arguments(inputs: Rows, norms: Norms, layer: Linear) -> tuple[Tensor | float | None, ...]:
    """Returns x0, x1, norm0, norm1, eps, offset and the weight as the kernels take them."""
    x = (*inputs, None)[:2]
    weights = (*(norm.weight for norm in norms), None, None)[:2]
    numbers = (norms[0].eps, norms[0].offset) if norms else (0.0, 0.0)
    return (*x, *weights, *numbers, *_weight(layer))


def _norm(norms: Norms) -> tuple[Tensor | float | None, ...]:
    """Returns the weights, eps and offset of one norm or none as the kernels take them."""
    return (norms[0].weight, norms[0].eps, norms[0].offset) if norms else (None, 0.0, 0.0)


def _weight(layer: Linear) -> tuple[Tensor | int | None, ...]:
    """Returns weight, scales, group, bias as the kernels take them."""
    if layer.weight is None:
        return layer.records, layer.row_scales, 0, layer.bias
    codes = layer.weight if layer.scales is None else layer.weight.view(torch.uint8)
    return codes, layer.scales, layer.group, layer.bias
