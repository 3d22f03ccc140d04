"""Sampled requests in a loop that is not ours: it populates rows as TensorRT-LLM's does, and knows
nothing of positions, seeds or memories of drafts.

The target is a table: the logits after token t are TABLE[t]. The head drafts with the same table,
so every draft must be kept, whatever the rule.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from trtspec import (
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
    SpecMetadata,
    SpeculativeDecodingMode,
)
from trtspec.errors import ConfigError
from trtspec.metadata import AttentionMetadata, CapturedHiddenStates, KVGroup
from trtspec.metadata import spec as spec_module
from trtspec.workers import (
    DraftTargetWorker,
    Eagle3OneModelWorker,
    MaskedDraftTargetWorker,
    MTPWorker,
    NGramWorker,
    SpecWorkerBase,
    create_worker,
)
from trtspec.workers import base as base_module

V, K, PAGE, BLOCKS, LONGEST = 12, 3, 4, 4, 1024
TABLE = torch.randn(V, V, generator=torch.Generator().manual_seed(5))


class TableHead:
    """A head that knows the target's table: its hidden state is the token it read."""

    d2t = None
    layers_to_capture: tuple[int, ...] = (0,)
    advances_positions = True

    def __init__(self, table: Tensor = TABLE):
        self.table = table

    def project_target_hidden(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def __call__(self, input_ids: Tensor, *others: Any, **named: Any) -> Tensor:
        return input_ids[:, None].float()

    def compute_logits(self, hidden: Tensor, step: int) -> Tensor:
        return self.table[hidden[:, 0].long()]

    def kv_group_of_layer(self, layer: int) -> int:
        return 0


class TableModel:
    """A draft model that knows the target's table, and notes the positions that it read."""

    def __init__(self) -> None:
        self.positions: list[list[int]] = []

    def __call__(self, input_ids: Tensor, position_ids: Tensor, meta: AttentionMetadata) -> Tensor:
        self.positions.append(position_ids.tolist())
        return input_ids[:, None].float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return TABLE[hidden[:, 0].long().clamp(max=V - 1)]  # V is the mask token


@dataclass
class Text:
    """A request of the loop, with TensorRT-LLM's names."""

    py_request_id: int
    py_seq_slot: int | None
    tokens: list[int]
    sampling_config: Any
    state: Any = None

    def __post_init__(self) -> None:
        self.state = SimpleNamespace(name="CONTEXT_INIT")


class Loop:
    """Prompts in one pass, then steps of K+1 rows."""

    def __init__(
        self,
        worker: SpecWorkerBase,
        slots: list[int | None],
        temperature: float = 1.0,
        num_axes: int = 1,
    ):
        self.worker, self.num_axes = worker, num_axes
        self.head: Any = TableHead()
        config = SimpleNamespace(temperature=[temperature], top_k=None, top_p=None)
        self.texts = [
            Text(7 + i, slot, [1 + i, 2, 3][: 1 + i % 3], config) for i, slot in enumerate(slots)
        ]
        self.spec = SpecMetadata(8, K, K, allow_advanced_sampling=True, device="cpu")
        self.rows: Tensor | None = None

    def step(self) -> list[int]:
        """Accepted tokens of each text."""
        is_context, spec = self.rows is None, self.spec
        ids = [t.tokens for t in self.texts] if is_context else self.rows.tolist()
        starts = [len(t.tokens) - (len(t.tokens) if is_context else 1) for t in self.texts]
        flat = torch.tensor([i for row in ids for i in row]).clamp_min(0)
        positions = torch.cat([s + torch.arange(len(r)) for s, r in zip(starts, ids, strict=True)])
        spec.populate_sampling_params_for_one_model(self.texts)
        spec.request_ids = [t.py_request_id for t in self.texts]
        spec.num_generations = 0 if is_context else len(self.texts)
        spec.draft_tokens = None if is_context else self.rows[:, 1:]
        spec.captured = CapturedHiddenStates((0,), torch.zeros(len(flat), 1))
        lens = torch.tensor([len(row) for row in ids])
        last = lens.cumsum(0) - 1
        logits = TABLE[flat[last]] if is_context else TABLE[flat]
        cache = torch.zeros(1, BLOCKS, PAGE, 1, 1)
        meta = AttentionMetadata(
            context_lens=tuple(lens.tolist()) if is_context else (),
            num_generations=spec.num_generations,
            rows_per_generation=1 if is_context else K + 1,
            position_ids=positions,
            kv_lens=(torch.tensor(starts) + lens).to(torch.int32),
            max_kv_len=LONGEST,
            kv_groups=(KVGroup(cache, cache.clone()),),
            block_tables=(torch.full((len(ids), LONGEST // PAGE), 2, dtype=torch.int32),),
            slot_mappings=(torch.zeros(len(flat), dtype=torch.int64),),
            max_seq_len=LONGEST,
        )
        # Of M-RoPE's axes the first counts.
        axes = torch.stack([positions, *[positions + 50] * (self.num_axes - 1)])
        out = self.worker(flat, axes, None, logits, meta, spec, self.head)
        for text, row, count in zip(
            self.texts, out["new_tokens"].tolist(), out["new_tokens_lens"].tolist(), strict=True
        ):
            text.tokens += row[:count]
            text.state = SimpleNamespace(name="GENERATION_IN_PROGRESS")
        self.rows = out["next_new_tokens"]
        return out["new_tokens_lens"].tolist()


@pytest.mark.parametrize("num_axes", [1, 3])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_draft_model_reads_positions_of_one_axis(is_masked: bool, num_axes: int) -> None:
    """TensorRT-LLM's loop hands over [1, T], and one with M-RoPE [3, T]."""
    config = DraftTargetDecodingConfig(max_draft_len=K, speculative_model="-")
    worker = MaskedDraftTargetWorker(config, V) if is_masked else DraftTargetWorker(config)
    loop = Loop(worker, [3, 0, 5], num_axes=num_axes)
    loop.head = model = TableModel()
    assert loop.step() == [1, 1, 1]
    assert model.positions[0] == [0, 0, 1, 0, 1, 2], "of prompts of one to three tokens"
    lens = [loop.step() for _ in range(10)]
    assert all(isinstance(p, int) for row in model.positions for p in row)
    if is_masked:  # it knows what follows the last token
        assert min(map(min, lens)) >= 2
    else:
        assert lens == [[K + 1] * 3] * 10


@pytest.mark.parametrize("rows", ["seq_lens", "gather_ids"])
@pytest.mark.parametrize("contexts", [0, 1])
@pytest.mark.parametrize(
    "config",
    [None, NGramDecodingConfig(max_draft_len=K), SADecodingConfig(max_draft_len=K)],
    ids=["none", "ngram", "sa"],
)
def test_without_a_network_the_loops_own_metadata_is_enough(
    config: Any, contexts: int, rows: str
) -> None:
    """Of another engine's attention metadata the numbers of requests are read, nothing else."""
    worker = create_worker(config)
    lens = [3] * contexts + [worker.max_draft_len + 1]
    fields: dict[str, Any] = {"seq_lens": lens}
    if rows == "gather_ids":
        fields = {"gather_ids": torch.arange(sum(lens))[2 * contexts :]}
    outputs = []
    for meta in (None, SimpleNamespace(num_contexts=contexts, num_seqs=len(lens))):
        state = worker.allocate_state(2, LONGEST, torch.device("cpu"))
        for slot in range(2):
            worker.admit(state, slot, [1, 2, 3, 1, 2, 3])
        spec = SpecMetadata(
            2, worker.max_draft_len, worker.max_draft_len, 1, allow_advanced_sampling=True,
            request_ids=list(range(len(lens))), slot_ids=torch.arange(len(lens)), state=state,
            draft_tokens=torch.full((1, worker.max_draft_len), 2), device="cpu", **fields,
        )  # fmt: skip
        params = SamplingParams(temperature=1.0, seed=4)
        spec.populate_sampling_params_for_one_model(
            [
                SimpleNamespace(sampling_params=params, is_generation=i >= contexts)
                for i in range(len(lens))
            ]
        )
        ids = torch.arange(sum(lens)) % V
        logits = TABLE[ids[2 * contexts :]]
        out = worker(ids, ids[None], None, logits, meta, spec)
        outputs.append((out["new_tokens"].tolist(), out["next_new_tokens"].tolist()))
    assert outputs[0] == outputs[1]


def test_a_network_needs_our_metadata() -> None:
    spec = SpecMetadata(1, K, K, request_ids=[0], slot_ids=torch.tensor([0]))
    meta: Any = SimpleNamespace(num_contexts=1, num_seqs=1)
    with pytest.raises(ConfigError, match=r"TableHead and SimpleNamespace: .* AttentionMetadata"):
        _worker("strict")(
            torch.arange(3), torch.arange(3), None, TABLE[2:3], meta, spec, TableHead()
        )


@pytest.mark.parametrize("layers", [(1,), (0, 1), (1, 0)])
def test_captured_layers_that_the_head_does_not_read_are_refused(layers: tuple[int, ...]) -> None:
    """Nearly nothing that such a head drafts would be accepted."""
    head = TableHead()
    head.layers_to_capture = (0,) if len(layers) == 1 else (0, 2)
    spec = SpecMetadata(1, K, K, request_ids=[0], slot_ids=torch.tensor([0]))
    spec.captured = CapturedHiddenStates(layers, torch.zeros(3, len(layers)))
    meta = AttentionMetadata(
        context_lens=(3,), num_generations=0, rows_per_generation=1, kv_groups=(),
        position_ids=torch.arange(3), kv_lens=torch.tensor([3], dtype=torch.int32), max_kv_len=3,
        block_tables=(), slot_mappings=(), max_seq_len=LONGEST,
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"reads target layers .* holds .*: give it the head's"):
        _worker("strict")(torch.arange(3), torch.arange(3), None, TABLE[2:3], meta, spec, head)


def test_vanilla_mtp_refuses_contexts_of_unknown_length() -> None:
    worker = MTPWorker(MTPDecodingConfig(num_nextn_predict_layers=K, use_mtp_vanilla=True))
    state = worker.allocate_state(2, LONGEST, torch.device("cpu"), hidden_size=1)
    spec = SpecMetadata(1, K, K, request_ids=[0], slot_ids=torch.tensor([0]), state=state)
    spec.captured = CapturedHiddenStates((0,), torch.zeros(4, 1))
    meta = AttentionMetadata(
        context_lens=(4,), num_generations=0, rows_per_generation=1, kv_groups=(),
        position_ids=torch.arange(4), kv_lens=torch.tensor([3], dtype=torch.int32), max_kv_len=3,
        block_tables=(), slot_mappings=(), max_seq_len=LONGEST,
        last_context_rows=torch.tensor([2]),
    )  # fmt: skip
    with pytest.raises(ConfigError, match="leave it None"):
        worker(torch.arange(4), torch.arange(4), None, TABLE[2:3], meta, spec, TableHead())


def _worker(rule: str) -> Eagle3OneModelWorker:
    return Eagle3OneModelWorker(
        EagleDecodingConfig(max_draft_len=K, speculative_model="-", acceptance=rule)
    )


@pytest.mark.parametrize("rule", ["rejection", "block", "exact_match"])
def test_a_perfect_head_is_always_accepted(rule: str) -> None:
    loop = Loop(_worker(rule), [3, 0, 5])
    assert loop.step() == [1, 1, 1]
    assert [loop.step() for _ in range(30)] == [[K + 1] * 3] * 30
    assert (loop.worker.draft_memory is None) == (rule == "exact_match")


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_rejection_keeps_more_than_exact_match_of_another_head(rule: str) -> None:
    """So it is rejection sampling that judges, by a memory that nobody asked for."""
    kept = {}
    for one in (rule, "exact_match"):
        loop = Loop(_worker(one), list(range(8)))
        loop.head.table = torch.randn(V, V, generator=torch.Generator().manual_seed(1))
        loop.step()
        kept[one] = sum(sum(loop.step()) - 8 for _ in range(200))
    assert kept[rule] > 1.08 * kept["exact_match"]


def test_without_slots_the_worker_says_that_it_is_exact_match(
    caplog: pytest.LogCaptureFixture,
) -> None:
    base_module._warn_of_exact_match.cache_clear()
    loop = Loop(_worker("rejection"), [None, None])
    with caplog.at_level(logging.WARNING):
        loop.step()
    assert [loop.step() for _ in range(10)] == [[K + 1] * 2] * 10
    assert loop.worker.draft_memory is None
    (message,) = [r.getMessage() for r in caplog.records if "exact match" in r.getMessage()]
    assert "slot_ids" in message and "py_seq_slot" in message


def test_slots_that_no_memory_has_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"py_seq_slot=-1: SpecMetadata has slots 0 … 7"):
        Loop(_worker("rejection"), [0, -1]).step()
    loop = Loop(_worker("rejection"), [0, 9])
    with pytest.raises(ConfigError, match=r"py_seq_slot=9: SpecMetadata has slots 0 … 7"):
        loop.step()
    loop.spec.num_seq_slots = 16
    loop.step()
    assert [loop.step() for _ in range(5)] == [[K + 1] * 2] * 5
    assert loop.worker.draft_memory is not None and len(loop.worker.draft_memory.best) == 17


def test_a_graphs_copy_for_few_requests_knows_all_slots() -> None:
    """What is remembered by slot must not be made for the graph's batch size."""
    loop = Loop(_worker("rejection"), [7, 6])
    loop.spec = loop.spec.create_cuda_graph_metadata(2)
    loop.step()
    assert [loop.step() for _ in range(5)] == [[K + 1] * 2] * 5
    assert loop.worker.draft_memory is not None and len(loop.worker.draft_memory.best) == 9


def test_a_memory_is_not_read_past_its_slots() -> None:
    loop = Loop(_worker("rejection"), [1, 0])
    loop.step()
    loop.spec.num_seq_slots = 16
    with pytest.raises(ConfigError, match="kept for 8 slots, and now there are 16"):
        loop.step()


def test_a_drafter_of_more_tokens_than_the_target_is_refused() -> None:
    loop = Loop(_worker("rejection"), [1, 0])
    loop.head.table = torch.randn(V, V + 4)
    with pytest.raises(ConfigError, match="16 logits, the target 12"):
        loop.step()


def test_a_padded_pass_is_sampled_too() -> None:
    """Rows of gather_ids past those of the logits are of nobody."""
    loop = Loop(_worker("rejection"), [1, 0])
    loop.spec.gather_ids = torch.tensor([0, 2, 2, 2, 2])
    assert loop.step() == [1, 1]


def test_slots_of_the_last_batch_are_not_the_next_ones() -> None:
    spec = SpecMetadata(8, 1, 1, allow_advanced_sampling=True, device="cpu")
    with_slots = _requests(0.5, 0.7)
    for slot, request in zip((5, None), with_slots, strict=True):
        request.py_seq_slot = slot
    spec.populate_sampling_params_for_one_model(with_slots)
    assert spec.slot_ids is not None and spec.slot_ids.tolist() == [5, 8]
    spec.populate_sampling_params_for_one_model(_requests(0.5))
    assert spec.slot_ids is None


def test_slots_that_the_loop_set_stay() -> None:
    loop = Loop(_worker("rejection"), [1, 0])
    own = loop.spec.slot_ids = torch.tensor([6, 7])
    loop.step()
    assert loop.spec.slot_ids is own


@pytest.mark.slow
def test_rows_without_seeds_are_sampled() -> None:
    """These three and the flag are all that a worker of TensorRT-LLM's reads."""
    spec = SpecMetadata(1, 0, 0, allow_advanced_sampling=True, request_ids=[0])
    spec.temperatures, spec.top_ks = torch.tensor([5.0]), torch.zeros(1, dtype=torch.int32)
    spec.top_ps = torch.ones(1)
    worker, counts = NGramWorker(NGramDecodingConfig(max_draft_len=3)), torch.zeros(V)
    for _ in range(2000):
        tokens, _ = worker.sample_and_accept_draft_tokens(
            TABLE[:1], torch.empty(0, dtype=torch.int32), 1, 1, spec
        )
        counts[tokens[0, 0]] += 1
    expected = 2000 * (TABLE[0] / 5.0).softmax(0)
    assert ((counts - expected) ** 2 / expected).sum() < 45  # 11 degrees of freedom: p < 1e-5


# -- rows are buffers --------------------------------------------------------------------------
def _requests(*temperatures: float, generation: bool = True) -> list[Any]:
    return [
        SimpleNamespace(
            sampling_config=SimpleNamespace(temperature=[t], top_k=[5], top_p=[0.5]),
            is_generation=generation,
            request_id=i,
        )
        for i, t in enumerate(temperatures)
    ]


def test_rows_are_written_where_a_captured_graph_reads_them() -> None:
    spec = SpecMetadata(4, 1, 1, allow_advanced_sampling=True, device="cpu")
    copy = spec.create_cuda_graph_metadata(2)
    spec.populate_sampling_params_for_one_model(_requests(0.5, 0.7))
    names = ("temperatures", "top_ks", "top_ps", "seeds")
    made = {name: getattr(spec, name) for name in names}
    assert all(rows.shape == (8,) for rows in made.values())
    spec.populate_sampling_params_for_one_model(_requests(0.9, generation=False))
    assert all(getattr(spec, name) is getattr(copy, name) is made[name] for name in names)
    assert copy.temperatures is not None and copy.top_ks is not None
    assert copy.temperatures.tolist() == pytest.approx([0.9] + [0.0] * 7)
    assert copy.top_ks.tolist() == [5] + [0] * 7
    copy.populate_sampling_params_for_one_model(_requests(0.3, 0.4))
    assert made["temperatures"].tolist() == pytest.approx([0.3] * 2 + [0.4] * 2 + [0.0] * 4)


def test_a_batch_of_nobody_leaves_no_rows_of_the_last() -> None:
    spec = SpecMetadata(2, 1, 1, allow_advanced_sampling=True, device="cpu")
    spec.populate_sampling_params_for_one_model(_requests(0.5, 0.7))
    spec.populate_sampling_params_for_one_model([])
    assert spec.temperatures is not None and not spec.temperatures.any()


def test_a_step_takes_its_rows_of_larger_buffers() -> None:
    """Also one that verifies fewer drafts than K: rows stand K+1 to a request."""
    spec = SpecMetadata(8, 3, 3, allow_advanced_sampling=True, device="cpu")
    requests = _requests(0.1, generation=False) + _requests(0.2, 0.3)
    spec.populate_sampling_params_for_one_model(requests)
    for num_drafts, each in ((3, 4), (1, 2), (0, 1)):
        with spec.rows_of_step(1, 2, num_drafts):
            rows = spec.sampling_rows(1 + 2 * each)
        assert rows is not None
        expected = [0.1] + [0.2] * each + [0.3] * each
        assert rows.temperatures.tolist() == pytest.approx(expected)
        assert all(len(t) == len(expected) for t in (rows.top_ks, rows.seeds, rows.positions))
    with spec.rows_of_step(0, 3, 3):
        rows = spec.sampling_rows(12)
    assert rows is not None and len(rows.top_ps) == 12


def test_penalties_that_no_row_holds_get_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    spec_module._warn_of_shaping.cache_clear()
    spec = SpecMetadata(2, 1, 1, allow_advanced_sampling=True, device="cpu")
    for params, count in (
        (SamplingParams(temperature=1.0, top_k=3), 0),
        (SamplingParams(min_p=0.1), 1),
    ):
        request = SimpleNamespace(sampling_params=params, is_generation=True)
        spec.populate_sampling_params_for_one_model([request] * 2)
        assert sum("reads temperature" in r.getMessage() for r in caplog.records) == count


def test_too_many_requests_and_too_few_rows_are_refused() -> None:
    spec = SpecMetadata(1, 1, 1, allow_advanced_sampling=True, device="cpu")
    with pytest.raises(ConfigError, match=r"2 requests .* max_num_requests=1"):
        spec.populate_sampling_params_for_one_model(_requests(0.1, 0.2))
    spec.populate_sampling_params_for_one_model(_requests(0.1))
    with pytest.raises(ConfigError, match="2 rows of sampling parameters for 4 rows"):
        spec.sampling_rows(4)


@pytest.mark.parametrize("off", [None, 0, 2**31 - 1, 2**40])
def test_every_way_to_turn_top_k_off_is_off(off: int | None) -> None:
    spec = SpecMetadata(1, 0, 0, allow_advanced_sampling=True, device="cpu")
    config = SimpleNamespace(temperature=[0.5], top_k=[off], top_p=[None], random_seed=[2**64 - 1])
    request = SimpleNamespace(sampling_config=config, is_generation=False)
    spec.populate_sampling_params_for_one_model([request])
    assert spec.top_ks is not None and spec.temperatures is not None
    assert spec.top_ks.tolist() == [0] and spec.temperatures.tolist() == [0.5]


def test_fields_stand_in_tensorrt_llms_order() -> None:
    spec = SpecMetadata(8, 3, 3, 2, True, SpeculativeDecodingMode.MTP)
    assert spec.num_generations == 2 and spec.is_cuda_graph
    assert spec.spec_dec_mode is SpeculativeDecodingMode.MTP
    assert "is_cuda_graph" not in repr(spec)
    with pytest.raises(ConfigError, match="spec_dec_mode=2"):
        SpecMetadata(8, 3, 3, spec_dec_mode=2)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_generations=-1"):
        SpecMetadata(8, 3, 3, -1)
