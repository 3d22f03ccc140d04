"""What a generation step takes on several GPUs, and what their all-reduces take.

    PYTHONPATH=. torchrun --nproc-per-node 2 benchmarks/ranks_step.py --preset llama-3.1-8b

Weights are random and acceptance is forced, as in gpu_step.py. One line for each mode, batch size
and context: ms a step by the wall clock, steps overlapping as in use (the median of blocks of 10
steps, which grow the sequences through `context`), and the bytes that one rank has to read.
--collectives times an all-reduce by every way and size within a CUDA graph first. --tp 1 measures
one rank in the same run.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from gpu_step import DRAFTERS, forced_acceptance
from random_models import PRESETS, Checkpoint, Model, in_memory
from step_report import print_kernels
from step_timing import STEPS_PER_BLOCK, WARM_UP_STEPS, kernel_times

from trtspec import (
    LLM,
    CudaGraphConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    PyExecutor,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.distributed.launch import torchrun_rank, torchrun_size
from trtspec.distributed.peer import PeerCommunicator
from trtspec.distributed.start import open_world
from trtspec.executor.device import resolve_device
from trtspec.executor.follower import follow


def main() -> None:
    args = _parse()
    device = resolve_device(args.device)
    model = Model(PRESETS[args.preset], args.max_seq_len, where=args.preset)
    root = Path(args.root, f"{os.environ.get('MASTER_PORT', 'one')}-{time.time():.0f}")
    size = torchrun_size() or 1
    checkpoints = {
        Path("target"): model.target(1 if "mtp_eagle_one_model" in args.modes else 0),
        Path("head"): model.eagle3_head(),
    }
    with ExitStack() as stack:
        stack.enter_context(_named(checkpoints, device))
        if torchrun_rank() > 0:
            if args.tp == 1:
                return
            world = open_world(size, "torchrun", device)
            stack.enter_context(forced_acceptance(args.accept))
            follow(world)
        with forced_acceptance(args.accept):
            _lead(args, model, root, checkpoints, size)


def _named(checkpoints: dict[Path, Checkpoint], device: torch.device) -> Any:
    """Loads any directory of a checkpoint's name from memory: ranks do not share their folders."""
    return in_memory(checkpoints, device, saves=False, key=lambda path: Path(path.name))


def _lead(
    args: argparse.Namespace,
    model: Model,
    root: Path,
    checkpoints: dict[Path, Checkpoint],
    size: int,
) -> None:
    for name, checkpoint in checkpoints.items():
        (root / name).mkdir(parents=True)
        (root / name / "config.json").write_text(json.dumps(checkpoint.config))
    report: dict[str, Any] = {"argv": sys.argv, "preset": args.preset, "ranks": size, "rows": []}
    print(f"# {args.preset}, {size} ranks, {args.accept:g} drafts accepted by force", flush=True)
    print("mode                  K  batch  context   ms/step  min block  max block", flush=True)
    for mode in args.modes:
        config = _config(mode, args.k, root)
        llm = LLM(
            root / "target",
            config,
            device=args.device,
            dtype=args.dtype,
            max_batch_size=max(args.batch),
            max_seq_len=args.max_seq_len,
            kv_cache_config=KvCacheConfig(
                max_tokens=max(args.batch) * (args.max_seq_len + 96), enable_block_reuse=False
            ),
            cuda_graph_config=CudaGraphConfig(enable_autotuner=True),
            tensor_parallel_size=args.tp,
            moe_expert_parallel_size=args.ep,
        )
        with llm:
            if args.collectives and "collectives" not in report:
                report["collectives"] = _collectives(llm)
            for batch in args.batch:
                for context in args.context:
                    row = {"mode": mode, "k": args.k if config else 0, "batch": batch}
                    row |= _measure(llm.executor, batch, context, args)
                    report["rows"].append(row)
                    print(
                        f"{mode:20} {row['k']:2}  {batch:5}  {context:7}  {row['step_ms']:8.3f}"
                        f"  {min(row['block_ms']):9.3f}  {max(row['block_ms']):9.3f}",
                        flush=True,
                    )
                    if "profile" in row:
                        print_kernels(row["profile"]["kernels"])
                    if args.json is not None:
                        args.json.write_text(json.dumps(report, indent=1))


def _config(mode: str, k: int, root: Path) -> DecodingBaseConfig | None:
    if DRAFTERS[mode] == "eagle3":
        return EagleDecodingConfig(max_draft_len=k, speculative_model=root / "head")
    if DRAFTERS[mode] == "mtp":
        return MTPDecodingConfig(num_nextn_predict_layers=k)
    return None


def _measure(
    executor: PyExecutor, batch: int, context: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Steps of `batch` requests whose length is `context` in the middle of the blocks."""
    per_step = 1 + min(args.accept, executor.max_draft_len)
    steps = args.blocks * STEPS_PER_BLOCK
    start = max(8, round(context - (steps / 2 + WARM_UP_STEPS) * per_step))
    vocab = executor.target.config.vocab_size
    for i in range(batch):
        prompt = [(7 * j + 11 * i) % vocab for j in range(start)]
        executor.enqueue(prompt, SamplingParams(max_tokens=10**9, ignore_eos=True))
    while executor.scheduler.waiting or not all(
        request.is_generation for request in executor.scheduler.running
    ):
        executor.step()
    for _ in range(WARM_UP_STEPS):
        executor.step()
    executor.reset_stats()
    times = [time.perf_counter()]
    for _ in range(steps):
        executor.step()
        times.append(time.perf_counter())
    blocks = zip(times[::STEPS_PER_BLOCK], times[STEPS_PER_BLOCK::STEPS_PER_BLOCK], strict=False)
    block_ms = [(end - begin) / STEPS_PER_BLOCK * 1e3 for begin, end in blocks]
    row = {
        "context": context,
        "step_ms": median(block_ms),
        "block_ms": block_ms,
        "acceptance_length": executor.stats().acceptance_length,
    }
    if args.profile:
        row["profile"] = kernel_times(executor)
    for request in list(executor.scheduler.running):
        executor.cancel(request.request_id)
    executor.run_until_done()
    return row


def _collectives(llm: LLM) -> dict[str, Any] | None:
    """What was measured when the ranks started."""
    world = getattr(llm.executor.runner, "world", None)
    if world is None or not isinstance(world.comm, PeerCommunicator):
        return None
    for size, microseconds in world.comm.microseconds.items():
        print(f"all-reduce of {size:8} bytes: {microseconds}, {world.comm.way(size)}", flush=True)
    return {str(size): times for size, times in world.comm.microseconds.items()}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="llama-3.1-8b", choices=PRESETS)
    parser.add_argument("--modes", type=_names, default=["plain", "eagle3_one_model"])
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--batch", type=_numbers, default=[1, 32])
    parser.add_argument("--context", type=_numbers, default=[1024])
    parser.add_argument("--accept", type=float, default=2.0, help="drafts a step, by force")
    parser.add_argument("--blocks", type=int, default=20, help="of 10 steps")
    parser.add_argument("--max-seq-len", type=int, default=2048)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tp", type=int, help="default: all ranks")
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--profile", action="store_true", help="list rank 0's kernels of 20 steps")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--root", default="/tmp/ranks-step", help="for the models' config.json")
    parser.add_argument("--json-file", dest="json", type=Path)
    args = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    return args


def _names(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
