"""Requests and arguments that nobody should send: refused by name, or harmless to all others."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir
from tokenizers import Regex, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast

from trtspec import (
    LLM,
    CudaGraphConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.api.text_stream import TextStream
from trtspec.config import DecodingBaseConfig, EngineConfig
from trtspec.config.modes import resolve_speculative_config
from trtspec.errors import MAX_SHOWN, ConfigError, RequestError, shown
from trtspec.executor.admission import end_ids
from trtspec.executor.build import build_executor
from trtspec.metadata.logits import LogitsState
from trtspec.metadata.sampling import NO_TOP_K, request_sampling_params
from trtspec.train.data import DataError, render_chat
from trtspec.train.new_head import NewHead
from trtspec.train.trainer import TrainConfig

HUGE = 10**5000  # more digits than Python prints
PROMPT = [1, 2, 3, 4, 1, 2, 3]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that spells: a token a character."""
    path = tiny_model_dir(tmp_path_factory.mktemp("model"))
    vocab = {"<unk>": 0} | {chr(31 + i): i for i in range(1, 96)}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Split(Regex(r"[\s\S]"), "isolated")
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llm(model_dir: Path) -> LLM:
    drafts = NGramDecodingConfig(min_matching_ngram_size=1)
    return LLM(model_dir, drafts, device="cpu", dtype="float32", max_batch_size=4, max_seq_len=64)


def greedy(llm: LLM, **params: Any) -> list[int]:
    found = llm.generate(PROMPT, SamplingParams(max_tokens=8, ignore_eos=True, **params))
    return found.outputs[0].token_ids


# -- numbers -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 2**63 - 1, "min_tokens": 2**63 - 1},
        {"max_tokens": 2**63 - 1, "min_tokens": 2**63 - 1, "stop_token_ids": [HUGE]},
        {"temperature": 1e-320, "top_p": 1e-320, "min_p": 1e-320, "seed": 2**63 - 1},
        {"temperature": 1e-40, "top_k": 2**31 - 1, "presence_penalty": 1e-320},
        {"repetition_penalty": 100, "temperature": 1e4, "frequency_penalty": -2},
        {"repetition_penalty": 0.01, "logit_bias": {0: -100, 1: 100}},
    ],
)
def test_the_largest_and_smallest_numbers_stop_nobody(llm: LLM, fields: Mapping[str, Any]) -> None:
    alone = greedy(llm)
    both = [SamplingParams(**{"max_tokens": 8, **fields}), SamplingParams(max_tokens=8)]
    odd, beside = llm.generate([PROMPT, PROMPT], both)
    assert odd.error is None and odd.outputs[0].token_ids
    assert beside.outputs[0].token_ids == alone[: len(beside.outputs[0].token_ids)]


@pytest.mark.parametrize(
    "name",
    [
        "max_tokens", "min_tokens", "top_k", "seed", "n", "logprobs", "temperature", "top_p",
        "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    ],
)  # fmt: skip
def test_numbers_that_python_cannot_print_are_refused_by_name(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        SamplingParams(**{name: HUGE})


@pytest.mark.parametrize("penalty", [1e-320, 1e-40, 0.0099, 101])
def test_penalties_that_float32_cannot_divide_by_are_refused(penalty: float) -> None:
    with pytest.raises(RequestError, match=r"repetition_penalty.*0\.01 … 100"):
        SamplingParams(repetition_penalty=penalty)


def test_token_ids_that_python_cannot_print_are_refused_by_name(llm: LLM) -> None:
    for fields in ({"bad_token_ids": [HUGE]}, {"logit_bias": {HUGE: 1}}, {"bad_words": [[HUGE]]}):
        with pytest.raises(RequestError, match=f"{next(iter(fields))}.*0 … 96"):
            llm.generate([1], SamplingParams(**fields))
    with pytest.raises(RequestError, match="Prompt token 0 is"):
        llm.generate([HUGE])


def test_a_prompt_that_is_too_long_says_what_would_help(llm: LLM, model_dir: Path) -> None:
    with pytest.raises(RequestError, match=r"64 tokens; max_seq_len=64 .* raise max_seq_len"):
        llm.generate([1] * 64)
    with LLM(model_dir, device="cpu", dtype="float32", max_batch_size=1) as longest:
        most = longest.executor.target.config.max_position_embeddings
        with pytest.raises(RequestError, match="Shorten it: the model has no more positions"):
            longest.generate([1] * most)


def test_messages_stay_short() -> None:
    with pytest.raises(RequestError, match="bad_token_ids") as caught:
        SamplingParams(bad_token_ids=[5] * 1000 + [-1])
    assert len(str(caught.value)) < 2 * MAX_SHOWN
    assert shown([1]) == "[1]" and "int" in shown(HUGE)


def test_the_seeds_and_filters_of_foreign_loops_fit_their_tensors() -> None:
    class Request:
        class sampling_config:
            temperature, top_k, random_seed = [1.0], [2**40], [2**64 - 1]

    _, top_k, _, seed = request_sampling_params(Request())
    assert top_k == NO_TOP_K, "more than any vocabulary has keeps all of it"
    assert torch.tensor([seed], dtype=torch.int64) >= 0


# -- lists -------------------------------------------------------------------------------------
class CountOperations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def test_admitting_a_request_takes_as_many_operations_whatever_its_lists_hold() -> None:
    counts = []
    for size in (2, 60):
        state = LogitsState.allocate(1, 97, torch.device("cpu"))
        ids = list(range(size))
        params = SamplingParams(
            bad_token_ids=ids, logit_bias=dict.fromkeys(ids, 1), bad_words=[[i] for i in ids]
        )
        with CountOperations() as operations:
            state.admit(0, params, PROMPT, [], [])
        assert state.bias[0].isinf().sum() == size and (state.words[0, :, -1] >= 0).sum() == size
        counts.append(operations.count)
    assert counts[0] == counts[1]


def test_ids_given_twice_are_kept_once() -> None:
    params = SamplingParams(bad_token_ids=[5, 6] * 10**5, stop_token_ids=[7, 7, 3])
    assert params.bad_token_ids == (5, 6) and params.stop_token_ids == (7, 3)


def test_the_tokens_that_end_a_request_are_put_together_once(llm: LLM) -> None:
    params, model = SamplingParams(stop_token_ids=range(1000)), llm.executor.target.config
    assert end_ids(params, model) is end_ids(params, model)
    assert end_ids(params, model) == {*range(1000), *model.eos_token_ids}
    assert end_ids(SamplingParams(ignore_eos=True), model) == set()


def test_a_stop_text_is_compared_no_further_than_the_text_goes() -> None:
    class Long(str):
        slices = 0

        def __getitem__(self, index: Any) -> str:
            Long.slices += 1
            return super().__getitem__(index)

    class Letters:
        def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
            return "".join(map(chr, ids))

    stream = TextStream(Letters(), (Long("a" * 10**5),))
    stream.extend([ord(letter) for letter in "banana"])
    assert stream.safe_text() == "banan" and Long.slices <= len("banana")


def test_more_stop_texts_than_a_step_could_look_for_are_refused() -> None:
    with pytest.raises(RequestError, match="at most 1024"):
        SamplingParams(stop=[str(i) for i in range(1025)])


# -- kinds -------------------------------------------------------------------------------------
@pytest.mark.parametrize("value", ["no", 0, 1, None, np.int64(1)])
def test_ignore_eos_is_true_or_false(value: Any) -> None:
    with pytest.raises(RequestError, match=r"ignore_eos.*True or False"):
        SamplingParams(ignore_eos=value)


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {3: 1.0, 1: 2.0}}, {"stop": ["a", "b"]}, {"stop": "a"},
        {"stop_token_ids": [1, 2]}, {"bad_words": ["a", [1, 2]]}, {"bad_token_ids": {1, 2}},
    ],
)  # fmt: skip
def test_equal_parameters_have_equal_hashes(fields: dict[str, Any]) -> None:
    one, other = SamplingParams(**fields), SamplingParams(**fields)
    assert one == other and hash(one) == hash(other)
    assert len({one, other, SamplingParams()}) == 2
    assert one.each() == [one] and SamplingParams(n=2, temperature=1, **fields).each()[1].n == 1


def test_parameters_are_equal_where_they_mean_the_same() -> None:
    for a, b in (
        ({"logit_bias": {1: 2, 3: 4}}, {"logit_bias": {3: 4, 1: 2}}),
        ({"stop": "a"}, {"stop": ["a"]}),
    ):
        one, other = SamplingParams(**a), SamplingParams(**b)
        assert one == other and hash(one) == hash(other)


HALF = "\ud800"  # of a surrogate pair: a str, but no text


def test_text_that_is_no_unicode_is_refused(llm: LLM) -> None:
    for fields in ({"bad_words": [HALF]}, {"stop": HALF}, {"stop": ["end", f"a{HALF}"]}):
        with pytest.raises(RequestError, match=f"{next(iter(fields))}.*Unicode"):
            SamplingParams(**fields)
    with pytest.raises(RequestError):
        llm.chat([{"role": "user", "content": HALF}])


# -- conversations -----------------------------------------------------------------------------
@pytest.mark.parametrize(
    "template",
    [
        "{{ 1 / 0 }}", "{{ 2.0 ** 100000 }}", "{{ 'a' * 10 ** 18 }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
    ],
)  # fmt: skip
def test_whatever_a_template_raises_is_the_request_s_error(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, template: str
) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "chat_template", template)
    with pytest.raises(RequestError, match="chat template cannot render"):
        llm.chat([{"role": "user", "content": "hello"}])
    with pytest.raises(DataError, match="chat template cannot render"):
        render_chat(llm.tokenizer, [{"role": "user", "content": "hello"}], False)


def test_a_message_has_text(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    monkeypatch.setattr(llm.tokenizer, "chat_template", "{% for m in messages %}a{% endfor %}")
    asked = {"role": "user", "content": "a"}
    for role in ("user", "system", "tool"):
        with pytest.raises(RequestError, match=f"role '{role}' is None: give text"):
            llm.chat([asked, {"role": role, "content": None}])
        with pytest.raises(RequestError, match=f"role '{role}' is missing: give text"):
            llm.chat([asked, {"role": role}])
        with pytest.raises(RequestError, match=f"role '{role}' is 5: give text"):
            llm.chat([asked, {"role": role, "content": 5}])
    assert llm.chat([asked, {"role": "assistant", "content": None}, asked]).error is None


@pytest.mark.parametrize("request_id", [[1], {}, None, "3", 1.5])
def test_only_an_int_is_a_request_s_id(llm: LLM, request_id: Any) -> None:
    with pytest.raises(RequestError, match=r"request_id=.*an int"):
        llm.abort(request_id)
    assert llm.abort(10**6) is False and llm.abort(np.int64(10**6)) is False


# -- engines -----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 10**9}, "max_batch_size=1000000000: .* 1 … 1048576"),
        ({"max_batch_size": HUGE}, "max_batch_size"),
        ({"max_batch_size": 65, "kv_cache_config": KvCacheConfig(max_tokens=64)}, "64 tokens"),
        ({"kv_cache_config": KvCacheConfig(max_tokens=2**70)}, "max_tokens=.* GiB hold at most"),
        ({"kv_cache_config": KvCacheConfig(max_tokens=HUGE)}, "max_tokens=.* GiB hold at most"),
        ({"kv_cache_config": []}, "KvCacheConfig"),
        ({"enable_chunked_prefill": "no"}, "enable_chunked_prefill='no'"),
        ({"enable_chunked_prefill": None}, "enable_chunked_prefill=None"),
        ({"disable_overlap_scheduler": 0}, "disable_overlap_scheduler=0: .* True, False or None"),
        ({"max_seq_len": HUGE}, "max_seq_len"),
        ({"prefill_batch_size": HUGE}, "prefill_batch_size"),
        ({"device": None}, "device=None"),
        ({"device": ["cpu"]}, "device="),
    ],
)
def test_an_engine_that_cannot_be_is_refused_at_once(
    model_dir: Path, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(model_dir, **{"device": "cpu", **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_named_as_it_was_given(model_dir: Path, device: str) -> None:
    with pytest.raises(ConfigError, match=f"device='{device}', but torch sees no CUDA device"):
        LLM(model_dir, device=device)


def test_an_engine_s_arguments_are_the_fields_of_its_config(model_dir: Path) -> None:
    arguments = list(inspect.signature(LLM).parameters.values())
    assert arguments == list(inspect.signature(EngineConfig).parameters.values())
    by_place = [a.name for a in arguments if a.kind is a.POSITIONAL_OR_KEYWORD]
    assert by_place == ["model", "speculative_config", "device", "dtype"]
    with pytest.raises(
        TypeError,
        match=r"^LLM\.__init__\(\) got an unexpected .* 'max_batch' \(known: .*max_batch_size.*\)",
    ):
        LLM(model_dir, max_batch=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^LLM\.__init__\(\) missing 1 required .* 'model'"):
        LLM()  # type: ignore[call-arg]


def test_an_executor_is_built_from_a_config_or_as_before(model_dir: Path) -> None:
    executor = build_executor(EngineConfig(model_dir, device="cpu", max_batch_size=3))
    with pytest.warns(DeprecationWarning, match=r"build_executor\(EngineConfig"):
        before = build_executor(model_dir, None, device="cpu", max_batch_size=3)
    assert executor.config == before.config and executor.config.max_batch_size == 3


def test_a_pass_has_room_for_no_more_tokens_than_there_can_be(tmp_path: Path) -> None:
    target, head = tiny_model_dir(tmp_path), eagle3_dir(tmp_path)
    drafts = EagleDecodingConfig(speculative_model=head, eagle3_layers_to_capture=[0, 1, 2])
    llm = LLM(target, drafts, device="cpu", max_batch_size=2, max_num_tokens=2**70)
    assert llm.generate(PROMPT, SamplingParams(max_tokens=3)).outputs[0].token_ids


@pytest.mark.parametrize("name", ["is_use_oldest", "is_keep_all", "is_public_pool"])
def test_the_flags_of_look_up_are_true_or_false(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='no'"):
        NGramDecodingConfig(**{name: "no"})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NGramDecodingConfig(max_draft_len=HUGE), "max_draft_len"),
        (lambda: MTPDecodingConfig(relaxed_delta=HUGE), "relaxed_delta"),
        (lambda: KvCacheConfig(free_gpu_memory_fraction=HUGE), "free_gpu_memory_fraction"),
        (lambda: CudaGraphConfig(batch_sizes=[-HUGE]), "batch_sizes"),
        (lambda: NewHead(kind="mtp", num_layers=10**6), r"num_layers=1000000.* 1 … 64"),
        (lambda: TrainConfig(num_steps=10**6), r"num_steps=1000000.* 1 … 64"),
        (lambda: TrainConfig(seed=2**63), r"seed=9223372036854775808"),
        (lambda: NGramDecodingConfig.from_dict(5), r"from_dict\(5\).*a dict"),
        (lambda: NGramDecodingConfig.from_dict({1: 2, "x": 3}), "no field 1, x"),
        (lambda: SADecodingConfig(max_matching_ngram_size=0), r"size=0: .* 1 … 64, or -1 \(32\)"),
        (
            lambda: MTPDecodingConfig(max_draft_len="auto", num_nextn_predict_layers=2),
            "2 drafts be",
        ),
        (
            lambda: MTPDecodingConfig(num_nextn_predict_layers="auto", max_draft_len=2),
            "2 drafts be",
        ),
        *(
            (
                lambda given=given: SaveHiddenStatesDecodingConfig(output_directory="x", **given),
                f"{next(iter(given))}=.*nothing is drafted here",
            )
            for given in (
                {"draft_len_schedule": "auto"},
                {"max_concurrency": 2},
                {"max_verified_drafts": 2},
                {"acceptance": "block"},
            )
        ),
    ],
)
def test_configs_that_cannot_be_are_refused_by_name(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_configs_with_lists_can_be_hashed() -> None:
    layers = {"eagle3_layers_to_capture": [1, 2], "speculative_model": "head"}
    layers["draft_len_schedule"] = {4: 2}
    for make, fields in ((CudaGraphConfig, {"batch_sizes": [1, 2]}), (EagleDecodingConfig, layers)):
        assert hash(make(**fields)) == hash(make(**fields)) and make(**fields) == make(**fields)


@pytest.mark.parametrize("given", ["ngram", DecodingBaseConfig()])
def test_what_is_no_config_of_a_mode_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"is not a decoding config\..* a dict of its fields"):
        resolve_speculative_config(given)


def test_a_config_keeps_no_schedule_of_the_callers() -> None:
    schedule = {4: 2}
    config = NGramDecodingConfig(draft_len_schedule=schedule)
    schedule[4] = 99
    assert config.draft_len_schedule == {4: 2}


def test_what_is_said_of_sampling_params_that_do_not_fit(llm: LLM) -> None:
    three = [SamplingParams()] * 3
    with pytest.raises(RequestError, match=r"^sampling_params: 3 SamplingParams for 2 prompt"):
        llm.generate([[1], [2]], three)
    assert llm.generate([], []) == []
    with pytest.raises(RequestError, match=r"sampling_params: \{'n': 1\} for 1 prompt"):
        llm.generate([1], {"n": 1})  # type: ignore[arg-type]
    for fields in ({"temperature": "1"}, {"top_p": "1"}):
        with pytest.raises(RequestError, match="='1' is not allowed: it must be a number in"):
            SamplingParams(**fields)
