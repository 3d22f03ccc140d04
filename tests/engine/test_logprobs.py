"""Log probabilities of what came out, against transformers over the finished text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import EAGLE3, spread
from sampled import config_of, engine, make_models, requests
from torch import Tensor

from trtspec import KvCacheConfig, SamplingParams
from trtspec.errors import RequestError
from trtspec.ops.tokens.logprobs import token_logprobs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


MODES = ["none", "ngram", "draft_target", *EAGLE3, "mtp", "mtp_eagle"]


@torch.inference_mode()
def reference(model: Any, prompt: list[int], output: list[int]) -> Tensor:
    """[len(output), V], what each output token was chosen from."""
    logits = model(torch.tensor([prompt + output])).logits[0].double()
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()


@pytest.mark.slow
@spread(mode=MODES, rule=["strict", "rejection"])
def test_against_transformers(folder: Path, model: Any, mode: str, rule: str) -> None:
    """Greedy and sampled, with filters; some ask for none; chunked prompts, preemption."""
    prompts, params = requests(10)
    counts = [0, 3, None, 20, 1]
    params = [
        SamplingParams(
            max_tokens=p.max_tokens, seed=p.seed, ignore_eos=True, temperature=p.temperature,
            top_k=p.top_k, top_p=p.top_p, logprobs=counts[i % 5],
        )
        for i, p in enumerate(params)
    ]  # fmt: skip
    llm = engine(
        folder, config_of(folder, mode, rule),
        max_num_tokens=20, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=80, tokens_per_block=4),
    )  # fmt: skip
    outputs = llm.generate(prompts, params)
    assert llm.stats().num_preemptions > 0
    for prompt, given, output in zip(prompts, params, outputs, strict=True):
        completion = output.outputs[0]
        if given.logprobs is None:
            assert completion.logprobs is None
            continue
        wanted = reference(model, prompt, completion.token_ids)
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.token_ids) == len(wanted)
        for token, entry, row in zip(
            completion.token_ids, completion.logprobs, wanted, strict=True
        ):
            assert next(iter(entry)) == token
            best = row.topk(given.logprobs).indices.tolist()
            assert set(entry) == {token, *best}
            for other, said in entry.items():
                assert said.logprob == pytest.approx(float(row[other]), abs=1e-3)
                assert said.rank == 1 + int((row > row[other]).sum())


def test_a_request_without_a_token_has_an_empty_list(folder: Path) -> None:
    """None says that none were asked for."""
    llm = engine(folder, None)
    for asked, expected in ((1, []), (None, None)):
        stream = llm.generate_stream([5, 6, 7], SamplingParams(max_tokens=3, logprobs=asked))
        llm.abort(stream.request_id)
        assert next(stream).outputs[0].logprobs == expected


def test_rows_of_contexts_and_generations() -> None:
    logits = torch.randn(1 + 2 * 3, 11, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[4, -1, -1], [1, 2, -1], [7, 8, 9]], dtype=torch.int32)
    found = token_logprobs(logits, tokens, 1, 30)  # more than there are tokens
    wanted = logits.double().log_softmax(-1)
    for row, token in [(0, 4), (1, 1), (2, 2), (4, 7), (5, 8), (6, 9)]:
        assert float(found.own[row]) == pytest.approx(float(wanted[row, token]), abs=1e-5)
    assert found.top.shape == (7, 11) and found.rows(3).own.shape == (3,)


@pytest.mark.parametrize("count", [-1, 21, True, "3", 1.0])
def test_counts_are_checked(count: Any) -> None:
    with pytest.raises(RequestError, match=r"logprobs.*0 … 20"):
        SamplingParams(logprobs=count)
