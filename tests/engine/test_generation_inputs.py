"""What the graphs of generations read from the host, on a CPU: rows of slots and block tables."""

from __future__ import annotations

import random

import torch

from trtspec import SamplingParams
from trtspec.executor.cuda_graphs.generation_inputs import GenerationInputs
from trtspec.executor.request import Request
from trtspec.metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS
from trtspec.state.kv_cache import KVCacheManager, KVGroupSpec

SIZE, SCRATCH, MOST, PAGE = 6, 9, 40, 4


def _cache() -> KVCacheManager:
    specs = [KVGroupSpec(1, 1, 8, torch.float32), KVGroupSpec(1, 1, 8, torch.float32)]
    return KVCacheManager(specs, 200, PAGE, torch.device("cpu"))


def _request(number: int, slot: int) -> Request:
    request = Request(number, [1], SamplingParams(), seed=0, max_total_tokens=MOST)
    request.slot = slot
    return request


def _check(inputs: GenerationInputs, requests: list[Request], count: int) -> None:
    """The device's rows are these requests', and inert ones behind them."""
    slots = [r.slot for r in requests] + [SCRATCH] * (count - len(requests))
    assert inputs.slots(count).tolist() == slots
    tables = inputs.tables(count)
    for group, table in enumerate(tables):
        for row, request in zip(table.tolist(), requests, strict=False):
            blocks = list(inputs.kv_cache.table_of(request.request_id)[group])
            assert row == blocks + [NULL_BLOCK] * (len(row) - len(blocks))
        assert not (table[len(requests) :] != NULL_BLOCK).any()


def test_the_device_has_the_rows_of_each_step() -> None:
    """Requests come, go, grow, shrink and change places, in batches of any size."""
    rng, cache = random.Random(0), _cache()
    inputs = GenerationInputs(SIZE, SCRATCH, MOST, cache, torch.device("cpu"))
    _check(inputs, [], SIZE)
    running: list[Request] = []
    sent = 0
    for number in range(400):
        if len(running) < SIZE and rng.random() < 0.3:
            running.append(_request(number, rng.randrange(SCRATCH)))
            assert cache.reserve(number, rng.randint(1, MOST))
        for request in list(running):
            if rng.random() < 0.1:
                cache.free(request.request_id)
                running.remove(request)
            elif rng.random() < 0.3:
                assert cache.reserve(request.request_id, rng.randint(1, MOST))
            elif rng.random() < 0.3:
                cache.trim(request.request_id, rng.randint(1, MOST))
        if rng.random() < 0.1:
            rng.shuffle(running)
        if rng.random() < 0.05:
            inputs.forget()
        elif rng.random() < 0.05:
            inputs.clear()
        count = rng.randint(max(1, len(running)), SIZE)
        rows = inputs.rows_to_send(running, count)
        if rows is not None:
            inputs.send(rows)
            sent += 1
        _check(inputs, running, count)
        assert inputs.rows_to_send(running, count) is None, "the device has them"
    assert 100 < sent < 400


def test_forgotten_rows_are_sent_again() -> None:
    cache = _cache()
    inputs = GenerationInputs(SIZE, SCRATCH, MOST, cache, torch.device("cpu"))
    request = _request(1, 3)
    assert cache.reserve(1, 10)
    rows = inputs.rows_to_send([request], 2)
    assert rows is not None
    inputs.send(rows)
    inputs.sent.fill_(77)  # an exception came, and nobody knows what the device has
    inputs.forget()
    rows = inputs.rows_to_send([request], 2)
    assert rows is not None
    inputs.send(rows)
    _check(inputs, [request], 2)


def test_rows_that_are_timed_read_blocks_of_their_own() -> None:
    """As far as there are enough; afterwards all are inert again."""
    cache = _cache()
    inputs = GenerationInputs(SIZE, SCRATCH, MOST, cache, torch.device("cpu"))
    spread = inputs.spread(4, 2 * PAGE + 1)
    for table, blocks in zip(inputs.tables(SIZE), spread, strict=True):
        used = table[:4, :3]
        assert torch.equal(used, blocks.int()) and len(used.unique()) == 12
        assert used.min() >= NUM_RESERVED_BLOCKS and used.max() < 200
        assert not (table[:, 3:] != NULL_BLOCK).any() and not (table[4:] != NULL_BLOCK).any()
    assert inputs.slots(4).tolist() == [SCRATCH] * 4
    inputs.clear()
    _check(inputs, [], SIZE)
    few = KVCacheManager([KVGroupSpec(1, 1, 8, torch.float32)], 10, PAGE, torch.device("cpu"))
    (blocks,) = GenerationInputs(SIZE, SCRATCH, MOST, few, few.device).spread(SIZE, MOST)
    assert blocks.unique().tolist() == list(range(NUM_RESERVED_BLOCKS, 10))
