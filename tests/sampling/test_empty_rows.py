"""Bans that leave no token at all, behind drafts that are accepted, rejected or never reached."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from guided import save_tokenizer
from tiny import tiny_model_dir
from transformers import AutoModelForCausalLM, AutoTokenizer

from trtspec import LLM, GuidedDecodingParams, SamplingParams, UserProvidedDecodingConfig
from trtspec.acceptance.empty_rows import cut, fill_empty_rows
from trtspec.acceptance.rule import Candidates
from trtspec.acceptance.rules import RULES
from trtspec.metadata.draft_memory import DraftMemory
from trtspec.metadata.sampling import SamplingMetadata

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
    "not even a first token": {"max_tokens": 9, "bad_words": [[A], [B]]},
    "no token left, sampled": {"max_tokens": 9, "logit_bias": {A: 5}, "temperature": 1.0},
    "rejected, sampled": {"max_tokens": 9, "logit_bias": {B: 5}, "temperature": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("rule", ["rejection", "strict"])  # of sure drafts the others are the first
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
            params = SamplingParams(seed=1, **BANS | settings)
            output = llm.generate([PROMPT, [9, 9]][: 1 + is_guided], [params, *beside])[0]
            said = output.outputs[0]
            assert (said.finish_reason == "error") == ("nothing is above" in (output.error or ""))
            found[name] = said.token_ids, said.finish_reason
    plain, drafted = ends
    assert plain == drafted
    assert [reason for _, reason in plain.values()][:4] == ["length", "length", "stop", "error"]
    assert plain["no token left"][0] == [A, A]
    assert plain["not even a first token"] == ([], "error")


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


@pytest.mark.slow
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


# -- drafts of a network, whose distribution is remembered ---------------------------------------
FEW, K, COUNT = 3, 2, 20_000  # tokens, drafts, requests
Text = tuple[int, ...]
LEFT_WITH_NOTHING: set[Text] = {(1,), (0, 0), (2, 1)}


class Case:
    """Targets and drafters by text, drafts that are drawn, and one context before all requests."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        texts = [text for n in range(K + 1) for text in itertools.product(range(FEW), repeat=n)]
        self.target = {text: torch.randn(FEW, generator=random) for text in texts}
        drafter = {text: torch.randn(FEW, generator=random) for text in texts}
        self.drafts = torch.empty(COUNT, K, dtype=torch.int32)
        self.logits, drawn_from = torch.empty(COUNT, K + 1, FEW), torch.empty(COUNT, K, FEW)
        for row in range(COUNT):
            text: Text = ()
            for i in range(K + 1):
                self.logits[row, i] = (
                    float("-inf") if text in LEFT_WITH_NOTHING else self.target[text]
                )
                if i < K:
                    drawn_from[row, i] = drafter[text]
                    weights = drafter[text].softmax(-1)
                    draft = int(torch.multinomial(weights, 1, generator=random))
                    self.drafts[row, i], text = draft, (*text, draft)
        cpu = torch.device("cpu")
        self.memory = DraftMemory.allocate(COUNT + 1, K, FEW, FEW, None, cpu, torch.float32)
        self.memory.logits[1 : COUNT + 1] = drawn_from
        chosen = self.drafts.to(torch.int64)[..., None]
        self.memory.log_q[1 : COUNT + 1] = drawn_from.log_softmax(-1).gather(-1, chosen)[..., 0]

    def candidates(self) -> Candidates:
        rows = 1 + COUNT * (K + 1)
        positions = torch.cat([torch.tensor([9]), torch.arange(10, 11 + K).repeat(COUNT)])
        sampling = SamplingMetadata(
            temperatures=torch.ones(rows),
            top_ks=torch.zeros(rows, dtype=torch.int32),
            top_ps=torch.ones(rows),
            seeds=torch.cat([torch.tensor([7]), torch.arange(COUNT).repeat_interleave(K + 1)]),
            positions=positions,
            all_greedy=False,
            has_filters=False,
        )
        step: Any = SimpleNamespace(
            sizes=SimpleNamespace(num_contexts=1),
            sampling=sampling,
            slot_ids=torch.arange(COUNT + 1),
            next_prompt_tokens=torch.tensor([0]),
            state={},
        )
        nothing = torch.full((1, FEW), float("-inf"))  # of the context, whose token is known
        return Candidates(
            logits=torch.cat([nothing, self.logits.view(-1, FEW)]), drafts=self.drafts,
            max_draft_len=K, memory=self.memory, step=step,
        )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_accepted_drafts_have_the_targets_distribution(rule: str) -> None:
    """What a step puts out, and then tokens of the target, up to a text with nothing after it."""
    case = Case()
    candidates = case.candidates()
    limit = fill_empty_rows(candidates)
    accepted = cut(RULES[rule].apply(candidates), limit, num_contexts=1)
    assert not accepted.bad_requests.any()
    assert torch.equal(accepted.num_accepted_drafts, accepted.lens - 1)
    said: Counter[Text] = Counter()
    random = torch.Generator().manual_seed(5)
    for tokens, length in zip(
        accepted.tokens[1:].tolist(), accepted.lens[1:].tolist(), strict=True
    ):
        text = tuple(tokens[:length])
        assert tokens[length:] == [-1] * (K + 1 - length)
        assert not any(text[:i] in LEFT_WITH_NOTHING for i in range(length))
        while len(text) <= K and text not in LEFT_WITH_NOTHING:
            weights = case.target[text].softmax(-1)
            text = (*text, int(torch.multinomial(weights, 1, generator=random)))
        said[text] += 1
    wanted, open_texts = dict[Text, float](), {(): 1.0}
    while open_texts:
        text, p = open_texts.popitem()
        if len(text) > K or text in LEFT_WITH_NOTHING:
            wanted[text] = p
            continue
        for token, share in enumerate(case.target[text].softmax(-1).tolist()):
            open_texts[*text, token] = p * share
    assert set(said) <= set(wanted) and accepted.lens.float().mean() > 1.3
    chi = sum((said[text] - COUNT * p) ** 2 / (COUNT * p) for text, p in wanted.items())
    freedom = torch.tensor((len(wanted) - 1) / 2).double()
    assert float(torch.special.gammaincc(freedom, torch.tensor(chi / 2).double())) > 1e-3


def test_a_preempted_request_is_not_failed_by_the_row_before_its_last_token(
    target_dir: Path,
) -> None:
    """It is computed again up to there. That row's bans are those of the whole output."""
    others = [token for token in range(VOCAB) if token not in (A, B)]
    params = SamplingParams(
        max_tokens=9, ignore_eos=True, stop_token_ids=[B], min_tokens=1, bad_token_ids=others,
        bad_words=[[A, A]],
    )  # fmt: skip
    for is_preempted in (False, True):
        executor = _engine(target_dir, None).executor
        request = executor.enqueue(PROMPT, params)
        executor.step()
        while executor._pending:
            executor._read(executor._pending.popleft())
        assert request.output_token_ids == [A]
        if is_preempted:
            executor.scheduler.preempt(request)
        executor.run_until_done()
        assert (request.output_token_ids, request.finish_reason) == ([A, B], "stop")


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
