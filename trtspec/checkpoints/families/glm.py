"""GLM-4-MoE (GLM-4.5 and later): partial rotation, a mixture of experts, MTP layers. GLM-4.7-Flash
has DeepSeek-V3's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checks import is_number
from ...errors import CheckpointError, shown
from .deepseek import deepseek_v3
from .moe import deepseek_moe


def glm4_moe(hf: Any, where: Path) -> dict[str, Any]:
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    rope = dict(hf.rope_parameters)
    factor = 1.0
    if rope.get("rope_type") != "proportional":  # that formula reads the factor itself
        factor = rope.pop("partial_rotary_factor", 1.0)  # rotary_dim says it from here on
    return {
        "rope_parameters": rope,
        "qkv_bias": bool(hf.attention_bias),
        "qk_norm": bool(hf.use_qk_norm),
        "rotary_dim": _rotary_dim(head_dim, factor, where),
        "moe": deepseek_moe(hf, where),
        "mtp_feeds_post_norm": False,
    }


def glm4_moe_lite(hf: Any, where: Path) -> dict[str, Any]:
    """DeepSeek-V3 but for how the layers without experts are said, and what MTP layers feed on."""
    types = hf.mlp_layer_types
    first = types.index("sparse") if "sparse" in types else len(types)
    if types != ["dense"] * first + ["sparse"] * (hf.num_hidden_layers - first):
        raise CheckpointError(
            f"{where}: mlp_layer_types={shown(types)}; for {hf.num_hidden_layers} layers it must "
            "be 'dense' for the first ones and 'sparse' for the others. Use another model."
        )
    hf.first_k_dense_replace = first
    return {**deepseek_v3(hf, where), "mtp_feeds_post_norm": False}


def _rotary_dim(head_dim: int, factor: Any, where: Path) -> int:
    good = is_number(factor) and 0 < factor <= 1
    rotary_dim = int(head_dim * factor) if good else 0
    if rotary_dim < 2 or rotary_dim % 2 or (head_dim - rotary_dim) % 2:
        raise CheckpointError(
            f"{where}: partial_rotary_factor={factor!r} of head_dim={head_dim}: it must be in "
            "(0, 1] and rotate an even number of dimensions. Correct it, or head_dim."
        )
    return rotary_dim
