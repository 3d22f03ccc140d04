"""Loading a checkpoint into a model: every tensor expected is there, and nothing else is.

Names and shapes are checked from the files' headers before anything is allocated; then tensors
are copied one by one, so the peak is the model plus one tensor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..distributed.parallel import ONE_RANK, WHOLE, Cut, Parallel
from ..errors import CheckpointError
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..layers.norm import RMSNorm
from ..models.config import DecoderConfig
from ..models.cut import check_cut
from ..models.decoder import MLP, Attention, Decoder
from ..models.gated_delta import GatedDeltaNet
from ..models.placement import Placement
from .dequantized import dequantized
from .hf_config import load_config
from .place import LoadOptions, place_tensors
from .tensors import FLOATS, TensorSource, open_checkpoint, some
from .text_part import text_tensors

logger = logging.getLogger(__name__)

PACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Module of a model -> modules of the checkpoint whose rows it stacks, in this order."""

_CONFIG_FIELDS = {
    "embed_tokens": "vocab_size and hidden_size",
    "self_attn": "num_attention_heads",
    "lm_head": "vocab_size and hidden_size",
    "q_proj": "num_attention_heads, head_dim and hidden_size",
    "k_proj": "num_key_value_heads, head_dim and hidden_size",
    "v_proj": "num_key_value_heads, head_dim and hidden_size",
    "o_proj": "num_attention_heads, head_dim and hidden_size",
    "gate_proj": "intermediate_size and hidden_size",
    "up_proj": "intermediate_size and hidden_size",
    "down_proj": "intermediate_size and hidden_size",
    "q_a_proj": "q_lora_rank and hidden_size",
    "q_b_proj": "num_attention_heads, qk_nope_head_dim, qk_rope_head_dim and q_lora_rank",
    "kv_a_proj_with_mqa": "kv_lora_rank, qk_rope_head_dim and hidden_size",
    "kv_b_proj": "num_attention_heads, qk_nope_head_dim, v_head_dim and kv_lora_rank",
    "q_a_layernorm": "q_lora_rank",
    "kv_a_layernorm": "kv_lora_rank",
    "embed_tokens_per_layer": "vocab_size, hidden_size_per_layer_input and num_hidden_layers",
    "per_layer_model_projection": "hidden_size_per_layer_input and num_hidden_layers",
    "per_layer_projection_norm": "hidden_size_per_layer_input",
    "linear_attn": "linear_num_value_heads",
    "in_proj_qkvz": "linear_num_key_heads, linear_num_value_heads and their head_dims",
    "in_proj_qkv": "linear_num_key_heads, linear_num_value_heads and their head_dims",
    "in_proj_ba": "linear_num_value_heads",
    "in_proj_a": "linear_num_value_heads",
    "in_proj_b": "linear_num_value_heads",
    "in_proj_z": "linear_num_value_heads and linear_value_head_dim",
    "out_proj": "linear_num_value_heads and linear_value_head_dim",
    "conv1d": "linear_conv_kernel_dim and the linear heads",
    "per_layer_input_gate": "hidden_size_per_layer_input and hidden_size",
    "per_layer_projection": "hidden_size_per_layer_input and hidden_size",
    "markov_w1": "markov_rank and vocab_size",
    "markov_w2": "markov_rank and draft_vocab_size",
    "confidence_proj": "hidden_size, markov_rank and confidence_head_with_markov",
    "attention_conv": "conv_kernel_size and hidden_size",
    "mlp_conv": "conv_kernel_size and hidden_size",
    "kernel_projection": "conv_kernel_size, conv_group_size and hidden_size",
    "candidate_selector": "vocab_size and selector_rank",
    "hidden_projection": "selector_rank and hidden_size",
    "q_norm": "head_dim",
    "k_norm": "head_dim",
    "gate": "n_routed_experts and hidden_size",
    "router": "num_experts and hidden_size",
    "proj": "num_experts and hidden_size",
    "centroids": "num_centroids and hidden_size",
    "context_embedding_fc": "hidden_size",
    "fc": "hidden_size, target_hidden_size and the captured layers",
}


def load_decoder(model_dir: Path, options: LoadOptions, parallel: Parallel = ONE_RANK) -> Decoder:
    """Returns the model of a Hugging Face directory, ready to run (in eval mode).

    Args:
        parallel: the ranks that the model is cut over. Each reads only its part.

    Raises:
        CheckpointError: as `load_config` and `load_weights`.
        ConfigError: the model cannot be cut over that number of ranks.
    """
    config = replace(load_config(model_dir), parallel=parallel)
    check_cut(config, str(model_dir))
    _check_depth(config, model_dir)
    with sizes_alone(model_dir):
        model = Decoder(config, options.backend, options.kv_group, options.num_positions)
    load_weights(model, model_dir, options)
    return model.eval()


@contextmanager
def sizes_alone(model_dir: Path) -> Iterator[None]:
    """Modules made inside have parameters without memory.

    Raises:
        CheckpointError: the sizes in config.json are beyond what can be counted.
    """
    try:
        with torch.device("meta"):
            yield
    except RuntimeError as error:
        raise CheckpointError(
            f"{model_dir / 'config.json'} has sizes that no memory holds ({error}). Copy it again "
            "from the model's source."
        ) from error


def _check_depth(config: DecoderConfig, model_dir: Path) -> None:
    """Refuses more layers than the weights have, before time is spent on building them."""
    with ExitStack() as stack:
        found = (
            re.search(r"\blayers\.(\d+)\.", name) for name in open_checkpoint(model_dir, stack)
        )
        count = len({match[1] for match in found if match})
    if config.num_layers > count:
        raise CheckpointError(
            f"{model_dir / 'config.json'} says num_hidden_layers={config.num_layers}, but the "
            f"weights beside it are of {count} layers. Use the config.json that belongs to these "
            "weights, or copy them again from the model's source."
        )


def load_weights(model: Decoder, model_dir: Path, options: LoadOptions) -> None:
    """Fills the model from `model.safetensors` or its sharded form.

    The model's own parameters (meta or not) are replaced.

    Skipped are `rotary_emb.inv_freq` buffers, an `lm_head.weight` equal to the embedding it is tied
    to, what makes keys and values of layers that read another layer's, and MTP layers.

    Raises:
        CheckpointError: no, damaged, missing, surplus, mis-shaped tensors, or ones quantised in a
            way that `quantization.py` does not name.
    """
    config, model_dir = model.config, Path(model_dir)
    tied = config.tie_word_embeddings
    placement_of = {
        name if name.startswith("lm_head.") else f"model.{name}": placement
        for name, placement in placements(model).items()
        if not (tied and name == "lm_head.weight")
    }
    with ExitStack() as stack:
        everything = open_checkpoint(model_dir, stack)
        sources = text_tensors(everything)
        if len(sources) < len(everything):
            logger.warning(
                "%s also reads images or sound: its text model is used alone, %d tensors are left "
                "out.",
                model_dir,
                len(everything) - len(sources),
            )
        sources = dequantized(sources, config.raw, model_dir / "config.json")
        if tied and "lm_head.weight" in sources:  # some files have the shared weights as that alone
            sources.setdefault("model.embed_tokens.weight", sources["lm_head.weight"])
        _values_from_keys(sources, placement_of, model_dir, config)
        _by_rows(sources, placement_of)
        _take_stacks_apart(sources, placement_of, model_dir)
        take_experts_apart(sources, placement_of)
        _check(placement_of, sources, model_dir, config)
        if not options.form.keeps_fp8 and any(source.scaled for source in sources.values()):
            logger.info("%s: quantised weights are read as floats (%s).", model_dir, options.dtype)
        place_tensors(model, placement_of, sources, options)
        if tied:
            _tie(model, sources.get("lm_head.weight"), model_dir)
    finish(model, options.device, options.pack)


def placements(model: nn.Module) -> dict[str, Placement]:
    """Returns where each tensor of a checkpoint goes, by its name without prefix.

    Every parameter of the model has one or more. A module with other tensors than parameters has a
    method `placements(name)`, which is asked for all that is below it.
    """
    placement_of: dict[str, Placement] = {}
    special = {name: m for name, m in model.named_modules() if name and hasattr(m, "placements")}
    for name, inner in special.items():
        placement_of |= inner.placements(name)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module, leaf = name.rsplit(".", 1)
        if any(name.startswith(f"{prefix}.") for prefix in special):
            continue
        parent, _, last = module.rpartition(".")
        start = 0
        for part in PACKED.get(last, (last,)):
            owner = model.get_submodule(parent)
            rows = _rows(part, owner) if last in PACKED else parameter.shape[0]
            named = leaf
            if leaf == "attention_sink_bias":
                named = str(model.get_submodule(module).sinks_name)
            source = ".".join(filter(None, (parent, part, named)))
            order, shape = _order(part, owner, rows), (rows, *parameter.shape[1:])
            cut = _cut(part, model.get_submodule(module), owner, shape)
            if cut is not None and cut.dim == 0:  # the last rank may have fewer rows than room
                shape = (cut.length, *shape[1:])
            placement_of[source] = Placement(module, leaf, start, shape, order, cut=cut)
            start += rows
    return placement_of


def _rows(part: str, owner: nn.Module) -> int:
    if isinstance(owner, MLP):
        return owner.intermediate_size
    assert isinstance(owner, Attention)
    return (owner.num_q_outputs if part == "q_proj" else owner.num_kv_heads) * owner.head_dim


def _cut(part: str, module: nn.Module, owner: nn.Module, shape: tuple[int, ...]) -> Cut | None:
    """Returns what this rank takes of a tensor that makes `shape` of a parameter; None is all."""
    shard = getattr(module, "shard", WHOLE)
    if isinstance(owner, Attention) and part in ("k_proj", "v_proj"):
        shard = owner.kv_shard
    return shard.source(shape[shard.dim]) if shard.dim < len(shape) else None  # or a bias


def _order(part: str, owner: nn.Module, rows: int) -> Tensor | None:
    """Returns the order of a tensor's rows, where heads are laid out for their rotation, and where
    a head's queries and gates are together."""
    if part == "q_proj" and isinstance(owner, Attention) and owner.gates_output:
        queries, gates = torch.arange(rows, device="cpu").view(-1, 2, owner.head_dim).unbind(1)
        if owner.head_order is not None:
            queries = queries[:, owner.head_order.to(queries.device)]
        return torch.cat([gates.flatten(), queries.flatten()])
    order = owner.head_order if isinstance(owner, Attention) else None
    if order is None or part not in ("q_proj", "k_proj", "q_norm", "k_norm"):
        return None
    starts = torch.arange(0, rows, len(order), device=order.device)
    return (starts[:, None] + order).flatten()


def finish(model: nn.Module, device: torch.device, pack: bool = True) -> None:
    """Moves the RoPE tables to the device; on CPU packs weights as its kernels like them.

    Of a layer whose outputs the ranks add up, the first rank alone keeps the bias.
    """
    model.rope_tables.to(device)
    for module in model.modules():
        if isinstance(module, GatedDeltaNet):
            module.arrange()
        if isinstance(module, Linear) and module.bias is not None and module.sums_over.rank > 0:
            module.bias.data.zero_()
        if isinstance(module, Experts) and module.down_proj_bias is not None and module.shard.index:
            module.down_proj_bias.data.zero_()
    if device.type == "cpu" and pack:
        for module in model.modules():
            if isinstance(module, Linear | Experts | RMSNorm):
                module.pack()


def shape_problem(name: str, source: TensorSource, placement: Placement) -> str | None:
    """Returns what is wrong with a tensor's shape or dtype, and its cure; None if it fits."""
    if source.shape != placement.source_shape:
        fields = _CONFIG_FIELDS.get(name.rsplit(".", 2)[-2], "hidden_size")
        if name.endswith(".linear_attn.norm.weight"):
            fields = "linear_value_head_dim"
        if re.search(r"experts?\.|\.moe\.", name):  # of a mixture: routed or shared
            fields = (
                "the experts' number and sizes (moe_intermediate_size or intermediate_size, …) and "
                "hidden_size"
            )
        return (
            f"{source.name} in {source.path} has shape {list(source.shape)}, but config.json makes "
            f"it {list(placement.source_shape)}. Check {fields} there."
        )
    if source.dtype not in FLOATS:
        return (
            f"{source.name} in {source.path} has dtype {source.dtype}; allowed are "
            f"{', '.join(FLOATS)}. Use the unquantised checkpoint."
        )
    return None


def is_declared_mtp_tensor(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor is of MTP layers: config.json's declared ones, or Qwen3-Next's (`mtp.`)."""
    if name.startswith("mtp."):
        return True
    raw = config.raw
    declared = raw.get("num_nextn_predict_layers") or raw.get("num_mtp_modules") or 0
    match = re.match(r"model\.(mtp_layers|layers)\.(\d{1,6})\.", name)
    if match is None or not declared:
        return False
    first = 0 if match[1] == "mtp_layers" else config.num_layers
    return first <= int(match[2]) < first + declared


def _check(
    placement_of: Mapping[str, Placement],
    sources: Mapping[str, TensorSource],
    model_dir: Path,
    config: DecoderConfig,
) -> None:
    missing = [name for name in placement_of if name not in sources]
    if missing:
        hint = ""
        if "lm_head.weight" in missing:
            hint = " (if it shares the embedding, config.json must say tie_word_embeddings: true)"
        elif any(f"{name}_blocks" in sources for name in missing):
            hint = " (they are in MXFP4, which config.json must say: quantization_config)"
        raise CheckpointError(
            f"{model_dir} lacks {len(missing)} of {len(placement_of)} tensors: "
            f"{some(missing)}{hint}. Check that config.json belongs to these weights."
        )
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    surplus = [
        name
        for name, source in sources.items()
        if name not in placement_of
        and name not in allowed
        and not name.endswith("rotary_emb.inv_freq")
        and 0 not in source.shape  # as of 0 shared experts
        and not is_declared_mtp_tensor(name, config)
        and not _makes_unread_kv(name, config)
        and not _is_empty_bias(name, sources, config)
    ]
    if surplus:
        raise CheckpointError(
            f"{model_dir} holds {len(surplus)} tensors its config.json has no place for: "
            f"{some(surplus)}. Check model_type, num_hidden_layers, attention_bias and mlp_bias, "
            "n_routed_experts, moe_layers_enum or enable_moe_block for experts, and for MTP layers "
            "num_nextn_predict_layers."
        )
    for name, placement in placement_of.items():
        problem = shape_problem(name, sources[name], placement)
        if problem:
            raise CheckpointError(problem)


def _is_empty_bias(name: str, sources: Mapping[str, TensorSource], config: DecoderConfig) -> bool:
    """Whether a tensor is a bias of zeros, which AutoGPTQ writes for every product."""
    is_gptq = (config.raw.get("quantization_config") or {}).get("quant_method") == "gptq"
    stem, _, leaf = name.rpartition(".")
    if not is_gptq or leaf != "bias" or f"{stem}.weight" not in sources:
        return False
    return not bool(sources[name].read().any())


def _makes_unread_kv(name: str, config: DecoderConfig) -> bool:
    """Whether a tensor makes keys or values of a layer that reads another layer's.

    Some checkpoints hold such tensors, which nothing reads.
    """
    match = re.match(r"model\.layers\.(\d{1,6})\.self_attn\.(?:[kv]_proj|[kv]_norm)\.", name)
    layer = config.num_layers if match is None else int(match[1])
    return layer < config.num_layers and config.kv_layer(layer) != layer


def _by_rows(sources: dict[str, TensorSource], placement_of: Mapping[str, Placement]) -> None:
    """Makes [E, out, in] of the float stacks that a checkpoint holds as [E, in, out]."""
    for name, placement in placement_of.items():
        source = sources.get(name)
        if source is None or not placement.floats_by_columns or source.scaled is not None:
            continue
        if len(source.shape) == 3:  # others are refused as they are
            sources[name] = source.transposed()


def _take_stacks_apart(
    sources: dict[str, TensorSource], placement_of: Mapping[str, Placement], model_dir: Path
) -> None:
    """Makes sources of the parts of `qkv_proj` and `gate_up_proj`, where a checkpoint has these."""
    for name in [name for name in sources if re.search(r"\.(qkv|gate_up)_proj\.\w+$", name)]:
        parent, last, leaf = name.rsplit(".", 2)
        parts = [f"{parent}.{part}.{leaf}" for part in PACKED[last]]
        if not all(part in placement_of and part not in sources for part in parts):
            continue
        stack, sizes = sources.pop(name), [placement_of[part].source_shape[0] for part in parts]
        if stack.shape[0] != sum(sizes):
            raise CheckpointError(
                f"{name} in {stack.path} has {stack.shape[0]} rows, but config.json of {model_dir} "
                f"makes it {' + '.join(map(str, sizes))}. Check num_attention_heads, "
                "num_key_value_heads, head_dim and intermediate_size there."
            )
        for i, part in enumerate(parts):
            sources[part] = stack.rows(sum(sizes[:i]), sizes[i])


def take_experts_apart(
    sources: dict[str, TensorSource], placement_of: Mapping[str, Placement]
) -> None:
    """Makes sources of each expert's parts, where a checkpoint of a family that has these has all
    experts in one tensor: `gate_up_proj` [E, 2 * I, D] and `down_proj` [E, D, I]."""
    for name in [name for name in sources if re.search(r"\.experts\.(gate_up|down)_proj$", name)]:
        stack, (parent, last) = sources[name], name.rsplit(".", 1)
        parts = PACKED.get(last, (last,))
        first = [f"{parent}.0.{part}.weight" for part in parts]
        if not all(part in placement_of and part not in sources for part in first):
            continue
        shape = placement_of[first[0]].source_shape
        if len(stack.shape) != 3 or stack.shape[1:] != (shape[0] * len(parts), shape[1]):
            continue  # then experts are missing, and it is surplus
        del sources[name]
        for expert in range(stack.shape[0]):
            for i, part in enumerate(parts):
                of_expert = stack.expert_rows(expert, i * shape[0], shape[0])
                sources[f"{parent}.{expert}.{part}.weight"] = of_expert


def _values_from_keys(
    sources: dict[str, TensorSource],
    placement_of: Iterable[str],
    model_dir: Path,
    config: DecoderConfig,
) -> None:
    """Makes the keys' matrix the source of the values too, in layers whose values are the keys."""
    for name in placement_of:
        match = re.fullmatch(r"(model\.layers\.(\d+)\.self_attn)\.v_proj\.(\w+)", name)
        if match is None or not config.of_layer(int(match[2])).values_are_keys:
            continue
        if name in sources:
            raise CheckpointError(
                f"{model_dir} holds {name}, but config.json says attention_k_eq_v: true, so that "
                "k_proj makes the values. Set it to false, or use the weights that belong to it."
            )
        keys = f"{match[1]}.k_proj.{match[3]}"
        if keys in sources:
            sources[name] = sources[keys]


def _tie(model: Decoder, lm_head: TensorSource | None, model_dir: Path) -> None:
    weight = model.embed_tokens.weight
    if lm_head is not None:
        same = lm_head.shape == tuple(weight.shape)
        if not same or not torch.equal(lm_head.read().to(weight), weight):
            raise CheckpointError(
                f"{model_dir} says tie_word_embeddings: true, but its lm_head.weight differs from "
                "model.embed_tokens.weight. Set tie_word_embeddings to false to use both, or "
                "remove lm_head.weight."
            )
    head = model.lm_head
    cut = head.shard.source(head.out_features)
    if cut is not None:  # a view, but for the rows that fill up the last rank's part
        rows = weight.data.narrow(0, cut.start, cut.length)
        missing = head.out_features - cut.length
        rows = F.pad(rows, (0, 0, 0, missing)) if missing else rows
        weight = nn.Parameter(rows, requires_grad=False)
    head.weight = weight
