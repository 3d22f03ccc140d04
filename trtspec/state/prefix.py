"""Keys of blocks: what a block's keys and values were computed from.

    key(i) = hash(key(i-1), tokens of block i and of the `ahead` positions after it, other content)
    key(-1) = hash(salt)

`ahead` is how many tokens after a row a drafter reads for the row's own keys and values: an EAGLE
head reads one, vanilla MTP its depth (`SpecWorkerBase.num_tokens_ahead`). Without them in the key a
block of another text would match, and the head would attend to keys of another token.
The hash has 128 bits and is cryptographic (BLAKE2b), so that no prompt can be made to collide.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple

DIGEST_BYTES = 16
MAX_COMPARED = 32
"""How many blocks of the same beginning are compared for the longest."""
_TOKEN_BYTES = 4

Content = Callable[[int, int], bytes]
"""Returns what positions [start, end) hold beside tokens: a hash of embeddings and positions."""


def no_content(start: int, end: int) -> bytes:
    """The `Content` of text."""
    return b""


def root_key(salt: str | None) -> bytes:
    """Returns what the first block's key is chained to."""
    text = b"" if salt is None else b"\1" + salt.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=DIGEST_BYTES, person=b"trtspec prefix").digest()


class PrefixChain:
    """The keys of one request's blocks, extended as its tokens become known.

    Args:
        page_size: tokens of a block.
        ahead: tokens after a block that its key depends on.
        content: what the sequence holds beside tokens.
        epoch: of the cache when the chain was begun (`KVCacheManager.is_current`).
        max_published: most tokens whose blocks others may find; None is all.
    """

    def __init__(
        self,
        page_size: int,
        ahead: int,
        salt: str | None = None,
        content: Content = no_content,
        epoch: int = 0,
        max_published: int | None = None,
    ):
        self.page_size, self.ahead, self.epoch = page_size, ahead, epoch
        self.max_published = max_published
        self.root, self.content = root_key(salt), content
        self.keys: list[bytes] = []
        self.tokens: list[bytes] = []
        """Each block's tokens and those ahead of it, 4 bytes each; empty if it is not all text."""
        self.publish_up_to(0)

    def extend(self, tokens: Callable[[int, int], Sequence[int]], num_tokens: int) -> None:
        """Adds the keys of blocks that `num_tokens` known tokens settle.

        Args:
            tokens: returns the tokens of positions [start, end).
        """
        page, ahead, keys, content = self.page_size, self.ahead, self.keys, self.content
        count, first = (num_tokens - ahead) // page, len(keys)
        if count <= first:
            return
        packed = array("i", tokens(first * page, count * page + ahead)).tobytes()
        key = keys[-1] if keys else self.root
        stride, length = page * _TOKEN_BYTES, (page + ahead) * _TOKEN_BYTES
        starts = range(0, (count - first) * stride, stride)
        blocks = [packed[start : start + length] for start in starts]
        if content is no_content:  # a long prompt has many blocks
            for block in blocks:
                key = blake2b(key + block, digest_size=DIGEST_BYTES).digest()
                keys.append(key)
            self.tokens += blocks
            return
        for i, block in enumerate(blocks, start=first):
            other = content(i * page, (i + 1) * page + ahead)
            key = blake2b(key + block + other, digest_size=DIGEST_BYTES).digest()
            keys.append(key)
            self.tokens.append(b"" if other else block)

    def publish_up_to(self, count: int) -> None:
        """Notes that the first `count` blocks are published."""
        self.num_published = count
        self.next_at = (count + 1) * self.page_size + self.ahead
        """Known tokens from which on another block is settled."""

    def parent(self, i: int) -> bytes:
        """Returns the key before block i's."""
        return self.keys[i - 1] if i else self.root


class Donors:
    """Blocks by their parent's key and first token, for requests that share a block's beginning.

    Args:
        least: tokens that a request must share, or a copy is not worth it.
    """

    def __init__(self, least: int = 1) -> None:
        self._least = least
        self._of: dict[bytes, OrderedDict[bytes, bytes]] = {}  # parent, token -> key -> tokens
        self._place_of: dict[bytes, bytes] = {}  # key -> parent, token

    def __len__(self) -> int:
        return len(self._place_of)

    def add(self, chain: PrefixChain, i: int) -> None:
        """Adds block i of a chain, unless it is not all text."""
        key, tokens = chain.keys[i], chain.tokens[i]
        if tokens and key not in self._place_of:
            place = chain.parent(i) + tokens[:_TOKEN_BYTES]
            self._place_of[key] = place
            self._of.setdefault(place, OrderedDict())[key] = tokens

    def drop(self, key: bytes) -> None:
        """Drops a block that can no longer be found in every group."""
        place = self._place_of.pop(key, None)
        if place is not None:
            siblings = self._of[place]
            del siblings[key]
            if not siblings:
                del self._of[place]

    def longest(self, parent: bytes, wanted: Sequence[int], ahead: int) -> Donor | None:
        """Returns the block that shares most tokens with `wanted`, among the newest ones.

        The last `ahead` shared tokens do not count: rows before them would have read others.
        """
        more = ahead + self._least  # tokens that a better one shares
        packed = array("i", wanted).tobytes()
        siblings = self._of.get(parent + packed[:_TOKEN_BYTES], OrderedDict())
        best: Donor | None = None
        for key, _ in zip(reversed(siblings), range(MAX_COMPARED), strict=False):
            if more > len(wanted):
                break
            # Most share no more than the template of a chat: one comparison shows it.
            if siblings[key].startswith(packed[: more * _TOKEN_BYTES]):
                count = _num_shared(siblings[key], packed)
                best, more = Donor(key, count - ahead), count + 1
        return best


class Donor(NamedTuple):
    """A block whose first rows can be copied."""

    key: bytes
    num_tokens: int


def _num_shared(a: bytes, b: bytes) -> int:
    """Returns how many tokens two packed sequences share at their beginning."""
    low, high = 0, min(len(a), len(b)) // _TOKEN_BYTES
    while low < high:  # by halves: comparing bytes is one call
        middle = (low + high + 1) // 2
        if a[: middle * _TOKEN_BYTES] == b[: middle * _TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low


class PrefixHit(NamedTuple):
    """What of a sequence the cache holds: whole blocks, then rows to be copied from another."""

    num_tokens: int = 0
    num_blocks: int = 0  # whole ones, shared
    source: bytes | None = None  # key of the block that the other rows are copied from
    owner: int | None = None  # the rank that has them, where ranks have blocks of their own

    def without_copy(self, page_size: int) -> PrefixHit:
        return self._replace(num_tokens=self.num_blocks * page_size, source=None)
