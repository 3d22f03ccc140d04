"""Tokens a step of SA, NGRAM and a head, alone and with SA beside it, one request after another.

    PYTHONPATH=. python benchmarks/suffix_drafts.py [--max-tokens 224] [--json out.json]
    PYTHONPATH=. python benchmarks/suffix_drafts.py --k 4 --only eagle3,sa --every 2 [--chat]

The prompts are those of `trtspec/data/agent_prompts.py`, like a coding agent's, in their order;
`--chat` takes the acceptance prompts. One engine for each setting answers them greedily. All
must give the same tokens. "Per step" is tokens a generation step; "drafts" is proposed drafts a
step, "rate" the share of them that was accepted, "looked up" the share that SA proposed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from trtspec import (
    LLM,
    EagleDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SAEnhancerConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.data.acceptance_prompts import AcceptancePrompt, load_prompts
from trtspec.data.agent_prompts import agent_prompts

NGRAM_LENGTHS = {"2-4": (2, 4), "1-4": (1, 4), "3-32": (3, 32)}


def settings(lengths: list[int], head: str) -> dict[str, DecodingBaseConfig | None]:
    """Returns the engines to compare, by name."""
    configs: dict[str, DecodingBaseConfig | None] = {"plain": None}
    for k in lengths:
        for name, (least, most) in NGRAM_LENGTHS.items():
            configs[f"ngram K={k} n={name}"] = NGramDecodingConfig(
                max_draft_len=k, min_matching_ngram_size=least, max_matching_ngram_size=most
            )
        configs[f"sa K={k} own"] = SADecodingConfig(max_draft_len=k, enable_global_pool=False)
        configs[f"sa K={k}"] = SADecodingConfig(max_draft_len=k)
        if head:
            eagle3 = EagleDecodingConfig(max_draft_len=k, speculative_model=head)
            configs[f"eagle3 K={k}"] = eagle3
            configs[f"eagle3 + sa K={k}"] = replace(eagle3, sa_config=SAEnhancerConfig())
    return configs


def measure(
    model: str, config: DecodingBaseConfig | None, prompts: list[AcceptancePrompt], count: int
) -> tuple[dict[str, Any], list[list[int]]]:
    """Returns totals by category, and the texts."""
    llm = LLM(model, config, max_batch_size=1, max_seq_len=2048)
    llm.executor.record_steps = True
    params, totals, texts = SamplingParams(max_tokens=count), defaultdict(Totals), []
    llm.generate([1, 2, 3], SamplingParams(max_tokens=3), cache_salt="warm-up")
    llm.reset_stats()
    for prompt in prompts:
        ids = llm.apply_chat_template(list(prompt.messages))
        request = llm.executor.enqueue(ids, params)
        llm.executor.step()
        started = time.perf_counter()
        llm.executor.run_until_done()
        totals[prompt.category].add(request, time.perf_counter() - started)
        totals["all"].add(request, time.perf_counter() - started)
        texts.append(request.output_token_ids)
    report = {category: total.summary() for category, total in totals.items()}
    looked_up = llm.stats().num_looked_up_drafts
    report["all"]["looked_up"] = looked_up / max(1, totals["all"].proposed)
    llm.shutdown()
    return report, texts


class Totals:
    """Sums over requests."""

    def __init__(self) -> None:
        self.tokens = self.steps = self.proposed = self.accepted = 0
        self.seconds = 0.0

    def add(self, request: Any, seconds: float) -> None:
        self.tokens += len(request.output_token_ids) - 1  # the first is the prompt's pass's
        self.steps += len(request.steps)
        self.proposed += sum(step.proposed for step in request.steps)
        self.accepted += sum(step.accepted for step in request.steps)
        self.seconds += seconds

    def summary(self) -> dict[str, float]:
        return {
            "per_step": self.tokens / max(1, self.steps),
            "drafts": self.proposed / max(1, self.steps),
            "rate": self.accepted / max(1, self.proposed),
            "tokens_per_second": self.tokens / self.seconds,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=224)
    parser.add_argument("--k", default="6,16,32", help="draft lengths, by commas")
    parser.add_argument("--only", default="", help="engines whose name begins so, by commas")
    parser.add_argument("--head", default="smollm2-135m-eagle3", help="EAGLE-3's; '' is none")
    parser.add_argument("--every", type=int, default=1, help="every n-th prompt alone")
    parser.add_argument("--chat", action="store_true", help="the built-in acceptance prompts")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    prompts = (load_prompts()[::5] if args.chat else agent_prompts())[:: args.every]
    report: dict[str, Any] = {}
    expected: list[list[int]] | None = None
    for name, config in settings([int(k) for k in args.k.split(",")], args.head).items():
        if args.only and not name.startswith(tuple(args.only.split(","))):
            continue
        report[name], texts = measure(args.model, config, prompts, args.max_tokens)
        expected = expected or texts
        same = sum(a == b for a, b in zip(texts, expected, strict=True))
        print(f"{name}: {same} of {len(texts)} texts as the first engine's", flush=True)
        for category, row in report[name].items():
            print(
                f"    {category:12} per step {row['per_step']:5.2f}  drafts {row['drafts']:5.2f}  "
                f"rate {row['rate']:4.2f}  tokens/s {row['tokens_per_second']:6.1f}"
                + (f"  looked up {row['looked_up']:4.2f}" if row.get("looked_up") else ""),
                flush=True,
            )
    if args.json:
        args.json.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
