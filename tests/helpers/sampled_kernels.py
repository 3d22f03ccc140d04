"""Batches of sampled drafts for the acceptance kernels and for their twins."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from trtspec.acceptance.draw import DraftSampler
from trtspec.config import DraftTargetDecodingConfig
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.metadata.spec import SpecMetadata
from trtspec.workers.base import SpecWorkerBase
from trtspec.workers.protocols import DraftInputs

kernels = pytest.importorskip("trtspec.ops.tokens.triton_sampled", reason="needs triton")
dependent_launch = pytest.importorskip("trtspec.ops.launch.triton").dependent_launch
triton_filter = pytest.importorskip("trtspec.ops.tokens.triton_filter")
triton_stats = pytest.importorskip("trtspec.ops.tokens.triton_stats")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
V, K, SLOTS, CONTEXTS, GENERATIONS = 300, 3, 9, 1, 4
SUBSET = torch.arange(0, V, 3)[:90]  # the target ids of a drafter that knows fewer tokens


class Worker(SpecWorkerBase):
    drafts_with_network = True

    def draft(self, inputs: DraftInputs) -> Tensor:
        raise AssertionError("not asked for")


def random_normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_worker(rule: str, d2t: Tensor | None) -> Worker:
    worker = Worker(DraftTargetDecodingConfig(max_draft_len=K + 1, speculative_model="m",
                                              acceptance=rule))  # fmt: skip
    vocab = V if d2t is None else len(d2t)
    worker.remember_drafts(SLOTS, vocab, V, d2t, torch.device(DEVICE), torch.float32)
    return worker


class SampledCase:
    """A batch of contexts and generations whose drafts were drawn from a drafter like the target,
    one of them missing in places."""

    def __init__(self, rule: str, seed: int, *, filters: str = "", has_table: bool = False):
        self.d2t = (SUBSET - torch.arange(len(SUBSET))).to(DEVICE) if has_table else None
        self.worker, self.contexts = make_worker(rule, self.d2t), CONTEXTS
        batch, rows = CONTEXTS + GENERATIONS, CONTEXTS + GENERATIONS * (K + 1)
        self.logits = (2.5 * random_normal(rows, V, seed=seed)).to(DEVICE)
        generator = torch.Generator().manual_seed(seed + 1)
        temperature = torch.rand(batch, generator=generator) + 0.4
        temperature[1::3] = 0.0
        top_k, top_p = torch.zeros(batch, dtype=torch.int32), torch.ones(batch)
        if "k" in filters:
            top_k[:] = torch.tensor([5, 40, 0, 299, 300])[:batch]
        if "p" in filters:
            top_p[:] = torch.tensor([0.5, 0.9, 0.05, 1.0, 0.99])[:batch]
        counts = torch.tensor([1] * CONTEXTS + [K + 1] * GENERATIONS)

        def rows_of(x: Tensor) -> Tensor:
            return x.repeat_interleave(counts).to(DEVICE)

        self.slots = torch.randperm(SLOTS, generator=generator)[:batch].to(DEVICE)
        self.seeds = torch.randint(2**40, (batch,), generator=generator)
        starts = torch.randint(5000, (batch,), generator=generator)
        positions = torch.cat([starts[i] + torch.arange(n) for i, n in enumerate(counts.tolist())])
        self.sampling = SamplingMetadata(
            rows_of(temperature), rows_of(top_k), rows_of(top_p), rows_of(self.seeds),
            positions.to(DEVICE), has_filters=bool(filters),
        )  # fmt: skip
        self.drafts = self._draw(seed + 2, temperature, starts)

    def _draw(self, seed: int, temperature: Tensor, starts: Tensor) -> Tensor:
        """Drafts from logits like the target's, through the worker's sampler."""
        generations = self.contexts + torch.arange(GENERATIONS)
        sampler = DraftSampler(
            temperature[generations].to(DEVICE), self.seeds[generations].to(DEVICE),
            self.slots[generations.to(DEVICE)], self.worker.draft_memory,
        )  # fmt: skip
        judging = self.logits[self.contexts :].float().view(GENERATIONS, K + 1, V)
        if self.d2t is not None:
            judging = judging[..., SUBSET.to(DEVICE)]
        drafts = []
        for depth in range(K):
            near = judging[:, depth] + 0.7 * random_normal(
                *judging[:, 0].shape, seed=seed + depth
            ).to(DEVICE)
            last = (starts[generations] - 1).to(DEVICE)
            if self.worker.draft_memory is None and self.d2t is None:
                drafts.append(near.argmax(-1).to(torch.int32))
                continue
            drafts.append(sampler.draw(near, self.d2t, last, depth))
        drafts = torch.stack(drafts, 1)
        drafts[1, 2:], drafts[2, :] = -1, -1
        return drafts

    def look_up(self, seed: int) -> None:
        """Makes the drafts of all generations but one certain: likely tokens, and others."""
        memory = self.worker.draft_memory
        assert memory is not None
        likely = self.logits[self.contexts :].view(GENERATIONS, K + 1, V)[:, :K].topk(2).indices
        which = torch.randint(2, (GENERATIONS, K, 1), generator=torch.Generator().manual_seed(seed))
        found = likely.gather(2, which.to(DEVICE)).squeeze(2).to(torch.int32)
        self.drafts[1:] = torch.where(self.drafts[1:] >= 0, found[1:], -1)
        memory.are_certain[self.slots[self.contexts + 1 :]] = True

    def spec(self) -> SpecMetadata:
        return SpecMetadata(
            max_num_requests=SLOTS, max_draft_len=K + 1, max_total_draft_tokens=K + 1,
            num_generations=GENERATIONS, slot_ids=self.slots, sampling=self.sampling,
        )  # fmt: skip

    def twin(self) -> tuple[Tensor, Tensor, Tensor]:
        spec = self.spec()
        tokens, lens = self.worker.sample_and_accept_draft_tokens(
            self.logits, self.drafts, self.contexts, self.contexts + GENERATIONS, spec
        )
        assert spec.bad_requests is not None
        return tokens, lens, spec.bad_requests

    def kernels(self, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        accepted = kernels.accept_sampled(
            self.logits, self.drafts, self.contexts, K + 1, self.sampling,
            memory=self.worker.draft_memory, slots=self.slots,
            is_block=self.worker.config is not None and self.worker.config.acceptance == "block",
            **options,
        )  # fmt: skip
        assert accepted.num_accepted_drafts.tolist() == (accepted.lens - 1).tolist()
        return accepted.tokens, accepted.lens, accepted.bad_requests


def kept_by_kernels(
    logits: Tensor, temperatures: Tensor, ks: Tensor, ps: Tensor
) -> tuple[Tensor, Tensor]:
    """(which logits pass the filters [R, V] bool, the sum of their exponentials [R])."""
    (rows, vocab), device = logits.shape, logits.device
    zeros = torch.zeros(rows, dtype=torch.int64, device=device)
    sampling = SamplingMetadata(temperatures, ks, ps, zeros, zeros)
    found = triton_filter.analyse(logits, sampling, dependent_launch(logits))
    bits = (logits.float() + 0.0).view(torch.int32)
    keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> triton_stats.LOW_BITS[logits.dtype]
    is_equal = keys == found.threshold[:, None]
    is_equal &= torch.arange(vocab, device=device) <= found.last[:, None]
    return (keys > found.threshold[:, None]) | is_equal, found.kept
