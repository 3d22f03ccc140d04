"""Mixtral and MiniMax-M2: a mixture of experts in every layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...checks import checked_int
from ...errors import CheckpointError, shown
from .family import refuse_other
from .llama import FULL, SLIDING, checked_window
from .moe import mixtral_moe
from .partial_rotary import without_factor


def mixtral(hf: Any, where: Path) -> dict[str, Any]:
    """A window is every layer's. (transformers passes over `layer_types`.)"""
    window = None if hf.sliding_window is None else checked_window(hf.sliding_window, where)
    kind = FULL if window is None else SLIDING
    types = getattr(hf, "layer_types", None) or [kind]
    if set(types) != {kind}:
        raise CheckpointError(
            f"{where}: layer_types={shown(types)} beside sliding_window={window}: all layers of "
            f"this family are {kind!r} then. Remove layer_types, or correct sliding_window."
        )
    windows = (window,) * hf.num_hidden_layers
    return {"layer_windows": windows, "moe": mixtral_moe(hf, where, has_bias=False)}


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
    checked_int(where, "num_mtp_modules", getattr(hf, "num_mtp_modules", None) or 0, range(100))
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
