"""How tests load tiny models and heads: in float32 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import torch

from trtspec.attention.torch_sdpa import TorchAttention
from trtspec.checkpoints.place import LoadOptions

ON_CPU = LoadOptions(dtype=torch.float32, device=torch.device("cpu"), backend=TorchAttention())
UNPACKED = replace(ON_CPU, pack=False)
HEAD_ON_CPU = replace(ON_CPU, kv_group=1)
UNPACKED_HEAD = replace(HEAD_ON_CPU, pack=False)
