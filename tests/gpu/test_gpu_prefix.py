"""The prefix cache on CUDA: blocks are shared and copied between replays, and a hit is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import MODES, Drafters, config_of, make_drafters
from oracle import Oracle
from prefixes import GREEDY, SAMPLED, Seen, Watched, assert_same, converse
from tiny import tiny_model_dir
from tiny_heads import eagle3_dir, mtp_model_dir

from trtspec import LLM, CudaGraphConfig, KvCacheConfig, MTPDecodingConfig, SamplingParams
from trtspec.executor import prefixes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
K = 3


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=K)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"), Oracle(target_dir))


def _engine(
    target: Path, config: Any, *, reuse: bool, pool: int | None = None, **options: Any
) -> LLM:
    return LLM(
        target, config, device="cuda", dtype="float32", max_batch_size=4, max_seq_len=96,
        kv_cache_config=KvCacheConfig(
            max_tokens=pool, tokens_per_block=8, enable_block_reuse=reuse
        ),
        **options,
    )  # fmt: skip


def _texts(seen: Seen) -> Any:
    return seen.outputs, seen.accepted


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("pool", [None, 144])
def test_texts_are_those_without_it(
    target_dir: Path, drafters: Drafters, mode: str, sampled: bool, pool: int | None
) -> None:
    config, params = config_of(mode, K, drafters), SAMPLED if sampled else GREEDY
    plain = converse(_engine(target_dir, config, reuse=False), params)
    cached = converse(_engine(target_dir, config, reuse=True, pool=pool), params)
    assert _texts(cached) == _texts(plain)
    assert cached.cached[1] >= 24


@pytest.mark.parametrize("graphs", [None, CudaGraphConfig()])
@pytest.mark.parametrize("mode", ["eagle3", "mtp", "dflash", "draft_target"])
def test_drafts_are_those_without_it(
    target_dir: Path, drafters: Drafters, mode: str, graphs: CudaGraphConfig | None
) -> None:
    """Without overlap every draft is seen."""
    config = config_of(mode, K, drafters)
    options: dict[str, Any] = {"disable_overlap_scheduler": True, "cuda_graph_config": graphs}
    plain = converse(_engine(target_dir, config, reuse=False, **options), GREEDY)
    assert_same(converse(_engine(target_dir, config, reuse=True, **options), GREEDY), plain)


@pytest.mark.parametrize("window", [5, 11])
def test_windows(tmp_path: Path, window: int) -> None:
    target = tiny_model_dir(
        tmp_path, "qwen2", seed=3, sliding_window=window, use_sliding_window=True,
        layer_types=["full_attention", "sliding_attention", "sliding_attention"],
    )  # fmt: skip
    config = config_of("eagle3", K, Drafters(head=eagle3_dir(tmp_path)))
    plain = converse(_engine(target, config, reuse=False), GREEDY)
    cached = converse(_engine(target, config, reuse=True, pool=112), GREEDY)
    assert _texts(cached) == _texts(plain) and sum(cached.cached) > 60


@pytest.mark.parametrize("mode", ["none", "eagle3", "mtp"])
def test_linear_attention(tmp_path: Path, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt goes on from a copy of what another one's slot held."""
    monkeypatch.setattr(prefixes, "LEAST_APART", 6)
    config: Any = MTPDecodingConfig(num_nextn_predict_layers=K, use_mtp_vanilla=True)
    if mode == "mtp":
        target = mtp_model_dir(
            tmp_path, layout="qwen3_next", family="qwen3_5_text", num_mtp_layers=K
        )
    else:
        target = tiny_model_dir(tmp_path, "qwen3_next", seed=3)
        config = config_of(mode, K, Drafters(head=eagle3_dir(tmp_path)))
    plain = converse(_engine(target, config, reuse=False), GREEDY)
    cached = converse(_engine(target, config, reuse=True), GREEDY)
    assert _texts(cached) == _texts(plain) and sum(cached.cached) > 60


def test_latent_attention(tmp_path: Path) -> None:
    path = mtp_model_dir(tmp_path, layout="deepseek_v3", num_mtp_layers=K)
    config = MTPDecodingConfig(num_nextn_predict_layers=K, use_mtp_vanilla=True)
    plain = converse(_engine(path, config, reuse=False), GREEDY)
    cached = converse(_engine(path, config, reuse=True), GREEDY)
    assert _texts(cached) == _texts(plain) and sum(cached.cached) > 60


def test_completions_share_their_prompt(target_dir: Path, drafters: Drafters) -> None:
    params = SamplingParams(max_tokens=12, n=4, temperature=2.0, seed=1, ignore_eos=True)
    texts = []
    for reuse in (False, True):
        llm = _engine(target_dir, config_of("eagle3", K, drafters), reuse=reuse)
        output = llm.generate(list(range(3, 40)), params)
        texts.append([completion.token_ids for completion in output.outputs])
    assert texts[0] == texts[1]


def test_a_long_prompt_again_reads_one_row(tmp_path: Path) -> None:
    """Passes of fixed shapes read it first; the second time its last token is left."""
    target = tiny_model_dir(tmp_path, max_position_embeddings=8192)
    llm = LLM(target, device="cuda", dtype="float32", max_batch_size=1, max_seq_len=8192)
    prompt, asked = [7 * i % 97 for i in range(8000)], SamplingParams(max_tokens=8, ignore_eos=True)
    first, again = (Watched(llm).run([prompt], asked)[0] for _ in range(2))
    assert (first.cached_tokens, again.cached_tokens) == (0, 7999)
    assert first.output_token_ids == again.output_token_ids
