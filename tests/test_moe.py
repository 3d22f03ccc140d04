"""Mixtures of experts: routing, experts and whole targets against transformers and float64."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_models import _logit_error, _prompts
from tiny import tiny_model_dir
from torch import Tensor
from transformers import AutoConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.errors import CheckpointError
from trtspec.models.hf_config import load_config
from trtspec.models.moe import MoE
from trtspec.models.weights import load_decoder
from trtspec.ops.moe import Experts, every_expert, grouped_experts, route

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("glm4_moe", {}),
    ("glm4_moe", {"use_qk_norm": False, "attention_bias": False, "n_group": 1, "topk_group": 1}),
    ("glm4_moe", {"n_shared_experts": 1, "norm_topk_prob": False, "first_k_dense_replace": 0}),
    ("glm4_moe", {"partial_rotary_factor": 0.25, "first_k_dense_replace": 2}),
    ("glm4_moe", {"partial_rotary_factor": 1.0, "first_k_dense_replace": 3}),
    ("qwen3_moe", {}),
    ("qwen3_moe", {"norm_topk_prob": False, "use_sliding_window": True, "sliding_window": 7}),
]


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_logits_equal_transformers(tmp_path: Path, family: str, overrides: dict[str, Any]) -> None:
    path = tiny_model_dir(tmp_path, family, **overrides)
    error, spread = _logit_error(path, _prompts(97))
    assert spread > 0.5
    assert error < 1e-4
