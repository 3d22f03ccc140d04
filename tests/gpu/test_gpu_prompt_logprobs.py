"""Log probabilities of prompts on CUDA: their passes run eagerly, all others by graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from matrix import config_of, make_drafters
from oracle import VOCAB, Oracle, random_prompts
from prompt_logprobs import assert_as_asked
from tiny_heads import mtp_model_dir

from trtspec import LLM, CudaGraphConfig, SamplingParams
from trtspec.executor import forward_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
COUNTS = [3, None, 0, 20, None, 1]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.mark.parametrize("graphs", [None, CudaGraphConfig()])
@pytest.mark.parametrize("mode", ["none", "eagle3", "mtp_eagle_two_engine"])
def test_against_transformers(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str,
    graphs: CudaGraphConfig | None,
) -> None:  # fmt: skip
    """Beside others that ask for none, whose texts stay what they are."""
    monkeypatch.setattr(forward_step, "MOST_LOGITS", 5 * VOCAB)
    oracle, prompts = Oracle(target_dir), random_prompts(6)
    llm = LLM(
        target_dir, config_of(mode, 3, make_drafters(tmp_path)), device="cuda", dtype="float32",
        max_batch_size=4, max_seq_len=96, max_num_tokens=24, enable_chunked_prefill=True,
        cuda_graph_config=graphs,
    )  # fmt: skip
    params = [SamplingParams(max_tokens=12, prompt_logprobs=n, ignore_eos=True) for n in COUNTS]
    outputs = llm.generate(prompts, params)
    assert_as_asked(outputs, COUNTS, oracle.read)
    expected = oracle.extend_all(prompts, 12)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    if graphs is not None:
        assert llm.executor.graphs is not None and llm.executor.graphs.num_graphs > 0
