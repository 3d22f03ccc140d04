"""What small Gemma-4 models have beside the large ones: shared KV and per-layer inputs.

Logits, decoding and assistants are in `test_gemma.py` and `test_gemma_assistant.py`.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU
from oracle import Oracle
from safetensors.torch import load_file, save_file
from tiny import DEFAULTS
from tiny_gemma import GEMMA, assistant_dir, edit_config, gemma_dir

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EmbedsPrompt,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints.hf_config import load_config
from trtspec.checkpoints.weights import load_decoder
from trtspec.errors import CheckpointError, RequestError
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS
from trtspec.models.kv_layout import KVLocation, kv_group_specs, kv_locations

SMALL, SIZE = "gemma4_small", DEFAULTS["hidden_size"]
IMAGE = 91  # the placeholder's id; greedy text below has none
PROMPT = [5, 6, *[IMAGE] * 6, 7, 8, 9, IMAGE, IMAGE, 3]
MASK = torch.tensor([token == IMAGE for token in PROMPT])


# -- shared keys and values ----------------------------------------------------------------------
def test_layers_over_shared_kv_take_no_memory(tmp_path: Path) -> None:
    """Of six layers three keep keys: 0 and 2 with a window (heads of 8), 1 without (of 16)."""
    path = gemma_dir(tmp_path, SMALL)
    config = load_config(path)
    own = [KVLocation(0, 0), KVLocation(1, 0), KVLocation(0, 1)]
    assert tuple(kv_locations(config).values()) == (*own, own[2], own[2], own[1])
    assert [config.kv_layer(i) for i in range(6)] == [0, 1, 2, 2, 2, 1]
    assert [config.of_layer(i).intermediate_size for i in range(6)] == [80] * 3 + [160] * 3
    specs = kv_group_specs(config, torch.float32)
    assert [(s.num_layers, s.head_dim, s.window) for s in specs] == [(2, 8, 7), (1, 16, None)]
    per_token = [spec.bytes_per_token() for spec in specs]
    assert per_token == [2 * 2 * 2 * 8 * 4, 1 * 2 * 2 * 16 * 4]  # layers, K and V, heads, dim, fp32
    llm = LLM(path, device="cpu", dtype="float32", max_seq_len=64)
    caches = [group.k_cache for group in llm.executor.kv_cache.groups]
    assert [cache.shape[0] for cache in caches] == [2, 1]


def test_memory_is_shared_among_the_layers_that_keep_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that fit into a given memory, with and without sharing."""
    monkeypatch.setattr("trtspec.executor.cache_size._free_memory", lambda *_: 400_000)
    held = []
    for shared in (0, 3):
        path = gemma_dir(tmp_path, SMALL, num_kv_shared_layers=shared)
        llm = LLM(path, device="cpu", dtype="float32", max_batch_size=8, max_seq_len=256)
        used = 0
        for group in llm.executor.kv_cache.groups:
            per_block = 2 * group.k_cache[:, 0].nbytes
            used += 2 * group.k_cache.nbytes - NUM_RESERVED_BLOCKS * per_block
        assert 370_000 < used <= 400_000
        held.append(llm.executor.kv_cache.groups[1].k_cache.shape[1] - NUM_RESERVED_BLOCKS)
    assert held[1] == 2 * held[0]


def test_a_draft_model_reads_its_own_places(tmp_path: Path) -> None:
    """Its KV groups come after the target's, and so do those of its layers over shared KV."""
    path = gemma_dir(tmp_path, SMALL, seed=1, layers_weigh=4)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(path))
    llm = LLM(path, config, device="cpu", dtype="float32", max_seq_len=64)
    prompts, oracle = [[11, 12, 13], list(range(20, 40))], Oracle(path)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=17, ignore_eos=True))
    expected = oracle.extend_all(prompts, 17)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    for output in outputs:
        assert output.spec_stats.acceptance_length == 4


def test_what_would_make_unread_keys_is_left_out(tmp_path: Path) -> None:
    """Such checkpoints may hold it for layers that read another's keys; elsewhere it is surplus."""
    path = gemma_dir(tmp_path, SMALL)
    plain = load_decoder(path, ON_CPU)
    tensors = load_file(path / "model.safetensors")
    more = {f"model.layers.4.self_attn.{n}.weight": torch.ones(3) for n in ("k_proj", "v_proj")}
    more["model.layers.5.self_attn.k_norm.weight"] = torch.ones(3)
    save_file(tensors | more, path / "model.safetensors")
    ours = load_decoder(path, ON_CPU)
    for one, two in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, two)
    for name, message in (("2.self_attn.v_norm", "no place for"), ("6.self_attn.k_proj", "6.self")):
        surplus = {f"model.layers.{name}.weight": torch.ones(3)}
        save_file(tensors | surplus, path / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_decoder(path, ON_CPU)
    del tensors["model.layers.4.self_attn.q_proj.weight"]
    save_file(tensors, path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 of .*layers\.4\.self_attn\.q_proj"):
        load_decoder(path, ON_CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_kv_shared_layers": 6}, "num_kv_shared_layers=6 of 6 layers"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers=5 .*each of their types must be"),
        ({"num_kv_shared_layers": -1}, "num_kv_shared_layers=-1"),
        ({"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input=-8; it must be"),
        ({"hidden_size_per_layer_input": 2**40}, "it must be an int in 0 … 65535"),
        ({"vocab_size_per_layer_input": 96}, "vocab_size_per_layer_input=96.*vocab_size=97"),
        ({"pad_token_id": None}, "pad_token_id=None; with hidden_size_per_layer_input"),
    ],
)
def test_refusals(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = edit_config(gemma_dir(tmp_path, SMALL), **change)
    with pytest.raises(CheckpointError, match=message):
        load_config(path)


def test_shapes_name_their_fields(tmp_path: Path) -> None:
    path = edit_config(gemma_dir(tmp_path, SMALL), hidden_size_per_layer_input=12)
    with pytest.raises(CheckpointError, match="Check vocab_size, hidden_size_per_layer_input"):
        load_decoder(path, ON_CPU)


# -- the whole model -----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def whole_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of text and images as transformers writes it, without its encoders."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    root = tmp_path_factory.mktemp("whole")
    text = gemma_dir(root, SMALL, seed=1, layers_weigh=4)
    fields = {**DEFAULTS, "tie_word_embeddings": True, **GEMMA[SMALL]}
    config = Gemma4Config(
        text_config=fields, vision_config=None, audio_config=None, image_token_id=IMAGE,
        video_token_id=1000, audio_token_id=1001,
    )  # fmt: skip
    model = Gemma4ForConditionalGeneration(config)
    tensors = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    missing, surplus = model.load_state_dict(tensors, strict=False)
    assert missing == ["lm_head.weight"] and not surplus
    model.tie_weights()
    model.save_pretrained(root / "gemma4")
    return root / "gemma4"


def test_the_text_part_is_the_text_model(whole_dir: Path) -> None:
    raw = json.loads((whole_dir / "config.json").read_text())
    assert raw["model_type"] == "gemma4" and raw["text_config"]["num_kv_shared_layers"] == 3
    assert any("language_model" in name for name in load_file(whole_dir / "model.safetensors"))
    ours, text = (
        load_decoder(path, ON_CPU) for path in (whole_dir, whole_dir.parent / "gemma4_text-0")
    )
    assert ours.config == text.config
    for (name, one), two in zip(ours.named_parameters(), text.parameters(), strict=True):
        assert torch.equal(one, two), name


def _prompt(**changes: Any) -> EmbedsPrompt:
    vectors = torch.randn(int(MASK.sum()), SIZE, generator=torch.Generator().manual_seed(3))
    return EmbedsPrompt(**{
        "prompt_token_ids": PROMPT, "prompt_embeds": 2 * vectors, "is_embed": MASK, **changes
    })  # fmt: skip


def _oracle(whole_dir: Path, vectors: torch.Tensor, count: int) -> tuple[list[int], torch.Tensor]:
    """transformers' greedy output and all its log probabilities, the whole text anew for every
    token."""
    from transformers import Gemma4ForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutputWithPooling

    model = Gemma4ForConditionalGeneration.from_pretrained(
        whole_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    if "mm_encoder_outputs" not in inspect.signature(model.model.forward).parameters:
        pytest.skip("this transformers takes no vectors in place of images")
    image: Any = BaseModelOutputWithPooling()
    image.pooler_output = (vectors,)
    text, rows = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(count):
            logits = model(
                input_ids=torch.tensor([text]), mm_encoder_outputs={"image": image},
                use_cache=False,
            ).logits  # fmt: skip
            rows.append(logits[0, -1].log_softmax(-1))
            text.append(int(rows[-1].argmax()))
    return text[len(PROMPT) :], torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [64, 6])
def test_vectors_are_told_of_as_padding(whole_dir: Path, tmp_path: Path, chunk: int) -> None:
    prompt = _prompt()
    expected, logprobs = _oracle(whole_dir, prompt.prompt_embeds, 12)
    params = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0)
    assistant = assistant_dir(tmp_path, SMALL)
    for config in (
        None,
        NGramDecodingConfig(max_draft_len=3, min_matching_ngram_size=1),
        MTPDecodingConfig(num_nextn_predict_layers=3, speculative_model=assistant),
    ):
        llm = LLM(
            whole_dir, config, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=64,
            max_num_tokens=chunk, enable_chunked_prefill=True,
            kv_cache_config=KvCacheConfig(max_tokens=128, tokens_per_block=4),
        )  # fmt: skip
        output = llm.generate(prompt, params).outputs[0]
        assert output.token_ids == expected and output.logprobs is not None
        for token, entry, row in zip(expected, output.logprobs, logprobs, strict=True):
            assert entry[token].logprob == pytest.approx(float(row[token]), abs=1e-4)
    told = llm.executor.target.per_layer_inputs
    assert told is not None
    told.pad_id = IMAGE  # as if the placeholder itself were told of
    assert llm.generate(prompt, params).outputs[0].token_ids != expected


def test_it_must_be_said_where_vectors_stand(whole_dir: Path) -> None:
    llm = LLM(whole_dir, device="cpu", dtype="float32", max_seq_len=64)
    vectors = torch.zeros(len(PROMPT), SIZE)
    with pytest.raises(RequestError, match=r"is_embed is not given.*leave text to its ids"):
        llm.generate(_prompt(prompt_embeds=vectors, is_embed=None), SamplingParams(max_tokens=2))
