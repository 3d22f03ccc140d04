"""Mixtral and MiniMax-M2: what their configs mean, and their texts, against transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from loading import ON_CPU
from matrix import MODES, MTP, config_of, covering, cpu_engine, make_drafters
from oracle import VOCAB, Oracle
from thread_ranks import ThreadRanks
from tiny import tiny_model_dir
from tiny_gemma import edit_config

from trtspec import SamplingParams
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.distributed.parallel import Parallel
from trtspec.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module", params=["mixtral", "minimax_m2"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    path = tiny_model_dir(folder, request.param, seed=1)
    oracle = Oracle(path)
    return path, oracle, make_drafters(folder, oracle)


@pytest.mark.slow
@covering(
    mode=[mode for mode in MODES if mode not in MTP], chunk=[None, 24],
    overlap=[False, True], pool=[None, 88],
)  # fmt: skip
def test_greedy_equals_transformers(
    target: Any, mode: str, chunk: int | None, overlap: bool, pool: int | None
) -> None:
    path, oracle, drafters = target
    llm = cpu_engine(
        path, config_of(mode, 3, drafters), chunk=chunk, overlap=overlap, pool=pool,
        max_num_tokens=chunk or 256,
    )  # fmt: skip
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    expected = oracle.extend_all(prompts, 20)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    llm.executor.kv_cache.check_integrity()


# What MiniMax-M2's public config.json says beside what every config does.
PUBLIC: dict[str, Any] = {
    "attn_type_list": [1, 1, 1], "use_qk_norm": True, "qk_norm_type": "per_layer",
    "scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0,
    "num_mtp_modules": 3, "mtp_transformer_layers": 1, "use_mtp": True, "mlp_intermediate_size": 96,
}  # fmt: skip


def test_a_public_config(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    edit_config(path, **PUBLIC)
    config = load_config(path)
    assert (config.rotary_dim, config.norms_all_heads, config.qk_norm) == (8, True, True)
    assert config.moe is not None and config.moe.scoring == "sigmoid"
    load_config(tiny_model_dir(tmp_path / "other", "mixtral"))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_type_list": [1, 0, 1]}, ["attn_type_list=[1, 0, 1]", "allowed are 1 alone"]),
        ({"qk_norm_type": "per_head"}, ["qk_norm_type='per_head'", "allowed is 'per_layer'"]),
        ({"use_routing_bias": False}, ["use_routing_bias=False"]),
        ({"scoring_func": "softmax"}, ["scoring_func='softmax'"]),
        ({"shared_intermediate_size": 64}, ["shared_intermediate_size=64"]),
        ({"num_experts_per_tok": 9}, ["num_experts_per_tok=9", "1 … 8"]),
        ({"rotary_dim": 7}, ["partial_rotary_factor"]),
    ],
)
def test_configs_that_are_refused(tmp_path: Path, fields: dict[str, Any], words: list[str]) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    edit_config(path, **{"rope_parameters": None, **fields})
    with pytest.raises(CheckpointError) as refusal:
        load_config(path)
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_norms_over_all_heads_are_not_cut(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "minimax_m2")
    with pytest.raises(ConfigError, match=r"norms over all heads at once .*Use one of 1"):
        ThreadRanks(2).run(lambda comm: load_decoder(path, ON_CPU, Parallel(comm)))
    ThreadRanks(2).run(lambda comm: load_decoder(path, ON_CPU, Parallel(comm, 2, True)))
