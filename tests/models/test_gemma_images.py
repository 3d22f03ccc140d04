"""Images that attend in both directions (Gemma 3, the larger Gemma 4), against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gemma_images import COUNT, IMAGE, SIZE, WHOLE, ImageOracle, image_prompt, whole_dir
from matrix import full
from tiny_gemma import F, S, assistant_dir, gemma_dir
from tiny_heads import eagle3_dir

from trtspec import (
    LLM,
    DraftTargetDecodingConfig,
    EagleDecodingConfig,
    EmbedsPrompt,
    KvCacheConfig,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SamplingParams,
)
from trtspec.checkpoints.hf_config import load_config
from trtspec.errors import RequestError


def _llm(path: Path, config: Any = None, **settings: Any) -> LLM:
    settings = {"max_batch_size": 2, "max_seq_len": 64, **settings}
    return LLM(path, config, device="cpu", dtype="float32", **settings)


def _tokens(llm: LLM, *prompts: Any, count: int = COUNT) -> list[list[int]]:
    outputs = llm.generate(list(prompts), SamplingParams(max_tokens=count, ignore_eos=True))
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("family", list(WHOLE))
@pytest.mark.parametrize("lengths", [(6, 3), (7,), (11, 2)])
def test_tokens_equal_transformers(tmp_path: Path, family: str, lengths: tuple[int, ...]) -> None:
    """Images shorter than the layers' window of 7, as long, and longer."""
    path, given, text = whole_dir(tmp_path, family), image_prompt(lengths), [11, 12, 13]
    oracle = ImageOracle(path)
    expected = oracle.extend(given, COUNT)
    causal = oracle.extend(given, COUNT, torch.zeros(len(given.prompt_token_ids)).long())
    assert expected != causal, "the direction does not matter to this prompt"
    head = str(eagle3_dir(tmp_path))
    drafters: tuple[Any, ...] = (
        None,
        NGramDecodingConfig(max_draft_len=3),
        EagleDecodingConfig(
            max_draft_len=3, speculative_model=head, eagle3_layers_to_capture=[0, 1, 2]
        ),
        MTPDecodingConfig(
            num_nextn_predict_layers=3, speculative_model=assistant_dir(tmp_path, family)
        ),
        DraftTargetDecodingConfig(max_draft_len=3, speculative_model=str(path)),
    )
    for config in drafters if full() else drafters[len(lengths) - 1 :: 2]:
        llm = _llm(path, config)
        alone = _tokens(llm, text)
        assert _tokens(llm, given, text) == [expected, *alone], config
    typed = image_prompt(lengths, types=True)
    assert _tokens(llm, typed) == [expected]


@pytest.mark.slow
@pytest.mark.parametrize("family", list(WHOLE))
@pytest.mark.parametrize("size", [12, 13, 15])
def test_no_chunk_cuts_an_image(tmp_path: Path, family: str, size: int) -> None:
    """Beside two texts that are generated meanwhile, and take 4 rows of every pass each."""
    path, given = whole_dir(tmp_path, family), image_prompt((6, 3, 5))
    expected = ImageOracle(path).extend(given, COUNT)
    llm = _llm(
        path,
        NGramDecodingConfig(max_draft_len=3),
        max_num_tokens=size,
        max_batch_size=3,
        enable_chunked_prefill=True,
    )
    seen: list[tuple[int, int]] = []
    chunk = llm.executor.scheduler._chunk

    def watched(request: Any, budget: int) -> Any:
        got = chunk(request, budget)
        if got is not None and request.images:
            seen.append((got.start, got.end))
        return got

    llm.executor.scheduler._chunk = watched  # type: ignore[method-assign]
    long = SamplingParams(max_tokens=40, ignore_eos=True)
    executor = llm.executor
    others = [executor.enqueue([11, 12, 13 + i], long) for i in range(2)]
    for _ in range(3):
        executor.step()
    request = executor.enqueue(given, SamplingParams(max_tokens=COUNT, ignore_eos=True))
    while not request.output_token_ids:
        executor.step()
    assert not any(r.is_finished for r in others), "the images waited for the texts' end"
    while not request.is_finished:
        executor.step()
    assert request.output_token_ids == expected
    assert len(seen) > 2
    assert not any(a < cut < b for a, b in request.images for chunk in seen for cut in chunk)


@pytest.mark.slow
@pytest.mark.parametrize("capacity", [34, 36, 40, 48])
def test_few_blocks_hold_nobody_up(tmp_path: Path, capacity: int) -> None:
    """A prompt that begins with an image arrives while another text is generated: whatever is free
    then, both end."""
    path = whole_dir(tmp_path, "gemma3_text")
    ids = [IMAGE] * 6 + [3 + i for i in range(20)]
    mask = torch.tensor([token == IMAGE for token in ids])
    given = EmbedsPrompt(ids, torch.randn(6, SIZE), mask)
    for free in range(3, 10):
        llm = _llm(
            path, NGramDecodingConfig(max_draft_len=3), max_num_tokens=10,
            enable_chunked_prefill=True,
            kv_cache_config=KvCacheConfig(max_tokens=capacity, tokens_per_block=2),
        )  # fmt: skip
        executor = llm.executor
        text = executor.enqueue([11, 12, 13], SamplingParams(max_tokens=20, ignore_eos=True))
        while not text.is_finished and executor.scheduler.kv_cache.num_free_blocks > free:
            executor.step()
        executor.enqueue(given, SamplingParams(max_tokens=2, ignore_eos=True))
        for _ in range(60):
            executor.step()
        assert not executor.has_work, free


def test_preempted_requests_read_their_images_again(tmp_path: Path) -> None:
    path, given = whole_dir(tmp_path, "gemma3_text"), image_prompt()
    expected = ImageOracle(path).extend(given, 24)
    llm = _llm(
        path, NGramDecodingConfig(max_draft_len=3), max_batch_size=3, max_num_tokens=14,
        enable_chunked_prefill=True,
        kv_cache_config=KvCacheConfig(max_tokens=88, tokens_per_block=4),
    )  # fmt: skip
    assert _tokens(llm, given, given, given, count=24) == [expected] * 3
    assert llm.stats().num_preemptions > 0


def test_sound_is_causal(tmp_path: Path) -> None:
    """Vectors that `mm_token_type_ids` does not call an image."""
    path, given = whole_dir(tmp_path, "gemma4_text"), image_prompt()
    assert given.is_embed is not None
    kinds = given.is_embed.int() * 3
    kinds[:8].clamp_(max=2)  # the first are of a video
    said = EmbedsPrompt(given.prompt_token_ids, given.prompt_embeds, given.is_embed, None, kinds)
    expected = ImageOracle(path).extend(given, COUNT, kinds.long())
    assert _tokens(_llm(path), said) == [expected]
    assert _tokens(_llm(path), given) != [expected]


def test_which_layers_see_images_whole(tmp_path: Path) -> None:
    for family, fields, layers in (
        ("gemma3_text", {}, [True] * 4),
        ("gemma4_text", {}, [True, False, True, False]),
        ("gemma4_text", {"layer_types": [F, S, S, F]}, [False, True, True, False]),
        ("gemma4_text", {"use_bidirectional_attention": None}, [False] * 4),
    ):
        config = load_config(whole_dir(tmp_path, family, **fields))
        assert [config.of_layer(i).images_attend_both_ways for i in range(4)] == layers
        assert config.reads_images_whole == any(layers)
    # The text model that is published alone has seen no images.
    assert not load_config(gemma_dir(tmp_path, "gemma3_text")).reads_images_whole


def test_refusals(tmp_path: Path) -> None:
    given = image_prompt()
    for types in (given.is_embed, torch.zeros(3, dtype=torch.int64), -given.is_embed.int()):  # type: ignore[union-attr]
        with pytest.raises(RequestError, match=r"give an int tensor \[16\]"):
            EmbedsPrompt(given.prompt_token_ids, given.prompt_embeds, given.is_embed, None, types)
    path = whole_dir(tmp_path, "gemma3_text")
    llm = _llm(path, max_num_tokens=5, max_batch_size=1, enable_chunked_prefill=True)
    with pytest.raises(
        RequestError,
        match=r"image of the prompt has 6 tokens.*room for 4. Raise max_num_tokens by 2",
    ):
        _tokens(llm, given)
    vectors = EmbedsPrompt([5, 6], torch.zeros(2, SIZE))
    with pytest.raises(RequestError, match="where the images are"):
        _tokens(llm, vectors)
    said = EmbedsPrompt([5, 6], torch.ones(2, SIZE), mm_token_type_ids=torch.tensor([0, 0]))
    assert len(_tokens(llm, said)[0]) == COUNT
