"""Resolves the device, the dtype and the attention backend that were asked for."""

from __future__ import annotations

import logging
import platform

import torch

from .. import native
from ..attention.base import AttentionBackend
from ..attention.torch_sdpa import TorchAttention
from ..errors import ConfigError
from ..models.config import DecoderConfig
from ..ops.layer.fp8 import FP8

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def resolve_device(device: str | torch.device) -> torch.device:
    """Returns the device; "auto" is CUDA where there is one.

    Raises:
        ConfigError: it is unknown, this machine has none, or it is not the current device.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device={device!r}: use 'auto', 'cpu' or 'cuda'.") from error
    if resolved.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device!r}: use 'auto', 'cpu' or 'cuda'.")
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device!r}, but torch sees no CUDA device. Use device='cpu'.")
    if resolved.type == "cuda" and resolved.index not in (None, torch.cuda.current_device()):
        raise ConfigError(
            f"device={device!r} is not the current device, on which kernels are launched: call "
            f"torch.cuda.set_device({resolved.index}) first, or set CUDA_VISIBLE_DEVICES="
            f"{resolved.index} and use device='cuda'."
        )
    return resolved


def resolve_dtype(
    dtype: str | torch.dtype, config: DecoderConfig, device: torch.device
) -> torch.dtype:
    """Returns the dtype; "auto" is the checkpoint's.

    On a CPU without instructions for bfloat16, "auto" takes float32 instead, which is faster. It
    also does where the device does not compute in the checkpoint's. Of a checkpoint of 4 bits in
    float16, as AWQ's are, it takes bfloat16 where such weights stay 4 bits in that alone.

    Raises:
        ConfigError: it is not supported on this device.
    """
    allowed = [n for n in _DTYPES if device.type == "cuda" or n != "float16"]
    name = str(dtype).removeprefix("torch.")
    if name == "auto":
        name = config.dtype
        if name == "bfloat16" and device.type == "cpu" and not _multiplies_bfloat16():
            logger.info("This CPU multiplies float32 faster than bfloat16: dtype is float32.")
            name = "float32"
        if name == "float16" and config.has_four_bits and _keeps_four_bits(device):
            logger.info("Weights of 4 bits stay so in bfloat16, not in float16: dtype is bfloat16.")
            name = "bfloat16"
        if name in ("float16", "float64") and name not in allowed:
            logger.info("On %s a checkpoint in %s is computed in float32.", device.type, name)
            name = "float32"
    if name not in allowed:
        raise ConfigError(
            f"dtype={name!r} on {device.type}: use one of {', '.join(['auto', *allowed])}."
        )
    return _DTYPES[name]


def _keeps_four_bits(device: torch.device) -> bool:
    """Whether there are kernels for weights of 4 bits."""
    return native.kernels(torch.empty(0, device=device)) is not None


def attention_backend(name: str, device: torch.device) -> AttentionBackend:
    """Returns the backend of a name in `ATTENTION_BACKENDS`.

    "auto" is "triton" on CUDA, where triton is installed, else torch's operations.

    Raises:
        ConfigError: it cannot run here.
    """
    asked = name
    if name == "auto":  # nothing else resolves "auto"
        name = "triton" if device.type == "cuda" else "torch"
    if name == "torch":
        return TorchAttention()
    if device.type != "cuda":
        raise ConfigError(f"attn_backend={name!r} needs device='cuda'; on CPU use 'torch'.")
    try:
        from ..attention.triton_backend import TritonAttention
    except ImportError as error:
        if asked != "auto":
            raise ConfigError(
                f"attn_backend={name!r} needs the package triton ({error}): pip install "
                "'trtspec[cuda]', or use attn_backend='torch'."
            ) from error
        logger.warning("triton is not installed: attention runs in torch, without CUDA graphs.")
        return TorchAttention()
    if name == "flashinfer":
        from ..attention.flashinfer import FlashInferAttention

        return FlashInferAttention(device)
    return TritonAttention()


def kv_cache_dtype(
    asked: str, says_fp8: bool, dtype: torch.dtype, backend: AttentionBackend, device: torch.device
) -> torch.dtype:
    """Returns the dtype of the target's keys and values.

    Args:
        asked: `KvCacheConfig.dtype`; "auto" is FP8 if the checkpoint says so and it can be had.
        says_fp8: whether the checkpoint was made for FP8.
        dtype: the model's.

    Raises:
        ConfigError: "fp8", which cannot be had here.
    """
    refusal = None
    if not backend.reads_fp8:
        refusal = f"attn_backend={backend.name!r} reads none: use 'triton' or 'torch'"
    elif device.type == "cuda" and backend.name == "triton":
        capability = torch.cuda.get_device_capability(device)
        if capability < (8, 9):
            refusal = (
                f"Triton needs a GPU of compute capability 8.9, and this one has "
                f"{capability[0]}.{capability[1]}: use attn_backend='torch', or dtype='auto'"
            )
    if refusal is None:
        return FP8 if says_fp8 or asked == "fp8" else dtype
    if asked == "fp8":
        raise ConfigError(f"KvCacheConfig.dtype='fp8': {refusal}.")
    if says_fp8:
        name = str(dtype).removeprefix("torch.")
        logger.warning(
            "The checkpoint was made for a KV cache in FP8, but %s. It is %s.", refusal, name
        )
    return dtype


def _multiplies_bfloat16() -> bool:
    """Returns whether the CPU has instructions for bfloat16. Only x86-64 is asked; others count as
    having them."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    return bool(torch.cpu._is_avx512_bf16_supported())
