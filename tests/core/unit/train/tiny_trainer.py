"""A trainer of the tiny policy, and what is asked of its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from training_data import group

from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS
from agentrl.train.build import build_trainer
from agentrl.train.step import PolicyTrainer

DATA = [*group("a"), *group("b", size=4), *group("c")]


def tiny_trainer(base: Path, **flags: Any) -> PolicyTrainer:
    """Return a trainer of the policy in ``base``; its learning rate is 1e-3, if ``flags`` name no other."""
    values = {"model_name_or_path": str(base), "learning_rate": 1e-3, **flags}
    return build_trainer(Configs.of(GROUPS, values, values), weights=None, total_steps=None)


def have_same_weights(one: PolicyTrainer, other: PolicyTrainer) -> bool:
    """Whether every parameter is the same, bit by bit."""
    return all(map(torch.equal, one.policy.model.parameters(), other.policy.model.parameters()))
