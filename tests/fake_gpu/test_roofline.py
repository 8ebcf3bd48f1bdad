"""The counts of ``scripts/bench/roofline.py`` against those by hand."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fake_gpu.kernels import moved_bytes

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "roofline.py"
aten = torch.ops.aten
HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, VOCABULARY, LAYERS = 256, 768, 4, 2, 64, 512, 4
"""Of the script's small model."""
TOKENS, TRAINED, BATCHES, RANKS = 1024, 512, 64, 8
ATTENTION = HIDDEN * WIDTH * 2 * (HEADS + KV_HEADS)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without values, which counts as one of a device."""
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("operation", "arguments", "expected"),
    [
        (aten.mul.Tensor, (meta(4, 8), meta(4, 8)), 3 * 128),
        (aten.mul.Tensor, (meta(4, 8), meta(1, 8).expand(4, 8)), 2 * 128 + 32),
        (aten.mul_.Tensor, (meta(4, 8), meta(4, 8)), 3 * 128),
        (aten.copy_.default, (meta(4, 8), meta(4, 8, dtype=torch.bfloat16)), 128 + 64),
        (aten._to_copy.default, (meta(4, 8, dtype=torch.bfloat16),), 2 * 64),
        (aten.mm.default, (meta(4, 8), meta(8, 2)), 128 + 64 + 32),
        (aten.index.Tensor, (meta(100, 8), [meta(4, dtype=torch.int64)]), 2 * 128),
        (aten.index_add_.default, (meta(100, 8), 0, meta(4, dtype=torch.int64), meta(4, 8)), 3 * 128),
        (aten.new_zeros.default, (meta(1), [4, 8]), 128),
    ],
)
def test_bytes_that_an_operation_moves(operation: Any, arguments: tuple[Any, ...], expected: int) -> None:
    name = operation.name().removeprefix("aten::").partition(".")[0]
    assert moved_bytes(operation, name, arguments, {}, operation(*arguments)) == expected


@pytest.mark.fake_gpu
@pytest.mark.timeout(1000)
def test_a_step_by_hand(fake_python: Path) -> None:
    ended = subprocess.run(
        [fake_python, SCRIPT, "--child", "small"], capture_output=True, text=True, check=True, timeout=900
    )
    found = json.loads(ended.stdout.splitlines()[-1])
    weights = ATTENTION + 3 * HIDDEN * INNER
    # Forward, its repetition up to the last product, and two products for each in the backward.
    layer = 2 * TOKENS * (4 * weights - HIDDEN * INNER)
    pairs = 128**2 * 8 * 9 // 2
    layer += (4 + 4 + 10) * pairs * HEADS * WIDTH
    head = 4 * 2 * TRAINED * HIDDEN * VOCABULARY
    assert found["flops"] == BATCHES * (LAYERS * layer + head)
    whole = weights + 2 * HIDDEN + 2 * WIDTH
    root = (2 * VOCABULARY + 1) * HIDDEN
    assert found["exchanged"]["allgather bfloat16 8"] == BATCHES * 2 * (2 * LAYERS * whole + root)
    assert found["exchanged"]["reduce_scatter float32 8"] == BATCHES * 4 * (LAYERS * whole + root)
    for kind in ("bound", "usual"):
        items = found[kind]["items"]
        total = sum(value for name, value in items.items() if not name.startswith("("))
        assert total == pytest.approx(found[kind]["seconds"])
        assert found[kind]["mfu"] == pytest.approx(found["mfu_flops"] / total / 989e12)
    # The model's own FLOPs leave out what is computed again, and pairs that a block masks.
    assert found["mfu_flops"] < found["flops"]
