"""Sampled requests with grammars: the distribution is the target's, over the allowed tokens."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from guided import save_tokenizer, token_texts
from matrix import spread
from safetensors.torch import load_file, save_file
from sampled import config_of, engine, make_models
from tiny_dflash import dflash_dir
from torch import Tensor

from trtspec import (
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    GuidedDecodingParams,
    SamplingParams,
)

PROMPT, TEMPERATURE, LETTERS, COUNT = [5, 17, 33, 88, 41], 5.0, "cdegh", 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_models(tmp_path_factory.mktemp("models"))
    save_tokenizer(folder / "target")
    return folder


@pytest.fixture(scope="module")
def letters() -> list[int]:
    return [token_texts().index(letter) for letter in LETTERS]


@pytest.fixture(scope="module")
def joint(folder: Path, letters: list[int]) -> Tensor:
    """Of three letters, by transformers: [5, 5, 5]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32).eval()

    @torch.inference_mode()
    def after(texts: list[list[int]]) -> Tensor:
        logits: Tensor = model(torch.tensor(texts)).logits[:, -1, letters].double()
        return (logits / TEMPERATURE).softmax(-1)

    first = after([PROMPT])[0]
    second = after([[*PROMPT, a] for a in letters])
    third = after([[*PROMPT, a, b] for a, b in itertools.product(letters, repeat=2)])
    return first[:, None, None] * second[:, :, None] * third.view(5, 5, 5)


@pytest.mark.slow
@spread(
    mode=["eagle3", "dflash2", "dflash", "draft_target", "mtp_eagle"],
    rule=["rejection", "block", "exact_match", "strict"],
)
def test_distribution_over_allowed_tokens(
    folder: Path, letters: list[int], joint: Tensor, mode: str, rule: str
) -> None:
    """Chi-square of three letters; a p-value below 1e-4 fails. Seeds are fixed."""
    guided = GuidedDecodingParams(regex=f"[{LETTERS}]{{3}}")
    params = [
        SamplingParams(max_tokens=3, temperature=TEMPERATURE, seed=i, guided_decoding=guided)
        for i in range(COUNT)
    ]
    with engine(folder, config_of(folder, mode, rule), max_batch_size=64) as llm:
        outputs = llm.generate([PROMPT] * COUNT, params)
    counts = torch.zeros(5, 5, 5)
    for output in outputs:
        a, b, c = (letters.index(token) for token in output.outputs[0].token_ids)
        counts[a, b, c] += 1
    expected = joint.flatten() * COUNT
    # Cells with few are joined, so that each expects 5 at least.
    order = expected.argsort()
    group = (expected[order].cumsum(0) / 5).long()
    bins = int(group.max()) + 1
    wanted = torch.zeros(bins, dtype=torch.float64).index_add(0, group, expected[order])
    got = torch.zeros(bins, dtype=torch.float64).index_add(
        0, group, counts.flatten()[order].double()
    )
    used = wanted > 0
    statistic = ((got - wanted)[used] ** 2 / wanted[used]).sum()
    degrees = torch.tensor(float(used.sum()) - 1, dtype=torch.float64)
    p_value = float(torch.special.gammaincc(degrees / 2, statistic / 2))
    assert p_value > 1e-4, (float(statistic), float(degrees))


@pytest.mark.parametrize("count", [3, 16])
def test_a_path_leads_through_the_best_allowed_tokens(
    folder: Path, tmp_path: Path, letters: list[int], count: int
) -> None:
    """Without a product with the token before, its scores are those of a DFlash head's rows."""
    path = dflash_dir(tmp_path / "path", block=4, path={"selector_top_k": count})
    tensors = load_file(path / "model.safetensors")
    (name,) = (name for name in tensors if "successor_codebook" in name)
    tensors[name].zero_()
    save_file(tensors, path / "model.safetensors")
    guided = GuidedDecodingParams(regex=f"[{LETTERS}]{{20}}")
    params = SamplingParams(max_tokens=12, temperature=2.0, seed=3, guided_decoding=guided)
    config = DFlashDecodingConfig(
        speculative_model=path, acceptance="rejection", target_layer_ids=[0, 1, 2]
    )
    compared, differ = 0, False
    with engine(folder, config, disable_overlap_scheduler=True) as llm:
        executor, head = llm.executor, llm.executor.draft_model
        compute, rows = head.compute_logits, list[Tensor]()

        def record(hidden: Tensor, step: int) -> Tensor:
            rows.append(compute(hidden, step))
            return rows[-1]

        head.compute_logits = record
        request = executor.enqueue(PROMPT, params)
        while executor.has_work:
            executor.step()
            memory = executor.worker.draft_memory
            if not request.is_generation or memory is None:
                continue
            expected = torch.full_like(rows[-1], float("-inf"))
            best = rows[-1][:, letters].topk(min(count, len(letters)))
            ids = torch.tensor(letters)[best.indices]
            assert torch.equal(memory.logits[request.slot], expected.scatter(1, ids, best.values))
            drafts = executor.state.next_tokens[request.slot, 1:].to(torch.int64)
            assert all(draft in row for draft, row in zip(drafts, ids, strict=True))
            compared, differ = compared + 1, differ or bool((drafts != ids[:, 0]).any())
    assert compared > 3 and differ


def test_drafts_are_masked(folder: Path) -> None:
    """A drafter that is the target itself, so that every draft fits, but for the grammar.

    Its own choice is hardly ever one of the letters. Masked, its drafts are the target's tokens.
    """
    guided = GuidedDecodingParams(regex=f"[{LETTERS}]{{24}}")
    params = SamplingParams(max_tokens=24, guided_decoding=guided)
    config = DraftTargetDecodingConfig(max_draft_len=3, speculative_model=folder / "target")
    lengths, tokens = [], []
    for count in (None, 1, 0):
        with engine(folder, config, guided_masked_drafts=count) as llm:
            output = llm.generate(PROMPT, params)
        lengths.append(output.spec_stats.acceptance_length)
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1] == tokens[2]
    assert lengths[0] == pytest.approx(4, abs=0.3)
    assert 1.9 < lengths[1] < 3 and lengths[2] < 1.5
