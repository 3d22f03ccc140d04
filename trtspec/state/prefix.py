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
from collections.abc import Callable, Sequence
from hashlib import blake2b

DIGEST_BYTES = 16
TOKEN_BYTES = 4

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
        stride, length = page * TOKEN_BYTES, (page + ahead) * TOKEN_BYTES
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
