"""Targets and draft heads in the shapes of real models, with random weights, and their bytes.

A checkpoint here is a config and the shapes of its tensors. `save` writes it out. `in_memory` lets
an engine load it without a file: the tensors are made on the device as they are asked for, which
for 8 billion parameters takes seconds in place of minutes.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from safetensors.torch import save_file
from torch import Tensor

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints import kv_scales, weights
from trtspec.checkpoints.files import read_json_object
from trtspec.checkpoints.heads import load as head_weights
from trtspec.checkpoints.heads.dflash_config import default_target_layers
from trtspec.checkpoints.heads.eagle_config import MIN_LAYERS_FOR_DEFAULT, default_layers_to_capture
from trtspec.checkpoints.hf_config import parse_config
from trtspec.checkpoints.place import PRODUCTS_OF_HEADS
from trtspec.checkpoints.tensors import TensorSource
from trtspec.checkpoints.weights import placements
from trtspec.models.config import DecoderConfig
from trtspec.models.decoder import Decoder
from trtspec.models.kv_layout import kv_group_specs, kv_locations

Shapes = dict[str, tuple[int, ...]]
ITEM_SIZE = 2  # bytes of bfloat16, which all weights and keys are
FP8_OF_HEADS = *PRODUCTS_OF_HEADS, "gate_proj", "up_proj", "experts"
"""What checkpoints call the weights that a quantised head has in FP8."""
MAX_DRAFT_VOCAB = 32_000
QUANTIZATIONS = {
    "int4": {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
    "nvfp4": {
        "quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}},
    },
    "fp8-blocks": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
}  # fmt: skip
"""quantization_config of targets whose layers are quantised in the checkpoint."""
BYTES_OF_WEIGHTS = {
    None: 2.0, "fp8": 1.0, "fp8-blocks": 1 + 4 / 128, "int4": 0.5 + 4 / 128, "nvfp4": 0.5 + 1 / 16,
}  # fmt: skip
"""With their scales, as a step reads them."""
_QUANTIZED = "quantization_config"
DFLASH_LAYERS = 5
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
DSPARK = {"markov_rank": 256, "markov_head_type": "vanilla", "sample_from_anchor": True}
MASKED = "dflash", "dflash2", "dspark"  # kinds of heads that draft a block in one pass


def _llama(
    *,
    size: int,
    inner: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocab: int,
    rope_theta: float,
    tied: bool,
    **more: Any,
) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "rope_theta": rope_theta,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        **more,
    }


QWEN_NEXT = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
}
"""Of each fourth layer's attention, and of linear attention in the others."""
PRESETS: dict[str, dict[str, Any]] = {
    "smollm2-135m": _llama(
        size=576,
        inner=1536,
        layers=30,
        heads=9,
        kv_heads=3,
        vocab=49_152,
        rope_theta=1e5,
        tied=True,
        draft_vocab_size=16_000,
    ),
    "llama-3.1-8b": _llama(
        size=4096,
        inner=14_336,
        layers=32,
        heads=32,
        kv_heads=8,
        vocab=128_256,
        rope_theta=5e5,
        tied=False,
        draft_vocab_size=32_000,
    ),
    "llama-3.1-70b": _llama(
        size=8192,
        inner=28_672,
        layers=80,
        heads=64,
        kv_heads=8,
        vocab=128_256,
        rope_theta=5e5,
        tied=False,
        draft_vocab_size=32_000,
    ),
    "qwen3-1.7b": _llama(
        size=2048,
        inner=6144,
        layers=28,
        heads=16,
        kv_heads=8,
        vocab=151_936,
        rope_theta=1e6,
        tied=True,
        model_type="qwen3",
        head_dim=128,
        rms_norm_eps=1e-6,
        draft_vocab_size=32_000,
    ),
    "qwen3-30b-a3b": _llama(
        size=2048,
        inner=6144,
        layers=48,
        heads=32,
        kv_heads=4,
        vocab=151_936,
        rope_theta=1e6,
        tied=False,
        model_type="qwen3_moe",
        head_dim=128,
        rms_norm_eps=1e-6,
        num_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=768,
        norm_topk_prob=True,
        draft_vocab_size=32_000,
    ),
    "deepseek-16-layers": {  # DeepSeek-V3 with 16 of 61 layers and 64 of 256 experts: 88 GB
        "model_type": "deepseek_v3",
        "vocab_size": 129_280,
        "hidden_size": 7168,
        "intermediate_size": 18_432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "norm_topk_prob": True,
        "first_k_dense_replace": 3,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "quantization_config": {"quant_method": "mxfp4"},
    },
    "qwen3.5-9b": _llama(
        size=4096,
        inner=12_288,
        layers=32,
        heads=16,
        kv_heads=4,
        vocab=248_320,
        rope_theta=1e7,
        tied=False,
        **QWEN_NEXT,
        model_type="qwen3_5_text",
        draft_vocab_size=32_000,
    ),
    "qwen3-next-24-layers": _llama(  # of 48: 81 GB
        size=2048,
        inner=5120,
        layers=24,
        heads=16,
        kv_heads=2,
        vocab=151_936,
        rope_theta=1e7,
        tied=False,
        **QWEN_NEXT,
        model_type="qwen3_next",
        num_experts=512,
        num_experts_per_tok=10,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
        norm_topk_prob=True,
        draft_vocab_size=32_000,
    ),
    "tiny": _llama(
        size=64,
        inner=128,
        layers=2,
        heads=4,
        kv_heads=2,
        vocab=512,
        rope_theta=1e4,
        tied=True,
        draft_vocab_size=128,
    ),  # for tests
}
"""config.json of each, but for `draft_vocab_size`: how many tokens its EAGLE-3 head drafts among.
RoPE's scaling is left out: it changes the numbers of a table, not the cost of a step."""


@dataclass(frozen=True)
class Checkpoint:
    config: dict[str, Any]
    shapes: Shapes

    def tensor(self, name: str, device: str | torch.device = "cpu") -> Tensor:
        """Norms are ones, matrices noise that keeps a vector's size; the same at every call."""
        shape = self.shapes[name]
        if name == "d2t":  # draft token i is target token i * stride
            stride = self.config["vocab_size"] // shape[0]
            return torch.arange(shape[0]) * (stride - 1)
        if f"{name}_scale_inv" in self.shapes:
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            return (
                torch.empty(shape, device=device)
                .normal_(generator=generator)
                .to(torch.float8_e4m3fn)
            )
        if dtype_of(name) not in ("BF16", "U8"):
            return _packed(name, shape, torch.device(device))
        empty = torch.empty(shape, dtype=torch.bfloat16, device=device)
        if dtype_of(name) == "U8":
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            codes = torch.empty(shape, dtype=torch.uint8, device=device)
            if name.endswith("_scales"):
                return codes.fill_(125 - round(math.log2(shape[-1] * 32) / 2))
            return codes.random_(0, 256, generator=generator)
        if name.endswith("bias"):
            return empty.zero_()
        if len(shape) == 1:
            return empty.fill_(1)
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        return empty.normal_(0, shape[-1] ** -0.5, generator=generator)

    def dtype(self, name: str) -> str:
        """As safetensors names it."""
        return "F8_E4M3" if f"{name}_scale_inv" in self.shapes else dtype_of(name)


_DTYPES = {
    "d2t": "I64", "_blocks": "U8", "_scales": "U8",  # MXFP4's
    "qweight": "I32", "qzeros": "I32", ".scales": "F16",  # AWQ's
    "weight_packed": "U8", "weight_scale": "F8_E4M3", "weight_global_scale": "F32",  # NVFP4's
    "weight_scale_inv": "F32",  # of FP8's blocks
}  # fmt: skip


def dtype_of(name: str) -> str:
    """As safetensors names it."""
    return next((dtype for end, dtype in _DTYPES.items() if name.endswith(end)), "BF16")


def _packed(name: str, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """A tensor of AWQ or NVFP4, but for its numbers, or FP8's scales: vectors keep their size."""
    if name.endswith("qweight"):
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        words = torch.empty(shape, dtype=torch.int32, device=device)
        return words.random_(-(2**31), 2**31 - 1, generator=generator)
    if name.endswith("qzeros"):  # seven or eight: numbers' mean is between them
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        words = torch.empty(shape, dtype=torch.int32, device=device)
        return (words.random_(generator=generator) & 0x11111111) + 0x77777777
    if name.endswith(".scales"):  # numbers less their zeros are some 4.6
        scale = (shape[0] * 128) ** -0.5 / 4.6
        return torch.full(shape, scale, dtype=torch.float16, device=device)
    if name.endswith("weight_scale_inv"):
        return torch.full(shape, (shape[1] * 128) ** -0.5, device=device)
    if name.endswith("weight_scale"):
        return torch.ones(shape, device=device).to(torch.float8_e4m3fn)
    return torch.full(shape, 3.0 * 4096**0.5, device=device)


def _quantized(shapes: Shapes, kind: str) -> Shapes:
    """The layers' products as QUANTIZATIONS[kind] has them, where 128 divides their inputs."""
    found: Shapes = {}
    for name, shape in shapes.items():
        stem = name.removesuffix("weight")
        if ".layers." not in name or not name.endswith("_proj.weight") or shape[-1] % 128:
            found[name] = shape
            continue
        out, columns = shape
        if kind == "fp8-blocks":
            found |= {name: shape, f"{name}_scale_inv": (-(-out // 128), columns // 128)}
        elif kind == "int4":
            found |= {
                f"{stem}qweight": (columns, out // 8),
                f"{stem}qzeros": (columns // 128, out // 8),
                f"{stem}scales": (columns // 128, out),
            }
        else:
            found |= {
                f"{stem}weight_packed": (out, columns // 2),
                f"{stem}weight_scale": (out, columns // 16),
                f"{stem}weight_global_scale": (1,),
            }
    return found


class Model:
    """The shape of a target, and the checkpoints of it and its drafters."""

    def __init__(self, config: dict[str, Any], num_positions: int = 0, where: str = "preset"):
        """
        Args:
            config: config.json of a supported family, perhaps with `draft_vocab_size`.
            num_positions: what is needed; the config's own number is raised to it.

        Raises:
            CheckpointError: as `trtspec.checkpoints.hf_config.load_config`.
        """
        raw = {**config, "dtype": "bfloat16"}
        wanted_draft_vocab = raw.pop("draft_vocab_size", MAX_DRAFT_VOCAB)
        decoder = parse_config(raw, Path(where))
        positions = max(decoder.max_position_embeddings, num_positions)
        self.raw = {**raw, "max_position_embeddings": positions}
        self.decoder: DecoderConfig = decoder
        self.draft_vocab = min(wanted_draft_vocab, decoder.vocab_size // 2)

    def target(self, num_mtp_layers: int = 0, is_packed: bool = True) -> Checkpoint:
        """The target, with MTP layers (DeepSeek's names) after its own.

        is_packed: quantised weights are, where the config says so.
        """
        c = self.decoder
        with torch.device("meta"):
            places = placements(Decoder(c, TorchAttention()))
        shapes: Shapes = {
            name if name == "lm_head.weight" else f"model.{name}": place.shape
            for name, place in places.items()
            if not (c.tie_word_embeddings and name == "lm_head.weight")
        }
        for name, place in places.items():
            if place.floats_by_columns:
                shapes |= self._stack(f"model.{name}", *shapes.pop(f"model.{name}"))
        layer = _below(f"model.layers.{c.num_layers - 1}.", shapes)
        for i in range(c.num_layers, c.num_layers + num_mtp_layers):
            shapes |= self._mtp_layer(layer, f"model.layers.{i}.")
        kind = next((k for k, of in QUANTIZATIONS.items() if of == self.raw.get(_QUANTIZED)), None)
        if is_packed and kind is not None:
            shapes = _quantized(shapes, kind)
        return Checkpoint({**self.raw, "num_nextn_predict_layers": num_mtp_layers}, shapes)

    def _stack(self, name: str, count: int, rows: int, columns: int) -> Shapes:
        """gpt-oss's experts, in MXFP4 where its config says so."""
        if _QUANTIZED not in self.raw:
            return {name: (count, columns, rows)}
        groups = count, rows, columns // 32
        return {f"{name}_blocks": (*groups, 16), f"{name}_scales": groups}

    def eagle3_head(self) -> Checkpoint:
        """One Llama layer as wide as the target, with an lm_head of its own."""
        c, size = self.decoder, self.decoder.hidden_size
        config: dict[str, Any] = {
            "model_type": "llama",
            "hidden_size": size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "draft_vocab_size": self.draft_vocab,
            "rope_theta": c.rope_parameters.get("rope_theta", 1e4),
            "rms_norm_eps": c.rms_norm_eps,
            "dtype": "bfloat16",
        }
        layers = default_layers_to_capture(c.num_layers)
        if c.num_layers < MIN_LAYERS_FOR_DEFAULT:
            layers = tuple(range(min(3, c.num_layers)))
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(layers)}
        plain = parse_config({k: v for k, v in config.items() if k != "eagle_config"}, Path("head"))
        shapes = _layer(plain, "midlayer.", 2 * size) | {
            "midlayer.hidden_norm.weight": (size,),
            "fc.weight": (size, len(layers) * size),
            "norm.weight": (size,),
            "lm_head.weight": (self.draft_vocab, size),
            "d2t": (self.draft_vocab,),
        }
        return Checkpoint(config, shapes)

    def dflash_head(self, block_size: int, kind: str = "dflash") -> Checkpoint:
        """Five layers of the target's sizes, Qwen3's kind, and the target's lm_head.

        kind: of `MASKED`; with its public heads' sizes. A DSpark block has as many rows as drafts.
        """
        c, size = self.decoder, self.decoder.hidden_size
        count = min(DFLASH_LAYERS, max(1, c.num_layers - 3))
        layers = default_target_layers(count, c.num_layers)
        config: dict[str, Any] = {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "hidden_size": size,
            "intermediate_size": c.intermediate_size,
            "num_hidden_layers": count,
            "num_attention_heads": c.num_heads,
            "num_key_value_heads": c.num_kv_heads,
            "head_dim": c.head_dim,
            "vocab_size": c.vocab_size,
            "rope_theta": c.rope_parameters.get("rope_theta", 1e4),
            "rms_norm_eps": c.rms_norm_eps,
            "block_size": block_size,
            "dflash_config": {"mask_token_id": 0, "target_layer_ids": list(layers)},
            "dtype": "bfloat16",
        }
        shapes: Shapes = {
            "fc.weight": (size, len(layers) * size),
            "hidden_norm.weight": (size,),
            "norm.weight": (size,),
        }
        for i in range(count):
            plain = replace(c, qk_norm=True, qkv_bias=False, o_bias=False, mlp_bias=False)
            shapes |= _layer(plain, f"layers.{i}.", size)
        if kind == "dflash2":
            config["architectures"] = ["DFlash2DraftModel"]
            config["dflash_config"] |= DFLASH2
            shapes |= self._dflash2_parts(count)
        if kind == "dspark":
            config |= {"architectures": ["DSparkDraftModel"], **DSPARK}
            for name in ("markov_w1", "markov_w2"):
                shapes[f"markov_head.{name}.weight"] = (c.vocab_size, DSPARK["markov_rank"])
        return Checkpoint(config, shapes)

    def _dflash2_parts(self, count: int) -> Shapes:
        """Convolutions of two taps, and the tables of the choice among 16 tokens."""
        size, rank = self.decoder.hidden_size, DFLASH2["selector_rank"]
        taps, groups = DFLASH2["conv_kernel_size"], size // DFLASH2["conv_group_size"]
        shapes: Shapes = {"candidate_selector.hidden_projection.weight": (rank, size)}
        for name in ("predecessor_codebook", "successor_codebook"):
            shapes[f"candidate_selector.{name}"] = (self.decoder.vocab_size, rank)
        for i in range(count):
            for part in ("attention_conv", "mlp_conv"):
                shapes[f"layers.{i}.{part}.base_kernel"] = (2, taps, size)
                name = f"layers.{i}.{part}.kernel_projection.weight"
                shapes[name] = (2 * taps * groups, size)
        return shapes

    def _mtp_layer(self, layer: Shapes, prefix: str) -> Shapes:
        """A layer like the target's last, with what goes before and behind it."""
        size = self.decoder.hidden_size
        ends: Shapes = {
            f"{name}.weight": (size,) for name in ("enorm", "hnorm", "shared_head.norm")
        } | {"eh_proj.weight": (size, 2 * size)}
        return {f"{prefix}{name}": shape for name, shape in (layer | ends).items()}

    # -- bytes that a step cannot avoid to read --------------------------------------------------
    def target_weight_bytes(self, rows: int, kind: str | None = None) -> float:
        """Everything but the embedding, of which a step reads a few rows, and the experts that
        none of its rows goes to. kind: of the layers' weights, of `BYTES_OF_WEIGHTS`."""
        c = self.decoder
        shapes = {n: s for n, s in self.target(is_packed=False).shapes.items() if ".layers." in n}
        ends = c.vocab_size * c.hidden_size * ITEM_SIZE
        return self._bytes(shapes, rows) * BYTES_OF_WEIGHTS[kind] / ITEM_SIZE + ends

    def draft_weight_bytes(
        self, kind: str, num_passes: int, batch: int, is_fp8: bool = False, num_tokens: int = 0
    ) -> float:
        """Of all passes of a step, with one row for a request in each. kind: "eagle3", "mtp",
        of `MASKED`, or anything else for no drafter. `is_fp8`: `PRODUCTS_OF_HEADS` are.
        `num_tokens`: that are drafted by the target's lm_head; 0 is all."""
        c = self.decoder
        item_size = 1 if is_fp8 else ITEM_SIZE
        ends = (num_tokens or c.vocab_size) * c.hidden_size * item_size
        if kind in MASKED:  # one pass, and keys and values of the context
            shapes = self.dflash_head(num_passes + 1, kind).shapes
            rows_alone = "codebook", "markov_w1"  # a few rows of these are read
            shapes = {n: s for n, s in shapes.items() if not any(part in n for part in rows_alone)}
            walked = {n: s for n, s in shapes.items() if "markov_w2" in n}  # once for each draft
            ends += self._bytes(walked, batch) * (num_passes - 1)
            context = {n: s for n, s in shapes.items() if "k_proj" in n or "v_proj" in n}
            return self._bytes(shapes, batch, is_fp8) + self._bytes(context, batch) + ends
        if kind == "mtp":
            prefix = f"model.layers.{c.num_layers}."
            shapes = _below(prefix, self.target(1).shapes)
            return num_passes * (self._bytes(shapes, batch, is_fp8) + ends)
        if kind == "eagle3":
            shapes = {n: s for n, s in self.eagle3_head().shapes.items() if n != "d2t"}
            fc = {"fc.weight": shapes.pop("fc.weight")}  # in the first pass alone
            return self._bytes(fc, batch) + num_passes * self._bytes(shapes, batch, is_fp8)
        return 0

    def _bytes(self, shapes: Shapes, rows: int, is_fp8_head: bool = False) -> float:
        """With as many experts as are expected, if each row chooses at random."""
        moe, total = self.decoder.moe, 0.0
        for name, shape in shapes.items():
            share = 1.0
            if moe is not None and ".experts." in name:
                share = 1 - (1 - moe.experts_per_token / moe.num_experts) ** rows
            if is_fp8_head and any(f"{product}." in name for product in FP8_OF_HEADS):
                share /= 2
            if dtype_of(name) == "U8":
                share /= ITEM_SIZE
            total += ITEM_SIZE * math.prod(shape) * share
        return total

    def kv_bytes(self, num_tokens: float, num_layers: int | None = None) -> float:
        """Keys and values of one request of that length: of the target, or of draft layers, which
        are like its last. Of linear attention the matrices, which are read and written."""
        c, specs = self.decoder, kv_group_specs(self.decoder, torch.bfloat16)
        layers = range(c.num_layers) if num_layers is None else [c.num_layers - 1] * num_layers
        total = 0.0
        for layer in layers:
            sizes = c.of_layer(layer).linear_attention
            if sizes is not None:
                total += 2 * 4 * sizes.value_size * sizes.key_head_dim
                continue
            spec, window = specs[kv_locations(c)[layer].group], c.window(layer)
            tokens = num_tokens if window is None or num_layers else min(num_tokens, window)
            total += tokens * spec.bytes_per_token() / spec.num_layers
        return total


def load_config_file(path: Path) -> dict[str, Any]:
    return read_json_object(path, "Give the config.json of a Hugging Face model.")


def save(directory: Path, checkpoint: Checkpoint) -> Path:
    """Writes config.json and model.safetensors into a new directory."""
    _save_config(directory, checkpoint)
    tensors = {name: checkpoint.tensor(name) for name in checkpoint.shapes}
    save_file(tensors, directory / "model.safetensors")
    return directory


@contextmanager
def in_memory(
    checkpoints: Mapping[Path, Checkpoint],
    device: torch.device,
    saves: bool = True,
    key: Callable[[Path], Path] = Path,
) -> Iterator[None]:
    """Inside, trtspec loads these (new) directories from memory: they get a config.json alone.

    Args:
        saves: whether that is written here.
        key: from a directory to its entry of `checkpoints`.
    """

    def open_checkpoint(
        path: Path, stack: ExitStack, *, pickle: bool = False
    ) -> dict[str, TensorSource]:
        checkpoint = checkpoints[key(path)]
        return {
            name: TensorSource(
                name,
                path,
                shape,
                checkpoint.dtype(name),
                partial(checkpoint.tensor, name, device),
            )
            for name, shape in checkpoint.shapes.items()
        }

    for path, checkpoint in checkpoints.items() if saves else ():
        _save_config(path, checkpoint)
    with (
        patch.object(weights, "open_checkpoint", open_checkpoint),
        patch.object(kv_scales, "open_checkpoint", open_checkpoint),
        patch.object(head_weights, "open_checkpoint", open_checkpoint),
    ):
        yield


def _save_config(directory: Path, checkpoint: Checkpoint) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(checkpoint.config))


def _layer(c: DecoderConfig, prefix: str, width: int) -> Shapes:
    """A decoder layer whose attention reads `width` features."""
    size, inner = c.hidden_size, c.intermediate_size
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    modules = {  # name -> outputs, inputs, has a bias
        "self_attn.q_proj": (queries, width, c.qkv_bias),
        "self_attn.k_proj": (keys, width, c.qkv_bias),
        "self_attn.v_proj": (keys, width, c.qkv_bias),
        "self_attn.o_proj": (size, queries, c.o_bias),
        "mlp.gate_proj": (inner, size, c.mlp_bias),
        "mlp.up_proj": (inner, size, c.mlp_bias),
        "mlp.down_proj": (size, inner, c.mlp_bias),
    }
    shapes: Shapes = {
        f"{prefix}input_layernorm.weight": (size,),
        f"{prefix}post_attention_layernorm.weight": (size,),
    }
    for name, (rows, columns, has_bias) in modules.items():
        shapes[f"{prefix}{name}.weight"] = (rows, columns)
        if has_bias:
            shapes[f"{prefix}{name}.bias"] = (rows,)
    if c.qk_norm:
        for name in ("q_norm", "k_norm"):
            shapes[f"{prefix}self_attn.{name}.weight"] = (c.head_dim,)
    return shapes


def _below(prefix: str, shapes: Shapes) -> Shapes:
    return {n.removeprefix(prefix): s for n, s in shapes.items() if n.startswith(prefix)}
