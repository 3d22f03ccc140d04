"""What captures of CUDA graphs share, without a GPU."""

from __future__ import annotations

import gc

import pytest
import torch

from trtspec.ops.launch import captures


def test_a_device_has_one_stream_by_any_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine's device may be "cuda", its weights' "cuda:0". cuBLAS holds memory per stream."""
    captures._stream_of.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "Stream", lambda index: ["stream of", index])
    streams = [captures.capture_stream(torch.device(name)) for name in ("cuda", "cuda:1", "cuda:0")]
    captures._stream_of.cache_clear()
    assert streams[0] is streams[1] and streams[2] == ["stream of", 0]


def test_collection_goes_on_as_it_was() -> None:
    for was_enabled in (True, False):
        gc.enable() if was_enabled else gc.disable()
        try:
            with pytest.raises(ValueError), captures.no_garbage_collection():
                assert not gc.isenabled()
                raise ValueError
            assert gc.isenabled() is was_enabled
        finally:
            gc.enable()
