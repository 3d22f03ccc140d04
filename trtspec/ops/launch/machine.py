"""Constants of machines: what a kernel's launch or a choice of kernels assumes of the hardware."""

from __future__ import annotations

INVARIANT_ROWS = 9
"""On CPU, bf16 products with up to this many rows give each row the same result (decision 003)."""

MULTIPROCESSORS = 132
"""Of an H100 or H200: how far work is cut for kernels that should fill the GPU."""
