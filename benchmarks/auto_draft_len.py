r"""Tokens/s with a draft length that chooses itself, beside plain decoding and every fixed length.

    python benchmarks/auto_draft_len.py --batch 1,4,16,32,64 --temperatures 0,0.7,1

Real text: the package's acceptance prompts. `--speculative` and `--head` are those of `trtspec
bench`. In each cell all ways decode the same prompts in turns; the median turn of each counts. A
turn that is not counted warms all of them. `auto / plain` and `auto / best` are what to look at.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, NGramDecodingConfig, SamplingParams
from trtspec.config import DecodingBaseConfig, DFlashDecodingConfig, DSparkDecodingConfig
from trtspec.data.acceptance_prompts import load_prompts

CONFIGS = {
    "eagle3": EagleDecodingConfig,
    "dflash": DFlashDecodingConfig,
    "dspark": DSparkDecodingConfig,
}


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
        for llm in engines.values():
            llm.shutdown()
    if args.json_file:
        Path(args.json_file).write_text(json.dumps(rows))


def _engines(args: argparse.Namespace, batch: int) -> dict[str, LLM]:
    config: DecodingBaseConfig = NGramDecodingConfig(max_draft_len=args.k)
    if args.speculative != "ngram":
        config = CONFIGS[args.speculative](max_draft_len=args.k, speculative_model=args.head)
    length = 1024 + args.max_tokens
    cache = KvCacheConfig(max_tokens=batch * length, enable_block_reuse=False)
    options: dict[str, Any] = {
        "device": args.device,
        "max_batch_size": batch,
        "max_seq_len": length,
        "kv_cache_config": cache,
    }
    return {
        "plain": LLM(args.model, **options),
        "fixed": LLM(args.model, config, **options),
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
    ways = ["plain", *range(args.k + 1), "auto"]
    speeds: dict[Any, list[float]] = {way: [] for way in ways}
    for turn in range(args.repeat + 1):
        for way in ways:
            llm = engines[way] if isinstance(way, str) else engines["fixed"]
            if not isinstance(way, str):
                llm.executor.runtime_draft_len = way
            started = time.perf_counter()
            outputs = llm.generate(prompts, params)
            seconds = time.perf_counter() - started
            if turn:
                count = sum(len(o.outputs[0].token_ids) for o in outputs)
                speeds[way].append(count / seconds)
    return {
        "batch": batch,
        "temperature": temperature,
        "speeds": {str(way): median(values) for way, values in speeds.items()},
        "chosen": engines["auto"].executor._draft_len.chosen,
    }


def _head(args: argparse.Namespace) -> str:
    names = ["batch", "T", "plain", *(f"K={k}" for k in range(args.k + 1)), "auto"]
    names += ["auto / plain", "auto / best fixed", "K at the end"]
    return f"| {' | '.join(names)} |\n|{'---|' * len(names)}"


def _line(row: dict[str, Any]) -> str:
    speeds = row["speeds"]
    fixed = [speed for way, speed in speeds.items() if way not in ("plain", "auto")]
    cells = [str(row["batch"]), str(row["temperature"]), *(f"{s:,.0f}" for s in speeds.values())]
    cells += [f"{speeds['auto'] / speeds['plain']:.2f}", f"{speeds['auto'] / max(fixed):.2f}"]
    return f"| {' | '.join([*cells, str(row['chosen'])])} |"


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
    parser.add_argument("--repeat", type=int, default=2)
    parser.add_argument("--json-file", default="")
    return parser.parse_args()


if __name__ == "__main__":
    main()
