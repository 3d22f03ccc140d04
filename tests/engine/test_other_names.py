"""Names of other engines: errors say ours, and a dict is a config or a prompt."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest
from tiny import tiny_model_dir

from trtspec import (
    LLM,
    AsyncLLM,
    CudaGraphConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    Eagle3DecodingConfig,
    EagleDecodingConfig,
    GuidedDecodingParams,
    KvCacheConfig,
    NGramDecodingConfig,
    SADecodingConfig,
    SamplingParams,
    SaveHiddenStatesDecodingConfig,
)
from trtspec.config import CONFIG_OF_MODE, DecodingBaseConfig, EngineConfig
from trtspec.config.modes import CONFIG_OF_TYPE, METHODS, resolve_speculative_config
from trtspec.errors import CheckpointError, ConfigError, RequestError
from trtspec.other_names import NOT_HERE, OURS

CALLS = LLM.generate, LLM.chat, LLM.generate_stream, AsyncLLM.generate, AsyncLLM.chat
RECORDS = (
    EngineConfig,
    KvCacheConfig,
    CudaGraphConfig,
    DFlashDecodingConfig,
    SamplingParams,
    GuidedDecodingParams,
    *CONFIG_OF_MODE.values(),
)
IDS = [5, 6, 7, 5, 6, 7, 5, 6]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    return LLM(tiny_model_dir(tmp_path_factory.mktemp("model")), device="cpu")


@pytest.mark.parametrize(
    ("make", "name", "ours"),
    [
        (SamplingParams, "max_new_tokens", "use max_tokens"),
        (SamplingParams, "structured_outputs", "use guided_decoding"),
        (GuidedDecodingParams, "whitespace_pattern", "leave it out: white space"),
        (SamplingParams, "use_beam_search", "leave it out: there is no beam search"),
        (SamplingParams, "allowed_token_ids", "use guided_decoding or logit_bias"),
        (EagleDecodingConfig, "speculative_model_dir", "use speculative_model"),
        (EagleDecodingConfig, "num_speculative_tokens", "use max_draft_len"),
        (EagleDecodingConfig, "target_layer_ids", "use eagle3_layers_to_capture"),
        (DFlashDecodingConfig, "eagle3_layers_to_capture", "use target_layer_ids"),
        (DFlashDecodingConfig, "block_size", "use max_draft_len"),
        (EagleDecodingConfig, "eagle_choices", "leave it out: drafts are a chain"),
        (NGramDecodingConfig, "prompt_lookup_max", "use max_matching_ngram_size"),
        (SADecodingConfig, "suffix_decoding_min_token_prob", "use min_token_prob"),
        (SaveHiddenStatesDecodingConfig, "write_interval", "use tokens_per_file"),
        (KvCacheConfig, "max_attention_window", "leave it out: windows are the model's"),
        (CudaGraphConfig, "max_batch_size", "use batch_sizes"),
        (LLM, "max_model_len", "use max_seq_len"),
        (LLM, "gpu_memory_utilization", "use kv_cache_config=KvCacheConfig"),
        (LLM, "speculative_algorithm", "use speculative_config"),
        (LLM, "enable_lora", "leave it out: there is no LoRA"),
    ],
)
def test_a_field_of_another_engine_names_ours(make: Any, name: str, ours: str) -> None:
    with pytest.raises(TypeError, match=rf"argument '{name}': {ours}.* \(known: "):
        make(**{name: 1, **({"model": "m"} if make is LLM else {})})


@pytest.mark.parametrize(
    ("call", "name", "ours"),
    [
        ("generate", "use_tqdm", "leave it out: there is no progress bar"),
        ("generate", "prompt_token_ids", "use prompts"),
        ("generate", "temperature", r"use sampling_params=SamplingParams\(temperature=…\)"),
        ("chat", "tools", "leave it out: AsyncLLM.chat"),
        ("generate_stream", "lora_request", "leave it out: there is no LoRA"),
    ],
)
def test_an_argument_of_another_engine_names_ours(
    llm: LLM, call: str, name: str, ours: str
) -> None:
    with pytest.raises(TypeError, match=rf"^LLM\.{call}\(\) .*'{name}': {ours}.* \(known: "):
        getattr(llm, call)([IDS], **{name: 1})


def test_an_argument_that_no_engine_has_gets_no_advice(llm: LLM) -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'nothing' \(known: cache_s"):
        llm.generate([IDS], nothing=1)  # type: ignore[call-arg]


def test_an_attribute_of_another_engine_names_ours(llm: LLM) -> None:
    output = llm.generate(IDS, SamplingParams(max_tokens=2))
    for owner, name, ours in (
        (llm, "get_tokenizer", "tokenizer"),
        (output, "num_cached_tokens", "cached_tokens"),
        (output.outputs[0], "stop_reason", "finish_reason"),
    ):
        with pytest.raises(AttributeError, match=rf"no attribute '{name}': use {ours}$"):
            getattr(owner, name)
        assert not hasattr(owner, name) and hasattr(owner, ours)
    assert pickle.loads(pickle.dumps(output)) == copy.deepcopy(output) == output


def test_records_are_made_copied_and_described_as_before() -> None:
    for record in RECORDS:
        names = [field.name for field in dataclasses.fields(record) if field.init]  # type: ignore[arg-type]
        given = inspect.signature(record).parameters.values()
        assert [p.name for p in given if p.name != "_"] == names
    params = SamplingParams(max_tokens=3, stop=["a"])
    assert pickle.loads(pickle.dumps(params)) == copy.deepcopy(params) == params


def test_our_names_exist() -> None:
    taken = {name for call in CALLS for name in inspect.signature(call).parameters}
    taken |= {field.name for record in RECORDS for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    ours = {word.partition("=")[0] for words in OURS.values() for word in words}
    assert ours <= taken | {"decoding_type"}
    assert set(METHODS.values()) <= set(CONFIG_OF_TYPE)
    assert all(NOT_HERE.values())


def test_a_name_of_a_model_hub_is_told_how_to_get_there(tmp_path: Path) -> None:
    name = "some-org/Some-Model-1.5B"
    command = rf"`hf download {name} --local-dir DIR`"
    with pytest.raises(ConfigError, match=command):
        LLM(name)
    with pytest.raises(CheckpointError, match=command):
        LLM(tiny_model_dir(tmp_path), EagleDecodingConfig(speculative_model=name), device="cpu")
    for path in ("some/longer/path", "/some-org/model", "./model", "model"):
        with pytest.raises(ConfigError) as refusal:
            LLM(path)
        assert "hf download" not in str(refusal.value)


# -- dicts ---------------------------------------------------------------------------------------
def test_the_parts_of_an_engine_may_be_dicts(tmp_path: Path) -> None:
    """As they are in TensorRT-LLM's YAML."""
    options = {
        "speculative_config": {"decoding_type": "NGram", "max_draft_len": 3},
        "kv_cache_config": {"enable_block_reuse": False, "free_gpu_memory_fraction": 0.5},
        "cuda_graph_config": {"batch_sizes": [1, 2], "enable_padding": True},
    }
    engine = EngineConfig("m", **options)  # type: ignore[arg-type]
    assert engine.speculative_config == NGramDecodingConfig(max_draft_len=3)
    assert engine.kv_cache == KvCacheConfig(enable_block_reuse=False, free_gpu_memory_fraction=0.5)
    assert engine.cuda_graph_config == CudaGraphConfig(batch_sizes=[1, 2])
    with LLM(tiny_model_dir(tmp_path), device="cpu", **options) as llm:  # type: ignore[arg-type]
        assert llm.max_draft_len == 3
    assert EngineConfig("m", backend="pytorch").backend is None  # of TensorRT-LLM's YAML
    with pytest.raises(ConfigError, match=r"backend='tensorrt': it says how ranks are started\."):
        EngineConfig("m", backend="tensorrt")
    for name in ("kv_cache_config", "cuda_graph_config"):
        with pytest.raises(ConfigError, match=rf"{name} has no field max_batch_siz"):
            EngineConfig("m", **{name: {"max_batch_siz": 1}})
        with pytest.raises(ConfigError, match=rf"{name}=5: give a \w+, a dict of its fields, or"):
            EngineConfig("m", **{name: 5})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4},
            r"NGramDecodingConfig has no field method, .* For method: use decoding_type\. "
            r"For num_speculative_tokens: use max_draft_len\. For prompt_lookup_max: use max_match",
        ),
        ({"method": "suffix"}, "SADecodingConfig has no field method"),
        ({"method": "eagle3", "model": "d"}, "For model: use speculative_model"),
        ({"method": []}, r"decoding_type='\[\]': it must be 'NGram', "),
        ({"max_draft_len": 3}, r"decoding_type=None: it must be 'NGram', .*'Eagle3'"),
        ({"decoding_type": "Medusa"}, "decoding_type='Medusa': it must be"),
        ({"decoding_type": 5}, "decoding_type=5: it must be"),
    ],
)
def test_a_dict_that_is_no_config_says_what_would_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_speculative_config(given)


def test_eagle_s_config_has_tensorrt_llm_s_newer_name() -> None:
    assert Eagle3DecodingConfig is EagleDecodingConfig


def test_a_class_takes_its_own_types_alone() -> None:
    with pytest.raises(ConfigError, match=r"'PARD': it must be 'Eagle', 'Eagle3'\."):
        EagleDecodingConfig.from_dict({"decoding_type": "PARD", "speculative_model": "d"})
    made = DraftTargetDecodingConfig.from_dict({"decoding_type": "PARD", "speculative_model": "d"})
    assert made.parallel_drafting is True  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match="decoding_type=None: it must be"):
        DecodingBaseConfig.from_dict({})


def test_a_prompt_may_be_a_dict(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4)
    want = llm.generate(IDS, params)
    given = {"prompt_token_ids": IDS, "multi_modal_data": None}
    assert llm.generate(given, params).outputs == want.outputs
    assert [o.outputs for o in llm.generate([given, IDS], params)] == 2 * [want.outputs]
    *_, last = llm.generate_stream(given, params)
    assert last.outputs[0].token_ids == want.outputs[0].token_ids
    for wrong, message in (
        ({"prompt": "a", "prompt_token_ids": IDS}, "has prompt, prompt_token_ids: a dict has one"),
        ({"prompt_token_ids": IDS, "multi_modal_data": {}}, "multi_modal_data.*an EmbedsPrompt"),
        ({}, "A prompt has nothing"),
        ({"prompt": ["a", "b"]}, r"'prompt' of a prompt is \['a', 'b'\]: it must be text"),
        ({"prompt": {"prompt": "a"}}, "it must be text"),
        ({"prompt_token_ids": "abc"}, "of a prompt is 'abc': it must be a list of token ids"),
        ({"prompt_token_ids": []}, "The prompt is empty: give at least one token"),
        ({"prompt_token_ids": ["1", "2"]}, r"a list of 2 text\(s\): give one text, or token ids"),
        ({"prompt_token_ids": [[1, 2], [3]]}, r"Prompt token 0 is \[1, 2\], not an int"),
        ({"text": "a"}, "A prompt has text: a dict has one of 'prompt'"),
    ):
        with pytest.raises(RequestError, match=message):
            llm.generate(wrong, params)


def test_an_async_prompt_may_be_a_dict(tmp_path: Path) -> None:
    async def run() -> list[list[int]]:
        async with AsyncLLM(tiny_model_dir(tmp_path), device="cpu") as llm:
            outputs = []
            for prompt in (IDS, {"prompt_token_ids": IDS}):
                async for output in llm.generate(prompt, SamplingParams(max_tokens=4)):
                    last = output
                outputs.append(last.outputs[0].token_ids)
            with pytest.raises(TypeError, match=r"^AsyncLLM\.generate\(\) .*'request_id': leave"):
                llm.generate(IDS, request_id="1")  # type: ignore[call-arg]
            return outputs

    one, other = asyncio.run(run())
    assert one == other
