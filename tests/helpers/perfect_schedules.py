"""Random schedules of drafters that are always right: every draft must be accepted.

Greedy text says nothing of a drafter whose keys, positions or tokens are wrong: its drafts are
rejected, and all is as it was but slower. These drafters are the target's own layer, or know what
it says (`perfect.py`, `perfect_blocks.py`). So a draft that is rejected or missing is an error.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from perfect import add_perfect_mtp, one_layer_target, perfect_eagle3
from perfect_blocks import PERIOD, PerfectBlocks
from tiny_heads import mtp_model_dir

from trtspec import (
    LLM,
    CudaGraphConfig,
    DFlashDecodingConfig,
    DraftTargetDecodingConfig,
    DSparkDecodingConfig,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig
from trtspec.executor.request import Request

K, BLOCK_K, VOCAB = 4, 7, 97
GRAPHS = [
    None,
    CudaGraphConfig(),
    CudaGraphConfig(batch_sizes=(3, 8)),  # nearly every batch is padded
    CudaGraphConfig(batch_sizes=(2, 5)),  # larger batches run eagerly
]
BLOCKS = {  # mode, what the target says, whether the last token's row proposes
    "dflash": ("dflash", "period", False),
    "dflash_anchor": ("dflash", "period", True),
    "dflash2": ("dflash2", "permutation", False),
    "dspark": ("dspark", "permutation", True),
    "pard": ("pard", "period", False),
}
CONFIGS = {"dspark": DSparkDecodingConfig, "pard": DraftTargetDecodingConfig}
CHAINS = ("draft_target", "latent", "eagle3", "eagle3_two_engine", "mtp_eagle", "mtp_vanilla")
NAMES = (*CHAINS, *BLOCKS)


@dataclass(frozen=True)
class Case:
    """A target and its perfect drafter."""

    target: Path
    config: Callable[..., DecodingBaseConfig]
    k: int
    dtype: str = "float32"
    vocab: int = VOCAB
    shortest: int = 1  # prompt
    says: Callable[[list[int], int], list[int]] | None = None  # the text behind a prompt, if known
    ends_with_period: bool = False  # prompts


def make_case(folder: Path, name: str, dtype: str = "float32") -> Case:
    """Makes the models of one of `NAMES`. Those of `BLOCKS` may be bfloat16."""
    if name in BLOCKS:
        mode, kind, anchor = BLOCKS[name]
        perfect = PerfectBlocks(32 if dtype == "float32" else 64)
        if mode == "pard":
            head = perfect.pard(folder / "head")
        else:
            head = perfect.head(folder / "head", kind, mode, BLOCK_K + 1 - anchor, anchor)
        config = CONFIGS.get(mode, DFlashDecodingConfig)
        return Case(
            perfect.target(folder / "target", kind),
            lambda **more: config(max_draft_len=BLOCK_K, speculative_model=head, **more),
            BLOCK_K, dtype, perfect.mask, 1,
            lambda prompt, count: perfect.text(kind, prompt, count), kind == "period",
        )  # fmt: skip
    if name in ("draft_target", "latent"):
        layout = "deepseek" if name == "draft_target" else "deepseek_v3"
        target = mtp_model_dir(folder, layout=layout, num_mtp_layers=K)
        return Case(
            target,
            lambda **more: DraftTargetDecodingConfig(
                max_draft_len=K, speculative_model=target, **more
            ),
            K,
        )
    # Of these the target's window is full only behind so many tokens.
    target, shortest = one_layer_target(folder), 14
    if name.startswith("eagle3"):
        head, is_fused = perfect_eagle3(folder, target), name == "eagle3"
        return Case(
            target,
            lambda **more: EagleDecodingConfig(
                max_draft_len=K, speculative_model=head, eagle3_one_model=is_fused, **more
            ),
            K, shortest=shortest,
        )  # fmt: skip
    add_perfect_mtp(target, K)
    return Case(
        target,
        lambda **more: MTPDecodingConfig(
            num_nextn_predict_layers=K, use_mtp_vanilla=name == "mtp_vanilla", **more
        ),
        K, shortest=shortest,
    )  # fmt: skip


@dataclass
class Schedule:
    """An engine with random options, and requests that come, share beginnings, and are cut off."""

    case: Case
    device: str
    seed: int
    requests: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.max_seq_len = self.rng.choice([48, 64, 96, 200])
        self.rule = self.rng.choice(["strict", "exact_match", "rejection", "block"])
        self.kind = self.rng.choice(["fixed", "fixed", "runtime", "schedule"])

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.rule}, K {self.kind}, {self.max_seq_len} tokens"

    def engine(self) -> LLM:
        rng, rows = self.rng, self.case.k + 1
        page, batch, is_chunked = (
            rng.choice([4, 8, 16, 32]),
            rng.choice([1, 2, 3, 5, 8]),
            rng.random() < 0.5,
        )
        fields: dict[str, Any] = {"acceptance": self.rule}
        if self.kind == "schedule":
            fields["draft_len_schedule"] = {1: 4, 2: 2, 3: 0, 4: 1, 8: 3}
        pool = rng.choice([None, 0, 130])  # 0: what one request needs
        if pool is not None:
            pool = -(-max(pool, self.max_seq_len + 4 * rows + 2 * page) // page) * page
        return LLM(
            self.case.target, self.case.config(**fields), device=self.device,
            dtype=self.case.dtype, max_batch_size=batch, max_seq_len=self.max_seq_len,
            max_num_tokens=batch * rows + (rng.randint(1, 12) if is_chunked else self.max_seq_len),
            enable_chunked_prefill=is_chunked, disable_overlap_scheduler=rng.random() < 0.3,
            prefill_batch_size=rng.choice([1, "auto", batch]),
            kv_cache_config=KvCacheConfig(max_tokens=pool, tokens_per_block=page),
            cuda_graph_config=rng.choice(GRAPHS),
        )  # fmt: skip

    def run(self, num_requests: int) -> None:
        """Runs requests to their ends, or to where they are cancelled."""
        rng, llm = self.rng, self.engine()
        executor, eager = llm.executor, rng.choice([0.05, 0.2, 1.0])
        executor.record_steps = True
        while num_requests or executor.has_work:
            if num_requests and rng.random() < eager:
                num_requests -= 1
                self.requests.append(executor.enqueue(self._prompt(), self._params()))
            if self.kind == "runtime" and rng.random() < 0.3:
                executor.runtime_draft_len = rng.randint(0, self.case.k)
            executor.step()
            if rng.random() < 0.02 and self.requests:
                executor.cancel(rng.choice(self.requests).request_id)
        llm.shutdown()

    def _prompt(self) -> list[int]:
        """Tokens, mostly behind a part of an earlier request's text."""
        rng, case = self.rng, self.case
        ended = [request for request in self.requests if request.is_finished][-6:]
        known = rng.choice(ended).token_ids if ended else []
        tokens = known[: rng.randint(0, len(known))]
        count = rng.choice([0, 1, 5, 30]) if tokens else rng.randint(1, self.max_seq_len - 12)
        tokens += [
            rng.randrange(case.vocab) for _ in range(max(count, case.shortest - len(tokens)))
        ]
        if case.ends_with_period:  # of different tokens, so that a copy from beside it is wrong
            return tokens[: self.max_seq_len - PERIOD - 1] + rng.sample(range(case.vocab), PERIOD)
        return tokens[: self.max_seq_len - 1] or [3]

    def _params(self) -> SamplingParams:
        rng = self.rng
        is_sampled = self.rule in ("rejection", "block") and self.case.dtype == "float32"
        return SamplingParams(
            max_tokens=rng.choice([1, 2, 10, 100, 100, 100]), ignore_eos=True,
            seed=rng.choice([None, 3]), temperature=rng.choice([0, 0.8, 1.2]) if is_sampled else 0,
            top_k=0, top_p=1.0,
        )  # fmt: skip

    def check(self) -> int:
        """Fails unless every draft was there and accepted. Returns how many there were."""
        count = 0
        for request in self.requests:
            assert request.error is None
            for step in request.steps or []:
                count += step.proposed
                assert step.accepted == step.proposed, (str(self), request.request_id, step)
                room = max(0, self.max_seq_len - 1 - step.kv_len)
                if self.kind == "fixed":
                    assert step.proposed == min(self.case.k, room), (str(self), step)
            if self.case.says is not None and request.sampling_params.temperature == 0:
                output = request.output_token_ids
                assert output == self.case.says(request.prompt_token_ids, len(output)), str(self)
        return count
