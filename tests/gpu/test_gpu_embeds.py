"""Prompts with vectors and positions of three axes on CUDA: their generation is in graphs."""

from __future__ import annotations

from pathlib import Path

import pytest
import steady
import torch
from test_embeds_prompt import LAYERS, _configs, _mrope_positions, _oracle, _prompt, vl_dir
from test_gemma_images import COUNT, WHOLE, Oracle, prompt, whole_dir
from tiny_heads import mtp_model_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
__all__ = ["vl_dir"]  # a fixture
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("graphs", [None, CudaGraphConfig()])
def test_tokens_equal_transformers(
    vl_dir: Path, tmp_path: Path, graphs: CudaGraphConfig | None
) -> None:
    """Beside a prompt of text, whole and in chunks."""
    prompt = _prompt(mrope_positions=_mrope_positions())
    expected = _oracle(vl_dir, prompt, 12)
    for name, config in _configs(tmp_path, vl_dir).items():
        for chunked in (False, True):
            llm = LLM(
                vl_dir, config, device="cuda", dtype="float32", max_seq_len=64, max_batch_size=2,
                cuda_graph_config=graphs, enable_chunked_prefill=chunked,
                max_num_tokens=12 if chunked else None,
            )  # fmt: skip
            mixed, text = llm.generate([prompt, [11, 12, 13]], PARAMS)
            assert mixed.outputs[0].token_ids == expected, name
            alone = llm.generate([11, 12, 13], PARAMS)
            assert text.outputs[0].token_ids == alone.outputs[0].token_ids, name


def test_a_generation_step_is_one_launch_and_waits_for_nothing(
    vl_dir: Path, tmp_path: Path
) -> None:
    prompt = _prompt(mrope_positions=_mrope_positions())
    config = _configs(tmp_path, vl_dir)["eagle3"]
    llm = LLM(vl_dir, config, device="cuda", dtype="bfloat16", max_seq_len=200, max_batch_size=3)
    executor = llm.executor
    for given in (prompt, [3, 4, 5]):
        executor.enqueue(given, SamplingParams(max_tokens=steady.LENGTH, ignore_eos=True))
    for _ in range(6):
        executor.step()
    steady.launch(executor)
    steady.finish(executor)


def test_vectors_without_axes(tmp_path: Path) -> None:
    target = mtp_model_dir(tmp_path, num_hidden_layers=LAYERS, num_mtp_layers=1)
    prompt = _prompt()
    config = MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=False)
    llm = LLM(target, config, device="cuda", dtype="float32", max_seq_len=64)
    output = llm.generate(prompt, PARAMS)
    assert output.outputs[0].token_ids == _oracle(target, prompt, 12)


@pytest.mark.parametrize("family", list(WHOLE))
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_images_attend_both_ways(tmp_path: Path, family: str, backend: str) -> None:
    path, given = whole_dir(tmp_path, family), prompt((6, 3))
    expected = Oracle(path).extend(given, COUNT)
    for chunked in (False, True):
        llm = LLM(
            path, NGramDecodingConfig(max_draft_len=3), device="cuda", dtype="float32",
            attn_backend=backend, max_seq_len=64, max_batch_size=2, enable_chunked_prefill=chunked,
            max_num_tokens=10 if chunked else None,
        )  # fmt: skip
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
        outputs = llm.generate([given, [11, 12, 13]], params)
        assert outputs[0].outputs[0].token_ids == expected
