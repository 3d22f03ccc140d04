"""Small copies between a device's memory and page-locked memory of the host, in a graph too."""

from __future__ import annotations

from torch import Tensor

from ..launch.dispatch import twin


@twin("tokens.triton_handover")
def write_to_host(tensor: Tensor, host: Tensor) -> None:
    """Writes a tensor [B, …] to the first rows of one [>= B, …] of the host, without waiting.

    Args:
        host: of the same dtype, contiguous; page-locked where the tensor is not on the CPU.
    """
    host[: tensor.shape[0]].copy_(tensor, non_blocking=True)


@twin("tokens.triton_handover")
def read_from_host(tensor: Tensor, host: Tensor) -> None:
    """Overwrites a tensor [B, …] with the first rows of one [>= B, …] of the host, likewise."""
    tensor.copy_(host[: tensor.shape[0]], non_blocking=True)
