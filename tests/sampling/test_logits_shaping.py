"""Penalties, biases and bans, against plain arithmetic over transformers' logits."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matrix import NETWORKS, thinned
from sampled import VOCAB, config_of, engine, make_models
from tiny_heads import mtp_model_dir

from trtspec import LLM, DraftTargetDecodingConfig, KvCacheConfig, SamplingParams
from trtspec.errors import RequestError
from trtspec.metadata.logits import MAX_ENDS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"))


SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"repetition_penalty": 0.7},  # the other way
    {"presence_penalty": 1.5, "frequency_penalty": 0.8},
    {"frequency_penalty": -0.5},
    {"logit_bias": {3: 4.0, 50: -100, 7: 1.5}},
    {"bad_token_ids": [5, 11, 61]},
    {"bad_words": [[5], [61, 30], [11, 3, 8]]},  # replaced by words of the text itself
    {},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "logit_bias": {9: 2.0}, "min_p": 0.1},
]


class Plain:
    """Greedy decoding by the formulas, in float64, without a cache."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @torch.inference_mode()
    def logits(self, text: list[int]) -> list[float]:
        return self.model(torch.tensor([text])).logits[0, -1].double().tolist()

    def shaped(self, prompt: list[int], output: list[int], params: SamplingParams) -> list[float]:
        logits = self.logits(prompt + output)
        for token in range(len(logits)):
            count = output.count(token)
            if count or token in prompt:
                factor = params.repetition_penalty
                logits[token] = (
                    logits[token] / factor if logits[token] > 0 else logits[token] * factor
                )
            logits[token] -= params.frequency_penalty * count
            logits[token] -= params.presence_penalty if count else 0.0
            logits[token] += dict(params.logit_bias or {}).get(token, 0.0)
            if token in (params.bad_token_ids or ()):
                logits[token] = float("-inf")
        for *rest, last in params.bad_words or ():
            if not rest or (prompt + output)[-len(rest) :] == rest:
                logits[last] = float("-inf")
        return logits

    def decode(self, prompt: list[int], params: SamplingParams) -> tuple[list[int], float]:
        """The text and its closest call."""
        output: list[int] = []
        gap = float("inf")
        for _ in range(params.max_tokens):
            logits = self.shaped(prompt, output, params)
            best, second = torch.tensor(logits).topk(2).values.tolist()
            gap = min(gap, best - second)
            output.append(max(range(len(logits)), key=lambda t: logits[t]))
        return output, gap


def requests(plain: Plain, tokens: int) -> list[tuple[list[int], SamplingParams, list[int]]]:
    """Prompts, parameters and texts that no rounding decides."""
    rng, found = random.Random(3), []
    for settings in SETTINGS:
        for _ in range(20):
            prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 30))]
            params = SamplingParams(max_tokens=tokens, ignore_eos=True, **settings)
            if params.bad_words:  # of the text that would come: it goes another way, twice
                text, _ = plain.decode(prompt, replace(params, bad_words=None))
                words = [[prompt[-1], text[0]], text[4:7], [text[9]], text[9:15]]
                text, _ = plain.decode(prompt, replace(params, bad_words=words))
                params = replace(params, bad_words=[*words, text[5:7], text[10:13]])
            text, gap = plain.decode(prompt, params)
            if gap > 2e-3:
                found.append((prompt, params, text))
                break
        else:
            raise AssertionError(f"every text with {settings} has a close call")
    return found


@pytest.fixture(scope="module")
def cases(folder: Path) -> list[tuple[list[int], SamplingParams, list[int]]]:
    return requests(Plain(folder / "target"), 16)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "ngram", "itself", *NETWORKS])
def test_greedy_texts_are_those_of_the_formulas(
    folder: Path, cases: list[tuple[list[int], SamplingParams, list[int]]], mode: str
) -> None:
    """Requests with different wishes in one batch, chunked and preempted; `itself` drafts with the
    target, so that many drafts are right and many are not, for it sees no penalty."""
    config = None
    if mode == "itself":
        config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=folder / "target")
    elif mode != "none":
        config = config_of(folder, mode, "strict")
    llm = engine(
        folder, config, max_num_tokens=16, enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=80, tokens_per_block=4),
    )  # fmt: skip
    outputs = llm.generate([c[0] for c in cases], [c[1] for c in cases])
    assert [o.outputs[0].token_ids for o in outputs] == [c[2] for c in cases]
    assert llm.stats().num_preemptions > 0
    if mode == "itself":
        assert 1.5 < llm.stats().acceptance_length < 4


@pytest.mark.slow
@pytest.mark.parametrize("rule", thinned(["rejection", "strict", "exact_match", "block"], 4))
def test_sampled_texts_follow_the_shaped_distribution(folder: Path, rule: str) -> None:
    """The third token's distribution, penalties and min-p seen row by row by what is judged."""
    plain, count, prompt = Plain(folder / "target"), 3000, [5, 17, 3]
    settings: dict[str, Any] = {
        "temperature": 3.0, "min_p": 0.3, "presence_penalty": 2.0, "repetition_penalty": 1.3,
        "logit_bias": {4: 1.0}, "bad_token_ids": [60],
    }  # fmt: skip
    params = [
        SamplingParams(max_tokens=3, ignore_eos=True, seed=i, **settings) for i in range(count)
    ]

    def after(output: list[int]) -> torch.Tensor:
        logits = torch.tensor(plain.shaped(prompt, output, params[0]), dtype=torch.float64)
        p = (logits / 3.0).softmax(-1)
        p[p < 0.3 * p.max()] = 0
        return p / p.sum()

    wanted = torch.zeros(VOCAB, dtype=torch.float64)
    first = after([])
    for a in first.nonzero()[:, 0].tolist():
        second = after([a])
        for b in second.nonzero()[:, 0].tolist():
            wanted += first[a] * second[b] * after([a, b])
    config = DraftTargetDecodingConfig(
        max_draft_len=3, speculative_model=folder / "target", acceptance=rule
    )
    llm = engine(
        folder, config, max_batch_size=100, max_seq_len=32,
        kv_cache_config=KvCacheConfig(max_tokens=3200, tokens_per_block=8),
    )  # fmt: skip
    said = [o.outputs[0].token_ids[2] for o in llm.generate([prompt] * count, params)]
    assert all(wanted[token] > 0 for token in said)
    possible = wanted > 0
    names = torch.cumsum(possible, 0) - 1  # the possible tokens, numbered
    probabilities = torch.full((VOCAB,), 1e-300, dtype=torch.float64)
    probabilities[: int(possible.sum())] = wanted[possible]
    counts = torch.bincount(names[torch.tensor(said)], minlength=int(possible.sum())).double()
    expected = wanted[possible] * count
    common = expected >= 5
    chi = ((counts - expected)[common] ** 2 / expected[common]).sum()
    freedom = torch.tensor(max(int(common.sum()) - 1, 1) / 2).double()
    assert float(torch.special.gammaincc(freedom, chi / 2)) > 1e-3


def test_no_end_before_min_tokens(tmp_path: Path) -> None:
    """End tokens, the model's and the request's, are held back and come after that as ever."""
    target = mtp_model_dir(tmp_path, seed=1, num_mtp_layers=1)
    llm = LLM(target, device="cpu", dtype="float32", max_seq_len=96)
    push = {2: 60.0, 40: 30.0}  # the model's end token, and one of ours
    base: dict[str, Any] = {"max_tokens": 12, "logit_bias": push, "stop_token_ids": [40]}
    assert llm.generate([5, 6], SamplingParams(**base)).outputs[0].token_ids == [2]
    for least in (1, 7, 12):
        output = llm.generate([5, 6], SamplingParams(min_tokens=least, **base)).outputs[0]
        ids = output.token_ids
        assert not {2, 40} & set(ids[:least])
        assert len(ids) == min(least + 1, 12) and (least == 12 or ids[-1] == 2)
    base |= {"ignore_eos": True, "stop_token_ids": None}
    for least in (0, 7):  # the model's is held back as in vLLM, though it then ends nothing
        ids = llm.generate([5, 6], SamplingParams(min_tokens=least, **base)).outputs[0].token_ids
        assert ids == [40] * least + [2] * (12 - least)


def test_a_slot_forgets_its_last_request(folder: Path) -> None:
    """Also beside a request for whose sake logits are shaped."""
    llm = engine(folder, None, max_batch_size=2)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    before = llm.generate([5, 6, 7], params).outputs[0].token_ids
    wild = replace(params, logit_bias={1: 100, 2: 90}, min_tokens=3)
    mild = replace(params, presence_penalty=0.5)
    llm.generate([[5, 6, 7]] * 2, wild)
    for _ in range(2):
        first, _, last = llm.generate([[5, 6, 7]] * 3, [params, mild, params])
        assert first.outputs[0].token_ids == last.outputs[0].token_ids == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("min_p", 1.0), ("min_p", -0.1), ("repetition_penalty", 0), ("repetition_penalty", "x"),
        ("presence_penalty", 2.5), ("frequency_penalty", float("nan")), ("logit_bias", [1]),
        ("logit_bias", {-1: 0.5}), ("logit_bias", {1: 101}), ("bad_token_ids", [-3]),
        ("bad_token_ids", 7), ("bad_words", "x"), ("bad_words", [b"ab"]), ("bad_words", [[]]),
        ("bad_words", [[1, -2]]),
        ("bad_words", [[1] * 9]), ("bad_words", [[1]] * 65), ("min_tokens", -1), ("min_tokens", 33),
    ],
)  # fmt: skip
def test_values_are_checked(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: value})


def test_ids_are_checked_against_the_model(folder: Path) -> None:
    llm = engine(folder, None)
    for name, value in (
        ("logit_bias", {VOCAB: 1.0}), ("bad_token_ids", [VOCAB]), ("bad_words", [[3, VOCAB]]),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=f"{name}.*0 … 96"):
            llm.generate([1], SamplingParams(**{name: value}))
    with pytest.raises(RequestError, match="needs a tokenizer"):
        llm.generate([1], SamplingParams(bad_words=["no"]))
    with pytest.raises(RequestError, match="an executor has no tokenizer"):
        llm.executor.enqueue([1], SamplingParams(bad_words=["no"]))
    with pytest.raises(RequestError, match="nothing could come out"):
        llm.generate([1], SamplingParams(bad_token_ids=list(range(VOCAB))))
    far = SamplingParams(max_tokens=5, min_tokens=2, stop_token_ids=[5000, 2**70], ignore_eos=True)
    assert len(llm.generate([1], far).outputs[0].token_ids) == 5  # they never come anyway
    most = replace(far, max_tokens=2, stop_token_ids=list(range(MAX_ENDS)))
    assert min(llm.generate([1], most).outputs[0].token_ids) >= MAX_ENDS
    many = replace(far, stop_token_ids=list(range(MAX_ENDS + 1)))
    with pytest.raises(RequestError, match=f"33 end tokens: at most {MAX_ENDS}"):
        llm.generate([1], many)


def test_scalars_of_numpy_and_torch() -> None:
    params = SamplingParams(
        max_tokens=np.int64(3), temperature=np.float32(0.5), seed=np.int64(7), n=torch.tensor(2),
        logit_bias={np.int64(5): np.float32(1)},
    )  # fmt: skip
    assert params == SamplingParams(max_tokens=3, temperature=0.5, seed=7, n=2, logit_bias={5: 1.0})
    assert params.each()[0].seed == 7 and type(params.seed) is int
    with pytest.raises(RequestError, match="max_tokens"):
        SamplingParams(max_tokens=np.bool_(True))
