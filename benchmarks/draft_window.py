r"""Tokens a step of the package's heads by context and by `draft_window`.

    python benchmarks/draft_window.py --head eagle3 --contexts 512,4096,7600 --prompts 6

Acceptance prompts of the package, after turns that make them as long as asked. Each is answered
greedily once to warm the prefix cache, and then with each window: the target computes its prompt
once. Windows are set on the layers that are loaded. 0 is none.
"""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from trtspec import (
    LLM,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.data.acceptance_prompts import load_prompts
from trtspec.models.decoder import Attention
from trtspec.report.contexts import pad_prompt, padding_texts

HEADS: dict[str, Any] = {
    "eagle3": EagleDecodingConfig(max_draft_len=4, speculative_model="smollm2-135m-eagle3"),
    "dspark": DSparkDecodingConfig(max_draft_len=7, speculative_model="smollm2-135m-dspark"),
    "mtp": MTPDecodingConfig(num_nextn_predict_layers=3, speculative_model="smollm2-135m-mtp"),
}


def main() -> None:
    args = _arguments()
    windows = [int(n) for n in args.windows.split(",")]
    llm = LLM(
        "smollm2-135m", HEADS[args.head], device=args.device, dtype=args.dtype, max_batch_size=1,
        max_seq_len=8192, max_num_tokens=1024, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=20_000), cuda_graph_config=None,
    )  # fmt: skip
    head: Any = llm.executor.runner.step.draft_model
    layers = [module for module in head.modules() if isinstance(module, Attention)]
    prompts = load_prompts()
    chosen = prompts[:: len(prompts) // args.prompts][: args.prompts]
    params = SamplingParams(max_tokens=args.max_tokens)
    names = " | ".join(f"window {window}" if window else "none" for window in windows)
    print(f"| context | {names} |\n|{'---|' * (len(windows) + 1)}", flush=True)
    for context in map(int, args.contexts.split(",")):
        tokens, steps = Counter[int](), Counter[int]()
        for number, prompt in enumerate(chosen):
            texts = padding_texts(prompts, prompt, number)
            ids = pad_prompt(prompt, texts, context, lambda messages: _encode(llm, messages))
            llm.generate(ids, params)
            for window in windows:
                for layer in layers:
                    layer.window = window or None
                output = llm.generate(ids, params)
                tokens[window] += len(output.outputs[0].token_ids) - 1
                steps[window] += output.spec_stats.num_steps
        found = " | ".join(f"{tokens[window] / steps[window]:.2f}" for window in windows)
        print(f"| {context} | {found} |", flush=True)


def _encode(llm: LLM, messages: list[dict[str, str]]) -> list[int]:
    ids: list[int] = llm.tokenizer.apply_chat_template(messages, add_generation_prompt=True)[
        "input_ids"
    ]
    return ids


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--head", default="eagle3", choices=HEADS)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", default="512,2048,4096,7600")
    parser.add_argument("--windows", default="0,512,768,1024,2048")
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--max-tokens", type=int, default=96)
    return parser.parse_args()


if __name__ == "__main__":
    main()
