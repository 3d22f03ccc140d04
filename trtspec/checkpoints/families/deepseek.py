"""DeepSeek-V3 and R1: latent attention, a mixture of experts after the first layers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from ...checks import is_int, is_number
from ...errors import CheckpointError
from ...models.config import MLAConfig
from .moe import deepseek_moe

MAX_LATENT_SIZE = 2**14


def deepseek_v3(hf: Any, where: Path) -> dict[str, Any]:
    """transformers' own head_dim is the rotated part, as here."""
    if hf.attention_bias:
        raise CheckpointError(
            f"{where}: attention_bias={hf.attention_bias!r} is not supported with latent "
            "attention; allowed is false, which DeepSeek's models have. Use another model."
        )
    return {
        "num_kv_heads": 1,
        "head_dim": hf.qk_rope_head_dim,
        "mla": _latent_attention(hf, where),
        "moe": deepseek_moe(hf, where),
    }


def _latent_attention(hf: Any, where: Path) -> MLAConfig:
    sizes = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
    for name in sizes:
        value = getattr(hf, name)
        if name == "q_lora_rank" and value is None:
            continue
        needs_even = name == "qk_rope_head_dim"
        if not is_int(value, 1, MAX_LATENT_SIZE) or (needs_even and value % 2):
            also = {"q_lora_rank": " or null", "qk_rope_head_dim": ", even"}.get(name, "")
            raise CheckpointError(
                f"{where}: {name}={value!r}; it must be an int in 1 … {MAX_LATENT_SIZE}{also}. "
                "Copy the file again from the model's source."
            )
    return MLAConfig(
        **{name: getattr(hf, name) for name in sizes},
        softmax_scale=_softmax_scale(hf, where),
        rope_interleave=bool(hf.rope_interleave),
    )


def _softmax_scale(hf: Any, where: Path) -> float:
    """Returns 1 / sqrt(a head's size), times YaRN's factor for long texts."""
    scale = (hf.qk_nope_head_dim + hf.qk_rope_head_dim) ** -0.5
    rope = hf.rope_parameters or {}
    mscale = rope.get("mscale_all_dim") or 0
    if not is_number(mscale) or not 0 <= mscale < 1e3:
        raise CheckpointError(
            f"{where}: mscale_all_dim={mscale!r} in the RoPE parameters; it must be a number >= 0. "
            "Copy the file again from the model's source."
        )
    factor = rope.get("factor") or 1.0
    if rope.get("rope_type", "default") == "default" or not mscale or factor <= 1:
        return scale
    return scale * (0.1 * mscale * math.log(factor) + 1) ** 2
