"""A target and a drafter that are tables, decoded by the worker's own rules."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from trtspec.config import DraftTargetDecodingConfig
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.metadata.spec import SpecMetadata
from trtspec.metadata.step import StepContext, StepSizes
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
        raise AssertionError("`decode_tables` drafts by itself")


def make_worker(rule: str, d2t: Tensor | None) -> Worker:
    worker = Worker(
        DraftTargetDecodingConfig(max_draft_len=K, speculative_model="m", acceptance=rule)
    )
    vocab = V if d2t is None else len(d2t)
    worker.remember_drafts(REQUESTS, vocab, V, d2t, torch.get_default_device(), torch.float32)
    return worker


def decode_tables(
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
        step = StepContext.of(spec, StepSizes(0, REQUESTS, K), K, accepted.device)
        inputs = DraftInputs(
            torch.empty(0), torch.empty(0), None, accepted, counts, None, spec, None, step
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


def expected_distribution(temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0) -> Tensor:
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
