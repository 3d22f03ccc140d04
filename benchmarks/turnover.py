"""Tokens/s of requests that come and go: prompts beside decoding, by when prompts may start.

    python benchmarks/turnover.py --preset llama-3.1-8b --k 0,3 --batch 32 --prefill 1,auto

Weights are random, and acceptance is forced. `--batch` requests run at a time; `--rounds` times as
many are given at once. Prompts have 40 to 400 tokens, answers 64 to 192. K = 0 is plain decoding;
other K draft with an EAGLE-3 head. Each K has one engine, which serves the settings of
`prefill_batch_size` in turns, so that they share its graphs. Each turn has other requests. Figures
in brackets are of turns in which a graph was captured.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from gpu_step import forced_acceptance
from random_models import PRESETS, Model, in_memory

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, SamplingParams
from trtspec.executor.device import resolve_device

PROMPTS, ANSWERS = (40, 400), (64, 192)


def main() -> None:
    args = _arguments()
    model = Model(PRESETS[args.preset], args.max_seq_len, where=args.preset)
    device = resolve_device(args.device)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}; {args.preset}'s shape, {args.accept:g} drafts forced"
    )
    print("| K | turn | " + " | ".join(args.prefill) + " |")
    print("|" + "---|" * (2 + len(args.prefill)), flush=True)
    for k in args.k:
        with tempfile.TemporaryDirectory() as root, _engine(Path(root), model, k, args) as llm:
            _compare(llm, k, args)
            llm.shutdown()
        del llm
        gc.collect()


def _compare(llm: LLM, k: int, args: argparse.Namespace) -> None:
    """Prints a line for each turn, with all settings."""
    scheduler, graphs = llm.executor.scheduler, llm.executor.graphs
    for turn in range(args.turns):
        requests = _requests(args, seed=turn, vocab_size=llm.executor.target.config.vocab_size)
        cells = []
        for setting in args.prefill:
            size = setting if setting == "auto" else int(setting)
            scheduler.config = replace(scheduler.config, prefill_batch_size=size)
            before = graphs.num_graphs if graphs else 0
            began = time.perf_counter()
            num_tokens = _run(llm, requests)
            rate = f"{num_tokens / (time.perf_counter() - began):,.0f}"
            captured = graphs is not None and graphs.num_graphs > before
            cells.append(f"({rate})" if captured else rate)
        print(f"| {k} | {turn + 1} | " + " | ".join(cells) + " |", flush=True)


def _requests(
    args: argparse.Namespace, seed: int, vocab_size: int
) -> list[tuple[list[int], SamplingParams]]:
    rng = random.Random(seed)
    return [
        (
            [rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPTS))],
            SamplingParams(max_tokens=rng.randint(*ANSWERS), ignore_eos=True),
        )
        for _ in range(args.rounds * args.batch)
    ]


def _run(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> int:
    """Answers all of them. Returns how many tokens that were."""
    for prompt, params in requests:
        llm.executor.enqueue(prompt, params)
    return sum(len(done.output_token_ids) for done in llm.executor.run_until_done())


@contextmanager
def _engine(root: Path, model: Model, k: int, args: argparse.Namespace) -> Iterator[LLM]:
    target, head = root / "target", root / "head"
    checkpoints = {target: model.target(0)}
    config = None
    if k:
        checkpoints[head] = model.eagle3_head()
        config = EagleDecodingConfig(max_draft_len=k, speculative_model=head)
    with (
        in_memory(checkpoints, resolve_device(args.device)),
        forced_acceptance(args.accept if k else 0),
    ):
        llm = LLM(
            target, config, device=args.device, dtype="bfloat16", max_batch_size=args.batch,
            max_seq_len=args.max_seq_len, quant=args.quant,
            kv_cache_config=KvCacheConfig(
                max_tokens=args.batch * (args.max_seq_len + 64), enable_block_reuse=False
            ),
        )  # fmt: skip
    yield llm


def _arguments() -> argparse.Namespace:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quant", choices=["fp8"])
    parser.add_argument("--k", type=_ints, default=[0, 3], help="drafts; 0 is plain decoding")
    parser.add_argument("--batch", type=int, default=32, help="requests at a time")
    parser.add_argument("--rounds", type=int, default=4, help="how many times as many in all")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--prefill", type=lambda text: text.split(","), default=["1", "auto"])
    parser.add_argument("--accept", type=float, default=1.3, help="drafts accepted by force")
    parser.add_argument("--max-seq-len", type=int, default=640)
    return parser.parse_args()


def _ints(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


if __name__ == "__main__":
    main()
