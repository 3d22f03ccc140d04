"""Generations in padded passes over prompts, as graphs run them, here run eagerly in torch."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from eager_graphs import EagerGraphs
from embeds import embeds_prompt, greedy_with_embeds, mrope_positions_of_prompt, vl_model_dir
from matrix import Drafters, config_of, make_drafters
from oracle import VOCAB, random_prompts
from perfect_schedules import NAMES, Schedule, make_case
from tiny_heads import mtp_model_dir
from uncaptured import PaddedTorch, Uncaptured

from trtspec import (
    LLM,
    CudaGraphConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SAEnhancerConfig,
    SamplingParams,
)
from trtspec.acceptance.forced import FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR
from trtspec.checkpoints.hf_config import parse_config
from trtspec.config import DecodingBaseConfig
from trtspec.errors import ConfigError
from trtspec.executor import build
from trtspec.executor.cuda_graphs.joined_passes import (
    MOST_TIMES,
    JoinedPasses,
    JoinedShape,
    _sparse,
)
from trtspec.executor.request import ContextChunk, Request, ScheduledBatch, StepPlan
from trtspec.models.decoder import Decoder
from trtspec.ops.launch.machine import SECONDS_PER_LAYER

K, BEGIN, END = 3, 5, 6
Waiting = list[tuple[Any, SamplingParams]]


@pytest.fixture(autouse=True)
def padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes of few rows for several prompts, and attention that reads them."""
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    monkeypatch.setattr(build, "attention_backend", lambda name, device: PaddedTorch())


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=1)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


def engine(target: Path, config: DecodingBaseConfig | None, **options: Any) -> LLM:
    given = {"max_batch_size": 4, "max_seq_len": 96, "max_num_tokens": 96} | options
    return LLM(target, config, device="cpu", dtype="float32", **given)


def joined(llm: LLM) -> Uncaptured:
    """Lets generations join prompts wherever there is room."""
    executor = llm.executor
    most = executor.config.max_num_tokens
    room = max(1, most - executor.config.max_batch_size * (executor.max_draft_len + 1))
    graphs = Uncaptured(executor, sorted({7, room // 3 + 1, room, most}), joins=True)
    executor.runner.graphs = graphs  # type: ignore[assignment]
    return graphs


def run(llm: LLM, waiting: Waiting) -> list[Request]:
    """Each request begins while those before it generate."""
    requests = []
    for prompt, params in waiting:
        requests.append(llm.executor.enqueue(prompt, params))
        llm.executor.step()
        llm.executor.step()
    llm.executor.run_until_done()
    llm.executor.kv_cache.check_integrity()
    return requests


class JoinedSchedule(Schedule):
    graphs: Uncaptured

    def engine(self) -> LLM:
        llm = super().engine()
        self.graphs = joined(llm)
        return llm


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("eagle3_two_engine", "mtp_vanilla")]
)
def test_every_draft_is_accepted(tmp_path: Path, name: str) -> None:
    """Random schedules, draft lengths, chunks, caches and rules; sampled requests too."""
    case, drafts, passes = make_case(tmp_path, name), 0, 0
    for seed in (4, 9):
        schedule = JoinedSchedule(case, "cpu", seed)
        schedule.run(num_requests=8)
        drafts += schedule.check()
        passes += schedule.graphs.num_joined
    assert drafts > 20 and passes > 2


def _of_mode(mode: str, **fields: Any) -> Callable[[Drafters], DecodingBaseConfig | None]:
    return lambda drafters: config_of(mode, K, drafters, **fields)


def _relaxed(_: Drafters) -> DecodingBaseConfig:
    return MTPDecodingConfig(
        num_nextn_predict_layers=K, use_relaxed_acceptance_for_thinking=True, relaxed_topk=20,
        relaxed_delta=0.9, begin_thinking_phase_token=BEGIN, end_thinking_phase_token=END,
    )  # fmt: skip


CASES: dict[str, tuple[Callable[[Drafters], DecodingBaseConfig | None], dict[str, Any]]] = {
    "plain": (_of_mode("none"), {}),
    "ngram": (_of_mode("ngram"), {}),
    "sa": (_of_mode("sa"), {}),
    "sa beside a network": (_of_mode("eagle3", sa_config=SAEnhancerConfig(threshold=1)), {}),
    "fp8 cache": (_of_mode("eagle3"), {"kv_cache_config": KvCacheConfig(dtype="fp8")}),
    "sampled by a rule": (_of_mode("dspark", acceptance="block"), {}),
    "schedule": (_of_mode("eagle3", draft_len_schedule={1: 3, 2: 0, 3: 1, 4: 2}), {}),
    "relaxed": (_relaxed, {}),
    "forced": (_of_mode("draft_target"), {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_requests_say_what_they_say_in_eager_passes(
    target_dir: Path, drafters: Drafters, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled ones, with filters, penalties, biases and bans."""
    if name == "forced":
        monkeypatch.setenv(FORCE_NUM_ACCEPTED_TOKENS_ENV_VAR, "1.5")
    make_config, options = CASES[name]
    fields: list[dict[str, Any]] = [
        {}, {"temperature": 0.9}, {"presence_penalty": 0.8}, {"temperature": 4, "top_k": 9},
        {"logit_bias": {3: 5.0, 9: -100}, "temperature": 1.1}, {"bad_words": [[7], [3, 9]]},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "min_p": 0.1, "temperature": 0.7},
    ]  # fmt: skip
    waiting: Waiting = [
        ([BEGIN, *prompt], SamplingParams(12 + 2 * i, seed=i, ignore_eos=True, **fields[i % 7]))
        for i, prompt in enumerate(random_prompts(10, 20))
    ]
    apart = engine(target_dir, make_config(drafters), **options)
    together = engine(target_dir, make_config(drafters), **options)
    graphs = joined(together)
    expected, got = run(apart, waiting), run(together, waiting)
    assert [r.output_token_ids for r in got] == [r.output_token_ids for r in expected]
    assert [r.accepted_lens for r in got] == [r.accepted_lens for r in expected]
    assert together.stats().num_steps == apart.stats().num_steps
    assert graphs.num_joined > 4


def test_a_prompt_of_text_joins_one_with_an_image(tmp_path: Path, drafters: Drafters) -> None:
    """Whose rotary positions have three axes, and fall behind its KV positions."""
    target = vl_model_dir(tmp_path)
    image = embeds_prompt(mrope_positions=mrope_positions_of_prompt())
    llm = engine(target, config_of("draft_target", K, Drafters(draft=target)))
    graphs, params = joined(llm), SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [(prompt, params) for prompt in random_prompts(3, 12)]
    requests = run(llm, [(image, params), *texts])
    assert graphs.num_joined == 3
    assert requests[0].output_token_ids == greedy_with_embeds(target, image, 12)
    alone = engine(target, None).generate([prompt for prompt, _ in texts], params)
    assert [r.output_token_ids for r in requests[1:]] == [o.outputs[0].token_ids for o in alone]


@pytest.mark.parametrize("at", ["run_both", "run_contexts"])
def test_a_failed_pass_loses_no_step(target_dir: Path, drafters: Drafters, at: str) -> None:
    """The first pass over prompts, with the generations, or the one after it."""
    llm = engine(target_dir, config_of("eagle3", K, drafters))
    executor, graphs = llm.executor, joined(llm)
    del graphs.shapes[-1]  # the prompts are two passes
    params = SamplingParams(max_tokens=9, ignore_eos=True, presence_penalty=0.5)
    prompts = [
        [(5 * i + j * j) % VOCAB for j in range(count)] for i, count in enumerate((9, 76, 8))
    ]
    expected = engine(target_dir, None).generate(prompts, params)
    requests = [executor.enqueue(prompts[0], params)]
    executor.step()
    executor.step()

    def fail(*_: object) -> None:
        raise ConfigError("no memory")

    requests += [executor.enqueue(prompt, params) for prompt in prompts[1:]]
    works = getattr(graphs, at)
    setattr(graphs, at, fail)
    with pytest.raises(ConfigError, match="no memory"):
        executor.step()
    setattr(graphs, at, works)
    executor.run_until_done()
    for request, output in zip(requests, expected, strict=True):
        assert request.output_token_ids == output.outputs[0].token_ids


def _large_target() -> Decoder:
    """Two layers of Llama-3.1-8B's sizes, without memory."""
    raw = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "vocab_size": 1000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2,
    }  # fmt: skip
    with torch.device("meta"):
        return Decoder(parse_config(raw, Path("config.json")), PaddedTorch()).to(torch.bfloat16)


def test_sizes_are_as_few_as_padding_allows() -> None:
    """A row's products take as long as reading a 140th of weights in 16 bits."""
    target, sizes = _large_target(), [1, 2, 4, *range(8, 257, 8)]
    tokens = [8, 16, 64, 128, 144, 256]
    passes = JoinedPasses(target, sizes, tokens, rows=1)
    assert passes.batch_sizes == [2, 8, 32, 64, 128, 256]
    assert passes.context_tokens == {16, 64, 144, 256}
    assert JoinedPasses(target, sizes, [], rows=4).batch_sizes == [2, 8, 16, 32, 64, 128, 256]
    assert JoinedPasses(target, [3, 5], [], rows=8).batch_sizes == [5]
    assert [passes.size_for(count) for count in (1, 2, 5, 65, 256)] == [2, 2, 8, 128, 256]


@pytest.mark.parametrize(("most", "times"), [(0, 1), (6, 1), (6, 2), (1000, 2)])
def test_every_size_has_a_larger_one_nearby(most: float, times: int) -> None:
    """There is no size that could be left out, and none is missing."""
    rng = random.Random(int(most) + times)

    def is_near(larger: int, size: int) -> bool:
        return larger < times * size or (larger - size <= most and larger < MOST_TIMES * size)

    for _ in range(50):
        sizes = sorted(rng.sample(range(1, 60), rng.randint(1, 12)))
        kept = _sparse(sizes, most, times)
        assert set(kept) <= set(sizes) and kept == sorted(kept) and kept[-1] == sizes[-1]
        for size in sizes:
            nearest = next(larger for larger in kept if larger >= size)
            assert nearest == size or is_near(nearest, size)
        assert not any(is_near(kept[i + 1], kept[i]) for i in range(len(kept) - 1))


def test_padding_may_cost_more_than_a_second_pass() -> None:
    passes = JoinedPasses(_large_target(), [1, 2, 4, *range(8, 257, 8)], [64], rows=4)
    weights = 2 * (2 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14_336) + 4096 * 1000) / 4.3e12
    kernels = 2 * SECONDS_PER_LAYER

    def saved(tokens: int, generations: int, rows: int) -> float:
        shape = JoinedShape(None, 0, tokens, generations)  # type: ignore[arg-type]
        return passes.seconds_saved(shape, rows)

    assert saved(0, 0, 4) == pytest.approx(weights + kernels, rel=0.01)
    for shape in ((24, 0, 1), (0, 24, 1), (0, 6, 4), (12, 3, 4)):
        assert 0.7 * weights < saved(*shape) - kernels < 0.9 * weights
    assert saved(0, 24, 4) - kernels > 0.2 * weights
    assert saved(0, 0, 9) > saved(120, 0, 1) > 0 > saved(0, 120, 4) > saved(480, 120, 4)
    assert saved(20, 0, 1) > saved(0, 20, 1), "a generation has logits, too"


def test_a_pass_is_joined_once_that_has_paid_for_its_graph(target_dir: Path) -> None:
    """And where its padding costs less than it saves, whether it has a graph or not."""
    executor = engine(target_dir, None, max_batch_size=40, max_num_tokens=128).executor
    graphs = EagerGraphs(executor, CudaGraphConfig(context_tokens=[16, 100]))
    graphs.capture_seconds = [0.1]
    graphs.joined = JoinedPasses(_large_target(), graphs.batch_sizes, [16, 100], rows=1)
    graphs.joined.batch_sizes = graphs.batch_sizes
    graphs.joined.seconds_of_pass = saved = 0.04
    requests = [executor.make_request([3] * 20, SamplingParams(4)) for _ in range(41)]

    def pays(prompt: int, count: int, num_drafts: int = 0) -> bool:
        batch = ScheduledBatch([ContextChunk(requests[0], 0, prompt)], requests[1 : count + 1])
        return graphs.pays_to_join(StepPlan(batch, num_drafts, draft_len=0))

    assert [pays(9, 3) for _ in range(4)] == [False, False, True, True]
    assert list(graphs._costs.values()) == [pytest.approx(4 * saved)]
    assert not pays(9, 2) and not pays(9, 3, num_drafts=1), "others have graphs of their own"
    assert not any(pays(17, 40) for _ in range(9)), "there is no room for so many rows"
    graphs.joined.seconds_of_pass = 1e-6
    for key in list(graphs._costs):
        graphs._graphs[key] = None  # type: ignore[assignment]
    assert pays(9, 3) and not pays(9, 17)
    graphs.joined.batch_sizes = [40]
    graphs._graphs[next(iter(graphs._costs))._replace(num_beside=40)] = None  # type: ignore[assignment]
    assert not pays(9, 3)


@pytest.mark.parametrize("joins", [False, True])
def test_prompts_wait_half_as_long_where_they_join(target_dir: Path, joins: bool) -> None:
    """Eight texts run and more wait: a free slot idles 8 steps, or 4, before prompts take it."""
    llm = engine(target_dir, None, max_batch_size=9, max_num_tokens=128, prefill_batch_size="auto")
    executor, graphs = llm.executor, joined(llm)
    graphs.joins = joins
    long = SamplingParams(max_tokens=60, ignore_eos=True)
    for i in range(9):
        executor.enqueue([3 + i, 7], long if i else SamplingParams(max_tokens=3, ignore_eos=True))
    first = executor.enqueue([5, 5], SamplingParams(max_tokens=3, ignore_eos=True))
    while not first.output_token_ids:  # the first pass beside generations is not known yet
        executor.step()
    later = [executor.enqueue([5, 6 + i], long) for i in range(3)]
    while not first.is_finished:
        executor.step()
    num_steps = 0
    while not later[0].num_computed:
        executor.step()
        num_steps += 1
    assert abs(num_steps - (4 if joins else 8)) <= 1
    executor.run_until_done()


def test_few_sizes_where_there_is_room_for_their_rows(target_dir: Path) -> None:
    """Else those of two passes. The graph that runs is the one that was paid for."""
    executor = engine(target_dir, None, max_batch_size=40, max_num_tokens=48).executor
    graphs = EagerGraphs(executor, CudaGraphConfig(context_tokens=[4, 8, 16, 32]))
    graphs.joined.seconds_of_pass = 1.0
    graphs.joined.context_tokens, graphs.joined.batch_sizes = frozenset({8, 32}), [4, 40]
    requests = [executor.make_request([3] * 20, SamplingParams(4)) for _ in range(41)]

    def sizes(prompt: int, count: int) -> tuple[int, int] | None:
        batch = ScheduledBatch([ContextChunk(requests[0], 0, prompt)], requests[1 : count + 1])
        shape = graphs._joined_shape(StepPlan(batch, num_drafts=0, draft_len=0))
        return None if shape is None else (shape.prompts.num_tokens, shape.num_beside)

    assert sizes(3, 3) == (8, 4) and sizes(9, 3) == (32, 4)
    assert sizes(8, 5) == (8, 40)
    assert sizes(9, 5) == (16, 8), "32 or 16 with 40 are too many"
    assert sizes(9, 40) is None and sizes(33, 1) is None
    del graphs.contexts[1]
    assert sizes(3, 3) == (32, 4), "a shape may be dropped"


def test_the_pass_that_was_paid_for_runs(target_dir: Path) -> None:
    llm = engine(target_dir, None, max_batch_size=8, max_num_tokens=64)
    graphs = EagerGraphs(llm.executor, CudaGraphConfig(context_tokens=[4, 8, 16, 32]))
    graphs.joined.seconds_of_pass = 1.0
    graphs.joined.context_tokens, graphs.joined.batch_sizes = frozenset({16, 32}), [8]
    finished = [0]
    run_both = graphs.run_both

    def counting(plan: StepPlan) -> Any:
        def finish() -> None:
            finished[0] += 1
            plan.finish_before()

        return run_both(plan._replace(finish_before=finish))

    graphs.run_both = counting  # type: ignore[method-assign]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    texts = [(prompt[:3], params) for prompt in random_prompts(4, 12)]
    requests = run(llm, texts)
    keys = [key for key in graphs._graphs if key.num_beside]
    assert {(key.context_tokens, key.num_beside) for key in keys} == {(16, 8)}
    assert {key for key in graphs._costs if key.num_beside} == set(keys) and finished[0] == 3
    alone = engine(target_dir, None).generate([prompt for prompt, _ in texts], params)
    assert [r.output_token_ids for r in requests] == [o.outputs[0].token_ids for o in alone]
