"""The prefix cache with sliding windows, latent attention, images and positions of three axes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from embeds import embeds_prompt, mrope_positions_of_prompt, vl_model_dir, vl_with_mtp
from gemma_images import image_prompt, whole_dir
from matrix import Drafters, config_of, cpu_engine, spread
from prefixes import GREEDY, SAMPLED, Seen, Watched, assert_same, converse
from tiny import tiny_model_dir
from tiny_gemma import assistant_dir, gemma_dir
from tiny_gemma_assistant import assistant_config
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import LLM, EmbedsPrompt, KvCacheConfig, MTPDecodingConfig
from trtspec.executor.embeds import content_of
from trtspec.executor.request import Request

K = 3


def engine(target: Path, config: Any, reuse: bool, page: int = 4, **options: Any) -> LLM:
    cache = KvCacheConfig(
        max_tokens=options.pop("pool", None), tokens_per_block=page, enable_block_reuse=reuse
    )
    return cpu_engine(target, config, kv_cache_config=cache, **options)


def assert_reuse_changes_nothing(
    target: Path, config: Any, params: Any = GREEDY, run: Any = converse, **options: Any
) -> Seen:
    unbounded = {name: value for name, value in options.items() if name != "pool"}
    plain = run(engine(target, config, False, **unbounded), params)
    cached = run(engine(target, config, True, **options), params)
    assert_same(cached, plain)
    return cached


@pytest.mark.slow
@spread(
    mode=["none", "eagle3", "draft_target", "mtp"],
    **{"window,kinds,chunk,pool": [
        (2, "all", None, None), (5, "mixed", 17, 100), (11, "mixed", None, 100),
        (5, "all", None, 100), (2, "mixed", None, None), (11, "all", 17, None),
    ]},
)  # fmt: skip
def test_windows(
    tmp_path: Path, mode: str, window: int, kinds: str, chunk: int | None, pool: int | None
) -> None:
    layers = ["sliding_attention"] * 3
    if kinds == "mixed":
        layers[0] = "full_attention"
    fields = {"sliding_window": window, "layer_types": layers, "use_sliding_window": True}
    family = "qwen2"
    if mode == "mtp":  # of the checkpoint, without a window
        target = mtp_model_dir(tmp_path, seed=1, num_mtp_layers=K)
    else:
        target = tiny_model_dir(tmp_path, family, seed=3, **fields)
    draft = tiny_model_dir(tmp_path, family, seed=4, **fields)
    drafters = Drafters(draft=draft, head=eagle3_dir(tmp_path))
    options = {"chunk": chunk, "pool": pool, "overlap": False}
    cached = assert_reuse_changes_nothing(target, config_of(mode, K, drafters), **options)
    assert sum(cached.cached) > 60


@pytest.mark.slow
@spread(family=["gemma3_text", "gemma4_small"], sampled=[False, True])
def test_an_assistant_that_reads_the_targets_keys(
    tmp_path: Path, family: str, sampled: bool
) -> None:
    path = gemma_dir(tmp_path, family, seed=5, layers_weigh=4)
    config = assistant_config(assistant_dir(tmp_path, family), K)
    params = SAMPLED if sampled else GREEDY
    cached = assert_reuse_changes_nothing(path, config, params, overlap=False)
    assert sum(cached.cached) > 60


@pytest.mark.slow
@spread(vanilla=[False, True], chunk=[None, 16])
def test_latent_attention(tmp_path: Path, vanilla: bool, chunk: int | None) -> None:
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=K)
    config = MTPDecodingConfig(num_nextn_predict_layers=K, use_mtp_vanilla=vanilla)
    cached = assert_reuse_changes_nothing(path, config, chunk=chunk, overlap=False)
    assert sum(cached.cached) > 60


# -- prompts that are not all text -------------------------------------------------------------
def continued(prompt: EmbedsPrompt, tokens: list[int]) -> EmbedsPrompt:
    """The same prompt with text after it."""
    more, positions = len(tokens), prompt.mrope_positions
    assert prompt.is_embed is not None
    if positions is not None:
        after = torch.arange(more).repeat(3, 1) + positions.max() + 1
        positions = torch.cat([positions, after], dim=1)
    return replace(
        prompt,
        prompt_token_ids=[*prompt.prompt_token_ids, *tokens],
        is_embed=torch.cat([prompt.is_embed, torch.zeros(more, dtype=torch.bool)]),
        mrope_positions=positions,
    )


def look_and_ask(prompt: EmbedsPrompt, other: EmbedsPrompt) -> Any:
    """Asks about an image, again, about another one, and on; all placeholders are the same."""

    def run(llm: LLM, params: Any) -> Seen:
        watched = Watched(llm)
        (first,) = watched.run([prompt], params)
        watched.run([prompt], params)
        watched.run([other], params)
        second = continued(prompt, [*first.output_token_ids, 5, 6, 7])
        (request,) = watched.run([second], params)
        third = continued(second, [*request.output_token_ids, 9])
        watched.run([third, continued(prompt, [8, 8, 8])], params)
        watched.run([list(prompt.prompt_token_ids)], params)  # the placeholders as text
        return watched.seen

    return run


@pytest.mark.slow
@spread(mode=["none", "eagle3", "mtp"], chunk=[None, 17], axes=[True, False], page=[4, 2])
def test_images_and_axes(
    tmp_path: Path, mode: str, chunk: int | None, axes: bool, page: int
) -> None:
    (folder := tmp_path / "vl").mkdir()
    target = vl_model_dir(folder)
    if mode == "mtp":
        target = vl_with_mtp(target, tmp_path, K)
    positions = mrope_positions_of_prompt() if axes else None
    prompt = embeds_prompt(mrope_positions=positions)
    other = replace(prompt, prompt_embeds=prompt.prompt_embeds.clone())
    other.prompt_embeds[4] += 1  # at position 6
    config = config_of(mode, K, Drafters(head=eagle3_dir(tmp_path)))
    run = look_and_ask(prompt, other)
    cached = assert_reuse_changes_nothing(
        target, config, run=run, chunk=chunk, overlap=False, page=page
    )
    length = len(prompt.prompt_token_ids)
    hits = cached.cached
    assert hits[0] == 0 and hits[1] >= length // page * page - page
    assert hits[2] <= 6 and hits[3] >= hits[1] and hits[4] > hits[3]
    assert hits[6] <= 2, "placeholders of text are not an image"


@pytest.mark.slow
@spread(family=["gemma3_text", "gemma4_text"], chunk=[None, 17])
def test_images_read_in_both_directions(tmp_path: Path, family: str, chunk: int | None) -> None:
    """A block that has some of an image depends on all of it; no pass begins inside one."""
    target = whole_dir(tmp_path, family)
    prompt = image_prompt((6, 3))
    other = replace(prompt, prompt_embeds=prompt.prompt_embeds.clone())
    other.prompt_embeds[5] *= -1  # the first image's last row, at position 7
    run = look_and_ask(prompt, other)
    cached = assert_reuse_changes_nothing(target, None, run=run, chunk=chunk, overlap=False, page=4)
    assert cached.cached[0] == 0 and cached.cached[1] > 8
    assert cached.cached[2] <= 2, "the image begins at position 2"
    assert cached.cached[4] > cached.cached[3] >= cached.cached[1]


def test_what_a_block_of_an_image_is_known_by() -> None:
    def contents(prompt: EmbedsPrompt | None, images: Any = ()) -> list[bytes]:
        request: Any = Request(0, [1] * 17, GREEDY, 0, 30, embeds=prompt, images=images)
        return [content_of(request)(start, start + 4) for start in range(0, 24, 4)]

    assert contents(None) == [b""] * 6
    plain = contents(embeds_prompt())
    assert [bool(content) for content in plain] == [True, True, True, True, False, False]
    assert len(set(plain)) == 5
    axes = contents(embeds_prompt(mrope_positions=mrope_positions_of_prompt()))
    assert all(axes[i] != plain[i] for i in range(1, 6)), "output has other positions too"
    changed = embeds_prompt()
    changed.prompt_embeds[5] += 1  # position 7
    assert [a == b for a, b in zip(contents(changed), plain, strict=True)][:3] == [
        True, False, True,
    ]  # fmt: skip
    as_image = contents(embeds_prompt(), ((12, 16),)), contents(None, ())
    assert all(as_image[0][3:4]), "rows that see each other are no text, whatever they hold"
    both_ways = contents(changed, ((2, 8),)), contents(embeds_prompt(), ((2, 8),))
    assert [a == b for a, b in zip(*both_ways, strict=True)][:3] == [False, False, True]
