"""Sampled speculation through the engine: the target's distribution, and the same tokens for the
same request and seed whatever happens around it."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import BLOCKS, NETWORKS, full, spread, thinned
from safetensors.torch import load_file, save_file
from sampled import VOCAB, K, config_of, engine, make_models, requests, texts
from tiny_heads import eagle3_dir
from torch import Tensor

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    SAEnhancerConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig, SaveHiddenStatesDecodingConfig
from trtspec.errors import ConfigError, RequestError
from trtspec.executor.draft_lens.auto_draft_len import AutoDraftLen
from trtspec.executor.draft_lens.auto_verified import AutoVerified
from trtspec.executor.request import ScheduledBatch
from trtspec.executor.runner import StepRunner
from trtspec.workers import DFlashWorker
from trtspec.workers.base import SpecWorkerBase
from trtspec.workers.lookup import LookupBesideNetwork

NETWORKS_IN_STEP = [mode for mode in NETWORKS if not mode.endswith("two_engine")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


# -- distribution ------------------------------------------------------------------------------
CHANCE = 1e-4
"""Of some sixty p-values, all by fixed seeds, one is below it by chance in one of 170 choices."""
NOTICED = 700
"""Requests that show what is plainly wrong: two thousand, as elsewhere, show half of it too."""
PROMPT, TEMPERATURE = [5, 17, 3, 88, 41], 5.0  # random models agree on nothing when cold


@pytest.fixture(scope="module")
def probabilities(folder: Path) -> list[Tensor]:
    """Of the token at output positions 1 and 2, by transformers over all texts before them."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()

    @torch.inference_mode()
    def after(texts: list[list[int]]) -> Tensor:
        parts = [
            model(torch.tensor(texts[i : i + 512])).logits[:, -1].double()
            for i in range(0, len(texts), 512)
        ]
        return (torch.cat(parts) / TEMPERATURE).softmax(-1)

    first = after([PROMPT])[0]
    second = after([[*PROMPT, a] for a in range(VOCAB)])
    pairs = [[*PROMPT, a, b] for a, b in itertools.product(range(VOCAB), repeat=2)]
    joint = (first[:, None] * second).flatten()
    return [first @ second, joint @ after(pairs)]


def p_value(tokens: Sequence[int], probabilities: Tensor) -> float:
    counts = torch.bincount(torch.tensor(tokens), minlength=VOCAB).double()
    wanted = probabilities * len(tokens)
    chi_square = ((counts - wanted) ** 2 / wanted).sum()
    return float(torch.special.gammaincc(torch.tensor((VOCAB - 1) / 2).double(), chi_square / 2))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        *itertools.product(NETWORKS, ["rejection", "block"]),
        *itertools.product(BLOCKS, ["strict", "exact_match"]),
    ]
    if full()
    else [
        ("eagle3", "rejection"),
        ("pard", "block"),
        ("dflash2", "rejection"),
        ("dflash2", "block"),
        ("dspark", "block"),
        ("dspark", "strict"),
    ],
)
def test_the_engine_draws_what_the_target_would(
    folder: Path, probabilities: list[Tensor], mode: str, rule: str
) -> None:
    assert min(_p_values_of(folder, probabilities, config_of(folder, mode, rule))) > CHANCE


@functools.cache
def _seeded(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=3, temperature=TEMPERATURE, seed=i, ignore_eos=True)
        for i in range(count)
    ]


def _p_values_of(
    folder: Path, probabilities: list[Tensor], config: DecodingBaseConfig,
    least: float | None = None, watch: Callable[[LLM], None] = lambda llm: None, count: int = 2000,
    batch: int = 250, **options: Any,
) -> list[float]:  # fmt: skip
    """Of the tokens at output positions 1 and 2."""
    llm = engine(
        folder, config, max_batch_size=batch, max_seq_len=32,
        kv_cache_config=KvCacheConfig(max_tokens=batch * 32, tokens_per_block=8), **options,
    )  # fmt: skip
    outputs = llm.generate([PROMPT] * count, _seeded(count))
    watch(llm)
    if least is None:
        least = 1.2 if config.acceptance in ("rejection", "block") else 1.005
    assert llm.stats().acceptance_length > least, "too little was accepted to show anything"
    return [
        p_value([o.outputs[0].token_ids[place] for o in outputs], wanted)
        for place, wanted in zip((1, 2), probabilities, strict=True)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_draft_lengths_that_change_at_every_step(
    folder: Path, probabilities: list[Tensor], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Missing drafts are verified as -1, and drafts too many are dropped, as graphs do."""
    monkeypatch.setenv("TRTSPEC_CACHE", str(folder / "cache"))
    rng = random.Random(0)

    def at_random(self: AutoDraftLen, batch: ScheduledBatch, most: int) -> int:
        return rng.choice(self.lengths)

    def as_in_a_graph(self: StepRunner, generations: Sequence[Any], exactly: int) -> int:
        return exactly if generations else self.max_draft_len

    monkeypatch.setattr(AutoDraftLen, "_choose", at_random)
    monkeypatch.setattr(StepRunner, "num_drafts_to_verify", as_in_a_graph)
    config = replace(config_of(folder, "eagle3", rule), draft_len_schedule="auto")
    assert min(_p_values_of(folder, probabilities, config)) > CHANCE


SHARED_OUT = (
    list(itertools.product(NETWORKS, ["rejection", "block"]))
    if full()
    else [("eagle3", "rejection"), ("mtp", "block"), ("dflash2", "block"), ("dspark", "rejection")]
)


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule"), SHARED_OUT)
def test_verification_that_is_shared_out(
    folder: Path, probabilities: list[Tensor], mode: str, rule: str
) -> None:
    """Of 300 drafts the likeliest 80 are verified."""
    count = 6000 if full() else 2000
    assert min(_p_values_of_80(folder, probabilities, mode, rule, count)) > CHANCE


def _p_values_of_80(
    folder: Path, probabilities: list[Tensor], mode: str, rule: str, count: int
) -> list[float]:
    """Prompts and drafts are read in different steps: only then verification is shared out."""
    config = config_of(folder, mode, rule)
    assert config is not None
    config = replace(config, max_verified_drafts=80)
    return _p_values_of(
        folder, probabilities, config, 1.05, count=count, batch=100, prefill_batch_size=100
    )


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "rule"), SHARED_OUT)
def test_how_many_are_verified_is_chosen(
    folder: Path, probabilities: list[Tensor], mode: str, rule: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Each step verifies another number of drafts, at random."""
    rng = random.Random(0)

    def at_random(self: AutoVerified, batch: Any, most: int) -> int:
        self.chosen, self._most = rng.randrange(most + 1), most
        return self.chosen

    monkeypatch.setattr(AutoVerified, "_choose", at_random)
    config = config_of(folder, mode, rule)
    assert config is not None
    config = replace(config, max_verified_drafts="auto")
    sizes = {"count": 6000 if full() else 2000, "batch": 100, "prefill_batch_size": 100}
    assert min(_p_values_of(folder, probabilities, config, 1.05, **sizes)) > CHANCE


@pytest.mark.slow
@pytest.mark.parametrize("rule", thinned(["block", "rejection"], 2))
def test_a_choice_by_the_drafted_token_is_noticed(
    folder: Path, probabilities: list[Tensor], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were even tokens verified first, more of them would be said."""
    draft = SpecWorkerBase.draft_or_look_up

    def by_token(self: SpecWorkerBase, inputs: Any) -> Tensor:
        drafts = draft(self, inputs)
        self._probabilities = tuple((drafts % 2 == 0).float().unbind(1))
        return drafts

    monkeypatch.setattr(SpecWorkerBase, "draft_or_look_up", by_token)
    assert min(_p_values_of_80(folder, probabilities, "eagle3", rule, 6000)) < CHANCE / 100


def _with_lookup(folder: Path, mode: str, rule: str) -> DecodingBaseConfig:
    """After the first batch of requests, most first tokens are in an earlier text."""
    lookup = SAEnhancerConfig(threshold=2, min_token_prob=0.0, match_decay=0.25)
    return replace(config_of(folder, mode, rule), sa_config=lookup)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rule"),
    [
        *itertools.product(NETWORKS_IN_STEP, ["rejection", "block"]),
        *itertools.product(["eagle3", "dflash2"], ["strict", "exact_match"]),
    ]
    if full()
    else [
        ("eagle3", "rejection"), ("dflash2", "block"), ("pard", "strict"),
    ],
)  # fmt: skip
def test_drafts_of_which_some_are_looked_up(
    folder: Path, probabilities: list[Tensor], mode: str, rule: str
) -> None:
    """What was found stands in place of what was drawn, for some requests of a step."""
    config, counts = _with_lookup(folder, mode, rule), []
    values = _p_values_of(
        folder, probabilities, config, least=1.0, watch=lambda llm: counts.append(llm.stats())
    )
    assert min(values) > CHANCE
    assert 1000 < counts[0].num_looked_up_drafts < 6000 * K


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_that_are_not_known_as_certain_are_noticed(
    folder: Path, probabilities: list[Tensor], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drafts that were looked up are judged as if the network had drawn its own."""
    real = LookupBesideNetwork.override

    def override(self: LookupBesideNetwork, inputs: Any, drafts: Tensor, memory: Any) -> Tensor:
        return real(self, inputs, drafts, None)

    monkeypatch.setattr(LookupBesideNetwork, "override", override)
    config = _with_lookup(folder, "eagle3", rule)
    values = _p_values_of(folder, probabilities, config, least=1.0, count=NOTICED)
    assert min(values) < CHANCE / 10


@pytest.mark.parametrize("mode", ["eagle3", "mtp", "dspark"])
def test_seeds_with_lookup_say_what_plain_decoding_does(
    folder: Path, plain_texts: list[list[int]], mode: str
) -> None:
    """Under exact match, twice: the second time the pool has the texts."""
    config = _with_lookup(folder, mode, "exact_match")
    llm = engine(folder, config)
    assert [texts(llm, *requests(5)) for _ in range(2)] == [plain_texts] * 2
    assert llm.stats().num_looked_up_drafts > 20


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_path_that_is_not_drawn_as_remembered_is_noticed(
    folder: Path, probabilities: list[Tensor], rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best candidate stands in the place of the one that was drawn."""
    real = DFlashWorker.propose_allowed

    def best(self: DFlashWorker, logits: Tensor, *others: Any) -> Tensor:
        real(self, logits, *others)
        return logits.argmax(-1).to(torch.int32)

    monkeypatch.setattr(DFlashWorker, "propose_allowed", best)
    config = config_of(folder, "dflash2", rule)
    assert min(_p_values_of(folder, probabilities, config, count=NOTICED)) < CHANCE / 10


# -- reproducible ------------------------------------------------------------------------------
@pytest.mark.slow
@spread(mode=NETWORKS, rule=["rejection", "block"])
def test_a_seeded_request_says_the_same_in_any_company(folder: Path, mode: str, rule: str) -> None:
    prompts, params = requests(12 if full() else 7)
    config = config_of(folder, mode, rule)
    alone = engine(folder, config, max_batch_size=1, disable_overlap_scheduler=True)
    expected = texts(alone, prompts, params)
    order = random.Random(1).sample(range(len(prompts)), len(prompts))
    tight = KvCacheConfig(max_tokens=80 if full() else 52, tokens_per_block=4)
    chunked: dict[str, Any] = {"max_num_tokens": 16, "enable_chunked_prefill": True}
    preempting: dict[str, Any] = {"kv_cache_config": tight}
    companies = [chunked, preempting] if full() else [chunked | preempting]
    for options in companies:
        llm = engine(folder, config, **options)
        got = texts(llm, [prompts[i] for i in order], [params[i] for i in order])
        assert got == [expected[i] for i in order], options
    assert llm.stats().num_preemptions > 0


@pytest.mark.slow
def test_many_requests(folder: Path) -> None:
    """Alone, together, the other way round, and preempted."""
    prompts, params = requests(200 if full() else 20, 12)
    config = config_of(folder, "eagle3", "rejection")
    expected = texts(engine(folder, config, max_batch_size=1), prompts, params)
    tight = KvCacheConfig(max_tokens=96 if full() else 64, tokens_per_block=4)
    llm = engine(folder, config, max_batch_size=16, kv_cache_config=tight)
    assert texts(llm, prompts, params) == expected
    assert texts(llm, prompts[::-1], params[::-1]) == expected[::-1]
    assert llm.stats().num_preemptions > 0


@pytest.fixture(scope="module")
def plain_texts(folder: Path) -> list[list[int]]:
    return texts(engine(folder, None, max_batch_size=1), *requests(5))


@pytest.mark.parametrize("mode", ["ngram", *NETWORKS])
def test_exact_match_says_what_plain_decoding_does(
    folder: Path, plain_texts: list[list[int]], mode: str
) -> None:
    llm = engine(folder, config_of(folder, mode, "exact_match"))
    assert texts(llm, *requests(5)) == plain_texts


def test_a_network_that_is_the_target_is_always_right(folder: Path) -> None:
    """With p = q nothing is ever turned down, in any rule that draws its drafts."""
    for rule in ("exact_match", "rejection", "block"):
        config = DraftTargetDecodingConfig(
            max_draft_len=K, speculative_model=folder / "target", acceptance=rule
        )
        llm = engine(folder, config)
        params = SamplingParams(max_tokens=1 + 5 * (K + 1), temperature=0.9, ignore_eos=True)
        for output in llm.generate([[1, 2, 3], [4, 5]], params):
            assert output.spec_stats.acceptance_length == K + 1


def test_lookup_has_no_distribution(folder: Path) -> None:
    """For NGRAM all rules are one, and no memory is set aside."""
    prompts, params = requests(6)
    said = []
    for rule in ("strict", "exact_match", "rejection", "block"):
        llm = engine(folder, config_of(folder, "ngram", rule))
        assert llm.executor.worker.draft_memory is None
        said.append(texts(llm, prompts, params))
    assert all(one == said[0] for one in said)


@pytest.mark.parametrize("rule", ["exact_match", "rejection", "block"])
def test_tiny_temperatures_are_greedy(folder: Path, rule: str) -> None:
    llm = engine(folder, config_of(folder, "eagle3", rule))
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = texts(llm, [[5, 6, 7]], [params])
    for temperature in (1e-6, 1e-38):
        assert texts(llm, [[5, 6, 7]], [replace(params, temperature=temperature)]) == expected


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_head_that_knows_the_first_tokens_only(folder: Path, tmp_path: Path, rule: str) -> None:
    """Its table of offsets is zeros, which the loader leaves out."""
    head = eagle3_dir(tmp_path, draft_vocab=40)
    tensors = load_file(head / "model.safetensors")
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    tensors["t2d"] = torch.arange(VOCAB) < 40
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    config = EagleDecodingConfig(
        max_draft_len=K, speculative_model=head, acceptance=rule, eagle3_layers_to_capture=[0, 1, 2]
    )
    llm = engine(folder, config)
    params = SamplingParams(max_tokens=60, temperature=6.0, ignore_eos=True)
    (output,) = llm.generate([[5, 6, 7]], params)
    assert len(output.outputs[0].token_ids) == 60
    assert 1 < output.spec_stats.acceptance_length < 3


def test_nothing_to_accept_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nothing is drafted"):
        SaveHiddenStatesDecodingConfig(output_directory=tmp_path, acceptance="block")


# -- several completions -----------------------------------------------------------------------
def test_n_completions_are_n_requests(folder: Path) -> None:
    llm = engine(folder, config_of(folder, "eagle3", "rejection"))
    params = SamplingParams(max_tokens=12, temperature=3.0, seed=5, n=4, ignore_eos=True)
    several, one = llm.generate([[1, 2, 3], [4, 5]], [params, replace(params, n=1)])
    ids = [completion.token_ids for completion in several.outputs]
    assert [completion.index for completion in several.outputs] == [0, 1, 2, 3]
    assert len({tuple(i) for i in ids}) == 4 and all(len(i) == 12 for i in ids)
    assert ids == texts(llm, [[1, 2, 3]] * 4, params.each())
    assert ids[0] == texts(llm, [[1, 2, 3]], [replace(params, n=1)])[0]
    assert len(one.outputs) == 1
    assert several.spec_stats.num_steps > one.spec_stats.num_steps
    unseeded = llm.generate([7, 8], replace(params, seed=None))
    assert len({tuple(completion.token_ids) for completion in unseeded.outputs}) == 4


def test_n_where_it_cannot_be(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"n=3 with temperature=0.*says the same"):
        SamplingParams(n=3)
    with pytest.raises(RequestError, match=r"n=0.*1 … 128"):
        SamplingParams(n=0)
    llm = engine(folder, None)
    params = SamplingParams(n=2, temperature=1.0, max_tokens=2)
    with pytest.raises(RequestError, match="queue n requests"):
        next(iter(llm.generate_stream([1, 2], params)))
    with pytest.raises(RequestError, match=r"prompt 2 of 2: .*logit_bias"):  # nothing was started
        llm.generate([[1], [2]], [params, SamplingParams(logit_bias={VOCAB: 1.0})])
    assert not llm.executor.has_work
