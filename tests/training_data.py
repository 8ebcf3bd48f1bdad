"""Synthetic training data for the tiny policy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS
from agentrl.data.forest import forest_from_data
from agentrl.documents.model_call import pack_floats, pack_ids
from agentrl.documents.training import DBRecordData, Node, TrainableSpan


def group(name: str, *, size: int = 2, version: int = 0, split: str = "train") -> list[DBRecordData]:
    """One group of one-turn trajectories of ten tokens, four of them trained; the same for the same name."""
    generator = np.random.default_rng(list(name.encode()))
    items = []
    for index in range(size):
        record = f"{name}/{index}/1"
        advantage = 1.0 if index % 2 else -1.0
        items.append(
            DBRecordData(
                id=record, record=record, task=name, split=split, score=float(index % 2), advantage=advantage,
                min_version=version, max_version=version, tokens=10, trainable_tokens=4, turns=1,
                nodes=(Node(start=0, end=10),),
                spans=(
                    TrainableSpan(
                        start=6, end=10, call=0, version=version, advantage=advantage, temperature=1.0
                    ),
                ),
                input_ids=pack_ids(generator.integers(0, 250, 10).tolist()),
                behavior_logprobs=pack_floats([-5.5] * 4),
            )
        )  # fmt: skip
    return items


def sampled_by(item: DBRecordData, *versions: int) -> DBRecordData:
    """``item`` with its four trained tokens spread over ``versions``: one, two or four."""
    size = 4 // len(versions)
    spans = (
        replace(item.spans[0], start=6 + size * n, end=6 + size * (n + 1), version=version)
        for n, version in enumerate(versions)
    )
    return replace(item, spans=tuple(spans), min_version=min(versions), max_version=max(versions))


def training_configs(*groups: Any) -> Configs:
    """Return every group of flags: ``groups``, and the others with their defaults."""
    return Configs([*(kind() for kind in GROUPS), *groups])


def token_advantages(data: DBRecordData) -> dict[int, float]:
    """Return {token id: advantage} of the batch that the trainer gets."""
    forest = forest_from_data([data])
    ids = forest.input_ids[forest.target].tolist()
    return dict(zip(ids, forest.advantage.tolist(), strict=True))
