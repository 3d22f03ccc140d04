"""Block heads made to be right: any error in the context, positions, rows or the walk costs drafts.

(`helpers/perfect_blocks.py`.)
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from matrix import covering, cpu_engine
from oracle import Oracle
from perfect_blocks import PERIOD, PerfectBlocks
from torch import Tensor

from trtspec import DFlashDecodingConfig, DSparkDecodingConfig, SamplingParams
from trtspec.models.drafters.dflash import DFlashHead
from trtspec.ops.step.rows import BlockStart
from trtspec.workers.dflash import DFlashWorker

PERFECT = PerfectBlocks()
CONFIGS: dict[str, type[DFlashDecodingConfig]] = {
    "dflash": DFlashDecodingConfig,
    "dflash2": DFlashDecodingConfig,
    "dspark": DSparkDecodingConfig,
}
MADE = [  # mode, target, whether the last token's row proposes
    ("dflash", "period", False),
    ("dflash", "period", True),
    ("dflash2", "period", False),
    ("dflash2", "permutation", False),
    ("dspark", "period", True),
    ("dspark", "permutation", True),
    ("dspark", "permutation", False),
]


def _engine(tmp_path: Path, made: tuple[str, str, bool], k: int, **options: Any) -> Any:
    mode, kind, anchor = made
    head = PERFECT.head(tmp_path / "head", kind, mode, max(2, k + 1 - anchor), anchor)
    config = CONFIGS[mode](max_draft_len=k, speculative_model=head)
    target = PERFECT.target(tmp_path / "target", kind)
    return cpu_engine(target, config, max_batch_size=3, max_seq_len=160, **options)


@pytest.mark.slow
@covering(made=MADE, k=[1, 3, PERIOD], overlap=[False, True], chunk=[None, 36], pool=[None, 280])
def test_a_perfect_head_is_always_accepted(
    tmp_path: Path, made: tuple[str, str, bool], k: int, overlap: bool, chunk: int | None,
    pool: int | None,
) -> None:  # fmt: skip
    llm = _engine(tmp_path, made, k, overlap=overlap, chunk=chunk, pool=pool)
    rng, oracle = random.Random(0), Oracle(tmp_path / "target")
    # The tokens of a period differ, so that a copy from beside the right place is wrong.
    mask = PERFECT.mask
    prompts = [
        [rng.randrange(mask) for _ in range(rng.randint(1, 50))] + rng.sample(range(mask), PERIOD)
        for _ in range(5)
    ]
    count = 1 + 6 * (k + 1)
    outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == oracle.extend(prompt, count)
        assert len(set(output.outputs[0].token_ids[:PERIOD])) >= min(count, PERIOD)
        assert output.spec_stats.acceptance_length == k + 1
        assert output.spec_stats.acceptance_per_position == [1.0] * k
        assert output.spec_stats.num_steps == 6


@pytest.mark.parametrize("made", [made for made in MADE if made[1] == "period"])
def test_a_context_that_is_one_position_away_is_noticed(
    tmp_path: Path, made: tuple[str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = DFlashHead.read_context

    def misplaced(self: DFlashHead, hidden: Tensor, positions: Tensor, meta: Any) -> None:
        real(self, hidden, positions + 1, meta)

    monkeypatch.setattr(DFlashHead, "read_context", misplaced)
    llm = _engine(tmp_path, made, 3)
    prompt = random.Random(1).sample(range(PERFECT.mask), 3 * PERIOD)
    output = llm.generate(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.spec_stats.acceptance_length == 1


@pytest.mark.parametrize("made", [made for made in MADE if made[1] == "permutation"])
def test_a_walk_that_begins_elsewhere_is_noticed(
    tmp_path: Path, made: tuple[str, str, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "drafts_of_path" if made[0] == "dflash2" else "drafts_in_turn"
    real = getattr(DFlashWorker, name)

    def behind_another(self: Any, inputs: Any, meta: Any, rows: BlockStart, *rest: Any) -> Tensor:
        return real(self, inputs, meta, rows._replace(tokens=rows.tokens * 0), *rest)

    monkeypatch.setattr(DFlashWorker, name, behind_another)
    llm = _engine(tmp_path, made, 3)
    output = llm.generate([3, 4, 5], SamplingParams(max_tokens=40, ignore_eos=True))
    assert output.spec_stats.acceptance_length < 1.3
