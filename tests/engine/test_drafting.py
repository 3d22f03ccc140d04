"""Drafting with heads: every draft logit equals a from-scratch recomputation, at every step.

The schedules are random: requests arrive while others run, prompts come in chunks, a small cache
preempts, and proposals are scripted so that every number of them is accepted. The network behind
is the real one; its oracle (`tiny_heads.NaiveHead`) sees a request's text and nothing else.
"""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import (
    CASES,
    LAYERS,
    cases_by_k,
    make_case,
    run_after_a_rest,
    run_random_schedule,
    run_with_changing_draft_len,
    run_with_rests,
)
from matrix import NETWORKS, Drafters, config_of, cpu_engine, make_drafters, spread, thinned
from oracle import VOCAB, Oracle
from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir, p_eagle_dir
from torch import Tensor

from trtspec import (
    LLM,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.errors import ConfigError
from trtspec.metadata.missed import CAPACITY
from trtspec.metadata.mode import SpeculativeDecodingMode
from trtspec.models.drafters.eagle import Eagle3Head
from trtspec.ops.tokens.greedy import choose_drafts
from trtspec.workers import WORKER_OF_MODE, Eagle3OneModelWorker
from trtspec.workers.protocols import DraftInputs


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=LAYERS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "k"), cases_by_k(CASES, ["eagle3", "mtp_vanilla"]))
def test_draft_logits_equal_recomputation(
    target_dir: Path, tmp_path: Path, name: str, k: int
) -> None:
    case = make_case(name, target_dir, tmp_path, k)
    compared, executor = run_random_schedule(case, k, seed=k)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1)), (
        "every length must have been accepted"
    )
    if (name, k) == ("eagle3", 4):
        assert executor.stats().num_preemptions > 0, "what the comparison relies on"


@pytest.mark.parametrize("name", thinned(["eagle3", "mtp_eagle", "mtp_vanilla", "eagle1"], 2))
def test_draft_logits_up_to_the_maximum_length(target_dir: Path, tmp_path: Path, name: str) -> None:
    """K = 8, and every request ends at the maximum: drafts run past it."""
    case = make_case(name, target_dir, tmp_path, 8)
    compared, _ = run_random_schedule(case, 8, seed=3, max_seq_len=36)
    assert compared > 30


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["eagle3", "eagle3_two_engine", *thinned(["mtp_vanilla", "mtp_eagle"], 2)]
)
def test_drafting_can_be_turned_down_and_up(target_dir: Path, tmp_path: Path, name: str) -> None:
    run_with_changing_draft_len(make_case(name, target_dir, tmp_path, 3))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["eagle3", *thinned(["eagle3_two_engine", "eagle3_flags", "eagle1", "mtp_eagle", "mimo", "glm",
     "qwen3_next", "deepseek_v3"], 3)],
)  # fmt: skip
def test_a_head_reads_late_what_it_missed(target_dir: Path, tmp_path: Path, name: str) -> None:
    read = run_with_rests(make_case(name, target_dir, tmp_path, 3))
    assert max(read) == CAPACITY, "a rest was longer than there is room"
    assert len(read) > 5


@pytest.mark.parametrize("name", ["eagle3", "eagle1", "mtp_eagle", "deepseek_v3"])
def test_of_a_prompt_a_head_computes_the_row_that_proposes(
    target_dir: Path, tmp_path: Path, name: str
) -> None:
    """The other rows leave keys and values: that drafts are right, other tests say."""
    case = make_case(name, target_dir, tmp_path, 3)
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=64)
    executor, rows = llm.executor, []
    (layer,) = executor.runner.step.draft_model.layers
    layer.mlp.register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    for length in (12, 30):
        executor.enqueue(list(range(3, 3 + length)), SamplingParams(max_tokens=9))
    executor.step()
    assert rows == [2, 2, 2]
    executor.step()
    of_generations = 2 if name == "eagle3" else 2 * (3 + 1)  # EAGLE-3's `keeps_rows`
    assert rows[3:] == [of_generations, 2, 2]


class _NoLogits:
    """Stands for a kernel that chooses a head's tokens, and counts what it is asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked: list[int] = []

        def best_tokens(head: Eagle3Head, hidden: Tensor, step: int) -> Tensor:
            self.asked.append(len(hidden))
            return choose_drafts(head.compute_logits(hidden, step), head.d2t)

        monkeypatch.setattr(Eagle3Head, "best_tokens", best_tokens)


def test_a_head_may_choose_without_logits(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing else reads them."""
    case = make_case("eagle3", target_dir, tmp_path, 3)

    def run(config: Any, params: SamplingParams, prepare: Any = None) -> tuple[list[int], Any]:
        llm = LLM(case.target, config, device="cpu", dtype="float32", max_seq_len=64)
        if prepare is not None:
            prepare(llm.executor.worker)
        request = llm.executor.enqueue(list(range(3, 15)), params)
        llm.executor.run_until_done()
        return request.output_token_ids, llm.executor.statistics.accepted_lens

    def own(name: str) -> Any:
        """Gives a worker a method of its own that does the same."""

        def prepare(worker: Any) -> None:
            method = getattr(worker, name)
            setattr(worker, name, lambda *args: method(*args))

        return prepare

    greedy = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = run(case.config, greedy)
    head = _NoLogits(monkeypatch)
    assert run(case.config, greedy) == expected and set(head.asked) == {1}
    head.asked.clear()
    for name in ("allowed", "note_logits", "propose", "draft_sampler_greedy"):
        assert run(case.config, greedy, own(name)) == expected and not head.asked
    assert run(replace(case.config, max_verified_drafts=2), greedy)[0] == expected[0]
    run(case.config, replace(greedy, temperature=1.0, seed=1))
    assert not head.asked


def test_a_worker_may_change_drafts_that_are_finished(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In place, by others, or by what it makes of them. Fewer are asked for than are proposed."""
    case, given = make_case("eagle3", target_dir, tmp_path, 3), list[Tensor]()

    class InPlace(Eagle3OneModelWorker):
        def draft(self, inputs: DraftInputs) -> Tensor:
            drafts = super().draft(inputs)
            drafts[:, 1:] = -1
            return drafts

    class Others(Eagle3OneModelWorker):
        def draft(self, inputs: DraftInputs) -> Tensor:
            return super().draft(inputs).clone().fill_(9)

    class Wide(Eagle3OneModelWorker):
        def draft(self, inputs: DraftInputs) -> Tensor:
            lens = inputs.num_accepted_tokens
            proposals = [torch.full_like(lens, token) for token in (6, 7, 8)]
            return self.finish_drafts(inputs, proposals, lens.long(), 64)

    class Builds(Eagle3OneModelWorker):
        def build_next_new_tokens(
            self, accepted: Tensor, lens: Tensor, next_drafts: Tensor
        ) -> Tensor:
            given.append(next_drafts)
            return super().build_next_new_tokens(accepted, lens, next_drafts)

    def drafts_of(worker: type[Eagle3OneModelWorker]) -> list[int]:
        monkeypatch.setitem(WORKER_OF_MODE, SpeculativeDecodingMode.EAGLE3_ONE_MODEL, worker)
        llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=64)
        llm.executor.runtime_draft_len = 2
        request = llm.executor.enqueue(list(range(3, 15)), SamplingParams(max_tokens=9))
        llm.executor.step()
        return llm.executor.state.next_tokens[request.slot, 1:].tolist()

    expected = drafts_of(Eagle3OneModelWorker)
    assert -1 not in expected[:2] and expected[2] == -1
    assert drafts_of(InPlace) == [expected[0], -1, -1]
    assert drafts_of(Others) == [9, 9, -1]
    assert drafts_of(Wide) == [6, 7, -1]
    assert drafts_of(Builds) == expected and [x.shape for x in given] == [(1, 3)]


def test_blocks_that_the_head_has_not_read_are_not_shared(target_dir: Path, tmp_path: Path) -> None:
    run_after_a_rest(make_case("eagle3", target_dir, tmp_path, 3))


def test_rows_that_an_earlier_request_left_are_forgotten(target_dir: Path, tmp_path: Path) -> None:
    """It ended while drafting rested. The slot's next request has the keys of its own rows."""
    case, keys = make_case("eagle3", target_dir, tmp_path, 3), list[Tensor]()
    for comes_after in (False, True):
        llm = LLM(
            case.target, replace(case.config, draft_len_schedule={64: 3}), device="cpu",
            dtype="float32", max_seq_len=96, max_batch_size=1, disable_overlap_scheduler=True,
        )  # fmt: skip
        executor, params = llm.executor, SamplingParams(max_tokens=20, ignore_eos=True)
        executor.runtime_draft_len = 0
        if comes_after:
            earlier = executor.enqueue([5, 6, 7], params)
            executor.run_until_done()
            assert earlier.num_missed == 19
        request = executor.enqueue(list(range(20, 50)), params)
        for _ in range(6):
            executor.step()
        assert request.num_missed == 5
        executor.runtime_draft_len = 3
        while len(request.output_token_ids) < 12:
            executor.step()
        blocks = executor.kv_cache.table_of(request.request_id)[1]
        rows = executor.kv_cache.groups[1].k_cache[:, list(blocks)].flatten(1, 2)
        keys.append(rows[:, : 30 + 10].clone())
    torch.testing.assert_close(keys[1], keys[0], atol=1e-5, rtol=1e-5)


def test_runtime_draft_len_is_checked(target_dir: Path, tmp_path: Path) -> None:
    case = make_case("eagle3", target_dir, tmp_path, 3)
    executor = LLM(target_dir, case.config, device="cpu", max_seq_len=64).executor
    for bad in (-1, 4, True, 1.0):
        with pytest.raises(ConfigError, match="runtime_draft_len"):
            executor.runtime_draft_len = bad  # type: ignore[assignment]


def test_a_crowded_step_drafts_nothing(target_dir: Path, tmp_path: Path) -> None:
    head = eagle3_dir(tmp_path)
    config = EagleDecodingConfig(max_draft_len=3, speculative_model=head, max_concurrency=2)
    llm = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=64)
    executor = llm.executor
    for i, count in enumerate((8, 30, 30)):
        executor.enqueue([3, 4 + i], SamplingParams(max_tokens=count, ignore_eos=True))
    seen = set()
    while executor.has_work:
        crowd = len(executor.scheduler.waiting) + len(executor.scheduler.running)
        executor.step()
        for request in executor.scheduler.running:
            drafted = int((executor.state.next_tokens[request.slot, 1:] >= 0).sum())
            seen.add((crowd, drafted))
    assert seen == {(3, 0), (2, 3), (1, 3)} or seen == {(3, 0), (2, 3)}


def test_a_schedule_shortens_drafts_as_requests_come(target_dir: Path, tmp_path: Path) -> None:
    config = EagleDecodingConfig(
        max_draft_len=3,
        speculative_model=eagle3_dir(tmp_path),
        draft_len_schedule={3: 1, 1: 3, 2: 2},
    )
    llm = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=96)
    executor, plain = llm.executor, LLM(target_dir, device="cpu", dtype="float32", max_seq_len=96)
    prompts = [[3, 4 + i] for i in range(4)]
    params = [SamplingParams(max_tokens=8 + 12 * i, ignore_eos=True) for i in range(4)]
    requests = [executor.enqueue(p, one) for p, one in zip(prompts, params, strict=True)]
    seen: dict[int, set[int]] = {}
    while executor.has_work:
        crowd = len(executor.scheduler.waiting) + len(executor.scheduler.running)
        executor.step()
        for request in executor.scheduler.running:
            drafted = int((executor.state.next_tokens[request.slot, 1:] >= 0).sum())
            seen.setdefault(crowd, set()).add(drafted)
    assert seen == {4: {0}, 3: {1}, 2: {2}, 1: {3}}
    expected = [output.outputs[0].token_ids for output in plain.generate(prompts, params)]
    assert [request.output_token_ids for request in requests] == expected


@pytest.mark.parametrize(
    "schedule", [{}, [4], {0: 1}, {2: -1}, {2: 4}, {2: True}, {1.5: 2}, {"2": 1}]
)
def test_schedules_that_cannot_be(schedule: Any) -> None:
    with pytest.raises(ConfigError, match=r"draft_len_schedule=.*0 … 3"):
        NGramDecodingConfig(max_draft_len=3, draft_len_schedule=schedule)


def test_a_schedule_of_more_than_the_head_drafts(target_dir: Path, tmp_path: Path) -> None:
    """K is the head's own: 4."""
    config = EagleDecodingConfig(
        max_draft_len=0, speculative_model=eagle3_dir(tmp_path), draft_len_schedule={1: 9}
    )
    with pytest.raises(ConfigError, match=r"draft_len_schedule=.*0 … 4"):
        LLM(target_dir, config, device="cpu")


# -- perfect heads -----------------------------------------------------------------------------


@spread(
    mode=["eagle3", "eagle3_two_engine", "mtp_eagle", "mtp_vanilla"], k=[8, 3, 1],
    overlap=[False, True],
)  # fmt: skip
def test_a_perfect_head_is_always_accepted(
    tmp_path: Path, mode: str, k: int, overlap: bool
) -> None:
    """Any error in draft KV, positions, rows or shifts costs acceptance."""
    target = one_layer_target(tmp_path)
    config: DecodingBaseConfig
    if mode.startswith("eagle3"):
        head = perfect_eagle3(tmp_path, target)
        config = EagleDecodingConfig(
            max_draft_len=k, speculative_model=head, eagle3_one_model=mode == "eagle3"
        )
    else:
        add_perfect_mtp(target, k)
        config = MTPDecodingConfig(num_nextn_predict_layers=k, use_mtp_vanilla="vanilla" in mode)
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=256,
        max_num_tokens=36, enable_chunked_prefill=True, disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    rng = random.Random(0)
    # Longer than the window and the K tokens that the deepest layer cannot see at the start.
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(16, 50))] for _ in range(5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1 + 6 * (k + 1), ignore_eos=True))
    for output in outputs:
        assert output.spec_stats.acceptance_length == k + 1
        assert output.spec_stats.acceptance_per_position == [1.0] * k
        assert output.spec_stats.num_steps == 6


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["eagle3", "mtp_eagle"])
@pytest.mark.parametrize("overlap", [False, True])
def test_a_perfect_head_is_accepted_after_rests(tmp_path: Path, mode: str, overlap: bool) -> None:
    """What the head reads late is what it would have read at once."""
    target, k = one_layer_target(tmp_path), 3
    options: dict[str, Any] = {"draft_len_schedule": {8: k}}
    if mode == "eagle3":
        head = perfect_eagle3(tmp_path, target)
        config: Any = EagleDecodingConfig(max_draft_len=k, speculative_model=head, **options)
    else:
        add_perfect_mtp(target, k)
        config = MTPDecodingConfig(num_nextn_predict_layers=k, **options)
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=256,
        max_num_tokens=36, enable_chunked_prefill=True, disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    executor, rng = llm.executor, random.Random(0)
    params = SamplingParams(max_tokens=120, ignore_eos=True)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(16, 50))] for _ in range(5)]
    requests = [executor.enqueue(prompt, params) for prompt in prompts]
    while executor.has_work:
        executor.runtime_draft_len = rng.choice([0, 0, k])
        for _ in range(rng.choice([1, 2, 7, 20])):
            executor.step()
    for request in requests:
        accepted, cut = request.accepted_lens, request.accepted_lens[1] + request.accepted_lens[2]
        assert accepted[0] > 20 and accepted[k] > 5 and cut == 0, "all or none"
        assert request.num_draft_tokens == k * accepted[k]


# -- blocks ------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mtp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("mtp"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def drafters(mtp_target: Path) -> Drafters:
    return make_drafters(mtp_target.parent)


@pytest.mark.slow
@pytest.mark.parametrize("mode", NETWORKS)
def test_drafts_are_the_same_with_blocks_of_one_token(
    mtp_target: Path, drafters: Drafters, mode: str
) -> None:
    """Where nothing is rounded up to whole blocks, room and lengths must be exact."""
    config = config_of(mode, 3, drafters)
    wide, narrow = (_drafts_of(mtp_target, config, page) for page in (32, 1))
    assert len(wide) > 6 and min(min(row) for row in wide) >= 0
    assert narrow == wide


def _drafts_of(target: Path, config: Any, page: int) -> list[list[int]]:
    """The drafts that each step of two requests leaves, all of which are accepted by force."""
    llm = cpu_engine(target, config, page=page, overlap=False)
    llm.executor.worker.force_num_accepted_tokens = config.max_draft_len
    params = SamplingParams(max_tokens=25, ignore_eos=True)
    prompts = list(range(3, 17)), list(range(40, 45))
    requests = [llm.executor.enqueue(prompt, params) for prompt in prompts]
    drafts: list[list[int]] = []
    while llm.executor.has_work:
        llm.executor.step()
        slots = [request.slot for request in requests if not request.is_finished]
        drafts += llm.executor.state.next_tokens[slots, 1:].tolist()
    return drafts


# -- a loop that is not ours -------------------------------------------------------------------
def test_the_example_of_a_foreign_loop(tmp_path: Path, target_dir: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from eagle3_in_your_loop import K, generate

    perfect_for = one_layer_target(tmp_path)
    prompt = [(5 * i) % VOCAB for i in range(20)]
    for target, head in (
        (target_dir, eagle3_dir(tmp_path)),
        (perfect_for, perfect_eagle3(tmp_path, perfect_for)),
    ):
        tokens, steps = generate(str(target), str(head), prompt, 1 + 4 * (K + 1))
        assert tokens == Oracle(target).extend(prompt, 1 + 4 * (K + 1))
        assert target is target_dir or steps == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_head_that_overflows_hurts_nobody_else(tmp_path: Path, overlap: bool) -> None:
    """One token's embedding is broken in the head alone. Blocks that its drafts wrote go to the
    next requests, whose proposals must be what they are without it."""
    target = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=LAYERS)
    head = eagle3_dir(tmp_path, own_embedding=True)
    config = EagleDecodingConfig(max_draft_len=3, speculative_model=head)
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=64,
        kv_cache_config=KvCacheConfig(max_tokens=64, tokens_per_block=4),
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    executor = llm.executor

    def drafts_of(prompt: list[int]) -> list[list[int]]:
        request = executor.enqueue(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        seen = []
        while executor.has_work:
            executor.step()
            if request.is_generation:
                seen.append(executor.state.next_tokens[request.slot, 1:].tolist())
        return seen

    clean = drafts_of([5, 6, 7])
    executor.draft_model.embed_tokens.weight.data[90] = float("nan")  # type: ignore[union-attr]
    drafts_of([90, 3] * 12)
    for group in executor.kv_cache.groups:
        assert torch.isfinite(group.k_cache).all() and torch.isfinite(group.v_cache).all()
    assert drafts_of([5, 6, 7]) == clean


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "mtp"])
def test_one_tensor_is_used_twice(tmp_path: Path, kind: str) -> None:
    """A draft model may return what its logits are computed from, to be fed on too."""
    if kind == "mtp":
        target, config = (
            mtp_model_dir(tmp_path, num_mtp_layers=2),
            MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=True),
        )
    else:
        target = tiny_model_dir(tmp_path, num_hidden_layers=6)
        head = (eagle3_dir if kind == "eagle3" else p_eagle_dir)(tmp_path)
        config = EagleDecodingConfig(max_draft_len=2, speculative_model=head)
    read: list[list[Tensor]] = []
    for pick in (lambda out: out[0], lambda out: (out[0], out[0])):
        llm = LLM(target, config, device="cpu", dtype="float32", max_seq_len=64)
        model: Any = llm.executor.draft_model
        forward, logits, seen = model.forward, model.compute_logits, []
        model.forward = lambda *a, f=forward, p=pick, **k: p(f(*a, **k))

        def compute(hidden: Tensor, step: int, logits: Any = logits, seen: Any = seen) -> Tensor:
            seen.append(hidden)
            return logits(hidden, step)

        model.compute_logits = compute
        llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=8, ignore_eos=True))
        read.append(seen)
    assert len(read[0]) == len(read[1]) > 4
    assert all(torch.equal(one, two) for one, two in zip(*read, strict=True))
