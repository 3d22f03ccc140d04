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
from torch import Tensor

from trtspec import NGramDecodingConfig, UserProvidedDecodingConfig
from trtspec.acceptance import draw, rejection
from trtspec.config import DecodingBaseConfig, DraftTargetDecodingConfig
from trtspec.errors import ConfigError
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.metadata.spec import SpecMetadata
from trtspec.workers.base import SpecWorkerBase
from trtspec.workers.protocols import DraftInputs

V, LENGTH, K, REQUESTS = 4, 3, 3, 100_000
RULES = ["strict", "exact_match", "rejection", "block"]
SUBSET = torch.tensor([0, 1, 1])  # a drafter that knows tokens 0, 2, 3 only: offsets


class Tables:
    """Logits after every text of 0 … LENGTH + K tokens; texts are numbers in base V, prefixed 1."""

    def __init__(self, vocab_size: int, seed: int):
        generator = torch.Generator("cpu").manual_seed(seed)
        shape = V ** (LENGTH + K + 2), vocab_size
        logits = 1.2 * torch.randn(shape, generator=generator, device="cpu")
        self.logits = logits.to(torch.get_default_device())

    def after(self, codes: Tensor) -> Tensor:
        return self.logits[codes]


class Worker(SpecWorkerBase):
    drafts_with_network = True

    def draft(self, inputs: DraftInputs) -> Tensor:
        raise AssertionError("`decode` drafts by itself")


def make_worker(rule: str, d2t: Tensor | None) -> Worker:
    worker = Worker(
        DraftTargetDecodingConfig(max_draft_len=K, speculative_model="m", acceptance=rule)
    )
    vocab = V if d2t is None else len(d2t)
    worker.remember_drafts(REQUESTS, vocab, V, d2t, torch.get_default_device(), torch.float32)
    return worker


def decode(
    rule: str,
    *,
    d2t: Tensor | None = None,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    drafts_sometimes: bool = False,
    is_broken: bool = False,
) -> tuple[Tensor, float]:
    """[REQUESTS, LENGTH] tokens, and the mean number of drafts kept in a full step."""
    worker = make_worker(rule, d2t)
    target, drafter = Tables(V, 1), Tables(V if d2t is None else len(d2t), 2)
    # A drafter that has something to do with the target is right at times.
    shared = target.logits if d2t is None else target.logits[:, torch.arange(len(d2t)) + d2t]
    drafter.logits = 0.6 * shared + 0.7 * drafter.logits
    if is_broken:  # a drafter that holds NaN and inf
        drafter.logits[::2, 1], drafter.logits[::3, 0] = float("nan"), float("inf")
    slots, seeds = torch.arange(REQUESTS), torch.arange(REQUESTS) * 7919 + 3
    texts = torch.full((REQUESTS, LENGTH + 2 * K + 2), -1)
    lens, codes = torch.zeros(REQUESTS, dtype=torch.int64), torch.ones(REQUESTS, dtype=torch.int64)
    drafts = torch.full((REQUESTS, K), -1, dtype=torch.int32)  # none in the first step
    temperatures = torch.full((REQUESTS,), temperature)
    steps = kept = 0
    while int(lens.min()) < LENGTH:
        limit = V ** (LENGTH + K + 1)
        rows = [codes]
        for i in range(K):
            rows.append((rows[-1] * V + drafts[:, i].clamp_min(0)).clamp(max=V * limit - 1))
        logits = target.after(torch.stack(rows, 1)).flatten(0, 1)

        def repeated(x: Tensor) -> Tensor:
            return x.repeat_interleave(K + 1)

        sampling = SamplingMetadata(
            repeated(temperatures), torch.full_like(repeated(slots), top_k, dtype=torch.int32),
            torch.full((REQUESTS * (K + 1),), top_p), repeated(seeds),
            (lens[:, None] + torch.arange(K + 1)).flatten(),
            has_filters=top_k > 0 or top_p < 1,
        )  # fmt: skip
        spec = SpecMetadata(
            max_num_requests=REQUESTS, max_draft_len=K, max_total_draft_tokens=K,
            num_generations=REQUESTS, slot_ids=slots, sampling=sampling,
        )  # fmt: skip
        accepted, counts = worker.sample_and_accept_draft_tokens(logits, drafts, 0, REQUESTS, spec)
        running = lens < LENGTH
        if bool((drafts[:, -1] >= 0).any()):
            full = running & (lens == 1)  # all stand at the same place
            steps, kept = steps + int(full.sum()), kept + int((counts - 1)[full].sum())
        for i in range(K + 1):
            is_new = running & (i < counts)
            places = torch.where(is_new, lens + i, texts.shape[1] - 1)
            texts[torch.arange(REQUESTS), places] = accepted[:, i].to(torch.int64)
            codes = torch.where(is_new, (codes * V + accepted[:, i]).clamp(max=limit - 1), codes)
        lens = torch.where(running, lens + counts, lens)
        inputs = DraftInputs(
            torch.empty(0), torch.empty(0), None, accepted, counts, None, spec, None
        )  # fmt: skip
        sampler, ahead, proposals = worker.draft_sampler(inputs), codes, []
        for depth in range(K):
            proposal = worker.propose(drafter.after(ahead), d2t, sampler, lens - 1, depth)
            proposals.append(proposal)
            ahead = (ahead * V + proposal).clamp(max=V * limit - 1)
        drafts = torch.stack(proposals, 1)
        if drafts_sometimes:  # as where the text is about to reach the maximum length
            drafts[(slots % 3 == 0), 1:] = -1
            drafts[(slots % 5 == 0)] = -1
    return texts[:, :LENGTH], kept / max(steps, 1)


def expected(temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """[V ** LENGTH], the product of the target's probabilities along each text."""
    target, result = Tables(V, 1), []
    for text in itertools.product(range(V), repeat=LENGTH):
        code, probability = 1, 1.0
        for token in text:
            p = (target.logits[code].double() / temperature).softmax(-1)
            order = p.argsort(descending=True)
            if top_k:
                p[order[top_k:]] = 0
                p = p / p.sum()
            if top_p < 1:
                before = p[order].cumsum(0) - p[order]
                p[order[before >= top_p]] = 0
                p = p / p.sum()
            probability *= float(p[token])
            code = code * V + token
        result.append(probability)
    return torch.tensor(result, dtype=torch.float64)


def p_value(texts: Tensor, probabilities: Tensor) -> float:
    """Of the chi-square test; zero where something impossible was drawn."""
    codes = (texts * torch.tensor([V**i for i in reversed(range(LENGTH))])).sum(1)
    counts = torch.bincount(codes, minlength=V**LENGTH).double()
    possible = probabilities > 0
    if counts[~possible].sum() > 0:
        return 0.0
    wanted = probabilities[possible] * len(texts)
    rare = wanted < 10
    seen = torch.cat([counts[possible][~rare], counts[possible][rare].sum()[None]])
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]])
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    chi_square = ((seen - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(wanted) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi_square / 2))


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "setting",
    [
        {}, {"d2t": SUBSET}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 1.5},
        {"drafts_sometimes": True}, {"is_broken": True},
    ],
    ids=["plain", "d2t", "top_k", "top_p", "hot", "fewer drafts", "broken drafter"],
)  # fmt: skip
def test_texts_are_distributed_as_the_targets(rule: str, setting: dict[str, object]) -> None:
    texts, _ = decode(rule, **setting)  # type: ignore[arg-type]
    given = {k: v for k, v in setting.items() if k in ("temperature", "top_k", "top_p")}
    assert p_value(texts, expected(**given)) > 1e-3  # type: ignore[arg-type]


def test_what_each_rule_keeps() -> None:
    """Rejection keeps more than an exact match of best drafts, blocks at least as much; drafts
    drawn with the target's own noise lie between."""
    kept = {rule: decode(rule, temperature=1.2)[1] for rule in RULES}
    assert kept["strict"] < kept["exact_match"] < kept["rejection"] < kept["block"], kept


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_shared_noise_stream_is_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def coins(sampling: SamplingMetadata, drafts: Tensor) -> Tensor:
        seeds = sampling.seeds.view(len(drafts), -1)[:, :-1].flatten()
        positions = sampling.positions.view(len(drafts), -1)[:, :-1].flatten()
        noise = rejection.uniform_noise(seeds, positions, rejection.NoiseStream.TARGET, 1)
        return noise.view(drafts.shape)

    monkeypatch.setattr(rejection, "_coins", coins)
    assert p_value(decode(rule)[0], expected()) < 1e-3


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_sample_instead_of_the_recovered_token_is_noticed(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rejection._next_token

    def from_p(log_p, drafts, draft, sampling, count, scale):  # type: ignore[no-untyped-def]
        return real(log_p, torch.full_like(drafts, -1), draft, sampling, count, scale)

    monkeypatch.setattr(rejection, "_next_token", from_p)
    assert p_value(decode(rule)[0], expected()) < 1e-3


def test_thrown_away_noise_is_not_met_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A block's verdict looks at all its drafts and coins, so the next step needs new ones."""
    monkeypatch.setattr(draw, "of_depth", lambda stream, depth: int(stream))
    real = rejection.uniform_noise

    def one_coin_a_position(seeds, positions, stream, size):  # type: ignore[no-untyped-def]
        return real(seeds, positions, stream, torch.zeros_like(size))

    monkeypatch.setattr(rejection, "uniform_noise", one_coin_a_position)
    assert p_value(decode("block")[0], expected()) < 1e-3


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
    with pytest.raises(ConfigError, match="strict, exact_match, rejection, block"):
        config(acceptance="lenient")
