"""Compiles Triton launches for a Hopper GPU that is not there: `compiled(function, *arguments)`.

Run as a script, it prints the shared memory of kernels as JSON: without arguments, of all kernels
of paged attention and of layers; with arguments like "16,4,bfloat16" (heads, rows, the type of the
cache), of latent attention's in DeepSeek-V3's sizes, each after its argument. Others over an FP8
cache have "fp8 " before their names. It needs an environment without TRITON_INTERPRET.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from triton import compile as triton_compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

_OPTIONS = ("num_warps", "num_stages", "launch_pdl")


def compiled(function: Callable[..., Any], *arguments: Any) -> dict[str, Any]:
    """Kernel name -> what Triton compiled for the launches of function(*arguments) on CPU tensors,
    which are taken for CUDA ones; nothing runs."""
    found: dict[str, Any] = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        values = dict(zip(self.arg_names, args, strict=False)) | kwargs
        values["PDL"] = values["launch_pdl"] = True
        signature, constants, attributes = {}, {}, {}
        for i, p in enumerate(self.params):
            value = values[p.name]
            if p.is_constexpr:
                signature[p.name], constants[(i,)] = "constexpr", value
                continue
            signature[p.name] = _type(value)
            for path, leaf in _leaves(value, (i,)):
                divides = isinstance(leaf, int) and not p.do_not_specialize and leaf % 16 == 0
                if leaf is None:
                    constants[path] = None
                elif isinstance(leaf, torch.Tensor) or divides:
                    attributes[path] = [["tt.divisibility", 16]]
        source = ASTSource(self, signature, constants, attributes)
        options = {name: values[name] for name in _OPTIONS if name in values}
        found[self.__name__] = triton_compile(source, GPUTarget("cuda", 90, 32), options)

    original, JITFunction.run = JITFunction.run, run
    try:
        function(*arguments)
    finally:
        JITFunction.run = original
    return found


def _leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    """The tensors and numbers of an argument, which may be a (named) tuple, with their places."""
    if not isinstance(value, tuple):
        yield path, value
        return
    for i, part in enumerate(value):
        yield from _leaves(part, (*path, i))


def _type(value: Any) -> Any:
    """The type of an argument as Triton writes it; of a tuple the tuple of its parts' types."""
    if isinstance(value, tuple):
        types = [_type(part) for part in value]
        return type(value)(*types) if hasattr(value, "_fields") else tuple(types)
    if value is None:
        return "constexpr"
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.").replace("bool", "i1").replace("uint", "u")
        kind = kind.replace("float8_e4m3fn", "fp8e4nv")
        return "*" + kind.replace("float", "fp").replace("bfp", "bf").replace("int", "i")
    return "fp32" if isinstance(value, float) else "i32"


FP8 = torch.float8_e4m3fn
IS_FULL = os.environ.get("TRTSPEC_FULL_TESTS") == "1"  # as in matrix.py, which imports much


def _in_fp8(found: dict[str, Any]) -> dict[str, Any]:
    return {f"fp8 {name}": kernel for name, kernel in found.items()}


def _as_on_hopper(*modules: Any) -> None:
    """Makes kernels read codes as they do on a GPU."""
    for module in modules:
        module.is_quick = lambda codes, dtype: dtype == torch.bfloat16


def _latent_attention(heads: int, rows: int, dtype: torch.dtype) -> dict[str, Any]:
    from trtspec.attention import mla as triton_mla
    from trtspec.attention.base import CachedLayer
    from trtspec.attention.split_kv import Tables
    from trtspec.layers.norm import RMSNorm
    from trtspec.ops.layer import triton_latent
    from trtspec.ops.layer.rope import CacheWrite, Rope

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    _as_on_hopper(triton_mla)
    q, out = half(2 * rows, heads, 576), half(2 * rows, heads, 512)
    k_slots, scales = half(640, 1, 576).to(dtype), torch.ones(1) if dtype == FP8 else None
    cached = CachedLayer(k_slots, k_slots[..., :512], 32, scale=0.1, k_scales=scales)
    positions = torch.zeros(2 * rows, dtype=torch.long)
    tables = Tables(torch.zeros(2, 8, dtype=torch.int32), positions)
    tiles, tile_rows = torch.zeros(3, 3, dtype=torch.int32), max(1, 64 // heads)
    norm = RMSNorm(512, 1e-6).bfloat16()
    rope = Rope(torch.zeros(9, 64), positions)
    return {
        **compiled(triton_mla.latent_paged_attention, q, cached, tables, rows, out),
        **compiled(triton_mla.latent_context_attention, q, cached, tables, tiles, tile_rows, out),
        **compiled(
            triton_latent.rope_and_write_latent,
            half(2 * rows, heads, 192)[..., 128:],
            half(2 * rows, 576),
            norm,
            rope,
            q[..., 512:],
            CacheWrite(
                k_slots, k_slots[..., :512], positions, 3, keeps_finite=True, k_scales=scales
            ),
        ),
    }


def _layers() -> dict[str, Any]:
    """One launch or more of every kernel of paged attention, layers, experts and the loss."""
    from trtspec.attention import online_softmax
    from trtspec.attention.base import CachedLayer
    from trtspec.attention.split_kv import Tables
    from trtspec.attention.triton_contexts import context_attention
    from trtspec.attention.triton_generations import paged_attention
    from trtspec.layers.norm import RMSNorm
    from trtspec.ops.experts import triton as experts
    from trtspec.ops.experts import triton_four_bits as four_bit_experts
    from trtspec.ops.experts import triton_fp4 as fp4_experts
    from trtspec.ops.experts import triton_fp8 as fp8_experts
    from trtspec.ops.experts.fp4 import empty as empty_fp4
    from trtspec.ops.layer import (
        four_bits,
        triton_activation,
        triton_embedding,
        triton_norm,
        triton_rope,
    )
    from trtspec.ops.layer import triton_fp8 as fp8
    from trtspec.ops.layer import triton_fp8_rows as fp8_rows
    from trtspec.ops.layer.fp8 import FP8, Fp8Weight, Rescaling
    from trtspec.ops.layer.rope import CacheWrite, KeysAndValues, Rope
    from trtspec.ops.layer.triton_convolution import convolve_blocks
    from trtspec.ops.tokens.triton_soft_cross_entropy import draft_loss_

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    def indices(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def fp8_weight(group: int, *shape: int) -> Fp8Weight:
        scales = torch.zeros(*shape[:-1], -(-shape[-1] // group))
        return Fp8Weight(torch.zeros(shape).to(FP8), scales, group)

    by = Rescaling(torch.zeros(8), torch.zeros(256), half(256))
    fp4_weight = empty_fp4(torch.Size((8, 64, 192)), torch.device("cpu"))
    for module in (
        fp8,
        fp8_experts,
        fp4_experts,
        four_bit_experts,
    ):  # as on the GPU that these tensors are not on
        vars(module)["is_quick"] = lambda codes, dtype: dtype == torch.bfloat16
    q, slots, norm = half(8, 4, 64), half(640, 2, 64), RMSNorm(64, 1e-6, 1.0).bfloat16()
    tables = Tables(torch.zeros(2, 8, dtype=torch.int32), indices(8))
    tiles, cached = tables.blocks[:, :3], CachedLayer(slots, slots, 32, window=40, softcap=3.0)
    with_sinks = cached._replace(sinks=half(4))
    rope, to = Rope(torch.zeros(9, 64), indices(8)), CacheWrite(slots, slots, indices(8), 3, True)
    _as_on_hopper(online_softmax)
    codes, scales = slots.to(FP8), torch.ones(2)
    coded = cached._replace(k_slots=codes, v_slots=codes, k_scales=scales, v_scales=scales)
    to_codes = to._replace(k_slots=codes, v_slots=codes, k_scales=scales, v_scales=scales)
    ends, routing = torch.zeros(8, dtype=torch.int32), {"scoring": "sigmoid", "n_group": 4}
    route = partial(experts.route, **routing, topk_group=2, normalize=True, scale=2.0)
    launches: list[tuple[Callable[..., Any], *tuple[Any, ...]]] = [
        (paged_attention, q, with_sinks, tables._replace(firsts=indices(8)), 4),
        (context_attention, q, with_sinks, tables, tiles, 4, q),
        (paged_attention, q, cached, tables, 4),
        (context_attention, q, cached, tables, tiles, 4, q),
        (triton_rope.rope_and_write, half(8, 8, 64), rope, 4, to, (norm, norm), True),
        (triton_rope.rope_and_write, half(8, 8, 64), rope, 4, to),
        (triton_rope.write_layers, (KeysAndValues(half(8, 4, 64), rope, to),) * 3),
        (triton_rope.rope_queries, q, rope, norm),
        (triton_norm.rms_norm, q, norm),
        (triton_norm.add_normed, half(8, 64), half(8, 64), norm, None),
        (triton_norm.add_normed, half(8, 64), half(8, 64), norm, half(1)),
        (convolve_blocks, half(8, 64), half(2, 64), half(8, 2, 4), 4),
        (convolve_blocks, half(8, 64), half(2, 64), half(8, 2, 4), 4, half(8, 64)),
        (triton_activation.gelu_tanh_and_mul, half(8, 64)),
        (triton_activation.swish_and_mul_plus_one, half(8, 64), 1.702, 7.0),
        (triton_embedding.lookup, indices(8), half(9, 64), 2.0),
        (experts.router_logits, half(8, 64), half(8, 64)),
        (experts.normed_router_logits, half(8, 64), norm, torch.zeros(8, 64)),
        (route, torch.zeros(4, 8), None, 2),
        (route, torch.zeros(4, 8), torch.zeros(8), 2),
        (partial(route, logit_bias=torch.zeros(8)), torch.zeros(4, 8), None, 2),
        (experts.sort_by_expert, indices(4, 2), 8),
        (experts.grouped_matmul, half(8, 64), half(8, 64, 64), ends, 1.0),
        (experts.grouped_matmul, half(8, 64), half(8, 64, 64), ends, 1.0, half(8, 64)),
        *(
            (fp8_experts.grouped_matmul, x, fp8_weight(group, 8, 64, 256), ends, average)
            for i, x in enumerate((half(8, 256), half(8, 256).half(), half(8, 256).float()))
            for j, group in enumerate((128, 256))
            for k, average in enumerate((1.0, 200.0))
            if IS_FULL or (i + j + k) % 2 == 0  # half of them have all pairs
        ),
        *(
            (fp4_experts.grouped_matmul, half(8, 192).to(dtype), fp4_weight, ends, average)
            for dtype, average in (
                (torch.bfloat16, 1.0),
                (torch.bfloat16, 20.0),
                (torch.bfloat16, 50.0),
                (torch.bfloat16, 200.0),
                (torch.float16, 1.0),
                (torch.float32, 1.0),
            )
        ),
        *(
            (
                four_bit_experts.grouped_matmul,
                half(8, 256).to(dtype),
                four_bits.empty((8, 64, 256), group, slots.device),
                ends,
                average,
            )
            for group, dtype, average in (
                (32, torch.bfloat16, 20.0),
                (128, torch.bfloat16, 200.0),
                (16, torch.bfloat16, 20.0),
                (16, torch.bfloat16, 200.0),
                (128, torch.float32, 1.0),
                (16, torch.float32, 1.0),
            )
        ),
        *((fp8.multiply_floats, half(n, 256), fp8_weight(128, 64, 256)) for n in (8, 40, 128)),
        (fp8.multiply_floats, half(8, 256), fp8_weight(128, 64, 256), half(8, 64)),
        (fp8_rows.quantize_rows, half(8, 14336), None),
        (fp8_rows.quantize_rows, half(8, 256), norm),
        (fp8_rows.rescale, half(8, 256), by, torch.bfloat16, half(8, 256)),
        (fp8_rows.rescaled_swiglu, half(8, 256), by),
        (fp8.dequantize, fp8_weight(128, 64, 256), torch.bfloat16),
        (experts.combine, half(8, 64), indices(8), torch.zeros(4, 2)),
        (draft_loss_, half(4, 300), half(4, 300), indices(4), indices(4) > 0, 0.0),
        (draft_loss_, half(4, 300), half(4, 300), indices(4), indices(4) > 0, 0.9),
    ]
    found: dict[str, Any] = {}
    for launch in launches:
        found |= compiled(*launch)
    for launch in (
        (paged_attention, q, coded, tables, 4),
        (context_attention, q, coded, tables, tiles, 4, q),
        (triton_rope.rope_and_write, half(8, 8, 64), rope, 4, to_codes, (norm, norm), True),
        (triton_rope.rope_and_write, half(8, 8, 64), rope, 4, to_codes),
        (
            triton_rope.write_layers,
            (KeysAndValues(half(8, 4, 64), rope, to_codes, (norm, norm)),) * 2,
        ),
    ):
        found |= _in_fp8(compiled(*launch))
    return found


if __name__ == "__main__":
    kernels = {} if sys.argv[1:] else _layers()
    for argument in sys.argv[1:]:
        heads, rows, dtype = argument.split(",")
        found = _latent_attention(int(heads), int(rows), getattr(torch, dtype))
        kernels |= {f"{argument} {name}": kernel for name, kernel in found.items()}
    json.dump({name: kernel.metadata.shared for name, kernel in kernels.items()}, sys.stdout)
