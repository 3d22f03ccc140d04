"""Compiles the Triton kernels of `ops/tokens`, `ops/step` and `ops/padded` for a Hopper GPU, and
those of the gated delta rule.

Run as a script, it prints as JSON the names of the kernels there are, and the shared memory of
those compiled. It needs an environment without TRITON_INTERPRET.
"""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from compile_triton import compiled
from triton.runtime.jit import JITFunction

from trtspec.metadata.attention import AttentionMetadata, KVGroup
from trtspec.metadata.draft_memory import DraftMemory
from trtspec.metadata.missed import MissedRows
from trtspec.metadata.sampling import SamplingMetadata, SlotSampling
from trtspec.ops.layer import triton_delta_rule
from trtspec.ops.layer.delta_rule import (
    Contexts,
    DeltaMemory,
    DeltaRows,
    DeltaWeights,
    Generations,
    places,
)
from trtspec.ops.padded import torch as padded_torch
from trtspec.ops.padded import triton as padded
from trtspec.ops.step import (
    triton_drafts,
    triton_missed,
    triton_packing,
    triton_recurrent,
    triton_rows,
)
from trtspec.ops.step.packing import PassRows
from trtspec.ops.step.rows import BlockShape, ContextLayout
from trtspec.ops.tokens import (
    triton_bitmask,
    triton_draw,
    triton_handover,
    triton_judge,
    triton_lookup,
    triton_markov_walk,
    triton_probability,
    triton_ring,
    triton_walk,
)
from trtspec.ops.tokens.lookup import Earlier, Lookup
from trtspec.ops.tokens.markov_walk import MarkovTables
from trtspec.ops.tokens.ring import Ring
from trtspec.ops.tokens.walk import Codebooks, PathCandidates

MODULES = (
    "layer.triton_delta_rule",
    "padded.triton",
    "step.triton_drafts",
    "step.triton_missed",
    "step.triton_packing",
    "step.triton_recurrent",
    "step.triton_rows",
    "tokens.triton_bitmask",
    "tokens.triton_draw",
    "tokens.triton_filter",
    "tokens.triton_handover",
    "tokens.triton_judge",
    "tokens.triton_markov_walk",
    "tokens.triton_probability",
    "tokens.triton_ring",
    "tokens.triton_stats",
    "tokens.triton_lookup",
    "tokens.triton_walk",
)
CONTEXTS, GENERATIONS, K, VOCAB, DRAFT_VOCAB, SLOTS = 1, 2, 3, 5000, 3000, 4
MANY_DRAFTS = 65_537
CPU = torch.device("cpu")


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def sampled(has_memory: bool, has_table: bool, has_filters: bool, is_block: bool) -> dict[str, Any]:
    """The kernels of a sampled step and of its drafts."""
    batch, rows = CONTEXTS + GENERATIONS, CONTEXTS + GENERATIONS * (K + 1)
    d2t = longs(DRAFT_VOCAB) if has_table else None
    vocab = DRAFT_VOCAB if has_table else VOCAB
    memory = None
    if has_memory:
        memory = DraftMemory.allocate(SLOTS, K, vocab, VOCAB, d2t, CPU, torch.bfloat16)
    sampling = SamplingMetadata(
        temperatures=torch.ones(rows),
        top_ks=ints(rows),
        top_ps=torch.ones(rows),
        seeds=longs(rows),
        positions=longs(rows),
        has_filters=has_filters,
    )

    def accept() -> None:
        triton_judge.accept_sampled(
            torch.zeros(rows, VOCAB, dtype=torch.bfloat16),
            ints(GENERATIONS, K),
            CONTEXTS,
            K + 1,
            sampling,
            memory=memory,
            slots=longs(batch),
            is_block=is_block,
        )

    def draw() -> None:
        triton_draw.draw_drafts(
            torch.zeros(batch, vocab),
            d2t,
            torch.ones(batch),
            longs(batch),
            longs(batch),
            0,
            longs(batch),
            memory,
        )

    return compiled(accept) | compiled(draw)


def step() -> dict[str, Any]:
    """The kernels of `ops/step`."""
    tables = ints(GENERATIONS, 6), ints(GENERATIONS, 9)
    cache = torch.zeros(1, 3, 16, 1, 8)
    meta = AttentionMetadata(
        context_lens=(),
        num_generations=GENERATIONS,
        rows_per_generation=1,
        position_ids=longs(GENERATIONS),
        kv_lens=ints(GENERATIONS),
        max_kv_len=9,
        kv_groups=(KVGroup(cache, cache),) * 2,
        block_tables=tables,
        slot_mappings=(longs(GENERATIONS),) * 2,
        max_seq_len=40,
    )
    with_prompt = replace(
        meta, context_lens=(1,), context_starts=(0,), num_generations=GENERATIONS - 1
    )
    accepted, lens, certain = ints(GENERATIONS, K + 1), ints(GENERATIONS), longs(GENERATIONS)
    sampling, past = SlotSampling.neutral(SLOTS, CPU), longs(SLOTS)
    states = torch.zeros(8, 48), torch.zeros(8, 80)
    missed = MissedRows.allocate(SLOTS, 48, torch.float32, CPU)
    unary = torch.zeros(K, GENERATIONS, 16, dtype=torch.bfloat16)
    projected = torch.zeros(K, GENERATIONS, 256, dtype=torch.bfloat16)
    candidates = PathCandidates(longs(K, GENERATIONS, 16), unary, projected)
    drafts_logits = torch.zeros(2 * GENERATIONS, MANY_DRAFTS, dtype=torch.bfloat16)
    w1, w2 = torch.zeros(2, MANY_DRAFTS, 256, dtype=torch.bfloat16)  # DSpark's usual rank
    markov = MarkovTables(w1, w2, longs(MANY_DRAFTS))
    books = Codebooks(*torch.zeros(2, DRAFT_VOCAB, 256, dtype=torch.bfloat16))
    chances = torch.zeros(SLOTS, K)
    rows = PassRows(longs(8), longs(8), (longs(8), longs(8)))
    layout = ContextLayout(longs(8), longs(8), longs(GENERATIONS), longs(GENERATIONS))
    lookup = Lookup(32, 1, 16, 8, K, 1.0, 0.1)
    ring = Ring(ints(64), longs(2, 2), ints(3, 257), ints(3, 64), longs(1))
    earlier = Earlier(ring, longs(GENERATIONS, 2))
    calls = (
        (triton_packing.save_chances, certain, (torch.zeros(GENERATIONS),) * 2, chances),
        (triton_packing.pack_rows, certain, ints(GENERATIONS, K), chances, rows, 3),
        (triton_probability.best_probabilities, drafts_logits),
        (triton_rows.draft_step, meta, accepted, longs(GENERATIONS, K + 1), 4),
        (triton_rows.draft_steps, meta, longs(GENERATIONS), 4, 3),
        (
            *(triton_rows.gather_step_inputs, certain, ints(SLOTS, K + 1), past, sampling),
            *(tables, 16, K + 1, 40),
        ),
        (triton_rows.gather_context_inputs, certain, layout, sampling, tables, 16, 40),
        (triton_drafts.shift_contexts, longs(8), accepted[:, 0], lens, certain),
        (triton_drafts.shift_contexts, longs(8), accepted[:, 0], None, certain),
        (triton_drafts.shift_for_drafting, accepted, lens, longs(8), K + 1),
        (triton_drafts.start_chain, meta, accepted, lens, 4, 3),
        (triton_drafts.last_two_tokens, longs(8), longs(8), accepted, lens, certain),
        (triton_drafts.start_block, meta, accepted, lens, BlockShape(6, 5, 7), 4),
        (triton_drafts.start_block, with_prompt, accepted, lens, BlockShape(6, 5, 7), 4),
        (triton_drafts.masked_rows, accepted, lens, longs(8), certain, 6, 3, 7, 0),
        (triton_drafts.gather_distinct, certain, states),
        (triton_recurrent.begin_pass, longs(SLOTS), longs(5), longs(2), longs(12)[::4]),
        (triton_missed.keep_missed, certain, certain, certain, states[0], lens, missed),
        (triton_missed.take_missed, certain, missed, longs(SLOTS), tables, 16),
        (triton_missed.take_missed, certain, missed, None, tables, 16),
        (triton_drafts.to_target_ids, lens, longs(DRAFT_VOCAB)),
        (triton_drafts.limit_drafts, (lens, lens), certain, 40, K),
        (triton_drafts.limit_and_lead, accepted, lens, (lens, lens), certain, 40, K),
        (triton_drafts.next_new_tokens, accepted, lens, ints(GENERATIONS, K), K),
        (triton_bitmask.mask_logits, states[0].bfloat16(), ints(8, 2), None),
        (triton_bitmask.mask_logits, states[0], ints(8, 3), longs(48)),
        (triton_handover.write_to_host, accepted, ints(8, K + 1)),
        (triton_ring.add_texts, ring, longs(86), [40, 40], 0),
        *(
            (triton_lookup.begin_texts, ints(SLOTS, 40), longs(SLOTS), owners, longs(9), [(0, 7)])
            for owners in (None, longs(SLOTS, 2))
        ),
        (triton_lookup.append_tokens, ints(SLOTS, 40), longs(SLOTS), certain, accepted, lens),
        (triton_lookup.propose_ngrams, ints(GENERATIONS, 700), longs(GENERATIONS), K, 4, 2, True),
        (triton_lookup.look_up, ints(GENERATIONS, 700), longs(GENERATIONS), None, lookup),
        (triton_lookup.look_up, ints(GENERATIONS, 700), longs(GENERATIONS), earlier, lookup),
        (triton_walk.walk_candidates, candidates, lens, books),
        (triton_markov_walk.walk_by_draft, drafts_logits, lens, markov),
        (triton_rows.save_step, certain, longs(8), lens, accepted, past, ints(SLOTS, K + 1)),
    )
    found: dict[str, Any] = {}
    for function, *arguments in calls:
        found |= compiled(function, *arguments)
    return found


def vllm() -> dict[str, Any]:
    """The kernels of `ops/padded`."""
    starts, lens = ints(GENERATIONS + 1), ints(GENERATIONS)
    target = padded_torch.TargetRows(longs(8), longs(8), lens, lens, starts)
    discard = torch.zeros(GENERATIONS, dtype=torch.bool)
    calls = (
        (padded.next_tokens_padded, ints(GENERATIONS, K + 1), lens, discard, VOCAB),
        (padded.inputs_padded, starts, lens, lens),
        (padded.compact_rejected, starts, lens, 8),
        (padded.step_slots_and_lens, longs(GENERATIONS), lens, (ints(GENERATIONS, 6),), (16,), 40),
        (padded.expand_rows, target, 3, 2, 7, 0),
        (padded.expand_rows, target, 3, 3, 7, 0),
        (padded.extend_starts, starts, lens, 2),
    )
    found: dict[str, Any] = {}
    for function, *arguments in calls:
        found |= compiled(function, *arguments)
    return found


def delta() -> dict[str, Any]:
    """The kernels of a layer of the gated delta rule, in sizes of Qwen3-Next."""
    key_heads, heads, dim, taps, drafts, rows = 16, 32, 128, 4, 3, 16
    channels = (2 * key_heads + heads) * dim

    def half(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16)

    triton_delta_rule.splits = lambda x: x.dtype != torch.float32  # as on a GPU
    joined = half(rows, channels + heads * dim)
    given = (
        DeltaRows(joined[:, :channels], half(rows, 2 * heads)),
        DeltaWeights(torch.zeros(taps, channels), torch.zeros(heads), torch.zeros(heads)),
        DeltaMemory(
            matrices=torch.zeros(SLOTS, heads, dim, dim),
            mixed=half(SLOTS, places(drafts, taps), channels),
            gates=half(SLOTS, places(drafts, taps), 2 * heads),
        ),
    )
    gate = joined[:, channels:]
    calls = (
        (triton_delta_rule.delta_generations, *given, Generations(*longs(3, rows // (drafts + 1)))),
        (triton_delta_rule.delta_contexts, *given, Contexts(*longs(2, 3), longs(rows))),
        (triton_delta_rule.norm_and_gate, half(rows, heads, dim), gate, half(dim), 1e-6),
    )
    found: dict[str, Any] = {}
    for function, *arguments in calls:
        found |= compiled(function, *arguments)
    return found


def kernels() -> set[str]:
    """The names of all kernels of these modules: jitted functions that a host function launches."""
    modules = [importlib.import_module(f"trtspec.ops.{name}") for name in MODULES]
    jitted = (
        (name, value.__module__ == module.__name__)
        for module in modules
        for name, value in vars(module).items()
        if isinstance(value, JITFunction)
    )
    return {name for name, is_there in jitted if is_there and name.endswith("_kernel")}


if __name__ == "__main__":
    found = step() | vllm() | delta()
    for case in product([False, True], repeat=4):
        has_memory, has_table, has_filters, is_block = case
        if has_filters == has_memory and (has_memory or not is_block):
            found |= sampled(*case)
    shared = {name: kernel.metadata.shared for name, kernel in found.items()}
    json.dump({"there": sorted(kernels()), "shared": shared}, sys.stdout)
