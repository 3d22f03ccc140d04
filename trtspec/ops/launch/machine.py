"""Constants of machines: what a kernel's launch or a choice of kernels assumes of the hardware."""

from __future__ import annotations

INVARIANT_ROWS = 9
"""On CPU, bf16 products with up to this many rows give each row the same result (decision 003)."""

MULTIPROCESSORS = 132
"""Of an H100 or H200: how far work is cut for kernels that should fill the GPU."""

LAUNCH_SECONDS_PER_LAYER = 0.75e-3
"""What an H200's host needs to launch one layer of an eager pass over prompts: 0.5 to 1.1 ms."""
LAUNCH_SECONDS_PER_LAYER_FP8 = 0.9e-3
"""The same where activations are rounded to FP8: rounding and rescaling are further kernels."""

SECONDS_PER_LAYER = 13e-6
"""What a layer's kernels take in a captured pass beyond their bytes, however few rows there are.

Of SmolLM2's shape a pass over prompts and generations took 9 to 12 µs a layer less than both took
apart, and 24 to 28 with drafts, whose passes then run once (one H200).
"""

BYTES_PER_SECOND = 4.3e12
"""What an H200 reads in a second."""

FLOPS, FLOPS_FP8, FLOPS_FP32 = 600e12, 1000e12, 60e12
"""What an H200 computes in a second of passes over prompts, in 16 bits, FP8 and float32."""
