"""Prompts with vectors and positions of three axes on CUDA: their generation is in graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from embeds import (
    LAYERS,
    embeds_configs,
    embeds_prompt,
    greedy_with_embeds,
    mrope_positions_of_prompt,
    vl_model_dir,
    vl_with_mtp,
)
from gemma_images import COUNT, WHOLE, ImageOracle, image_prompt, whole_dir
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
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)
VANILLA = MTPDecodingConfig(num_nextn_predict_layers=3, use_mtp_vanilla=True)


@pytest.fixture(scope="module")
def vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vl_model_dir(tmp_path_factory.mktemp("vl"))


@pytest.mark.parametrize("graphs", [None, CudaGraphConfig()])
def test_tokens_equal_transformers(
    vl_dir: Path, tmp_path: Path, graphs: CudaGraphConfig | None
) -> None:
    """Beside a prompt of text, whole and in chunks."""
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    expected = greedy_with_embeds(vl_dir, prompt, 12)
    runs = [(name, vl_dir, config) for name, config in embeds_configs(tmp_path, vl_dir).items()]
    runs.append(("vanilla", vl_with_mtp(vl_dir, tmp_path, 3), VANILLA))
    for name, target, config in runs:
        for chunked in (False, True):
            llm = LLM(
                target, config, device="cuda", dtype="float32", max_seq_len=64, max_batch_size=2,
                cuda_graph_config=graphs, enable_chunked_prefill=chunked,
                max_num_tokens=12 if chunked else None,
            )  # fmt: skip
            mixed, text = llm.generate([prompt, [11, 12, 13]], PARAMS)
            assert mixed.outputs[0].token_ids == expected, name
            alone = llm.generate([11, 12, 13], PARAMS)
            assert text.outputs[0].token_ids == alone.outputs[0].token_ids, name


@pytest.mark.parametrize("chunk", [64, 7])
def test_vanilla_mtp_drafts_as_on_cpu(vl_dir: Path, tmp_path: Path, chunk: int) -> None:
    """The draft layers' logits, also where rows of the part before are computed again."""
    target, logits = vl_with_mtp(vl_dir, tmp_path, 3), []
    for device in ("cpu", "cuda"):
        llm = LLM(
            target, VANILLA, device=device, dtype="float32", max_seq_len=64, max_batch_size=1,
            max_num_tokens=chunk, enable_chunked_prefill=True, cuda_graph_config=None,
        )  # fmt: skip
        worker, rows = llm.executor.worker, list[torch.Tensor]()
        propose = worker.propose

        def keeping(row: torch.Tensor, *rest: Any, rows=rows, propose=propose) -> torch.Tensor:  # type: ignore[no-untyped-def]
            rows.append(row.float().cpu())
            return propose(row, *rest)

        worker.propose = keeping  # type: ignore[method-assign]
        llm.generate(embeds_prompt(mrope_positions=mrope_positions_of_prompt()), PARAMS)
        logits.append(torch.cat(rows))
    assert len(logits[0]) > 12
    torch.testing.assert_close(logits[1], logits[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["eagle3", "vanilla"])
def test_a_generation_step_is_one_launch_and_waits_for_nothing(
    vl_dir: Path, tmp_path: Path, drafter: str
) -> None:
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    target, config = vl_dir, embeds_configs(tmp_path, vl_dir)["eagle3"]
    if drafter == "vanilla":
        target, config = vl_with_mtp(vl_dir, tmp_path, 3), VANILLA
    llm = LLM(target, config, device="cuda", dtype="bfloat16", max_seq_len=200, max_batch_size=3)
    executor = llm.executor
    for given in (prompt, [3, 4, 5]):
        executor.enqueue(given, SamplingParams(max_tokens=steady.LENGTH, ignore_eos=True))
    for _ in range(6):
        executor.step()
    steady.launch(executor)
    steady.finish(executor)


def test_vectors_without_axes(tmp_path: Path) -> None:
    target = mtp_model_dir(tmp_path, num_hidden_layers=LAYERS, num_mtp_layers=1)
    prompt = embeds_prompt()
    config = MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=False)
    llm = LLM(target, config, device="cuda", dtype="float32", max_seq_len=64)
    output = llm.generate(prompt, PARAMS)
    assert output.outputs[0].token_ids == greedy_with_embeds(target, prompt, 12)


@pytest.mark.parametrize("family", list(WHOLE))
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_images_attend_both_ways(tmp_path: Path, family: str, backend: str) -> None:
    path, given = whole_dir(tmp_path, family), image_prompt((6, 3))
    expected = ImageOracle(path).extend(given, COUNT)
    for chunked in (False, True):
        llm = LLM(
            path, NGramDecodingConfig(max_draft_len=3), device="cuda", dtype="float32",
            attn_backend=backend, max_seq_len=64, max_batch_size=2, enable_chunked_prefill=chunked,
            max_num_tokens=10 if chunked else None,
        )  # fmt: skip
        params = SamplingParams(max_tokens=COUNT, ignore_eos=True)
        outputs = llm.generate([given, [11, 12, 13]], params)
        assert outputs[0].outputs[0].token_ids == expected
