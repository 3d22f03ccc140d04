"""Four ranks: KV heads that several ranks keep, experts by number and by width, owned requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import cpu_engine, full
from oracle import Oracle, random_prompts
from tiny import tiny_model_dir

from trtspec import NGramDecodingConfig, SamplingParams

CASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    # family, its fields, how it is cut
    ("llama", {"num_attention_heads": 4, "num_key_value_heads": 2}, {}),
    ("qwen3_moe", {"num_attention_heads": 4, "num_experts": 8}, {"moe_expert_parallel_size": 2}),
    ("deepseek_v3", {}, {"enable_attention_dp": True, "moe_expert_parallel_size": 4}),
    (
        "qwen3_next",
        {"num_attention_heads": 4, "linear_num_key_heads": 4, "linear_num_value_heads": 8},
        {"moe_expert_parallel_size": 2},
    ),
    ("minimax_m2", {}, {"enable_attention_dp": True, "moe_expert_parallel_size": 4}),
]


@pytest.mark.skipif(not full(), reason="starts 4 processes a case: make test-all")
@pytest.mark.parametrize(("family", "fields", "cut"), CASES)
def test_greedy_equals_transformers(
    tmp_path: Path, family: str, fields: dict[str, Any], cut: dict[str, Any]
) -> None:
    path = tiny_model_dir(tmp_path, family, seed=3, **fields)
    oracle, prompts = Oracle(path), random_prompts(6)
    config = NGramDecodingConfig(max_draft_len=2, min_matching_ngram_size=1)
    with cpu_engine(path, config, tensor_parallel_size=4, chunk=24, **cut) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=14, ignore_eos=True))
        llm.executor.kv_cache.check_integrity()
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 14)
