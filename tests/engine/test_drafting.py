"""Drafting with heads: every draft logit equals a from-scratch recomputation, at every step.

The schedules are random: requests arrive while others run, prompts come in chunks, a small cache
preempts, and proposals are scripted so that every number of them is accepted. The network behind
is the real one; its oracle (`tiny_heads.NaiveHead`) sees a request's text and nothing else.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_executor import VOCAB, Oracle
from tiny import tiny_model_dir
from tiny_heads import NaiveHead, eagle1_dir, eagle3_dir, mtp_model_dir, p_eagle_dir
from torch import Tensor

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, MTPDecodingConfig, SamplingParams
from trtspec.config import DecodingBaseConfig
from trtspec.errors import ConfigError

LAYERS = 8  # of the EAGLE-3 target: its default capture is after layers 1, 3 and 4


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model_dir(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=LAYERS)


@dataclass
class Case:
    """A drafter, its target and its oracle."""

    target: Path
    config: DecodingBaseConfig
    naive: NaiveHead
    capture: tuple[int, ...] = ()
    model: Any = field(init=False)
    oracle: Oracle = field(init=False)

    def __post_init__(self) -> None:
        from transformers import AutoModelForCausalLM

        raw_type = self.naive.flags.get("layout")
        path = self.target
        if raw_type == "mimo":  # transformers knows it as the Qwen2 it is
            path = self.naive.flags["as_qwen2"]
        self.oracle = Oracle(path)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, attn_implementation="eager"
        ).eval()
        self.model.config._experts_implementation = "eager"  # the default has no float64
        self.model.lm_head = torch.nn.Identity()

    @torch.inference_mode()
    def hidden(self, text: Sequence[int]) -> Tensor:
        """What the head reads, [n, …] float64, from transformers."""
        states = self.model(torch.tensor([list(text)]), output_hidden_states=True).hidden_states
        if not self.capture:
            return states[-1][0]
        return torch.cat([states[layer + 1][0] for layer in self.capture], dim=-1)


def _eagle3(target: Path, tmp_path: Path, k: int, one_model: bool = True, **flags: Any) -> Case:
    head = eagle3_dir(tmp_path, **flags)
    config = EagleDecodingConfig(
        max_draft_len=k, speculative_model=head, eagle3_one_model=one_model
    )
    return Case(target, config, NaiveHead(head, target, "eagle3", **flags), capture=(1, 3, 4))


def _mtp(tmp_path: Path, k: int, **options: Any) -> Case:
    layout, vanilla = options.pop("layout", "deepseek"), options.pop("vanilla", False)
    pre_norm, fused = options.pop("pre_norm", False), options.pop("fused", True)
    target = mtp_model_dir(tmp_path, layout=layout, num_mtp_layers=k if vanilla else 2, **options)
    flags = {"vanilla": vanilla, "layout": layout, "pre_norm": pre_norm, "first": 3}
    if layout == "glm":  # feeds on the pre-norm hidden state by itself
        flags |= {"pre_norm": True, "rotary_dim": 4}
    if layout == "mimo":
        flags["as_qwen2"] = _as_qwen2(target)
    config = MTPDecodingConfig(
        num_nextn_predict_layers=k, use_mtp_vanilla=vanilla, mtp_eagle_one_model=fused,
        mtp_feeds_post_norm=False if pre_norm else None,
    )  # fmt: skip
    return Case(target, config, NaiveHead(target, target, "mtp", **flags))


def _as_qwen2(mimo: Path) -> Path:
    """The same target without its MTP layers, for transformers."""
    path = mimo.with_name(mimo.name + "-as-qwen2")
    path.mkdir()
    raw = json.loads((mimo / "config.json").read_text())
    raw |= {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
    (path / "config.json").write_text(json.dumps(raw))
    tensors = load_file(mimo / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if "mtp_layers" not in name}
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    return path


def make_case(name: str, target: Path, tmp_path: Path, k: int) -> Case:
    if name == "eagle1":
        head = eagle1_dir(tmp_path)
        config = EagleDecodingConfig(max_draft_len=k, speculative_model=head)
        return Case(target, config, NaiveHead(head, target, "eagle1"))
    makers: dict[str, Any] = {
        "eagle3": lambda: _eagle3(target, tmp_path, k),
        "eagle3_flags": lambda: _eagle3(
            target, tmp_path, k, norm_before_residual=True, norm_output=True, fc_norm=True,
            attention_bias=True, own_embedding=True, draft_vocab=None, prefix="layers.0.",
            pickle=True,
        ),
        "eagle3_before_fc": lambda: _eagle3(
            target, tmp_path, k, norm_before_fc=True, draft_vocab=VOCAB, rope_theta=500.0,
            theta=500.0,
        ),
        "eagle3_two_engine": lambda: _eagle3(target, tmp_path, k, one_model=False),
        "mtp_eagle": lambda: _mtp(tmp_path, k),
        "mtp_eagle_two_engine": lambda: _mtp(tmp_path, k, fused=False, own_ends=True),
        "mtp_eagle_pre_norm": lambda: _mtp(tmp_path, k, pre_norm=True),
        "mimo": lambda: _mtp(tmp_path, k, layout="mimo"),
        "mtp_vanilla": lambda: _mtp(tmp_path, k, vanilla=True),
        "mtp_vanilla_own_ends": lambda: _mtp(tmp_path, k, vanilla=True, own_ends=True),
        "mimo_vanilla": lambda: _mtp(tmp_path, k, vanilla=True, layout="mimo"),
        "glm": lambda: _mtp(tmp_path, k, layout="glm"),
        "glm_vanilla": lambda: _mtp(tmp_path, k, vanilla=True, layout="glm", own_ends=True),
        "qwen3_next": lambda: _mtp(tmp_path, k, layout="qwen3_next"),
        "qwen3_next_vanilla": lambda: _mtp(tmp_path, k, vanilla=True, layout="qwen3_next"),
        "deepseek_v3": lambda: _mtp(tmp_path, k, layout="deepseek_v3", own_ends=True),
        "deepseek_v3_vanilla": lambda: _mtp(
            tmp_path, k, vanilla=True, layout="deepseek_v3", q_lora_rank=None, rms_norm_eps=1e-3
        ),
    }  # fmt: skip
    return makers[name]()


CASES = [
    "eagle3", "eagle3_flags", "eagle3_before_fc", "eagle3_two_engine", "eagle1", "mtp_eagle",
    "mtp_eagle_two_engine", "mtp_eagle_pre_norm", "mimo", "mtp_vanilla", "mtp_vanilla_own_ends",
    "mimo_vanilla", "glm", "glm_vanilla", "qwen3_next", "qwen3_next_vanilla",
    "mimo_vanilla", "deepseek_v3", "deepseek_v3_vanilla",
]  # fmt: skip


class Script:
    """Stands in for the draft sampler: keeps the logits, proposes the target's own continuation
    spoilt from a random place on."""

    def __init__(self, llm: LLM, case: Case, seed: int):
        self.executor, self.case, self.rng = llm.executor, case, random.Random(seed)
        self.requests: dict[int, Any] = {}
        worker = self.executor.worker
        self.verify = worker.verify
        worker.verify = self._verify  # type: ignore[method-assign]
        worker.draft_sampler_greedy = self._sample  # type: ignore[method-assign]

    def _verify(self, *args: Any) -> Any:
        inputs = self.verify(*args)
        ids, k = inputs.spec_metadata.request_ids, self.executor.max_draft_len
        self.logits: dict[int, list[Tensor]] = {i: [] for i in ids}
        self.proposals: dict[int, list[int]] = {}
        for i, tokens, n in zip(
            ids, inputs.accepted_tokens, inputs.num_accepted_tokens, strict=True
        ):
            text = self.requests[i].token_ids + tokens[:n].tolist()
            drafts = self.case.oracle.extend(text, k)
            good = self.rng.randrange(k + 1)
            self.proposals[i] = drafts[:good] + [(t + 1) % VOCAB for t in drafts[good:]]
        return inputs

    def _sample(self, logits: Tensor, d2t: Tensor | None = None) -> Tensor:
        for row, i in zip(logits, self.logits, strict=True):
            self.logits[i].append(row.double())
        step = len(self.logits[i]) - 1
        return torch.tensor([p[step] for p in self.proposals.values()], dtype=torch.int32)


def _run_random_schedule(case: Case, k: int, seed: int, **limits: Any) -> tuple[int, Any]:
    llm = LLM(
        case.target, case.config, device="cpu", dtype="float32", max_batch_size=3,
        disable_overlap_scheduler=True, enable_chunked_prefill=True,
        **{
            "max_seq_len": 64, "max_num_tokens": 3 * (k + 1) + 5,
            "kv_cache_config": KvCacheConfig(max_tokens=88, tokens_per_block=4), **limits,
        },
    )  # fmt: skip
    script, rng = Script(llm, case, seed), random.Random(seed)
    executor = llm.executor
    waiting = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(4)]
    compared = 0
    while waiting or executor.has_work:
        if waiting and rng.random() < 0.4:
            params = SamplingParams(max_tokens=rng.randint(12, 30), ignore_eos=True)
            request = executor.enqueue(waiting.pop(), params)
            script.requests[request.request_id] = request
        script.logits = {}
        executor.step()
        for i, logits in script.logits.items():
            request = script.requests[i]
            if not request.is_generation:  # done, or inside its prompt: nobody reads its drafts
                continue
            text, proposals = request.token_ids, script.proposals[i]
            expected = case.naive.chain(text, case.hidden(text[:-1]), proposals)
            for step, (ours, naive) in enumerate(zip(logits, expected, strict=True)):
                # Past the maximum length there is no position and no proposal.
                if len(text) + step < executor.config.max_seq_len:
                    torch.testing.assert_close(ours, naive, atol=1e-4, rtol=2e-5)
                    compared += 1
            room = executor.config.max_seq_len - len(text)
            left = executor.state.next_tokens[request.slot, 1:].tolist()
            assert left == [p if j < room else -1 for j, p in enumerate(proposals)]
    for request in script.requests.values():
        n = len(request.output_token_ids)
        assert request.output_token_ids == case.oracle.extend(request.prompt_token_ids, n)
    executor.kv_cache.check_integrity()
    assert executor.kv_cache.num_free_blocks == executor.kv_cache.num_blocks - 2
    return compared, executor


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_draft_logits_equal_recomputation(
    target_dir: Path, tmp_path: Path, name: str, k: int
) -> None:
    case = make_case(name, target_dir, tmp_path, k)
    compared, executor = _run_random_schedule(case, k, seed=k)
    assert compared > 30
    assert set(executor.statistics.accepted_lens) == set(range(k + 1)), (
        "every length must have been accepted"
    )


def test_the_schedules_preempt(target_dir: Path, tmp_path: Path) -> None:
    """What the comparison above relies on."""
    case = make_case("eagle3", target_dir, tmp_path, 4)
    _, executor = _run_random_schedule(case, 4, seed=4)
    assert executor.stats().num_preemptions > 0


@pytest.mark.parametrize("name", ["eagle3", "mtp_eagle", "mtp_vanilla", "eagle1"])
def test_draft_logits_up_to_the_maximum_length(target_dir: Path, tmp_path: Path, name: str) -> None:
    """K = 8, and every request ends at the maximum: drafts run past it."""
    case = make_case(name, target_dir, tmp_path, 8)
    compared, _ = _run_random_schedule(case, 8, seed=3, max_seq_len=36)
    assert compared > 30


@pytest.mark.parametrize("name", ["eagle3", "eagle3_two_engine", "mtp_vanilla", "mtp_eagle"])
def test_drafting_can_be_turned_down_and_up(target_dir: Path, tmp_path: Path, name: str) -> None:
    """The head's KV stays whole while nothing is drafted, so drafting resumes at full strength."""
    k = 3
    case = make_case(name, target_dir, tmp_path, k)
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=96)
    script, executor = Script(llm, case, seed=0), llm.executor
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [executor.enqueue([5, 6, 7 + i], params) for i in range(2)]
    script.requests = {request.request_id: request for request in requests}
    rng, lens = random.Random(0), set()
    while executor.has_work:
        executor.runtime_draft_len = wanted = rng.choice([0, 1, 2, 3])
        lens.add(wanted)
        executor.step()
        for request in [r for r in requests if r.is_generation]:
            text, proposals = request.token_ids, script.proposals[request.request_id]
            left = executor.state.next_tokens[request.slot, 1:].tolist()
            assert left == proposals[:wanted] + [-1] * (k - wanted)
            logits = script.logits[request.request_id]
            expected = case.naive.chain(text, case.hidden(text[:-1]), proposals[: len(logits)])
            for ours, naive in zip(logits, expected, strict=True):
                torch.testing.assert_close(ours, naive, atol=1e-4, rtol=2e-5)
    assert lens == {0, 1, 2, 3}
    for request in requests:
        assert request.output_token_ids == case.oracle.extend(request.prompt_token_ids, 40)


def test_runtime_draft_len_is_checked(target_dir: Path, tmp_path: Path) -> None:
    case = make_case("eagle3", target_dir, tmp_path, 3)
    executor = LLM(target_dir, case.config, device="cpu", max_seq_len=64).executor
    for bad in (-1, 4, True, 1.0):
        with pytest.raises(ConfigError, match="runtime_draft_len"):
            executor.runtime_draft_len = bad  # type: ignore[assignment]


def test_a_crowded_step_drafts_nothing(target_dir: Path, tmp_path: Path) -> None:
    head = eagle3_dir(tmp_path)
    config = EagleDecodingConfig(max_draft_len=3, speculative_model=head, max_concurrency=2)
    llm = LLM(target_dir, config, device="cpu", dtype="float32", max_seq_len=64)
    executor = llm.executor
    for i, count in enumerate((8, 30, 30)):
        executor.enqueue([3, 4 + i], SamplingParams(max_tokens=count, ignore_eos=True))
    seen = set()
    while executor.has_work:
        crowd = len(executor.scheduler.waiting) + len(executor.scheduler.running)
        executor.step()
        for request in executor.scheduler.running:
            drafted = int((executor.state.next_tokens[request.slot, 1:] >= 0).sum())
            seen.add((crowd, drafted))
    assert seen == {(3, 0), (2, 3), (1, 3)} or seen == {(3, 0), (2, 3)}


# -- perfect heads -----------------------------------------------------------------------------
WINDOW = 6


def _one_layer_target(tmp_path: Path) -> Path:
    """A Mistral of one layer that sees the last 6 tokens; embedding rows of unit RMS."""
    path = tiny_model_dir(
        tmp_path, "mistral", seed=3, num_hidden_layers=1, sliding_window=WINDOW, head_dim=8
    )
    tensors = load_file(path / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding /= embedding.pow(2).mean(-1, keepdim=True).sqrt()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _add_perfect_mtp(path: Path, count: int) -> None:
    """MTP layers that ignore the hidden state and are the target's one layer: at the row of the
    token before, RoPE and the window see the same tokens at the same distances."""
    tensors = load_file(path / "model.safetensors")
    size = tensors["model.norm.weight"].shape[0]
    for i in range(1, count + 1):
        prefix = f"model.layers.{i}."
        for name in [n for n in tensors if n.startswith("model.layers.0.")]:
            tensors[name.replace("model.layers.0.", prefix)] = tensors[name].clone()
        ones = torch.ones(size)
        tensors |= {f"{prefix}enorm.weight": ones, f"{prefix}hnorm.weight": ones.clone()}
        tensors[f"{prefix}eh_proj.weight"] = torch.cat(
            [torch.eye(size), torch.zeros(size, size)], 1
        )
        tensors[f"{prefix}shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**raw, "num_nextn_predict_layers": count}))


def _perfect_eagle3(tmp_path: Path, target: Path) -> Path:
    """An EAGLE-3 head that is the target's layer.

    Its residual would be the hidden state, not the embedding: hidden_norm of zero removes that
    one, and extra attention heads bring the embedding in. Those see their own row alone: their
    queries and keys are one constant (a bias), whose rotated product peaks at distance 0.
    """
    t = load_file(target / "model.safetensors")
    size, dim, kv, group = 48, 8, 2, 3
    extra = size // dim  # KV heads that carry the embedding
    p = "model.layers.0."
    q, k, v, o = (t[f"{p}self_attn.{n}_proj.weight"] for n in "qkvo")
    wide = {
        "q": torch.cat([q, torch.zeros(extra * group * dim, size)]),
        "k": torch.cat([k, torch.zeros(extra * dim, size)]),
        # input_layernorm scales the embedding; what is carried must be the embedding itself
        "v": torch.cat([v, torch.diag(1 / t[f"{p}input_layernorm.weight"])]),
    }
    bias = {
        "q": torch.cat([torch.zeros(len(q)), torch.full((extra * group * dim,), 60.0)]),
        "k": torch.cat([torch.zeros(len(k)), torch.full((extra * dim,), 60.0)]),
        "v": torch.zeros(len(v) + size),
    }
    back = torch.zeros(size, extra * group * dim)
    for head in range(extra):  # of the `group` copies of each extra head take the first
        for j in range(dim):
            back[head * dim + j, head * group * dim + j] = 1.0
    tensors = {
        "fc.weight": torch.randn(size, size),
        "midlayer.input_layernorm.weight": t[f"{p}input_layernorm.weight"],
        "midlayer.hidden_norm.weight": torch.zeros(size),
        "midlayer.self_attn.o_proj.weight": torch.cat([o, back], 1),
        "midlayer.post_attention_layernorm.weight": t[f"{p}post_attention_layernorm.weight"],
        "norm.weight": t["model.norm.weight"],
        "lm_head.weight": t["lm_head.weight"],
    }
    for name, weight in wide.items():
        both = torch.cat([weight, torch.zeros_like(weight)], 1)
        tensors[f"midlayer.self_attn.{name}_proj.weight"] = both
        tensors[f"midlayer.self_attn.{name}_proj.bias"] = bias[name]
    for name in ("gate", "up", "down"):
        tensors[f"midlayer.mlp.{name}_proj.weight"] = t[f"{p}mlp.{name}_proj.weight"]
    raw = json.loads((target / "config.json").read_text())
    raw |= {
        "model_type": "mistral", "draft_vocab_size": None, "norm_before_residual": True,
        "num_attention_heads": (kv + extra) * group, "num_key_value_heads": kv + extra,
        "head_dim": dim, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0]},
        "attention_bias": True,
    }  # fmt: skip
    path = tmp_path / "perfect"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw))
    save_file({n: x.contiguous() for n, x in tensors.items()}, path / "model.safetensors")
    return path


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("k", [1, 3, 8])
@pytest.mark.parametrize("mode", ["eagle3", "eagle3_two_engine", "mtp_eagle", "mtp_vanilla"])
def test_a_perfect_head_is_always_accepted(
    tmp_path: Path, mode: str, k: int, overlap: bool
) -> None:
    """Any error in draft KV, positions, rows or shifts costs acceptance."""
    target = _one_layer_target(tmp_path)
    config: DecodingBaseConfig
    if mode.startswith("eagle3"):
        head = _perfect_eagle3(tmp_path, target)
        config = EagleDecodingConfig(
            max_draft_len=k, speculative_model=head, eagle3_one_model=mode == "eagle3"
        )
    else:
        _add_perfect_mtp(target, k)
        config = MTPDecodingConfig(num_nextn_predict_layers=k, use_mtp_vanilla="vanilla" in mode)
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=3, max_seq_len=256,
        max_num_tokens=36, enable_chunked_prefill=True, disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    rng = random.Random(0)
    # Longer than the window and the K tokens that the deepest layer cannot see at the start.
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(16, 50))] for _ in range(5)]
    outputs = llm.generate(prompts, SamplingParams(max_tokens=1 + 6 * (k + 1), ignore_eos=True))
    for output in outputs:
        assert output.spec_stats.acceptance_length == k + 1
        assert output.spec_stats.acceptance_per_position == [1.0] * k
        assert output.spec_stats.num_steps == 6


# -- a loop that is not ours -------------------------------------------------------------------
def test_the_example_of_a_foreign_loop(tmp_path: Path, target_dir: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    from eagle3_in_your_loop import K, generate

    perfect_for = _one_layer_target(tmp_path)
    prompt = [(5 * i) % VOCAB for i in range(20)]
    for target, head in (
        (target_dir, eagle3_dir(tmp_path)),
        (perfect_for, _perfect_eagle3(tmp_path, perfect_for)),
    ):
        tokens, steps = generate(str(target), str(head), prompt, 1 + 4 * (K + 1))
        assert tokens == Oracle(target).extend(prompt, 1 + 4 * (K + 1))
        assert target is target_dir or steps == 5


@pytest.mark.parametrize("overlap", [False, True])
def test_a_head_that_overflows_hurts_nobody_else(tmp_path: Path, overlap: bool) -> None:
    """One token's embedding is broken in the head alone. Blocks that its drafts wrote go to the
    next requests, whose proposals must be what they are without it."""
    target = tiny_model_dir(tmp_path, seed=1, num_hidden_layers=LAYERS)
    head = eagle3_dir(tmp_path, own_embedding=True)
    config = EagleDecodingConfig(max_draft_len=3, speculative_model=head)
    llm = LLM(
        target, config, device="cpu", dtype="float32", max_batch_size=1, max_seq_len=64,
        kv_cache_config=KvCacheConfig(max_tokens=64, tokens_per_block=4),
        disable_overlap_scheduler=not overlap,
    )  # fmt: skip
    executor = llm.executor

    def drafts_of(prompt: list[int]) -> list[list[int]]:
        request = executor.enqueue(prompt, SamplingParams(max_tokens=8, ignore_eos=True))
        seen = []
        while executor.has_work:
            executor.step()
            if request.is_generation:
                seen.append(executor.state.next_tokens[request.slot, 1:].tolist())
        return seen

    clean = drafts_of([5, 6, 7])
    executor.draft_model.embed_tokens.weight.data[90] = float("nan")  # type: ignore[union-attr]
    drafts_of([90, 3] * 12)
    for group in executor.kv_cache.groups:
        assert torch.isfinite(group.k_cache).all() and torch.isfinite(group.v_cache).all()
    assert drafts_of([5, 6, 7]) == clean


@pytest.mark.parametrize("kind", ["eagle3", "p_eagle", "mtp"])
def test_one_tensor_is_used_twice(tmp_path: Path, kind: str) -> None:
    """A draft model may return what its logits are computed from, to be fed on too."""
    if kind == "mtp":
        target, config = (
            mtp_model_dir(tmp_path, num_mtp_layers=2),
            MTPDecodingConfig(num_nextn_predict_layers=2, use_mtp_vanilla=True),
        )
    else:
        target = tiny_model_dir(tmp_path, num_hidden_layers=6)
        head = (eagle3_dir if kind == "eagle3" else p_eagle_dir)(tmp_path)
        config = EagleDecodingConfig(max_draft_len=2, speculative_model=head)
    read: list[list[Tensor]] = []
    for pick in (lambda out: out[0], lambda out: (out[0], out[0])):
        llm = LLM(target, config, device="cpu", dtype="float32", max_seq_len=64)
        model: Any = llm.executor.draft_model
        forward, logits, seen = model.forward, model.compute_logits, []
        model.forward = lambda *a, f=forward, p=pick, **k: p(f(*a, **k))

        def compute(hidden: Tensor, step: int, logits: Any = logits, seen: Any = seen) -> Tensor:
            seen.append(hidden)
            return logits(hidden, step)

        model.compute_logits = compute
        llm.generate([[5, 6, 7], [8]], SamplingParams(max_tokens=8, ignore_eos=True))
        read.append(seen)
    assert len(read[0]) == len(read[1]) > 4
    assert all(torch.equal(one, two) for one, two in zip(*read, strict=True))
