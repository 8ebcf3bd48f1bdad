"""Qwen3-8B on 8 GPUs and Qwen3-32B on 64 fit 40 and 55 GiB, two micro-batches of 32k tokens."""

from __future__ import annotations

import pytest

from fake_gpu.cases import Case
from fake_gpu.conftest import Steps

pytestmark = [pytest.mark.fake_gpu, pytest.mark.timeout(1000)]

GIB = 2**30


def test_the_peak_of_large_models(run_steps: Steps) -> None:
    small = Case(model="8b", layout={"dp_shard": 8}, layers=36, planned=True)
    large = Case(model="32b", layout={"dp_shard": 64}, layers=64, planned=True)
    steps = run_steps([small, large])
    for step, limit in zip(steps, (40, 55), strict=True):
        print(f"{step['peak'] / GIB:.2f} GiB, planned {step['planned'] / GIB:.2f}: {step['parts']}")
        assert step["peak"] <= limit * GIB
        assert step["planned"] == pytest.approx(step["peak"], rel=0.1)
