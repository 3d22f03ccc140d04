"""A draft head with fresh weights, for a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..attention.torch_sdpa import TorchAttention
from ..errors import ConfigError
from ..models.decoder import Decoder
from ..models.drafters.base import DraftHead
from ..models.drafters.convolved import BlockConvolution
from ..models.drafters.dflash import DFlashHead
from ..models.drafters.eagle import Eagle3Head
from ..models.drafters.mtp import MTPHead
from .draft_vocabulary import d2t_offsets
from .new_head import NewHead, head_config

CODEBOOK_DEVIATION = 0.02


def create_head(
    spec: NewHead, target: Decoder, draft_ids: Tensor | None, dtype: torch.dtype, seed: int
) -> DraftHead:
    """A head with fresh weights on the target's device, all of its parameters trainable.

    Matrices are normal with a deviation of 1/sqrt(inputs), but for what is known already: final
    norms and an EAGLE-3 head's lm_head begin as the target's. DSpark's bias begins as none.
    DFlash2's convolutions begin as the rows themselves, its choice nearly as the logits alone.

    Args:
        draft_ids: EAGLE-3: [Vd] int64, ascending: the target's tokens it drafts among. None where
            a head has the target's lm_head.

    Raises:
        ConfigError: as `check_target`, or a size does not fit.
    """
    config, device = target.config, target.embed_tokens.weight.device
    made = head_config(spec, config, None if draft_ids is None else len(draft_ids))
    network: Any = {"eagle3": Eagle3Head, "mtp": MTPHead}.get(spec.kind, DFlashHead)
    with torch.device("meta"):
        head: DraftHead = network(
            made, config.max_position_embeddings, TorchAttention(), kv_group=1
        )
    generator = torch.Generator().manual_seed(seed)
    for module in list(head.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.ones(parameter.shape) - getattr(module, "offset", 0.0)
            if name == "bias":
                value.zero_()
            elif parameter.dim() > 1:
                value.normal_(0, parameter.shape[-1] ** -0.5, generator=generator)
            setattr(module, name, nn.Parameter(value.to(device, dtype), requires_grad=True))
    head.rope_tables.to(device)
    if isinstance(head, Eagle3Head):
        assert draft_ids is not None and head.lm_head is not None
        ids = draft_ids.to(device)
        head.d2t = d2t_offsets(ids)
        weight = lm_head_weight(target)
        head.lm_head.weight.data.copy_(weight[ids])  # type: ignore[union-attr]
        head.norm.weight.data.copy_(target.norm.weight + target.norm.offset)
    elif isinstance(head, DFlashHead):
        head.norm.weight.data.copy_(target.norm.weight + target.norm.offset)
        if head.markov_head is not None:
            bias = head.markov_head.markov_w2.weight
            assert bias is not None
            bias.data.zero_()
        _begin_as_dflash(head)
    else:
        for layer in head.layers:  # type: ignore[union-attr]
            layer.norm.weight.data.copy_(target.norm.weight)
    head.share(target)
    return head


def _begin_as_dflash(head: DFlashHead) -> None:
    """Gives what a DFlash2 head has more than DFlash values with which it computes the same."""
    for module in head.modules():
        if isinstance(module, BlockConvolution):
            assert module.kernel_projection.weight is not None
            module.kernel_projection.weight.data.zero_()
            module.base_kernel.data.zero_()
            module.base_kernel.data[:, 0] = 1
    if head.candidate_selector is not None:
        for book in head.candidate_selector.books:
            book.data.mul_(CODEBOOK_DEVIATION * book.shape[1] ** 0.5)


@torch.no_grad()
def fit_to_states(head: DFlashHead, hidden: Tensor) -> None:
    """Divides what fc makes of each captured layer by the size of that layer's states.

    Late layers' states are many times larger than early ones', and would be all that a new head
    hears.

    Args:
        hidden: [T, n * Ht], captured states of some text.
    """
    parts = hidden.float().unflatten(-1, (-1, head.config.target_hidden_size))
    sizes = parts.pow(2).mean((0, 2)).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    weight = head.fc.weight
    assert weight is not None, "a head to be trained is not packed"
    scale = sizes.repeat_interleave(head.config.target_hidden_size)
    weight.copy_(weight / scale.to(weight.dtype))


def trainable(head: DraftHead) -> dict[str, nn.Parameter]:
    """The head's own parameters by name, without the target's ends."""
    return {n: p for n, p in head.named_parameters(remove_duplicate=False) if p.requires_grad}


def lm_head_weight(target: Decoder) -> Tensor:
    """[V, D]. Raises ConfigError where the weights are packed (load with pack=False)."""
    weight = target.embed_tokens.weight if target.config.tie_word_embeddings else None
    weight = target.lm_head.weight if weight is None else weight
    if weight is None:
        raise ConfigError("The target's weights are packed: load it with pack=False to train.")
    return weight.data
