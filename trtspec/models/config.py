"""The architecture of a decoder as plain numbers and flags.

One frozen dataclass covers every family of `checkpoints/families/`. They differ only in these
fields; nothing downstream asks for the model's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..distributed.parallel import ONE_RANK, Parallel


@dataclass(frozen=True)
class MoENames:
    """A mixture's tensors in the checkpoint, below their layer's name."""

    router: str = "mlp.gate.weight"
    router_bias: str = ""  # "": it has none
    correction_bias: str = "mlp.gate.e_score_correction_bias"
    expert: str = "mlp.experts.{expert}.{part}.weight"  # without {expert}: all, stacked [E, …]
    parts: Mapping[str, str] = field(default_factory=dict)  # other names of gate_proj and so on
    expert_bias: str = ""  # of all, stacked [E, out]; "": they have none
    has_gate_up: bool = False  # gate_proj and up_proj are one tensor, `gate_up_proj`
    interleaves: bool = False  # its rows are a gate's and an up's in turn; else gates come first
    floats_by_columns: bool = False  # stacks are [E, in, out] where they are not quantised
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate.weight"


@dataclass(frozen=True)
class MoEConfig:
    """The mixture of experts that replaces the MLP, or stands beside it.

    It is in the layers whose type has one, from layer `first_k_dense_replace` on.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    shared_intermediate_size: int = 0  # of the experts every token goes to, as one MLP; 0 is none
    gates_shared: bool = False  # what they return is scaled by sigmoid(a product with one output)
    n_group: int = 1  # experts are chosen within the `topk_group` best of `n_group` groups
    topk_group: int = 1
    scoring: str = "sigmoid"  # or "softmax", over all experts
    has_correction_bias: bool = True  # added to the scores for the choice alone
    norm_topk_prob: bool = True  # a token's weights sum to 1 before they are scaled
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    activation: str = "silu"  # of the experts' gates, or "gelu_tanh"
    swiglu_limit: float | None = None  # clamps silu(gate) and up of the routed experts
    swiglu_alpha: float | None = None  # then gates are clamped before, as of gpt-oss
    shared_swiglu_limit: float | None = None
    beside_mlp: bool = False  # the MLP stays; experts have norms and a router of their own (Gemma)
    names: MoENames = MoENames()


@dataclass(frozen=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): sizes per head."""

    q_lora_rank: int | None  # None: queries straight from the hidden states
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    softmax_scale: float
    rope_interleave: bool = True  # the checkpoint rotates pairs (2i, 2i + 1)

    @property
    def latent_dim(self) -> int:
        """Width of a token in the cache: its latent, then its rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Linear attention by the gated delta rule (arXiv:2412.06464): sizes of all heads."""

    num_key_heads: int
    num_value_heads: int  # a multiple
    key_head_dim: int
    value_head_dim: int
    conv_taps: int  # rows that the convolution sees
    is_grouped: bool = False  # the checkpoint has q, k, v, z of each key head together (Qwen3-Next)

    @property
    def conv_size(self) -> int:
        """Width of what the convolution reads: queries, keys and values."""
        return 2 * self.num_key_heads * self.key_head_dim + self.value_size

    @property
    def value_size(self) -> int:
        return self.num_value_heads * self.value_head_dim

    def part(self, ranks: int) -> LinearAttentionConfig:
        """Returns the sizes of one of `ranks` equal parts of the heads."""
        keys, values = self.num_key_heads // ranks, self.num_value_heads // ranks
        return replace(self, num_key_heads=keys, num_value_heads=values)


@dataclass(frozen=True)
class DecoderConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_parameters: dict[str, Any]  # transformers 5 form: rope_type, rope_theta, and its scaling
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norms_all_heads: bool = False  # then over all heads at once, not over each (MiniMax-M2)
    norm_offset: float = 0.0  # added to the weight of every RMSNorm
    sandwich_norms: bool = False  # a norm before and after attention and MLP (Gemma)
    post_norms: bool = False  # a norm after them alone (OLMo-2)
    value_norm: bool = False  # values have the keys' norm too, without a weight (Gemma-4)
    values_are_keys: bool = False  # of one matrix, before norm and rotation (Gemma-4)
    layer_scalar: bool = False  # a learned number multiplies each layer's output (Gemma-4)
    images_attend_both_ways: bool = False  # an image's rows see all of it (Gemma)
    reads_kv_of: str | None = None
    """A layer type: keys and values are those of its last layer, none are kept (Gemma-4)."""
    per_layer_input_size: int = 0  # of each layer's embedding of the token (Gemma-4); 0: none
    per_layer_pad_id: int = 0  # the token whose layer inputs a given embedding has
    activation: str = "silu"  # of the MLP's gate, or "gelu_tanh"
    swiglu_limit: float | None = None  # silu(gate) is at most this, up within ±this (Step-3.5)
    embedding_scale: float | None = None
    attention_scale: float | None = None  # None is 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # scores s become cap * tanh(s / cap)
    attention_sinks: bool = False  # each query head has a logit beside its scores, without a value
    sinks_name: str = "attention_sink_bias"  # of their tensor in the checkpoint
    logits_softcap: float | None = None
    head_gate: bool = False  # attention's heads are scaled by sigmoid(g_proj(its input))
    output_gate: bool = False  # attention's output is scaled by sigmoid(a part of q_proj's)
    rotary_dim: int | None = None  # of a head's dimensions only the first are rotated; None is all
    layer_windows: tuple[int | None, ...] = ()  # per layer; None is full attention
    layer_types: tuple[str, ...] = ()  # per layer, a key of `type_fields`; () is all alike
    # Both may go on after the last layer: then they are of the checkpoint's MTP layers.
    type_fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Layer type -> the fields of this config that are different in its layers."""
    linear_attention: LinearAttentionConfig | None = None  # in place of attention
    moe: MoEConfig | None = None
    mtp_feeds_post_norm: bool | None = None  # the family's way; None is that of its MTP layout
    mla: MLAConfig | None = None
    """Latent attention; then `head_dim` is what is rotated of a head, and `num_kv_heads` is 1."""
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"  # the checkpoint's
    has_four_bits: bool = field(default=False, repr=False, compare=False)
    """The checkpoint says that products of layers are INT4 or NVFP4."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """The HF config as a dict: what a later feature needs without a new field here."""
    parallel: Parallel = field(default=ONE_RANK, repr=False, compare=False)
    """The ranks that the model is cut over. All sizes above are of the whole model."""

    @property
    def reads_images_whole(self) -> bool:
        """Whether some layer attends both ways within an image: no pass may have a part of one."""
        return any(self.of_layer(i).images_attend_both_ways for i in range(self.num_layers))

    def window(self, layer: int) -> int | None:
        return self.layer_windows[layer] if self.layer_windows else None

    def kv_layer(self, layer: int) -> int:
        """Returns the layer whose keys and values this one reads: mostly itself."""
        source = self.of_layer(layer).reads_kv_of
        if source is None:
            return layer
        return max(i for i, kind in enumerate(self.layer_types) if kind == source)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers whose attention is linear: they have a memory of fixed size, and no keys."""
        layers = range(self.num_layers)
        return tuple(i for i in layers if self.of_layer(i).linear_attention is not None)

    def moe_of_layer(self, layer: int) -> MoEConfig | None:
        """Returns the layer's mixture of experts; None where it has an MLP alone."""
        moe = self.of_layer(layer).moe
        return moe if moe and layer >= moe.first_k_dense_replace else None

    def of_layer(self, layer: int) -> DecoderConfig:
        """Returns the config of one layer, with the fields of its type."""
        if not self.layer_types:
            return self
        return replace(self, **self.type_fields.get(self.layer_types[layer], {}))

    def part_of_layer(self, layer: int) -> DecoderConfig:
        """Returns `of_layer` with the heads and the width of this rank's part of the layer.

        Its mixture, which `moe_of_layer` returns, is whole: `MoE` cuts it.
        """
        config, parallel = self.of_layer(layer), self.parallel
        if parallel.size == 1:
            return config
        linear = config.linear_attention
        return replace(
            config,
            linear_attention=None if linear is None else linear.part(parallel.head_ranks),
            num_heads=config.num_heads // parallel.head_ranks,
            num_kv_heads=max(1, config.num_kv_heads // parallel.head_ranks),
            intermediate_size=config.intermediate_size // parallel.size,
        )
