"""Draft lengths that choose themselves, with a large target: fixed ones and auto, by force.

    python benchmarks/auto_forced.py --preset llama-3.1-8b --batch 1,8,32,64,128,256 --accept 2

Weights are random, so acceptance is forced: `--accept` drafts a step, at most K. A fraction is a
share of the steps. Three engines serve all batches, one after the other: plain decoding, fixed
lengths up to `--k`, and auto, which has some steps to learn before it is timed. Each line has
tokens/s of a batch, the last ones auto over plain decoding and over the best fixed length.
"""

from __future__ import annotations

import argparse
import gc
import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_step import forced_acceptance
from random_models import PRESETS, Model, in_memory
from step_timing import STEPS_PER_BLOCK, WARM_UP_STEPS, SteadyBatch

from trtspec import LLM, CudaGraphConfig, EagleDecodingConfig, KvCacheConfig
from trtspec.executor.device import resolve_device

BLOCKS, LEARNING_BLOCKS = 4, 12  # of steps: that are timed, and that auto has before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", choices=PRESETS, default="llama-3.1-8b")
    parser.add_argument("--batch", type=_ints, default="1,8,32,64,128,256")
    parser.add_argument("--accept", type=float, default=2.0, help="drafts accepted by force")
    parser.add_argument("--k", type=int, default=4, help="the most drafts")
    parser.add_argument("--context", type=int, default=512, help="tokens, about which they grow")
    parser.add_argument("--device", default="auto")
    parser.add_argument(
        "--no-autotune",
        dest="autotune",
        action="store_false",
        help="cuBLAS chooses its algorithms itself; measuring them takes seconds",
    )
    args = parser.parse_args()
    device = resolve_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{args.preset}'s shape, EAGLE-3, context {args.context}, {name}; {args.accept:g} drafts")
    speeds: dict[int, dict[str, float]] = {batch: {} for batch in args.batch}
    for way, lengths in (("plain", [0]), ("fixed", range(1, args.k + 1)), ("auto", [args.k])):
        with _engine(way, device, args) as llm:
            for batch, known in speeds.items():
                found = _measure(llm, way, lengths, batch, args)
                known |= found
                cells = "".join(f"{name:>9}{speed:8.0f}" for name, speed in found.items())
                print(f"{batch:6} requests{cells}", flush=True)
    for batch, known in speeds.items():
        auto = known.pop("auto")
        over = auto / known["plain"], auto / max(known.values())
        print(f"{batch:6} requests: auto / plain {over[0]:.2f}, auto / best {over[1]:.2f}")


@contextmanager
def _engine(way: str, device: torch.device, args: argparse.Namespace) -> Iterator[LLM]:
    largest, model = max(args.batch), Model(PRESETS[args.preset])
    # Texts grow while other prompts are read, and while auto learns.
    steps = max(largest + 16, LEARNING_BLOCKS * STEPS_PER_BLOCK + WARM_UP_STEPS)
    grown = steps * (math.ceil(min(args.accept, args.k)) + 1)
    length = args.context + grown + 8 * args.k
    settings: dict[str, Any] = {"auto": {"draft_len_schedule": "auto"}}.get(way, {})
    with tempfile.TemporaryDirectory() as directory:
        target, head = Path(directory) / "target", Path(directory) / "head"
        config = EagleDecodingConfig(max_draft_len=args.k, speculative_model=head, **settings)
        checkpoints = {target: model.target(0), head: model.eagle3_head()}
        with in_memory(checkpoints, device), forced_acceptance(args.accept):
            llm = LLM(
                target,
                None if way == "plain" else config,
                device=str(device),
                dtype="bfloat16",
                max_batch_size=largest,
                max_seq_len=-(-length // 32) * 32,
                kv_cache_config=KvCacheConfig(
                    max_tokens=largest * (length + 96), enable_block_reuse=False
                ),
                cuda_graph_config=CudaGraphConfig(enable_autotuner=args.autotune),
            )
    yield llm
    llm.shutdown()
    del llm
    gc.collect()


def _measure(
    llm: LLM, way: str, lengths: Iterable[int], batch: int, args: argparse.Namespace
) -> dict[str, float]:
    """Returns tokens/s of each length, or of auto."""
    found, steady = {}, SteadyBatch(llm.executor, batch, args.context)
    for k in lengths:
        tokens = 1 + min(args.accept, k)
        if way == "auto":
            steady.wall_clock(LEARNING_BLOCKS, tokens)
        with llm.executor.draft_len_held_at(k):  # of auto the most
            wall = steady.wall_clock(BLOCKS, tokens)
        name = f"K={k}" if way == "fixed" else way
        found[name] = batch * wall.acceptance_length / wall.ms * 1e3
    steady.close()
    return found


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
