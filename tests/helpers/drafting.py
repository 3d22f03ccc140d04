"""Drafters with their oracles, and random schedules that compare every draft logit."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from matrix import full
from oracle import VOCAB, Oracle
from safetensors.torch import load_file, save_file
from tiny_heads import GATED, NaiveHead, eagle1_dir, eagle3_dir, mtp_model_dir
from torch import Tensor

from trtspec import LLM, EagleDecodingConfig, KvCacheConfig, MTPDecodingConfig, SamplingParams
from trtspec.config import DecodingBaseConfig
from trtspec.metadata.missed import CAPACITY

LAYERS = 8  # of the EAGLE-3 target: its default capture is after layers 1, 3 and 4


class Foresight:
    """The target's states of whole texts, read once for all that begins one of them."""

    oracle: Oracle

    def compute(self, text: Sequence[int]) -> Tensor:
        """What the head reads, [n, …], from transformers."""
        raise NotImplementedError

    def hidden(self, text: Sequence[int]) -> Tensor:
        known_texts = self.__dict__.setdefault("known_texts", [])
        for known, states in known_texts:
            if known[: len(text)] == list(text):
                return states[: len(text)]
        known_texts.append((list(text), self.compute(text)))
        return known_texts[-1][1]

    def foresee(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Reads the target's texts of `count` tokens at once, for what is asked step by step."""
        for prompt, said in zip(prompts, self.oracle.extend_all(prompts, count), strict=True):
            self.hidden([*prompt, *said])


@dataclass
class Case(Foresight):
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
    def compute(self, text: Sequence[int]) -> Tensor:
        """In float64."""
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
    if options.get("family") in GATED:
        flags["rotary_dim"] = 2
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
        "qwen3_5": lambda: _mtp(tmp_path, k, layout="qwen3_next", family="qwen3_5_text"),
        "qwen3_next_moe": lambda: _mtp(tmp_path, k, layout="qwen3_next", family="qwen3_next"),
        "deepseek_v3_vanilla": lambda: _mtp(
            tmp_path, k, vanilla=True, layout="deepseek_v3", q_lora_rank=None, rms_norm_eps=1e-3
        ),
    }  # fmt: skip
    return makers[name]()


CASES = [
    "eagle3", "eagle3_flags", "eagle3_before_fc", "eagle3_two_engine", "eagle1", "mtp_eagle",
    "mtp_eagle_two_engine", "mtp_eagle_pre_norm", "mimo", "mtp_vanilla", "mtp_vanilla_own_ends",
    "mimo_vanilla", "glm", "glm_vanilla", "qwen3_next", "qwen3_next_vanilla",
    "qwen3_5", "qwen3_next_moe",
    "deepseek_v3", "deepseek_v3_vanilla",
]  # fmt: skip


def cases_by_k(names: Sequence[str], few: Sequence[str]) -> list[tuple[str, int]]:
    """Every name with K = 4, which preempts; also with 1 and 2 the `few`, or all when `full`."""
    return [(name, k) for name in names for k in (1, 2, 4) if k == 4 or name in few or full()]


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


def run_random_schedule(
    case: Case, k: int, seed: int, script_type: type[Script] = Script,
    prompts: Sequence[list[int]] | None = None, **limits: Any,
) -> tuple[int, Any]:  # fmt: skip
    """Returns how many draft logits were compared, and the executor. `prompts` None: random
    ones."""
    llm = LLM(
        case.target, case.config, device="cpu", dtype="float32", max_batch_size=3,
        disable_overlap_scheduler=True, enable_chunked_prefill=True,
        **{
            "max_seq_len": 64, "max_num_tokens": 3 * (k + 1) + 5,
            "kv_cache_config": KvCacheConfig(max_tokens=88, tokens_per_block=4), **limits,
        },
    )  # fmt: skip
    script, rng = script_type(llm, case, seed), random.Random(seed)
    executor = llm.executor
    waiting = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 24))] for _ in range(4)]
    if prompts is not None:
        waiting = list(reversed(prompts))
    case.foresee(waiting, 30 + k)
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


def run_with_changing_draft_len(case: Case, script_type: type[Script] = Script) -> None:
    """The head's KV stays whole while nothing is drafted, so drafting resumes at full strength."""
    k = 3
    llm = LLM(case.target, case.config, device="cpu", dtype="float32", max_seq_len=96)
    script, executor = script_type(llm, case, seed=0), llm.executor
    params = SamplingParams(max_tokens=40, ignore_eos=True)
    requests = [executor.enqueue([5, 6, 7 + i], params) for i in range(2)]
    case.foresee([request.prompt_token_ids for request in requests], 40 + k)
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


def run_after_a_rest(case: Case) -> None:
    """A request ends while its head has rows to read. The next one goes on with its text, whose
    blocks it finds in the cache as far as the head has read them."""
    llm = LLM(
        case.target, replace(case.config, draft_len_schedule={64: 3}), device="cpu",
        dtype="float32", max_seq_len=96, disable_overlap_scheduler=True,
        kv_cache_config=KvCacheConfig(tokens_per_block=4),
    )  # fmt: skip
    script, executor = Script(llm, case, seed=0), llm.executor
    prompt = [5, 6, 7, 8, 9]
    case.foresee([prompt], 60)
    for draft_len, count in ((0, CAPACITY - 2), (3, 20)):
        executor.runtime_draft_len = draft_len
        params = SamplingParams(max_tokens=count, ignore_eos=True)
        request = executor.enqueue(prompt, params)
        script.requests[request.request_id] = request
        while executor.has_work:
            script.logits = {}
            executor.step()
            if request.is_generation and draft_len:
                check_drafts(script, case, request)
        assert request.output_token_ids == case.oracle.extend(prompt, count)
        if draft_len == 0:
            assert request.num_missed == count - 1, "its rows were left to the head"
            prompt = request.token_ids
    assert request.cached_tokens == 4, "what the head has read of the prompt"


def check_drafts(script: Script, case: Case, request: Any) -> int:
    """Compares the request's last draft logits with the oracle's. Returns how many there are."""
    text, logits = request.token_ids, script.logits[request.request_id]
    proposals = script.proposals[request.request_id][: len(logits)]
    expected = case.naive.chain(text, case.hidden(text[:-1]), proposals)
    for ours, naive in zip(logits, expected, strict=True):
        torch.testing.assert_close(ours, naive, atol=1e-4, rtol=2e-5)
    return len(logits)


def run_with_rests(case: Case, script_type: type[Script] = Script) -> Counter[int]:
    """Drafting rests for a while, and resumes at full strength: the head reads late what it missed.

    Requests join at any time, in chunks; later prompts hold earlier texts, whose blocks they find.
    A small cache preempts. Returns how often a pass read so many rows of a request.
    """
    k, rng = 3, random.Random(0)
    llm = LLM(
        case.target, replace(case.config, draft_len_schedule={64: k}), device="cpu",
        dtype="float32", max_batch_size=3, max_seq_len=128, max_num_tokens=20,
        enable_chunked_prefill=True, disable_overlap_scheduler=True,
        kv_cache_config=KvCacheConfig(max_tokens=200, tokens_per_block=4),
    )  # fmt: skip
    script, executor = script_type(llm, case, 0), llm.executor
    read: Counter[int] = Counter()
    run, requests, texts = executor.runner.run, [], []

    def counted(plan: Any) -> Any:
        if plan.reads_missed:
            read.update(request.num_missed for request in plan.batch.generations)
        return run(plan)

    executor.runner.run = counted  # type: ignore[method-assign]
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))] for _ in range(4)]
    case.foresee(prompts, 125)
    left, until, compared = 12, 0, 0
    for number in range(10_000):
        if not (left or executor.has_work):
            break
        # A prompt ends a rest. So none comes in long ones.
        if left and until - number <= 9 and rng.random() < 0.2:
            left -= 1
            prompt = rng.choice([*prompts, *texts])
            params = SamplingParams(max_tokens=rng.randint(10, 60), ignore_eos=True)
            requests.append(executor.enqueue(prompt, params))
            script.requests[requests[-1].request_id] = requests[-1]
        if number >= until:
            executor.runtime_draft_len = wanted = rng.choice([0, 1, 3])
            until = number + (
                rng.choice([1, 2, 9, CAPACITY + 9]) if wanted == 0 else rng.randint(1, 9)
            )
        script.logits = {}
        executor.step()
        for i, logits in script.logits.items():
            request = script.requests[i]
            if not request.is_generation or not logits:
                continue
            compared += check_drafts(script, case, request)
        texts = [r.token_ids for r in requests if r.is_finished and len(r.token_ids) < 60]
    assert compared > 60
    assert any(request.cached_tokens for request in requests)
    for request in requests:
        n = len(request.output_token_ids)
        assert request.output_token_ids == case.oracle.extend(request.prompt_token_ids, n)
    executor.kv_cache.check_integrity()
    return read
