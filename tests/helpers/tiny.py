"""Tiny random models of every family, and metadata of a prefill pass made by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from trtspec.metadata.attention import (
    NULL_BLOCK,
    NUM_RESERVED_BLOCKS,
    AttentionMetadata,
)
from trtspec.metadata.recurrent import RecurrentPass
from trtspec.models.config import DecoderConfig
from trtspec.models.gated_delta import allocate_memory
from trtspec.models.kv_layout import kv_group_specs

DEFAULTS: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
# Value heads share key heads, whose size is another; the last layer has full attention.
LINEAR: dict[str, Any] = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 32,
}  # fmt: skip
LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1000.0,
    "short_factor": [1.05, 1.05, 1.1, 1.25, 1.5, 2.0],
    "long_factor": [1.08, 1.3, 2.2, 8.0, 20.0, 40.0],
    "original_max_position_embeddings": 128,
    "partial_rotary_factor": 0.75,
}
"""As Phi-4-mini's, for 12 of 16 dimensions."""
LONG_PHI: dict[str, Any] = {
    "rope_parameters": LONG,
    "original_max_position_embeddings": 128,
    "max_position_embeddings": 1024,
}
OF_FAMILY: dict[str, dict[str, Any]] = {
    "glm4_moe": {
        "head_dim": 16, "num_attention_heads": 4, "use_qk_norm": True, "attention_bias": True,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 24, "n_shared_experts": 2, "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    },
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
    "qwen3_next": {**LINEAR, **EXPERTS},
    "qwen3_5_text": LINEAR,
    "qwen3_5_moe_text": {**LINEAR, **EXPERTS},
    "smollm3": {"pad_token_id": 0},
    "phi3": {"pad_token_id": 0, "num_attention_heads": 4, "hidden_size": 64},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 40},
    "minimax_m2": {
        "head_dim": 16, "num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24,
        "rotary_dim": 8,
    },
    "deepseek_v3": {
        "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16, "v_head_dim": 10, "num_nextn_predict_layers": 0,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
        "moe_intermediate_size": 24, "n_shared_experts": 1, "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 1,
    },
    "glm4_moe_lite": {
        "num_key_value_heads": 6, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 16, "v_head_dim": 20, "num_nextn_predict_layers": 0,
        "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1,
        "moe_intermediate_size": 24, "routed_scaling_factor": 1.8,
    },
}  # fmt: skip


def tiny_model_dir(tmp_path: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    """A new HF directory under `tmp_path` with a float32 model; `overrides` are config fields.

    Every weight, bias and norm is random and large enough that leaving one out, or mixing two
    up, shows in the logits (standard deviation of a few units).
    """
    fields = {**DEFAULTS, **OF_FAMILY.get(family, {}), **overrides}
    config = AutoConfig.for_model(family, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        buffers = [item for item in model.named_buffers() if "score_correction" in item[0]]
        for name, parameter in [*model.named_parameters(), *buffers]:
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                noise = 1 + 0.2 * noise
            elif parameter.ndim == 1 or "embed_tokens" in name:
                noise *= 0.5
            else:
                noise *= parameter.shape[-1] ** -0.5 * (3 if "lm_head" in name else 1.5)
            parameter.copy_(noise)
    number = len(list(tmp_path.glob(f"{family}-*")))
    path = tmp_path / f"{family}-{number}"
    model.save_pretrained(path)
    return path


def prefill_metadata(
    config: DecoderConfig,
    lengths: list[int],
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> tuple[AttentionMetadata, Tensor]:
    """One pass over whole prompts of `lengths` with an empty cache, and its positions [T]."""
    pages = [-(-length // page_size) for length in lengths]
    table = torch.full((len(lengths), max(pages)), NULL_BLOCK, dtype=torch.int32)
    slots, following = [], NUM_RESERVED_BLOCKS
    for row, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        blocks = torch.arange(following, following + count).flip(0)  # not in cache order
        table[row, :count] = blocks
        positions = torch.arange(length)
        slots.append(blocks[positions // page_size] * page_size + positions % page_size)
        following += count
    groups = tuple(
        spec.allocate(following, page_size, torch.device("cpu"))
        for spec in kv_group_specs(config, dtype)
    )
    position_ids = torch.cat([torch.arange(length) for length in lengths])
    metadata = AttentionMetadata(
        context_lens=tuple(lengths),
        num_generations=0,
        rows_per_generation=1,
        position_ids=position_ids,
        kv_lens=torch.tensor(lengths, dtype=torch.int32),
        max_kv_len=max(lengths),
        kv_groups=groups,
        block_tables=(table,) * len(groups),
        slot_mappings=(torch.cat(slots),) * len(groups),
        max_seq_len=config.max_position_embeddings,
        recurrent=_recurrent(config, len(lengths), dtype),
    )
    return metadata, position_ids


def _recurrent(config: DecoderConfig, count: int, dtype: torch.dtype) -> RecurrentPass | None:
    if not config.linear_layers:
        return None
    layers = allocate_memory(config, count, 3, torch.empty(0, dtype=dtype))
    none = torch.empty(0, dtype=torch.int64)
    return RecurrentPass(layers, torch.arange(count), none, none)


def constant_target_dir(tmp_path: Path, **overrides: Any) -> Path:
    """A target whose logits are all equal: greedily it says token 0, whatever it read."""
    path = tiny_model_dir(tmp_path, **overrides)
    tensors = load_file(path / "model.safetensors")
    tensors["lm_head.weight"].zero_()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path
