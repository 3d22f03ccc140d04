"""The same executor on CUDA: tokens, lengths and the absence of host synchronisation."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import steady
import torch
from matrix import MASKED, NETWORKS, Drafters, config_of, covering, make_drafters
from oracle import VOCAB, Oracle, random_prompts
from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from tiny_heads import mtp_model_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.config import DecodingBaseConfig
from trtspec.data.hidden_states import SavedHiddenStates
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.inputs import StepInputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODES = ["none", "ngram", "sa", *NETWORKS]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=4)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def expected(target_dir: Path) -> list[list[int]]:
    """transformers on the same device, token by token from scratch."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).cuda().eval()
    outputs = []
    with torch.inference_mode():
        for prompt in random_prompts(6):
            tokens = list(prompt)
            for _ in range(24):
                logits = model(torch.tensor([tokens], device="cuda")).logits[0, -1]
                tokens.append(int(logits.argmax()))
            outputs.append(tokens[len(prompt) :])
    return outputs


@covering(mode=MODES, overlap=[False, True], pool=[None, 112])
def test_greedy_equals_transformers_on_cuda(
    target_dir: Path, drafters: Drafters, expected: list[list[int]],
    mode: str, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cuda", dtype="float32",
        max_batch_size=4, max_seq_len=96, max_num_tokens=32, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=pool or 1024, tokens_per_block=8),
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == expected
    llm.executor.kv_cache.check_integrity()


@pytest.mark.parametrize("k", [1, 4])
def test_a_perfect_draft_model_is_always_accepted_on_cuda(target_dir: Path, k: int) -> None:
    llm = LLM(
        target_dir, DraftTargetDecodingConfig(max_draft_len=k, speculative_model=target_dir),
        device="cuda", dtype="float32", max_batch_size=3, max_seq_len=128,
        kv_cache_config=KvCacheConfig(max_tokens=1024),
    )  # fmt: skip
    params = SamplingParams(max_tokens=1 + 6 * (k + 1), ignore_eos=True)
    for output in llm.generate(random_prompts(5), params):
        assert output.spec_stats.acceptance_length == k + 1


@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_engine", "mtp_eagle", "mtp_vanilla"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_perfect_head_is_always_accepted_on_cuda(tmp_path: Path, mode: str, k: int) -> None:
    target = one_layer_target(tmp_path)
    config: DecodingBaseConfig
    if mode.startswith("eagle3"):
        head = perfect_eagle3(tmp_path, target)
        config = EagleDecodingConfig(
            max_draft_len=k, speculative_model=head, eagle3_one_model=mode == "eagle3"
        )
    else:
        add_perfect_mtp(target, k)
        config = MTPDecodingConfig(num_nextn_predict_layers=k, use_mtp_vanilla="vanilla" in mode)
    llm = LLM(
        target, config, device="cuda", dtype="float32", max_batch_size=3, max_seq_len=128,
        max_num_tokens=32, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=1024),
    )  # fmt: skip
    prompts = [[(7 * i + j) % VOCAB for j in range(16 + 5 * i)] for i in range(5)]
    params = SamplingParams(max_tokens=1 + 6 * (k + 1), ignore_eos=True)
    for output in llm.generate(prompts, params):
        assert output.spec_stats.acceptance_length == k + 1


def test_relaxed_acceptance_on_cuda_equals_the_cpu(target_dir: Path) -> None:
    config = MTPDecodingConfig(
        num_nextn_predict_layers=3, use_relaxed_acceptance_for_thinking=True, relaxed_topk=8,
        relaxed_delta=0.4, begin_thinking_phase_token=91, end_thinking_phase_token=92,
    )  # fmt: skip
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(
            target_dir, config, device=device, dtype="float32", max_seq_len=96,
            kv_cache_config=KvCacheConfig(max_tokens=1024),
        )  # fmt: skip
        prompts = [[91, *prompt] for prompt in random_prompts(4)]
        outputs = llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        texts.append([o.outputs[0].token_ids for o in outputs])
    assert texts[0] == texts[1]


def test_saved_hidden_states_on_cuda_equal_the_cpu(target_dir: Path, tmp_path: Path) -> None:
    saved = []
    for device in ("cpu", "cuda"):
        config = SaveHiddenStatesDecodingConfig(
            output_directory=tmp_path / device, eagle3_layers_to_capture=[1, 0]
        )
        llm = LLM(
            target_dir, config, device=device, dtype="float32", max_seq_len=96,
            kv_cache_config=KvCacheConfig(max_tokens=1024),
        )  # fmt: skip
        llm.generate(random_prompts(4), SamplingParams(max_tokens=12, ignore_eos=True))
        samples = sorted(
            SavedHiddenStates(tmp_path / device), key=lambda s: s["token_ids"].tolist()
        )
        saved.append(samples)
    assert len(saved[0]) == len(saved[1]) == 4
    for ours, theirs in zip(*saved, strict=True):
        for name, column in ours.items():
            torch.testing.assert_close(column, theirs[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_launching_a_generation_step_waits_for_nothing(
    target_dir: Path, drafters: Drafters, mode: str, temperature: float
) -> None:
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cuda", dtype="bfloat16",
        max_batch_size=2, max_seq_len=96, kv_cache_config=KvCacheConfig(max_tokens=512),
    )  # fmt: skip
    executor = llm.executor
    params = SamplingParams(
        max_tokens=30, temperature=temperature, top_k=9, seed=1, ignore_eos=True
    )
    for prompt in random_prompts(2):
        executor.enqueue(prompt, params)
    for _ in range(3):
        executor.step()
    batch = executor._schedule()
    assert len(batch.generations) == 2
    with steady.no_waiting():
        executor._pending.append(executor._launch(executor._plan(batch, batch)))
    for request in executor.run_until_done():
        assert len(request.output_token_ids) == 30


def test_sampled_tokens_on_cuda_equal_the_cpu(target_dir: Path) -> None:
    """The noise is integer arithmetic, the logits fp32: the same seed says the same thing."""
    params = [
        SamplingParams(max_tokens=20, temperature=0.9, seed=i, ignore_eos=True) for i in range(4)
    ]
    texts = []
    for device in ("cpu", "cuda"):
        llm = LLM(
            target_dir, NGramDecodingConfig(max_draft_len=3), device=device, dtype="float32",
            max_batch_size=4, max_seq_len=96, kv_cache_config=KvCacheConfig(max_tokens=1024),
        )  # fmt: skip
        outputs = llm.generate(random_prompts(4), params)
        texts.append([o.outputs[0].token_ids for o in outputs])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_reduced_precision_runs_to_the_end(target_dir: Path, dtype: str) -> None:
    llm = LLM(
        target_dir, NGramDecodingConfig(max_draft_len=3), device="cuda", dtype=dtype,
        max_batch_size=4, max_seq_len=96,
        kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.1),
    )  # fmt: skip
    for output in llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True)):
        assert len(output.outputs[0].token_ids) == 24 and output.error is None


# -- graphs ------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_generation_step_is_one_graph_launch(
    target_dir: Path, drafters: Drafters, mode: str, temperature: float
) -> None:
    """No kernel is launched by itself, nothing is waited for; a two-engine mode launches one
    graph for the step and one for each draft pass."""
    executor = steady.engine(target_dir, config_of(mode, 3, drafters), temperature).executor
    steady.launch(executor, 4 if mode.endswith("two_engine") else 1)
    steady.finish(executor)


def test_an_engine_that_is_garbage_spoils_no_capture(target_dir: Path, drafters: Drafters) -> None:
    """Graphs cannot be destroyed while another engine captures: a collection must wait. An engine
    is no cycle, but a caller's cycle may hold one."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.disable()
    try:
        old = steady.engine(target_dir, config_of("ngram", 3, drafters))
        garbage = weakref.ref(old.executor.graphs)
        cycle: list[Any] = [old]
        cycle.append(cycle)
        del old, cycle
        llm = LLM(
            target_dir, device="cuda", dtype="bfloat16", max_batch_size=2, max_seq_len=96,
            kv_cache_config=KvCacheConfig(max_tokens=512),
        )  # fmt: skip
        step, captures = llm.executor.runner.step, []
        run = step.run

        def collecting_step(inputs: StepInputs, draft_len: int) -> StepOutputs:
            if torch.cuda.is_current_stream_capturing():
                captures.append(garbage() is not None)
                if gc.isenabled():  # as when enough objects have been made
                    gc.collect()
            return run(inputs, draft_len)

        step.run = collecting_step  # type: ignore[method-assign]
        gc.enable()
        gc.set_threshold(1 << 30)
        outputs = llm.generate(random_prompts(2), SamplingParams(max_tokens=8, ignore_eos=True))
    finally:
        gc.set_threshold(*thresholds)
        gc.enable()
    assert captures and captures[0], "nothing was garbage: the test shows nothing"
    assert [len(o.outputs[0].token_ids) for o in outputs] == [8, 8]


@pytest.mark.parametrize("mode", MODES)
def test_graphs_and_eager_steps_say_the_same(
    target_dir: Path, drafters: Drafters, expected: list[list[int]], mode: str
) -> None:
    """Five requests in a graph for eight: rows that fill it disturb nobody and count nowhere."""
    stats = []
    for config in (CudaGraphConfig(batch_sizes=[8]), None):
        llm = LLM(
            target_dir, config_of(mode, 3, drafters), device="cuda", dtype="float32",
            max_batch_size=8, max_seq_len=96, cuda_graph_config=config,
            kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=8),
        )  # fmt: skip
        outputs = llm.generate(
            random_prompts(6)[:5], SamplingParams(max_tokens=24, ignore_eos=True)
        )
        assert [o.outputs[0].token_ids for o in outputs] == expected[:5]
        stats.append([o.spec_stats for o in outputs])
        graphs = llm.executor.graphs
        assert (graphs is None) == (config is None)
        assert graphs is None or graphs.num_graphs > 0
    assert stats[0] == stats[1]


@pytest.mark.parametrize(
    "mode", ["none", "ngram", "sa", "draft_target", "eagle3", "mtp_eagle", *MASKED]
)
def test_graphs_of_prompts_say_the_same(
    target_dir: Path, drafters: Drafters, expected: list[list[int]], mode: str
) -> None:
    """Prompts of several sizes in graphs of their own, beside the generations' graphs."""
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cuda", dtype="float32", max_batch_size=3,
        max_seq_len=96, cuda_graph_config=CudaGraphConfig(context_tokens=(32, 96)),
        kv_cache_config=KvCacheConfig(max_tokens=1024),
    )  # fmt: skip
    outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
    assert [output.outputs[0].token_ids for output in outputs] == expected
    full = [(7 * i) % VOCAB for i in range(32)]  # no row is left for padding
    alone = llm.generate(full, SamplingParams(max_tokens=24, ignore_eos=True))
    assert alone.outputs[0].token_ids == Oracle(target_dir).extend(full, 24)
    captured = {key.context_tokens for key in llm.executor.graphs._graphs}
    assert captured & {32, 96} and 0 in captured


@pytest.mark.parametrize("mode", ["none", "ngram", "eagle3", "mtp_eagle", "draft_target", *MASKED])
def test_a_prompt_longer_than_any_graph_takes_several(
    target_dir: Path, drafters: Drafters, mode: str
) -> None:
    """In one step, beside a generation."""
    llm = LLM(
        target_dir, config_of(mode, 3, drafters), device="cuda", dtype="float32", max_batch_size=3,
        max_seq_len=128, cuda_graph_config=CudaGraphConfig(context_tokens=(32,)),
        kv_cache_config=KvCacheConfig(max_tokens=1024),
    )  # fmt: skip
    executor, params = llm.executor, SamplingParams(max_tokens=20, ignore_eos=True)
    prompts = [[(7 * i + j * j) % VOCAB for j in range(count)] for i, count in enumerate((9, 75))]
    requests = [executor.enqueue(prompts[0], params)]
    executor.step()
    requests.append(executor.enqueue(prompts[1], params))
    executor.step()
    assert requests[1].num_computed == 75  # 32, 32 and 11
    executor.run_until_done()
    oracle = Oracle(target_dir)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == oracle.extend(prompt, 20)
    assert {key.context_tokens for key in executor.graphs._graphs} == {0, 32}


@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block"])
@pytest.mark.parametrize("mode", ["draft_target", "eagle3", "mtp", "mtp_eagle", *MASKED])
def test_sampled_rules_in_a_graph_say_what_the_cpu_does(
    target_dir: Path, drafters: Drafters, mode: str, rule: str
) -> None:
    """Seeded texts of fp32 on the CPU, eagerly and as graphs; filters, shaping and logprobs too."""
    config = replace(config_of(mode, 3, drafters), acceptance=rule)
    wishes: list[dict[str, Any]] = [
        {"temperature": 3.0}, {"temperature": 1.0, "top_k": 9, "logprobs": 2}, {},
        {"temperature": 2.0, "presence_penalty": 0.7, "min_p": 0.02, "logit_bias": {5: 2.0}},
    ]  # fmt: skip
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, seed=i, **wish)
        for i, wish in enumerate(wishes)
    ]
    texts = []
    for device, graphs in (("cpu", None), ("cuda", None), ("cuda", CudaGraphConfig())):
        llm = LLM(
            target_dir, config, device=device, dtype="float32", max_batch_size=4, max_seq_len=96,
            cuda_graph_config=graphs, kv_cache_config=KvCacheConfig(max_tokens=1024),
        )  # fmt: skip
        outputs = llm.generate(random_prompts(4), params)
        texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[1] == texts[0] and texts[2] == texts[0]


def test_torch_attention_runs_without_graphs(
    target_dir: Path, drafters: Drafters, expected: list[list[int]]
) -> None:
    llm = LLM(
        target_dir, config_of("eagle3", 3, drafters), device="cuda", dtype="float32",
        max_seq_len=96, attn_backend="torch", kv_cache_config=KvCacheConfig(max_tokens=2048),
    )  # fmt: skip
    assert llm.executor.graphs is None
    outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=24, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == expected


def test_graphs_captured_at_start_are_all_that_is_needed(
    target_dir: Path, drafters: Drafters
) -> None:
    graphs = CudaGraphConfig(batch_sizes=[1, 4], capture_at_start=True)
    llm = LLM(
        target_dir, config_of("eagle3", 3, drafters), device="cuda", dtype="float32",
        max_batch_size=4, max_seq_len=64, cuda_graph_config=graphs,
    )  # fmt: skip
    captured = llm.executor.graphs
    assert captured is not None and captured.memory_bytes >= 0
    # Greedy and sampled: two batch sizes, and the sizes of prompts.
    all_graphs = 2 * (2 + len(captured.contexts))
    assert captured.num_graphs == all_graphs
    prompts = random_prompts(3)
    for temperature in (0.0, 0.8):
        llm.generate(prompts, SamplingParams(max_tokens=12, temperature=temperature, seed=1))
    assert captured.num_graphs == all_graphs


# -- mask tokens ---------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", MASKED)
@pytest.mark.parametrize("config", [None, CudaGraphConfig(), CudaGraphConfig(context_tokens=(96,))])
def test_drafts_from_masks_equal_the_cpus(
    target_dir: Path, drafters: Drafters, mode: str, config: CudaGraphConfig | None
) -> None:
    """Greedy texts are right whatever is drafted: what is drafted must be right too."""
    seen: dict[str, list[list[list[int]]]] = {}
    for device in ("cpu", "cuda"):
        llm = LLM(
            target_dir, config_of(mode, 3, drafters), device=device, dtype="float32",
            max_batch_size=3, max_seq_len=64, disable_overlap_scheduler=True,
            cuda_graph_config=config, kv_cache_config=KvCacheConfig(max_tokens=512),
        )  # fmt: skip
        executor = llm.executor
        params = SamplingParams(max_tokens=20, ignore_eos=True)
        prompts = [prompt[:24] for prompt in random_prompts(4)]
        requests = [executor.enqueue(prompt, params) for prompt in prompts]
        seen[device] = [[] for _ in requests]
        while executor.has_work:
            executor.step()
            for drafts, request in zip(seen[device], requests, strict=True):
                if request.is_generation:
                    drafts.append(executor.state.next_tokens[request.slot, 1:].tolist())
    assert seen["cuda"] == seen["cpu"]
    assert all(drafts and -1 not in drafts[0] for drafts in seen["cpu"])
