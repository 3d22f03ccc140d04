"""Training text in rows of one length, and the order of rows in each epoch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .data import DataError, Example
from .records import Sequences

PADDING = -1  # document id of a position that belongs to no document


def split(examples: Iterable[Example], holdout: float) -> tuple[list[Example], list[Example]]:
    """Splits examples into (to train on, held out).

    A hash of each example decides. So it stays on its side when the file grows, is shuffled or is
    truncated elsewhere. A larger share holds out the same examples and more.

    Args:
        holdout: the share to hold out, in 0 … 1; 0 holds out nothing.
    """
    if not 0 <= holdout <= 1:
        raise DataError(f"holdout={holdout}: it must be in 0 … 1.")
    train: list[Example] = []
    held: list[Example] = []
    for example in examples:
        draw = int(example.digest[:16], 16) / 2**64
        (held if draw < holdout else train).append(example)
    return train, held


@dataclass(frozen=True, eq=False)
class Packed:
    """Documents in N rows of L tokens, and the order of rows in each epoch (a `TextSource`).

    rows: the tensors, [N, L] each. Padding has id 0, position 0, no loss and document -1; the
        documents of a row are numbered 0, 1, …
    truncated: documents that were longer than a row.
    """

    rows: Sequences
    seed: int
    truncated: int = 0

    def __len__(self) -> int:
        return self.rows.input_ids.shape[0]

    @property
    def fill(self) -> float:
        """Returns the share of positions that hold a token."""
        return float((self.rows.document_ids != PADDING).float().mean())

    @cached_property
    def fingerprint(self) -> str:
        """Returns 16 hex digits of the tokens, their packing, and the seed of their order."""
        digest = hashlib.sha256(f"{self.seed} {list(self.rows.input_ids.shape)}".encode())
        for tensor in (self.rows.input_ids, self.rows.loss_mask, self.rows.document_ids):
            digest.update(tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def order(self, epoch: int) -> Tensor:
        """Returns the rows [N] int64 in the epoch's order.

        It depends on (seed, epoch, N) alone, not on a version of torch, so that training resumed
        elsewhere sees the same.
        """
        return torch.tensor(_shuffled(len(self), f"epoch {self.seed} {epoch}"), dtype=torch.int64)

    def num_batches(self, batch_size: int, drop_last: bool = True) -> int:
        """Returns how many batches an epoch has.

        Raises:
            DataError: batch_size is below 1, or above N when the last batch must be full.
        """
        if batch_size < 1 or (drop_last and batch_size > len(self)):
            raise DataError(
                f"batch_size={batch_size} with {len(self)} packed row(s) of "
                f"{self.rows.input_ids.shape[1]} tokens: it must be in 1 … {len(self)}. Give more "
                "text, or shorter rows."
            )
        return len(self) // batch_size if drop_last else -(-len(self) // batch_size)

    def epoch_batches(
        self, batch_size: int, epoch: int, first: int = 0, drop_last: bool = True
    ) -> Iterator[Sequences]:
        """Yields the epoch's batches from number `first` on, as a resumed run needs them.

        Rows that do not fill the last batch are left out, unless `drop_last` is False. They are
        other rows in every epoch.
        """
        count, order = self.num_batches(batch_size, drop_last), self.order(epoch)
        for i in range(first, count):
            chosen, rows = order[i * batch_size : (i + 1) * batch_size], self.rows
            yield Sequences(
                rows.input_ids[chosen],
                rows.loss_mask[chosen],
                rows.document_ids[chosen],
                rows.positions[chosen],
            )

    def batches(self, batch_size: int, first: int = 0) -> Iterator[Sequences]:
        """Yields full batches without end, epoch after epoch, from number `first` of all on."""
        epoch, start = divmod(first, self.num_batches(batch_size))
        while True:
            yield from self.epoch_batches(batch_size, epoch, start)
            epoch, start = epoch + 1, 0


def pack(examples: Iterable[Example], length: int, seed: int) -> Packed:
    """Packs documents into rows of `length` tokens.

    They are shuffled by the seed, and each goes into the first row that has room. Longer ones lose
    their tail, and are dropped if no token to predict is left.

    Raises:
        DataError: nothing is left to pack, or the length is below 2.
    """
    if length < 2:
        raise DataError(f"length={length}: it must be at least 2, a token and its next.")
    all_examples = list(examples)
    documents = [e for e in all_examples if bool(e.loss_mask[:length].any())]
    if not documents:
        raise DataError(
            f"None of {len(all_examples)} example(s) has a token to predict in its first {length}. "
            "Give text with answers of the assistant, or longer rows."
        )
    documents = [documents[i] for i in _shuffled(len(documents), f"pack {seed}")]
    rows = in_rows([(e.input_ids[:length], e.loss_mask[:length]) for e in documents], length)
    return Packed(rows, seed, sum(len(e.input_ids) > length for e in documents))


def in_rows(documents: Sequence[tuple[Tensor, Tensor]], length: int) -> Sequences:
    """Puts documents into rows of `length` tokens, each into the first row that has room.

    Args:
        documents: (ids [T] int64, loss mask [T] bool) of each, T <= length.
    """
    bins = first_fit([len(ids) for ids, _ in documents], length)
    shape = max(bins) + 1, length
    rows = Sequences(
        torch.zeros(shape, dtype=torch.int64),
        torch.zeros(shape, dtype=torch.bool),
        torch.full(shape, PADDING, dtype=torch.int32),
        torch.zeros(shape, dtype=torch.int64),
    )
    used, counts = [0] * shape[0], [0] * shape[0]
    for (ids, loss_mask), row in zip(documents, bins, strict=True):
        cells = row, slice(used[row], used[row] + len(ids))
        rows.input_ids[cells] = ids
        rows.loss_mask[cells] = loss_mask
        rows.document_ids[cells] = counts[row]
        rows.positions[cells] = torch.arange(len(ids))
        used[row] += len(ids)
        counts[row] += 1
    return rows


def first_fit(sizes: Sequence[int], capacity: int) -> list[int]:
    """Returns the bin of each item: the first with room for it, or a new one.

    A tree of the largest free room below each node finds it in log n steps.
    """
    leaves = 1 << max(len(sizes) - 1, 0).bit_length()
    free = [capacity] * (2 * leaves)  # node n has children 2n and 2n + 1; leaves come last
    bins = []
    for size in sizes:
        node = 1
        while node < leaves:
            node = 2 * node if free[2 * node] >= size else 2 * node + 1
        bins.append(node - leaves)
        free[node] -= size
        while node > 1:
            node //= 2
            free[node] = max(free[2 * node], free[2 * node + 1])
    return bins


def _shuffled(count: int, key: str) -> list[int]:
    """Returns 0 … count-1 in an order that hashes of the key decide."""
    start = hashlib.blake2b(key.encode(), digest_size=16).digest()

    def rank(i: int) -> bytes:
        return hashlib.blake2b(i.to_bytes(8, "big"), key=start, digest_size=16).digest()

    return sorted(range(count), key=rank)
