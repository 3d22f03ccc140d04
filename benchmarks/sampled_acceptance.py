"""What sampling adds to acceptance and to drawing drafts, each captured in a CUDA graph.

    PYTHONPATH=. python benchmarks/sampled_acceptance.py [--batch 1,64] [--vocab 128256]

A graph of K draws of drafts (from 32,000 tokens, by offsets) and one acceptance, for greedy
requests and for every rule, without filters and with them; random logits with a peak, bf16. Needs a
CUDA device; `--twins` also times the torch code that the kernels stand in for.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from unittest.mock import patch

import torch
from step_timing import timed
from torch import Tensor

from trtspec.config import DraftTargetDecodingConfig
from trtspec.metadata.sampling import SamplingMetadata
from trtspec.metadata.spec import SpecMetadata
from trtspec.metadata.step import StepContext, StepSizes
from trtspec.ops.launch import dispatch
from trtspec.workers.base import SpecWorkerBase
from trtspec.workers.protocols import DraftInputs

FILTERS = {"": (0, 1.0), "top-p 0.95": (0, 0.95), "top-k 50": (50, 1.0), "both": (50, 0.95)}


class Worker(SpecWorkerBase):
    drafts_with_network = True

    def draft(self, inputs: DraftInputs) -> Tensor:
        raise AssertionError("`Step` draws by itself")


class Step:
    """Inputs of one batch, and the two halves that are timed."""

    def __init__(self, rule: str, filters: str, batch: int, k: int, vocab: int, draft_vocab: int):
        self.worker = Worker(
            DraftTargetDecodingConfig(
                max_draft_len=k, speculative_model="-", acceptance=rule or "strict"
            )
        )
        device, self.batch = torch.device("cuda"), batch
        generator = torch.Generator(device).manual_seed(0)

        def random(rows: int, size: int) -> Tensor:
            x = torch.randn(rows, size, generator=generator, device=device)
            return (2 * x + 8 * (x > 3.5)).to(torch.bfloat16)  # some 30 of 128,256 stand out

        step = vocab // draft_vocab
        draft_ids = torch.arange(draft_vocab, device=device)
        self.d2t = draft_ids * (step - 1)
        self.worker.remember_drafts(batch, draft_vocab, vocab, self.d2t, device, torch.bfloat16)
        self.logits = random(batch * (k + 1), vocab)
        judging = self.logits.view(batch, k + 1, vocab)
        noise = torch.randn(k, batch, draft_vocab, generator=generator, device=device)
        chosen = judging[:, :k, draft_ids * step].transpose(0, 1)
        self.draft_logits = (chosen + 0.5 * noise).to(torch.bfloat16).contiguous()
        rows, top = batch * (k + 1), FILTERS[filters]
        self.sampling = SamplingMetadata(
            torch.full((rows,), 0.8 if rule else 0.0, device=device),
            torch.full((rows,), top[0], dtype=torch.int32, device=device),
            torch.full((rows,), top[1], device=device),
            torch.arange(rows, device=device) // (k + 1),
            torch.arange(rows, device=device) % (k + 1) + 100,
            all_greedy=not rule,
            has_filters=bool(filters),
        )
        self.spec = SpecMetadata(
            max_num_requests=batch,
            max_draft_len=k,
            max_total_draft_tokens=k,
            num_generations=batch,
            slot_ids=torch.arange(batch, device=device),
            sampling=self.sampling,
        )
        self.last = torch.full((batch,), 99, device=device)
        self.drafts = self.draw()

    def draw(self) -> Tensor:
        tokens = torch.empty((self.batch, 1), dtype=torch.int32, device="cuda")
        lens, k = torch.ones_like(tokens[:, 0]), self.spec.max_draft_len
        step = StepContext.of(self.spec, StepSizes(0, self.batch, k), k, tokens.device)
        inputs = DraftInputs(tokens, tokens, None, tokens, lens, None, self.spec, None, step)
        sampler = self.worker.draft_sampler(inputs)
        return torch.stack(
            [
                self.worker.propose(logits, self.d2t, sampler, self.last, depth)
                for depth, logits in enumerate(self.draft_logits)
            ],
            dim=1,
        )

    def accept(self) -> Tensor:
        return self.worker.sample_and_accept_draft_tokens(
            self.logits, self.drafts, 0, self.batch, self.spec
        )[1]


def captured(run: Callable[[], object]) -> Callable[[], object]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):  # launching a graph takes longer than the smallest of these
            run()
    return graph.replay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", default="1,8,64")
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--twins", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, us: {args.k} draws | "
        f"acceptance of {args.k} drafts, V = {args.vocab}"
    )
    for batch in (int(b) for b in args.batch.split(",")):
        for rule in ("", "strict", "exact_match", "rejection", "block"):
            for filters in FILTERS if rule else ("",):
                for twins in (False, True) if args.twins and rule == "rejection" else (False,):
                    step = Step(rule, filters, batch, args.k, args.vocab, args.draft_vocab)
                    with torch.inference_mode():
                        no_kernels = patch.object(dispatch, "_module", lambda name: None)
                        if twins:
                            no_kernels.start()
                        runs = [captured(step.draw), captured(step.accept)]
                        if twins:
                            no_kernels.stop()
                        kept = float((step.accept() - 1).float().mean())
                        times = timed(runs, device, repeats=100)
                    draws, accepts = (ms * 100 for ms in times)
                    name = f"{rule or 'greedy'}{' in torch' if twins else ''}"
                    print(
                        f"batch {batch:3d}  {name:20s} {filters:11s} {draws:8.1f} | "
                        f"{accepts:8.1f}   ({kept:.2f} kept)",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
