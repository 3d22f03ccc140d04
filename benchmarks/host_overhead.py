"""What the executor's own Python takes for a step, the device's share replaced by a constant.

python benchmarks/host_overhead.py [--batch 256] [--steps 200]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from random_models import PRESETS, Model, save

from trtspec import LLM, SamplingParams
from trtspec.executor.forward_step import StepOutputs
from trtspec.executor.inputs import StepInputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        path = Path(root, "target")
        save(path, Model(PRESETS["tiny"]).target())
        llm = LLM(
            path,
            device="cpu",
            dtype="float32",
            max_batch_size=args.batch,
            max_seq_len=args.steps + 32,
        )
    executor = llm.executor
    for i in range(args.batch):
        params = SamplingParams(max_tokens=args.steps + 20, ignore_eos=True)
        executor.enqueue([3 + i % 50, 5, 7], params)
    while any(not r.is_generation for r in executor.book.live.values()):
        executor.step()

    def constant(inputs: StepInputs, draft_len: int) -> StepOutputs:
        count = len(inputs.slot_ids)
        return StepOutputs(
            new_tokens=torch.full((count, 1), 7, dtype=torch.int32),
            new_tokens_lens=torch.ones(count, dtype=torch.int32),
            bad_requests=torch.zeros(count, dtype=torch.bool),
        )

    executor.runner.step.run = constant  # type: ignore[method-assign]
    times = []
    for _ in range(args.steps):
        started = time.perf_counter()
        executor.step()
        times.append(time.perf_counter() - started)
    ms = median(times) * 1e3
    print(
        f"batch {args.batch}: {ms:.2f} ms a step on the host, {ms / args.batch * 1e3:.1f} us "
        "a request, inputs included"
    )


if __name__ == "__main__":
    main()
