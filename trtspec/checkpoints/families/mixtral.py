"""Mixtral and MiniMax-M2: a mixture of experts in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import CheckpointError, shown
from .family import refuse_other
from .llama import mistral
from .moe import mixtral_moe
from .partial_rotary import without_factor


def mixtral(hf: Any, where: Path) -> dict[str, Any]:
    return {**mistral(hf, where), "moe": mixtral_moe(hf, where, has_bias=False)}


def minimax_m2(hf: Any, where: Path) -> dict[str, Any]:
    """Norms over all heads of queries, and of keys; partial rotation. (MTP layers that a checkpoint
    may have are not read.)"""
    refuse_other(
        hf,
        where,
        use_qk_norm=True,
        qk_norm_type="per_layer",
        scoring_func="sigmoid",
        use_routing_bias=True,
        shared_intermediate_size=0,
    )
    kinds = getattr(hf, "attn_type_list", None) or []
    if any(kind != 1 for kind in kinds):
        raise CheckpointError(
            f"{where}: attn_type_list={shown(kinds)}; allowed are 1 alone, full attention. Use "
            "another model."
        )
    return {
        **without_factor(hf, where),
        "qk_norm": True,
        "norms_all_heads": True,
        "moe": mixtral_moe(hf, where, has_bias=True),
    }
