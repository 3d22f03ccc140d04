"""Blocks that others want and a request does not need go back, but for its next step's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from matrix import config_of, cpu_engine, make_drafters
from tiny import tiny_model_dir

from trtspec import KvCacheConfig, SamplingParams
from trtspec.executor.scheduler import Scheduler
from trtspec.state.kv_cache import KVCacheManager

PROMPTS = [[3, 5, 7 + i] for i in range(3)]


def test_no_block_is_given_back_and_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts of a random head are refused, so steps reserve more than they need. Other requests
    seem to want blocks before each step."""
    given_back: dict[int, int] = {}
    asked, taken_again, trimmed = [], [], []
    reserve, trim = KVCacheManager.reserve, KVCacheManager.trim

    def count(cache: KVCacheManager, request_id: int) -> int:
        return sum(len(table) for table in cache._tables.get(request_id, []))

    def reserving(self: KVCacheManager, request_id: int, num_tokens: int) -> bool:
        before = count(self, request_id)
        is_reserved = reserve(self, request_id, num_tokens)
        if given_back.pop(request_id, 0) and count(self, request_id) > before:
            taken_again.append(request_id)
        return is_reserved

    def trimming(self: KVCacheManager, request_id: int, num_tokens: int) -> None:
        before = count(self, request_id)
        trim(self, request_id, num_tokens)
        given_back[request_id] = before - count(self, request_id)
        trimmed.append(given_back[request_id])

    schedule = Scheduler.schedule

    def scheduling(self: Scheduler, draft_len: Any) -> Any:
        self._trim_all()
        asked.append(len(self.running))
        return schedule(self, draft_len)

    monkeypatch.setattr(Scheduler, "schedule", scheduling)
    monkeypatch.setattr(KVCacheManager, "reserve", reserving)
    monkeypatch.setattr(KVCacheManager, "trim", trimming)
    config = config_of("eagle3", 4, make_drafters(tmp_path / "drafters"))
    llm = cpu_engine(
        tiny_model_dir(tmp_path, num_hidden_layers=8), config, max_seq_len=96,
        kv_cache_config=KvCacheConfig(tokens_per_block=4, enable_block_reuse=False),
    )  # fmt: skip
    llm.generate(PROMPTS, SamplingParams(max_tokens=60, ignore_eos=True))
    assert sum(asked) > 60 and trimmed and not taken_again
    cache = llm.executor.kv_cache
    assert cache.num_free_blocks == cache.num_blocks - 2
