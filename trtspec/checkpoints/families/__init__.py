"""The model families by the `model_type` of their config.json: what a family's config means.

A new family is a row of `FAMILIES` and a function that reads its config. Nothing else in trtspec
asks for a model's name.
"""

from __future__ import annotations

from .deepseek import deepseek_v3
from .family import Family
from .gemma import gemma2, gemma3, gemma4
from .glm import glm4_moe, glm4_moe_lite
from .gpt_oss import gpt_oss
from .llama import llama, mistral, phi3, qwen2, qwen3, qwen3_moe, seed_oss, smollm3
from .mixtral import minimax_m2, mixtral
from .olmo import exaone4, exaone4_as_hf, olmo2, olmo3
from .qwen_next import qwen3_5, qwen3_5_moe, qwen3_next, text_alone
from .step import step3p5, step3p5_as_qwen3

_GELU = ("gelu_pytorch_tanh",)
FAMILIES: dict[str, Family] = {
    "llama": Family("llama", llama, has_mrope=True),  # of EAGLE heads for Qwen2-VL
    "phi3": Family("phi3", phi3, has_partial_rotary=True),
    "smollm3": Family("smollm3", smollm3),
    "seed_oss": Family("seed_oss", seed_oss),
    "olmo2": Family("olmo2", olmo2),
    "olmo3": Family("olmo3", olmo3, has_rope_by_type=True),
    "exaone4": Family("exaone4", exaone4, as_hf=exaone4_as_hf),
    "mistral": Family("mistral", mistral),
    "ministral": Family("ministral", mistral),
    "qwen2": Family("qwen2", qwen2),
    "qwen3": Family("qwen3", qwen3),
    "glm4_moe": Family("glm4_moe", glm4_moe, has_partial_rotary=True),
    "qwen3_moe": Family("qwen3_moe", qwen3_moe),
    "mixtral": Family("mixtral", mixtral),
    "minimax_m2": Family("minimax_m2", minimax_m2, has_partial_rotary=True),
    "gpt_oss": Family("gpt_oss", gpt_oss),
    "mimo": Family("qwen2", qwen2),  # Qwen2 with MTP layers beside it, under its own name
    "qwen2_vl_text": Family("qwen2_vl_text", qwen2, has_mrope=True),
    "qwen2_5_vl_text": Family("qwen2_5_vl_text", qwen2, has_mrope=True),
    "gemma2": Family("gemma2", gemma2, activations=_GELU),
    "gemma3_text": Family("gemma3_text", gemma3, activations=_GELU, has_rope_by_type=True),
    **{
        name: Family(
            name,
            gemma4,
            activations=_GELU,
            has_partial_rotary=True,
            has_rope_by_type=True,
            fields_of_layers=("head_dim", "num_key_value_heads"),
        )
        for name in ("gemma4_text", "gemma4_unified_text")
    },
    "deepseek_v3": Family("deepseek_v3", deepseek_v3),  # R1 too
    "kimi_k2": Family("deepseek_v3", deepseek_v3),  # under its own name
    "glm4_moe_lite": Family("glm4_moe_lite", glm4_moe_lite),
    "qwen3_next": Family(
        "qwen3_next", qwen3_next, has_partial_rotary=True, has_linear_attention=True
    ),
    **{
        name: Family(
            name,
            fields,
            as_hf=text_alone,
            has_partial_rotary=True,
            has_linear_attention=True,
            is_text_alone=True,
        )
        for name, fields in (("qwen3_5_text", qwen3_5), ("qwen3_5_moe_text", qwen3_5_moe))
    },
    "step3p5": Family("qwen3", step3p5, as_hf=step3p5_as_qwen3),
}

__all__ = ["FAMILIES", "Family"]
