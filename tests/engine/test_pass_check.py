"""`AttentionMetadata.check` accepts every pass of an engine, and names what a loop gets wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import config_of, cpu_engine, make_drafters
from oracle import random_prompts
from tiny import tiny_model_dir
from tiny_heads import mtp_model_dir

from trtspec import ConfigError, SamplingParams
from trtspec.metadata.attention import AttentionMetadata
from trtspec.workers.base import SpecWorkerBase


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[AttentionMetadata]:
    """Those of the target, each checked."""
    found: list[AttentionMetadata] = []
    verify = SpecWorkerBase.verify

    def checked(worker: SpecWorkerBase, *arguments: Any) -> Any:
        meta = arguments[4]
        if meta.packed is None:
            meta.check()
            found.append(meta)
        return verify(worker, *arguments)

    monkeypatch.setattr(SpecWorkerBase, "verify", checked)
    return found


@pytest.mark.parametrize("mode", ["none", "ngram", "eagle3", "mtp", "draft_target", "dflash"])
@pytest.mark.parametrize("chunk", [None, 20])
def test_an_engines_passes_are_right(
    tmp_path: Path, mode: str, chunk: int | None, passes: list[AttentionMetadata]
) -> None:
    """With preemption, blocks of the prefix cache, and requests that end at the maximum length."""
    target = mtp_model_dir(tmp_path, seed=1, num_mtp_layers=3)
    llm = cpu_engine(
        target, config_of(mode, 3, make_drafters(tmp_path)), chunk=chunk, pool=144, max_seq_len=48
    )
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    llm.generate(random_prompts(6) + random_prompts(3), params)
    assert any(meta.num_contexts for meta in passes)
    assert any(meta.num_generations and meta.num_contexts for meta in passes) or chunk is None
    assert len(passes) > 20


def test_windows(tmp_path: Path, passes: list[AttentionMetadata]) -> None:
    """Blocks that were given back lie behind the rows."""
    target = tiny_model_dir(tmp_path, "mistral", sliding_window=12, num_hidden_layers=6)
    llm = cpu_engine(target, None)
    llm.generate(random_prompts(3), SamplingParams(max_tokens=50, ignore_eos=True))
    assert len(passes) > 20


MISTAKES: dict[str, tuple[Callable[[AttentionMetadata], dict[str, Any]], str]] = {
    "lengths": (lambda m: {"kv_lens": m.kv_lens + 1}, r"kv_lens\[0\]=8: .* at 6, so it sees 7"),
    "bound": (lambda m: {"max_kv_len": 2}, r"max_kv_len=2 is below .* 7"),
    "positions": (
        lambda m: {"position_ids": m.position_ids + 1},
        r"position_ids\[0\]=1: by .* this row of request 0 is at 0",
    ),
    "shape": (lambda m: {"position_ids": m.position_ids[None]}, r"position_ids .*give torch.int64"),
    "dtype": (lambda m: {"kv_lens": m.kv_lens.long()}, r"kv_lens is torch.int64 \[1\]: give .*32"),
    "reserved": (
        lambda m: {"block_tables": (torch.ones_like(m.block_tables[0]),)},
        r"block_tables\[0\] has block 1 for request 0: hand out 2 …",
    ),
    "no tuple": (lambda m: {"block_tables": m.block_tables[0]}, r"block_tables: give a tuple of 1"),
    "short": (lambda m: {"block_tables": (m.block_tables[0][:, :0],)}, r"the rows need 1"),
    "slots": (
        lambda m: {"slot_mappings": (m.slot_mappings[0] + 1,)},
        r"slot_mappings\[0\]\[0\]=17: by its block table and position it is 16",
    ),
    "limit": (lambda m: {"max_seq_len": 4}, r"position_ids\[4\]=4 with max_seq_len=4: rows from"),
    "list": (lambda m: {"context_lens": [7]}, r"context_lens=\[7\]: give a tuple of ints"),
    "starts": (lambda m: {"context_starts": (0, 0)}, r"context_starts=\(0, 0\) has 2 for 1"),
    "no bound": (lambda m: {"max_kv_len": None}, "max_kv_len=None: give an int"),
    "none": (lambda m: {"slot_mappings": ()}, r"slot_mappings: give a tuple of 1"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_named(tmp_path: Path, passes: list[AttentionMetadata], name: str) -> None:
    llm = cpu_engine(tiny_model_dir(tmp_path), None)
    llm.generate([5, 9, 33, 7, 60, 2, 41], SamplingParams(max_tokens=1, ignore_eos=True))
    change, message = MISTAKES[name]
    with pytest.raises(ConfigError, match=message):
        replace(passes[0], **change(passes[0])).check()


def test_blocks_of_two_requests(tmp_path: Path, passes: list[AttentionMetadata]) -> None:
    llm = cpu_engine(tiny_model_dir(tmp_path), None)
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    llm.generate([[5, 9, 33], [7, 60, 2]], params)
    meta = next(meta for meta in passes if meta.num_generations == 2)
    tables, slots = meta.block_tables[0].clone(), meta.slot_mappings[0].clone()
    tables[1], slots[1] = tables[0], slots[0]
    with pytest.raises(ConfigError, match=r"for requests 0 and 1: block \d+ is in both tables"):
        replace(meta, block_tables=(tables,), slot_mappings=(slots,)).check()
    replace(meta, kv_groups=(), block_tables=(), slot_mappings=()).check()
