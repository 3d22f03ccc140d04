"""Prompts whose last layer is computed for the rows with logits alone, in captured passes too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from last_rows import watch_last_rows
from matrix import Drafters, config_of, make_drafters
from oracle import Oracle, random_prompts
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LENGTH = 8


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    return mtp_model_dir(folder, seed=1, num_mtp_layers=3, num_hidden_layers=4)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.mark.parametrize("graphs", [None, CudaGraphConfig()])
@pytest.mark.parametrize("mode", ["none", "sa", "eagle3", "eagle3_two_engine", "dflash", "mtp"])
@pytest.mark.parametrize("chunk", [None, 17])
def test_texts_are_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, chunk: int | None,
    graphs: CudaGraphConfig | None, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    passes = watch_last_rows(monkeypatch)
    prompts = random_prompts(6)
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cuda", dtype="float32", max_batch_size=4,
        max_seq_len=96, enable_chunked_prefill=chunk is not None, max_num_tokens=chunk or 96,
        cuda_graph_config=graphs,
    )  # fmt: skip
    for _ in range(2):  # the second time replays, and finds prompts in the cache
        outputs = llm.generate(prompts, SamplingParams(max_tokens=LENGTH, ignore_eos=True))
        texts = [output.outputs[0].token_ids for output in outputs]
        assert texts == oracle.extend_all(prompts, LENGTH)
    llm.shutdown()
    assert bool(passes) == (mode != "mtp")
