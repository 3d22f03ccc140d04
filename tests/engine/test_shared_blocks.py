"""The block manager alone: requests share, part, grow and end; nothing leaks or is wrong."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from matrix import covering, full

from trtspec.errors import KVCacheError
from trtspec.metadata.attention import NULL_BLOCK, NUM_RESERVED_BLOCKS
from trtspec.ops.layer.fp8 import FP8
from trtspec.state.blocks import BlockPool
from trtspec.state.kv_cache import BlockCopy, KVCacheManager, KVGroupSpec, PrefixReuse
from trtspec.state.prefix import PrefixChain, root_key
from trtspec.state.prefix_search import Donors, PrefixQuery

PAGE, CPU, JUNK = 4, torch.device("cpu"), -1
OPERATIONS = 1_000_000 if full() else 250_000


# -- the manager -------------------------------------------------------------------------------
class Shadow(KVCacheManager):
    """Keeps in place of keys and values what text a row was computed from."""

    def __init__(self, windows: Sequence[int | None], num_blocks: list[int], ahead: int):
        specs = [KVGroupSpec(1, 1, 1, torch.float32, window=window) for window in windows]
        super().__init__(specs, num_blocks, PAGE, CPU, PrefixReuse(True, True, ahead))
        self.rows = [[[0] * PAGE for _ in range(count)] for count in num_blocks]

    def copy(self, group: int, copies: Sequence[BlockCopy]) -> None:
        rows = self.rows[group]
        for source, target, num_rows in copies:
            rows[target][:num_rows] = rows[source][:num_rows]

    def zero(self, group: int, blocks: list[int]) -> None:
        for block in blocks:
            self.rows[group][block] = [0] * PAGE

    def write(self, request_id: int, position: int, value: int) -> None:
        for pool, table, rows in zip(self._pools, self._tables[request_id], self.rows, strict=True):
            block = table[position // PAGE]
            assert block != NULL_BLOCK, "a row has nowhere to be written"
            assert pool.num_holders(block) == 1, "a shared block is written to"
            if pool.has_key(block):
                assert rows[block][position % PAGE] == value, "a published row is changed"
            rows[block][position % PAGE] = value


class Text:
    """A request: its tokens, and for each of them what the text up to it is."""

    def __init__(self, request_id: int, tokens: list[int], salt: str | None):
        self.id, self.tokens, self.salt = request_id, [], salt
        self.states: list[int] = []
        self.grow(tokens)

    def grow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            before = self.states[-1] if self.states else hash(self.salt)
            self.tokens.append(token)
            self.states.append(hash((before, token)))

    def between(self, start: int, end: int) -> list[int]:
        return self.tokens[start:end]


class Session:
    """Does random operations and counts them."""

    def __init__(self, windows: Sequence[int | None], ahead: int, seed: int):
        self.rng, self.ahead, self.windows = random.Random(seed), ahead, windows
        self.num_blocks = [NUM_RESERVED_BLOCKS + (40 if w is None else 36) for w in windows]
        self.cache = Shadow(windows, self.num_blocks, ahead)
        self.live: dict[int, tuple[Text, PrefixChain]] = {}
        self.texts: list[list[int]] = [[1] * 9]
        self.counted: Counter[str] = Counter()
        self.next_id = 0

    def some_tokens(self) -> list[int]:
        """Mostly the beginning of an earlier text, then tokens of a small alphabet."""
        rng = self.rng
        known = rng.choice(self.texts)
        kept = known[: rng.choice([0, rng.randint(0, len(known)), len(known), len(known)])]
        return [*kept, *(rng.randrange(3) for _ in range(rng.randint(1, 9)))][:60]

    def start(self) -> None:
        rng, cache = self.rng, self.cache
        text = Text(self.next_id, self.some_tokens(), rng.choice([None, None, None, "a"]))
        self.next_id += 1
        chain = cache.chain(text.salt)
        count = len(text.tokens)
        chain.extend(text.between, count)
        images = (6, 11) if rng.random() < 0.2 else (0, 0)
        hit = cache.find(
            PrefixQuery(
                chain, text.between, count - 1,
                lambda end: images[0] if end in range(*images) else end,
            )
        )  # fmt: skip
        self.counted["find"] += 1
        assert hit.num_tokens < count
        if not cache.fits(chain, hit, count + 5):
            self.counted["no room"] += 1
            return
        cache.adopt(text.id, chain, hit, count + 5)
        cache.make_copies()
        self.counted["adopt"] += 1
        self.counted["hit"] += hit.num_tokens > 0
        self.counted["copy"] += hit.source is not None
        self.check(text, hit.num_tokens)
        self.live[text.id] = text, chain
        self.compute(text, hit.num_tokens)
        cache.publish(text.id, chain, min(count + 1 - max(self.ahead, 1), count - self.ahead))
        self.counted["publish"] += 1

    def check(self, text: Text, count: int) -> None:
        """Every row that later ones see is that of this text."""
        for g, window in enumerate(self.windows):
            table = self.cache._tables[text.id][g]
            first = 0 if window is None else max(0, count - window + 1)
            for p in range(first, count):
                row = self.cache.rows[g][table[p // PAGE]][p % PAGE]
                assert row == text.states[p + self.ahead], (g, p, count)

    def compute(self, text: Text, start: int) -> None:
        """Writes rows from `start` on; the last ones read guesses, and some are of drafts."""
        count = len(text.tokens)
        for p in range(start, count):
            known = p + self.ahead < count
            self.cache.write(text.id, p, text.states[p + self.ahead] if known else JUNK)
        for p in range(count, count + 5):
            self.cache.write(text.id, p, JUNK)

    def grow(self) -> None:
        text, chain = self.pick()
        count = len(text.tokens)
        if count > 70 or not self.cache.reserve(text.id, count + 4 + 5):
            self.end()
            return
        self.counted["reserve"] += 1
        text.grow([self.rng.randrange(3) for _ in range(self.rng.randint(1, 4))])
        self.compute(text, max(0, count - self.ahead))
        count = len(text.tokens)
        final = count - max(self.ahead, 1)
        chain.extend(text.between, count)
        self.cache.publish(text.id, chain, final)
        self.cache.trim(text.id, count + 5)
        self.cache.release_behind(text.id, final, num_unseen=final // 2)
        self.counted.update(["publish", "trim", "release_behind"])
        self.check(text, max(0, final))

    def end(self) -> None:
        text, _ = self.pick()
        if self.rng.random() < 0.1:
            self.cache.scrub(text.id)
            self.counted["scrub"] += 1
        self.cache.free(text.id)
        self.counted["free"] += 1
        del self.live[text.id]
        self.texts = [*self.texts[-30:], text.tokens]

    def pick(self) -> tuple[Text, PrefixChain]:
        return self.live[self.rng.choice(list(self.live))]

    def run(self, operations: int) -> None:
        while self.counted.total() < operations:
            chance = self.rng.random()
            if not self.live or (chance < 0.25 and len(self.live) < 5):
                self.start()
            elif chance < 0.9:
                self.grow()
            else:
                self.end()
            if self.rng.random() < 0.0005:
                self.cache.reset_prefixes()
                self.counted["reset"] += 1
            if self.rng.random() < 0.002:
                self.cache.check_integrity()
        while self.live:
            self.end()
        self.cache.check_integrity()


@pytest.mark.slow
@covering(windows=[(None,), (None, 6), (9,), (None, 3, 14)], ahead=[0, 1, 4])
def test_what_is_found_is_the_text_s_own(windows: tuple[int | None, ...], ahead: int) -> None:
    session = Session(windows, ahead, seed=ahead)
    session.run(OPERATIONS // 12)
    counted, cache = session.counted, session.cache
    assert counted["hit"] > 40 and counted["copy"] > 5 and counted["scrub"] > 10
    assert cache.num_evicted_blocks > 100
    free = [count - NUM_RESERVED_BLOCKS for count in session.num_blocks]
    assert [pool.num_free for pool in cache._pools] == free
    assert len(cache._donors) <= max(free)
    cache.reset_prefixes()
    assert all(pool.taken == [] for pool in cache._pools) and not len(cache._donors)


# -- parts -------------------------------------------------------------------------------------
def _manager(
    num_blocks: int = 12, window: int | None = None, ahead: int = 0, partial: bool = True
) -> KVCacheManager:
    spec = KVGroupSpec(2, 1, 3, torch.float32, window=window)
    return KVCacheManager([spec], num_blocks, PAGE, CPU, PrefixReuse(True, partial, ahead))


def _run(cache: KVCacheManager, request_id: int, tokens: list[int], **options: str) -> int:
    """Computes a prompt as a request would, and returns how many tokens were found."""

    def between(start: int, end: int) -> list[int]:
        return tokens[start:end]

    chain = cache.chain(**options)
    chain.extend(between, len(tokens))
    hit = cache.find(PrefixQuery(chain, between, len(tokens) - 1))
    assert cache.fits(chain, hit, len(tokens))
    cache.adopt(request_id, chain, hit, len(tokens))
    cache.make_copies()
    cache.publish(request_id, chain, len(tokens))
    cache.check_integrity()
    return hit.num_tokens


def test_requests_that_start_together_copy_together() -> None:
    """Rows of several blocks, some of one source: the first ones alone, in every group."""
    specs = [KVGroupSpec(2, 1, 3, torch.float32), KVGroupSpec(1, 1, 4, FP8, value_dim=3)]
    cache = KVCacheManager(specs, 40, 8, CPU, PrefixReuse(True, True))
    first = [list(range(start, start + 12)) for start in (0, 20)]
    for number, tokens in enumerate(first):
        _run(cache, number, tokens)
    for group in cache.groups:
        for cached in (group.k_cache, group.v_cache):
            cached.copy_(torch.randn(cached.shape))
    before = [(g.k_cache.float(), g.v_cache.float()) for g in cache.groups]
    shared = [(0, 7), (0, 4), (1, 5)]
    expected = []
    for number, (source, count) in enumerate(shared, start=2):
        tokens = [*first[source][:count], 90 + number, 91, 92, 93, 94]
        chain = cache.chain()
        chain.extend(lambda a, b, tokens=tokens: tokens[a:b], len(tokens))
        query = PrefixQuery(chain, lambda a, b, tokens=tokens: tokens[a:b], len(tokens) - 1)
        hit = cache.find(query)
        assert hit.num_tokens == count and hit.source is not None
        cache.adopt(number, chain, hit, len(tokens))
        expected.append((cache.table_of(source)[0][0], cache.table_of(number)[0][0], count))
        assert cache.table_of(number)[1][0] == cache.table_of(number)[0][0], "for the check below"
    cache.make_copies()
    for group, (keys, values) in zip(cache.groups, before, strict=True):
        for source, target, count in expected:
            keys[:, target, :count] = keys[:, source, :count]
            values[:, target, :count] = values[:, source, :count]
        assert torch.equal(group.k_cache.float(), keys)
        assert torch.equal(group.v_cache.float(), values)
    cache.check_integrity()
    for number in range(5):
        cache.free(number)
    cache.check_integrity()
    assert cache.num_free_blocks == 40 - NUM_RESERVED_BLOCKS


def test_copies_that_an_exception_cut_off_are_not_made() -> None:
    cache = _manager(num_blocks=40)
    tokens = list(range(PAGE + 3))
    _run(cache, 0, tokens)
    chain = cache.chain()
    chain.extend(lambda a, b: tokens[a:b], len(tokens))
    hit = cache.find(PrefixQuery(chain, lambda a, b: tokens[a:b], PAGE - 1))
    assert hit.source is not None
    cache.adopt(1, chain, hit, len(tokens))
    cache.start_over()
    for cached in (cache.groups[0].k_cache, cache.groups[0].v_cache):
        cached.copy_(torch.randn(cached.shape))
    before = cache.groups[0].k_cache.clone()
    cache.make_copies()
    assert torch.equal(cache.groups[0].k_cache, before)
    cache.check_integrity()


def test_a_free_block_keeps_its_key_until_it_is_taken() -> None:
    cache = _manager(num_blocks=2 + 5)
    first = list(range(8))
    assert _run(cache, 0, first) == 0
    cache.free(0)
    assert cache.num_free_blocks == 5, "it counts as free"
    assert _run(cache, 1, [*first, 9]) == 8
    cache.free(1)
    assert cache.reserve(2, 4 * PAGE), "never at the cost of a request"
    assert cache.num_evicted_blocks == 1
    cache.free(2)
    assert _run(cache, 3, [*first, 9]) == 4, "the block further on was evicted first"


def test_the_one_used_longest_ago_is_evicted() -> None:
    cache = _manager(num_blocks=2 + 4, partial=False)
    for i in range(3):
        _run(cache, i, [i] * 4)
        cache.free(i)
    assert _run(cache, 3, [0] * 5) == 4
    cache.free(3)  # the pool's last blank block has no key
    assert cache.reserve(4, 2 * PAGE)
    found = {i for i in range(3) if cache._pools[0].find(_key([i] * 4)) is not None}
    assert found == {0, 2}


def _key(tokens: list[int], ahead: int = 0, salt: str | None = None) -> bytes:
    chain = PrefixChain(PAGE, ahead, salt)
    chain.extend(lambda start, end: tokens[start:end], len(tokens))
    return chain.keys[-1]


def test_a_key_is_of_all_that_its_block_depends_on() -> None:
    tokens = [5, 6, 7, 8, 9, 10, 11, 12, 13]
    keys = [
        _key(tokens[:8]), _key(tokens[4:8]), _key([4, *tokens[1:8]]), _key(tokens[:8], salt="a"),
        _key(tokens[:8], salt="b"), _key(tokens, ahead=1), _key([*tokens[:8], 14], ahead=1),
    ]  # fmt: skip
    assert len(set(keys)) == len(keys)
    assert _key(tokens) == _key([*tokens[:8], 14]), "nothing reads the token after"
    assert len({root_key(None), root_key(""), root_key("a")}) == 3


def test_a_key_is_of_each_embedding_that_its_block_reads() -> None:
    def keys(changed: int | None) -> list[bytes]:
        """Of two blocks of image, where one position's embedding may be another one."""
        content = bytes(i == changed for i in range(2 * PAGE + 1))
        chain = PrefixChain(PAGE, 1, content=lambda start, end: content[start:end])
        chain.extend(lambda start, end: [3] * (end - start), 2 * PAGE + 1)
        return chain.keys

    as_it_was = keys(None)
    for position in range(2 * PAGE + 1):
        first, second = (a == b for a, b in zip(keys(position), as_it_was, strict=True))
        assert first == (position > PAGE)  # a block's key reads one position ahead
        assert not second


def test_chains_grow_as_tokens_become_known() -> None:
    tokens = [(7 * i) % 11 for i in range(31)]
    for ahead in (0, 1, 3):
        at_once, bit_by_bit = PrefixChain(PAGE, ahead), PrefixChain(PAGE, ahead)
        at_once.extend(lambda a, b: tokens[a:b], len(tokens))
        for count in range(len(tokens) + 1):
            bit_by_bit.extend(lambda a, b, known=tokens[:count]: known[a:b], count)
            assert len(bit_by_bit.keys) == max(0, count - ahead) // PAGE
        assert at_once.keys == bit_by_bit.keys and at_once.tokens == bit_by_bit.tokens


def test_rows_are_copied_up_to_where_two_texts_part() -> None:
    for ahead, expected in ((0, 6), (1, 5), (2, 4)):
        cache = _manager(ahead=ahead)
        _run(cache, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10])
        (group,) = cache.groups
        group.k_cache.copy_(torch.arange(group.k_cache.numel()).view(group.k_cache.shape))
        assert _run(cache, 1, [1, 2, 3, 4, 5, 6, 70, 80]) == expected
        (mine,), (other,) = cache._tables[1], cache._tables[0]
        assert mine[0] == other[0] and mine[1] != other[1]
        if expected > PAGE:
            is_same = (group.k_cache[:, mine[1]] == group.k_cache[:, other[1]]).flatten(2).all(-1)
            assert is_same[0].tolist() == [i < expected - PAGE for i in range(PAGE)]


def test_the_longest_of_several_beginnings_is_copied() -> None:
    donors, ahead = Donors(), 1
    for last in ([3, 4, 8], [3, 9, 9], [3, 4, 5], [3, 4, 9]):
        tokens = [1, 2, *last]
        chain = PrefixChain(PAGE, ahead)
        chain.extend(lambda a, b, tokens=tokens: tokens[a:b], len(tokens))
        donors.add(chain, 0)
    best = donors.longest(root_key(None), [1, 2, 3, 4, 5, 6], ahead)
    assert best is not None and best.num_tokens == 4
    assert donors.longest(root_key(None), [1, 9], ahead) is None, "its row would read another token"
    for key in list(donors._start_of):
        donors.drop(key)
    assert not len(donors) and not donors._siblings


def test_a_beginning_of_less_than_a_quarter_of_a_block_is_not_copied() -> None:
    spec = KVGroupSpec(1, 1, 1, torch.float32)
    cache = KVCacheManager([spec], 40, 16, CPU, PrefixReuse(True, True))
    for number, first in enumerate((1, 2)):
        _run(cache, number, [first] * 4 + [9] * 16)
    for shared, expected in ((3, 0), (4, 4)):
        assert _run(cache, 10 + shared, [1] * shared + [shared] * 16) == expected


def test_a_window_needs_its_own_blocks_alone() -> None:
    cache = _manager(num_blocks=2 + 8, window=5, partial=False)
    tokens = list(range(20))
    _run(cache, 0, tokens)
    cache.release_behind(0, first=19)  # keeps positions 15 to 19
    assert _run(cache, 1, [*tokens, 1]) == 20
    assert cache._tables[1][0].tolist()[:4] == [NULL_BLOCK] * 4
    cache.free(1)
    (pool,) = cache._pools
    pool.forget(cache._tables[0][0][4])
    assert _run(cache, 2, [*tokens, 1]) == 16, "shortened to where its window's blocks are there"
    cache.free(2)
    for block in list(pool._key_of):
        if block != cache._tables[0][0][4]:
            pool.forget(block)
    assert _run(cache, 3, [*tokens, 1]) == 0


def test_nan_in_a_published_block_is_gone_before_another_gets_it() -> None:
    cache = _manager(num_blocks=2 + 4, window=4)
    _run(cache, 0, list(range(16)))
    (group,) = cache.groups
    group.k_cache[:, cache._tables[0][0][0]] = torch.nan
    cache.release_behind(0, first=15, num_unseen=16)
    assert not torch.isfinite(group.k_cache).all(), "the same prompt may still find it"
    cache.free(0)
    assert cache.reserve(1, 4 * PAGE)
    assert torch.isfinite(group.k_cache).all()


def test_a_lost_request_spoils_no_shared_block() -> None:
    cache = _manager()
    tokens = list(range(8))
    _run(cache, 0, [*tokens, 1, 2, 3, 4])
    _run(cache, 1, [*tokens, 5, 6, 7, 8])
    (group,) = cache.groups
    group.k_cache.fill_(1.0)
    cache.scrub(1)
    shared, own = cache._tables[1][0][:2], cache._tables[1][0][2:]
    assert (group.k_cache[:, shared] == 1).all(), "another request reads them"
    assert not group.k_cache[:, own].any()
    cache.free(1)
    cache.free(0)
    assert _run(cache, 2, [*tokens, 5]) == 0, "what it had is not found again"
    assert cache.reserve(3, cache.num_free_blocks * PAGE)
    assert not group.k_cache[:, shared].any()


def test_what_a_reset_forgets_is_not_published_again() -> None:
    cache, tokens = _manager(), list(range(9))
    _run(cache, 7, [60 + i for i in range(40)])
    cache.free(7)
    chain = cache.chain()
    chain.extend(lambda a, b: tokens[a:b], 9)
    cache.adopt(0, chain, cache.find(PrefixQuery(chain, lambda a, b: tokens[a:b], 8)), 9)
    cache.make_copies()
    cache.publish(0, chain, 4)
    cache.reset_prefixes()
    cache.publish(0, chain, 8)
    assert cache.num_known_blocks == 0
    cache.free(0)
    assert _run(cache, 1, tokens) == 0 and cache.num_known_blocks == 2
    evicted = cache.num_evicted_blocks
    assert evicted > 0
    cache.start_over()
    assert cache.num_evicted_blocks == evicted, "statistics go on"
    assert cache.num_known_blocks == 0 and cache.num_free_blocks == 10
    cache.check_integrity()


def test_the_ledger_notices() -> None:
    cache = _manager()
    _run(cache, 0, list(range(9)))
    _run(cache, 1, list(range(9)))
    table = cache._tables[1][0]
    table[0], table[1] = table[1], table[0]
    with pytest.raises(KVCacheError, match="at two positions"):
        cache.check_integrity()
    table.pop()
    table[0], table[1] = table[1], table[0]
    with pytest.raises(KVCacheError, match="leaked"):
        cache.check_integrity()
    pool = BlockPool(6)
    (block,) = pool.allocate(1)
    pool.free([block])
    with pytest.raises(KVCacheError, match="not in use"):
        pool.free([block])
    with pytest.raises(KVCacheError, match="neither in use nor cached"):
        pool.hold([block])
