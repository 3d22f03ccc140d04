"""What a checkpoint says of its KV cache: whether it is FP8, and the scales of keys and values.

| in quantization_config or hf_quant_config.json | is FP8 if it is |
|---|---|
| `kv_cache_scheme` (compressed-tensors, ModelOpt) | `{"type": "float", "num_bits": 8, …}` |
| `kv_cache_scheme` (HF `fp8`) | "static" |
| `kv_cache_quant_algo` (ModelOpt) | "FP8" |

A scheme with `"dynamic": true` is not: no checkpoint holds scales for it.

The tensors are `…self_attn.k_scale`, `….k_proj.k_scale` or `….k_proj.output_scale`, the same with
v, or one `….kv_scale` for both: a number for the layer, or one for each KV head.
"""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import CheckpointError
from ..models.config import DecoderConfig
from .quantization import quantization_fields
from .tensors import FLOATS, TensorSource, open_checkpoint
from .text_part import text_tensors

logger = logging.getLogger(__name__)

_K_NAMES = ("k_scale", "k_proj.k_scale", "k_proj.output_scale", "kv_scale")
_V_NAMES = ("v_scale", "v_proj.v_scale", "v_proj.output_scale", "kv_scale")


class LayerScales(NamedTuple):
    """The scales of one layer, [Hkv] float32 each, of this rank's heads."""

    k: Tensor
    v: Tensor


def says_fp8(config: DecoderConfig, model_dir: Path) -> bool:
    """Whether the checkpoint was made for a KV cache in FP8."""
    fields = quantization_fields(config.raw, model_dir / "config.json")[0]
    of_scheme = _kind_of_scheme(fields.get("kv_cache_scheme"), fields.get("quant_method"))
    kinds = [kind for kind in (fields.get("kv_cache_quant_algo"), of_scheme) if kind]
    if any(str(kind).upper() == "FP8" for kind in kinds):
        return True
    if kinds:
        logger.info("%s: a KV cache in %s is not supported.", model_dir, kinds[0])
    return False


def _kind_of_scheme(scheme: Any, quant_method: Any) -> str | None:
    """Returns "FP8", or another kind in words; None where there is no scheme."""
    if not scheme:
        return None
    if not isinstance(scheme, dict):
        return "FP8" if (scheme, quant_method) == ("static", "fp8") else f"the scheme {scheme!r}"
    kind = scheme.get("type"), scheme.get("num_bits")
    words = "{} of {} bits".format(*kind)
    if scheme.get("dynamic"):  # scales that are measured while serving
        return f"{words} with dynamic scales"
    return "FP8" if kind == ("float", 8) else words


def load_kv_scales(config: DecoderConfig, model_dir: Path) -> tuple[LayerScales, ...]:
    """Returns the scales of every layer; those that are not there are 1, which is logged once.

    Raises:
        CheckpointError: one has another shape or dtype, or is no positive number.
    """
    found, missing = [], 0
    with ExitStack() as stack:
        sources = text_tensors(open_checkpoint(model_dir, stack))
        for layer in range(config.num_layers):
            sides = []
            for names in (_K_NAMES, _V_NAMES):
                paths = [f"model.layers.{layer}.self_attn.{name}" for name in names]
                source = next((sources[path] for path in paths if path in sources), None)
                sides.append(_of_heads(source, config, layer))
                is_read = config.kv_layer(layer) == layer and (
                    names is _K_NAMES or config.of_layer(layer).mla is None
                )
                missing += source is None and is_read
            found.append(LayerScales(*sides))
    if missing:
        logger.warning(
            "The KV cache is FP8, but %s lacks scales for it (%d of keys or values of a layer). "
            "Those are 1: numbers beyond ±448 are cut off.",
            model_dir,
            missing,
        )
    else:
        logger.info("The KV cache is FP8, with the scales in %s.", model_dir)
    return tuple(found)


def _of_heads(source: TensorSource | None, config: DecoderConfig, layer: int) -> Tensor:
    """Returns a layer's scales [Hkv] of this rank's heads."""
    part, whole = config.part_of_layer(layer), config.of_layer(layer)
    heads, all_heads = part.num_kv_heads, whole.num_kv_heads
    if part.mla is not None:
        heads = all_heads = 1
    if source is None:
        return torch.ones(heads)
    count = math.prod(source.shape)
    if count not in (1, all_heads) or source.dtype not in FLOATS:
        raise CheckpointError(
            f"{source.name} in {source.path} has shape {list(source.shape)} and dtype "
            f"{source.dtype}; it must be one number, or one for each of {all_heads} KV heads, of "
            f"{', '.join(FLOATS)}. Copy the checkpoint again from its source. If its "
            "quantization_config says nothing of the KV cache, KvCacheConfig(dtype='auto') reads "
            "no scales."
        )
    scales = source.read().float().flatten()
    if not ((scales > 0) & scales.isfinite()).all():
        raise CheckpointError(
            f"{source.name} in {source.path} is {scales.tolist()}; a scale must be a positive "
            "number. Copy the checkpoint again from its source."
        )
    cut = config.parallel.kv_shard(all_heads).source(heads)
    if count == 1 or cut is None:
        return scales.expand(heads).clone()
    return scales[cut.start : cut.start + cut.length].clone()
