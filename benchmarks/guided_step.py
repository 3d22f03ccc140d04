"""What grammars add to a step: all requests write JSON of a schema, or none does.

    PYTHONPATH=. python benchmarks/guided_step.py --preset llama-3.1-8b --k 3 --batch 1,32
    PYTHONPATH=. python benchmarks/guided_step.py --alone       # without a model, on any machine

Weights are random and acceptance is forced, so grammars skip tokens that they do not allow. For
plain decoding and for a drafter, and for each batch size, a line of JSON says:

    free, free_again    ms a step without grammars
    masked              with masks of the target alone
    first_draft_masked, drafts_masked   with the first draft's too, and with all
    added               of each of these, ms more than without
    host_us             the host's part of a step with all drafts masked, in microseconds:
        verify          following what was accepted, and the masks of the target's rows
        wait            for the device, before each draft
        masks           of each draft
        launch          of all graphs
        results         their copies
    alone_us            the same without a device, where the grammar is in a text of JSON
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import string
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, closing, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from gpu_step import _engine
from random_models import PRESETS, Model
from step_timing import STEPS_PER_BLOCK, WARM_UP_STEPS, SteadyBatch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from trtspec import LLM, GuidedDecodingParams
from trtspec.executor.guided_batch import GuidedBatch
from trtspec.executor.guided_masks import DraftMasks, GuidedMasks
from trtspec.executor.request import ScheduledBatch
from trtspec.executor.results import StepReader
from trtspec.guided.compiler import GrammarCompiler
from trtspec.metadata.guided import DraftPoint, VerifyPoint

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


def alone_us(compiler: GrammarCompiler, batch: int, k: int) -> dict[str, float]:
    """Returns microseconds of the host's work for a step of `batch` requests, without a device."""
    params = GuidedDecodingParams(json=SCHEMA)
    grammars = [compiler.compile(params, [1], []).future.result() for _ in range(batch)]
    to_ids = compiler.tokenizer.convert_tokens_to_ids
    tokens = to_ids(list('{"name": "ab'))
    accepted = to_ids(list("abcdefghijklmnopqrstuvwxyz"))[: k + 1]
    for grammar in grammars:
        grammar.follow(tokens)
    requests: list[Any] = [
        SimpleNamespace(request_id=i, grammar=grammar, next_drafts=accepted[:k])
        for i, grammar in enumerate(grammars)
    ]
    masks = GuidedMasks.allocate(batch, k, compiler.vocab_size, torch.device("cpu"))
    there = masks.draft.handed_over
    points = [VerifyPoint(), *(DraftPoint(depth) for depth in range(k))]
    times: list[list[float]] = [[] for _ in points]
    for _ in range(100):
        step = GuidedBatch(
            batch=ScheduledBatch([], requests),
            num_drafts=k,
            masks=masks,
            read_before=lambda: None,
            waiting=nullcontext,
        )
        for point, values in zip(points, times, strict=True):
            if isinstance(point, DraftPoint):  # as the device leaves them
                there.tokens[:] = torch.tensor([*accepted[:k], -1][: k + 1], dtype=torch.int32)
                there.lens[:] = max(1, k)
                there.drafts[:] = accepted[point.depth]
            started = time.perf_counter()
            step.host_part(point)
            values.append((time.perf_counter() - started) * 1e6)
        step.read([accepted] * batch, [max(1, k)] * batch, [accepted[:k]] * batch)
    names = ["verify", *(f"draft {depth}" for depth in range(k))]
    return {name: round(median(v), 1) for name, v in zip(names, times, strict=True)}


class HostTimes:
    """Sums what the host's parts take, while it is entered."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._patches = ExitStack()

    def __enter__(self) -> HostTimes:
        for owner, method, name in (
            (GuidedBatch, "_write_verify_masks", "verify"),
            (GuidedBatch, "_write_draft_masks", "masks"),
            (DraftMasks, "wait", "wait"),
            (torch.cuda.CUDAGraph, "replay", "launch"),
            (StepReader, "_launch_rest", "results"),
        ):
            self._watch(owner, method, name)
        return self

    def __exit__(self, *error: object) -> None:
        self._patches.close()

    def _watch(self, owner: Any, method: str, name: str) -> None:
        original = getattr(owner, method)

        def timed(this: Any, *args: Any) -> Any:
            depth = f" {args[0]}" if name == "masks" else ""
            self._depth = args[0] if name == "masks" else getattr(self, "_depth", 0)
            started = time.perf_counter()
            result = original(this, *args)
            seconds = time.perf_counter() - started
            if name == "wait":  # inside of masks
                self.seconds[f"masks {self._depth}"] -= seconds
                depth = f" {self._depth}"
            self.seconds[name + depth] += seconds
            return result

        self._patches.enter_context(patch.object(owner, method, timed))

    def us(self, num_steps: int) -> dict[str, float]:
        return {name: round(s / num_steps * 1e6, 1) for name, s in sorted(self.seconds.items())}


def host_us(llm: LLM, batch: int, args: argparse.Namespace, guided: dict[str, Any]) -> Any:
    """Returns microseconds a step of the host's parts in the engine."""
    with closing(SteadyBatch(llm.executor, batch, args.context, guided)) as requests:
        requests.wall_clock(1, 1 + min(args.accept, args.k))
        with HostTimes() as times:
            requests.wall_clock(2, 1 + min(args.accept, args.k))
        return times.us(2 * STEPS_PER_BLOCK + WARM_UP_STEPS)


def measure(llm: LLM, mode: str, batch: int, k: int, args: argparse.Namespace) -> dict[str, Any]:
    """Returns a line of the report."""
    executor, row = llm.executor, {"mode": mode, "batch": batch, "k": k}
    given = {"guided_decoding": GuidedDecodingParams(json=SCHEMA)}
    variants: list[tuple[str, int, dict[str, Any]]] = [("free", 0, {}), ("masked", 0, given)]
    if k:
        variants += [("first_draft_masked", 1, given), ("drafts_masked", k, given)]
    for name, count, params in (*variants, ("free_again", 0, {})):
        executor.runner.masks.num_masked_drafts = count
        if executor.graphs is not None:
            executor.graphs._graphs.clear()
        wall = steady(llm, batch, args, params)
        row[name], row["acceptance_length"] = round(wall.ms, 3), wall.acceptance_length
    free = (row["free"] + row["free_again"]) / 2
    row["added"] = {name: round(row[name] - free, 3) for name, _, _ in variants[1:]}
    executor.runner.masks.num_masked_drafts = k
    if executor.graphs is not None:
        executor.graphs._graphs.clear()
    row["host_us"] = host_us(llm, batch, args, given)
    row["alone_us"] = alone_us(executor.guide.compiler, batch, k)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--preset", default="llama-3.1-8b", choices=list(PRESETS))
    parser.add_argument("--modes", default="plain,eagle3_one_model")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--batch", default="1,32")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--accept", type=float, default=2.0)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--alone", action="store_true", help="measure the host's work alone")
    parser.add_argument("--json-file", type=Path)
    args = parser.parse_args()
    sizes = [int(size) for size in args.batch.split(",")]
    if args.alone:
        vocab_size = PRESETS[args.preset]["vocab_size"]
        compiler = GrammarCompiler(made_up_tokenizer(vocab_size), vocab_size, [1])
        for batch in sizes:
            print(json.dumps({"batch": batch, "alone_us": alone_us(compiler, batch, args.k)}))
        return
    steps = args.blocks * STEPS_PER_BLOCK + WARM_UP_STEPS + max(sizes) + 40
    longest = -(-(args.context + steps * (args.k + 1)) // 32) * 32
    model = Model(PRESETS[args.preset], longest, where=args.preset)
    args.batch, args.attn_backend, args.autotune = sizes, "auto", True
    args.quant, args.kv_cache_dtype = None, "auto"
    rows = []
    for mode in args.modes.split(","):
        k = 0 if mode == "plain" else args.k
        with (
            tempfile.TemporaryDirectory() as root,
            _engine(Path(root), model, mode, k, args, longest) as llm,
        ):
            vocab_size = llm.executor.target.config.vocab_size
            llm.executor.set_tokenizer(made_up_tokenizer(vocab_size))
            for batch in sizes:
                rows.append(measure(llm, mode, batch, k, args))
                print(json.dumps(rows[-1]), flush=True)
        del llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    if args.json_file:
        args.json_file.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
