"""Tokens per second on CPU, batch 1: transformers' generate, our plain decoding, our NGRAM.

Same process, same dtype, same prompts, interleaved; the median of the repeats per prompt. Whole
requests are timed, prefill included, because that is what transformers' generate does.

    python benchmarks/cpu_vs_transformers.py [--dtype bfloat16] [--max-tokens 96] [--repeat 3]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from trtspec import LLM, NGramDecodingConfig, SamplingParams
from trtspec.data.prompts import PROMPT_SETS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--max-draft-len", type=int, default=6)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()

    engines = {
        name: LLM(args.model, config, device="cpu", dtype=args.dtype, max_seq_len=2048)
        for name, config in {
            "plain": None,
            "ngram": NGramDecodingConfig(max_draft_len=args.max_draft_len),
        }.items()
    }
    reference = AutoModelForCausalLM.from_pretrained(
        engines["plain"].model_dir, dtype=getattr(torch, args.dtype), trust_remote_code=False
    ).eval()
    reference.generation_config.eos_token_id = None  # all run to max_tokens
    params = SamplingParams(max_tokens=args.max_tokens, ignore_eos=True)

    def transformers_tokens(ids: list[int]) -> list[int]:
        prompt = torch.tensor([ids])
        with torch.inference_mode():
            out = reference.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),  # else it is guessed from the pad token
                max_new_tokens=args.max_tokens,
                do_sample=False,
            )
        return out[0, len(ids) :].tolist()

    runners: dict[str, Callable[[list[int]], list[int]]] = {
        "transformers": transformers_tokens,
        **{
            name: lambda ids, llm=llm: llm.generate(ids, params).outputs[0].token_ids  # type: ignore[misc]
            for name, llm in engines.items()
        },
    }
    rows = []
    for category, prompts in PROMPT_SETS.items():
        for number, prompt in enumerate(prompts):
            ids = engines["plain"].apply_chat_template([{"role": "user", "content": prompt}])
            seconds: dict[str, list[float]] = {name: [] for name in runners}
            tokens = {}
            engines["ngram"].reset_stats()
            for turn in range(args.repeat + 1):  # the first is a warm-up
                for name, run in runners.items():
                    if name in engines:
                        engines[name].reset_prefix_cache()
                    started = time.perf_counter()
                    tokens[name] = run(ids)
                    if turn:
                        seconds[name].append(time.perf_counter() - started)
            rate = {n: args.max_tokens / statistics.median(s) for n, s in seconds.items()}
            rows.append(
                {
                    "category": category,
                    "prompt": number,
                    "prompt_tokens": len(ids),
                    **rate,
                    "acceptance_length": engines["ngram"].stats().acceptance_length,
                    "ngram_identical": tokens["ngram"] == tokens["plain"],
                    "same_as_transformers": tokens["plain"] == tokens["transformers"],
                }
            )
            if not args.json:
                row = rows[-1]
                print(
                    f"{category:8} {number}  transformers {rate['transformers']:6.1f}  "
                    f"plain {rate['plain']:6.1f} ({rate['plain'] / rate['transformers']:.2f}x)  "
                    f"ngram {rate['ngram']:6.1f} ({rate['ngram'] / rate['plain']:.2f}x plain)  "
                    f"AL {row['acceptance_length']:.2f}  identical {row['ngram_identical']}  "
                    f"= transformers {row['same_as_transformers']}",
                    flush=True,
                )
    summary = {
        category: {
            name: statistics.median(r[name] for r in rows if r["category"] == category)  # type: ignore[type-var]
            for name in runners
        }
        for category in PROMPT_SETS
    }
    if args.json:
        print(json.dumps({"dtype": args.dtype, "rows": rows, "summary": summary}))
        return
    for category, medians in summary.items():
        print(category, {name: round(value, 1) for name, value in medians.items()})


if __name__ == "__main__":
    main()
