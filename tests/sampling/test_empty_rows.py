"""Bans that leave no token at all, behind drafts that are accepted, rejected or never reached."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from guided import save_tokenizer
from tiny import tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtspec import LLM, GuidedDecodingParams, SamplingParams, UserProvidedDecodingConfig

VOCAB, A, B = 97, 7, 8
PROMPT = [5, 17, 3]
BANS: dict[str, Any] = {  # A and B alone; after two A's nothing
    "ignore_eos": True,
    "bad_token_ids": [token for token in range(VOCAB) if token not in (A, B)],
    "bad_words": [[A, A, A], [A, A, B]],
}


class Drafting:
    """Drafts some tokens at random."""

    def __init__(self, *tokens: int):
        self.tokens, self.rng = tokens, random.Random(3)

    def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> list[int]:
        return self.rng.choices(self.tokens, k=max_draft_len)


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tiny_model_dir(tmp_path_factory.mktemp("target"))
    save_tokenizer(path)
    return path


def _engine(target_dir: Path, drafter: Any, rule: str = "rejection", **options: Any) -> LLM:
    config = drafter and UserProvidedDecodingConfig(
        max_draft_len=3, drafter=drafter, acceptance=rule
    )
    given = {"max_seq_len": 64, "max_batch_size": 3, "device": "cpu"} | options
    return LLM(target_dir, config, dtype="float32", **given)


REQUESTS = {
    "drafts that are rejected": {"max_tokens": 9, "logit_bias": {B: 50}},
    "an output that ends before": {"max_tokens": 2, "logit_bias": {A: 50}},
    "a stop token before": {"max_tokens": 9, "logit_bias": {A: 50}, "stop_token_ids": [A]},
    "no token left": {"max_tokens": 9, "logit_bias": {A: 50}},
    "no token left, sampled": {"max_tokens": 9, "logit_bias": {A: 5}, "temperature": 1.0},
    "rejected, sampled": {"max_tokens": 9, "logit_bias": {B: 5}, "temperature": 1.0},
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rule", ["rejection", "block", "exact_match", "strict"])
@pytest.mark.parametrize("is_guided", [False, True], ids=["alone", "beside a grammar"])
def test_texts_are_those_of_plain_decoding(
    target_dir: Path, rule: str, is_guided: bool, device: str
) -> None:
    grammar = GuidedDecodingParams(regex="[abc]{25,30}")
    beside = [SamplingParams(max_tokens=30, guided_decoding=grammar)] * is_guided
    ends: list[dict[str, tuple[list[int], str | None]]] = [{}, {}]
    for drafter, found in zip((None, Drafting(A)), ends, strict=True):
        llm = _engine(target_dir, drafter, rule, device=device)
        for name, settings in REQUESTS.items():
            if "sampled" in name and rule in ("rejection", "block"):
                continue  # their seeded tokens are others with drafts
            params = SamplingParams(seed=1, **BANS, **settings)
            output = llm.generate([PROMPT, [9, 9]][: 1 + is_guided], [params, *beside])[0]
            said = output.outputs[0]
            assert (said.finish_reason == "error") == ("nothing is above" in (output.error or ""))
            found[name] = said.token_ids, said.finish_reason
    plain, drafted = ends
    assert plain == drafted
    assert [reason for _, reason in plain.values()][:4] == ["length", "length", "stop", "error"]
    assert plain["no token left"][0] == [A, A]


@pytest.mark.parametrize(("max_tokens", "reason"), [(2, "length"), (9, "error")])
def test_a_grammar_and_bans_that_leave_nothing(
    target_dir: Path, max_tokens: int, reason: str
) -> None:
    """The third `a` of `aaa` is banned. An output of two tokens ends before that."""
    a = AutoTokenizer.from_pretrained(target_dir).convert_tokens_to_ids("a")
    params = SamplingParams(
        max_tokens=max_tokens, guided_decoding=GuidedDecodingParams(regex="aaa|b"),
        logit_bias={a: 50}, bad_words=[[a, a, a]],
    )  # fmt: skip
    for drafter in (None, Drafting(a)):
        output = _engine(target_dir, drafter).generate([PROMPT], [params])[0]
        assert output.outputs[0].token_ids == [a, a]
        assert output.outputs[0].finish_reason == reason
        assert (reason == "error") == ("nothing is above -inf" in (output.error or ""))


@pytest.mark.parametrize("rule", ["rejection", "block", "exact_match"])
def test_sampled_texts_have_their_distribution(target_dir: Path, rule: str) -> None:
    """Whole texts of at most four tokens, of which those with two A's in turn end there."""
    wanted = _texts(target_dir, temperature=4.0, longest=4)
    count = 1500
    llm = _engine(target_dir, Drafting(A, B), rule, max_batch_size=100, max_seq_len=16)
    params = [SamplingParams(max_tokens=4, temperature=4.0, seed=i, **BANS) for i in range(count)]
    outputs = llm.generate([PROMPT] * count, params)
    said = Counter(tuple(output.outputs[0].token_ids) for output in outputs)
    assert set(said) <= set(wanted)
    assert llm.stats().acceptance_length > 1.3
    chi = sum((said[text] - count * p) ** 2 / (count * p) for text, p in wanted.items())
    freedom = torch.tensor((len(wanted) - 1) / 2).double()
    assert float(torch.special.gammaincc(freedom, torch.tensor(chi / 2).double())) > 1e-3


def _texts(target_dir: Path, temperature: float, longest: int) -> dict[tuple[int, ...], float]:
    """Returns all texts and their probabilities, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32).eval()
    ended: dict[tuple[int, ...], float] = {}
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    while open_texts:
        text, p = open_texts.popitem()
        if len(text) == longest or text[-2:] == (A, A):
            ended[text] = p
            continue
        with torch.inference_mode():
            logits = model(torch.tensor([[*PROMPT, *text]])).logits[0, -1, [A, B]].double()
        for token, share in zip((A, B), (logits / temperature).softmax(-1).tolist(), strict=True):
            open_texts[*text, token] = p * share
    return ended
