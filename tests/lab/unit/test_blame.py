"""Blame without a run: exact inner products that add up to the step's, weights, groups, files, a page."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from tiny_policy import write_tiny_policy
from tiny_trainer import DATA, tiny_trainer
from training_data import group

from agentrl.documents.run import Evaluation
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError
from agentrl.lab import blame
from agentrl.lab.blame import Blame, ChangedTask, Direction, Effect, Weights, influences, likelihood_direction
from agentrl.lab.flags import BlameConfig
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


WRONG = Effect(
    record="train/0/b/0/1", task="train/0/b", step=2, score=1.0, advantage=0.5, scorer="broken",
    tools=("search", "calculate"), min_version=1, max_version=1, effect=0.3,
)  # fmt: skip
RIGHT = replace(
    WRONG, record="train/0/a/0/1", task="train/0/a", scorer="exact", tools=(), min_version=0, effect=-0.1
)
EFFECTS = (WRONG, replace(WRONG, record="train/0/b/1/1", effect=0.1), RIGHT)


def evaluation(step: int) -> Evaluation:
    return Evaluation(
        id=f"eval-v{step:06d}-x", version=step, step=step, model=None, file="test.jsonl", tasks_digest="t",
        settings_digest="s", samples=1, right_threshold=0.5,
    )  # fmt: skip


BLAME = Blame(
    a=evaluation(0), b=evaluation(2), tasks=(ChangedTask(task_id="q", before=0.75, after=0.25),),
    measured=0.5, effects=EFFECTS, steps=(1, 2), weights=(0, 1), is_scaled=True, missing=4,
)  # fmt: skip


def steps(*numbers: int) -> list[TrainStep]:
    return [TrainStep(id=str(n), step=n, policy_version=n - 1, data=(), owner="me") for n in numbers]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(9, {0: [1, 2, 3], 4: [4, 5, 6, 7], 8: [8, 9]}), (2, {0: [1, 2, 3, 4, 5], 8: [6, 7, 8, 9]}),
     (1, {4: list(range(1, 10))})],
)  # fmt: skip
def test_a_step_gets_the_nearest_weights_to_those_it_began_with(
    limit: int, expected: dict[int, Sequence[int]]
) -> None:
    assigned = blame.assign_weights(steps(*range(1, 10)), [Weights(step) for step in (0, 4, 8)], limit)
    assert {found.step: [step.step for step in part] for found, part in assigned.items()} == expected


@pytest.mark.parametrize(("top", "count"), [("5%", 5), ("0.5%", 1), ("7", 7), ("200", 100), ("100%", 100)])
def test_the_top_is_a_number_or_a_percentage(top: str, count: int) -> None:
    assert BlameConfig(top=top).top_of(100) == count


@pytest.mark.parametrize("top", ["0", "0%", "101%", "five", "-1", "5 %%", "1.5"])
def test_any_other_top_is_refused(top: str) -> None:
    with pytest.raises(ConfigError, match="--top is"):
        BlameConfig(top=top)


def test_groups_have_sums_and_say_how_many_of_them_are_blamed() -> None:
    groups = blame.groups_of(BLAME, EFFECTS[:1], 20)
    broken, exact = groups["scorer"]
    assert (broken.name, broken.trajectories, broken.blamed) == ("broken", 2, 1)
    assert broken.effect.value == pytest.approx(0.4)
    assert broken.effect.low == pytest.approx(0.2)
    assert broken.effect.high == pytest.approx(0.6)
    assert (exact.name, exact.blamed, exact.effect.value) == ("exact", 0, pytest.approx(-0.1))
    assert [item.name for item in groups["tool"]] == ["search", "calculate", "no tool"]
    assert [item.name for item in groups["version"]] == ["1", "0–1"]
    assert [item.name for item in blame.groups_of(BLAME, (), 1)["task"]] == ["train/0/b"]


def test_ids_and_the_table_are_written(tmp_path: Path) -> None:
    flags = BlameConfig(out=str(tmp_path / "ids.txt"), csv=str(tmp_path / "all.csv"))
    blame.write_files(BLAME, EFFECTS[:2], flags)
    assert (tmp_path / "ids.txt").read_text(encoding="utf-8") == "train/0/b/0/1\ntrain/0/b/1/1\n"
    rows = (tmp_path / "all.csv").read_text(encoding="utf-8").splitlines()
    assert rows[0].startswith("record,task,step,score,advantage,scorer,tools,")
    assert rows[1].endswith("broken,search calculate,1,1,0.3")
    with pytest.raises(ConfigError, match="cannot be written"):
        blame.write_files(BLAME, EFFECTS, BlameConfig(out=str(tmp_path / "missing" / "ids.txt")))


def test_the_page_and_the_json_say_what_was_found() -> None:
    console = Console(width=140, markup=False, highlight=False)
    with console.capture() as shown:
        blame.show(BLAME, EFFECTS[:1], BlameConfig(limit=1), console)
    page = shown.get()
    assert "1 (fell): mean score 0.750 → 0.250" in page
    assert "+0.500 measured, +0.300 by the trajectories together" in page
    assert "3 of steps 1 to 2; 4 have no training data any more" in page
    content = json.loads(json.dumps(blame.to_json(BLAME, EFFECTS[:1], BlameConfig())))
    assert (content["blamed"], content["trajectories"][0]["record"]) == (1, WRONG.record)
    assert content["tasks"] == [{"task_id": "q", "before": 0.75, "after": 0.25, "change": -0.5}]
