"""What counting for `/metrics` adds to a step's CPU time, the device's share left out.

python benchmarks/metrics_cost.py [--batch 32] [--steps 400] [--accepted 2]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import quantiles

import torch
from random_models import PRESETS, Model, save

from trtspec import LLM, NGramDecodingConfig, SamplingParams
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.inputs import StepInputs
from trtspec.executor.py_executor import PyExecutor
from trtspec.serving.metrics import StepMetrics

K = 3


def engine(batch: int, num_tokens: int) -> LLM:
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, "target")
        save(path, Model(PRESETS["tiny"]).target())
        return LLM(
            path,
            NGramDecodingConfig(max_draft_len=K),
            device="cpu",
            dtype="float32",
            max_batch_size=batch,
            max_seq_len=num_tokens,
        )


def constant(accepted: int) -> Callable[[StepInputs, int], StepOutputs]:
    """Returns a step that costs next to nothing and accepts the same number of drafts."""

    def run(inputs: StepInputs, draft_len: int) -> StepOutputs:
        count = len(inputs.slot_ids)
        return StepOutputs(
            new_tokens=torch.full((count, K + 1), 7, dtype=torch.int32),
            new_tokens_lens=torch.full((count,), accepted + 1, dtype=torch.int32),
            bad_requests=torch.zeros(count, dtype=torch.bool),
        )

    return run


def timed(executor: PyExecutor, rounds: int) -> tuple[list[float], list[float]]:
    """Returns the times of steps without and with counting, in turns of 20 steps."""
    metrics, times = StepMetrics(K), ([], [])  # type: ignore[var-annotated]
    for turn in range(rounds):
        counts = turn % 2 == 1
        executor.observer = metrics if counts else None
        executor.step()  # the first of a turn is not timed
        for _ in range(20):
            started = time.thread_time()
            executor.step()
            times[counts].append(time.thread_time() - started)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--accepted", type=int, default=2, help=f"drafts of each step, 0 … {K}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rounds = max(2, 2 * args.steps // 20)
    num_tokens = (21 * rounds + 8) * (args.accepted + 1) + 64
    executor = engine(args.batch, num_tokens).executor
    for i in range(args.batch):
        params = SamplingParams(max_tokens=num_tokens - 32, ignore_eos=True)
        executor.enqueue([3 + i % 50, 5, 7], params)
    while any(not request.is_generation for request in executor.book.live.values()):
        executor.step()
    executor.step()
    # On a CPU drafts that are not there would be left out.
    executor.runner.num_drafts_to_verify = lambda generations, *limit: K  # type: ignore[method-assign]
    executor.runner.step.run = constant(args.accepted)  # type: ignore[method-assign]
    # The fastest tenth: other processes slow the rest down.
    without, counted = (quantiles(times, n=10)[0] * 1e6 for times in timed(executor, rounds))
    added = counted - without
    print(
        f"batch {args.batch}, {args.accepted + 1} tokens a step: {without:.0f} us on the host "
        f"without counting, {counted:.0f} us with it: {added:.1f} us a step, "
        f"{added / args.batch:.2f} us a request"
    )


if __name__ == "__main__":
    main()
