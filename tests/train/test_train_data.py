"""Training text: what is read, masked, packed and counted; and the target's own text."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import tiny_model_dir

from trtspec import LLM, NGramDecodingConfig, SamplingParams
from trtspec.api.text_stream import special_token_ids
from trtspec.checkpoints.zoo import resolve_model
from trtspec.data.acceptance_prompts import load_prompts
from trtspec.errors import ConfigError
from trtspec.train import self_generate as module
from trtspec.train.conversation import (
    MAX_PERIOD,
    Ask,
    Drop,
    Job,
    Line,
    Mix,
    Reply,
    has_loop,
    split_at_user_turn,
)
from trtspec.train.data import (
    FORMAT,
    DataError,
    Example,
    TrainingText,
    is_measured,
    render_conversation,
    tokenizer_fingerprint,
)
from trtspec.train.draft_vocabulary import d2t_offsets, draft_vocabulary
from trtspec.train.packing import first_fit, pack, split
from trtspec.train.seeds import FOLLOW_UPS, PASSAGES, TEMPLATES, draw_follow_up, draw_seed
from trtspec.train.self_generate import Report, read_prompts, self_generate

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
VOCAB = 260  # bytes, and four specials
START, END = 256, 257


def _byte_tokenizer(template: str | None = CHATML) -> Any:
    """A token for each byte, and ChatML's two."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        additional_special_tokens=["<|im_start|>", "<|im_end|>", "<|pad|>", "<|unk|>"],
    )
    tokenizer.eos_token, tokenizer.chat_template = "<|im_end|>", template
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [START, END]
    return tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return _byte_tokenizer()


@pytest.fixture(scope="module")
def chat_dir(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
    path = tiny_model_dir(
        tmp_path_factory.mktemp("chat"), seed=3, vocab_size=VOCAB, eos_token_id=END,
        max_position_embeddings=2048,
    )  # fmt: skip
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(chat_dir: Path) -> LLM:
    return LLM(chat_dir, device="cpu", dtype="float32", max_batch_size=8, max_seq_len=1024)


def _header(tokenizer: Any, /, **changes: Any) -> dict[str, Any]:
    return {"format": FORMAT, "tokenizer": tokenizer_fingerprint(tokenizer), "model": "m"} | changes


def _write(path: Path, *lines: Any) -> Path:
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"".join(text + b"\n" for text in texts))
    return path


def _tokens(*ids: int, mask: list[int] | None = None, **labels: Any) -> dict[str, Any]:
    return {"input_ids": list(ids), "loss_mask": mask or [0] + [1] * (len(ids) - 1), **labels}


def _chat(*turns: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)]


def _example(ids: list[int], mask: list[int] | None = None, digest: str = "00" * 32) -> Example:
    mask = [1] * len(ids) if mask is None else mask
    return Example(torch.tensor(ids), torch.tensor(mask, dtype=torch.bool), digest)


# -- reading ---------------------------------------------------------------------------------------
def test_both_forms_are_read(tmp_path: Path, tokenizer: Any) -> None:
    path = _write(
        tmp_path / "a.jsonl",
        {"messages": _chat("Hi", "Yo")},
        b"",
        _header(tokenizer),
        _tokens(5, 6, 7, mask=[0, 1, 0], kind="code", temperature=0.8, index=3),
        {"messages": _chat("Hi", "Yo"), "source": "elsewhere"},
        _header(tokenizer, model="joined with cat"),
        _tokens(8, 9),
    )
    text = TrainingText(path, tokenizer, VOCAB)
    for _ in range(2):  # every iteration reads anew
        first, tokens, again, last = list(text)
        assert text.counts.kept == 4 and text.counts.bad == 0
    assert tokens.input_ids.tolist() == [5, 6, 7] and tokens.input_ids.dtype == torch.int64
    assert tokens.loss_mask.tolist() == [False, True, False]
    assert (tokens.kind, tokens.temperature, first.kind) == ("code", 0.8, None)
    assert first.digest == again.digest and len({first.digest, tokens.digest, last.digest}) == 3
    assert tokenizer.decode(first.input_ids[first.loss_mask]) == "Yo<|im_end|>"


BAD_LINES: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (b"\xff\xfe", "not JSON in UTF-8"),
    (b"[" * 100_000, "not JSON"),
    ([1, 2], "a JSON list, not an object"),
    ({}, "the keys none"),
    ({"text": "x"}, "the keys 'text'"),
    ({"messages": [], "input_ids": []}, "the keys 'messages', 'input_ids'"),
    ({"messages": []}, "at least one message"),
    ({"messages": "Hi"}, "at least one message"),
    ({"messages": [{"role": "user"}]}, "message 0"),
    ({"messages": [{"role": "user", "content": 3}]}, "message 0"),
    ({"messages": [*_chat("Hi"), {"role": "assistant", "content": "x", "n": 1}]}, "message 1"),
    ({"messages": _chat("Hi", "\ud800")}, "Unicode"),
    ({"messages": _chat("Hi"), "kind": 3}, "kind=3"),
    ({"messages": [{"role": "assistant", "content": "Hi"}]}, "first message is the assistant's"),
    ({"input_ids": [1, 2]}, "loss_mask=null"),
    ({"input_ids": "12", "loss_mask": [0, 1]}, "input_ids="),
    ({"input_ids": [1, True], "loss_mask": [0, 1]}, "list of ints"),
    ({"input_ids": [1, 2.0], "loss_mask": [0, 1]}, "list of ints"),
    ({"input_ids": [1, 2], "loss_mask": [0, 2]}, "list of 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [0, True]}, "list of 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [[], 1]}, "list of 0 and 1"),
    ({"input_ids": [1, 2], "loss_mask": [1]}, "2 input_ids and a loss_mask of 1"),
    (_tokens(1, VOCAB), f"token id {VOCAB}"),
    (_tokens(-1, 1), "token id -1"),
    (_tokens(1, 2, temperature=-1), "temperature=-1"),
    (_tokens(1, 2, temperature=True), "temperature=True"),
    (b'{"input_ids": [1, 2], "loss_mask": [0, 1], "temperature": NaN}', "temperature=nan"),
]  # fmt: skip


@pytest.mark.parametrize(("line", "says"), BAD_LINES, ids=range(len(BAD_LINES)))
def test_bad_lines_are_named_or_skipped(
    tmp_path: Path, tokenizer: Any, line: Any, says: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = _tokens(1, 2)
    path = _write(tmp_path / "a.jsonl", _header(tokenizer), good, line, good)
    with pytest.raises(DataError) as error:
        list(TrainingText(path, tokenizer, VOCAB))
    assert says in str(error.value) and str(error.value).startswith(f"{path}:3: ")
    text = TrainingText(path, tokenizer, VOCAB, skip_bad=True)
    with caplog.at_level(logging.WARNING):
        assert len(list(text)) == 2
    assert (text.counts.kept, text.counts.bad) == (2, 1)
    (record,) = caplog.records
    assert "1 bad line(s)" in record.message and f"{path}:3: " in record.message


def test_what_spoils_the_whole_file_is_raised_all_the_same(tmp_path: Path, tokenizer: Any) -> None:
    ours, path = tokenizer_fingerprint(tokenizer), tmp_path / "a.jsonl"

    def error_of(*lines: Any, tok: Any = tokenizer) -> str:
        with pytest.raises(DataError) as error:
            list(TrainingText(_write(path, *lines), tok, VOCAB, skip_bad=True))
        return str(error.value)

    message = error_of(_header(tokenizer, tokenizer="beef", model="other"), _tokens(1, 2))
    assert "beef" in message and ours in message and "'other'" in message and ":2:" in message
    message = error_of(_tokens(1, 2))
    assert "no header" in message and ours in message
    assert "'v9'" in error_of(_header(tokenizer, format="v9"))
    assert "chat template" in error_of({"messages": _chat("Hi", "Yo")}, tok=_byte_tokenizer(None))
    # Of another tokenizer, but text: rendered with ours.
    _write(path, _header(tokenizer, tokenizer="beef"), {"messages": _chat("Hi", "Yo")})
    assert len(list(TrainingText(path, tokenizer, VOCAB))) == 1
    with pytest.raises(DataError, match="cannot be read"):
        list(TrainingText(tmp_path / "none", tokenizer, VOCAB))
    with pytest.raises(DataError, match="max_len=1"):
        TrainingText(path, tokenizer, VOCAB, max_len=1)


def test_truncation_and_examples_without_loss(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    path = _write(
        tmp_path / "a.jsonl",
        _header(tokenizer),
        _tokens(1, 2, 3, 4, 5, mask=[0, 0, 1, 1, 1]),
        _tokens(1, 2, 3, 4, 5, mask=[0, 0, 0, 0, 1]),
        _tokens(1, 2, mask=[0, 0]),
        {"input_ids": [], "loss_mask": []},
        {"messages": _chat("a question, no answer")},
    )
    text = TrainingText(path, tokenizer, VOCAB, max_len=4)
    (kept,) = list(text)
    assert kept.input_ids.tolist() == [1, 2, 3, 4] and kept.loss_mask.tolist() == [0, 0, 1, 1]
    assert (text.counts.kept, text.counts.truncated, text.counts.without_loss) == (1, 1, 4)
    said = [record.getMessage().removeprefix(f"{path}: ") for record in caplog.records]
    assert said == ["4 line(s) without a token to train on left out", "1 line(s) cut at 4 tokens"]
    whole = list(TrainingText(path, tokenizer, VOCAB))
    assert len(whole) == 2 and whole[0].digest == kept.digest  # so that a split stays


def test_evaluation_prompts_are_kept_out(
    tmp_path: Path, tokenizer: Any, llm: LLM, caplog: pytest.LogCaptureFixture
) -> None:
    prompt = load_prompts()[0].messages[-1]["content"]
    other = _chat("Hi", "Yo", f"Translate:\n\n{load_prompts()[-1].messages[-1]['content']}", "Ja.")
    lines = [{"messages": m} for m in (_chat(prompt.upper(), "Yo"), _chat("Hi", prompt), other)]
    text = TrainingText(_write(tmp_path / "a", *lines), tokenizer, VOCAB)
    assert len(list(text)) == 1 and text.counts.measured == 2
    assert "2 conversation(s)" in caplog.text
    assert Scripted(_job(llm, [prompt]), 0, None).reason == "evaluation prompt"


def test_fingerprint_is_of_the_ids() -> None:
    one, two = _byte_tokenizer(), _byte_tokenizer("{{ messages }}")
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
    two.add_tokens(["more"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(two)
    assert special_token_ids(one) == [256, 257, 258, 259]


# -- masks -----------------------------------------------------------------------------------------
SMOL_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
CHATS = [
    _chat("Hi", "Hello there."),
    _chat("One?", "Two.\n\nThree.", "Four?", " Five with spaces "),
    [{"role": "system", "content": "Be brief."}, *_chat("assistant", "assistant")],
    _chat("Überraschung 日本", "naïve 日本語 🙂🙂", "x", "```py\ndef f():\n    return 1\n```"),
    _chat("A question, not answered at the end", "ok", "and now?"),
    _chat("user", ""),
]


def _check_masks(tokenizer: Any, default_system: str | None) -> None:
    """Against pieces tokenized one by one: special tokens keep them apart."""
    for messages in CHATS:
        given = messages
        if default_system is not None and messages[0]["role"] != "system":
            given = [{"role": "system", "content": default_system}, *messages]
        ids, mask = [], []
        for message in given:
            is_answer = message["role"] == "assistant"
            for piece, counts in (
                (f"<|im_start|>{message['role']}\n", False),
                (f"{message['content']}<|im_end|>", is_answer),
                ("\n", False),
            ):
                new = tokenizer.encode(piece, add_special_tokens=False)
                ids += new
                mask += [counts] * len(new)
        assert render_conversation(tokenizer, messages) == (ids, mask)


def test_masks_are_the_assistants_tokens(tokenizer: Any) -> None:
    _check_masks(tokenizer, None)


@pytest.mark.model
def test_masks_with_smollm2() -> None:
    from transformers import AutoTokenizer

    _check_masks(AutoTokenizer.from_pretrained(resolve_model("smollm2-135m")), SMOL_SYSTEM)


def test_masks_with_other_templates() -> None:
    llama2 = (  # trims; a user's turn has no end of its own
        "{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] | trim }} "
        "[/INST]{% else %} {{ m['content'] | trim }}<|im_end|>{% endif %}{% endfor %}"
    )
    tokenizer = _byte_tokenizer(llama2)
    ids, mask = render_conversation(tokenizer, _chat("a", " b ", "c", "d"))
    text = "[INST] a [/INST] b<|im_end|>[INST] c [/INST] d<|im_end|>"
    assert tokenizer.decode(ids) == text
    answers = [i for i, m in zip(ids, mask, strict=True) if m]
    assert tokenizer.decode(answers) == " b<|im_end|> d<|im_end|>"
    # No end of turn at all, but a special token begins the next turn: not the assistant's.
    tokenizer = _byte_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    ids, mask = render_conversation(tokenizer, _chat("a", "b", "c", "d"))
    assert tokenizer.decode([i for i, m in zip(ids, mask, strict=True) if m]) == "bd"
    # Answers before the last are written in another way, as some do with thoughts.
    tokenizer = _byte_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m['content'] if loop.last else 'gone' }}<|im_end|>"
        "{% endfor %}"
    )
    with pytest.raises(DataError, match="message 1 of 3"):
        render_conversation(tokenizer, _chat("a", "b", "c"))


# -- split, pack, vocabulary -----------------------------------------------------------------------
def test_split_is_by_text_alone(tmp_path: Path, tokenizer: Any) -> None:
    lines = [_tokens(1, i, j) for i in range(40) for j in range(10)]
    path = tmp_path / "a.jsonl"

    def held_out(lines: list[Any], share: float, max_len: int | None = None) -> set[str]:
        text = TrainingText(
            _write(path, _header(tokenizer), *lines), tokenizer, VOCAB, max_len=max_len
        )
        train, held = split(text, share)
        assert len(train) + len(held) == len(lines)
        return {example.digest for example in held}

    some = held_out(lines, 0.1)
    assert 20 <= len(some) <= 60
    assert held_out(lines[::-1], 0.1) == some == held_out(lines, 0.1, max_len=2)
    assert held_out(lines[:200], 0.1) < some < held_out(lines, 0.2)
    assert not held_out(lines, 0.0) and len(held_out(lines, 1.0)) == 400
    with pytest.raises(DataError, match=r"holdout=1\.5"):
        split([], 1.5)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_first_fit_is_first_fit(sizes: list[int]) -> None:
    free: list[int] = []
    expected = []
    for size in sizes:
        i = next((i for i, room in enumerate(free) if room >= size), len(free))
        if i == len(free):
            free.append(20)
        free[i] -= size
        expected.append(i)
    assert first_fit(sizes, 20) == expected


_DOCUMENTS = st.lists(
    st.lists(st.tuples(st.integers(0, 90), st.booleans()), min_size=1, max_size=30),
    min_size=1, max_size=25,
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(_DOCUMENTS, st.integers(2, 24), st.integers(0, 3))
def test_packed_rows_hold_the_documents_whole(
    documents: list[list[tuple[int, bool]]], length: int, seed: int
) -> None:
    examples = [_example([i for i, _ in d], [m for _, m in d]) for d in documents]
    expected = Counter(
        tuple(d[:length]) for d in documents if any(counts for _, counts in d[:length])
    )
    if not expected:
        with pytest.raises(DataError, match="token to predict"):
            pack(examples, length, seed)
        return
    packed = pack(examples, length, seed)
    ids, mask, owner, positions = (
        packed.rows.input_ids, packed.rows.loss_mask, packed.rows.document_ids,
        packed.rows.positions,
    )  # fmt: skip
    assert all(t.shape == (len(packed), length) for t in (ids, mask, owner, positions))
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
    assert (owner.dtype, positions.dtype) == (torch.int32, torch.int64)
    found: Counter[Any] = Counter()
    for row in range(len(packed)):
        places = owner[row].tolist()
        used = [p for p in places if p >= 0]
        assert used and places == used + [-1] * (length - len(used)) and used == sorted(used)
        assert set(used) == set(range(max(used) + 1))
        for document in set(used):
            at = owner[row] == document
            assert positions[row][at].tolist() == list(range(int(at.sum())))
            found[tuple(zip(ids[row][at].tolist(), mask[row][at].tolist(), strict=True))] += 1
        pad = owner[row] < 0
        assert (
            not mask[row][pad].any() and not ids[row][pad].any() and not positions[row][pad].any()
        )
    assert found == expected
    again = pack(examples, length, seed)
    assert again.fingerprint == packed.fingerprint and torch.equal(again.rows.input_ids, ids)


def test_epochs_are_shuffled_and_resumed_exactly() -> None:
    examples = [_example([i, i]) for i in range(10)]
    packed = pack(examples, 2, seed=5)
    assert packed.fill == 1.0 and packed.truncated == 0

    def batches(first: int, count: int) -> list[list[int]]:
        source = packed.batches(3, first)
        return [next(source).input_ids[:, 0].tolist() for _ in range(count)]

    assert packed.num_batches(3) == 3 and packed.num_batches(3, drop_last=False) == 4
    all_of_them = batches(0, 9)
    for first in range(9):
        assert batches(first, 9 - first) == all_of_them[first:]
    epochs = [[row for b in all_of_them[i : i + 3] for row in b] for i in (0, 3, 6)]
    assert all(len(set(epoch)) == 9 for epoch in epochs) and epochs[0] != epochs[1] != epochs[2]
    whole = [b.input_ids.shape[0] for b in packed.epoch_batches(3, 1, drop_last=False)]
    assert whole == [3, 3, 3, 1]
    part = [b.input_ids[:, 0].tolist() for b in packed.epoch_batches(3, 1, first=1)]
    assert part == all_of_them[4:6]
    assert pack(examples, 2, seed=6).fingerprint != packed.fingerprint
    assert packed.order(2).tolist() == [0, 3, 4, 7, 8, 2, 5, 6, 9, 1]  # in every version
    for size in (0, 11):
        with pytest.raises(DataError, match=f"batch_size={size}"):
            next(packed.batches(size))
    with pytest.raises(DataError, match="length=1"):
        pack(examples, 1, 0)


def test_draft_vocabulary() -> None:
    examples = [_example([9, 7, 7, 3], [0, 1, 1, 1]), _example([5, 5, 3, 8, 9], [1, 1, 0, 1, 0])]
    ids, coverage = draft_vocabulary(examples, 3, vocab_size=12)
    # 7 and 5 twice, then 3 and 8 once: the lower id. 9 is never to be predicted.
    assert ids.tolist() == [3, 5, 7] and ids.dtype == torch.int64 and coverage == 5 / 6
    ids, coverage = draft_vocabulary(examples, 3, 12, always=[11, 0])
    assert ids.tolist() == [0, 5, 11] and coverage == 2 / 6
    offsets = d2t_offsets(ids)
    assert (torch.arange(3) + offsets).tolist() == ids.tolist() and offsets.dtype == torch.int64
    ids, coverage = draft_vocabulary(examples, 12, 12)
    assert ids.tolist() == list(range(12)) and coverage == 1.0 and not d2t_offsets(ids).any()
    for size, always in ((0, []), (13, []), (1, [1, 2])):
        with pytest.raises(DataError, match=f"vocabulary of {size} tokens"):
            draft_vocabulary(examples, size, 12, always)
    with pytest.raises(DataError, match="Token id 8"):
        draft_vocabulary(examples, 3, 8)
    with pytest.raises(DataError, match=r"always=\[12\]"):
        draft_vocabulary(examples, 3, 12, [12])
    with pytest.raises(DataError, match="No example"):
        draft_vocabulary([], 3, 12)


# -- seeds, loops ----------------------------------------------------------------------------------
def test_seeds_give_many_prompts_and_none_that_are_measured() -> None:
    rng = Random(0)
    seeds = [draw_seed(rng) for _ in range(4000)]
    distinct = {(seed.prompt, seed.passage_prompt) for seed in seeds}
    assert len(distinct) > 3500
    assert sum(map(len, TEMPLATES.values())) >= 60 and {seed.kind for seed in seeds} == set(
        TEMPLATES
    )
    texts = [seed.prompt.replace("{passage}", "") + (seed.passage_prompt or "") for seed in seeds]
    texts += [draw_follow_up(rng, kind) for kind in (*FOLLOW_UPS, "list") for _ in range(100)]
    assert not any("{" in text or "}" in text or "  " in text for text in texts)
    assert all(("{passage}" in s.prompt) == (s.passage_prompt is not None) for s in seeds)
    assert not any(is_measured(_chat(text)) for text in [*texts, *PASSAGES])
    assert [draw_seed(Random(4)) for _ in range(3)] == [draw_seed(Random(4))] * 3


def test_loops_are_repeats_at_the_end() -> None:
    start = list(range(100, 140))
    for period in (1, 2, 7, 8, 11, MAX_PERIOD):
        unit = list(range(period))
        enough = max(3 * period, 24)
        text = start + (unit * 30)[:enough]
        assert has_loop(text) and has_loop([*text, text[-period]])
        assert not has_loop(start + (unit * 30)[: enough - 1])
        assert not has_loop([*text, 999])
    assert not has_loop([]) and not has_loop([1] * 23) and has_loop([1] * 24)
    assert not has_loop(start) and not has_loop(list(range(MAX_PERIOD + 1)) * 4)


# -- one conversation, its answers given by hand ---------------------------------------------------
class Scripted:
    """Plays a conversation: answers by `reply(prompt text)` and keeps what was asked."""

    def __init__(self, job: Job, index: int, reply: Any):
        self.asks: list[Ask] = []
        self.prompts: list[str] = []
        conversation = job.converse(index)
        self.line: Line | None = None
        self.reason = ""
        try:
            ask = next(conversation)
            while True:
                self.asks.append(ask)
                self.prompts.append(job.tokenizer.decode(ask.prompt))
                answer = reply(len(self.asks), self.prompts[-1])
                text, is_ended = answer if isinstance(answer, tuple) else (answer, True)
                ids = job.tokenizer.encode(text + "<|im_end|>" * is_ended)
                ask = conversation.send(Reply(ids, is_ended))
        except StopIteration as end:
            self.line = end.value
        except Drop as reason:
            self.reason = str(reason)


def _job(llm: LLM, prompts: Any = None, **mix: Any) -> Job:
    given = None if prompts is None else [_chat(p) for p in prompts]
    return Job(llm, 1, 64, Mix(**{"self_written": 0, "second_turn": 0, "greedy": 0, **mix}), given)


def _masked(job: Job, line: Line) -> str:
    pairs = zip(line.input_ids, line.loss_mask, strict=True)
    return job.tokenizer.decode([i for i, m in pairs if m])


USER, ANSWER = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"


def test_two_turns_are_one_line_with_both_answers_marked(llm: LLM) -> None:
    job = _job(llm, ["Why?"], second_turn=1)
    played = Scripted(job, 0, lambda n, prompt: f"Answer {n}.")
    first, second = played.prompts
    assert first == f"{USER}Why?{ANSWER}"
    assert second.startswith(f"{first}Answer 1.<|im_end|>\n{USER}") and second.endswith(ANSWER)
    line = played.line
    assert (
        line is not None and job.tokenizer.decode(line.input_ids) == second + "Answer 2.<|im_end|>"
    )
    assert _masked(job, line) == "Answer 1.<|im_end|>Answer 2.<|im_end|>"
    assert (line.kind, line.temperature, line.is_retokenised) == ("given", 0.8, False)
    seeds = [ask.params.seed for ask in played.asks]
    assert len(set(seeds)) == 2 and all(a.params.temperature == 0.8 for a in played.asks)
    # Space at the end is not rendered again: what follows it is not the target's own.
    played = Scripted(job, 0, lambda n, prompt: f"Answer {n}. ")
    line = played.line
    assert line is not None and line.is_retokenised
    assert _masked(job, line) == "Answer 1.Answer 2. <|im_end|>"
    # A second turn that fails leaves the first; one that never ended has no second.
    for answer in (("A" * 10, True), ("Answer.", False)):
        played = Scripted(job, 0, lambda n, p, a=answer: a if n == 1 else "Z" * 50)
        assert played.line is not None
        assert _masked(job, played.line) == answer[0] + "<|im_end|>" * answer[1]


def test_the_target_writes_the_users_turn(llm: LLM, tokenizer: Any) -> None:
    job = _job(llm, self_written=1, second_turn=1, greedy=1)
    texts = ["What is a fjord?", "A bay.", " And a skerry? ", "A rock."]
    played = Scripted(job, 0, lambda n, prompt: texts[n - 1])
    assert played.prompts[0] == USER
    assert played.prompts[1] == f"{USER}What is a fjord?{ANSWER}"
    assert played.prompts[2] == f"{played.prompts[1]}A bay.<|im_end|>\n{USER}"
    assert played.prompts[3] == f"{played.prompts[2]}And a skerry?{ANSWER}"
    assert [ask.params.temperature for ask in played.asks] == [1.0, 0.0, 1.0, 0.0]
    assert played.asks[0].params.stop_token_ids == (END,)
    assert played.line is not None and played.line.kind == "self"
    assert _masked(job, played.line) == "A bay.<|im_end|>A rock.<|im_end|>"
    for text, reason in (
        (("What is a fjord?", False), "unfinished prompt"), ("Why?", "poor prompt"),
        ("A" * 40, "poor prompt"), ("What <|im_start|> is a fjord?", "poor prompt"),
    ):  # fmt: skip
        assert Scripted(job, 0, lambda n, prompt, t=text: t).reason == reason
    assert split_at_user_turn(tokenizer, []) == (USER, ANSWER)
    with pytest.raises(ConfigError, match="self_written=0"):
        split_at_user_turn(_byte_tokenizer("{{ messages[-1]['content'] | lower }}"), [])


def test_passages_are_written_first_and_cut_to_sentences(llm: LLM) -> None:
    job = _job(llm)
    index = next(i for i in range(99) if draw_of(job, i).passage_prompt is not None)
    seed = draw_of(job, index)
    passage = "Fjords are long bays. They were cut by ice. " * 3
    replies = {1: (f"Here is a passage:\n\n{passage}And so", False), 2: "It is about fjords."}
    played = Scripted(job, index, lambda n, prompt: replies[n])
    assert played.prompts[0] == f"{USER}{seed.passage_prompt}{ANSWER}"
    assert played.prompts[1] == f"{USER}{seed.prompt.replace('{passage}', passage[:-1])}{ANSWER}"
    assert played.line is not None and played.line.kind == seed.kind
    assert _masked(job, played.line) == "It is about fjords.<|im_end|>"
    for text in ("Too short.", (passage.replace(".", ""), False), "Yes. " * 40, f"{passage}\ufffd"):
        assert Scripted(job, index, lambda n, prompt, t=text: t).reason == "poor passage"


def draw_of(job: Job, index: int) -> Any:
    """The seed that conversation `index` draws."""
    rng = Random(f"self_generate {job.seed} {index}")
    rng.random(), rng.random()  # greedy or not; self-written or not
    return draw_seed(rng)


def test_answers_that_teach_nothing_are_dropped(llm: LLM) -> None:
    job = _job(llm, ["Why?", "x" * 2000])
    for text, reason in (
        ("No", "short answer"), ("la " * 20, "loop"),
        ("so <|im_start|> so", "special token in answer"),
    ):  # fmt: skip
        assert Scripted(job, 0, lambda n, prompt, t=text: t).reason == reason
    assert Scripted(job, 1, None).reason == "too long"
    line = Scripted(job, 0, lambda n, prompt: "Because.").line
    assert line is not None
    job.seen.add(line.prompt)
    played = Scripted(job, 0, None)
    assert played.reason == "duplicate prompt" and not played.asks


# -- whole runs ------------------------------------------------------------------------------------
MIX = Mix(self_written=0, second_turn=0.5, greedy=0.3)
TEXTS = [f"Tell me {word}." for word in "abcdefghijklmnopqrst"]


def _generate(llm: LLM, path: Path, count: int, **options: Any) -> Report:
    return self_generate(
        llm, path, count, **{"seed": 1, "prompts": TEXTS, "max_tokens": 12, "mix": MIX, **options}
    )


def _records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


@pytest.fixture(scope="module")
def uninterrupted(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("run") / "deep" / "a.jsonl"
    report = _generate(llm, path, 14)
    assert (report.examples, report.added, report.is_exhausted) == (14, 14, False)
    return path.read_bytes()


def test_what_is_written_is_the_targets_text(
    llm: LLM, tokenizer: Any, uninterrupted: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(uninterrupted)
    header, *records = _records(path)
    assert header["format"] == FORMAT and header["settings"]["seed"] == 1
    assert {r["temperature"] for r in records} == {0.0, 0.8}
    examples = list(TrainingText(path, tokenizer, VOCAB))
    assert len(examples) == 14 and all(e.kind == "given" for e in examples)
    for record in records:  # greedy text is what the engine says to the same prompt
        mask, ids = record["loss_mask"], record["input_ids"]
        assert tokenizer.decode(ids[: mask.index(1)]) == f"{USER}{TEXTS[record['index']]}{ANSWER}"
        if record["temperature"] == 0 and sum(mask) <= 12:
            again = llm.generate(ids[: mask.index(1)], SamplingParams(max_tokens=12))
            assert again.outputs[0].token_ids == ids[mask.index(1) :]
    assert len(pack(examples, 64, 0)) > 0


def test_other_batches_and_speculation_write_the_same(
    chat_dir: Path, uninterrupted: bytes, tmp_path: Path
) -> None:
    engines = (None, 16), (NGramDecodingConfig(max_draft_len=3), 3)  # 16 slots: filled in waves
    for number, (config, slots) in enumerate(engines):
        llm = LLM(
            chat_dir, config, device="cpu", dtype="float32", max_batch_size=slots, max_seq_len=1024
        )
        path = tmp_path / str(number)
        _generate(llm, path, 14)
        assert path.read_bytes() == uninterrupted
    assert uninterrupted != _other_seed(llm, tmp_path / "other")


def _other_seed(llm: LLM, path: Path) -> bytes:
    _generate(llm, path, 14, seed=2)
    return path.read_bytes()


def test_a_rerun_goes_on(llm: LLM, uninterrupted: bytes, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for count in (0, 5, 5, 14, 3):
        before = path.read_bytes() if path.exists() else b""
        report = _generate(llm, path, count)
        assert path.read_bytes().startswith(before)
        assert report.examples == max(count, len(_records(path)) - 1)
    assert path.read_bytes() == uninterrupted


def test_a_file_cut_anywhere_is_mended(
    llm: LLM, tokenizer: Any, uninterrupted: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.jsonl"
    ends = [i + 1 for i, byte in enumerate(uninterrupted) if byte == 10]
    cuts = [
        0,
        1,
        ends[0] - 1,
        ends[0],
        ends[0] + 1,
        ends[7] - 2,
        ends[7] - 1,
        len(uninterrupted) - 1,
    ]
    for cut in cuts:
        path.write_bytes(uninterrupted[:cut])
        if cut >= ends[0]:  # a reader sees whole lines alone
            whole = uninterrupted[:cut].count(b"\n") - 1
            is_complete = uninterrupted[cut : cut + 1] == b"\n"
            assert len(list(TrainingText(path, tokenizer, VOCAB))) == whole + is_complete
        _generate(llm, path, 14)
        assert path.read_bytes() == uninterrupted, cut
    assert "that was being written" in caplog.text


class Killed(BaseException):
    pass


def test_a_run_killed_in_the_middle_leaves_whole_lines(
    llm: LLM, uninterrupted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every flush in turn, between two of its writes: as SIGKILL or a full disk would."""
    monkeypatch.setattr(module, "FLUSH_EXAMPLES", 4)
    sizes = []
    for number in range(1, 4):
        path, flushes = tmp_path / str(number), 0
        output = module._Output
        flush = output.flush

        def dying(self: Any, number: int = number, flush: Any = flush) -> None:
            nonlocal flushes
            flushes += bool(self._held)
            if flushes >= number:
                self._held.clear()  # nothing of it reaches the disk, nor does a later one
                raise Killed
            flush(self)

        with monkeypatch.context() as patch:
            patch.setattr(output, "flush", dying)
            with pytest.raises(Killed):
                _generate(llm, path, 14)
        content = path.read_bytes()
        sizes.append(content.count(b"\n"))
        assert uninterrupted.startswith(content) and (not content or content.endswith(b"\n"))
        assert not llm.executor.has_work
        _generate(llm, path, 14)
        assert path.read_bytes() == uninterrupted
    assert sizes[:2] == [0, 1] and 5 <= sizes[2] < 15


def test_a_write_that_fails_leaves_no_part(tmp_path: Path) -> None:
    class Full:
        """A file on a disk with room for ten more bytes."""

        def __init__(self, file: Any):
            self.file, self.room = file, 10

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def write(self, data: Any) -> int:
            if not self.room:
                raise OSError(28, "No space left on device")
            count = min(self.room, len(data), 7)
            self.room -= count
            return self.file.write(data[:count])

    with module._Output(tmp_path / "a", {"format": FORMAT}) as output:
        before = output.path.read_bytes()
        output._file = Full(output._file)  # type: ignore[assignment]
        output.add(b"x" * 30)
        with pytest.raises(ConfigError, match="No space left"):
            output.flush()
        assert output.path.read_bytes() == before


def test_an_interrupt_keeps_what_is_done_and_stops_the_rest(
    llm: LLM, uninterrupted: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PROGRESS_SECONDS", 0.0)

    def interrupt(report: Report) -> None:
        if report.examples >= 3:
            raise KeyboardInterrupt

    path = tmp_path / "a.jsonl"
    with pytest.raises(KeyboardInterrupt):
        _generate(llm, path, 14, progress=interrupt)
    assert not llm.executor.has_work and len(_records(path)) >= 4
    assert uninterrupted.startswith(path.read_bytes())
    _generate(llm, path, 14)
    assert path.read_bytes() == uninterrupted


def test_files_of_something_else_are_refused_untouched(
    llm: LLM, uninterrupted: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    for content, says in (
        (b"dear diary", "not a line that"),
        (b'{"messages": []}\n', "KeyError"),
        (uninterrupted.replace(b'"index":', b'"indx":', 1), "a.jsonl:2: "),
        (uninterrupted.replace(FORMAT.encode(), b"v9"), "format is 'v9' in the file"),
    ):
        path.write_bytes(content)
        with pytest.raises((DataError, ConfigError), match=says):
            _generate(llm, path, 14)
        assert path.read_bytes() == content
    path.write_bytes(uninterrupted)
    for change, says in (
        ({"seed": 2}, r"settings is \{'seed': 1\} in the file and \{'seed': 2\} now"),
        ({"max_tokens": 13}, "'max_tokens': 12"),
        ({"mix": replace(MIX, greedy=0.4)}, "'greedy': 0.3"),
        ({"prompts": TEXTS[1:]}, "'prompts'"),
        ({"prompts": None}, "'prompts': None"),
    ):
        with pytest.raises(ConfigError, match=says):
            _generate(llm, path, 20, **change)  # type: ignore[arg-type]
    with (
        module._Output(tmp_path / "busy", {"format": FORMAT}),
        pytest.raises(ConfigError, match="Another run"),
    ):
        _generate(llm, tmp_path / "busy", 1)
    with pytest.raises(ConfigError, match="cannot be written"):
        _generate(llm, path / "below-a-file", 1)


def test_given_prompts_are_used_once(llm: LLM, tmp_path: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, *_chat("Tell me a.")]
    prompts = ["Tell me a.", "Tell me a.", messages, [{"role": 3}], "y" * 2000]
    seen: list[Report] = []
    report = _generate(llm, tmp_path / "a", 9, prompts=prompts, progress=seen.append)
    assert report.dropped == {"duplicate prompt": 1, "refused": 1, "too long": 1}
    assert report.is_exhausted and report.examples == 2
    assert seen[-1] == report and report.tokens_per_second > 0
    assert [r["index"] for r in _records(tmp_path / "a")[1:]] == [0, 2]


def test_hopeless_runs_end(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_BARREN", 5)
    mix = Mix(self_written=1, max_user_tokens=2)
    with pytest.raises(ConfigError, match=r"5 conversations in a row.*prompt"):
        _generate(llm, tmp_path / "a", 3, prompts=None, mix=mix)
    assert not llm.executor.has_work


@pytest.mark.slow
def test_seeds_without_given_prompts(llm: LLM, tmp_path: Path) -> None:
    """A random model writes no passages: conversations of other kinds remain."""
    report = _generate(
        llm, tmp_path / "a", 12, prompts=None, mix=replace(MIX, max_passage_tokens=8)
    )
    records = _records(tmp_path / "a")[1:]
    assert len(records) == 12 and {r["kind"] for r in records} <= set(TEMPLATES)
    assert set(report.dropped) <= {
        "poor passage",
        "loop",
        "short answer",
        "special token in answer",
    }
    assert len({tuple(r["input_ids"][: r["loss_mask"].index(1)]) for r in records}) == 12


def test_arguments_are_checked(
    llm: LLM, chat_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for options, says in (
        ({"seed": "x"}, "seed='x'"), ({"max_tokens": 2}, "max_tokens=2"),
        ({"max_tokens": 9.5}, r"max_tokens=9\.5"), ({"prompts": []}, r"prompts=\[\]"),
        ({"prompts": "text"}, "prompts='text'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            _generate(llm, tmp_path / "a", 3, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="num_examples=-1"):
        _generate(llm, tmp_path / "a", -1)
    for wrong in ({"greedy": 1.5}, {"temperature": 0}, {"max_user_tokens": 0}):
        with pytest.raises(ConfigError, match=f"Mix.{next(iter(wrong))}="):
            Mix(**wrong)  # type: ignore[arg-type]
    assert not (tmp_path / "a").exists()
    monkeypatch.setenv("TLLM_SPEC_DECODE_FORCE_NUM_ACCEPTED_TOKENS", "2")
    forced = LLM(chat_dir, NGramDecodingConfig(max_draft_len=3), device="cpu", max_seq_len=64)
    with pytest.raises(ConfigError, match="Acceptance is forced"):
        _generate(forced, tmp_path / "a", 3)
    plain = LLM(tiny_model_dir(tmp_path), device="cpu", max_seq_len=64)
    with pytest.raises(ConfigError, match="no chat template"):
        _generate(plain, tmp_path / "a", 3)


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("One?\n\n Two? \n")
    assert read_prompts(path) == ["One?", "Two?"]
    path = _write(
        tmp_path / "a.jsonl", "One?", {"prompt": "Two?"}, {"messages": _chat("Three?", "Yes.", "4")}
    )
    assert read_prompts(path) == ["One?", "Two?", _chat("Three?")]
    for line in (3, {"text": "x"}, {"messages": []}, {"messages": [1]}, b"{", "", {"prompt": " "}):
        with pytest.raises(DataError, match=r"a\.jsonl:2: .*Allowed is"):
            read_prompts(_write(path, "One?", line))
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(_write(path))
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "none")


# -- the real model --------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def smollm2() -> Iterator[LLM]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    yield LLM("smollm2-135m", device="cpu", dtype="float32", max_batch_size=8, max_seq_len=512)


@pytest.mark.slow
@pytest.mark.model
def test_smollm2_writes_its_own_training_text(smollm2: LLM, tmp_path: Path) -> None:
    mix = Mix(self_written=0.5, second_turn=0.5, max_user_tokens=16, max_passage_tokens=16)
    path = tmp_path / "a.jsonl"
    report = self_generate(smollm2, path, 4, seed=0, max_tokens=8, mix=mix)
    text = TrainingText(path, smollm2.tokenizer, 49152)
    examples = list(text)
    assert report.examples == len(examples) == 4
    for example in examples:
        prompt = example.input_ids[: int(example.loss_mask.int().argmax())].tolist()
        words = smollm2.tokenizer.decode(prompt)
        assert words.startswith(f"<|im_start|>system\n{SMOL_SYSTEM}<|im_end|>\n{USER}")
        assert words.endswith(ANSWER)
        if example.temperature == 0:
            again = smollm2.generate(prompt, SamplingParams(max_tokens=8))
            count = len(again.outputs[0].token_ids)
            assert again.outputs[0].token_ids == example.input_ids[len(prompt) :][:count].tolist()
