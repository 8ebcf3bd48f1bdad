"""Versions of a tiny model in folders, as whole weights and deltas, for tests of what reads them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from agentrl.documents.run import PolicyVersion
from agentrl.weights.delta import SUFFIX, encode
from agentrl.weights.folder import MANIFEST, TensorChecksum, checksums, weights_digest


def random_weights(chance: random.Random, like: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return new weights, or ``like`` with some elements changed."""
    generator = torch.Generator().manual_seed(chance.getrandbits(60))
    if like is None:
        sizes = {"embed": 60, "layers.0.q": 33, "layers.0.norm": 5, "layers.1.q": 33}
        return {name: torch.randn(size, generator=generator).bfloat16() for name, size in sizes.items()}
    changed = {}
    for name, tensor in like.items():
        hit = torch.rand(tensor.shape, generator=generator) < chance.choice((0, 0.1, 1))
        changed[name] = torch.where(hit, torch.randn(tensor.shape, generator=generator).bfloat16(), tensor)
    return changed


class Chain:
    """A run whose versions are in ``root``; the part of a store that reads them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.versions: dict[int, PolicyVersion] = {}
        self.weights: dict[int, dict[str, Tensor]] = {}
        self.policy_versions = self

    async def get(self, version: int) -> PolicyVersion | None:
        return self.versions.get(version)

    def publish(self, weights: dict[str, Tensor], base: int | None = None) -> PolicyVersion:
        """Publish the next version: whole weights, or a delta of ``base``."""
        number = len(self.versions) + 1
        folder = self.root / f"v{number:06d}"
        folder.mkdir(parents=True)
        if base is None:
            names = sorted(weights)
            save_file({name: weights[name] for name in names[:2]}, folder / "model-1.safetensors")
            save_file({name: weights[name] for name in names[2:]}, folder / "model-2.safetensors")
            (folder / "config.json").write_text("{}")
        else:
            encode(self.weights[base], weights, folder / f"rank-0{SUFFIX}")
        tensors = {name: TensorChecksum.of(tensor) for name, tensor in weights.items()}
        content: dict[str, Any] = {"tensors": {name: each.to_json() for name, each in tensors.items()}}
        (folder / MANIFEST).write_text(json.dumps(content))
        document = PolicyVersion(
            id=number, step=number, location=str(folder), files=checksums(folder), train_step=None,
            encoding="full" if base is None else "delta", base=base, digest=weights_digest(tensors),
        )  # fmt: skip
        self.versions[number], self.weights[number] = document, weights
        return document
