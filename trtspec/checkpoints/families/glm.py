"""GLM-4-MoE (GLM-4.5 and later): partial rotation, a mixture of experts, MTP layers. GLM-4.7-Flash
has DeepSeek-V3's attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import CheckpointError, shown
from .deepseek import deepseek_v3
from .moe import deepseek_moe
from .partial_rotary import without_factor


def glm4_moe(hf: Any, where: Path) -> dict[str, Any]:
    return {
        **without_factor(hf, where),
        "qkv_bias": bool(hf.attention_bias),
        "qk_norm": bool(hf.use_qk_norm),
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
