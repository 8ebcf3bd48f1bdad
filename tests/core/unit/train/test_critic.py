"""A critic beside the policy: its loss, its advantages, its warm-up, its checkpoint, and what is refused."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import numpy as np
import pytest
import torch
from fake_store import FakeStore
from tiny_models import chains, tree
from tiny_policy import write_tiny_policy
from tiny_trainer import DATA, have_same_weights, tiny_trainer
from torch import nn

from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS, CriticConfig
from agentrl.data import finalize_group
from agentrl.data.stream import whitened
from agentrl.distributed.mesh import Layout, World, single_process
from agentrl.documents.training import CheckpointState, DBRecordData
from agentrl.errors import AgentRLError, ConfigError, ModelError
from agentrl.losses.value import value_losses
from agentrl.model.value_head import VALUE_HEADS
from agentrl.observe.metric_definitions import DEFINITIONS
from agentrl.train import checkpoint
from agentrl.train.build import build_trainer, check_critic, require_buildable
from agentrl.train.controller import Controller, lead
from agentrl.train.critic import Critic, explained
from agentrl.train.lease import ThreadFence
from agentrl.train.step import PolicyTrainer
from agentrl.weights.folder import architecture

TREES = [replace(tree(seed), id=f"t/{seed}", task="t", advantage=float(seed % 2)) for seed in range(3)]
MIXED = [*TREES, *(replace(item, advantage=0.5, task=item.id) for item in chains(count=2))]
"""Trees that branch and chains, of three groups; every third of a tree's calls has a reward of its own."""


def trainer(base: Path, kind: str = "head", **flags: Any) -> PolicyTrainer:
    rate = {"head": 1e-2, "model": 1e-3}[kind]
    return tiny_trainer(base, critic=kind, advantage="reward", **{"critic_learning_rate": rate, **flags})


def critic_of(trainer: PolicyTrainer) -> Critic:
    assert trainer.critic is not None
    return trainer.critic


def weights(trainer: PolicyTrainer) -> list[torch.Tensor]:
    """The policy's and the critic's."""
    own = () if trainer.critic is None else trainer.critic.module.parameters()
    return [item.detach().clone() for item in (*trainer.policy.model.parameters(), *own)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


@pytest.mark.parametrize("clip", [0.1, math.inf])
def test_the_loss_is_the_larger_of_the_free_and_the_bounded_square(clip: float) -> None:
    generator = torch.Generator().manual_seed(0)
    values, start, target = torch.randn(3, 50, generator=generator)
    target[::7] = torch.nan
    values.requires_grad_()
    losses, clipped = value_losses(values, start, target, clip)
    columns = (column.tolist() for column in (values, start, target, losses, clipped))
    for v, s, r, loss, is_clipped in zip(*columns, strict=True):
        free, bounded = (v - r) ** 2, (min(max(v, s - clip), s + clip) - r) ** 2
        assert loss == (0 if math.isnan(r) else pytest.approx(max(free, bounded) / 2))
        assert is_clipped == (bounded > free)
    losses.sum().backward()
    assert values.grad is not None
    assert not values.grad[::7].any()
    assert bool(values.grad[clipped].any()) is False  # a value that has moved far enough stays
    assert torch.isfinite(values.grad).all()


def test_the_variance_that_values_explain() -> None:
    targets = np.array([0.0, 1.0, 2.0, np.nan])
    assert explained(targets - 5, targets) == {"explained_variance": 1.0, "value_mean": -4.0}
    assert explained(np.zeros(4), targets)["explained_variance"] == 0.0
    assert explained(-targets, targets)["explained_variance"] == pytest.approx(-3.0)
    assert explained(np.ones(4), np.ones(4)) == {"value_mean": 1.0}


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 4}, {"mini_batches": 2, "num_epochs_per_batch": 2}])
def test_a_new_head_leaves_the_policy_its_rewards_and_moves_no_weight_of_it(
    base: Path, flags: dict[str, Any]
) -> None:
    """Its values are 0, so that the first advantages are the scores; its gradient ends before the policy."""
    ours, plain = trainer(base, **flags), tiny_trainer(base, **flags)
    found, expected = ours.train(DATA).metrics, plain.train(DATA).metrics
    assert have_same_weights(ours, plain)
    assert (found["loss"], found["grad_norm"]) == (expected["loss"], expected["grad_norm"])
    assert (found["value_mean"], found["explained_variance"]) == (0.0, 0.0)
    assert any(item.any() for item in critic_of(ours).head.parameters())


@pytest.mark.parametrize("kind", ["head", "model"])
def test_packing_changes_nothing(base: Path, kind: str) -> None:
    """Neither micro-batches nor merged prefixes do; trees are cut, so that no micro-batch has a whole one."""
    flags: dict[str, Any] = {"advantage_whitening": "batch", "gae_lambda": 0.9, "gamma": 0.99}
    plain = trainer(base, kind, prefix_merging="off", **flags)
    others = [trainer(base, kind, **flags), trainer(base, kind, max_tokens=28, **flags)]
    assert len(others[1].pack(MIXED)) > len(others[0].pack(MIXED))
    for _ in range(2):
        expected = plain.train(MIXED).metrics
        for other in others:
            found = other.train(MIXED).metrics
            for name in ("loss", "grad_norm", "value_loss", "critic_grad_norm", "explained_variance"):
                assert found[name] == pytest.approx(expected[name], rel=2e-3, abs=2e-5), name
    for other in others:
        torch.testing.assert_close(weights(other), weights(plain), atol=2e-4, rtol=1e-3)
    assert expected["explained_variance"] != 0


@pytest.mark.parametrize(("kind", "over"), [("head", "turns"), ("model", "tokens")])
def test_the_critic_learns_the_returns(base: Path, kind: str, over: str) -> None:
    ours = trainer(base, kind, gae_over=over, critic_warmup_steps=30, critic_learning_rate=1e-2)
    first, *_, last = [ours.train(DATA).metrics for _ in range(12 if kind == "head" else 4)]
    assert last["explained_variance"] > 0.5 > first["explained_variance"] == 0.0
    assert last["value_loss"] < first["value_loss"] / 2


@pytest.mark.parametrize("kind", ["head", "model"])
def test_a_warm_up_trains_the_critic_alone_and_the_policys_schedule_begins_after_it(
    base: Path, kind: str
) -> None:
    ours = trainer(base, kind, critic_warmup_steps=2, warmup_steps=1)
    start = [item.clone() for item in ours.policy.model.parameters()]
    reports = []
    for step in range(4):
        before = weights(ours)
        reports.append(ours.train(DATA).metrics)
        assert not same(before, weights(ours))
        assert all(map(torch.equal, start, ours.policy.model.parameters())) == (step < 2)
    assert [report["lr"] for report in reports] == [0.0, 0.0, 5e-4, 1e-3]
    assert [report["grad_norm"] > 0 for report in reports] == [False, False, True, True]
    assert all(report["entropy"] > 0 for report in reports)


def test_values_stay_those_of_the_steps_start_and_are_clipped_around_them(base: Path) -> None:
    once, often = trainer(base), trainer(base, num_epochs_per_batch=6, value_clip=0.01)
    assert once.train(DATA).metrics["value_clipped_fraction"] == 0.0
    report = often.train(DATA).metrics
    assert report["value_clipped_fraction"] > 0.1
    free = trainer(base, num_epochs_per_batch=6, value_clip=math.inf)
    assert free.train(DATA).metrics["value_clipped_fraction"] == 0.0
    assert not same(weights(free)[-2:], weights(often)[-2:])


def advantages(trainer: PolicyTrainer, data: list[DBRecordData]) -> dict[str, list[float]]:
    """The advantages that a step gives to the tokens of each trajectory."""
    ((forest,),), _ = critic_of(trainer).attach(trainer.model, [trainer.pack(data)], [data])
    return {
        item.id: forest.advantage[forest.trajectory[forest.row] == number].tolist()
        for number, item in enumerate(data)
    }


def test_whitening_is_of_the_estimated_advantages_and_a_faulty_call_gets_at_most_0(base: Path) -> None:
    data = [DATA[0], replace(DATA[1], faulty_calls=(0,))]
    plain, white = (advantages(trainer(base, advantage_whitening=w), data) for w in ("none", "batch"))
    assert plain == {data[0].id: [-1.0] * 4, data[1].id: [0.0] * 4}  # it would be 1
    expected = whitened([-1.0, 1.0], [4, 4])
    assert white == {data[0].id: [pytest.approx(expected[0])] * 4, data[1].id: [0.0] * 4}


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_values_that_are_not_finite_skip_the_step(base: Path, broken: float) -> None:
    ours = trainer(base, advantage_whitening="batch")
    ours.train(DATA)
    with torch.no_grad():
        next(critic_of(ours).head.parameters())[:] = broken
    before = weights(ours)
    assert not ours.train(DATA).is_finite
    assert all(
        torch.equal(*(x.nan_to_num() for x in pair)) for pair in zip(before, weights(ours), strict=True)
    )


def test_trajectories_without_a_reward_teach_the_critic(base: Path) -> None:
    spans = tuple(replace(span, advantage=0.0) for span in DATA[0].spans)
    data = [replace(DATA[0], advantage=0.0, spans=spans), *DATA[1:]]
    metrics = trainer(base).train(data).metrics
    assert "computed_fraction" not in metrics
    assert metrics["value_loss"] == pytest.approx((len(DATA) - 1) / len(DATA) / 2)


def controller(base: Path, weights: Path | None = None, **flags: Any) -> Controller:
    values = {
        "model_name_or_path": str(base), "learning_rate": 1e-2, "lr_scheduler_type": "cosine",
        "advantage": "reward", "critic_learning_rate": 1e-2, **flags,
    }  # fmt: skip
    configs = Configs.of(GROUPS, values, values)
    return lead(single_process(), lambda: build_trainer(configs, weights=weights, total_steps=8))


def save(root: Path, base: Path, trained: Controller, step: int) -> Path:
    state = CheckpointState(
        run_name="run", step=step, policy_version=step, architecture=architecture(base),
        train_steps=tuple(f"1/{i + 1}" for i in range(step)),
    )  # fmt: skip
    fence = Mock(spec=ThreadFence)
    fence.discard.side_effect = lambda names: names
    return checkpoint.begin(root, state, trained).finish(limit=9, fence=fence)


def reports(trained: Controller, steps: int) -> Iterator[list[float]]:
    names = ("loss", "lr", "grad_norm", "value_loss", "critic_grad_norm", "value_mean")
    for _ in range(steps):
        metrics = trained.train(MIXED, None, {}).metrics
        yield [metrics[name] for name in names]


@pytest.mark.parametrize(("kind", "rank"), [("head", 4), ("model", 0)])
def test_a_resumed_critic_goes_on_exactly_also_in_its_warm_up(
    base: Path, tmp_path: Path, kind: str, rank: int
) -> None:
    """Neither a save nor a resume changes a number, whether the policy's optimizer has begun or not."""
    flags = {"critic": kind, "lora_rank": rank, "critic_warmup_steps": 1}
    expected = list(reports(controller(base, **flags), 3))
    saved = controller(base, **flags)
    assert list(reports(saved, 1)) == expected[:1]
    early = save(tmp_path, base, saved, 1)
    assert list(reports(saved, 1)) == expected[1:2]
    late = save(tmp_path, base, saved, 2)
    assert list(reports(saved, 1)) == expected[2:]
    for folder, done in ((early, 1), (late, 2)):
        found = checkpoint.read_checkpoint(folder)
        resumed = controller(base, found.model, **flags)
        checkpoint.restore(found, resumed.trainer)
        assert list(reports(resumed, 3 - done)) == expected[done:]
    assert 0 < critic_of(resumed.trainer).optimizer.param_groups[0]["lr"] < 1e-2
    for item in (saved, resumed):
        item.end()


def test_a_checkpoint_without_a_critic_is_refused(base: Path, tmp_path: Path) -> None:
    without = controller(base, critic="off")
    without.train(DATA, None, {})
    found = checkpoint.read_checkpoint(save(tmp_path, base, without, 1))
    with pytest.raises(ModelError, match="holds no critic") as refused:
        checkpoint.restore(found, controller(base, found.model, critic="head").trainer)
    assert "--model_name_or_path" in str(refused.value.hint)


@pytest.mark.parametrize("kind", ["head", "model"])
def test_engines_get_the_policy_alone(base: Path, kind: str) -> None:
    ours, plain = trainer(base, kind), tiny_trainer(base)
    ours.train(DATA)
    names = [[part.name for part in each.policy.served.parts()] for each in (ours, plain)]
    assert names[0] == names[1]


def test_a_critic_of_another_model(base: Path, tmp_path: Path) -> None:
    """It may be of another size; it has to know the policy's ids."""
    small = write_tiny_policy(tmp_path / "small", hidden_size=16)
    ours = trainer(base, "model", critic_model=str(small))
    critic = critic_of(ours)
    assert critic.trunk is not None
    assert next(critic.head.parameters()).shape == (1, 16)
    before = [item.clone() for item in critic.trunk.model.parameters()]
    metrics = [ours.train(DATA).metrics["explained_variance"] for _ in range(3)]
    assert metrics[-1] > 0
    assert not all(map(torch.equal, before, critic.trunk.model.parameters()))
    config = (small / "config.json").read_text()
    (small / "config.json").write_text(config.replace('"vocab_size": 259', '"vocab_size": 300'))
    with pytest.raises(ModelError):
        trainer(base, "model", critic_model=str(small))
    own = {"model_name_or_path": str(base), "critic": "model"}
    with pytest.raises(ModelError, match="has 300 token ids, and the policy 259"):
        require_buildable(configs(**own, critic_model=str(small)), World(torch.device("cpu")))
    with pytest.raises(AgentRLError, match="typo"):
        require_buildable(configs(**own, critic_model=str(tmp_path / "typo")), World(torch.device("cpu")))


def configs(**flags: Any) -> Configs:
    return Configs.of(GROUPS, {"critic": "head", **flags}, flags)


def test_a_layout_and_a_warm_up_that_cannot_train_are_refused_by_name() -> None:
    check_critic(configs(critic_warmup_steps=3, max_steps=4), Layout(tp=2, cp=2, dp_shard=2))
    with pytest.raises(ConfigError, match="--critic head with --pp_size 2"):
        check_critic(configs(), Layout(pp=2))
    with pytest.raises(ConfigError, match="--critic_warmup_steps 4 in a run of 4 steps, by --max_steps"):
        check_critic(configs(critic_warmup_steps=4, max_steps=4), Layout())


class Halves(nn.Module):
    """A head that returns half of the values."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.layer = nn.Linear(hidden_size, 1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return values of every other state."""
        return self.layer(states[::2])  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (Halves, r"shape \[1, 1\] for 2 hidden states"),
        (lambda size: size, "returned 32, not a torch.nn.Module"),
        (lambda size: nn.Flatten(0), r"shape \[64\]"),
        (lambda size: nn.Linear(size, 1).requires_grad_(False), "nothing to train"),
        (
            lambda size: nn.Sequential(nn.Linear(size, 4).requires_grad_(False), nn.Linear(4, 1)),
            "0.weight is not trained",
        ),
        (lambda: None, "takes 0 positional arguments"),
    ],
)
def test_a_head_that_cannot_be_used_is_named(base: Path, make: Any, said: str) -> None:
    VALUE_HEADS.add(make, "mine")
    with pytest.raises(ConfigError, match=f"the value head mine cannot be used: .*{said}"):
        trainer(base, critic_head="mine")


@pytest.mark.parametrize("publish", ["delta"])
async def test_a_run_publishes_in_the_warm_up_too_and_goes_on_in_it(
    store: FakeStore, start: Any, publish: str
) -> None:
    """Versions of equal weights are published, so that no sampler waits; each metric has a definition."""
    flags = {"max_steps": 3, "publish": publish, "save_total_limit": 9}
    critic = CriticConfig(critic="head", critic_warmup_steps=2)
    first = await start(critic=critic, **flags)
    await first.run()
    for step in (2, 3):
        shutil.rmtree(first.publisher.folders.output / f"checkpoint-00000{step}")
    assert len({store.versions[number].digest for number in (1, 2)}) == 1 < len(store.versions)
    resumed = await start(critic=critic, **flags)
    assert (resumed.progress.step, resumed.controller.trainer.critic.is_warming_up) == (1, True)
    await resumed.run()
    found = [
        [step.metrics for step in store.train_steps.values() if step.id.startswith(f"{attempt}/")]
        for attempt in (1, 2)
    ]
    assert [each["lr"] for each in found[0]] == [0.0, 0.0, 1e-2]
    for name in ("loss", "value_loss", "explained_variance", "critic_grad_norm", "grad_norm"):
        assert [each[name] for each in found[0][1:]] == [each[name] for each in found[1]], name
    assert set(found[1][-1]) <= set(DEFINITIONS)


async def test_groups_whose_scorer_rewards_roles_are_refused_by_name() -> None:
    """One critic cannot tell the rewards of roles apart."""
    records = [SimpleNamespace(role_rewards={"solver": 1.0})]
    groups = SimpleNamespace(stored=AsyncMock(return_value=SimpleNamespace(records=records)))
    with patch.object(finalize_group, "group_problem", return_value=None):
        for refuses, found in ((False, {}), (True, "its scorer rewards roles")):
            verify = finalize_group.verifier(SimpleNamespace(groups=groups), refuses_roles=refuses)  # type: ignore[arg-type]
            problems = await verify(DATA[:1])
            assert found in problems[DATA[0].task] if refuses else problems == found
