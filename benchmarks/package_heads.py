r"""Tokens/s of SmolLM2-135M with the heads of the package, beside plain decoding, by K and batch.

    python benchmarks/package_heads.py --device cuda --dtype bfloat16

The package's 120 acceptance prompts are answered greedily, one after another and `--batch` at a
time. Tokens/s are of decoding, without the steps that read prompts alone, as in `trtspec bench`.
Those with prompts are of all steps, by the wall clock. At a batch plain decoding reads most prompts
alone and speculation beside decoding, so there they are the fair ones. Of several runs the median
counts. `same` is how many answers are plain decoding's, token for token.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from trtspec import LLM, DSparkDecodingConfig, EagleDecodingConfig, KvCacheConfig, SamplingParams
from trtspec.data.acceptance_prompts import load_prompts

HEADS: dict[str, Any] = {
    "eagle3": EagleDecodingConfig(max_draft_len=5, speculative_model="smollm2-135m-eagle3"),
    "dspark": DSparkDecodingConfig(max_draft_len=8, speculative_model="smollm2-135m-dspark"),
}
MOST_TOKENS = 1_400
"""Of a prompt and its answer; longer prompts are left out."""


class Drafter(NamedTuple):
    """What an engine drafts with."""

    head: str | None  # None: nothing
    max_verified: int | None = None

    def config(self) -> Any:
        if self.head is None:
            return None
        return replace(HEADS[self.head], max_verified_drafts=self.max_verified)


class Way(NamedTuple):
    drafter: Drafter
    draft_len: int

    def __str__(self) -> str:
        head, most = self.drafter
        if head is None:
            return "plain"
        return f"{head}, K = {self.draft_len}" + (f", {most} verified" if most else "")


def main() -> None:
    args = _arguments()
    batches = [int(n) for n in args.batch.split(",")]
    ways = [Way(Drafter(None), 0)]
    for name in args.heads.split(","):
        for most in args.max_verified_drafts.split(","):
            drafter = Drafter(name, int(most) or None)
            lengths = [int(k) for k in args.k.split(",")]
            ways += [Way(drafter, k) for k in lengths if k <= HEADS[name].max_draft_len]
    options: dict[str, Any] = {
        "device": args.device, "dtype": args.dtype, "max_batch_size": max(batches),
        "max_seq_len": MOST_TOKENS, "prefill_batch_size": args.prefill_batch_size,
        "kv_cache_config": KvCacheConfig(
            max_tokens=max(batches) * MOST_TOKENS, enable_block_reuse=False
        ),
    }  # fmt: skip
    drafters = {way.drafter: None for way in ways}
    llms = {drafter: LLM("smollm2-135m", drafter.config(), **options) for drafter in drafters}
    tokenizer = llms[Drafter(None)].tokenizer
    prompts = [
        tokenizer.apply_chat_template(prompt.messages, add_generation_prompt=True)["input_ids"]
        for prompt in load_prompts()[:: args.every]
    ]
    prompts = [ids for ids in prompts if len(ids) + args.max_tokens <= MOST_TOKENS]
    print(f"{len(prompts)} prompts, at most {args.max_tokens} tokens each", flush=True)
    print(
        "| batch | | tokens/s | times plain | with prompts | times plain | tokens a step | same |"
    )
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for batch in batches:
        plain: dict[str, Any] = {}
        for way in ways:
            row = _measure(args, llms[way.drafter], way, prompts, batch)
            plain = plain or row
            for name in ("tokens_per_second", "with_prompts"):
                row[f"{name}_times_plain"] = row[name] / plain[name]
            pairs = zip(row["tokens"], plain["tokens"], strict=True)
            row["same"] = sum(ours == theirs for ours, theirs in pairs)
            rows.append(row)
            print(
                f"| {batch} | {way} | {row['tokens_per_second']:,.0f} "
                f"| {row['tokens_per_second_times_plain']:.2f} | {row['with_prompts']:,.0f} "
                f"| {row['with_prompts_times_plain']:.2f} | {row['tokens_a_step']:.2f} "
                f"| {row['same']} of {len(prompts)} |",
                flush=True,
            )
    if args.json_file:
        for row in rows:
            del row["tokens"]
        Path(args.json_file).write_text(json.dumps(rows, indent=1))


def _measure(
    args: argparse.Namespace, llm: LLM, way: Way, prompts: list[list[int]], batch: int
) -> dict[str, Any]:
    """Decodes all prompts once to warm up, some of them if one at a time, and then some times."""
    if way.drafter.head is not None:
        llm.executor.runtime_draft_len = way.draft_len
    _decode(args, llm, prompts if batch > 1 else prompts[:4], batch)
    runs, tokens, whole = [], [], []
    for _ in range(args.repeat if batch > 1 else 1):
        llm.reset_stats()
        began = time.perf_counter()
        tokens = _decode(args, llm, prompts, batch)
        whole.append(sum(map(len, tokens)) / (time.perf_counter() - began))
        runs.append(llm.stats())
    return {
        "batch": batch,
        "way": str(way),
        "tokens": tokens,
        "tokens_per_second": median(run.tokens_per_second for run in runs),
        "with_prompts": median(whole),
        "tokens_a_step": runs[-1].acceptance_length,
        "accepted_by_position": runs[-1].acceptance_per_position,
    }


def _decode(
    args: argparse.Namespace, llm: LLM, prompts: list[list[int]], batch: int
) -> list[list[int]]:
    """Returns the answers' tokens, with `batch` requests or the engine's most at a time."""
    params = SamplingParams(max_tokens=args.max_tokens)
    groups = [[ids] for ids in prompts] if batch == 1 else [prompts]
    outputs = [output for group in groups for output in llm.generate(group, params)]
    return [list(output.outputs[0].token_ids) for output in outputs]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--heads", default="eagle3,dspark", help=f"some of {', '.join(HEADS)}")
    parser.add_argument("--k", default="3,4,5,7", help="drafts, as far as a head has so many")
    parser.add_argument("--batch", default="1,32", help="1, or the engines' most requests")
    parser.add_argument(
        "--max-verified-drafts", default="0", help="of a step, as of the configs; 0 is all"
    )
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument(
        "--prefill-batch-size",
        type=lambda text: text if text == "auto" else int(text),
        help="slots that must be free for prompts to start, or auto; default: the engine's",
    )
    parser.add_argument("--every", type=int, default=1, help="take every n-th prompt")
    parser.add_argument("--repeat", type=int, default=3, help="runs of a batch")
    parser.add_argument("--json-file", default="")
    args = parser.parse_args()
    sizes = args.batch.split(",")
    if len(set(sizes)) > 2 or (len(set(sizes)) == 2 and "1" not in sizes):
        parser.error(f"--batch {args.batch}: 1, another number, or both")
    return args


if __name__ == "__main__":
    main()
