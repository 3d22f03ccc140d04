"""Log probabilities of prompts, against transformers over the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from embeds import IMAGE, MASK, PROMPT, embeds_prompt, mrope_positions_of_prompt, vl_model_dir
from matrix import MODES, Drafters, config_of, cpu_engine, full, make_drafters, pairwise, spread
from oracle import VOCAB, Oracle, random_prompts
from prompt_logprobs import assert_as_asked, assert_entries, rows_of
from tiny import tiny_model_dir
from tiny_gemma import gemma_dir
from tiny_heads import mtp_model_dir
from torch import Tensor

from trtspec import (
    EmbedsPrompt,
    GuidedDecodingParams,
    KvCacheConfig,
    RequestError,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.executor import forward_step

COUNTS = [3, None, 0, 20, None, 1]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of 5 rows at a time."""
    monkeypatch.setattr(forward_step, "MOST_LOGITS", 5 * VOCAB + 3)


def params_of(counts: list[int | None], max_tokens: int, **fields: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, prompt_logprobs=n, **fields)
        for n in counts
    ]


AXES = {"chunk": [None, 17, 24], "overlap": [False, True], "pool": [None, 112]}
SETS = (
    pairwise(mode=MODES, **AXES)
    if full()
    else [(mode, 17, True, 112) for mode in MODES] + [("eagle3", *o) for o in pairwise(**AXES)]
)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", *AXES), SETS)
@pytest.mark.usefixtures("few_rows")
def test_against_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle,
    mode: str, chunk: int | None, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    """Beside others that ask for none, whose texts stay what they are."""
    prompts, length = (random_prompts(6), 6) if pool is None else (random_prompts(6, 12), 32)
    with cpu_engine(
        target_dir, config_of(mode, 3, drafters), chunk=chunk, overlap=overlap, pool=pool
    ) as llm:
        outputs = llm.generate(prompts, params_of(COUNTS, length))
        assert (llm.stats().num_preemptions > 0) == (pool is not None)
        llm.executor.kv_cache.check_integrity()
    assert_as_asked(outputs, COUNTS, oracle.read)
    expected = oracle.extend_all(prompts, length)
    assert [output.outputs[0].token_ids for output in outputs] == expected


@spread(family=["gemma2", "deepseek_v3", "qwen3_moe"], chunk=[None, 7])
def test_families(tmp_path: Path, family: str, chunk: int | None) -> None:
    """Softcaps and windows, latent attention, experts."""
    path = gemma_dir(tmp_path, family) if "gemma" in family else tiny_model_dir(tmp_path, family)
    oracle, prompts = Oracle(path), random_prompts(3)
    with cpu_engine(path, None, chunk=chunk) as llm:
        outputs = llm.generate(prompts, params_of([2, 0, 5], 3))
    assert_as_asked(outputs, [2, 0, 5], oracle.read)


def test_a_preempted_prompt_keeps_what_it_has(target_dir: Path, oracle: Oracle) -> None:
    """In the midst of its prompt, in the midst of its output, and after an exception."""
    with cpu_engine(target_dir, None, chunk=4, page=4) as llm:
        executor = llm.executor
        prompt = [*range(3, 33)]
        request = executor.enqueue(prompt, *params_of([2], 6))
        for due in (2, 12, 30):
            for _ in range(20):
                if request.prompt_logprobs.num_known < due:
                    executor.step()
            while executor._pending:
                executor._read(executor._pending.popleft())
            before = request.prompt_logprobs.num_known
            executor.scheduler.preempt(request)
            assert request.prompt_logprobs.num_known == before
            assert request.lacks_prompt_logprobs == (due < 30)
        executor.step()
        assert request.num_reused > 0  # all is known: it may take over its own blocks
        executor._start_over()
        executor.run_until_done()
        assert request.cached_tokens == 0
        assert request.output_token_ids == oracle.extend(prompt, 6)
        entries = request.prompt_logprobs.entries(prompt, 2)
        assert_entries(entries, prompt, rows_of(oracle.read(torch.tensor([prompt]))[0]), 2)


def test_before_temperature_penalties_filters_and_grammars(
    target_dir: Path, oracle: Oracle
) -> None:
    prompts = random_prompts(4)
    settings: list[dict[str, Any]] = [
        {"temperature": 3.0, "top_k": 2, "seed": 1}, {"temperature": 1.0, "min_p": 0.5},
        {"repetition_penalty": 1.5, "logit_bias": {3: 50.0}},
        {"bad_token_ids": list(range(5, 90)), "logprobs": 2},
    ]  # fmt: skip
    with cpu_engine(target_dir, None) as llm:
        params = [SamplingParams(max_tokens=4, prompt_logprobs=2, **s) for s in settings]
        outputs = llm.generate(prompts, params)
        assert_as_asked(outputs, [2] * 4, oracle.read)
        snapshots = list(llm.generate_stream(prompts[0], params[0]))
        for snapshot in snapshots:
            assert_as_asked([snapshot], [2], oracle.read)
        # The last prompt token and the first of the output are judged alike.
        text = outputs[3].outputs[0]
        again = llm.generate([*prompts[3], text.token_ids[0]], params_of([2], 1)[0])
        assert again.prompt_logprobs[-1].keys() == text.logprobs[0].keys()
        for token, known in again.prompt_logprobs[-1].items():
            assert known.logprob == pytest.approx(text.logprobs[0][token].logprob, abs=1e-4)
    pytest.importorskip("xgrammar")
    with cpu_engine(target_dir, None) as llm:
        from guided import save_tokenizer

        llm.tokenizer = save_tokenizer(target_dir.parent)
        guided = GuidedDecodingParams(regex="(ab|zz){2}")
        outputs = llm.generate(
            prompts[:1], SamplingParams(max_tokens=9, prompt_logprobs=2, guided_decoding=guided)
        )
        assert_as_asked(outputs, [2], oracle.read)


@pytest.mark.parametrize("chunk", [None, 16])
def test_several_completions_and_the_prefix_cache(
    target_dir: Path, oracle: Oracle, chunk: int | None
) -> None:
    """A prompt that asks takes nothing over; others find its blocks, and need not wait for it."""
    prompt = random_prompts(1)[0] + [*range(40)]
    with cpu_engine(target_dir, None, chunk=chunk) as llm:
        plain, asking = params_of([None, 2], 4)
        first = llm.generate(prompt, plain)
        asked = llm.generate([prompt, prompt], asking)
        assert first.cached_tokens == 0 and [o.cached_tokens for o in asked] == [0, 0]
        assert_as_asked(asked, [2, 2], oracle.read)
        assert llm.generate(prompt, plain).cached_tokens >= len(prompt) - 8
        llm.reset_prefix_cache()
        sampled = SamplingParams(
            max_tokens=4, n=3, temperature=1.0, seed=1, prompt_logprobs=2, ignore_eos=True
        )
        several = llm.generate(prompt, sampled)
        assert len(several.outputs) == 3
        assert_as_asked([several], [2], oracle.read)
        assert llm.stats().prefix_cache.hit_tokens > len(prompt)  # of its other completions
        assert llm.generate(prompt, plain).cached_tokens >= len(prompt) - 8
        one = llm.generate([5], asking)
        assert one.prompt_logprobs == [None]


@pytest.mark.parametrize("chunk", [None, 10])
def test_embeddings_have_none(tmp_path: Path, chunk: int | None) -> None:
    """The text after an image has, and is judged by what the image is."""
    path = vl_model_dir(tmp_path)
    prompt = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    with cpu_engine(path, None, chunk=chunk) as llm:
        output = llm.generate(prompt, params_of([3], 2)[0])
        placeholders = [i for i, token in enumerate(PROMPT) if token == IMAGE]
        assert_entries(output.prompt_logprobs, PROMPT, _vl_rows(path, prompt), 3, placeholders)
        every = EmbedsPrompt(PROMPT, torch.randn(len(PROMPT), prompt.prompt_embeds.shape[1]))
        output = llm.generate(every, params_of([3], 2)[0])
        assert output.prompt_logprobs == [None] * len(PROMPT)


@torch.inference_mode()
def _vl_rows(path: Path, prompt: EmbedsPrompt) -> Tensor:
    from transformers import Qwen2_5_VLForConditionalGeneration

    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(path, dtype=torch.float32)
    embeds = model.get_input_embeddings()(torch.tensor(PROMPT))
    embeds[MASK] = prompt.prompt_embeds
    hidden = model.model.language_model(
        inputs_embeds=embeds[None], position_ids=prompt.mrope_positions[:, None], use_cache=False
    )[0]
    return rows_of(model.lm_head(hidden[0]))


def test_beside_saved_states(target_dir: Path, tmp_path: Path, oracle: Oracle) -> None:
    config = SaveHiddenStatesDecodingConfig(
        output_directory=tmp_path, eagle3_layers_to_capture=[0, 1]
    )
    with cpu_engine(target_dir, config, chunk=7) as llm:
        outputs = llm.generate(random_prompts(2), params_of([2, None], 3))
    assert_as_asked(outputs, [2, None], oracle.read)


def test_a_row_of_nan_ends_its_request_alone(
    target_dir: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[3, 4, 5, 6], [7, 8, 9]]
    with cpu_engine(target_dir, None) as llm:
        make = llm.executor.target.compute_logits

        def compute(hidden: Tensor) -> Tensor:
            logits = make(hidden)
            if len(logits) == 3:  # the rows of the first prompt that are asked for
                logits[1] = float("nan")
            return logits

        monkeypatch.setattr(llm.executor.target, "compute_logits", compute)
        bad, good = llm.generate(prompts, params_of([1, None], 3))
        assert bad.outputs[0].finish_reason == "error" and "NaN" in bad.error
        assert good.outputs[0].token_ids == oracle.extend(prompts[1], 3)


@pytest.mark.parametrize("count", [-1, 21, True, "3", 1.0])
def test_counts_are_checked(count: Any) -> None:
    with pytest.raises(RequestError, match=r"prompt_logprobs.*0 … 20"):
        SamplingParams(prompt_logprobs=count)


def test_rows_that_do_not_ask_cost_nothing(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No logits but those of a step's own rows."""
    rows: list[int] = []
    cache = KvCacheConfig(enable_block_reuse=False)
    with cpu_engine(target_dir, None, kv_cache_config=cache) as llm:
        make = llm.executor.target.compute_logits

        def compute(hidden: Tensor) -> Tensor:
            rows.append(len(hidden))
            return make(hidden)

        monkeypatch.setattr(llm.executor.target, "compute_logits", compute)
        llm.generate([[3] * 9, [4] * 9], params_of([None, None], 3))
        assert rows == [2, 2, 2]
        rows.clear()
        llm.generate([[3] * 9, [4] * 9], params_of([None, 1], 3))
        assert rows == [2, 8, 2, 2]
