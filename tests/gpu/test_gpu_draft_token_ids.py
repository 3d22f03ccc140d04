"""Heads that propose some tokens alone: graphs, and an FP8 copy of their rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from oracle import VOCAB, Oracle, random_prompts
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import eagle1_dir, mtp_model_dir

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    SamplingParams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = [*range(2, 90, 3), 1, 96, 0]
HEADS: dict[str, tuple[Callable[[Path], Path], Callable[..., Any]]] = {
    "eagle1": (eagle1_dir, EagleDecodingConfig),
    "dflash": (dflash_dir, DFlashDecodingConfig),
    "dspark": (partial(dflash_dir, markov="vanilla"), DSparkDecodingConfig),
    "mtp": (mtp_model_dir, MTPDecodingConfig),
}


@pytest.mark.parametrize("quant", [None, "fp8"])
@pytest.mark.parametrize("kind", HEADS)
def test_texts_are_the_targets(tmp_path: Path, kind: str, quant: str | None) -> None:
    """In fp32, greedy; sampled requests are beside them. Only these tokens are drafted."""
    assert len(IDS) == 33 and max(IDS) < VOCAB
    make_head, config_of = HEADS[kind]
    head = make_head(tmp_path)
    target = head if kind == "mtp" else tiny_model_dir(tmp_path, num_hidden_layers=6)
    ids = IDS[1:] if quant else IDS  # 32 rows can be FP8
    config = config_of(max_draft_len=3, speculative_model=head, draft_token_ids=ids, quant=quant)
    llm = LLM(target, config, device="cuda", dtype="float32", max_seq_len=96, max_batch_size=4)
    model = llm.executor.draft_model
    lm_head = model.lm_head_of_step(0)
    assert lm_head.out_features == len(ids) and (lm_head.fp8 is None) == (quant is None)
    prompts, oracle = random_prompts(8), Oracle(target)
    params = [
        SamplingParams(max_tokens=20, temperature=i % 2, seed=i, ignore_eos=True) for i in range(8)
    ]
    outputs = llm.generate(prompts, params)
    for prompt, output in list(zip(prompts, outputs, strict=True))[::2]:
        assert output.outputs[0].token_ids == oracle.extend(prompt, 20)
    assert llm.executor.graphs.num_graphs > 0
    drafted = llm.executor.state.next_tokens[:4, 1:].flatten().tolist()
    assert set(drafted) <= {*ids, -1}


@pytest.mark.parametrize("kind", HEADS)
def test_a_step_is_one_graph_that_waits_for_nothing(tmp_path: Path, kind: str) -> None:
    make_head, config_of = HEADS[kind]
    head = make_head(tmp_path)
    target = head if kind == "mtp" else tiny_model_dir(tmp_path, num_hidden_layers=6)
    config = config_of(max_draft_len=3, speculative_model=head, draft_token_ids=IDS)
    llm = steady.engine(target, config)
    steady.launch(llm.executor)
    steady.finish(llm.executor)
