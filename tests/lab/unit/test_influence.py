"""The influence of trajectories: exact inner products, which add up to what the step's own gradient gives."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_policy import write_tiny_policy
from tiny_trainer import DATA, tiny_trainer
from training_data import group

from agentrl.lab.blame import Direction, influences, likelihood_direction
from agentrl.train.step import PolicyTrainer, forward_backward, split_updates

HELD_OUT = group("held out", size=3)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny policy, which no test changes."""
    return write_tiny_policy(tmp_path_factory.mktemp("model") / "base")


@pytest.mark.exactness
@pytest.mark.parametrize(
    "flags",
    [
        {"importance_weight_cap_ratio": float("inf"), "kl_coef": 0.1, "entropy_coef": 0.01},
        {"mini_batches": 2, "num_epochs_per_batch": 2, "token_level_loss": False},
        {"loss_calculater": "GSPO", "old_logprobs": "recompute"},
        {"loss_calculater": "CISPO", "lora_rank": 2},
    ],
)
def test_influences_add_up_to_the_product_with_the_gradient_of_the_step(
    base: Path, flags: dict[str, Any]
) -> None:
    policy = tiny_trainer(base, **flags)
    policy.train(DATA)  # an adapter begins at 0, where half of its gradients are 0
    direction = likelihood_direction(policy, HELD_OUT)
    found = influences(policy, DATA, direction)
    expected = 0.0
    for part in split_updates(DATA, policy.mini_batches):
        forests = policy.frozen.attach(policy.model, policy.pack(part), policy.options)
        forward_backward(policy.model, forests, policy.settings, options=policy.options)
        expected -= policy.epochs * direction.take_product()
    assert expected
    assert found.keys() == {item.id for item in DATA}
    assert sum(found.values()) == pytest.approx(expected, rel=1e-4)
    assert all(parameter.grad is None for parameter in policy.model.parameters())


def test_a_step_on_one_trajectory_changes_the_likelihood_by_its_influence(base: Path) -> None:
    policy = tiny_trainer(base, importance_weight_cap_ratio=float("inf"), skip_length_normalization=True,
                          token_level_loss=False)  # fmt: skip
    direction = likelihood_direction(policy, HELD_OUT)
    found = influences(policy, DATA[:1], direction)[DATA[0].id]
    before, rate = objective(policy), 1e-3
    forward_backward(policy.model, policy.pack(DATA[:1]), policy.settings, options=policy.options)
    with torch.no_grad():
        for parameter in policy.model.parameters():
            if parameter.grad is not None:
                parameter -= rate * parameter.grad
    assert (objective(policy) - before) / rate == pytest.approx(found, rel=0.05)


@torch.no_grad()
def objective(policy: PolicyTrainer) -> float:
    """Σ A·log πθ of the held-out trajectories."""
    total = 0.0
    for forest in policy.pack(HELD_OUT):
        logprobs, _ = policy.model(forest, policy.options)
        total += float((torch.from_numpy(forest.advantage) * logprobs).sum())
    return total


def test_the_scale_is_that_of_an_update_of_adamw(base: Path) -> None:
    """With β1 = 0 an update is lr·gradient/(√v̂ + ε): it moves along v by lr times the scaled product."""
    policy = tiny_trainer(base, optim_args="beta1=0", weight_decay=0.0, max_grad_norm=1e9)
    direction = likelihood_direction(policy, HELD_OUT)
    weights = copy.deepcopy([item.detach() for item in policy.model.parameters()])
    policy.train(DATA)
    moved = [
        after.detach() - before for after, before in zip(policy.model.parameters(), weights, strict=True)
    ]
    with torch.no_grad():
        for parameter, before in zip(policy.model.parameters(), weights, strict=True):
            parameter.copy_(before)
    found = influences(policy, DATA, direction.scaled_by(policy.optimizer))
    by_parameter = dict(zip(policy.model.parameters(), moved, strict=True))
    product = sum(float((by_parameter[item] * numbers).sum()) for item, numbers in direction.parts)
    assert 1e-3 * sum(found.values()) == pytest.approx(product, rel=1e-3)


def test_a_parameter_without_moments_has_the_mean_scale() -> None:
    known, new = (torch.nn.Parameter(torch.ones(2)) for _ in range(2))
    optimizer = torch.optim.AdamW([known, new], betas=(0.0, 0.0), eps=0.0, weight_decay=0.0)
    known.grad = torch.tensor([0.5, 0.25])
    optimizer.step()
    direction = Direction([(known, torch.ones(2)), (new, torch.ones(2))]).scaled_by(optimizer)
    assert [numbers.tolist() for _, numbers in direction.parts] == [[2.0, 4.0], [3.0, 3.0]]
