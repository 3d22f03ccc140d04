"""Whether sampled speculation draws what the target would: chi-square over whole short texts.

The model is a table: target and drafter give probabilities for every text of up to LENGTH tokens
over a small vocabulary. A hundred thousand requests decode it side by side, through the worker's
own draws and judgements, redrafting what a step threw away, until each has LENGTH tokens; their
joint distribution is compared with the product of the target's tables.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from matrix import full
from sampled_tables import (
    RULES,
    SUBSET,
    K,
    V,
    decode_tables,
    expected_distribution,
    make_worker,
    p_value,
)
from torch import Tensor

from trtspec import NGramDecodingConfig, UserProvidedDecodingConfig
from trtspec.acceptance import draw, rejection
from trtspec.config import DecodingBaseConfig
from trtspec.errors import ConfigError
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.metadata.spec import SpecMetadata

SETTINGS: dict[str, dict[str, object]] = {
    "plain": {}, "d2t": {"d2t": SUBSET}, "top_k": {"top_k": 2}, "top_p": {"top_p": 0.7},
    "hot": {"temperature": 1.5}, "fewer drafts": {"drafts_sometimes": True},
    "broken drafter": {"is_broken": True},
}  # fmt: skip
FEW = [
    *((rule, "plain") for rule in RULES), ("rejection", "d2t"), ("block", "d2t"),
    ("block", "top_k"), ("rejection", "top_p"), ("block", "hot"), ("rejection", "fewer drafts"),
    ("block", "fewer drafts"), ("rejection", "broken drafter"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "name"), list(itertools.product(RULES, SETTINGS)) if full() else FEW
)
def test_texts_are_distributed_as_the_targets(rule: str, name: str) -> None:
    setting = SETTINGS[name]
    texts, _ = decode_tables(rule, **setting)  # type: ignore[arg-type]
    given = {k: v for k, v in setting.items() if k in ("temperature", "top_k", "top_p")}
    assert p_value(texts, expected_distribution(**given)) > 1e-3  # type: ignore[arg-type]


@pytest.mark.slow
def test_what_each_rule_keeps() -> None:
    """Rejection keeps more than an exact match of best drafts, blocks at least as much; drafts
    drawn with the target's own noise lie between."""
    kept = {rule: decode_tables(rule, temperature=1.2)[1] for rule in RULES}
    assert kept["strict"] < kept["exact_match"] < kept["rejection"] < kept["block"], kept


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_shared_noise_stream_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def coins(sampling: SamplingMetadata, drafts: Tensor) -> Tensor:
        seeds = sampling.seeds.view(len(drafts), -1)[:, :-1].flatten()
        positions = sampling.positions.view(len(drafts), -1)[:, :-1].flatten()
        noise = rejection.uniform_noise(seeds, positions, rejection.NoiseStream.TARGET, 1)
        return noise.view(drafts.shape)

    monkeypatch.setattr(rejection, "_coins", coins)
    assert p_value(decode_tables(rule)[0], expected_distribution()) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_sample_instead_of_the_recovered_token_is_noticed(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rejection._next_token

    def from_p(log_p, drafts, draft, sampling, count, scale):  # type: ignore[no-untyped-def]
        return real(log_p, torch.full_like(drafts, -1), draft, sampling, count, scale)

    monkeypatch.setattr(rejection, "_next_token", from_p)
    assert p_value(decode_tables(rule)[0], expected_distribution()) < 1e-3


def test_thrown_away_noise_is_not_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's verdict looks at all its drafts and coins, so the next step needs new ones."""
    monkeypatch.setattr(draw, "of_depth", lambda stream, depth: int(stream))
    real = rejection.uniform_noise

    def one_coin_a_position(seeds, positions, stream, size):  # type: ignore[no-untyped-def]
        return real(seeds, positions, stream, torch.zeros_like(size))

    monkeypatch.setattr(rejection, "uniform_noise", one_coin_a_position)
    assert p_value(decode_tables("block")[0], expected_distribution()) < 1e-3


def test_greedy_requests_beside_sampled_ones() -> None:
    worker = make_worker("rejection", None)
    logits = torch.randn(2 * (K + 1), V, generator=torch.Generator().manual_seed(5))
    best = logits.argmax(-1).view(2, K + 1)
    drafts = best[:, :K].to(torch.int32).clone()
    drafts[0, 2] = (drafts[0, 2] + 1) % V
    temperatures = torch.tensor([0.0] * (K + 1) + [1.0] * (K + 1))
    rows = 2 * (K + 1)
    sampling = SamplingMetadata(
        temperatures, torch.zeros(rows, dtype=torch.int32), torch.ones(rows),
        torch.arange(rows) // (K + 1), torch.arange(rows), has_filters=False,
    )  # fmt: skip
    spec = SpecMetadata(
        max_num_requests=2, max_draft_len=K, max_total_draft_tokens=K, num_generations=2,
        slot_ids=torch.tensor([0, 1]), sampling=sampling,
    )  # fmt: skip
    accepted, lens = worker.sample_and_accept_draft_tokens(logits, drafts, 0, 2, spec)
    assert lens[0] == 3 and accepted[0].tolist() == [*best[0, :3].tolist(), -1]


@pytest.mark.parametrize("target_ids", [None, torch.tensor([0, 2, 3])])
def test_of_a_draft_that_is_certain_nothing_else_is_likely(target_ids: Tensor | None) -> None:
    """Of token 0 and token 3. The third is drawn from its logits."""
    logits = torch.randn(3, 1, V if target_ids is None else len(target_ids))
    certain = torch.tensor([[0], [3], [-1]])
    drawn_from = rejection.DraftDistributions(logits, torch.zeros(3, 1), target_ids, certain)
    temperatures, rows = torch.full((3,), 0.5), torch.zeros(3, dtype=torch.int64)
    q = drawn_from.probabilities(temperatures, V, rows)
    expected = torch.eye(V)[[0, 3, 0]]
    expected[2] = 0
    ids = torch.arange(V) if target_ids is None else target_ids
    expected[2, ids] = (logits[2, 0] / 0.5).softmax(-1)
    torch.testing.assert_close(q, expected)


def test_where_nothing_is_left_of_p_the_token_is_drawn_from_p() -> None:
    """The drafts were rejected, and q is p but for rounding: slightly above it everywhere."""
    rows = 20
    q = torch.tensor([0.0, 0.5, 0.5, 0.0])
    drafts = torch.ones(rows, 1, dtype=torch.int32)
    drawn_from = rejection.DraftDistributions(
        logits=q.log().repeat(rows, 1, 1), log_q=torch.full((rows, 1), 0.5).log(),
        target_ids=None, certain=torch.full((rows, 1), -1),
    )  # fmt: skip
    sampling = SamplingMetadata(
        torch.ones(2 * rows), torch.zeros(2 * rows, dtype=torch.int32), torch.ones(2 * rows),
        torch.arange(2 * rows) // 2, torch.arange(2 * rows), has_filters=False,
    )  # fmt: skip
    log_p = (q * (1 - 1e-6)).log().repeat(rows, 2, 1)
    count, scale = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    tokens = rejection._next_token(log_p, drafts, drawn_from, sampling, count, scale)
    assert set(tokens.tolist()) == {1, 2}


def test_a_nan_flags_its_request_alone() -> None:
    worker = make_worker("rejection", None)
    logits = torch.zeros(2 * (K + 1), V)
    logits[1, 2] = float("nan")
    rows = 2 * (K + 1)
    sampling = SamplingMetadata(
        torch.ones(rows), torch.zeros(rows, dtype=torch.int32), torch.ones(rows),
        torch.arange(rows), torch.arange(rows), has_filters=False,
    )  # fmt: skip
    spec = SpecMetadata(
        max_num_requests=2, max_draft_len=K, max_total_draft_tokens=K, num_generations=2,
        slot_ids=torch.tensor([0, 1]), sampling=sampling,
    )  # fmt: skip
    drafts = torch.zeros(2, K, dtype=torch.int32)
    accepted, lens = worker.sample_and_accept_draft_tokens(logits, drafts, 0, 2, spec)
    assert spec.bad_requests is not None and spec.bad_requests.tolist() == [True, False]
    assert bool(((accepted >= 0) & (accepted < V))[1, : int(lens[1])].all())
    without_slots = replace(spec, slot_ids=None)
    with pytest.raises(ConfigError, match="slot_ids"):
        worker.sample_and_accept_draft_tokens(logits, drafts, 0, 2, without_slots)


@pytest.mark.parametrize("config", [NGramDecodingConfig, UserProvidedDecodingConfig])
def test_unknown_rules_are_refused(config: type[DecodingBaseConfig]) -> None:
    with pytest.raises(ConfigError, match="'strict', 'exact_match', 'rejection' or 'block'"):
        config(acceptance="lenient")
