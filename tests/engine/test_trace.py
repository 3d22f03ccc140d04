"""The worked trace of the design, row by row: what the draft head is given, and what comes out.

Prompt `A B C D`, K = 3, an EAGLE-3 head. The head here only writes down what it is asked and
proposes what the trace says; acceptance, shifts, positions, lengths and slots are the worker's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trtspec import EagleDecodingConfig, SpecMetadata
from trtspec.metadata import AttentionMetadata, CapturedHiddenStates, KVGroup
from trtspec.workers import Eagle3OneModelWorker

A, B, C, D, E, F, G, H, X, Y, N, O, P = range(1, 14)  # noqa: E741
PAGE, VOCAB = 4, 20
TABLE = [5, 3, 7]  # physical blocks of positions 0-3, 4-7, 8-11


@dataclass
class RecordingHead:
    """Hidden states are single numbers: H_x of the target is x, the head's own h is -position."""

    proposals: list[int]
    passes: list[dict[str, Any]] = field(default_factory=list)
    layers_to_capture: tuple[int, ...] = (0,)
    d2t: Tensor | None = None
    advances_positions: bool = True

    def kv_group_of_layer(self, layer: int) -> int:
        return 0

    def project_target_hidden(self, hidden: Tensor) -> Tensor:
        return hidden

    def __call__(
        self, ids: Tensor, positions: Tensor, hidden: Tensor, meta: AttentionMetadata, step: int
    ) -> tuple[Tensor, Tensor]:
        self.passes.append({
            "ids": ids.tolist(), "positions": positions.tolist(),
            "hidden": hidden[:, 0].tolist(), "kv_lens": meta.kv_lens.tolist(),
            "slots": meta.slot_mappings[0].tolist(), "step": step,
        })  # fmt: skip
        out = -positions[:, None].float()
        return out, out

    def compute_logits(self, hidden: Tensor, step: int) -> Tensor:
        self.passes[-1]["proposing"] = hidden[:, 0].tolist()
        return torch.nn.functional.one_hot(
            torch.tensor([self.proposals[len(self.passes) - 1]]), VOCAB
        ).float()


def _slot(position: int) -> int:
    return TABLE[position // PAGE] * PAGE + position % PAGE


def _pass(
    worker: Eagle3OneModelWorker, head: RecordingHead, ids: list[int], start: int,
    choices: list[int], is_context: bool, max_seq_len: int = 12,
) -> dict[str, Tensor]:  # fmt: skip
    positions = torch.arange(start, start + len(ids))
    cache = torch.zeros(1, 8, PAGE, 1, 2)
    meta = AttentionMetadata(
        context_lens=(len(ids),) if is_context else (),
        num_generations=0 if is_context else 1,
        rows_per_generation=1 if is_context else len(ids),
        position_ids=positions,
        kv_lens=torch.tensor([start + len(ids)], dtype=torch.int32),
        max_kv_len=start + len(ids),
        kv_groups=(KVGroup(cache, cache.clone()),),
        block_tables=(torch.tensor([TABLE], dtype=torch.int32),),
        slot_mappings=(torch.tensor([_slot(int(p)) for p in positions]),),
        max_seq_len=max_seq_len,
    )
    captured = CapturedHiddenStates((0,), torch.zeros(16, 1))
    spec = SpecMetadata(
        max_num_requests=1, max_draft_len=3, max_total_draft_tokens=3, request_ids=[0],
        num_generations=0 if is_context else 1,
        draft_tokens=None if is_context else torch.tensor([ids[1:]], dtype=torch.int32),
        captured=captured,
    )  # fmt: skip
    spec.maybe_capture_hidden_states(0, torch.tensor(ids)[:, None].float())
    logits = torch.nn.functional.one_hot(torch.tensor(choices), VOCAB).float()
    return worker(torch.tensor(ids), positions, None, logits, meta, spec, head)


def test_the_worked_trace() -> None:
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=3, speculative_model="-"))
    head = RecordingHead([F, G, H])
    out = _pass(worker, head, [A, B, C, D], 0, [E], is_context=True)
    assert out["new_tokens"].tolist() == [[E, -1, -1, -1]]
    assert out["new_tokens_lens"].tolist() == [1]
    assert out["next_draft_tokens"].tolist() == [[F, G, H]]
    assert out["next_new_tokens"].tolist() == [[E, F, G, H]]
    first, second, third = head.passes
    assert first["ids"] == [B, C, D, E] and first["hidden"] == [A, B, C, D]
    assert first["positions"] == [0, 1, 2, 3] and first["proposing"] == [-3]
    assert second["ids"] == [F] and second["hidden"] == [-3] and second["positions"] == [4]
    assert third["ids"] == [G] and third["hidden"] == [-4] and third["positions"] == [5]
    assert [p["kv_lens"] for p in head.passes] == [[4], [5], [6]]
    assert [p["step"] for p in head.passes] == [0, 1, 2]
    written = first["slots"] + second["slots"] + third["slots"]
    assert written == [_slot(p) for p in range(6)]  # draft KV holds positions 0-5

    head = RecordingHead([N, O, P])
    out = _pass(worker, head, [E, F, G, H], 4, [F, G, X, Y], is_context=False)
    assert out["new_tokens"].tolist() == [[F, G, X, -1]]
    assert out["new_tokens_lens"].tolist() == [3]
    assert out["next_new_tokens"].tolist() == [[X, N, O, P]]
    first, second, third = head.passes
    assert first["ids"][:3] == [F, G, X] and first["hidden"][:3] == [E, F, G]
    assert first["positions"] == [4, 5, 6, 7] and first["proposing"] == [-6]
    assert second["ids"] == [N] and second["hidden"] == [-6] and second["positions"] == [7]
    assert third["ids"] == [O] and third["hidden"] == [-7] and third["positions"] == [8]
    # past + len + 1 and + 2, with past = 4
    assert [p["kv_lens"] for p in head.passes] == [[8], [8], [9]]
    assert second["slots"] == [_slot(7)] and third["slots"] == [_slot(8)]


def test_past_the_maximum_length() -> None:
    """Such a row writes nowhere, attends to length 1, and its proposal is -1."""
    worker = Eagle3OneModelWorker(EagleDecodingConfig(max_draft_len=3, speculative_model="-"))
    head = RecordingHead([N, O, P])
    out = _pass(worker, head, [E, F, G, H], 4, [F, G, X, Y], is_context=False, max_seq_len=8)
    _, second, third = head.passes
    assert second["positions"] == [7] and second["slots"] == [_slot(7)]
    assert third["positions"] == [0] and third["slots"] == [-1] and third["kv_lens"] == [1]
    # X has position 7, the last one: nothing can follow it
    assert out["next_new_tokens"].tolist() == [[X, -1, -1, -1]]
    head = RecordingHead([N, O, P])
    out = _pass(worker, head, [E, F, G, H], 4, [F, G, X, Y], is_context=False, max_seq_len=9)
    assert out["next_new_tokens"].tolist() == [[X, N, -1, -1]]
