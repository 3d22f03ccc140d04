"""Step-3.5's and Gemma-4's experts on CUDA: what stands between their products, and limits in the
fused path. Whole steps are in test_gpu_families.py."""

from __future__ import annotations

import pytest
import steady
import torch
from matrix import covering
from naive_experts import BETWEEN, naive_experts, random_experts

from trtspec.layers.norm import RMSNorm
from trtspec.models.config import DecoderConfig
from trtspec.models.decoder import MLP
from trtspec.ops.experts import torch as moe

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BOUNDS = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}


@covering(**{
    "dtype": list(BOUNDS), "between": list(BETWEEN), "rows,count": [(1, 8), (5, 8), (300, 4)],
})  # fmt: skip
def test_experts_equal_a_loop_and_replay_in_a_graph(
    dtype: torch.dtype, between: str, rows: int, count: int
) -> None:
    """By kernels of ours and, for many rows, by torch's grouped product; nothing waits."""
    experts, x, ids, weights = random_experts(rows, count, 2, 64, 48, dtype)
    experts.gate_and_mul = BETWEEN[between][0]
    expected = naive_experts(experts, x, ids, weights, between)
    experts.cuda()
    is_hopper = torch.cuda.get_device_capability()[0] == 9
    if rows > 100 and dtype == torch.bfloat16 and is_hopper:
        assert experts.gate_up_proj is not None
        assert moe.has_grouped_mm(x.cuda(), experts.gate_up_proj)
    args = x.cuda(), ids.cuda(), weights.cuda()
    with torch.no_grad():
        experts(*args)  # compiles
        with steady.no_waiting():
            out = experts(*args)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = experts(*args)
        graph.replay()
    for found in (out, replayed):
        torch.testing.assert_close(
            found.cpu().double(), expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype]
        )


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("rows", [1, 4, 100])
def test_a_fused_mlp_does_not_skip_its_limit(dtype: torch.dtype, rows: int) -> None:
    """Few rows are kernels of csrc's on Hopper, whose SwiGLU knows no limit."""
    config = DecoderConfig(
        vocab_size=8, hidden_size=128, intermediate_size=96, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_position_embeddings=8, rms_norm_eps=1e-5,
        rope_parameters={}, swiglu_limit=0.2,
    )  # fmt: skip
    mlp, norm = MLP(config), RMSNorm(128, 1e-5)
    generator = torch.Generator().manual_seed(0)
    for parameter in (*mlp.parameters(), *norm.parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        small = 1 + 0.2 * noise if noise.dim() == 1 else noise * noise.shape[1] ** -0.5
        parameter.data = small.to(dtype)
    x = torch.randn(rows, 128, generator=generator).to(dtype)
    normed = torch.nn.functional.rms_norm(x.double(), (128,), norm.weight.double(), 1e-5)
    gate, up = (normed @ mlp.gate_up_proj.weight.double().T).chunk(2, dim=-1)  # type: ignore[union-attr]
    inner = (gate * gate.sigmoid()).clamp(max=0.2) * up.clamp(-0.2, 0.2)
    expected = x.double() + inner @ mlp.down_proj.weight.double().T  # type: ignore[union-attr]
    with torch.no_grad():
        out = mlp.cuda()(x.cuda(), norm.cuda()).cpu().double()
    torch.testing.assert_close(out, expected, atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
