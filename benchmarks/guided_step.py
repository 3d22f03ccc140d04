"""What grammars add to a step: all requests write JSON of a schema, or none does.

    PYTHONPATH=. python benchmarks/guided_step.py --preset llama-3.1-8b --k 3 --batch 1,32

Weights are random and acceptance is forced, so grammars skip tokens that they do not allow. For
each batch size it prints ms a step without grammars, with masks of the target alone, with the first
draft masked too, and with all; then the host's part alone, inside of a string, microseconds a step:
masks of all rows, and following what was accepted.
"""

from __future__ import annotations

import argparse
import json
import random
import string
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from gpu_step import _engine
from random_models import PRESETS, Model
from step_timing import STEPS_PER_BLOCK, WARM_UP_STEPS, SteadyBatch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from trtspec import LLM, GuidedDecodingParams
from trtspec.guided.compiler import GrammarCompiler

SCHEMA = {
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string"},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "next": {"$ref": "#/$defs/person"},
            },
            "required": ["name", "age", "next"],
        }
    },
    "$ref": "#/$defs/person",
}
"""It never ends, so no request does."""


def made_up_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of characters and random words."""
    rng = random.Random(0)
    texts = dict.fromkeys(["<unk>", "</s>", *string.printable])
    while len(texts) < vocab_size:
        word = "".join(rng.choices(string.ascii_lowercase, k=rng.randint(2, 9)))
        before, after = " " * (rng.random() < 0.5), rng.choice('",:}0') * (rng.random() < 0.005)
        texts[before + word + after] = None
    tokenizer = Tokenizer(WordLevel({t: i for i, t in enumerate(texts)}, unk_token="<unk>"))
    tokenizer.decoder = Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", eos_token="</s>")


def steady(llm: LLM, batch: int, args: argparse.Namespace, guided: dict[str, Any]) -> Any:
    with closing(SteadyBatch(llm.executor, batch, args.context, guided)) as batch_of_requests:
        return batch_of_requests.wall_clock(args.blocks, 1 + min(args.accept, args.k))


def host_part(compiler: GrammarCompiler, batch: int, k: int) -> dict[str, float]:
    """Returns microseconds of the host's work for a step of `batch` requests."""
    params = GuidedDecodingParams(json=SCHEMA)
    grammars = [compiler.compile(params, [1], []).future.result() for _ in range(batch)]
    tokens = compiler.tokenizer.convert_tokens_to_ids(list('{"name": "ab'))
    for grammar in grammars:
        grammar.follow(tokens)
    drafts = compiler.tokenizer.convert_tokens_to_ids(list("abcdefghijklmnop"))[:k]
    masks = np.zeros((batch * (k + 1), compiler.num_words), dtype=np.int32)
    times: dict[str, list[float]] = {"fill": [], "follow": []}
    for _ in range(50):
        started = time.perf_counter()
        for row, grammar in enumerate(grammars):
            grammar.fill(masks, row * (k + 1), drafts)
        times["fill"].append(time.perf_counter() - started)
        started = time.perf_counter()
        for grammar in grammars:
            grammar.follow(drafts)
        times["follow"].append(time.perf_counter() - started)
    return {name: median(values) * 1e6 for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama-3.1-8b", choices=list(PRESETS))
    parser.add_argument("--mode", default="eagle3_one_model")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--accept", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json-file", type=Path)
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch.split(",")]
    steps = args.blocks * STEPS_PER_BLOCK + WARM_UP_STEPS + max(sizes) + 40
    longest = -(-(args.context + steps * (args.k + 1)) // 32) * 32
    model = Model(PRESETS[args.preset], longest, where=args.preset)
    args.batch, args.attn_backend, args.autotune = sizes, "auto", True
    rows = []
    given = {"guided_decoding": GuidedDecodingParams(json=SCHEMA)}
    variants = [
        ("free", 0, {}),
        ("masked", 0, given),
        ("first_draft_masked", 1, given),
        ("drafts_masked", args.k, given),
        ("free_again", 0, {}),
    ]
    with (
        tempfile.TemporaryDirectory() as root,
        _engine(Path(root), model, args.mode, args.k, args, longest) as llm,
    ):
        executor = llm.executor
        executor.set_tokenizer(made_up_tokenizer(executor.target.config.vocab_size))
        for batch in sizes:
            row: dict[str, Any] = {"batch": batch, "k": args.k}
            for name, count, params in variants:
                executor.runner.masks.num_masked_drafts = count
                if executor.graphs is not None:
                    executor.graphs._graphs.clear()
                wall = steady(llm, batch, args, params)
                row[name], row["acceptance_length"] = wall.ms, wall.acceptance_length
            row["host_us"] = host_part(executor.guide.compiler, batch, args.k)
            rows.append(row)
            print(json.dumps(row), flush=True)
    if args.json_file:
        args.json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
