r"""Tokens/s with a draft length that chooses itself, beside plain decoding and every fixed length.

    python benchmarks/auto_draft_len.py --batch 1,4,16,32,64 --temperatures 0,0.7,1

Real text: the package's acceptance prompts. `--speculative` and `--head` are those of `trtspec
bench`. In each cell all ways decode the same prompts in turns, each turn beginning with another
way; the median turn of each counts. A turn that is not counted warms all of them. `auto / plain`
and `auto / best fixed` are what to look at.

Below each cell: how often auto drafted which K in the counted turns, how often it changed K, how
many lengths it tried, what a step takes (measured with fixed lengths; auto's own table), tokens a
step, acceptance by position (of the last fixed length; auto's estimate), and the graphs that each
way captured in counted turns: should there be any, the cell says little.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from trtspec import (
    LLM,
    CudaGraphConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig, DFlashDecodingConfig, DSparkDecodingConfig
from trtspec.data.acceptance_prompts import load_prompts

CONFIGS: dict[str, Any] = {
    "eagle3": EagleDecodingConfig,
    "dflash": DFlashDecodingConfig,
    "dspark": DSparkDecodingConfig,
    "mtp_eagle": MTPDecodingConfig,
}


@dataclass
class Tally:
    """What one way did in the turns that count."""

    speeds: list[float] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)
    sizes: Counter[int] = field(default_factory=Counter)
    changes: int = 0
    trials: int = 0
    captures: int = 0
    seconds: float = 0.0  # of steps with generations
    tokens: list[float] = field(default_factory=list)  # a step and request
    rates: list[float] = field(default_factory=list)  # accepted of those before which all were


def main() -> None:
    args = _arguments()
    batches = [int(n) for n in args.batch.split(",")]
    temperatures = [float(t) for t in args.temperatures.split(",")]
    print(_head(args), flush=True)
    rows = []
    for batch in batches:
        engines = _engines(args, batch)
        for temperature in temperatures:
            row = _cell(args, engines, batch, temperature)
            rows.append(row)
            print(_line(row), flush=True)
            if not args.brief:
                print(_details(row), flush=True)
        for llm in engines.values():
            llm.shutdown()
    if args.json_file:
        Path(args.json_file).write_text(json.dumps(rows))


def _engines(args: argparse.Namespace, batch: int) -> dict[str, LLM]:
    config: DecodingBaseConfig = NGramDecodingConfig(max_draft_len=args.k)
    if args.speculative != "ngram":
        made = CONFIGS[args.speculative]
        config = made(**{made.draft_len_field: args.k}, speculative_model=args.head)
    length = 1024 + args.max_tokens
    options: dict[str, Any] = {
        "device": args.device,
        "max_batch_size": batch,
        "max_seq_len": length,
        "kv_cache_config": KvCacheConfig(max_tokens=batch * length, enable_block_reuse=False),
        "cuda_graph_config": CudaGraphConfig(capture_at_start=not args.lazy),
    }
    # With a schedule K = 0 leaves the head alone, as it does under "auto".
    fixed = replace(config, draft_len_schedule={batch: args.k})
    return {
        "plain": LLM(args.model, **options),
        "fixed": LLM(args.model, fixed, **options),
        "auto": LLM(args.model, replace(config, draft_len_schedule="auto"), **options),
    }


def _cell(
    args: argparse.Namespace, engines: dict[str, LLM], batch: int, temperature: float
) -> dict[str, Any]:
    tokenizer = engines["plain"].tokenizer
    texts = [
        tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True)["input_ids"]
        for prompt in load_prompts()[:: args.every]
    ]
    short = cycle(text for text in texts if len(text) < 1000)
    prompts = list(islice(short, max(batch * args.rounds, args.least)))
    params = [
        SamplingParams(max_tokens=args.max_tokens, temperature=temperature, seed=seed)
        for seed in range(len(prompts))
    ]
    ways = ["plain", *map(str, range(args.k + 1)), "auto"]
    tallies = {way: Tally() for way in ways}
    for turn in range(args.repeat + 1):
        first = turn % len(ways)
        for way in [*ways[first:], *ways[:first]]:
            llm = engines.get(way, engines["fixed"])
            if way not in engines:
                llm.executor.runtime_draft_len = int(way)
            tally = tallies[way] if turn else Tally()
            _run(llm, prompts, params, tally)
    auto: Any = engines["auto"].executor._draft_len
    shape = _shape(auto, tallies["auto"], temperature)
    return {
        "batch": batch,
        "temperature": temperature,
        "speeds": {way: median(tally.speeds) for way, tally in tallies.items()},
        "chosen": auto.chosen,
        "ways": {way: vars(tally) for way, tally in tallies.items()},
        "table_ms": {k: 1e3 * s for k, s in auto.costs.of(shape, auto.lengths).items()},
        "estimate": auto.rates[temperature == 0],
    }


def _run(llm: LLM, prompts: list[list[int]], params: list[SamplingParams], tally: Tally) -> None:
    """Decodes the prompts once, and counts what the steps did."""
    executor: Any = llm.executor
    chooser, graphs, last = executor._draft_len, executor.graphs, None
    captured = 0 if graphs is None else graphs.num_graphs
    trials, of = getattr(chooser, "num_trials", 0), chooser.of

    def counted(batch: Any, part: Any) -> int:
        nonlocal last
        length = of(batch, part)
        if part.generations:
            tally.lengths[length] += 1
            tally.sizes[len(part.generations)] += 1
            tally.changes += last not in (None, length)
            last = length
        return length

    executor.reset_stats()
    chooser.of = counted
    try:
        began = time.perf_counter()
        outputs = llm.generate(prompts, params)
        seconds = time.perf_counter() - began
    finally:
        del chooser.of
    stats = executor.stats()
    tally.speeds.append(sum(len(o.outputs[0].token_ids) for o in outputs) / seconds)
    tally.seconds += stats.decode_seconds
    tally.trials += getattr(chooser, "num_trials", 0) - trials
    tally.captures += 0 if graphs is None else graphs.num_graphs - captured
    tally.tokens.append(stats.acceptance_length)
    reached = [1.0, *stats.acceptance_per_position]
    pairs = zip(reached[1:], reached, strict=False)
    tally.rates = [after / before if before else 0.0 for after, before in pairs]


def _shape(auto: Any, tally: Tally, temperature: float) -> Any:
    from trtspec.executor.draft_lens.step_costs import StepShape

    size = tally.sizes.most_common(1)[0][0]
    return StepShape(auto.launches.size_of(size), all_greedy=temperature == 0)


def _head(args: argparse.Namespace) -> str:
    names = ["batch", "T", "plain", *(f"K={k}" for k in range(args.k + 1)), "auto"]
    names += ["auto / plain", "auto / best fixed", "K=0 / plain", "K at the end"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _line(row: dict[str, Any]) -> str:
    speeds = row["speeds"]
    fixed = [speed for way, speed in speeds.items() if way not in ("plain", "auto")]
    cells = [str(row["batch"]), str(row["temperature"]), *(f"{s:,.0f}" for s in speeds.values())]
    ratios = speeds["auto"] / speeds["plain"], speeds["auto"] / max(fixed)
    cells += [f"{ratio:.3f}" for ratio in (*ratios, speeds["0"] / speeds["plain"])]
    return f"| {' | '.join([*cells, str(row['chosen'])])} |"


def _details(row: dict[str, Any]) -> str:
    ways = row["ways"]
    auto, last = ways["auto"], list(ways)[-2]
    steps = sum(auto["lengths"].values())
    shares = {k: f"{count / steps:.1%}" for k, count in sorted(auto["lengths"].items())}
    measured = {
        way: f"{1e3 * tally['seconds'] / sum(tally['lengths'].values()):.3f}"
        for way, tally in ways.items()
    }
    tokens = {way: f"{median(tally['tokens']):.2f}" for way, tally in ways.items()}
    table = {k: f"{ms:.3f}" for k, ms in row["table_ms"].items()}
    lines = [
        f"auto's K: {_pairs(shares)}; {auto['changes']} changes and {auto['trials']} trials "
        f"in {steps:,} steps",
        f"ms a step, mean of all: {_pairs(measured)}",
        f"ms a step, auto's table: {_pairs(table)}",
        f"tokens a step: {_pairs(tokens)}",
        f"accepted by position: {_numbers(ways[last]['rates'])} measured with K={last}, "
        f"{_numbers(row['estimate'])} auto's estimate",
        f"speeds of turns: plain {_speeds(ways['plain'])}, auto {_speeds(auto)}",
    ]
    captures = {way: tally["captures"] for way, tally in ways.items() if tally["captures"]}
    lines.append(f"graphs captured in counted turns: {_pairs(captures) or 'none'}")
    return "\n".join(f"    {line}" for line in lines)


def _pairs(values: dict[Any, Any]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in values.items())


def _numbers(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.2f}" for value in values) + "]"


def _speeds(tally: dict[str, Any]) -> str:
    return " ".join(f"{speed:,.0f}" for speed in tally["speeds"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--speculative", default="eagle3", choices=["ngram", *CONFIGS])
    parser.add_argument("--head", default="smollm2-135m-eagle3")
    parser.add_argument("--k", type=int, default=4, help="the most drafts")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--temperatures", default="0,1")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3, help="prompts in a cell, by the batch")
    parser.add_argument("--least", type=int, default=8, help="prompts in a cell at least")
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--lazy", action="store_true", help="capture graphs when they come up")
    parser.add_argument("--brief", action="store_true", help="the table alone")
    parser.add_argument("--json-file", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
