"""What a worker reads of a step: every field there, whatever a loop has set."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trtspec import MTPDecodingConfig, NGramDecodingConfig, SpecMetadata
from trtspec.errors import ConfigError
from trtspec.metadata.accepted_path import AcceptedPath
from trtspec.metadata.attention import AttentionMetadata
from trtspec.metadata.sampling import RequestSampling, SamplingMetadata, request_sampling_params
from trtspec.metadata.spec import CapturedHiddenStates
from trtspec.metadata.step import StepContext, StepSizes, batch_shape, next_positions
from trtspec.ops.step.rows import shift_for_drafting
from trtspec.workers import MTPEagleWorker, NGramWorker

CPU, SIZES = torch.device("cpu"), StepSizes(1, 2, 3)


def _spec(k: int = 3, **fields: object) -> SpecMetadata:
    return SpecMetadata(4, k, k, **fields)  # type: ignore[arg-type]


def _step(spec: SpecMetadata, sizes: StepSizes) -> StepContext:
    return StepContext.of(spec, sizes, 3, CPU)


def test_what_a_loop_leaves_out_is_neutral() -> None:
    step = _step(_spec(), SIZES)
    assert step.draft_len == 3 and not step.has_slots and not step.has_sampling
    assert step.sampling.all_greedy and step.next_prompt_tokens.tolist() == [-1]
    lens = torch.tensor([1, 3, 2], dtype=torch.int32)
    assert step.output_lens(lens).tolist() == [1, 3, 2]
    assert _step(_spec(runtime_draft_len=1), SIZES).draft_len == 1


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("slot_ids", torch.tensor([0]), r"\[1\], but the step has 3 requests: .*\[3\]"),
        ("slot_ids", torch.arange(4), r"\[4\], but the step has 3 requests"),
        ("slot_ids", [0, 1, 2], "list, but the step has 3 requests"),
        ("next_prompt_tokens", torch.arange(3), r"\[3\], but the step has 1 contexts"),
    ],
)
def test_entries_for_another_batch_are_refused(name: str, given: Any, said: str) -> None:
    """One slot for all, or a buffer of the largest batch."""
    with pytest.raises(ConfigError, match=f"{name} is {said}"):
        _step(_spec(**{name: given}), SIZES)


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("runtime_draft_len", -1, "-1: give an int >= 0, or None"),  # all but the last, as a slice
        ("runtime_draft_len", 1.5, "1.5: give an int"),
        ("is_spec_dec_tree", True, "True: there are no draft trees"),
        ("is_spec_dec_dynamic_tree", True, "True: there are no draft trees"),
    ],
)
def test_what_no_step_can_do_is_refused(name: str, given: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={said}"):
        _step(_spec(**{name: given}), SIZES)


def test_a_number_of_drafts_may_be_numpys() -> None:
    assert _step(_spec(runtime_draft_len=np.int64(2)), SIZES).draft_len == 2


def test_next_tokens_of_an_earlier_prompt_may_be_left_there() -> None:
    step = _step(_spec(next_prompt_tokens=torch.tensor([-1])), StepSizes(0, 2, 3))
    assert step.next_prompt_tokens.shape == (0,)


def test_more_generations_than_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_generations=3 is above .* request_ids, 2"):
        batch_shape(None, _spec(num_generations=3, request_ids=[0, 1]))


@pytest.mark.parametrize("following", [7, 0])
def test_a_sample_inside_the_prompt_is_no_text(following: int) -> None:
    given = torch.tensor([following, -1], dtype=torch.int32)
    step = _step(_spec(next_prompt_tokens=given), StepSizes(2, 1, 3))
    assert step.output_lens(torch.tensor([1, 1, 4])).tolist() == [0, 1, 4]
    accepted = torch.tensor([[9, -1], [8, -1], [5, 6]])
    NGramWorker(NGramDecodingConfig(max_draft_len=1)).put_known_tokens(
        accepted, 2, _spec(next_prompt_tokens=given)
    )
    assert accepted.tolist() == [[following, -1], [8, -1], [5, 6]]


CONTEXTS, GENERATIONS = [[0, 1, 2], [5]], [[4, 5, 6], [9, 10, 11]]


@pytest.mark.parametrize(
    ("contexts", "generations"),
    [([], GENERATIONS), (CONTEXTS[:1], []), (CONTEXTS, []), (CONTEXTS, GENERATIONS)],
)
@pytest.mark.parametrize("known", ["metadata", "seq_lens", "gather_ids"])
@pytest.mark.parametrize("axes", [0, 1, 3])
def test_each_row_of_logits_chooses_the_next_position(
    contexts: list[list[int]], generations: list[list[int]], known: str, axes: int
) -> None:
    """By lists: a context's last row, and all of a generation's."""
    requests = [*contexts, *generations]
    flat = [position for rows in requests for position in rows]
    last = [sum(map(len, contexts[: i + 1])) - 1 for i in range(len(contexts))]
    with_logits = last + list(range(sum(map(len, contexts)), len(flat)))
    expected = [flat[i] + 1 for i in with_logits]
    positions = torch.tensor(flat, dtype=torch.int64)
    meta, fields = None, dict[str, Any]()
    if known == "metadata":
        meta = AttentionMetadata(
            context_lens=tuple(map(len, contexts)), num_generations=len(generations),
            rows_per_generation=3, position_ids=positions,
            kv_lens=torch.tensor([rows[-1] + 1 for rows in requests], dtype=torch.int32),
            max_kv_len=12, kv_groups=(), block_tables=(), slot_mappings=(), max_seq_len=32,
        )  # fmt: skip
    elif known == "seq_lens":
        fields["seq_lens"] = [len(rows) for rows in requests]
    else:
        fields["gather_ids"] = torch.tensor(with_logits, dtype=torch.int64)
    spec = _spec(
        request_ids=list(range(len(requests))), num_generations=len(generations),
        allow_advanced_sampling=True, device="cpu", **fields,
    )  # fmt: skip
    # Of three axes the first counts.
    given = torch.stack([positions, positions + 50, positions + 90])[:axes] if axes else positions
    found = next_positions(given, meta, spec)
    assert found is not None and found.tolist() == expected


def test_next_positions_without_lengths() -> None:
    """Of one request they are known. Of several nothing says where a context ends."""
    one = _spec(request_ids=[0], allow_advanced_sampling=True)
    two = _spec(request_ids=[0, 1], allow_advanced_sampling=True)
    found = next_positions(torch.tensor([4, 5, 6]), None, one)
    assert found is not None and found.tolist() == [7]
    assert next_positions(torch.tensor([4, 5, 6]), None, two) is None
    assert next_positions(torch.tensor([4]), None, _spec(request_ids=[0])) is None


def test_captured_layers_are_copied_in_their_order() -> None:
    buffer = torch.full((4, 4), -1.0)
    spec = _spec(captured=CapturedHiddenStates((2, 0), buffer))
    outputs = torch.arange(12.0).view(3, 2, 2)  # of three layers, two rows
    for layer, residual in ((0, None), (1, None), (2, torch.full((2, 2), 0.5))):
        assert spec.is_layer_capture(layer) == (layer != 1)
        spec.maybe_capture_hidden_states(layer, outputs[layer], residual)
    assert buffer.tolist() == [[8.5, 9.5, 0, 1], [10.5, 11.5, 2, 3], [-1.0] * 4, [-1.0] * 4]
    assert outputs.tolist() == torch.arange(12.0).view(3, 2, 2).tolist()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, RequestSampling()),
        ({"top_k": 1, "temperature": 0.8, "top_p": 0.5}, RequestSampling()),
        ({"temperature": 0.8, "top_p": 0.0}, RequestSampling()),
        ({"temperature": 0.0, "top_k": 5}, RequestSampling()),
        ({"top_p": 0.5}, RequestSampling(1.0, 0, 0.5)),
        ({"top_k": 2}, RequestSampling(1.0, 2, 1.0)),
        ({"top_p": 1.0}, RequestSampling()),
        ({"temperature": 0.8, "top_k": 2**31 - 1}, RequestSampling(0.8, 0, 1.0)),
        ({"temperature": 0.8, "seed": 5}, RequestSampling(0.8, 0, 1.0, 5)),
        ({"temperature": 0.8, "random_seed": 6}, RequestSampling(0.8, 0, 1.0, 6)),
    ],
)
def test_parameters_of_a_foreign_request(
    config: dict[str, float], expected: RequestSampling
) -> None:
    """As TensorRT-LLM has them: alone in lists, greedy if temperature 0, top_k 1 or no filter."""
    for values in (config, {name: [value] for name, value in config.items()}):
        request = SimpleNamespace(sampling_config=SimpleNamespace(**values))
        assert request_sampling_params(request) == expected


def test_rows_of_parameters_are_drawn_once_in_a_step() -> None:
    spec = _spec(allow_advanced_sampling=True, device="cpu")
    spec.temperatures, spec.top_ks = torch.ones(9), torch.zeros(9, dtype=torch.int32)
    spec.top_ps = torch.ones(9)
    with spec.step(StepSizes(1, 2, 3), 3, CPU) as outer:
        with spec.step(StepSizes(1, 2, 3), 3, CPU) as inner:
            assert inner is outer
        rows = spec.sampling_rows(9)
        assert rows is outer.sampling
        with spec.step(StepSizes(1, 2, 1), 3, CPU) as fewer:  # K' is another
            assert fewer.sampling.temperatures.shape == (5,)
        assert spec.sampling_rows(9) is rows
    assert spec.sampling_rows(9) is not rows


@pytest.mark.parametrize("has_slots", [False, True])
def test_what_is_read_by_slot_is_asked_for_at_the_door(has_slots: bool) -> None:
    slots = {"slot_ids": torch.tensor([0])} if has_slots else {}
    ids = torch.zeros(1, dtype=torch.int64)
    relaxing = MTPDecodingConfig(
        use_relaxed_acceptance_for_thinking=True, relaxed_topk=2, relaxed_delta=0.5
    )
    for worker, names in (
        (NGramWorker(NGramDecodingConfig(max_draft_len=3)), "history, history_lens"),
        (MTPEagleWorker(relaxing), "thinking_deltas"),
    ):
        spec = _spec(request_ids=[0], **slots)
        message = rf"kept by slot \({names}\): set spec_metadata\.slot_ids .*allocate_state"
        with pytest.raises(ConfigError, match=message):
            worker(ids, ids, None, torch.zeros(1, 9), None, spec)


def test_a_memory_of_drafts_needs_slots_where_requests_are_sampled() -> None:
    rows = torch.ones(1)
    for all_greedy in (True, False):
        sampling = SamplingMetadata(
            rows, rows.to(torch.int32), rows, rows.long(), rows.long(), all_greedy=all_greedy
        )
        step = _step(_spec(sampling=sampling), StepSizes(1, 0, 3))
        if all_greedy:
            step.require(has_draft_memory=True)
            continue
        with pytest.raises(ConfigError, match="what drafts were drawn from"):
            step.require(has_draft_memory=True)


def test_a_path_is_what_the_kernels_twin_takes_it_for() -> None:
    tokens = torch.tensor([[5, 6, 7, -1], [8, -1, -1, -1], [1, 2, 3, 4]], dtype=torch.int32)
    path = AcceptedPath(tokens, torch.tensor([3, 1, 4], dtype=torch.int32))
    positions = torch.cat([start + torch.arange(4) for start in (10, 0, 77)])
    certain = torch.tensor([0, 4, 8])
    ids, rows, following = shift_for_drafting(tokens, path.lens, positions, 4)
    assert path.last_rows(certain).tolist() == rows.tolist() == [2, 4, 11]
    assert path.next_positions(positions[certain]).tolist() == following.tolist() == [13, 1, 81]
    assert path.tokens_after_rows(slice(None), 4).tolist() == ids.tolist()
