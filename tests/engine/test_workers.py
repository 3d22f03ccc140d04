"""The worker's template used alone: acceptance, forcing, sampling rows, shifted inputs."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trtspec import NGramDecodingConfig, SamplingParams, SpecMetadata
from trtspec.acceptance.draw import DraftSampler
from trtspec.acceptance.forced import (
    FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR,
    forced_lens,
    get_force_num_accepted_tokens,
)
from trtspec.errors import ConfigError
from trtspec.metadata.step import StepSizes, no_sampling
from trtspec.workers import NGramWorker, PlainWorker, SpecWorkerBase

VOCAB = 50


def _spec(k: int, **fields: object) -> SpecMetadata:
    return SpecMetadata(
        max_num_requests=8,
        max_draft_len=k,
        max_total_draft_tokens=k,
        **fields,  # type: ignore[arg-type]
    )


def _worker(k: int) -> SpecWorkerBase:
    return NGramWorker(NGramDecodingConfig(max_draft_len=k))


def _logits_for(tokens: list[int]) -> torch.Tensor:
    logits = torch.randn(len(tokens), VOCAB)
    logits[torch.arange(len(tokens)), torch.tensor(tokens)] = 20.0
    return logits


def test_mixed_batch_is_accepted_row_by_row() -> None:
    #           ctx  accepts 2 of 3       none             all            no drafts
    targets = [7, 11, 12, 13, 14, 21, 22, 23, 24, 31, 32, 33, 34, 41, 42, 43, 44]
    drafts = torch.tensor([[11, 12, 9], [9, 22, 23], [31, 32, 33], [-1, -1, -1]], dtype=torch.int32)
    for given in (drafts, drafts.flatten()):
        spec = _spec(3)
        tokens, lens = _worker(3).sample_and_accept_draft_tokens(
            _logits_for(targets), given, 1, 5, spec
        )
        assert spec.num_accepted_draft_tokens is not None
        assert spec.num_accepted_draft_tokens.tolist() == [0, 2, 0, 3, 0]
        assert tokens.dtype == lens.dtype == torch.int32
        assert lens.tolist() == [1, 3, 1, 4, 1]
        assert tokens.tolist() == [
            [7, -1, -1, -1],
            [11, 12, 13, -1],
            [21, -1, -1, -1],
            [31, 32, 33, 34],
            [41, -1, -1, -1],
        ]


def test_inside_a_prompt_the_new_token_is_the_prompts_own() -> None:
    """Of three contexts the second ends its prompt, and keeps what was sampled."""
    spec = _spec(2, next_prompt_tokens=torch.tensor([5, -1, 0], dtype=torch.int32))
    accepted = torch.tensor([[7, -1, -1], [8, -1, -1], [9, -1, -1], [3, 4, -1]], dtype=torch.int32)
    _worker(2).put_known_tokens(accepted, 3, spec)
    assert accepted.tolist() == [[5, -1, -1], [8, -1, -1], [0, -1, -1], [3, 4, -1]]


def test_token_zero_is_a_legal_draft_and_minus_one_never_matches() -> None:
    tokens, lens = _worker(2).sample_and_accept_draft_tokens(
        _logits_for([0, 0, 5]), torch.tensor([[0, -1]], dtype=torch.int32), 0, 1, _spec(2)
    )
    assert lens.tolist() == [2] and tokens.tolist() == [[0, 0, -1]]


def test_one_dimensional_logits_are_one_row() -> None:
    empty = torch.empty(0, dtype=torch.int32)
    tokens, lens = _worker(3).sample_and_accept_draft_tokens(
        _logits_for([4])[0], empty, 1, 1, _spec(3)
    )
    assert tokens.tolist() == [[4, -1, -1, -1]] and lens.tolist() == [1]
    tokens, lens = PlainWorker().sample_and_accept_draft_tokens(
        _logits_for([4])[0], empty, 0, 1, _spec(0)
    )
    assert tokens.tolist() == [[4]] and lens.tolist() == [1]


def test_fewer_drafts_than_k_still_give_k_plus_one_columns() -> None:
    tokens, lens = _worker(4).sample_and_accept_draft_tokens(
        _logits_for([1, 2, 3]), torch.tensor([[1, 9]], dtype=torch.int32), 0, 1, _spec(4)
    )
    assert tokens.tolist() == [[1, 2, -1, -1, -1]] and lens.tolist() == [2]


def test_without_drafts_each_generation_has_one_row() -> None:
    worker = _worker(2)
    for accept in (
        worker.sample_and_accept_draft_tokens,
        worker._sample_and_accept_draft_tokens_base,
    ):
        tokens, lens = accept(_logits_for([7, 3, 4]), None, 1, 3, _spec(2))
        assert tokens.tolist() == [[7, -1, -1], [3, -1, -1], [4, -1, -1]]
        assert lens.tolist() == [1, 1, 1]
    with pytest.raises(ConfigError, match="logits have 3 rows"):
        worker.sample_and_accept_draft_tokens(_logits_for([7, 3, 4]), None, 0, 1, _spec(2))


def test_nan_flags_only_its_request() -> None:
    logits = _logits_for([1, 2, 3, 4, 5, 6])
    logits[4, 7] = float("nan")
    spec = _spec(1)
    tokens, _ = _worker(1).sample_and_accept_draft_tokens(
        logits, torch.tensor([[2], [4]]), 2, 4, spec
    )
    assert spec.bad_requests is not None
    assert spec.bad_requests.tolist() == [False, False, False, True]
    assert tokens[3, 0] == 5


@pytest.mark.parametrize(
    ("rows", "drafts", "contexts", "batch"),
    [(3, [[1, 2]], 1, 2), (4, [[1, 2, 3]], 0, 1), (6, [1, 2, 3], 0, 2), (2, [[1]], 3, 1)],
)
def test_sizes_that_do_not_fit_are_refused(
    rows: int, drafts: list[list[int]], contexts: int, batch: int
) -> None:
    with pytest.raises(ConfigError):
        _worker(2).sample_and_accept_draft_tokens(
            torch.randn(rows, VOCAB), torch.tensor(drafts), contexts, batch, _spec(2)
        )


def test_guided_decoder_sees_the_logits_first() -> None:
    class OnlyThree:
        def execute(self, logits: torch.Tensor) -> None:
            logits[:, :3] = logits[:, 4:] = float("-inf")

    worker = _worker(1)
    assert worker.set_guided_decoder(OnlyThree()) is True
    logits = _logits_for([8, 9])
    before = logits.clone()
    tokens, lens = worker.sample_and_accept_draft_tokens(
        logits, torch.tensor([[3]]), 0, 1, _spec(1)
    )
    assert tokens.tolist() == [[3, 3]] and lens.tolist() == [2]
    assert torch.equal(logits, before), "the caller's stay as they are"


# -- forced acceptance -------------------------------------------------------------------------
@pytest.mark.parametrize(("text", "value"), [("2", 2.0), ("0", 0.0), ("1.5", 1.5), (None, 0.0)])
def test_forced_value(monkeypatch: pytest.MonkeyPatch, text: str | None, value: float) -> None:
    if text is None:
        monkeypatch.delenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, raising=False)
    else:
        monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, text)
    assert get_force_num_accepted_tokens() == value


@pytest.mark.parametrize("text", ["many", "", "-1", "nan", "inf"])
def test_forced_value_that_is_no_number_warns_and_is_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, text)
    with caplog.at_level(logging.WARNING):
        assert get_force_num_accepted_tokens() == 0
    assert FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR in caplog.text


@pytest.mark.parametrize(
    ("forced", "length"), [("1", 2), ("2", 3), ("3", 4), ("9", 4), ("2147483647", 4), ("1e300", 4)]
)
def test_forced_counts_drafts_and_spares_contexts(
    monkeypatch: pytest.MonkeyPatch, forced: str, length: int
) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, forced)
    targets = [7, 11, 12, 13, 14]
    tokens, lens = _worker(3).sample_and_accept_draft_tokens(
        _logits_for(targets), torch.full((1, 3), -1), 1, 2, _spec(3)
    )
    assert lens.tolist() == [1, length]
    assert tokens[1].tolist() == targets[1 : 1 + length] + [-1] * (4 - length)


def test_forced_fraction_is_a_probability(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "1.25")
    count = 4000
    _, lens = _worker(2).sample_and_accept_draft_tokens(
        torch.randn(count * 3, VOCAB), torch.full((count, 2), -1), 0, count, _spec(2)
    )
    assert set(lens.tolist()) == {2, 3}
    assert abs(lens.float().mean().item() - 2.25) < 6 * (0.25 * 0.75 / count) ** 0.5


def test_a_forced_fraction_is_the_requests_own_in_any_batch() -> None:
    """Beside contexts too. Rows: one of each context, then K'+1 of each generation."""
    num_contexts, num_drafts, count = 2, 3, 40
    rows = num_contexts + count * (num_drafts + 1)
    sampling = replace(
        no_sampling(torch.device("cpu")),
        seeds=torch.arange(rows) // 7,
        positions=torch.arange(rows) % 11,
    )
    lens = torch.ones(num_contexts + count, dtype=torch.int32)
    together = forced_lens(lens, 1.5, num_contexts, num_drafts, sampling).tolist()
    alone = []
    for first in range(num_contexts, rows, num_drafts + 1):
        its = sampling.select(slice(first, first + num_drafts + 1))
        alone += forced_lens(lens[:1], 1.5, 0, num_drafts, its).tolist()
    assert together == [1, 1, *alone] and set(alone) == {2, 3}


# -- the rest of the template ------------------------------------------------------------------
def test_forward_and_skip_forward_have_the_same_shapes() -> None:
    class Constant(SpecWorkerBase):
        def draft(self, inputs):  # type: ignore[no-untyped-def]
            return torch.full((inputs.num_accepted_tokens.shape[0], 2), 5, dtype=torch.int32)

    worker = Constant(NGramDecodingConfig(max_draft_len=2))
    spec = _spec(2, request_ids=[4, 5], num_generations=1)
    spec.draft_tokens = torch.tensor([[3, 9]], dtype=torch.int32)
    ids = torch.zeros(6, dtype=torch.int64)
    out = worker(ids, ids, None, _logits_for([1, 3, 4, 5]), None, spec)
    assert out["new_tokens"].tolist() == [[1, -1, -1], [3, 4, -1]]
    assert out["new_tokens_lens"].tolist() == [1, 2]
    assert out["next_draft_tokens"].tolist() == [[5, 5], [5, 5]]
    assert out["next_new_tokens"].tolist() == [[1, 5, 5], [4, 5, 5]]
    skipped = worker.skip_forward(ids, ids, None, None, None, spec)
    assert skipped["new_tokens_lens"].tolist() == [1, 1]
    for name in ("new_tokens", "new_tokens_lens", "next_draft_tokens", "next_new_tokens"):
        assert skipped[name].shape == out[name].shape
        assert skipped[name].dtype == out[name].dtype == torch.int32


def test_shifted_context_ids() -> None:
    worker = _worker(1)
    ids = torch.tensor([1, 10, 11, 20, 21, 22])
    following = torch.tensor([[2], [12], [23]], dtype=torch.int32)
    shifted = worker.prepare_context_input_ids(ids, following, [1, 2, 3])
    assert shifted.tolist() == [2, 11, 12, 21, 22, 23]
    inside = torch.tensor([-1, 77, -1], dtype=torch.int32)  # the true next prompt token wins
    shifted = worker.prepare_context_input_ids(ids, following, [1, 2, 3], inside)
    assert shifted.tolist() == [2, 11, 77, 21, 22, 23]
    known = torch.tensor([-1, 70, 80], dtype=torch.int32)  # the second context has no row
    shifted = worker.prepare_context_input_ids(ids[:3], following, [1, 0, 2], known)
    assert shifted.tolist() == [2, 11, 80]
    shifted = worker.prepare_context_input_ids(ids[:3], following, [1, 0, 2])
    assert shifted.tolist() == [2, 11, 23]  # one of them has no rows


def test_padding_contexts_leave_the_token_behind_a_prompt() -> None:
    """They end where the last prompt does if it fills the pass; what they sampled is theirs."""
    worker = _worker(1)
    ids, following = torch.tensor([1, 2, 3, 4]), torch.tensor([[50], [60], [70], [80]])
    ends = torch.tensor([1, 3, 3, 3])
    shifted = worker.prepare_context_input_ids(ids, following, [4, 0, 0, 0], last_rows=ends)
    assert shifted.tolist() == [2, 50, 4, 60]


def test_draft_sampler_maps_offsets() -> None:
    logits = torch.tensor([[0.0, 9.0, 1.0], [5.0, 0.0, float("nan")]])
    worker = _worker(1)
    assert worker.draft_sampler_greedy(logits).tolist() == [1, 0]
    offsets = torch.tensor([10, 20, 30])
    mapped = worker.draft_sampler_greedy(logits[:1], offsets)
    assert mapped.tolist() == [21] and mapped.dtype == torch.int32


@pytest.mark.parametrize(("contexts", "generations"), [(0, 3), (5, 2), (4, 0), (1, 1)])
def test_drafts_are_drawn_with_each_requests_own_parameters(
    contexts: int, generations: int
) -> None:
    """Of a step that verifies two drafts: one row of a context, three of a generation."""
    owners = [*range(contexts), *(contexts + i // 3 for i in range(3 * generations))]
    sampling = replace(
        no_sampling(torch.device("cpu")),
        seeds=torch.tensor(owners),
        temperatures=torch.tensor(owners) / 10,
    )
    step: Any = SimpleNamespace(
        sizes=StepSizes(contexts, generations, 2), sampling=sampling, slot_ids=None
    )
    sampler = DraftSampler.of(step, None)
    assert sampler.seeds.tolist() == list(range(contexts + generations))
    assert torch.equal(sampler.temperatures, sampler.seeds / 10)


def test_sampling_rows_one_per_logits_row() -> None:
    spec = _spec(2, allow_advanced_sampling=True)
    requests = [
        SimpleNamespace(
            sampling_params=SamplingParams(temperature=0.5, top_k=3), is_generation=False
        ),
        SimpleNamespace(
            sampling_config=SimpleNamespace(temperature=[0.8], top_k=[9], top_p=[0.4]),
            state=SimpleNamespace(name="GENERATION_IN_PROGRESS"),
        ),
        SimpleNamespace(sampling_params=SamplingParams(top_k=7, top_p=0.5), is_generation=True),
    ]
    spec.populate_sampling_params_for_one_model(requests)
    assert spec.temperatures is not None and spec.top_ks is not None and spec.top_ps is not None
    assert spec.temperatures[:7].tolist() == pytest.approx([0.5] + [0.8] * 3 + [0.0] * 3)
    assert spec.top_ks[:7].tolist() == [3, 9, 9, 9, 0, 0, 0]
    assert spec.top_ps[:7].tolist() == pytest.approx([1.0] + [0.4] * 3 + [1.0] * 3)
    off = _spec(2)
    off.populate_sampling_params_for_one_model(requests)
    assert off.temperatures is None


def test_requests_without_a_seed_do_not_share_one() -> None:
    params = SamplingParams(temperature=1.0)
    requests = [
        SimpleNamespace(sampling_params=params, is_generation=False, request_id=0),
        SimpleNamespace(sampling_params=params, is_generation=False, py_request_id=1),
        SimpleNamespace(
            sampling_params=SamplingParams(temperature=1.0, seed=0), is_generation=False,
            request_id=2,
        ),
        SimpleNamespace(sampling_params=params, is_generation=False, request_id="cmpl-7"),
        SimpleNamespace(
            sampling_params=params, is_generation=False, request_id=None, py_request_id=4
        ),
    ]  # fmt: skip
    seeds = []
    for order in (requests, requests[::-1]):
        spec = _spec(2, allow_advanced_sampling=True)
        spec.populate_sampling_params_for_one_model(order)
        assert spec.seeds is not None
        seeds.append(spec.seeds[:5].tolist())
    assert seeds[0] == seeds[1][::-1], "a request's seed is its own in every step"
    assert seeds[0][2] == 0 and len(set(seeds[0])) == 5


def test_metadata_for_a_graph_is_a_copy_once() -> None:
    spec = _spec(2)
    captured = spec.create_cuda_graph_metadata(4)
    assert captured is not spec and captured.is_cuda_graph and captured.max_num_requests == 4
    assert captured.create_cuda_graph_metadata(2) is captured
    assert not spec.is_cuda_graph and spec.max_num_requests == 8
    with pytest.raises(ConfigError, match="max_draft_len=-1"):
        SpecMetadata(max_num_requests=1, max_draft_len=-1, max_total_draft_tokens=0)
