"""How far two sets of weights lie apart, layer by layer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.errors import ModelError
from agentrl.weights.delta import layer_differences


def write(folder: Path, **tensors: torch.Tensor) -> Path:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_norms_are_those_of_each_layer(tmp_path: Path) -> None:
    ones = torch.ones(2, 2)
    names = ("embed.weight", "model.layers.0.a", "model.layers.0.b", "model.layers.10.a")
    first = write(tmp_path / "a", **{name: ones.clone() for name in names})
    second = write(tmp_path / "b", **{name: ones + index for index, name in enumerate(names)})
    found = layer_differences(first, second)
    assert [(item.layer, item.norm) for item in found] == [
        ("embed.weight", 2.0), ("layer 0", pytest.approx(8**0.5)), ("layer 10", 2.0),
    ]  # fmt: skip
    assert [item.difference for item in found] == [0.0, pytest.approx((4 + 16) ** 0.5), 6.0]
    assert found[2].relative == 3.0


def test_other_tensors_are_refused(tmp_path: Path) -> None:
    first = write(tmp_path / "a", x=torch.ones(2))
    with pytest.raises(ModelError, match="hold other tensors, x among them"):
        layer_differences(first, write(tmp_path / "b", y=torch.ones(2)))
    with pytest.raises(ModelError, match=r"x has the shape \[2\]"):
        layer_differences(first, write(tmp_path / "c", x=torch.ones(3)))
    (tmp_path / "d").mkdir()
    with pytest.raises(ModelError, match="holds no weights"):
        layer_differences(first, tmp_path / "d")
