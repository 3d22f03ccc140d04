"""An FP8 KV cache in the engine: the same text however it is computed, scales, and capacity."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from matrix import Drafters, config_of, cpu_engine, make_drafters, spread
from oracle import random_prompts
from safetensors.torch import load_file, save_file
from tiny import tiny_model_dir
from tiny_gemma import gemma_dir
from tiny_heads import mtp_model_dir
from tiny_kv_scales import COMPRESSED, scaled_dir
from torch import Tensor
from transformers import AutoModelForCausalLM

from trtspec import LLM, CheckpointError, ConfigError, KvCacheConfig, SamplingParams
from trtspec.attention.base import AttentionBackend
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.kv_scales import load_kv_scales
from trtspec.cli.engine import load_llm
from trtspec.cli.options import EngineOptions
from trtspec.distributed.comm import Communicator
from trtspec.distributed.parallel import Parallel
from trtspec.executor.device import kv_cache_dtype
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS
from trtspec.ops.layer import kv_codes, rope
from trtspec.ops.layer.fp8 import FP8
from trtspec.ops.layer.kv_codes import decode, encode

CPU = torch.device("cpu")


def fp8(pool: int | None = None, **fields: Any) -> KvCacheConfig:
    return KvCacheConfig(max_tokens=pool, tokens_per_block=8, dtype="fp8", **fields)


def texts(llm: LLM, prompts: list[list[int]], count: int = 20) -> list[list[int]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=3)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


@pytest.fixture(scope="module")
def plain(target_dir: Path) -> Callable[[int, int], list[list[int]]]:
    """Texts without speculation, of prompts in one piece, one at a time."""
    llm = cpu_engine(target_dir, None, kv_cache_config=fp8(), overlap=False, max_batch_size=1)
    return lambda size, count: texts(llm, random_prompts(5, size), count)


# -- the same text -----------------------------------------------------------------------------
@pytest.mark.slow
@spread(
    mode=["none", "ngram", "eagle3", "eagle3_two_engine", "mtp", "mtp_eagle", "draft_target",
          "dflash", "dspark", "pard"],
    chunk=[None, 24], overlap=[False, True], pool=[None, 112],
)  # fmt: skip
def test_speculation_chunks_and_preemptions_keep_the_text(
    target_dir: Path, drafters: Drafters, plain: Callable[[int, int], list[list[int]]],
    mode: str, chunk: int | None, overlap: bool, pool: int | None,
) -> None:  # fmt: skip
    size, count = (6, 16) if pool is None else (12, 28)
    llm = cpu_engine(
        target_dir, config_of(mode, 3, drafters), chunk=chunk, overlap=overlap,
        kv_cache_config=fp8(pool),
    )  # fmt: skip
    of_target, *of_drafter = llm.executor.kv_cache.groups
    assert of_target.k_cache.dtype == FP8 and llm.dtype == torch.float32
    assert all(group.k_cache.dtype == torch.float32 for group in of_drafter)
    assert texts(llm, random_prompts(5, size), count) == plain(size, count)
    assert (llm.stats().num_preemptions > 0) == (pool is not None)
    llm.executor.kv_cache.check_integrity()


def _floats_in_place_of_codes(monkeypatch: pytest.MonkeyPatch, scales: Tensor) -> None:
    """Makes float caches hold what codes would stand for."""

    def put(cache: Tensor, slots: Tensor, x: Tensor, of_codes: Tensor | None) -> None:
        assert of_codes is None
        kv_codes.put(cache, slots, decode(encode(x, scales), scales, x.dtype), None)

    monkeypatch.setattr(rope, "put", put)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma4_small"])
def test_text_is_that_of_rounded_keys_and_values(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With full and sliding layers, and layers that read another's keys and values."""
    if family == "gemma4_small":
        path = gemma_dir(tmp_path, family, seed=1, layers_weigh=4)
    else:
        path = tiny_model_dir(tmp_path, family)
    prompts = random_prompts(3, 20)
    coded = cpu_engine(path, None, kv_cache_config=fp8())
    expected = texts(coded, prompts)
    floats = cpu_engine(path, None)
    rough = texts(floats, prompts)
    _floats_in_place_of_codes(monkeypatch, torch.ones(1))
    assert texts(cpu_engine(path, None), prompts) == expected != rough


def test_latent_attention(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "deepseek_v3")
    one = cpu_engine(path, None, kv_cache_config=fp8(), max_batch_size=1)
    (group,) = one.executor.kv_cache.groups
    assert group.k_cache.dtype == group.v_cache.dtype == FP8
    assert group.k_cache.data_ptr() == group.v_cache.data_ptr()
    prompts = random_prompts(4, 20)
    drafting = cpu_engine(path, config_of("ngram", 3, Drafters()), kv_cache_config=fp8(), chunk=24)
    assert texts(one, prompts) == texts(drafting, prompts) != texts(cpu_engine(path, None), prompts)


def test_prefixes_are_taken_over(target_dir: Path, drafters: Drafters) -> None:
    """Whole blocks, and one that is shared in part."""
    beginning = random_prompts(1, 30)[0]
    prompts = [[*beginning, 5, 6], [*beginning[:27], 7, 8, 9]]
    options: dict[str, Any] = {"max_batch_size": 1}
    anew = cpu_engine(target_dir, None, kv_cache_config=fp8(enable_block_reuse=False), **options)
    llm = cpu_engine(target_dir, config_of("eagle3", 3, drafters), kv_cache_config=fp8(), **options)
    expected = texts(anew, prompts)
    assert texts(llm, prompts) == expected
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = [llm.generate(prompt, sampling) for prompt in prompts]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    assert all(output.cached_tokens >= 24 for output in outputs)


def test_nan_fails_its_request_alone(target_dir: Path) -> None:
    """In a prompt's first chunk, whose logits nobody reads; and its blocks poison nobody."""
    llm = cpu_engine(target_dir, None, kv_cache_config=fp8(pool=96), chunk=8)
    healthy = [[3 + i for i in range(20)], [40 - i for i in range(20)]]
    expected = texts(llm, healthy)
    llm.executor.target.embed_tokens.weight.data[96] = float("nan")
    outputs = llm.generate(
        [healthy[0], [5, 96, *range(7, 25)], healthy[1]],
        SamplingParams(max_tokens=20, ignore_eos=True),
    )
    assert "NaN" in (outputs[1].error or "")
    for _ in range(3):
        assert texts(llm, healthy) == expected
    (group,) = llm.executor.kv_cache.groups
    assert not group.k_cache[:, 2:].isnan().any() and not group.v_cache[:, 2:].isnan().any()


# -- capacity ----------------------------------------------------------------------------------
def test_twice_the_tokens_of_bfloat16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny_model_dir(tmp_path, max_position_embeddings=4096)
    per_token = 2 * 3 * 2 * 8 * 2  # sides, layers, KV heads, their size, bytes
    monkeypatch.setattr("trtspec.executor.cache_size._free_memory", lambda *_: 800 * per_token)
    blocks, sizes = [], []
    for dtype in ("auto", "fp8"):
        config = KvCacheConfig(tokens_per_block=8, dtype=dtype)
        llm = LLM(path, device="cpu", dtype="bfloat16", max_seq_len=4096, kv_cache_config=config)
        blocks.append(llm.executor.kv_cache.num_blocks - NUM_RESERVED_BLOCKS)
        (group,) = llm.executor.kv_cache.groups
        sizes.append(group.k_cache.nbytes // group.k_cache.shape[1])
        assert llm.dtype == torch.bfloat16
    assert blocks == [100, 200] and sizes[0] == 2 * sizes[1]


# -- scales ------------------------------------------------------------------------------------
K, V = torch.tensor([0.5, 0.02, 3.0]), torch.tensor([0.25, 0.03, 1.5])


@pytest.mark.slow
@pytest.mark.parametrize(("form", "config", "shape"), [
    ("k_scale v_scale", COMPRESSED, (3, 1)),
    ("k_scale v_scale", {**COMPRESSED, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, (3,)),
    ("k_proj.output_scale v_proj.output_scale", COMPRESSED, (3, 1)),
    ("k_scale v_scale", {"quant_method": "fp8", "kv_cache_scheme": "static"}, (3,)),
    ("k_proj.k_scale v_proj.v_scale",
     {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, (3,)),
    ("k_proj.k_scale v_proj.v_scale",
     {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}, (3,)),
])  # fmt: skip
def test_a_checkpoint_that_says_fp8(
    tmp_path: Path, form: str, config: dict[str, Any], shape: tuple[int, ...],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = scaled_dir(tmp_path, form, config, K.view(shape), V.view(shape))
    with caplog.at_level(logging.WARNING):
        llm = cpu_engine(path, None)
    assert "scales" not in caplog.text
    (group,) = llm.executor.kv_cache.groups
    assert group.k_cache.dtype == FP8
    assert torch.equal(group.k_scales, K[:, None].expand(3, 2))
    assert torch.equal(group.v_scales, V[:, None].expand(3, 2))
    prompts = random_prompts(3, 20)
    expected = texts(llm, prompts)
    written = _written_as(llm, monkeypatch)
    assert texts(written, prompts) == expected


def _written_as(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    """An engine of the same checkpoint whose float cache holds what the codes stand for."""
    (group,) = llm.executor.kv_cache.groups
    assert group.k_scales is not None and group.v_scales is not None
    monkeypatch.setattr("trtspec.executor.build.says_fp8", lambda *_: False)
    floats = cpu_engine(llm.model_dir, None)
    (cache,) = floats.executor.kv_cache.groups
    scales = {}
    for (k_slots, v_slots), k, v in zip(
        cache.layer_slots, group.k_scales, group.v_scales, strict=True
    ):
        scales |= {k_slots.data_ptr(): k, v_slots.data_ptr(): v}

    def put(slots: Tensor, index: Tensor, x: Tensor, _: None) -> None:
        by = scales[slots.data_ptr()]
        kv_codes.put(slots, index, decode(encode(x, by), by, x.dtype), None)

    monkeypatch.setattr(rope, "put", put)
    return floats


def test_scales_of_heads(tmp_path: Path) -> None:
    k, v = torch.rand(3, 2, 1) + 0.01, torch.rand(3, 2, 1) + 0.01
    path = scaled_dir(tmp_path, "k_scale v_scale", COMPRESSED, k, v)
    (group,) = cpu_engine(path, None).executor.kv_cache.groups
    assert torch.equal(group.k_scales, k[..., 0]) and torch.equal(group.v_scales, v[..., 0])
    config = load_config(path)

    class Rank(Communicator):
        rank, size = 1, 2

    of_rank = replace(config, parallel=Parallel(cast(Any, Rank)))
    for layer, scales in enumerate(load_kv_scales(of_rank, path)):
        assert torch.equal(scales.k, k[layer, 1]) and torch.equal(scales.v, v[layer, 1])


def test_scales_that_are_not_there_are_1(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tiny_model_dir(tmp_path)
    with caplog.at_level(logging.WARNING):
        llm = cpu_engine(path, None, kv_cache_config=fp8())
    assert [r.message for r in caplog.records if "lacks scales" in r.message] == [
        f"The KV cache is FP8, but {path} lacks scales for it (6 of keys or values of a layer). "
        "Those are 1: numbers beyond ±448 are cut off."
    ]
    (group,) = llm.executor.kv_cache.groups
    assert group.k_scales is not None and (group.k_scales == 1).all()


def test_auto_is_the_models_dtype(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a checkpoint that says nothing, or something that is not read."""
    caplog.set_level(logging.INFO, "trtspec")
    for scheme in (None, {"num_bits": 8, "type": "int"}, "dynamic"):
        config = {**COMPRESSED, "kv_cache_scheme": scheme} if scheme else {}
        path = scaled_dir(tmp_path, "k_scale v_scale", config, K[:0], V[:0])
        caplog.clear()
        assert cpu_engine(path, None).executor.kv_cache.groups[0].k_cache.dtype == torch.float32
        assert ("a KV cache in" in caplog.text) == bool(scheme)


def test_dynamic_scales_are_not_taken_for_1(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Values of some thousands would be cut off at 448: the text is float64's."""
    scheme = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    path = scaled_dir(tmp_path, "k_scale v_scale", {}, K[:0], V[:0])
    tensors = load_file(path / "model.safetensors")
    for layer in range(3):
        for side, by in (("v", 5000.0), ("o", 1 / 5000)):
            tensors[f"model.layers.{layer}.self_attn.{side}_proj.weight"] *= by
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    prompts = random_prompts(3, 20)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()
    expected = []
    for prompt in prompts:
        text = list(prompt)
        for _ in range(20):
            with torch.no_grad():
                text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
        expected.append(text[len(prompt) :])
    raw = json.loads((path / "config.json").read_text())
    raw["quantization_config"] = {**COMPRESSED, "kv_cache_scheme": scheme}
    (path / "config.json").write_text(json.dumps(raw))
    with caplog.at_level(logging.INFO):
        assert texts(cpu_engine(path, None), prompts) == expected
    assert "float of 8 bits with dynamic scales is not supported" in caplog.text


@pytest.mark.parametrize(("k", "said"), [
    (torch.tensor([[0.5], [-1.0], [1.0]]), "a scale must be a positive number"),
    (torch.tensor([[0.5], [torch.inf], [1.0]]), "a scale must be a positive number"),
    (torch.ones(3, 5), r"shape \[5\].*one for each of 2 KV heads.*says nothing of the KV cache"),
    (torch.ones(3, 1).to(FP8), "dtype F8_E4M3"),
])  # fmt: skip
def test_bad_scales_are_named(tmp_path: Path, k: Tensor, said: str) -> None:
    path = scaled_dir(tmp_path, "k_scale v_scale", COMPRESSED, k, torch.ones(3, 1))
    with pytest.raises(CheckpointError, match=said):
        cpu_engine(path, None)


# -- what is refused ---------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["int8", "float8", None, 8])
def test_unknown_dtypes(dtype: Any) -> None:
    with pytest.raises(ConfigError, match=r"KvCacheConfig.dtype=.*use 'auto' or 'fp8'. .*is e4m3"):
        KvCacheConfig(dtype=dtype)


def test_backends_without_fp8(caplog: pytest.LogCaptureFixture) -> None:
    class Other(TorchAttention):
        name = "flashinfer"
        reads_fp8 = False

    given: tuple[torch.dtype, AttentionBackend, torch.device] = torch.bfloat16, Other(), CPU
    with pytest.raises(ConfigError, match=r"dtype='fp8': attn_backend='flashinfer' reads none"):
        kv_cache_dtype("fp8", False, *given)
    assert kv_cache_dtype("auto", False, *given) == torch.bfloat16 and not caplog.records
    assert kv_cache_dtype("auto", True, *given) == torch.bfloat16
    assert "made for a KV cache in FP8, but attn_backend='flashinfer'" in caplog.text


def test_the_option_of_the_command_line(target_dir: Path) -> None:
    options = EngineOptions(
        model=str(target_dir), device="cpu", dtype="float32", kv_cache_dtype="fp8"
    )
    with load_llm(options, lambda _: None, max_seq_len=64) as llm:
        assert llm.executor.kv_cache.groups[0].k_cache.dtype == FP8
