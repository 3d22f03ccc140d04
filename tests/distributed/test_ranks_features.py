"""What an engine offers is the same over two ranks as on one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embeds import embeds_prompt, mrope_positions_of_prompt, vl_model_dir
from guided import save_tokenizer
from matrix import Drafters, config_of, cpu_engine, full
from oracle import Oracle, random_prompts
from prompt_logprobs import assert_as_asked
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_gemma import assistant_dir, gemma_dir
from tiny_gemma_assistant import assistant_config
from tiny_heads import eagle3_dir, mtp_model_dir
from tiny_kv_scales import COMPRESSED, scaled_dir

from trtspec import (
    LLM,
    GuidedDecodingParams,
    MTPDecodingConfig,
    SAEnhancerConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.data.hidden_states import SavedHiddenStates
from trtspec.errors import ConfigError
from trtspec.metadata.missed import CAPACITY


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Any:
    head = eagle3_dir(tmp_path_factory.mktemp("head"))
    return config_of("eagle3", 3, Drafters(head=head))


in_test_all = pytest.mark.skipif(
    not full(), reason="two more engines for what others nearly show: make test-all"
)


def on_both(target: Path, config: Any, run: Callable[[LLM], Any], **options: Any) -> list[Any]:
    """What `run` returns of an engine of one rank, and of two."""
    results = []
    for size in (1, 2):
        with cpu_engine(target, config, tensor_parallel_size=size, **options) as llm:
            results.append(run(llm))
    return results


SHAPED = [
    SamplingParams(max_tokens=10, temperature=0.8, seed=4, presence_penalty=0.5, ignore_eos=True),
    SamplingParams(max_tokens=10, repetition_penalty=1.4, logit_bias={3: 2.0}, ignore_eos=True),
    SamplingParams(max_tokens=10, temperature=2.0, seed=5, min_p=0.1, bad_words=[[7]]),
    SamplingParams(max_tokens=10, logprobs=3, ignore_eos=True),
]


def test_shaped_logits_and_log_probabilities(target_dir: Path, eagle3: Any) -> None:
    def run(llm: LLM) -> Any:
        outputs = llm.generate(random_prompts(4), SHAPED)
        return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]

    one, two = on_both(target_dir, eagle3, run)
    assert [tokens for tokens, _ in one] == [tokens for tokens, _ in two]
    for entry, other in zip(one[3][1], two[3][1], strict=True):
        assert entry.keys() == other.keys()
        for token in entry:
            assert entry[token].logprob == pytest.approx(other[token].logprob, abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("attention_dp", [False, True])
def test_log_probabilities_of_prompts(target_dir: Path, eagle3: Any, attention_dp: bool) -> None:
    """Each rank has a part of the logits. Parts of prompts, preempted and beside others."""
    counts = [2, None, 0, 5, 20, None]
    params = [SamplingParams(max_tokens=28, ignore_eos=True, prompt_logprobs=n) for n in counts]
    with cpu_engine(
        target_dir, eagle3, chunk=17, pool=72 if attention_dp else 112, tensor_parallel_size=2,
        enable_attention_dp=attention_dp,
    ) as llm:  # fmt: skip
        outputs = llm.generate(random_prompts(6, 12), params)
        assert llm.stats().num_preemptions > 0
    assert_as_asked(outputs, counts, Oracle(target_dir).read)


@pytest.mark.slow
def test_drafts_that_are_looked_up(target_dir: Path, eagle3: Any) -> None:
    """Every rank keeps the texts, and chooses alike."""
    config = replace(eagle3, sa_config=SAEnhancerConfig(threshold=2))
    params = [
        SamplingParams(max_tokens=24, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        for i in range(4)
    ]

    def run(llm: LLM) -> Any:
        said = [
            [o.outputs[0].token_ids for o in llm.generate(random_prompts(4), params)]
            for _ in range(2)
        ]
        return said, llm.stats().num_looked_up_drafts, llm.stats().acceptance_length

    one, two = on_both(target_dir, config, run)
    assert one == two and one[1] > 50 and one[2] > 1.2


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["eagle3", "confident"])
def test_verification_is_shared_out_alike(
    target_dir: Path, eagle3: Any, tmp_path: Path, drafter: str
) -> None:
    """By the same chances on every rank: rows of one that another leaves out would not add up."""
    config = replace(eagle3, acceptance="exact_match", max_verified_drafts=5)
    if drafter == "confident":
        drafters = Drafters(markov_head=dflash_dir(tmp_path, markov="gated", confidence="markov"))
        shared_out = {"acceptance": "exact_match", "max_verified_drafts": 5}
        config = config_of("dspark", 3, drafters, **shared_out)
    params = [
        SamplingParams(max_tokens=24, temperature=0.9 * (i % 2), seed=i, ignore_eos=True)
        for i in range(4)
    ]

    def run(llm: LLM) -> Any:
        return [o.outputs[0].token_ids for o in llm.generate(random_prompts(4, 12), params)]

    one, two = on_both(target_dir, config, run)
    assert one == two == run(cpu_engine(target_dir, None))


@in_test_all
def test_draft_lengths_change_while_running(target_dir: Path, eagle3: Any) -> None:
    def run(llm: LLM) -> Any:
        tokens = []
        for draft_len in (3, 0, 2):
            llm.executor.runtime_draft_len = draft_len
            outputs = llm.generate(random_prompts(3), SamplingParams(max_tokens=8, ignore_eos=True))
            tokens.append([output.outputs[0].token_ids for output in outputs])
        return tokens

    one, two = on_both(target_dir, eagle3, run)
    assert one == two


@pytest.mark.slow
def test_a_head_reads_late_on_every_rank(target_dir: Path, eagle3: Any) -> None:
    """Each rank has a part of the head's keys: what one lacks changes the drafts."""

    def run(llm: LLM) -> Any:
        executor, drafts = llm.executor, []
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        requests = [executor.enqueue(prompt, params) for prompt in random_prompts(3)]
        for number in range(200):
            executor.runtime_draft_len = 0 if number % 50 < 43 else 3
            executor.step()
            drafts.append(executor.state.next_tokens.tolist())
            rests.add(max((r.num_missed for r in requests), default=0))
        return [request.output_token_ids for request in requests], drafts

    rests: set[int] = set()
    one, two = on_both(target_dir, replace(eagle3, draft_len_schedule={8: 3}), run)
    assert max(rests) == CAPACITY and len(one[0][0]) == 60
    assert one == two


@pytest.mark.parametrize("accepted", ["1.5"])
def test_forced_acceptance(
    target_dir: Path, eagle3: Any, monkeypatch: pytest.MonkeyPatch, accepted: str
) -> None:
    """The variable is rank 0's where the engine is made, whatever it was when ranks started."""
    on_both(target_dir, None, lambda llm: llm.generate([3], SamplingParams(max_tokens=1)))
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, accepted)

    def run(llm: LLM) -> Any:
        params = SamplingParams(max_tokens=20, seed=3, ignore_eos=True)
        outputs = llm.generate(random_prompts(3), params)
        return [o.outputs[0].token_ids for o in outputs], llm.stats().acceptance_length

    one, two = on_both(target_dir, eagle3, run)
    assert one == two and two[1] > 2


@in_test_all
def test_relaxed_acceptance(target_dir: Path) -> None:
    config = MTPDecodingConfig(
        num_nextn_predict_layers=3, use_relaxed_acceptance_for_thinking=True, relaxed_topk=40,
        relaxed_delta=0.9, begin_thinking_phase_token=5, end_thinking_phase_token=6,
    )  # fmt: skip

    def run(llm: LLM) -> Any:
        prompts = [[5, *prompt] for prompt in random_prompts(3)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=16, ignore_eos=True))
        return [o.outputs[0].token_ids for o in outputs], llm.stats().acceptance_length

    one, two = on_both(target_dir, config, run)
    assert one == two and two[1] > 1.2


def test_saved_hidden_states(target_dir: Path, tmp_path: Path) -> None:
    for size in (1, 2):
        config = SaveHiddenStatesDecodingConfig(
            output_directory=tmp_path / str(size), eagle3_layers_to_capture=[0, 2]
        )
        with cpu_engine(target_dir, config, tensor_parallel_size=size) as llm:
            llm.generate(random_prompts(3), SamplingParams(max_tokens=6, ignore_eos=True))
    one, two = (SavedHiddenStates(tmp_path / str(size)) for size in (1, 2))
    assert len(one) == len(two) == 3
    for sample, other in zip(one, two, strict=True):
        assert sample["token_ids"].tolist() == other["token_ids"].tolist()
        torch.testing.assert_close(
            sample["hidden_states"], other["hidden_states"], atol=1e-4, rtol=1e-4
        )


@pytest.mark.slow
@pytest.mark.parametrize("attention_dp", [False, True])
def test_latent_attention_with_mtp(tmp_path: Path, attention_dp: bool) -> None:
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=2)
    config = MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=True)

    def run(llm: LLM) -> Any:
        outputs = llm.generate(random_prompts(4), SamplingParams(max_tokens=12, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    expected = run(cpu_engine(path, config))
    with cpu_engine(
        path, config, tensor_parallel_size=2, moe_expert_parallel_size=2,
        enable_attention_dp=attention_dp,
    ) as llm:  # fmt: skip
        assert run(llm) == expected


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3_text", "gemma4_small"])
def test_windows_and_an_assistant(tmp_path: Path, family: str) -> None:
    """Its layers read the target's keys and values, of which each rank has some heads."""
    fields = {"num_global_key_value_heads": 2} if family == "gemma4_small" else {}
    path = gemma_dir(tmp_path, family, seed=5, layers_weigh=4, **fields)
    config = assistant_config(assistant_dir(tmp_path, family, **fields), 3)

    def run(llm: LLM) -> Any:
        outputs = llm.generate(random_prompts(4), SamplingParams(max_tokens=20, ignore_eos=True))
        return [output.outputs[0].token_ids for output in outputs]

    one, two = on_both(path, config, run, chunk=16)
    assert one == two


def test_prompts_with_images(tmp_path: Path) -> None:
    path = vl_model_dir(tmp_path)

    def run(llm: LLM) -> Any:
        params = SamplingParams(max_tokens=10, ignore_eos=True)
        return (
            llm.generate(embeds_prompt(mrope_positions=mrope_positions_of_prompt()), params)
            .outputs[0]
            .token_ids
        )

    one, two = on_both(path, None, run)
    assert one == two


@in_test_all
def test_a_model_of_one_rank_beside_one_of_two(target_dir: Path, tmp_path: Path) -> None:
    """A draft model that is not cut, by choice or because it cannot be."""
    for heads, size in ((6, 1), (3, None)):
        draft = tiny_model_dir(tmp_path, seed=2, num_attention_heads=heads, num_key_value_heads=3)
        config = config_of(
            "draft_target", 3, Drafters(draft=draft), draft_tensor_parallel_size=size
        )

        def run(llm: LLM) -> Any:
            params = SamplingParams(max_tokens=12, temperature=3.0, seed=1, ignore_eos=True)
            outputs = llm.generate(random_prompts(3), params)
            return [output.outputs[0].token_ids for output in outputs]

        one, two = on_both(target_dir, config, run)
        assert one == two


def test_grammars(target_dir: Path, eagle3: Any) -> None:
    """The first rank's masks are everyone's; greedy and sampled requests, some without."""
    save_tokenizer(target_dir)
    guided = GuidedDecodingParams(regex="([cdef]|ab|xy){40}")
    params = [
        SamplingParams(max_tokens=12, guided_decoding=guided),
        SamplingParams(max_tokens=12, ignore_eos=True),
        SamplingParams(max_tokens=12, guided_decoding=guided, temperature=3.0, seed=4),
        SamplingParams(max_tokens=12, guided_decoding=GuidedDecodingParams(choice=["abc", "xyz"])),
    ]

    def run(llm: LLM) -> Any:
        outputs = llm.generate(random_prompts(4), params)
        assert not [output.error for output in outputs if output.error]
        return [output.outputs[0].token_ids for output in outputs]

    one, two = on_both(target_dir, eagle3, run)
    assert one == two


def test_an_fp8_cache_with_scales_of_heads(tmp_path: Path) -> None:
    k, v = torch.tensor([[0.2, 0.01]]).expand(3, 2), torch.tensor([[0.02, 0.1]]).expand(3, 2)
    path = scaled_dir(tmp_path, "k_scale v_scale", COMPRESSED, k, v)
    texts = []
    for size in (1, 2):
        config = config_of("ngram", 3, Drafters())
        with cpu_engine(path, config, tensor_parallel_size=size) as llm:
            group = llm.executor.kv_cache.groups[0]
            assert group.k_cache.dtype == torch.float8_e4m3fn
            assert group.k_scales is not None and group.v_scales is not None
            heads = 2 // size  # of rank 0
            assert torch.equal(group.k_scales, k[:, :heads])
            assert torch.equal(group.v_scales, v[:, :heads])
            outputs = llm.generate(
                random_prompts(4), SamplingParams(max_tokens=16, ignore_eos=True)
            )
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_threads_build_and_generate_at_once(target_dir: Path) -> None:
    """All ranks do one thing at a time, so a thread waits while another one builds."""
    texts: dict[int, list[list[int]]] = {}

    def work(number: int) -> None:
        with cpu_engine(target_dir, None, tensor_parallel_size=2) as llm:
            params = SamplingParams(max_tokens=40, ignore_eos=True)
            texts[number] = [o.outputs[0].token_ids for o in llm.generate([[5, 6, 7]] * 3, params)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 3 and texts[0] == texts[1] == texts[2]


def test_experts_are_dealt_out_where_there_are_some(target_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"moe_expert_parallel_size=2, but .* has no experts"):
        cpu_engine(target_dir, None, tensor_parallel_size=2, moe_expert_parallel_size=2)
