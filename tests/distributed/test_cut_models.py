"""Models cut over ranks: logits equal the whole model's, and each rank reads only its part."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from loading import ON_CPU
from oracle import prompt_tensors
from thread_ranks import ThreadRanks
from tiny import prefill_metadata, tiny_model_dir
from tiny_gemma import gemma_dir
from tiny_gemma_moe import moe_dir
from tiny_gpt_oss import gpt_oss_dir, mxfp4_dir
from tiny_step import MOE as STEP_MOE
from tiny_step import step_dir
from torch import Tensor

from trtspec.checkpoints.tensors import TensorSource
from trtspec.checkpoints.weights import load_decoder
from trtspec.distributed.comm import Communicator
from trtspec.distributed.logits import ShardedLogits, gather_logits
from trtspec.distributed.parallel import ONE_RANK, Cut, Parallel
from trtspec.errors import ConfigError
from trtspec.models.decoder import Decoder


def load(path: Path, parallel: Parallel = ONE_RANK) -> Decoder:
    return load_decoder(path, ON_CPU, parallel)


def logits_of(model: Decoder, prompts: list[Tensor]) -> Tensor:
    meta, positions = prefill_metadata(model.config, [len(prompt) for prompt in prompts])
    return gather_logits(model.compute_logits(model(torch.cat(prompts), positions, meta)))


TWO_KV_HEADS = {"num_global_key_value_heads": 2}
MODELS: dict[str, tuple[Callable[[Path], Path], list[tuple[int, int]]]] = {
    # name: how it is made, (ranks, of which share out experts)
    "llama": (lambda p: tiny_model_dir(p, num_attention_heads=8), [(2, 1), (4, 1)]),
    "biases": (lambda p: tiny_model_dir(p, attention_bias=True, mlp_bias=True), [(2, 1)]),
    "tied": (
        lambda p: tiny_model_dir(p, "qwen3", tie_word_embeddings=True, head_dim=8, vocab_size=101,
                                 intermediate_size=90, num_key_value_heads=3),
        [(3, 1)],
    ),
    "turned_heads": (lambda p: tiny_model_dir(p, "llama", head_dim=16), [(2, 1)]),
    "gemma3": (lambda p: gemma_dir(p, "gemma3_text"), [(2, 1)]),
    "gemma4": (lambda p: gemma_dir(p, "gemma4_text", **TWO_KV_HEADS), [(2, 1)]),
    "gemma4_small": (lambda p: gemma_dir(p, "gemma4_small", **TWO_KV_HEADS), [(2, 1)]),
    "gemma4_moe": (lambda p: moe_dir(p, **TWO_KV_HEADS), [(2, 2)]),
    "deepseek": (lambda p: tiny_model_dir(p, "deepseek_v3"), [(2, 1), (2, 2)]),
    "deepseek_without_q_lora": (
        lambda p: tiny_model_dir(p, "deepseek_v3", q_lora_rank=None, num_attention_heads=4,
                                 num_key_value_heads=4),
        [(4, 2)],
    ),
    "qwen3_moe": (lambda p: tiny_model_dir(p, "qwen3_moe"), [(2, 1), (2, 2)]),
    "phi3": (lambda p: tiny_model_dir(p, "phi3"), [(2, 1), (4, 1)]),
    "mixtral": (lambda p: tiny_model_dir(p, "mixtral"), [(2, 1), (2, 2)]),
    "glm4_moe": (lambda p: tiny_model_dir(p, "glm4_moe"), [(2, 1), (4, 4)]),
    "qwen3_5": (lambda p: tiny_model_dir(p, "qwen3_5_text"), [(2, 1)]),
    "qwen3_next": (
        lambda p: tiny_model_dir(p, "qwen3_next", linear_num_key_heads=4, linear_num_value_heads=8,
                                 num_attention_heads=4),
        [(2, 1), (2, 2), (4, 2)],
    ),
    "step": (lambda p: step_dir(p, **STEP_MOE), [(2, 1), (2, 2)]),
    "gpt_oss": (
        lambda p: gpt_oss_dir(p, num_attention_heads=4, num_local_experts=4),
        [(2, 1), (2, 2), (4, 2)],
    ),
    "mxfp4": (
        lambda p: mxfp4_dir(p, num_attention_heads=4, num_local_experts=4),
        [(2, 1), (2, 2), (4, 2)],
    ),
}  # fmt: skip
CASES = [(name, *ranks) for name, (_, splits) in MODELS.items() for ranks in splits]


@pytest.mark.parametrize(("name", "size", "expert_ranks"), CASES)
def test_logits_equal_one_rank(tmp_path: Path, name: str, size: int, expert_ranks: int) -> None:
    path = MODELS[name][0](tmp_path)
    prompts = prompt_tensors(90)
    with torch.no_grad():
        expected = logits_of(load(path), prompts)

    def of_rank(comm: Communicator) -> Tensor:
        return logits_of(load(path, Parallel(comm, expert_ranks)), prompts)

    results = ThreadRanks(size).run(of_rank)
    assert expected.std() > 0.4  # flat logits would agree whatever the model does
    torch.testing.assert_close(results[0], expected, atol=1e-4, rtol=1e-4)
    assert all(torch.equal(result, results[0]) for result in results)  # bit for bit


def test_each_rank_reads_its_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is large is read once over all ranks: but embedding, norms and router."""
    path = tiny_model_dir(tmp_path, "qwen3_moe")
    read: list[tuple[str, int]] = []
    original = TensorSource.read

    def counted(source: TensorSource, cut: Cut | None = None) -> Tensor:
        tensor = original(source, cut)
        read.append((source.name, tensor.numel()))
        return tensor

    monkeypatch.setattr(TensorSource, "read", counted)
    ThreadRanks(2).run(lambda comm: load(path, Parallel(comm, 2)))
    sizes: dict[str, list[int]] = {}
    for name, size in read:
        sizes.setdefault(name, []).append(size)
    whole_sizes = {name: sum(parts) for name, parts in sizes.items()}
    model = load(path)
    cut = [n for n in whole_sizes if "norm" not in n and "gate.w" not in n and "embed" not in n]
    loaded = sum(whole_sizes[name] for name in cut)
    assert len(cut) > 20
    replicated = [p for n, p in model.named_parameters() if "norm" in n or "gate.w" in n]
    of_model = sum(t.numel() for t in _checkpoint(path).values())
    of_model -= sum(p.numel() for p in replicated) + model.embed_tokens.weight.numel()
    assert loaded == of_model


def _checkpoint(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@pytest.mark.parametrize(
    ("overrides", "size", "expert_ranks", "said"),
    [
        ({}, 4, 1, "num_attention_heads 6. Use one of 1, 2."),
        ({"intermediate_size": 81}, 2, 1, "intermediate_size 81. Use one of 1."),
        ({"num_key_value_heads": 3}, 2, 1, "3 KV heads. Use one of 1."),
    ],
)
def test_what_does_not_divide_is_refused(
    tmp_path: Path, overrides: dict[str, Any], size: int, expert_ranks: int, said: str
) -> None:
    path = tiny_model_dir(tmp_path, **overrides)
    with pytest.raises(ConfigError, match=said):
        ThreadRanks(size).run(lambda comm: load(path, Parallel(comm, expert_ranks)))


def test_experts_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path, "qwen3_moe", num_experts=5)
    said = r"moe_expert_parallel_size=2 of 2 .*layer 0 has 5 experts\. Use one of 1\."
    with pytest.raises(ConfigError, match=said):
        ThreadRanks(2).run(lambda comm: load(path, Parallel(comm, 2)))


# -- best tokens -------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("vocab_size", [97, 9])
def test_the_best_token_is_that_of_all_logits(size: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = torch.randint(-3, 3, (200, vocab_size), generator=generator).float()  # full of ties
    logits[3, 5], logits[4, 0] = float("nan"), float("inf")
    logits[5] = float("-inf")
    logits[6] = float("nan")
    width = -(-vocab_size // size)
    parts = torch.nn.functional.pad(logits, (0, size * width - vocab_size), value=9.0)

    def of_rank(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        part = parts[:, comm.rank * width : (comm.rank + 1) * width]
        sharded = ShardedLogits(part, vocab_size, comm)
        assert sharded.shape == logits.shape
        return *sharded.best(), sharded.gathered()

    without_nan = logits.masked_fill(logits.isnan(), float("-inf"))
    expected = without_nan.argmax(-1)
    is_bad = logits.isnan().any(-1) | without_nan.isneginf().all(-1)
    for tokens, bad, gathered in ThreadRanks(size).run(of_rank):
        sound = [i for i in range(200) if i not in (5, 6)]
        assert torch.equal(tokens[sound].long(), expected[sound])
        assert torch.equal(bad, is_bad)
        torch.testing.assert_close(gathered, logits, equal_nan=True, rtol=0, atol=0)
