"""`max_verified_drafts`: a step verifies the likeliest drafts of all its requests."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import LAYERS, Script, make_case, run_random_schedule
from matrix import MODES, NETWORKS, Drafters, config_of, cpu_engine, make_drafters
from oracle import VOCAB, Oracle, random_prompts
from perfect import one_layer_target, perfect_eagle3
from safetensors.torch import load_file
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import mtp_model_dir
from torch import Tensor

from trtspec import (
    LLM,
    AutoDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    NGramDecodingConfig,
    SAEnhancerConfig,
    SamplingParams,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.config import resolve_speculative_config
from trtspec.distributed.logits import gather_logits
from trtspec.errors import ConfigError
from trtspec.metadata.attention import AttentionMetadata
from trtspec.ops.tokens.markov_walk import MarkovTables
from trtspec.workers.base import SpecWorkerBase

K = 3


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def oracle(target_dir: Path) -> Oracle:
    return Oracle(target_dir)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, oracle: Oracle) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), oracle)


def packed_rows(llm: LLM) -> list[list[int]]:
    """Collects how many drafts each request verifies, by step in which not all are."""
    steps: list[list[int]] = []
    watch_rows(llm, steps)
    return steps


def watch_rows(llm: LLM, steps: list[list[int]]) -> None:
    """Appends to `steps`."""
    target = llm.executor.runner.step.target
    forward = target.forward

    def watched(ids: Tensor, positions: Tensor, meta: AttentionMetadata, **rest: Any) -> Tensor:
        if meta.packed is not None:
            steps.append((meta.packed.starts.diff() - 1).tolist())
            assert len(ids) == len(positions) == meta.num_tokens == sum(steps[-1]) + len(steps[-1])
        return forward(ids, positions, meta, **rest)

    target.forward = watched  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("pool", [None, 112])
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode != "none"])
def test_greedy_equals_transformers(
    target_dir: Path, drafters: Drafters, oracle: Oracle, mode: str, pool: int | None
) -> None:
    """With room for all, and where requests are preempted."""
    config = config_of(mode, K, drafters, max_verified_drafts=5)
    llm = cpu_engine(target_dir, config, pool=pool, overlap=pool is None)
    steps, prompts = packed_rows(llm), random_prompts(6, 12)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    assert [o.outputs[0].token_ids for o in outputs] == oracle.extend_all(prompts, 20)
    assert steps and all(sum(lens) == 5 for lens in steps)
    assert (llm.stats().num_preemptions > 0) == (pool is not None)
    llm.executor.kv_cache.check_integrity()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "mtp_eagle", "mtp_vanilla"])
def test_draft_logits_equal_recomputation(tmp_path: Path, name: str) -> None:
    """What heads read of the target's rows, captured layers or its last one, is at its place."""
    target = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=LAYERS)
    case = make_case(name, target, tmp_path, 4)
    case.config = replace(case.config, max_verified_drafts=5)
    steps: list[list[int]] = []

    class Watched(Script):
        def __init__(self, llm: LLM, *others: Any):
            super().__init__(llm, *others)
            watch_rows(llm, steps)

    compared, executor = run_random_schedule(case, 4, 4, Watched)
    assert compared > 30 and len(steps) > 10
    assert len({n for lens in steps for n in lens}) > 3
    assert max(executor.statistics.accepted_lens) > 2


def chances_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, prompts: int = 3) -> Iterator[Any]:
    """Yields the chances kept after each step, [B, K], and the logits that drafts were chosen from
    since the step before, by draft and then by request."""
    seen: list[Tensor] = []
    choose = SpecWorkerBase._choose

    def watched(self: SpecWorkerBase, logits: Any, *rest: Any) -> Tensor:
        seen.append(gather_logits(logits).double())
        return choose(self, logits, *rest)

    monkeypatch.setattr(SpecWorkerBase, "_choose", watched)
    requests = [
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=12, ignore_eos=True))
        for prompt in random_prompts(prompts, 12)
    ]
    llm.executor.step()
    while True:
        slots = [request.slot for request in requests]
        seen.clear()
        llm.executor.step()
        if any(request.is_finished for request in requests):
            return
        yield llm.executor.state.chances[slots], seen


@pytest.mark.parametrize("mode", [mode for mode in NETWORKS if mode not in ("dflash2", "dspark")])
def test_chances_are_those_of_the_drafters_logits(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft's chance is its drafter's largest probability, times those of the drafts before."""
    llm = cpu_engine(target_dir, config_of(mode, K, drafters, max_verified_drafts=2), overlap=False)
    count = 0
    for chances, logits in chances_of(llm, monkeypatch):
        best = torch.cat(logits).softmax(-1).amax(-1)
        expected = best.view(K, 3).cumprod(0).T.float()
        torch.testing.assert_close(chances, expected, atol=1e-6, rtol=1e-5)
        count += 1
    assert count > 3


@pytest.mark.parametrize("mode", ["dflash2", "dspark_vanilla"])
def test_chances_of_drafts_that_are_walked_through(
    target_dir: Path, drafters: Drafters, tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block's own logits; a vanilla DSpark head's have a bias by the draft before."""
    if mode == "dspark_vanilla":
        drafters = replace(drafters, markov_head=dflash_dir(tmp_path, markov="vanilla"))
    config = config_of(mode.removesuffix("_vanilla"), K, drafters, max_verified_drafts=2)
    llm = cpu_engine(target_dir, config, overlap=False)
    head: Any = llm.executor.runner.step.draft_model
    if mode == "dspark_vanilla":  # on a CPU its weights are packed, and the walk is not taken
        weights = load_file(drafters.markov_head / "model.safetensors")
        tables = MarkovTables(*(weights[f"markov_head.markov_w{i}.weight"] for i in (1, 2)), None)
        monkeypatch.setattr(type(head.markov_head), "tables", lambda *_: tables)
    own, compute = list[Tensor](), head.compute_logits
    monkeypatch.setattr(
        head,
        "compute_logits",
        lambda *given: own.append(compute(*given).clone()) or own[-1].clone(),
    )
    count = 0
    for chances, chosen in chances_of(llm, monkeypatch):
        assert not chosen, "they are walked through"
        logits = own[-1].double().view(K, 3, -1)
        if mode == "dspark_vanilla":
            state = llm.executor.state
            tokens = state.next_tokens[[r.slot for r in llm.executor.scheduler.running], :K]
            logits = logits + (tables.w1[tokens.T.long()] @ tables.w2.T).double()
        expected = logits.softmax(-1).amax(-1).cumprod(0).T.float()
        torch.testing.assert_close(chances, expected, atol=1e-6, rtol=1e-4)
        count += 1
    assert count > 3


CONFIDENT: dict[str, dict[str, Any]] = {
    "vanilla": {"markov": "vanilla", "confidence": "markov"},
    "in_turn": {"markov": "gated", "confidence": "markov", "draft_vocab": 40},
    "hidden": {"markov": "rnn", "confidence": "hidden"},
    "no_markov": {
        "confidence": "hidden",
        "sample_from_anchor": True,
        "inner": {"architectures": ["DSparkDraftModel"], "markov_rank": 0},
    },
}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", CONFIDENT)
def test_chances_are_those_of_a_confidence_head(
    target_dir: Path, tmp_path: Path, name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sigmoid(w [h, e] + b), h a row that proposes, e of the token before, by float64."""
    path = dflash_dir(tmp_path, block=K + 1, **CONFIDENT[name])
    config = DSparkDecodingConfig(
        max_draft_len=K, speculative_model=path, target_layer_ids=[0, 1, 2], max_verified_drafts=2,
        acceptance="rejection",
    )  # fmt: skip
    llm = cpu_engine(target_dir, config, overlap=False)
    head: Any = llm.executor.runner.step.draft_model
    weights = {key: w.double() for key, w in load_file(path / "model.safetensors").items()}
    if name == "vanilla":
        w1, w2 = (weights[f"markov_head.markov_w{i}.weight"].float() for i in (1, 2))
        monkeypatch.setattr(type(head.markov_head), "tables", lambda *_: MarkovTables(w1, w2, None))
    rows, compute = list[Tensor](), head.compute_logits
    monkeypatch.setattr(
        head, "compute_logits", lambda *given: rows.append(given[0].double()) or compute(*given)
    )
    requests = [
        llm.executor.enqueue(
            prompt, SamplingParams(max_tokens=12, ignore_eos=True, temperature=temperature, seed=3)
        )
        for prompt in random_prompts(3, 12)
    ]
    seen = []
    for _ in range(4):
        llm.executor.step()
        slots = [request.slot for request in requests]
        if min(slots) < 0 or len(rows[-1]) != K * 3:
            continue
        state = llm.executor.state
        read = rows[-1].view(K, 3, -1)
        if name in ("vanilla", "in_turn"):
            before = state.next_tokens[slots, :K].T.long()
            read = torch.cat([read, weights["markov_head.markov_w1.weight"][before]], dim=-1)
        logits = read @ weights["confidence_head.proj.weight"][0]
        logits = logits + weights["confidence_head.proj.bias"]
        expected = logits.sigmoid().cumprod(0).T.float()
        torch.testing.assert_close(state.chances[slots], expected, atol=1e-5, rtol=1e-4)
        seen.append(expected)
    assert len(seen) > 1 and torch.cat(seen).std() > 0.05


def test_a_confidence_head_at_the_end_of_the_longest_text(
    target_dir: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """There are no drafts beyond it, which a confidence head would read the embeddings of."""
    path = dflash_dir(tmp_path, block=K + 1, markov="gated", confidence="markov")
    config = DSparkDecodingConfig(
        max_draft_len=K, speculative_model=path, target_layer_ids=[0, 1, 2], max_verified_drafts=2
    )
    llm = cpu_engine(target_dir, config, max_seq_len=40)
    prompts = random_prompts(3, 12)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=40, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, 40 - len(prompt))


def test_what_is_found_in_texts_is_verified_first(target_dir: Path, tmp_path: Path) -> None:
    """Also where the network would have drafted the same."""
    lookup = SAEnhancerConfig(threshold=1, min_token_prob=0.0)
    config = config_of("eagle3", K, make_drafters(tmp_path), max_verified_drafts=4)
    llm = cpu_engine(target_dir, replace(config, sa_config=lookup), overlap=False)
    state, own = llm.executor.state, list[Any]()
    beside = llm.executor.worker.lookup
    override = beside.override
    beside.override = lambda *given: own.append(override(*given)) or own[-1]
    requests = [
        llm.executor.enqueue(prompt, SamplingParams(max_tokens=60, ignore_eos=True))
        for prompt in random_prompts(3, 12)
    ]
    found = 0
    while not any(request.is_finished for request in requests):
        llm.executor.step()
        slots = [request.slot for request in requests]
        if None in slots or own[-1][1] is None or len(own[-1][0]) < 3:
            continue
        is_found = own[-1][1]
        is_certain = state.chances[slots] == 1
        assert torch.equal(is_certain, is_found[:, None].expand(-1, K))
        found += int(is_found.sum())
    assert found > 3


def test_a_step_of_few_drafts_verifies_all(target_dir: Path, drafters: Drafters) -> None:
    llm = cpu_engine(target_dir, config_of("eagle3", K, drafters, max_verified_drafts=2 * K))
    steps = packed_rows(llm)
    llm.generate(random_prompts(2), SamplingParams(max_tokens=12, ignore_eos=True))
    assert not steps


def test_forced_acceptance_verifies_equally_many(
    target_dir: Path, drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four requests have room for two drafts each, which are accepted."""
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "3")
    llm = cpu_engine(target_dir, config_of("eagle3", K, drafters, max_verified_drafts=9))
    steps = packed_rows(llm)
    outputs = llm.generate(
        random_prompts(4, 12), SamplingParams(max_tokens=1 + 3 * 5, ignore_eos=True)
    )
    assert not steps
    assert [output.spec_stats.acceptance_length for output in outputs] == [3.0] * 4


def test_drafts_that_are_not_verified_count_as_not_asked_for(tmp_path: Path) -> None:
    """A perfect head stays perfect in every figure, though most drafts are not verified."""
    target = one_layer_target(tmp_path)
    config = EagleDecodingConfig(
        max_draft_len=K, speculative_model=perfect_eagle3(tmp_path, target), max_verified_drafts=2
    )
    llm = cpu_engine(target, config, max_batch_size=8, max_seq_len=128, prefill_batch_size=8)
    steps, executor = packed_rows(llm), llm.executor
    executor.record_steps = True
    rng = random.Random(0)
    requests = [
        executor.enqueue(
            [rng.randrange(VOCAB) for _ in range(rng.randint(16, 40))],
            SamplingParams(max_tokens=60, ignore_eos=True),
        )
        for _ in range(8)
    ]
    executor.run_until_done()
    assert len(steps) > 40
    for request in requests:
        assert request.steps and request.num_draft_tokens
        cut = request.steps[:-1]  # the last may reach past the request's end
        assert all(record.accepted == record.proposed for record in cut)
        assert request.num_draft_tokens == sum(record.proposed for record in request.steps)
    watch = executor.statistics.dead_drafter_watch
    assert watch is not None and watch._proposed == watch._accepted > 80


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "8"])
def test_the_number_is_checked(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"NGramDecodingConfig.max_verified_drafts="):
        NGramDecodingConfig(max_verified_drafts=value)


def test_lengths_that_choose_themselves_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_verified_drafts=8 with draft_len_schedule"):
        EagleDecodingConfig(
            max_draft_len="auto",
            speculative_model="d",
            max_verified_drafts=8,  # type: ignore[arg-type]
        )


def test_auto_keeps_it() -> None:
    config = resolve_speculative_config(AutoDecodingConfig(max_verified_drafts=8))
    assert config is not None and config.max_verified_drafts == 8
