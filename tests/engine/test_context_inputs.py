"""A pass over prompts in a fixed shape, as a captured graph runs it, here run eagerly on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from matrix import Drafters, config_of, full, make_drafters
from oracle import VOCAB, Oracle, random_prompts
from perfect import one_layer_target, perfect_eagle3
from tiny_heads import mtp_model_dir
from uncaptured import Uncaptured

from trtspec import (
    LLM,
    CudaGraphConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.attention.base import CachedLayer
from trtspec.attention.tiles import tiles_on_device
from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.hf_config import parse_config
from trtspec.config import DecodingBaseConfig
from trtspec.errors import ConfigError
from trtspec.executor import build
from trtspec.executor.cuda_graphs.context_inputs import deal_out, most_worth_capturing
from trtspec.executor.inputs import assemble, build_inputs
from trtspec.executor.request import ContextChunk, ScheduledBatch
from trtspec.layers.linear import Linear
from trtspec.metadata.attention import NUM_RESERVED_BLOCKS, AttentionMetadata
from trtspec.metadata.mode import SpeculativeDecodingMode
from trtspec.models.decoder import Decoder
from trtspec.ops.layer.fp8 import Fp8Weight

triton_backend = pytest.importorskip("trtspec.attention.triton_backend", reason="needs triton")
MODES = {"none": False, "ngram": True, "eagle3": True, "mtp_eagle": False, "draft_target": False}
"""Each with its prompts whole or in chunks."""
DRAFTING = ("eagle3", "draft_target")
"""Those whose pass has all that the passes of the others have."""


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return mtp_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_mtp_layers=1)


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return make_drafters(tmp_path_factory.mktemp("drafters"))


class ContextsInTriton(triton_backend.TritonAttention):
    """Generations, which are no concern of these tests, by torch: the interpreter is slow."""

    def attend(self, q: torch.Tensor, meta: AttentionMetadata, cached: CachedLayer) -> torch.Tensor:
        backend = super() if meta.num_context_tokens or full() else TorchAttention()
        return backend.attend(q, meta, cached)


def _llm(
    target_dir: Path, config: DecodingBaseConfig | None, monkeypatch: pytest.MonkeyPatch,
    **arguments: Any,
) -> LLM:  # fmt: skip
    """With Triton's attention, in its interpreter."""
    backend = ContextsInTriton()
    monkeypatch.setattr(build, "attention_backend", lambda name, device: backend)
    return LLM(
        target_dir, config, device="cpu", dtype="float32",
        kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=8),
        **{"max_batch_size": 3, "max_seq_len": 96, **arguments},
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("mode", MODES if full() else DRAFTING[:1])
def test_padding_changes_no_token(
    target_dir: Path, drafters: Drafters, mode: str, joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of a pass and less, alone and several, beside generations or in one pass with them;
    some fit no shape."""
    chunked = MODES[mode]
    most = 12 + 9 * joins
    arguments = {"enable_chunked_prefill": True, "max_num_tokens": most} if chunked else {}
    config = config_of(mode, 2, drafters)
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    llm = _llm(target_dir, config, monkeypatch, max_seq_len=32, **arguments)
    graphs = Uncaptured(llm.executor, (7, 12) if chunked else (7, 18), joins)
    llm.executor.runner.graphs = graphs  # type: ignore[assignment]
    prompts = [[(7 * i + j * j) % VOCAB for j in range(n)] for i, n in enumerate((9, 4, 2, 5, 19))]
    params = [SamplingParams(max_tokens=2 + i, ignore_eos=True) for i in range(len(prompts))]
    outputs = llm.generate(prompts, params)
    oracle = Oracle(target_dir)
    for prompt, output, wanted in zip(prompts, outputs, params, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, wanted.max_tokens)
    assert graphs.passes >= 2 and (graphs.num_joined > 0) == joins
    cache = llm.executor.kv_cache
    assert cache.num_free_blocks == cache.num_blocks - NUM_RESERVED_BLOCKS


def _latent(folder: Path) -> tuple[Path, DecodingBaseConfig]:
    target = mtp_model_dir(folder, layout="deepseek_v3", num_mtp_layers=1)
    return target, MTPDecodingConfig(num_nextn_predict_layers=2)


def _windows(folder: Path) -> tuple[Path, DecodingBaseConfig]:
    target = one_layer_target(folder)
    head = perfect_eagle3(folder, target)
    return target, EagleDecodingConfig(max_draft_len=2, speculative_model=head)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_latent, _windows])
def test_generations_in_passes_of_other_caches(
    tmp_path: Path, make: Callable[[Path], tuple[Path, DecodingBaseConfig]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Latent attention; KV groups with windows. The kernels read the generations, too."""
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    target, config = make(tmp_path)
    llm = _llm(target, config, monkeypatch, max_seq_len=32)
    graphs = Uncaptured(llm.executor, (7, 18), joins=True)
    llm.executor.runner.graphs = graphs  # type: ignore[assignment]
    prompts = [[(7 * i + j * j) % VOCAB for j in range(n)] for i, n in enumerate((9, 4, 2, 16, 7))]
    params = [SamplingParams(max_tokens=2 + i, ignore_eos=True) for i in range(len(prompts))]
    outputs, oracle = llm.generate(prompts, params), Oracle(target)
    for prompt, output, wanted in zip(prompts, outputs, params, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, wanted.max_tokens)
    assert graphs.num_joined > 0


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", *(DRAFTING if full() else DRAFTING[:1])])
def test_prompts_too_long_for_one_pass_take_several(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin in one step, beside a generation; sampled ones draw what they would alone."""
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    config, most = config_of(mode, 2, drafters), {"max_batch_size": 6, "max_num_tokens": 40}
    prompts = [
        [(7 * i + j * j) % VOCAB for j in range(n)] for i, n in enumerate((3, 8, 4, 5, 9, 2))
    ]
    params = [SamplingParams(6, temperature=i % 2, seed=i, ignore_eos=True) for i in range(6)]
    alone = _llm(target_dir, config, monkeypatch).generate(prompts, params)

    executor = _llm(target_dir, config, monkeypatch, **most).executor
    graphs = Uncaptured(executor, (6, 12))
    executor.runner.graphs = graphs  # type: ignore[assignment]
    requests = [executor.enqueue(prompts[0], params[0])]
    executor.step()
    assert graphs.passes == 1
    requests += [executor.enqueue(*given) for given in zip(prompts[1:], params[1:], strict=True)]
    executor.step()
    assert graphs.passes == 4  # of 8 + 4, 5 and 9 + 2 tokens
    assert all(request.num_computed for request in requests)
    executor.run_until_done()
    for request, output in zip(requests, alone, strict=True):
        assert request.output_token_ids == output.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sa", *(DRAFTING if full() else ())])
def test_a_prompt_longer_than_any_pass_is_cut(
    target_dir: Path, drafters: Drafters, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into passes of one step, beside a generation; of several prompts the rests share passes."""
    monkeypatch.setattr("trtspec.executor.cuda_graphs.context_inputs.TOKENS_PER_CONTEXT", 4)
    executor = _llm(target_dir, config_of(mode, 2, drafters), monkeypatch).executor
    graphs = Uncaptured(executor, (8,))
    executor.runner.graphs = graphs  # type: ignore[assignment]
    prompts = [[(7 * i + j * j) % 5 for j in range(n)] for i, n in enumerate((6, 18, 6))]
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    requests = [executor.enqueue(prompts[0], params)]
    executor.step()
    requests += [executor.enqueue(prompt, params) for prompt in prompts[1:]]
    executor.step()
    assert graphs.passes == 1 + 3  # of 6; 8, 8, and 2 + 6 tokens
    assert [request.num_computed for request in requests[1:]] == [18, 6]
    executor.run_until_done()
    oracle = Oracle(target_dir)
    for request, prompt in zip(requests, prompts, strict=True):
        assert request.output_token_ids == oracle.extend(prompt, 3)


def test_dealing_prompts_out() -> None:
    """In passes of at most 10 tokens."""
    request: Any = None

    def dealt(*lens: int, most_worth: int = 100, most: int = 10) -> list[list[int]]:
        starts = [100 * i for i in range(len(lens))]
        chunks = [
            ContextChunk(request, start, start + count)
            for start, count in zip(starts, lens, strict=True)
        ]

        def shape_for(some: Sequence[ContextChunk]) -> Any:
            return "a shape" if sum(c.end - c.start for c in some) <= most else None

        passes = deal_out(chunks, shape_for, most_worth)
        pieces = [piece for some in passes for piece in some]
        rows = [row for piece in pieces for row in range(piece.start, piece.end)]
        assert rows == ([row for c in chunks for row in range(c.start, c.end)] if passes else [])
        for before, after in pairwise(pieces):  # in order, within their request and after it
            assert after.start in (before.end, 100 * (before.start // 100 + 1))
        return [[c.end - c.start for c in some] for some in passes]

    assert dealt(3, 4, 3) == [[3, 4, 3]]
    assert dealt(3, 4, 4, 10, 1, 9) == [[3, 4], [4], [10], [1, 9]]
    assert dealt(3, 11, 3) == [[3], [10], [1, 3]]  # one is cut
    assert dealt(25) == [[10], [10], [5]]
    assert dealt(3, 8, most=0) == []  # there is no shape
    assert dealt(10, 5, most_worth=14) == [] and dealt(10, 5, most_worth=15) == [[10], [5]]
    assert dealt(10, most_worth=5) == [[10]]  # asked for
    assert len(dealt(*[10] * 8)) == 8 and dealt(*[10] * 9) == []


@pytest.mark.parametrize(
    "spans", [[(0, 9)], [(0, 20), (8, 11)], [(16, 17), (0, 14)], [(0, 32)], [(3, 12), (0, 23)]]
)
def test_a_pass_is_what_the_host_would_send(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, spans: list[tuple[int, int]]
) -> None:
    """Everything a step reads of the real rows. Padding writes nowhere, and ends at a row of its
    own if there is one."""
    executor = _llm(target_dir, None, monkeypatch).executor
    chunks = []
    for i, (start, end) in enumerate(spans):
        request = executor.enqueue(
            [(5 * i + j) % VOCAB for j in range(33 + 3 * i)], SamplingParams(3)
        )
        request.slot = i
        assert executor.kv_cache.reserve(request.request_id, end)
        chunks.append(ContextChunk(request, start, end))
    rows = sum(end - start for start, end in spans)
    batch = ScheduledBatch(chunks, [])
    shape = Uncaptured(executor, (32,)).shapes[0]
    assert shape.holds(chunks)
    shape.fill(chunks)
    cache, device = executor.kv_cache, executor.device
    ours, fixed = build_inputs(batch, cache, 2, device), shape.step_inputs(2, True, False)
    step, padded = (
        assemble(inputs, executor.state, cache, executor.runner.step.shape, draft_len=0)
        for inputs in (ours, fixed)
    )
    count = len(chunks)
    meta, other = step.attn_metadata, padded.attn_metadata
    assert torch.equal(padded.input_ids[:rows], step.input_ids)
    assert torch.equal(other.position_ids[:rows], meta.position_ids)
    assert torch.equal(other.slot_mappings[0][:rows], meta.slot_mappings[0])
    assert (other.slot_mappings[0][rows:] == -1).all()
    assert torch.equal(other.kv_lens[:count], meta.kv_lens)
    width = ours.block_tables[0].shape[1]
    assert torch.equal(fixed.block_tables[0][:count, :width], ours.block_tables[0])
    spec, wide = step.spec_metadata, padded.spec_metadata
    assert torch.equal(wide.gather_ids[:count], spec.gather_ids)
    assert torch.equal(wide.next_prompt_tokens[:count], spec.next_prompt_tokens)
    assert torch.equal(wide.slot_ids[:count], spec.slot_ids)
    assert torch.equal(wide.sampling.positions[:count], spec.sampling.positions)
    assert (wide.gather_ids[count:] == min(rows, 31)).all()
    assert (wide.slot_ids[count:] == executor.config.max_batch_size).all()


@pytest.mark.slow
def test_a_failed_pass_over_prompts_loses_no_step_of_the_others(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when memory runs out: the generations launched before it are computed again."""
    executor = _llm(target_dir, None, monkeypatch).executor
    graphs = Uncaptured(executor, (64,))
    executor.runner.graphs = graphs  # type: ignore[assignment]
    prompts = random_prompts(3)[1:]
    first = executor.enqueue(prompts[0], SamplingParams(max_tokens=8, ignore_eos=True))
    for _ in range(3):
        executor.step()

    def fail(*_: object) -> None:
        raise ConfigError("no memory")

    works, graphs.run_contexts = graphs.run_contexts, fail  # type: ignore[method-assign]
    second = executor.enqueue(prompts[1], SamplingParams(max_tokens=8, ignore_eos=True))
    assert graphs.num_sent_again == 0
    with pytest.raises(ConfigError, match="no memory"):
        executor.step()
    assert graphs.num_sent_again == 1, "nobody knows what the device has"
    graphs.run_contexts = works  # type: ignore[method-assign]
    executor.run_until_done()
    oracle = Oracle(target_dir)
    for request, prompt in ((first, prompts[0]), (second, prompts[1])):
        assert request.output_token_ids == oracle.extend(prompt, 8)


def test_what_a_shape_holds(target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = _llm(target_dir, None, monkeypatch).executor
    shape = Uncaptured(executor, (32,)).shapes[0]
    request = executor.enqueue([1] * 40, SamplingParams(max_tokens=2))

    def chunk(count: int) -> ContextChunk:
        return ContextChunk(request, 0, count)

    assert shape.num_contexts == 2
    assert shape.holds([chunk(32)]) and not shape.holds([chunk(33)])
    assert shape.holds([chunk(16), chunk(16)]) and not shape.holds([chunk(16), chunk(17)])
    assert not shape.holds([chunk(1)] * 3)


@pytest.mark.parametrize(
    ("lens", "rows", "size"),
    [([5, 0, 9], 20, 4), ([1, 1, 1], 3, 8), ([16], 16, 16), ([3, 0], 9, 2)],
)
def test_tiles_on_the_device_are_the_hosts(lens: list[int], rows: int, size: int) -> None:
    expected, start = set(), 0
    for i, count in enumerate(lens):
        for j in range(0, count, size):
            expected.add((i, start + j, min(size, count - j)))
        start += count
    last_rows = torch.tensor(lens).cumsum(0) - 1
    tiles = tiles_on_device(last_rows, rows, size).tolist()
    assert {tuple(tile) for tile in tiles if tile[2]} == expected
    assert all(0 <= i < len(lens) and 0 <= first < rows for i, first, _ in tiles)
    assert sum(tile[2] for tile in tiles) == sum(lens)


@pytest.mark.parametrize("mode", ["EAGLE3_ONE_MODEL", "MTP", "EAGLE3", "USER_PROVIDED"])
def test_where_prompts_have_no_graphs_it_is_said(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    config, cuda = CudaGraphConfig(context_tokens=[64]), torch.device("cuda")
    quiet = build.graph_config(
        CudaGraphConfig(), triton_backend.TritonAttention(), cuda, SpeculativeDecodingMode[mode]
    )
    assert quiet is not None and not caplog.records
    assert bool(quiet.context_sizes(4096, 4096)) == (mode == "EAGLE3_ONE_MODEL")
    kept = build.graph_config(
        config, triton_backend.TritonAttention(), cuda, SpeculativeDecodingMode[mode]
    )
    assert kept is not None
    if mode == "EAGLE3_ONE_MODEL":
        assert kept is config and not caplog.records
        return
    assert kept.context_tokens == ()
    assert f"no effect: mode {mode} with attention in triton" in caplog.text


def test_default_sizes() -> None:
    most = 10_000
    sizes = [8, 64, *range(128, 1024, 128), *range(1024, 2048, 256), 2048, 3072, 4096, 6144, 8192]
    assert CudaGraphConfig().context_sizes(8192, most) == sizes
    assert CudaGraphConfig().context_sizes(20_000, most) == sizes
    assert CudaGraphConfig().context_sizes(8192, 700) == sizes[:7]
    assert CudaGraphConfig().context_sizes(300, most) == [8, 64, 128, 256, 300]
    assert CudaGraphConfig().context_sizes(300, 299) == [8, 64, 128, 256]
    assert CudaGraphConfig().context_sizes(20, most) == [8, 20]
    assert CudaGraphConfig().context_sizes(6, most) == [6]
    assert CudaGraphConfig().context_sizes(20, 40) == [8, 20]
    assert CudaGraphConfig().context_sizes(100, 40) == [8]
    assert CudaGraphConfig().context_sizes(100, 4) == []
    assert CudaGraphConfig(context_tokens=()).context_sizes(300, most) == []
    assert CudaGraphConfig(context_tokens=[400, 16]).context_sizes(300, 1) == [16, 300]


@pytest.mark.parametrize(("layers", "experts", "inner", "dtype", "least", "most"), [
    (2, 1, 14_336, torch.bfloat16, 1024, 1100),  # Llama-3.1-8B's, of which 1,280 rows take longer
    (4, 1, 14_336, torch.bfloat16, 1024, 1100),
    (2, 8, 14_336, torch.bfloat16, 1024, 1100),  # as much for each row
    (2, 1, 1024, torch.bfloat16, 4000, 4300),
    (2, 1, 14_336, torch.float32, 90, 110),
])  # fmt: skip
def test_the_larger_a_layer_the_fewer_rows_are_worth_a_graph(
    layers: int, experts: int, inner: int, dtype: torch.dtype, least: int, most: int
) -> None:
    """However many layers; and of experts only those count that a row goes to."""
    raw = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": inner, "vocab_size": 1000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": layers,
    }  # fmt: skip
    if experts > 1:
        raw |= {
            "model_type": "qwen3_moe", "num_experts": experts, "num_experts_per_tok": 2,
            "moe_intermediate_size": inner // 2, "head_dim": 128, "norm_topk_prob": True,
        }  # fmt: skip
    with torch.device("meta"):
        target = Decoder(parse_config(raw, Path("config.json")), TorchAttention()).to(dtype)
    assert least < most_worth_capturing(target) < most


@pytest.mark.parametrize(("columns", "least", "most"), [(None, 2000, 2100), (128, 1000, 1100)])
def test_quicker_products_make_more_rows_worth_a_graph(
    columns: int | None, least: int, most: int
) -> None:
    """FP8 weights with a scale for each row; with scales of columns activations stay floats."""
    raw = {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14_336, "vocab_size": 1000,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 2,
    }  # fmt: skip
    with torch.device("meta"):
        target = Decoder(parse_config(raw, Path("config.json")), TorchAttention())
        target.to(torch.bfloat16)
        for module in target.layers.modules():
            if isinstance(module, Linear):
                group = columns or module.in_features
                codes = torch.empty(module.out_features, module.in_features).to(torch.float8_e4m3fn)
                scales = torch.empty(module.out_features, module.in_features // group)
                module.hold_fp8(Fp8Weight(codes, scales, group))
    assert least < most_worth_capturing(target) < most


@pytest.mark.parametrize("sizes", [[0], ["8"], 64, [True]])
def test_sizes_are_checked(sizes: object) -> None:
    with pytest.raises(ConfigError, match="context_tokens"):
        CudaGraphConfig(context_tokens=sizes)  # type: ignore[arg-type]
