"""The same on CUDA, with and without graphs.

In bfloat16 `csrc` serves attention where pages are multiples of 16 keys, else Triton does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from perfect_schedules import BLOCKS, NAMES, Schedule, make_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CASES = [(name, "float32") for name in NAMES] + [(name, "bfloat16") for name in BLOCKS]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_every_draft_is_accepted_on_cuda(tmp_path: Path, name: str, dtype: str) -> None:
    case, drafts = make_case(tmp_path, name, dtype), 0
    for seed in range(4 if name == "draft_target" else 2):
        schedule = Schedule(case, "cuda", seed)
        schedule.run(num_requests=12)
        drafts += schedule.check()
    assert drafts > 50
