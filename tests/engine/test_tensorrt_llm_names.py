"""Workers written for TensorRT-LLM's `SpecWorkerBase`: they know its names and forward's arguments.

They run in our executor and in a loop that is not ours, and the text is that of plain decoding.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from oracle import Oracle
from tiny import prefill_metadata, tiny_model_dir
from tiny_heads import mtp_model_dir
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from trtspec import LLM, MTPDecodingConfig, NGramDecodingConfig, SamplingParams, SpecMetadata
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.checkpoints.hf_config import load_config
from trtspec.errors import ConfigError
from trtspec.metadata.mode import SpeculativeDecodingMode
from trtspec.workers import WORKER_OF_MODE, MTPEagleWorker, NGramWorker, SpecWorkerBase
from trtspec.workers.protocols import DraftInputs
from trtspec.workers.texts import add_accepted

VOCAB, PROMPT = 97, [5, 6, 7, 8, 5, 6, 7, 9, 3, 4, 11, 2]


class BigramWorker(SpecWorkerBase):
    """Drafts from a table of bigrams, or the first token with the draft model."""

    table: Tensor  # [V, V] logits
    uses_head = False

    def __init__(self, spec_config: Any):
        super().__init__()
        self.spec_config = spec_config

    @property
    def max_draft_len(self) -> int:
        return self.spec_config.max_draft_len

    def forward(
        self, input_ids, position_ids, hidden_states, logits, attn_metadata, spec_metadata,
        draft_model, resource_manager=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        batch_size, num_contexts = attn_metadata.num_seqs, attn_metadata.num_contexts
        num_gens, raw = batch_size - num_contexts, logits
        logits = logits.clone()
        self._execute_guided_decoder_if_present(logits)
        accepted, lens = self.accept_drafts(logits, num_contexts, batch_size, spec_metadata)

        self._prepare_attn_metadata_for_spec_dec(attn_metadata)
        context_tokens = attn_metadata.num_ctx_tokens
        rows = (input_ids.shape[0] - context_tokens) // max(num_gens, 1)
        ids = torch.cat([
            self._prepare_context_input_ids(
                input_ids, context_tokens, spec_metadata.gather_ids, accepted, num_contexts
            ).to(torch.int32),
            accepted[num_contexts:, :rows].flatten(),
        ])  # fmt: skip
        starts = torch.arange(num_gens, device=ids.device) * rows + context_tokens
        last = torch.cat(
            [spec_metadata.gather_ids[:num_contexts], starts + lens[num_contexts:] - 1]
        )
        drafts, token = [], ids[last]
        for step in range(self.max_draft_len):
            draft_logits = self.table[token.long()]
            if step == 0 and self.uses_head:
                out, _ = draft_model(ids, position_ids, hidden_states, attn_metadata, 0)
                draft_logits = draft_model.compute_logits(out[last], 0)
            token = self._draft_sampler_greedy(draft_logits)
            drafts.append(token)
        self._restore_attn_metadata_from_spec_dec(attn_metadata)

        proposals = torch.stack(drafts, dim=1) if drafts else accepted[:, :0]
        indices = torch.arange(batch_size + 3, device=ids.device)  # a buffer for larger batches
        return {
            "logits": raw,
            "new_tokens": accepted,
            "new_tokens_lens": lens,
            "next_draft_tokens": proposals,
            "next_new_tokens": self._prepare_next_new_tokens(
                accepted, proposals, indices, batch_size, lens
            ),
        }

    def accept_drafts(self, logits, num_contexts, batch_size, spec_metadata):  # type: ignore[no-untyped-def]
        return self._sample_and_accept_draft_tokens_base(
            logits, spec_metadata.draft_tokens, num_contexts, batch_size, spec_metadata
        )


class OwnAcceptanceWorker(BigramWorker):
    """Accepts by itself, from the target's tokens."""

    def accept_drafts(self, logits, num_contexts, batch_size, spec_metadata):  # type: ignore[no-untyped-def]
        target = self._sample_tokens_for_batch(logits, spec_metadata, num_contexts, batch_size)
        accepted = target.new_zeros((batch_size, self.max_draft_len + 1))
        lens = torch.ones(batch_size, dtype=torch.int32, device=logits.device)
        accepted[:num_contexts, 0] = target[:num_contexts]
        if batch_size > num_contexts:
            drafts = spec_metadata.draft_tokens
            own = target[num_contexts:].view(batch_size - num_contexts, -1)
            accepted[num_contexts:, : own.shape[1]] = own
            lens[num_contexts:] += (drafts == own[:, :-1]).int().cumprod(-1).sum(-1).int()
        return accepted, self._apply_force_accepted_tokens(lens, num_contexts)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=1)


SAMPLING = {
    "greedy": SamplingParams(max_tokens=40, ignore_eos=True),
    "sampled": SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.8, top_k=20, seed=5),
}


def _llm(target_dir: Path, config: Any, **options: Any) -> LLM:
    return LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=128, **options)


def _prompts() -> list[list[int]]:
    return [PROMPT, PROMPT[::-1] * 3, PROMPT[:1]]


def _table_of(texts: list[list[int]]) -> Tensor:
    table = torch.zeros(VOCAB, VOCAB)
    for text in texts:
        for token, following in itertools.pairwise(text):
            table[token, following] += 1
    return table


@pytest.fixture(scope="module", params=SAMPLING)
def plain(
    request: pytest.FixtureRequest, target_dir: Path
) -> tuple[SamplingParams, list[list[int]]]:
    params = SAMPLING[request.param]
    outputs = _llm(target_dir, None).generate(_prompts(), params)
    return params, [output.outputs[0].token_ids for output in outputs]


def _install(monkeypatch: pytest.MonkeyPatch, worker: type[SpecWorkerBase], table: Tensor) -> None:
    monkeypatch.setattr(BigramWorker, "table", table, raising=False)
    monkeypatch.setitem(WORKER_OF_MODE, SpeculativeDecodingMode.MTP_EAGLE_ONE_MODEL, worker)


# -- in our executor ---------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("worker", [BigramWorker, OwnAcceptanceWorker])
def test_in_our_executor_the_text_is_plain_decodings(
    target_dir: Path, plain: tuple[SamplingParams, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch, worker: type[BigramWorker], chunked: bool, overlap: bool,
) -> None:  # fmt: skip
    params, expected = plain
    _install(monkeypatch, worker, _table_of(expected))
    llm = _llm(
        target_dir, MTPDecodingConfig(num_nextn_predict_layers=3), max_batch_size=2,
        enable_chunked_prefill=chunked, max_num_tokens=16 if chunked else 128,
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    assert isinstance(llm.executor.worker, worker)
    outputs = llm.generate(_prompts(), params)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert llm.stats().acceptance_length > 1.3


def test_a_head_is_fed_as_by_our_own_worker(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafts of every step are the same, over prompts in chunks and mixed batches."""
    drafts: dict[str, list[Any]] = {}
    monkeypatch.setattr(BigramWorker, "uses_head", True)
    for name, worker in (("theirs", BigramWorker), ("ours", MTPEagleWorker)):
        _install(monkeypatch, worker, torch.zeros(VOCAB, VOCAB))
        llm = _llm(
            target_dir, MTPDecodingConfig(num_nextn_predict_layers=1), max_batch_size=2,
            enable_chunked_prefill=True, max_num_tokens=16,
        )  # fmt: skip
        steps = drafts.setdefault(name, [])
        forward = llm.executor.worker.forward

        def remembering(*args: Any, forward: Any = forward, steps: Any = steps) -> Any:
            out = forward(*args)
            steps.append(out["next_draft_tokens"].tolist())
            return out

        monkeypatch.setattr(llm.executor.worker, "forward", remembering)
        llm.generate(_prompts(), SAMPLING["greedy"])
    assert len(drafts["ours"]) > 30 and drafts["theirs"] == drafts["ours"]


def test_nan_ends_one_request_of_a_worker_that_accepts_by_itself(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _install(monkeypatch, OwnAcceptanceWorker, torch.zeros(VOCAB, VOCAB))
    llm = _llm(target_dir, MTPDecodingConfig(num_nextn_predict_layers=2))
    compute = llm.executor.target.compute_logits

    def poisoned(hidden: Tensor) -> Tensor:
        logits = compute(hidden)
        if len(logits) == 6:  # both requests generate
            logits[4] = float("nan")
        return logits

    monkeypatch.setattr(llm.executor.target, "compute_logits", poisoned)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    good, bad = llm.generate([PROMPT, PROMPT[::-1]], params)
    assert good.outputs[0].finish_reason == "length" and bad.outputs[0].finish_reason == "error"


# -- in a loop that is not ours ----------------------------------------------------------------
class ForeignMetadata:
    """As much of TensorRT-LLM's as the worker reads, and the calls it expects."""

    def __init__(self, num_seqs: int, num_contexts: int, num_ctx_tokens: int):
        self.num_seqs, self.num_contexts = num_seqs, num_contexts
        self.num_ctx_tokens = num_ctx_tokens
        self.calls: list[tuple[str, ...]] = []

    def prepare_for_spec_dec(self, *names: str) -> None:
        self.calls.append(("prepare", *names))

    def restore_from_spec_dec(self) -> None:
        self.calls.append(("restore",))

    def on_update(self) -> None:
        self.calls.append(("update",))


@torch.inference_mode()
def _foreign_loop(
    model: Any, worker: SpecWorkerBase, request: Any, count: int
) -> tuple[list[int], int]:
    """As examples/embed_in_your_loop.py: transformers' model and cache, one request."""
    k, cache, text, steps = worker.max_draft_len, DynamicCache(), list(PROMPT), 0
    rows = text
    while len(text) < len(PROMPT) + count:
        is_context = steps == 0
        spec = SpecMetadata(
            max_num_requests=1, max_draft_len=k, max_total_draft_tokens=k, request_ids=[0],
            num_generations=0 if is_context else 1, allow_advanced_sampling=True,
            gather_ids=torch.tensor([len(rows) - 1]) if is_context else torch.arange(len(rows)),
            draft_tokens=torch.empty(0, k) if is_context else torch.tensor([rows[1:]]),
        )  # fmt: skip
        request.is_generation = not is_context
        spec.populate_sampling_params_for_one_model([request])
        logits = model(torch.tensor([rows]), None, None, cache, use_cache=True).logits[0]
        positions = cache.get_seq_length() - len(rows) + torch.arange(len(rows))
        spec.positions = positions[-1:] + 1 if is_context else positions + 1
        meta = ForeignMetadata(1, int(is_context), len(rows) if is_context else 0)
        out = worker(
            torch.tensor(rows), positions, None, logits[-1:] if is_context else logits, meta, spec,
            None,
        )  # fmt: skip
        assert meta.calls == [("prepare", "_seq_lens", "_seq_lens_cuda"), ("restore",), ("update",)]
        text += out["new_tokens"][0, : int(out["new_tokens_lens"][0])].tolist()
        rejected = cache.get_seq_length() - (len(text) - 1)
        if rejected:
            cache.crop(-rejected)
        rows = out["next_new_tokens"][0].tolist()
        steps += 1
    return text[len(PROMPT) : len(PROMPT) + count], steps


@pytest.mark.parametrize("worker", [BigramWorker, OwnAcceptanceWorker])
def test_in_a_foreign_loop_the_text_is_plain_decodings(
    target_dir: Path, plain: tuple[SamplingParams, list[list[int]]],
    monkeypatch: pytest.MonkeyPatch, worker: type[BigramWorker],
) -> None:  # fmt: skip
    params, (expected, *_) = plain
    monkeypatch.setattr(BigramWorker, "table", _table_of([expected]), raising=False)
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    request = SimpleNamespace(sampling_params=params, request_id=0)
    for k in (0, 3):  # without drafts it is plain decoding in that loop
        text, steps = _foreign_loop(model, worker(SimpleNamespace(max_draft_len=k)), request, 40)
        assert text == expected
    assert steps < 40


# -- one name at a time ------------------------------------------------------------------------
def _worker(k: int = 3) -> NGramWorker:
    return NGramWorker(NGramDecodingConfig(max_draft_len=k))


def _spec(k: int = 3) -> SpecMetadata:
    return SpecMetadata(max_num_requests=4, max_draft_len=k, max_total_draft_tokens=k)


def test_the_guided_decoder_runs_once_where_its_name_is_called() -> None:
    class Counting:
        calls = 0

        def execute(self, logits: Tensor) -> None:
            self.calls += 1
            logits[:, 4:] = float("-inf")

    worker, decoder = _worker(1), Counting()
    logits = torch.arange(20.0).view(2, 10)
    worker._execute_guided_decoder_if_present(logits)  # there is none yet
    assert logits.isfinite().all()
    worker.set_guided_decoder(decoder)
    worker._execute_guided_decoder_if_present(logits)
    drafts = torch.tensor([[3]])
    tokens, lens = worker._sample_and_accept_draft_tokens_base(logits, drafts, 0, 1, _spec(1))
    assert tokens.tolist() == [[3, 3]] and lens.tolist() == [2] and decoder.calls == 1


def test_forced_acceptance_by_either_generation_of_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lens = torch.tensor([1, 1, 3], dtype=torch.int32)
    assert _worker()._apply_force_accepted_tokens(lens, 1).tolist() == [1, 1, 3]
    monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "2")
    worker = _worker()
    assert worker._apply_force_accepted_tokens(lens, 1).tolist() == [1, 3, 3]
    assert worker._apply_force_accepted_tokens(lens, 1, 1).tolist() == [1, 2, 2]
    assert worker._apply_force_accepted_tokens(lens, 1, 3, _spec()).tolist() == [1, 3, 3]


def test_the_smaller_names_do_what_theirs_do() -> None:
    worker = _worker()
    logits = torch.tensor([[0.0, 9.0, 1.0], [5.0, 0.0, 1.0]])
    assert worker._draft_sampler_greedy(logits).tolist() == [1, 0]
    mapped = worker._draft_sampler_greedy(logits, torch.tensor([10, 20, 30]))
    assert mapped.tolist() == [21, 10] and mapped.dtype == torch.int32

    ids = torch.tensor([10, 11, 20, 21, 22, 50, 51])
    accepted = torch.tensor([[12, -1], [23, -1], [51, 52]], dtype=torch.int32)
    shifted = worker._prepare_context_input_ids(ids, 5, torch.tensor([1, 4, 5, 6]), accepted, 2)
    assert shifted.tolist() == [11, 12, 21, 22, 23] and ids[0] == 10
    none = worker._prepare_context_input_ids(ids[5:], 0, torch.tensor([0, 1]), accepted[2:], 0)
    assert none.tolist() == []

    lens, drafts = torch.tensor([1, 1, 2], dtype=torch.int32), torch.tensor([[1], [2], [3]])
    for indices in (None, torch.arange(8, dtype=torch.int32)):
        following = worker._prepare_next_new_tokens(accepted, drafts, indices, 3, lens)
        assert following.tolist() == [[12, 1], [23, 2], [52, 3]]

    spec = _spec()
    tokens = worker._sample_tokens_for_batch(logits, spec, 2, 2)
    assert tokens.tolist() == [1, 0] and spec.bad_requests.tolist() == [False, False]
    spec.logits_state = object()  # type: ignore[assignment]
    with pytest.raises(ConfigError, match="penalties"):
        worker._sample_tokens_for_batch(logits, spec, 2, 2)


def test_what_is_written_into_our_metadata_between_the_two_is_undone(target_dir: Path) -> None:
    meta, _ = prefill_metadata(load_config(target_dir), [5, 3])
    worker = _worker()
    lens, slots = meta.kv_lens.clone(), meta.slot_mappings[0].clone()
    worker._prepare_attn_metadata_for_spec_dec(meta)
    meta.kv_lens.add_(1)
    meta.slot_mappings[0].fill_(-1)
    worker._restore_attn_metadata_from_spec_dec(meta)
    assert torch.equal(meta.kv_lens, lens) and torch.equal(meta.slot_mappings[0], slots)
    worker._prepare_attn_metadata_for_spec_dec(None)  # a loop without it
    worker._restore_attn_metadata_from_spec_dec(None)


def test_overriding_what_acceptance_does_not_call_is_refused() -> None:
    with pytest.raises(ConfigError, match="override sample_target_tokens"):
        type("Own", (BigramWorker,), {"_sample_tokens_for_batch": lambda *args: None})
    with pytest.raises(ConfigError, match="override apply_forced_acceptance"):
        type("Own", (BigramWorker,), {"_apply_force_accepted_tokens": lambda *args: None})
    mixin = type("Mixin", (), {"_sample_tokens_for_batch": lambda *args: None})
    with pytest.raises(ConfigError, match="override sample_target_tokens"):
        type("Own", (mixin, BigramWorker), {})


def test_a_worker_that_writes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"write draft.* or all of forward"):
        type("Empty", (SpecWorkerBase,), {})(None)


def test_abstract_methods_of_a_subclass_must_be_written() -> None:
    """The base is an ABC, as TensorRT-LLM's is."""
    partial = type("Partial", (BigramWorker,), {"bigram": abstractmethod(lambda self: None)})
    assert issubclass(SpecWorkerBase, ABC) and issubclass(SpecWorkerBase, torch.nn.Module)
    with pytest.raises(TypeError, match=r"abstract method '?bigram"):
        partial(None)
    type("Whole", (partial,), {"bigram": lambda self: None})(None)


class ByHand(NGramWorker):
    """Builds the next step's input and fills `no_drafts` by itself, with room for all drafts.

    It puts another token in place of its first draft.
    """

    def draft(self, inputs: DraftInputs) -> Tensor:
        add_accepted(inputs)
        drafts = self.no_drafts(inputs)
        drafts[:, 0], drafts[:, self.max_draft_len - 1] = 7, 9
        return drafts

    def build_next_new_tokens(self, accepted: Tensor, lens: Tensor, drafts: Tensor) -> Tensor:
        assert drafts.shape[1] == self.max_draft_len
        last = accepted.gather(1, (lens[:, None] - 1).long())
        return torch.cat([last, drafts.masked_fill(drafts == 7, 8)], dim=1).to(torch.int32)


@pytest.mark.parametrize("draft_len", [3, 1, 0])
def test_overrides_see_all_drafts_where_fewer_are_proposed(tmp_path: Path, draft_len: int) -> None:
    target = tiny_model_dir(tmp_path)
    config = NGramDecodingConfig(max_draft_len=3)
    llm = LLM(target, config, device="cpu", dtype="float32", max_seq_len=64)
    llm.executor.worker.__class__ = ByHand
    llm.executor.runtime_draft_len = draft_len
    request = llm.executor.enqueue([5, 6, 5, 6], SamplingParams(max_tokens=8, ignore_eos=True))
    llm.executor.step()
    left = llm.executor.state.next_tokens[request.slot, 1:].tolist()
    assert left == {3: [8, -1, 9], 1: [8, -1, -1], 0: [-1, -1, -1]}[draft_len]
    llm.executor.run_until_done()
    assert request.output_token_ids == Oracle(target).extend([5, 6, 5, 6], 8)
