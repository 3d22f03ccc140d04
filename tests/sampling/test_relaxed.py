"""Relaxed acceptance: the rule against plain Python, the thinking phase against the text."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import Oracle
from tiny_heads import mtp_model_dir

from trtspec import LLM, KvCacheConfig, MTPDecodingConfig, SamplingParams, SpecMetadata
from trtspec.acceptance.relaxed import (
    NOT_THINKING,
    delta_of_request,
    next_deltas,
    relaxed_acceptance,
    relaxed_matches,
)
from trtspec.errors import ConfigError
from trtspec.workers import MTPEagleWorker

BEGIN, END = 91, 92


def _accept_by_hand(
    logits: list[list[float]], drafts: list[int], delta: float | None, top_k: int
) -> list[int]:
    """One request in plain Python: the tokens that come out."""
    out = []
    for row, draft in zip(logits, [*drafts, -1], strict=True):
        total = sum(math.exp(x) for x in row)
        order = sorted(range(len(row)), key=lambda token: (-row[token], token))
        best = order[0]
        kept = draft == best
        if delta is not None and draft in order[:top_k]:
            kept |= math.exp(row[draft]) / total >= math.exp(row[best]) / total - delta
        out.append(draft if kept else best)
        if not kept:
            break
    return out


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_the_rule_equals_plain_python(top_k: int) -> None:
    rng, generator = random.Random(top_k), torch.Generator().manual_seed(top_k)
    seen = set()
    for _ in range(300):
        k, delta = rng.randint(1, 4), rng.choice([None, 0.0, 0.1, 0.6, 1.0])
        logits = torch.randn(1, k + 1, 12, generator=generator, dtype=torch.float64).float()
        ranked = logits[0].argsort(-1, descending=True)
        drafts = [int(ranked[i, rng.choice([0, 0, 0, 1, 2, 5])]) for i in range(k)]
        if rng.random() < 0.2:
            drafts[-1] = -1
        target = logits.argmax(-1).to(torch.int32)
        deltas = torch.tensor([NOT_THINKING if delta is None else delta])
        given = torch.tensor([drafts], dtype=torch.int32)
        matches = relaxed_matches(logits[:, :-1], given, deltas, top_k)
        tokens, lens = relaxed_acceptance(target, given, matches)
        expected = _accept_by_hand(logits[0].tolist(), drafts, delta, top_k)
        assert tokens[0, : int(lens[0])].tolist() == expected
        seen.add((int(lens[0]), delta is None))
    assert len(seen) > 6


def test_a_difference_of_probabilities_not_a_ratio() -> None:
    """p = 0.5 and 0.3: within 0.2, not within 0.19."""
    logits = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
    drafts = torch.tensor([[1]], dtype=torch.int32)
    for delta, kept in ((0.201, True), (0.19, False), (0.0, False)):
        assert relaxed_matches(logits, drafts, torch.tensor([delta]), 10).tolist() == [[kept]]
    assert relaxed_matches(logits, drafts, torch.tensor([1.0]), 1).tolist() == [[False]]


def test_who_thinks() -> None:
    def of(prompt: list[int], output: Sequence[int] = ()) -> float:
        return delta_of_request(prompt, output, BEGIN, END, 0.6)

    assert of([1, 2]) == NOT_THINKING and of([]) == NOT_THINKING
    assert of([BEGIN, 1, 2]) == of([1, BEGIN]) == of([BEGIN, 1, END, BEGIN]) == 0.6
    assert of([BEGIN, 1, END, 2]) == NOT_THINKING
    assert of([BEGIN], [1, END]) == of([1], [BEGIN]) == NOT_THINKING
    assert of([BEGIN], [1, BEGIN]) == 0.6
    rows = torch.tensor([[1, END, 2], [1, END, 2], [END, -1, -1], [BEGIN, 1, 1]])
    before = torch.tensor([0.6, 0.6, 0.6, NOT_THINKING])
    after = next_deltas(before, rows, torch.tensor([3, 1, 1, 3]), END).tolist()
    assert after == pytest.approx([NOT_THINKING, 0.6, NOT_THINKING, NOT_THINKING])


def _config(k: int = 3, delta: float = 1.0, **fields: Any) -> MTPDecodingConfig:
    return MTPDecodingConfig(
        num_nextn_predict_layers=k, use_relaxed_acceptance_for_thinking=True, relaxed_topk=97,
        relaxed_delta=delta, begin_thinking_phase_token=BEGIN, end_thinking_phase_token=END,
        **fields,
    )  # fmt: skip


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


def _llm(target: Path, config: MTPDecodingConfig | None, **options: Any) -> LLM:
    return LLM(
        target, config, **{"device": "cpu", "dtype": "float32", "max_seq_len": 96, **options}
    )


@pytest.mark.slow
@pytest.mark.parametrize("vanilla", [False, True])
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("place", [0, 9, 29])
def test_thinking_begins_anywhere_in_the_prompt(
    target_dir: Path, vanilla: bool, chunked: bool, place: int
) -> None:
    """With every token good enough (top-97, delta 1) all drafts are kept while thinking."""
    prompt = [3 + i % 40 for i in range(30)]
    thinking = [*prompt[:place], BEGIN, *prompt[place:]]
    llm = _llm(
        target_dir, _config(use_mtp_vanilla=vanilla, acceptance="exact_match"),
        enable_chunked_prefill=chunked,
        max_num_tokens=32 if chunked else 96, max_batch_size=2,
    )  # fmt: skip
    params = SamplingParams(max_tokens=21, ignore_eos=True)
    plain, lossy, sampled = llm.generate(
        [prompt, thinking, thinking],
        [params, params, SamplingParams(max_tokens=21, ignore_eos=True, temperature=0.8, seed=1)],
    )
    assert plain.outputs[0].token_ids == Oracle(target_dir).extend(prompt, 21)
    sampled_alone = _llm(target_dir, None).generate(
        thinking, SamplingParams(max_tokens=21, ignore_eos=True, temperature=0.8, seed=1)
    )
    assert sampled.outputs[0].token_ids == sampled_alone.outputs[0].token_ids
    tokens = lossy.outputs[0].token_ids
    if END not in tokens:
        assert lossy.spec_stats.acceptance_length == 4


@pytest.mark.slow
def test_text_equals_the_rule_applied_by_hand(target_dir: Path) -> None:
    """A generation with a middling delta, replayed in Python from the drafts left in the slot."""
    k, delta, top_k = 3, 0.35, 4
    config = MTPDecodingConfig(
        num_nextn_predict_layers=k, use_relaxed_acceptance_for_thinking=True, relaxed_topk=top_k,
        relaxed_delta=delta, begin_thinking_phase_token=BEGIN, end_thinking_phase_token=END,
    )  # fmt: skip
    oracle, llm = Oracle(target_dir), _llm(target_dir, config, max_seq_len=200)
    executor, relaxed_steps = llm.executor, 0
    requests = [
        executor.enqueue([BEGIN, 5 + i, 9], SamplingParams(max_tokens=60, ignore_eos=True))
        for i in range(4)
    ]
    while executor.has_work:
        before = {
            r: (r.token_ids, executor.state.next_tokens[r.slot, 1:].tolist())
            for r in requests
            if r.is_generation
        }
        executor.step()
        for request, (text, drafts) in before.items():
            with torch.inference_mode():
                ids = torch.tensor([[*text, *[max(d, 0) for d in drafts]]])
                logits = oracle.model(ids).logits[0, len(text) - 1 :]
            thinking = END not in text
            out = _accept_by_hand(logits.tolist(), drafts, delta if thinking else None, top_k)
            emitted = request.token_ids[len(text) :]
            assert emitted == out[: len(emitted)]
            strict = _accept_by_hand(logits.tolist(), drafts, None, top_k)
            relaxed_steps += strict != out
    assert relaxed_steps > 5


def test_a_marker_that_a_preempted_request_wrote_itself_begins_nothing() -> None:
    worker = MTPEagleWorker(_config(2))
    state = worker.allocate_state(2, 32, torch.device("cpu"))
    worker.admit(state, 0, [1, 2, BEGIN, 3], num_prompt_tokens=2)
    worker.admit(state, 1, [1, 2, BEGIN, 3], num_prompt_tokens=3)
    (deltas,) = state.values()
    assert deltas[:2].tolist() == [NOT_THINKING, 1.0]


def test_an_end_marker_stops_relaxing_from_the_next_step_on() -> None:
    worker = MTPEagleWorker(_config(2))
    state = worker.allocate_state(2, 32, torch.device("cpu"))
    worker.admit(state, 0, [BEGIN, 1])
    worker.admit(state, 1, [1])
    spec = SpecMetadata(
        max_num_requests=2, max_draft_len=2, max_total_draft_tokens=2,
        slot_ids=torch.tensor([0, 1]), state=state,
    )  # fmt: skip
    logits = torch.zeros(6, 97)
    logits[:, 7] = 1.0
    drafts = torch.tensor([[END, 5], [END, 5]], dtype=torch.int32)
    tokens, lens = worker.sample_and_accept_draft_tokens(logits, drafts, 0, 2, spec)
    assert tokens.tolist() == [[END, 5, 7], [7, -1, -1]] and lens.tolist() == [3, 1]
    tokens, lens = worker.sample_and_accept_draft_tokens(logits, drafts, 0, 2, spec)
    assert lens.tolist() == [1, 1]


def test_a_sample_inside_a_prompt_ends_nothing() -> None:
    """Of a chunk of it: the sample is thrown away. After the last chunk it is output."""
    worker = MTPEagleWorker(_config(2))
    state = worker.allocate_state(1, 32, torch.device("cpu"))
    worker.admit(state, 0, [BEGIN, 1, 5, 6])
    logits = torch.nn.functional.one_hot(torch.tensor([END]), 97).float()
    (deltas,) = state.values()
    for following, delta in ((5, 1.0), (-1, NOT_THINKING)):
        spec = SpecMetadata(
            max_num_requests=1, max_draft_len=2, max_total_draft_tokens=2,
            slot_ids=torch.tensor([0]), state=state, next_prompt_tokens=torch.tensor([following]),
        )  # fmt: skip
        worker.sample_and_accept_draft_tokens(logits, torch.zeros(0, 2), 1, 1, spec)
        assert float(deltas[0]) == delta


def test_a_grammar_forbids_relaxed_drafts_too() -> None:
    class OnlyTwo:
        def execute(self, logits: torch.Tensor) -> None:
            logits[:, 2:] = float("-inf")

    worker = MTPEagleWorker(_config(1, delta=1.0))
    worker.set_guided_decoder(OnlyTwo())
    state = worker.allocate_state(1, 32, torch.device("cpu"))
    worker.admit(state, 0, [BEGIN])
    spec = SpecMetadata(
        max_num_requests=1, max_draft_len=1, max_total_draft_tokens=1,
        slot_ids=torch.tensor([0]), state=state,
    )  # fmt: skip
    logits = torch.zeros(2, 97)
    for draft, expected in ((50, [[0, -1]]), (1, [[1, 0]])):
        drafts = torch.tensor([[draft]], dtype=torch.int32)
        tokens, _ = worker.sample_and_accept_draft_tokens(logits, drafts, 0, 1, spec)
        assert tokens.tolist() == expected


@pytest.mark.slow
def test_preemption_keeps_who_thinks(target_dir: Path) -> None:
    prompts = [[BEGIN, *range(3, 12)], list(range(20, 30)), [BEGIN, *range(40, 50)]]
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    config = _config(delta=0.3)
    calm = [_llm(target_dir, config).generate(p, params).outputs[0].token_ids for p in prompts]
    tight = _llm(
        target_dir, config, max_batch_size=3,
        kv_cache_config=KvCacheConfig(max_tokens=96, tokens_per_block=8),
    )  # fmt: skip
    outputs = tight.generate(prompts, params)
    assert tight.stats().num_preemptions > 0
    assert outputs[1].outputs[0].token_ids == calm[1]  # strict throughout
    assert all(len(output.outputs[0].token_ids) == 40 for output in outputs)


def test_without_state_it_says_what_to_set() -> None:
    worker = MTPEagleWorker(_config(1))
    spec = SpecMetadata(max_num_requests=1, max_draft_len=1, max_total_draft_tokens=1)
    with pytest.raises(ConfigError, match="allocate_state"):
        worker.sample_and_accept_draft_tokens(torch.zeros(2, 97), torch.tensor([[1]]), 0, 1, spec)
