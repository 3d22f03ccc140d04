"""What a step costs with each draft head, one-model and two-engine, on random weights.

    python benchmarks/draft_heads.py [--preset llama-3.1-8b] [--k 3] [--prompt 256] [--batch 1]

The target has the preset's shape (SmolLM2-135M or Llama-3.1-8B), the EAGLE-3 head 16,000 or 32,000
draft tokens, MTP layers are of the target's kind. Random heads accept next to nothing: a step's
cost does not depend on it.
Checkpoints are written once into a temporary directory. The engines take turns, a block of steps
each; medians of blocks. On a GPU steps overlap as they do in use, and the captured graph's own time
(by events, over replays) stands beside the wall clock.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtspec import (
    LLM,
    EagleDecodingConfig,
    KvCacheConfig,
    MTPDecodingConfig,
    SamplingParams,
)
from trtspec.config import DecodingBaseConfig


@dataclass(frozen=True)
class Shape:
    size: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int
    rope_theta: float
    tied: bool

    @property
    def config(self) -> dict[str, object]:
        return {
            "model_type": "llama", "vocab_size": self.vocab, "hidden_size": self.size,
            "intermediate_size": self.inner, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": self.rope_theta,
            "tie_word_embeddings": self.tied, "dtype": "bfloat16",
        }  # fmt: skip


PRESETS = {
    "smollm2-135m": Shape(576, 1536, 30, 9, 3, 49152, 16000, 1e5, True),
    "llama-3.1-8b": Shape(4096, 14336, 32, 32, 8, 128256, 32000, 5e5, False),
}


def _layer(shape: Shape, prefix: str, width: int) -> dict[str, tuple[int, ...]]:
    size, dim = shape.size, shape.size // shape.heads
    return {
        f"{prefix}self_attn.q_proj.weight": (size, width),
        f"{prefix}self_attn.k_proj.weight": (shape.kv_heads * dim, width),
        f"{prefix}self_attn.v_proj.weight": (shape.kv_heads * dim, width),
        f"{prefix}self_attn.o_proj.weight": (size, size),
        f"{prefix}mlp.gate_proj.weight": (shape.inner, size),
        f"{prefix}mlp.up_proj.weight": (shape.inner, size),
        f"{prefix}mlp.down_proj.weight": (size, shape.inner),
        f"{prefix}input_layernorm.weight": (size,),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }


def _save(path: Path, shapes: dict[str, tuple[int, ...]], config: dict[str, object]) -> Path:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, Tensor] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            noise = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
            tensors[name] = noise.bfloat16().cpu()
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(config))
    if "fc.weight" in tensors:
        tensors["d2t"] = torch.arange(shapes["lm_head.weight"][0]) * 2  # every third token
    save_file(tensors, path / "model.safetensors")
    return path


def build_target(path: Path, shape: Shape, num_mtp_layers: int) -> Path:
    """A random target with MTP layers in its checkpoint."""
    size = shape.size
    shapes = {"model.embed_tokens.weight": (shape.vocab, size), "model.norm.weight": (size,)}
    if not shape.tied:
        shapes["lm_head.weight"] = (shape.vocab, size)
    for i in range(shape.layers + num_mtp_layers):
        shapes |= _layer(shape, f"model.layers.{i}.", size)
    for i in range(shape.layers, shape.layers + num_mtp_layers):
        for name in ("enorm", "hnorm", "shared_head.norm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (size,)
        shapes[f"model.layers.{i}.eh_proj.weight"] = (size, 2 * size)
    return _save(path, shapes, {**shape.config, "num_nextn_predict_layers": num_mtp_layers})


def build_eagle3_head(path: Path, shape: Shape = PRESETS["smollm2-135m"]) -> Path:
    """A random EAGLE-3 head for a target of this shape."""
    size = shape.size
    shapes = _layer(shape, "midlayer.", 2 * size) | {
        "fc.weight": (size, 3 * size),
        "midlayer.hidden_norm.weight": (size,),
        "norm.weight": (size,),
        "lm_head.weight": (shape.draft_vocab, size),
    }
    config = {**shape.config, "num_hidden_layers": 1, "draft_vocab_size": shape.draft_vocab}
    return _save(path, shapes, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--preset", choices=PRESETS, default="smollm2-135m")
    parser.add_argument("--modes", help="comma-separated, plain among them; default: all")
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--blocks", type=int, default=8, help="of 10 steps, for each engine")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    k, most = args.k, args.prompt + (args.k + 1) * (10 * args.blocks + 30)
    with tempfile.TemporaryDirectory() as root:
        shape = PRESETS[args.preset]
        target = build_target(Path(root, "target"), shape, k)
        head = build_eagle3_head(Path(root, "head"), shape)
        configs: dict[str, DecodingBaseConfig | None] = {
            "plain": None,
            "eagle3_one_model": EagleDecodingConfig(max_draft_len=k, speculative_model=head),
            "eagle3": EagleDecodingConfig(
                max_draft_len=k, speculative_model=head, eagle3_one_model=False
            ),
            "mtp_eagle_one_model": MTPDecodingConfig(num_nextn_predict_layers=k),
            "mtp_eagle": MTPDecodingConfig(num_nextn_predict_layers=k, mtp_eagle_one_model=False),
            "mtp": MTPDecodingConfig(num_nextn_predict_layers=k, use_mtp_vanilla=True),
        }
        chosen = args.modes.split(",") if args.modes else list(configs)
        configs = {name: configs[name] for name in chosen}
        engines = {}
        for name, config in configs.items():
            llm = LLM(
                target, config, device=args.device, dtype="bfloat16", max_batch_size=args.batch,
                max_seq_len=most, kv_cache_config=KvCacheConfig(max_tokens=args.batch * most),
            )  # fmt: skip
            engines[name] = llm
            for i in range(args.batch):
                prompt = [(7 * j + i) % shape.vocab for j in range(args.prompt)]
                llm.executor.enqueue(prompt, SamplingParams(max_tokens=10**6, ignore_eos=True))
            while any(not r.is_generation for r in llm.executor._requests.values()):
                llm.executor.step()
            _block(llm)  # captures the graph
        times: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.blocks):
            for name, llm in engines.items():
                times[name].append(_block(llm))
        where = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
        print(f"{where}, {args.preset}'s shape, bf16, batch {args.batch}, K = {k}, "
              f"prompt {args.prompt}, nothing accepted")  # fmt: skip
        plain = median(times["plain"])
        for name, values in times.items():
            ms = median(values)
            graph = _graph_ms(engines[name])
            own = "" if graph is None else f"   graph {graph:6.3f} ms"
            print(f"{name:22s} {ms:7.3f} ms a step   {ms / plain:5.2f} x plain{own}")


def _block(llm: LLM, steps: int = 10) -> float:
    """ms a step, wall clock."""
    if llm.device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        llm.executor.step()
    if llm.device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / steps * 1e3


def _graph_ms(llm: LLM, replays: int = 200) -> float | None:
    """What the captured step takes on the GPU alone; None without graphs."""
    graphs = llm.executor.graphs
    if graphs is None or not graphs._graphs:
        return None
    captured = next(iter(graphs._graphs.values()))
    start, end = (torch.cuda.Event(enable_timing=True) for _ in "se")
    start.record()
    for _ in range(replays):
        for graph in captured.graphs:
            graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / replays


if __name__ == "__main__":
    main()
