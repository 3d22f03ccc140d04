"""The real model: SmolLM2-135M-Instruct against transformers' generate, token for token."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import full, thinned

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    NGramDecodingConfig,
    RequestOutput,
    SamplingParams,
    UserProvidedDecodingConfig,
)
from trtspec.checkpoints.zoo import resolve_model
from trtspec.config import DecodingBaseConfig
from trtspec.data.prompts import OPEN, REPEATS
from trtspec.errors import RequestError

pytestmark = pytest.mark.model
TOKENS = 28 if full() else 8


@pytest.fixture(scope="module")
def model_dir() -> Path:
    return resolve_model("smollm2-135m")


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    raw = [
        "The capital of France is",
        "1 2 3 4 5 6 7 8",
        "def fibonacci(n):\n",
        "Überraschung: naïve 日本",
    ]
    chats = [REPEATS[1], OPEN[0]]
    ids = [tokenizer.encode(text) for text in raw]
    for text in chats:
        messages = [{"role": "user", "content": text}]
        ids.append(
            tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        )
    return ids


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    outputs = []
    with torch.inference_mode():
        for ids in prompts:
            out = model.generate(torch.tensor([ids]), max_new_tokens=TOKENS, do_sample=False)
            outputs.append(out[0, len(ids) :].tolist())
    return outputs


@pytest.fixture(scope="module")
def short_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first six layers of SmolLM2: a draft model with the same tokenizer."""
    from safetensors.torch import load_file, save_file

    path = tmp_path_factory.mktemp("short")
    config = json.loads((model_dir / "config.json").read_text())
    config["num_hidden_layers"] = 6
    (path / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_bytes((model_dir / name).read_bytes())
    weights = load_file(model_dir / "model.safetensors")
    kept = {
        name: tensor
        for name, tensor in weights.items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < 6
    }
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


class FromTheAnswer:
    """Proposes the reference's tokens with a mistake now and then."""

    def __init__(self, prompts: list[list[int]], answers: list[list[int]]):
        self.texts = [p + a for p, a in zip(prompts, answers, strict=True)]

    def draft(self, request_id: int, token_ids: Sequence[int], max_draft_len: int) -> list[int]:
        size = len(token_ids)
        for text in self.texts:
            if text[:size] == list(token_ids):
                drafts = text[size : size + max_draft_len]
                if size % 3 == 0 and len(drafts) > 1:
                    drafts[1] += 1
                return drafts
        return []


def _config(mode: str, short: Path, drafter: Any, k: int = 4) -> DecodingBaseConfig | None:
    return {
        "none": lambda: None,
        "ngram": lambda: NGramDecodingConfig(max_draft_len=k),
        "draft_target": lambda: DraftTargetDecodingConfig(max_draft_len=k, speculative_model=short),
        "user_provided": lambda: UserProvidedDecodingConfig(max_draft_len=k, drafter=drafter),
    }[mode]()


MODES = ["none", "ngram", "draft_target", "user_provided"]


def _run(
    model_dir: Path, config: DecodingBaseConfig | None, prompts: list[list[int]], **arguments: Any
) -> tuple[LLM, list[RequestOutput]]:
    llm = LLM(model_dir, config, device="cpu", **arguments)
    return llm, llm.generate(prompts, SamplingParams(max_tokens=TOKENS))


def _tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


FEW = [("draft_target", True, False), ("user_provided", False, True)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "chunked", "overlap"),
    list(itertools.product(MODES, (False, True), (False, True))) if full() else FEW,
)
def test_mixed_batches_in_a_tight_pool_equal_transformers(
    model_dir: Path, short_model_dir: Path, prompts: list[list[int]], expected: list[list[int]],
    mode: str, chunked: bool, overlap: bool,
) -> None:  # fmt: skip
    config = _config(mode, short_model_dir, FromTheAnswer(prompts, expected))
    llm, outputs = _run(
        model_dir, config, prompts, dtype="float32", max_batch_size=4, max_seq_len=256,
        max_num_tokens=48 if chunked else 256, enable_chunked_prefill=chunked,
        disable_overlap_scheduler=not overlap,
        kv_cache_config=KvCacheConfig(max_tokens=256, tokens_per_block=16),
    )  # fmt: skip
    assert _tokens(outputs) == expected
    llm.executor.kv_cache.check_integrity()
    if mode == "user_provided":
        assert llm.stats().acceptance_length > 2


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES if full() else ["ngram"])
def test_batch_one_equals_transformers(
    model_dir: Path, short_model_dir: Path, prompts: list[list[int]], expected: list[list[int]],
    mode: str,
) -> None:  # fmt: skip
    config = _config(mode, short_model_dir, FromTheAnswer(prompts, expected))
    llm, outputs = _run(
        model_dir, config, prompts, dtype="float32", max_batch_size=1, max_seq_len=512
    )
    assert _tokens(outputs) == expected
    for result, ids in zip(outputs, expected, strict=True):
        ended = ids[-1] in llm.executor.target.config.eos_token_ids
        assert result.outputs[0].finish_reason == ("stop" if ended else "length")


@pytest.fixture(scope="module")
def bf16_texts(model_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16 instructions")
    _, outputs = _run(model_dir, None, prompts, dtype="bfloat16", max_batch_size=1, max_seq_len=512)
    return _tokens(outputs)


@pytest.mark.parametrize(
    ("mode", "k"),
    thinned(
        [
            ("user_provided", 8),
            ("user_provided", 4),
            ("draft_target", 8),
            ("ngram", 8),
            ("ngram", 4),
        ],
        5,
    ),
)
def test_bf16_text_is_the_same_with_and_without_speculation(
    model_dir: Path, short_model_dir: Path, prompts: list[list[int]], bf16_texts: list[list[int]],
    mode: str, k: int,
) -> None:  # fmt: skip
    """Batch 1, K up to 8: bit for bit, as rows do not depend on their number (decision 003)."""
    config = _config(mode, short_model_dir, FromTheAnswer(prompts, bf16_texts), k)
    _, outputs = _run(
        model_dir, config, prompts, dtype="bfloat16", max_batch_size=1, max_seq_len=512
    )
    assert _tokens(outputs) == bf16_texts


# -- text --------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    return LLM(
        "smollm2-135m",
        NGramDecodingConfig(max_draft_len=4),
        device="cpu",
        dtype="float32",
        max_seq_len=512,
    )


@pytest.mark.slow
def test_text_chat_and_model_dir(llm: LLM, model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert llm.model_dir == model_dir
    AutoModelForCausalLM.from_pretrained(llm.model_dir)
    out = llm.generate("The capital of France is", SamplingParams(max_tokens=3))
    assert "Paris" in out.outputs[0].text and out.prompt == "The capital of France is"
    assert out.prompt_token_ids == llm.tokenizer.encode("The capital of France is")
    by_ids = llm.generate(out.prompt_token_ids, SamplingParams(max_tokens=3))
    assert by_ids.outputs[0].token_ids == out.outputs[0].token_ids and by_ids.prompt is None
    messages = [{"role": "user", "content": "Say hello."}]
    one, two = llm.chat([messages, messages], SamplingParams(max_tokens=8))
    assert (
        one.outputs[0].text
        == two.outputs[0].text
        == llm.chat(messages, SamplingParams(max_tokens=8)).outputs[0].text
    )
    assert "<|im_end|>" not in one.outputs[0].text


@pytest.mark.slow
def test_streamed_text_adds_up_and_never_takes_back(llm: LLM) -> None:
    prompt = "Emoji and accents: 🙂 é ü 日本語 🙂 é ü 日本語 🙂 é"
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    whole = llm.generate(prompt, params).outputs[0]
    text, tokens = "", []
    for snapshot in llm.generate_stream(prompt, params):
        text += snapshot.outputs[0].text_diff
        tokens += snapshot.outputs[0].token_ids_diff
        assert snapshot.outputs[0].text == text
    assert (text, tokens) == (whole.text, whole.token_ids)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["5", " 4 5", "6 7", ["nothing", " 7"]])
def test_stop_strings_cut_the_text_where_plain_decoding_would(llm: LLM, stop: Any) -> None:
    prompt, params = "1 2 3 1 2 3 4 5 6 7 8 9 1 2 3", SamplingParams(max_tokens=24, ignore_eos=True)
    full = llm.generate(prompt, params).outputs[0]
    stops = [stop] if isinstance(stop, str) else stop
    ends = [full.text.find(s) for s in stops if s in full.text]
    assert ends, f"the model no longer says {stop!r}: choose another"
    stopping = SamplingParams(max_tokens=24, ignore_eos=True, stop=stop)
    out = llm.generate(prompt, stopping).outputs[0]
    assert out.text == full.text[: min(ends)] and out.finish_reason == "stop"
    assert out.token_ids == full.token_ids[: len(out.token_ids)]
    streamed = "".join(s.outputs[0].text_diff for s in llm.generate_stream(prompt, stopping))
    assert streamed == out.text


@pytest.mark.slow
def test_bad_words_do_not_come_out(llm: LLM) -> None:
    """Words of one token and of several, at the beginning and after a space."""
    prompt = "1 2 3 1 2 3 4 5 6 7 8 9 1 2 3"
    free = llm.generate(prompt, SamplingParams(max_tokens=16, ignore_eos=True)).outputs[0].text
    words = [free.split()[0], " ".join(free.split()[2:4])]
    params = SamplingParams(max_tokens=16, ignore_eos=True, bad_words=words)
    text = llm.generate(prompt, params).outputs[0].text
    assert all(word in free for word in words) and not any(word in text for word in words)
    ids = llm.inputs.with_token_ids(replace(params, bad_words=["\n", " no", [7]])).bad_words
    assert [llm.tokenizer.decode(i) for i in ids[:3]] == ["\n", "no", " no"] and ids[3] == (7,)
    for words, message in ((["word " * 9], "which is"), (["no"] * 33, "33 words, 66 with")):
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt, SamplingParams(bad_words=words))


def test_bad_text_requests(llm: LLM) -> None:
    with pytest.raises(RequestError, match="empty"):
        llm.generate("")
    with pytest.raises(RequestError, match="chat template"):
        llm.chat([{"content": "no role"}])
    with pytest.raises(RequestError, match=r"^The content has a part .*'image_url'.*EmbedsPrompt"):
        llm.chat([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}])
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hi."}]
    assert llm.apply_chat_template([{"role": "user", "content": parts}]) == llm.apply_chat_template(
        [{"role": "user", "content": "Say hi."}]
    )
    with pytest.raises(RequestError, match="prompt 2 of 2: The prompt is empty"):
        llm.generate(["a", ""])
    with pytest.raises(RequestError, match="max_tokens=0"):
        SamplingParams(max_tokens=0)
    assert llm.generate("ok", SamplingParams(max_tokens=1)).finished


@pytest.mark.slow
def test_a_random_eagle3_head_changes_no_token(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]], tmp_path: Path
) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    from random_models import PRESETS, Model, save

    head = save(tmp_path / "head", Model(PRESETS["smollm2-135m"]).eagle3_head())
    config = EagleDecodingConfig(max_draft_len=3, speculative_model=head)
    llm = LLM(model_dir, config, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=256)
    outputs = llm.generate(prompts[:4], SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    assert _tokens(outputs) == expected[:4]
    assert llm.stats().acceptance_length >= 1
