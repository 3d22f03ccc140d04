"""What an engine says of prompts' log probabilities, against transformers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from trtspec import RequestOutput
from trtspec.api.outputs import Logprob


@torch.inference_mode()
def rows_of(read: Tensor) -> Tensor:
    """Of the logits [n, V] of a prompt [n], what is said of each token but the first."""
    return read.double().log_softmax(-1)[:-1]


def assert_entries(
    said: Sequence[dict[int, Logprob] | None] | None, prompt: Sequence[int], wanted: Tensor,
    count: int, without: Sequence[int] = (),
) -> None:  # fmt: skip
    """Compares all positions; those of `without` have no token."""
    assert said is not None and len(said) == len(prompt) == len(wanted) + 1
    for i, (token, entry) in enumerate(zip(prompt, said, strict=True)):
        assert (entry is None) == (i == 0 or i in without), i
        if entry is None:
            continue
        row = wanted[i - 1]
        assert next(iter(entry)) == token
        assert set(entry) == {token, *row.topk(count).indices.tolist()}
        for other, known in entry.items():
            assert known.logprob == pytest.approx(float(row[other]), abs=1e-4)
            assert known.rank == 1 + int((row > row[other]).sum())


def assert_as_asked(
    outputs: Sequence[RequestOutput], counts: Sequence[int | None], read: object
) -> None:
    """Compares outputs whose requests asked for `counts`; `read` is an oracle's."""
    for output, count in zip(outputs, counts, strict=True):
        prompt = output.prompt_token_ids
        if count is None:
            assert output.prompt_logprobs is None
            continue
        with torch.inference_mode():
            logits = read(torch.tensor([prompt]))[0]  # type: ignore[operator]
        assert_entries(output.prompt_logprobs, prompt, rows_of(logits), count)
