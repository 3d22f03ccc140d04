"""Whether SmolLM2 says the same, in distribution, with and without sampled speculation.

    python benchmarks/sampled_distribution.py [--samples 800] [--temperatures 0.7,1]

Draws short answers to one prompt with other seeds each, plainly and by every rule that draws anew,
and compares the second token, the third and the pair by a chi-square test of two samples. (The
first comes from the prompt's pass, without drafts.) fp32 on the CPU; p below 0.001 is a fault.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from trtspec import LLM, EagleDecodingConfig, SamplingParams

QUESTION = "Name one animal that lives in the sea, in one short sentence."
HEAD, K, TOKENS = "smollm2-135m-eagle3", 3, 4
PARTS = {"second": slice(1, 2), "third": slice(2, 3), "pair": slice(1, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=800)
    parser.add_argument("--temperatures", default="0.7,1")
    args = parser.parse_args()
    for temperature in (float(part) for part in args.temperatures.split(",")):
        plain, _ = draw(None, temperature, range(args.samples))
        for rule in ("rejection", "block"):
            texts, length = draw(rule, temperature, range(10_000, 10_000 + args.samples))
            print(f"T={temperature:g} {rule}: {length:.2f} tokens a step", end="")
            for name, part in (
                ("second", slice(1, 2)),
                ("third", slice(2, 3)),
                ("pair", slice(1, 3)),
            ):
                p, cells = two_samples([t[part] for t in plain], [t[part] for t in texts])
                print(f", {name} p = {p:.3f} ({cells} cells)", end="")
            print(flush=True)


def draw(rule: str | None, temperature: float, seeds: range) -> tuple[list[tuple[int, ...]], float]:
    """Texts, and tokens a step."""
    config = None
    if rule is not None:
        config = EagleDecodingConfig(max_draft_len=K, speculative_model=HEAD, acceptance=rule)
    llm = LLM(
        "smollm2-135m", config, device="cpu", dtype="float32", max_batch_size=80, max_seq_len=128
    )
    prompt = llm.apply_chat_template([{"role": "user", "content": QUESTION}])
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
        for seed in seeds
    ]
    outputs = llm.generate([prompt] * len(params), params)
    return [tuple(o.outputs[0].token_ids) for o in outputs], llm.stats().acceptance_length


def two_samples(left: Sequence[Any], right: Sequence[Any]) -> tuple[float, int]:
    """(p of one distribution, cells); what was seen fewer than ten times is one cell."""
    ours, theirs = Counter(left), Counter(right)
    common = [x for x in ours.keys() | theirs.keys() if ours[x] + theirs[x] >= 10]
    rows = [[ours[x], theirs[x]] for x in common]
    rows.append([len(left) - sum(r[0] for r in rows), len(right) - sum(r[1] for r in rows)])
    table = torch.tensor([row for row in rows if sum(row)], dtype=torch.float64)
    wanted = table.sum(1, keepdim=True) * table.sum(0, keepdim=True) / table.sum()
    chi_square = ((table - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((len(table) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi_square / 2)), len(table)


if __name__ == "__main__":
    main()
