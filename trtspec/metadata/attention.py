"""What attention needs to know about one pass, and nothing else.

A pass is a flat list of T token rows: each context's rows first, then `rows_per_generation` rows
for every generation request, or as many as `packed` says. An `AttentionMetadata` describes one pass
and is never edited: a draft step asks `for_rows` for a new one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from .recurrent import RecurrentPass

NULL_BLOCK = 0
"""Block id that pads block tables. Always zeros: nothing writes it, masked reads may land in it."""
SCRATCH_BLOCK = 1
"""Block id that receives the rows whose slot is -1. Nothing reads it."""
NUM_RESERVED_BLOCKS = 2
LARGEST = "largest positions"  # among what is derived of a pass


@dataclass(frozen=True)
class KVGroup:
    """The KV storage of layers that share one block table.

    `k_cache`, `v_cache`: [layers, blocks, page_size, kv_heads, head_dim], model dtype or FP8;
    written by attention, zeroed by the executor when a request fails with NaN. With latent
    attention `v_cache` is a narrower view of `k_cache`.

    `k_scales`, `v_scales`: [layers, kv_heads] float32, of caches in FP8 (`ops/layer/kv_codes.py`);
    all 1 if not given. Other caches have none.
    """

    k_cache: Tensor
    v_cache: Tensor
    k_scales: Tensor | None = None
    v_scales: Tensor | None = None
    layer_slots: tuple[tuple[Tensor, Tensor], ...] = field(init=False, repr=False)
    """Per layer, K and V as [blocks * page_size, kv_heads, head_dim]: views, indexed by slot."""
    layer_scales: tuple[tuple[Tensor | None, Tensor | None], ...] = field(init=False, repr=False)
    """Per layer, the scales of K and V, each [kv_heads]; None where numbers are floats."""

    def __post_init__(self) -> None:
        views = zip(self.k_cache.flatten(1, 2), self.v_cache.flatten(1, 2), strict=True)
        object.__setattr__(self, "layer_slots", tuple(views))
        if self.k_cache.dtype == torch.float8_e4m3fn and self.k_scales is None:
            layers, _, _, heads, _ = self.k_cache.shape
            ones = torch.ones(layers, heads, device=self.k_cache.device)
            object.__setattr__(self, "k_scales", ones)
            object.__setattr__(self, "v_scales", ones)
        none = [None] * len(self.k_cache)
        scales = zip(
            none if self.k_scales is None else self.k_scales,
            none if self.v_scales is None else self.v_scales,
            strict=True,
        )
        object.__setattr__(self, "layer_scales", tuple(scales))

    @property
    def page_size(self) -> int:
        return self.k_cache.shape[2]


class ImageRows(NamedTuple):
    """An image in a context, all of it in this pass."""

    context: int  # which of the pass's
    first_row: int
    num_rows: int
    position: int  # of the first row


@dataclass(frozen=True)
class PackedRows:
    """Rows of G generations that verify different numbers of drafts, behind each other.

    A request has the row of its last token and those of its first drafts. `whole` is the pass in
    which each request has all of its R rows, verified or not.
    """

    starts: Tensor  # [G+1] int32: each request's first row; behind them the number of rows
    indices: Tensor  # [T] int64: each row's in `whole`
    places: Tensor  # [G * R] int64: the reverse; a row left out has its request's last one
    whole: AttentionMetadata


class KeptRows(NamedTuple):
    """Rows of a pass that are computed on once all rows' keys and values are written."""

    rows: Tensor  # [B] int64, one of each request
    meta: AttentionMetadata  # of a pass of these rows alone


@dataclass(frozen=True)
class AttentionMetadata:
    """One pass over T rows of B requests (C contexts, then G generations).

    Block ids 0 and 1 are reserved in every group (NULL_BLOCK, SCRATCH_BLOCK). A loop that writes
    tables itself hands out ids from NUM_RESERVED_BLOCKS on.
    """

    context_lens: tuple[int, ...]  # rows of each context in this pass
    num_generations: int  # G
    rows_per_generation: int  # K+1 when verifying, 1 in a draft step
    position_ids: Tensor
    """[T] int64. A generation's row past the maximum length is at 0, with slot -1; contexts have no
    such row, and their positions grow."""
    kv_lens: Tensor  # [B] int32, KV length including this pass's rows; of `packed.whole` if packed
    max_kv_len: int  # the host's upper bound of kv_lens
    kv_groups: tuple[KVGroup, ...]
    block_tables: tuple[Tensor, ...]  # per KV group [B, max_blocks] int32, padded with NULL_BLOCK
    slot_mappings: tuple[Tensor, ...]  # per KV group [T] int64: where a row's KV goes, -1 nowhere
    max_seq_len: int  # rows at or past this position write nowhere
    context_starts: tuple[int, ...] = ()  # position of each context's first row; () is all 0
    context_firsts: tuple[int, ...] = ()
    """Position of the first row that each context's request has computed: rows before it came from
    the prefix cache, with their keys and values alone. () is all 0."""
    last_context_rows: Tensor | None = None
    """[C] int64: each context's last row, set for a padded pass (a captured graph). Then only the
    number and the sum of `context_lens` hold. Rows after the last one are padding, and so are
    contexts that end where the one before does."""
    rope_position_ids: Tensor | None = None
    """[T] or [3, T] int64: rotary positions where they are not `position_ids` (M-RoPE: time,
    height, width). A row's KV slot follows from `position_ids` alone."""
    rope_deltas: Tensor | None = None
    """[B] int64: rotary positions after the prompt less `position_ids`. It is negative after an
    image, whose many tokens take few rotary positions."""
    window_position_ids: Tensor | None = None
    """[T] int64, of draft passes: the positions that windows are counted from, where they are not
    `position_ids`. A row sees keys from W - 1 before these on, up to its `position_ids`."""
    packed: PackedRows | None = None
    """Set where generations have different numbers of rows, `rows_per_generation` at most."""
    recurrent: RecurrentPass | None = None  # of models with linear attention
    images: tuple[ImageRows, ...] = ()
    """Rows of contexts that attend to each other in both directions, in layers trained so."""
    derived: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What layers compute once per pass: masks, gather indices, slots that are written. It begins
    anew wherever another field changes."""

    @property
    def num_contexts(self) -> int:
        return len(self.context_lens)

    @property
    def num_seqs(self) -> int:
        return len(self.context_lens) + self.num_generations

    @property
    def num_context_tokens(self) -> int:
        return sum(self.context_lens)

    @property
    def num_ctx_tokens(self) -> int:
        """`num_context_tokens` by TensorRT-LLM's name."""
        return self.num_context_tokens

    @property
    def num_tokens(self) -> int:
        if self.packed is not None:
            return self.packed.indices.shape[0]
        return self.num_context_tokens + self.num_generations * self.rows_per_generation

    def check(self) -> None:
        """Compares the fields with each other, for a loop of one's own that sets them itself.

        It reads the tensors, so it waits for the device: call it while the loop is developed. A
        wrong field may only show in bad drafts.

        Raises:
            ConfigError: what does not fit, with what to set.
        """
        from .pass_check import check_pass

        check_pass(self)

    def pack(
        self, packed: PackedRows, positions: Tensor, slots: tuple[Tensor, ...]
    ) -> AttentionMetadata:
        """Returns this pass with some of its rows, [T] `positions` and `slots` of each KV group."""
        ropes = self.rope_position_ids
        return replace(
            self,
            packed=packed,
            position_ids=positions,
            slot_mappings=slots,
            rope_position_ids=None if ropes is None else ropes[..., packed.indices],
            derived={},
        )

    def ends_of_contexts(self) -> Tensor:
        """Returns the last row of each context, [C] int64."""
        if self.last_context_rows is not None:
            return self.last_context_rows
        key = "ends of contexts"
        if key not in self.derived:
            ends = torch.tensor(self.context_lens, dtype=torch.int64).cumsum(0) - 1
            device = self.position_ids.device
            if device.type == "cuda":  # the host does not wait
                ends = ends.pin_memory().to(device, non_blocking=True)
            self.derived[key] = ends
        return self.derived[key]

    def contexts_only(self) -> AttentionMetadata:
        """Returns the same pass without its generation requests."""
        rows, seqs = self.num_context_tokens, self.num_contexts
        ropes, deltas = self.rope_position_ids, self.rope_deltas
        return replace(
            self,
            num_generations=0,
            position_ids=self.position_ids[:rows],
            rope_position_ids=None if ropes is None else ropes[..., :rows],
            rope_deltas=None if deltas is None else deltas[:seqs],
            kv_lens=self.kv_lens[:seqs],
            block_tables=tuple(table[:seqs] for table in self.block_tables),
            slot_mappings=tuple(slots[:rows] for slots in self.slot_mappings),
            derived={},
        )

    def for_rows(
        self,
        positions: Tensor,
        slot_mappings: tuple[Tensor, ...],
        extra_kv: int,
        kv_lens: Tensor | None = None,
    ) -> AttentionMetadata:
        """Returns metadata of a draft pass: the same number of rows for every request.

        Args:
            positions: [B, R] int64, consecutive per request. A row past `max_seq_len` must be at 0
                already (so it attends to length 1), with slot -1.
            slot_mappings: per KV group, [B, R] int64.
            extra_kv: how far `positions` may lie beyond this pass's `max_kv_len` at most.
            kv_lens: [B] int32, one more than each request's last position, if known already.
        """
        if kv_lens is None:
            kv_lens = (positions[:, -1] + 1).to(torch.int32)
        num_seqs, rows = positions.shape
        return replace(
            self,
            context_lens=(),
            context_starts=(),
            context_firsts=(),
            last_context_rows=None,
            images=(),
            window_position_ids=None,
            num_generations=num_seqs,
            rows_per_generation=rows,
            position_ids=positions.reshape(-1),
            rope_position_ids=self.rope_positions_of_rows(positions),
            kv_lens=kv_lens,
            max_kv_len=min(self.max_kv_len + extra_kv, self.max_seq_len),
            slot_mappings=tuple(slots.reshape(-1) for slots in slot_mappings),
            derived={},
        )

    def largest_positions(self) -> Tensor:
        """Returns for each row of a draft pass its request's largest position, [T] int64."""
        if LARGEST not in self.derived:
            rows = self.position_ids.view(self.num_seqs, self.rows_per_generation)
            self.derived[LARGEST] = rows.amax(1, keepdim=True).expand_as(rows).flatten()
        return cast(Tensor, self.derived[LARGEST])

    def know_largest_positions(self, positions: Tensor) -> None:
        """Takes what `largest_positions` returns, where it was found already."""
        self.derived[LARGEST] = positions

    def seen_both_ways(self, *, windows_by_row: bool = False) -> AttentionMetadata:
        """Returns a draft pass in which a row sees all rows of its request, later ones too.

        A row sees keys up to its position, so here all rows of a request stand at the last one's.
        Their slots and rotary positions are those of the pass it is made of. With
        `windows_by_row` their windows are counted from there too, else from the last row.
        """
        return replace(
            self,
            position_ids=self.largest_positions(),
            window_position_ids=self.position_ids if windows_by_row else None,
            derived={},
        )

    def first_keys(self, window: int) -> Tensor:
        """Returns the first key that each row sees with a window, [T] int64; it may be below 0."""
        key = "first keys", window
        if key not in self.derived:
            positions = self.window_position_ids
            positions = self.position_ids if positions is None else positions
            self.derived[key] = positions - (window - 1)
        return self.derived[key]

    def rope_positions_of_rows(self, positions: Tensor) -> Tensor | None:
        """Returns rotary positions [B * R] of positions [B, R] or [B * R] int64 after the prompts;
        None where the two are the same."""
        if self.rope_deltas is None:
            return None
        rows = positions.view(self.num_seqs, -1) + self.rope_deltas[:, None]
        return rows.clamp_min(0).flatten()
