"""Makes `tests/helpers` importable from every folder, and Triton kernels runnable on CPU."""

import os
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():  # before triton is imported: kernels run in its interpreter
    os.environ.setdefault("TRITON_INTERPRET", "1")

sys.path.insert(0, str(Path(__file__).parent / "helpers"))
