"""DFlash heads with their oracles: what a block says, written out naively in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from drafting import Case, Script
from oracle import VOCAB
from tiny_dflash import DFLASH2, LAYERS, dflash_dir
from tiny_heads import HEAD_DIM, HEADS, KV_HEADS, MASK_TOKEN, NaiveHead, _rotate
from torch import Tensor

from trtspec import LLM, DFlashDecodingConfig, DSparkDecodingConfig
from trtspec.ops.tokens.walk import Codebooks, PathCandidates, candidate_scores
from trtspec.workers import dflash
from trtspec.workers.protocols import DraftInputs


class NaiveDFlash(NaiveHead):
    """One block after a text, without a cache."""

    def chain(self, text: list[int], hidden: Tensor, proposals: list[int]) -> list[Tensor]:
        known, anchor = len(text) - 1, bool(self.flags.get("sample_from_anchor"))
        masks = len(proposals) - anchor
        ids = torch.tensor([text[-1]] + [MASK_TOKEN] * masks)
        self.known, self.positions = known, torch.arange(known + len(ids))
        self.context = self.norm(self.linear(hidden.double(), "fc"), "hidden_norm")
        if self.flags.get("reads_next"):
            following = self.embedding[text[1:]] * self.flags.get("embedding_scale", 1)
            following = self.norm(following, "context_embedding_norm")
            self.context = self.context + self.linear(following, "context_embedding_fc")
        out = self.embedding[ids] * self.flags.get("embedding_scale", 1)
        for i in range(self.raw["num_hidden_layers"]):
            p = f"layers.{i}."
            x = self.norm(out, f"{p}input_layernorm")
            out = out + self.around(x, partial(self.block_attention, layer=i), f"{p}attention_conv")
            x = self.norm(out, f"{p}post_attention_layernorm")
            out = out + self.around(x, partial(self.mlp, name=f"{p}mlp"), f"{p}mlp_conv")
        out = self.norm(out, "norm")
        logits = self.flags.get("multiplier", 1) * (out @ self.lm_head.T)
        if "cap" in self.flags:
            logits = self.flags["cap"] * torch.tanh(logits / self.flags["cap"])
        if self.flags.get("path") and not self.flags.get("independent"):
            before = [text[-1], *proposals] if anchor else [text[-1], text[-1], *proposals]
            logits = self.path_scores(before[: len(out)], out, logits)
        if self.flags.get("markov"):
            before = [text[-1], *proposals] if anchor else [text[-1], text[-1], *proposals]
            logits = logits + self.biases(before[: len(out)], out)
        return list(logits if anchor else logits[1:])[: len(proposals)]

    def around(self, x: Tensor, part: Callable[[Tensor], Tensor], name: str) -> Tensor:
        """A part of a layer, within DFlash2's convolutions if it has them."""
        path = self.flags.get("path")
        if not path:
            return part(x)
        taps, group = path["conv_kernel_size"], path["conv_group_size"]
        dynamic = self.linear(x, f"{name}.kernel_projection").view(len(x), 2, taps, -1)
        for side in range(2):
            if side == 1:
                x = part(x)
            weights = dynamic[:, side].repeat_interleave(group, -1)
            weights = weights + self.t[f"{name}.base_kernel"][side]
            rows = [
                sum(weights[i, t] * x[i - t] for t in range(taps) if i - t >= 0)
                for i in range(len(x))
            ]
            x = torch.stack(rows)  # type: ignore[arg-type]
        return x

    def path_scores(self, before: list[int], out: Tensor, logits: Tensor) -> Tensor:
        """Of each row's candidates behind the token before; others are at -inf."""
        name = "candidate_selector."
        first, second = (self.t[f"{name}{n}_codebook"] for n in ("predecessor", "successor"))
        scores = torch.full_like(logits, -math.inf)
        for i, token in enumerate(before):
            state = self.linear(out[i], f"{name}hidden_projection")
            order = logits[i].argsort(descending=True)
            for candidate in order[: self.flags["path"]["selector_top_k"]].tolist():
                edge = (first[token] * state * second[candidate]).sum()
                scores[i, candidate] = logits[i, candidate] + edge
        return scores

    def biases(self, before: list[int], out: Tensor) -> Tensor:
        """DSpark's, for the tokens before."""
        found, name = [], "markov_head."
        state = torch.zeros(self.raw["markov_rank"], dtype=torch.float64)
        for token, h in zip(before, out, strict=True):
            e = self.t[f"{name}markov_w1.weight"][token]
            if self.flags["markov"] == "gated":
                e = e * torch.sigmoid(self.linear(torch.cat([h, e]), f"{name}gate_proj"))
            elif self.flags["markov"] == "rnn":
                joint = self.linear(torch.cat([state, e, h]), f"{name}joint_proj")
                gate, candidate, e = joint.view(3, -1)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(candidate)
                e = torch.tanh(e)
            found.append(self.linear(e, f"{name}markov_w2"))
        return torch.stack(found)

    def block_attention(self, x: Tensor, layer: int) -> Tensor:
        name, known = f"layers.{layer}.self_attn", self.known
        source = torch.cat([self.context, x])
        q = self.linear(x, f"{name}.q_proj").view(len(x), -1, HEAD_DIM)
        k, v = (
            self.linear(source, f"{name}.{n}_proj").view(len(source), -1, HEAD_DIM) for n in "kv"
        )
        q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q = _rotate(q, self.positions[known:], self.theta)
        k = _rotate(k, self.positions, self.theta)
        k, v = (y.repeat_interleave(HEADS // KV_HEADS, 1) for y in (k, v))
        v = v * self.flags.get("value_scale", 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(HEAD_DIM)
        seen = torch.ones(len(x), len(source), dtype=torch.bool)
        if not self.flags.get("sees_ahead", [True] * 9)[layer]:
            seen &= self.positions <= self.positions[known:, None]
        window = self.flags.get("windows", [None] * 9)[layer]
        by_row = self.flags.get("by_row") or not self.flags.get("sees_ahead", [True] * 9)[layer]
        if window is not None and not by_row:
            seen &= self.positions >= known - window
        elif window is not None:
            seen &= self.positions > self.positions[known:, None] - window
        weights = scores.masked_fill(~seen, -math.inf).exp()
        total = weights.sum(-1, keepdim=True)
        if self.flags.get("sinks"):
            total = total + self.t[f"{name}.attention_sink_bias"].exp()[:, None, None]
        out = torch.einsum("hqk,khd->qhd", weights / total, v).flatten(1)
        return self.linear(out, f"{name}.o_proj")


WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6,
    "use_sliding_window": True, "max_window_layers": 0,
}  # fmt: skip
THREE_WINDOWS = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
DFLASH_CASES = [
    "dflash",
    "dflash_next",
    "dflash_vocab",
    "dflash_causal",
    "dflash_anchor",
    "dflash_windows",
    "dflash_sinks",
    "dflash_sinks_causal",
]  # fmt: skip


DSPARK_CASES = ["dspark", "dspark_next", "dspark_gated", "dspark_rnn", "dspark_sinks"]


DFLASH2_CASES = [
    "dflash2",
    "dflash2_three_taps",
    "dflash2_anchor",
    "dflash2_capped",
    "dflash2_sinks",
]


def _with_sinks(
    options: dict[str, Any], flags: dict[str, Any], window: int, scale: float = 0.612
) -> None:
    """Sinks, scaled values, and a window of `use_swa` that leaves rows seeing both ways."""
    options |= {"sinks": True, "attention_value_scale": scale}
    options |= {"use_swa": True, "swa_window_size": window}
    flags |= {"sinks": True, "value_scale": scale, "by_row": True}
    flags |= {"sees_ahead": [True] * 3, "windows": [window] * 3}


def make_dflash2_case(name: str, target: Path, tmp_path: Path, k: int) -> Case:
    path = dict(DFLASH2)
    options: dict[str, Any] = {"block": k + 1}
    flags: dict[str, Any] = {"theta": 5000.0}
    if name == "dflash2_three_taps":
        path |= {"conv_kernel_size": min(3, k + 1), "conv_group_size": 8, "selector_top_k": 5}
        options |= {"num_layers": 3, "inner": WINDOWS | {"is_causal": False, **THREE_WINDOWS}}
        flags |= {"sees_ahead": [True] * 3, "windows": [6, None, 6]}
    if name == "dflash2_anchor":
        options |= {"sample_from_anchor": True, "block": max(2, k)}
        flags |= {"sample_from_anchor": True}
    if name == "dflash2_capped":
        options |= {"output_multiplier": 0.4, "final_logit_softcapping": 3.0}
        options |= {"input_embedding_scale": 1.7}
        flags |= {"multiplier": 0.4, "cap": 3.0, "embedding_scale": 1.7}
    if name == "dflash2_sinks":
        _with_sinks(options, flags, k + 3)
    head = dflash_dir(tmp_path, path=path, **options)
    config = DFlashDecodingConfig(max_draft_len=k, speculative_model=head)
    naive = NaiveDFlash(head, target, "dflash", path=path, **flags)
    return Case(target, config, naive, capture=LAYERS)


class PathScript(Script):
    """Stands in for the walk: keeps the scores, and goes on from what it proposes."""

    def __init__(self, llm: LLM, case: Case, seed: int):
        super().__init__(llm, case, seed)
        worker = self.executor.worker
        draft = worker.draft

        def scripted(inputs: DraftInputs) -> Tensor:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dflash, "walk_candidates", self._walk)
                return draft(inputs)

        worker.draft = scripted  # type: ignore[method-assign]

    def _walk(self, candidates: PathCandidates, before: Tensor, books: Codebooks) -> Tensor:
        taken = []
        for of_draft in zip(*candidates, strict=True):
            given = PathCandidates(*of_draft)
            scores = candidate_scores(given, before, books)
            nothing = torch.full((len(scores), VOCAB), -math.inf)
            before = self._sample(nothing.scatter(1, given.ids, scores))
            taken.append(before)
        return torch.stack(taken)


def make_dspark_case(name: str, target: Path, tmp_path: Path, k: int) -> Case:
    kind = name.removeprefix("dspark_") if "_" in name else "vanilla"
    options: dict[str, Any] = {"markov": kind, "block": max(2, k)}
    flags: dict[str, Any] = {"theta": 5000.0, "markov": kind, "sample_from_anchor": True}
    if kind == "next":
        options |= {"markov": "vanilla", "reads_next": True}
        flags |= {"markov": "vanilla", "reads_next": True}
    if kind == "sinks":  # as ModelOpt exports them: every layer's window, rows see earlier ones
        options |= {"markov": "vanilla"}
        flags |= {"markov": "vanilla"}
        _with_sinks(options, flags, k + 4)
        options |= {"causal": True, "inner": {"layer_types": ["full_attention"] * 2}}
        flags |= {"sees_ahead": [False] * 2}
    if kind == "gated":
        options |= {"draft_vocab": 40}
    if kind == "rnn":  # the last token's row updates the state, though it proposes nothing
        options |= {"sample_from_anchor": False, "block": k + 1}
        flags |= {"sample_from_anchor": False}
    head = dflash_dir(tmp_path, **options)
    config = DSparkDecodingConfig(max_draft_len=k, speculative_model=head)
    return Case(target, config, NaiveDFlash(head, target, "dflash", **flags), capture=LAYERS)


def make_dflash_case(name: str, target: Path, tmp_path: Path, k: int, block: int = 0) -> Case:
    options: dict[str, Any] = {"block": block or k + 1}
    flags: dict[str, Any] = {"theta": 5000.0}
    if name == "dflash_vocab":
        options |= {"draft_vocab": 40, "bias": True, "num_layers": 3}
    if name == "dflash_next":
        options |= {"reads_next": True, "input_embedding_scale": 1.7}
        flags |= {"reads_next": True, "embedding_scale": 1.7}
    if name == "dflash_own_embedding":
        options |= {"own_embedding": True, "input_embedding_scale": 1.7}
        flags |= {"embedding_scale": 1.7}
    if name == "dflash_causal":
        options |= {"causal": True}
        flags |= {"sees_ahead": [False, False]}
    if name == "dflash_anchor":
        options |= {"sample_from_anchor": True, "block": max(2, options["block"] - 1)}
        flags |= {"sample_from_anchor": True}
    if name == "dflash_windows":  # sliding layers are causal, in z-lab's format
        options |= {"inner": WINDOWS}
        flags |= {"sees_ahead": [False, True], "windows": [6, None]}
    if name == "dflash_windows_ahead":
        options |= {"inner": {**WINDOWS, "sliding_window_non_causal": True}}
        flags |= {"sees_ahead": [True, True], "windows": [6, None]}
    if name == "dflash_sinks":
        _with_sinks(options, flags, options["block"])
        options |= {"bias": True}
    if name == "dflash_sinks_causal":  # layer_types says which layers slide, and so see less
        window = options["block"] + 2
        _with_sinks(options, flags, window, scale=2.5)
        options |= {"inner": WINDOWS}
        flags |= {"sees_ahead": [False, True], "windows": [window, None]}
    head = dflash_dir(tmp_path, **options)
    config = DFlashDecodingConfig(max_draft_len=k, speculative_model=head)
    return Case(target, config, NaiveDFlash(head, target, "dflash", **flags), capture=LAYERS)
