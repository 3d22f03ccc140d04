"""The kernels in which ranks tell each other something, with ranks that are streams of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from trtspec import native
from trtspec.distributed.comm import Communicator
from trtspec.distributed.exchange import PART_BYTES, Exchange, memory_bytes
from trtspec.distributed.logits import ShardedLogits
from trtspec.ops.tokens.greedy import MAX_ROWS_OVER_RANKS, Accepted, accept_greedy, choose_drafts

HAS_KERNELS = torch.cuda.is_available() and native.kernels(torch.empty(1, device="cuda"))
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAS_KERNELS, reason="needs Hopper, nvcc and apache-tvm-ffi"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


class Rank(Communicator):
    """A rank whose kernels run on a stream of its own."""

    def __init__(self, rank: int, memories: list[Tensor]):
        self.rank, self.size, self.stream = rank, len(memories), torch.cuda.Stream()
        pointers = [memory.data_ptr() for memory in memories]
        kernels = native.kernels(memories[rank])
        self.exchange = Exchange(kernels, rank, memories[rank], pointers)

    def all_reduce(self, x: Tensor) -> Tensor:
        assert self.exchange is not None and self.exchange.takes(x)
        return self.exchange.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        assert self.exchange is not None and self.exchange.takes(x)
        return self.exchange.all_gather(x)


def ranks_of(size: int) -> list[Rank]:
    memories = [
        torch.empty(memory_bytes(size), dtype=torch.uint8, device="cuda") for _ in range(size)
    ]
    ranks = [Rank(rank, memories) for rank in range(size)]
    torch.cuda.synchronize()
    return ranks


def on_all(ranks: list[Rank], call: Callable[..., Any], parts: list[Any]) -> list[Any]:
    """Calls `call(rank, its part)` for each rank, on its stream, side by side."""
    results = []
    for rank in ranks:
        rank.stream.wait_stream(torch.cuda.current_stream())
    for rank, part in zip(ranks, parts, strict=True):
        with torch.cuda.stream(rank.stream):
            results.append(call(rank, part))
    for rank in ranks:
        torch.cuda.current_stream().wait_stream(rank.stream)
    return results


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def random(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cuda").to(dtype)


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_collectives_of_any_length(size: int, dtype: torch.dtype) -> None:
    """Rounds follow each other, shorter and longer ones, with values of all kinds."""
    ranks, vector = ranks_of(size), 16 // dtype.itemsize
    most = PART_BYTES // dtype.itemsize // (1 if size < 8 else 8)  # all ranks' blocks run at once
    for round_, length in enumerate([8, 4096, 16, 136, most, 8, 32768, 4 * 4096, most, 1000]):
        parts = [random(length, seed=100 * round_ + r, dtype=dtype) for r in range(size)]
        parts[0][:4] = torch.tensor([-0.0, float("inf"), float("nan"), 0.0])
        parts[-1][vector:].view(torch.uint8)[:16] = 0xFF
        whole = torch.stack(parts)
        gathered = on_all(ranks, Rank.all_gather, parts)
        sums = on_all(ranks, Rank.all_reduce, [part.clone() for part in parts])
        for rank in range(size):
            torch.testing.assert_close(gathered[rank], whole, rtol=0, atol=0, equal_nan=True)
            assert torch.equal(sums[rank].view(torch.uint8), sums[0].view(torch.uint8))
        exact = whole.double().sum(0)
        torch.testing.assert_close(sums[0].double(), exact, rtol=2**-8, atol=1e-2, equal_nan=True)


def test_collectives_within_a_graph() -> None:
    """Replays go on counting rounds."""
    ranks = ranks_of(2)
    x = [random(4, 4096, seed=r, dtype=torch.bfloat16) for r in range(2)]
    out = [torch.zeros_like(part) for part in x]

    def layers(rank: Rank, hidden: Tensor) -> None:
        for _ in range(7):
            hidden = rank.all_reduce(hidden * 0.5)
        out[rank.rank].copy_(hidden)

    on_all(ranks, layers, x)
    torch.cuda.synchronize()
    expected = out[0].clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_all(ranks, layers, x)
    for scale in (1.0, 2.0, 1.0, 4.0):
        for part in x:
            part.mul_(scale)
        expected.mul_(scale)
        graph.replay()
        assert torch.equal(out[0], expected) and torch.equal(out[1], expected)


def sharded(logits: Tensor, rank: Rank) -> ShardedLogits:
    width = -(-logits.shape[1] // rank.size)
    padded = torch.nn.functional.pad(logits, (0, width * rank.size - logits.shape[1]), value=99.0)
    part = padded[:, rank.rank * width : (rank.rank + 1) * width].contiguous()
    return ShardedLogits(part, logits.shape[1], rank)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [7, 1000, 50_257])
def test_best_tokens_over_ranks(size: int, dtype: torch.dtype, vocab: int) -> None:
    ranks = ranks_of(size)
    d2t = torch.arange(vocab, device="cuda") * 2

    def choose(_: Rank, part: ShardedLogits) -> Tensor:
        return choose_drafts(part, d2t)

    for rows in (1, 4, 33, MAX_ROWS_OVER_RANKS // size):  # all ranks' blocks run at once
        logits = random(rows, vocab, seed=rows, dtype=dtype)
        logits[0, vocab // 3] = logits[0, vocab - 1] = 50.0  # a tie: the lowest id
        if rows > 1:
            logits[1] = float("-inf")
            logits[2, vocab // 2] = float("nan")
        chosen = on_all(ranks, choose, [sharded(logits, rank) for rank in ranks])
        expected = logits.float().nan_to_num(nan=float("-inf")).argmax(-1)
        for tokens in chosen:
            assert torch.equal(tokens, (expected + d2t[expected]).int())


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("forced", [0, 2])
def test_acceptance_over_ranks_equals_one_rank(size: int, forced: int) -> None:
    ranks, contexts, generations, drafts = ranks_of(size), 2, 9, 3
    logits = random(contexts + generations * (drafts + 1), 999, seed=5, dtype=torch.bfloat16)
    logits[7, 3] = float("nan")
    best = logits.float().nan_to_num(nan=float("-inf")).argmax(-1)[contexts:].view(generations, -1)
    proposed = best[:, :drafts].int().contiguous()
    proposed[0, 0] += 1
    proposed[1, 2], proposed[2, 1] = -1, 0
    parts = [sharded(logits, rank) for rank in ranks]

    def accepted(_: Rank, given: Tensor | ShardedLogits) -> Accepted:
        result = accept_greedy(given, proposed, contexts, drafts + 1, forced)
        assert result is not None
        return result

    expected = accepted(ranks[0], logits)
    assert forced or expected.lens.tolist()[2:6] == [1, 3, 2, 4]
    for result in on_all(ranks, accepted, parts):
        for name in ("tokens", "lens", "num_accepted_drafts", "bad_requests"):
            assert torch.equal(getattr(result, name), getattr(expected, name)), name


def test_what_is_too_much_is_left_to_others() -> None:
    rank = ranks_of(2)[0]
    assert rank.exchange is not None
    assert not rank.exchange.takes(torch.empty(PART_BYTES // 2 + 8, dtype=torch.bfloat16))
    assert not rank.exchange.takes(torch.empty(7, dtype=torch.bfloat16))
    assert not rank.exchange.takes(torch.empty(8, dtype=torch.int32))
    assert not rank.exchange.takes(torch.empty(12, dtype=torch.bfloat16)[4:])  # at 8 bytes
    with pytest.raises(ValueError, match="more than the ranks' memory holds"):
        rank.exchange.all_reduce(torch.empty(PART_BYTES, dtype=torch.bfloat16, device="cuda"))
