"""What tests run through: every mode with its config, engines on CPU, and sets that cover pairs."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from oracle import VOCAB, Oracle, Scripted
from tiny import tiny_model_dir
from tiny_dflash import dflash_dir
from tiny_heads import eagle3_dir, p_eagle_dir, pard_dir

from trtspec import (
    LLM,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
    UserProvidedDecodingConfig,
)
from trtspec.config import DecodingBaseConfig

# -- modes -------------------------------------------------------------------------------------
EAGLE3: dict[str, dict[str, bool]] = {
    "eagle3": {},
    "eagle3_two_engine": {"eagle3_one_model": False},
}
MTP: dict[str, dict[str, bool]] = {
    "mtp": {"use_mtp_vanilla": True},
    "mtp_eagle": {},
    "mtp_eagle_two_engine": {"mtp_eagle_one_model": False},
}
BLOCKS: dict[str, type[DFlashDecodingConfig]] = {
    "dflash": DFlashDecodingConfig,
    "dflash2": DFlashDecodingConfig,
    "dspark": DSparkDecodingConfig,
}
MASKED = ["p_eagle", "pard", *BLOCKS]
"""Modes that draft from mask tokens in one pass."""
NETWORKS = ["draft_target", *EAGLE3, *MTP, *MASKED]
MODES = ["none", "ngram", "sa", "user_provided", *NETWORKS]


@dataclass(frozen=True)
class Drafters:
    """What the modes draft with; a test gives what its modes need."""

    draft: Path | None = None
    head: Path | None = None  # of EAGLE-3
    masked_head: Path | None = None
    masked_draft: Path | None = None
    block_head: Path | None = None  # of DFlash
    path_head: Path | None = None  # of DFlash2
    markov_head: Path | None = None  # of DSpark
    layers: Sequence[int] = (0, 1, 2)  # of the target, that heads read
    oracle: Oracle | None = None  # whose texts a drafter on the host proposes


def make_drafters(folder: Path, oracle: Oracle | None = None) -> Drafters:
    """Random drafters of every kind under `folder`."""
    return Drafters(
        draft=tiny_model_dir(folder, seed=2), head=eagle3_dir(folder),
        masked_head=p_eagle_dir(folder), masked_draft=pard_dir(folder),
        block_head=dflash_dir(folder), path_head=dflash_dir(folder, path={}, reads_next=True),
        markov_head=dflash_dir(folder, markov="gated", reads_next=True, confidence="markov"),
        oracle=oracle,
    )  # fmt: skip


def config_of(mode: str, k: int, drafters: Drafters, **fields: Any) -> DecodingBaseConfig | None:
    """The config of a mode that drafts `k` tokens, with `fields` on top."""
    if mode == "none":
        return None
    if mode == "ngram":
        return NGramDecodingConfig(max_draft_len=k, min_matching_ngram_size=1, **fields)
    if mode == "sa":
        return SADecodingConfig(
            max_draft_len=k, min_token_prob=0.0, global_pool_tokens=1024, **fields
        )
    if mode == "user_provided":
        assert drafters.oracle is not None
        return UserProvidedDecodingConfig(
            max_draft_len=k, drafter=Scripted(drafters.oracle), **fields
        )
    if mode in MTP:
        return MTPDecodingConfig(num_nextn_predict_layers=k, **MTP[mode], **fields)
    if mode in ("draft_target", "pard"):
        model = drafters.draft if mode == "draft_target" else drafters.masked_draft
        return DraftTargetDecodingConfig(max_draft_len=k, speculative_model=model, **fields)
    if mode in BLOCKS:
        heads = {"dflash": drafters.block_head, "dflash2": drafters.path_head}
        return BLOCKS[mode](
            max_draft_len=k,
            speculative_model=heads.get(mode, drafters.markov_head),
            target_layer_ids=list(drafters.layers), **fields,
        )  # fmt: skip
    head = drafters.head if mode in EAGLE3 else drafters.masked_head
    return EagleDecodingConfig(
        max_draft_len=k, speculative_model=head, eagle3_layers_to_capture=list(drafters.layers),
        **EAGLE3.get(mode, {}), **fields,
    )  # fmt: skip


def cpu_engine(
    target: Path, config: DecodingBaseConfig | None, *, chunk: int | None = None,
    overlap: bool = True, pool: int | None = None, page: int = 8, **options: Any,
) -> LLM:  # fmt: skip
    """An engine in float32 on CPU.

    `chunk` tokens of prompts and drafts share a step; None leaves prompts whole. `pool` tokens fit
    into the cache, in blocks of `page`; None leaves room for all.
    """
    given: dict[str, Any] = {"max_batch_size": 4, "max_seq_len": 96} | options
    given.setdefault("kv_cache_config", KvCacheConfig(max_tokens=pool, tokens_per_block=page))
    given.setdefault("max_num_tokens", chunk or max(given["max_seq_len"], 64))
    return LLM(
        target, config, device="cpu", dtype="float32", enable_chunked_prefill=chunk is not None,
        disable_overlap_scheduler=not overlap, **given,
    )  # fmt: skip


def check_greedy(path: Path, oracle: Oracle, config: Any, **options: Any) -> None:
    """Five random prompts' texts are transformers'.

    Args:
        options: of `cpu_engine`. A `pool` must be so small that requests are preempted.
    """
    llm = cpu_engine(path, config, **options, max_num_tokens=options["chunk"] or 256)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))] for _ in range(5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=20, ignore_eos=True))
    expected = oracle.extend_all(prompts, 20)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert options["pool"] is None or llm.executor.stats().num_preemptions > 0
    llm.executor.kv_cache.check_integrity()


# -- parameters --------------------------------------------------------------------------------
def full() -> bool:
    """Whether whole products run: `pytest --full`, `make test-all`."""
    return os.environ.get("TRTSPEC_FULL_TESTS") == "1"


def thinned(values: Sequence[Any], every: int) -> list[Any]:
    """One value of `every`, or all of them when whole products run."""
    return list(values if full() else values[::every])


def pairwise(**axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Parameter sets in which every pair of values of two axes occurs; all sets when `full`.

    The same axes give the same sets. Each next set is the one that adds most pairs, the first of
    the product where several do.
    """
    product = list(itertools.product(*(range(len(values)) for values in axes.values())))
    if not full():
        product = _cover(product)
    columns = list(axes.values())
    return [tuple(column[i] for column, i in zip(columns, row, strict=True)) for row in product]


def _cover(product: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    pairs = {
        row: frozenset(itertools.combinations(enumerate(row), min(2, len(row)))) for row in product
    }
    missing, chosen = set().union(*pairs.values()), []
    while missing:
        row = max(product, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[row]
        chosen.append(row)
    return sorted(chosen)


def covering(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """Parametrises a test by `pairwise(**axes)`. An axis "a,b" has tuples: of a and of b."""
    return _parametrize(axes, pairwise(**axes))


def spread(**axes: Sequence[Any]) -> pytest.MarkDecorator:
    """As `covering`, but each value occurs at least once, whatever it is beside."""
    count, columns = max(map(len, axes.values())), list(axes.values())
    sets = [tuple(column[i % len(column)] for column in columns) for i in range(count)]
    return _parametrize(axes, list(itertools.product(*columns)) if full() else sets)


def _parametrize(axes: dict[str, Sequence[Any]], sets: list[tuple[Any, ...]]) -> Any:
    names = [axis.split(",") for axis in axes]
    flat = []
    for row in sets:
        parts = [value if len(n) > 1 else (value,) for n, value in zip(names, row, strict=True)]
        flat.append(tuple(itertools.chain(*parts)))
    return pytest.mark.parametrize(",".join(axes), [f[0] if len(f) == 1 else f for f in flat])
