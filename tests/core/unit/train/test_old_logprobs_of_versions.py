"""``--old_logprobs version``: the filler's logprobs, bit by bit, and what a step makes of its column."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_policy import write_tiny_policy
from tiny_trainer import DATA, have_same_weights, tiny_trainer
from training_data import group, sampled_by
from transformers import AutoModelForCausalLM

from agentrl.config.load import Configs
from agentrl.config.schema import GROUPS
from agentrl.config.training import VERSION_LOGPROBS
from agentrl.data.planner import packing_problem
from agentrl.distributed.published_policy import PublishedPolicy
from agentrl.documents.model_call import pack_floats
from agentrl.documents.record import TokenColumns
from agentrl.documents.training import DBRecordData
from agentrl.losses.compute import old_logprobs
from agentrl.train.step import FrozenLogprobs, PolicyTrainer

Values = np.ndarray[Any, np.dtype[np.float32]]


def filler(base: Path, **flags: Any) -> PublishedPolicy:
    """Return what computes the column of a run with these flags."""
    values = {"model_name_or_path": str(base), **flags}
    return PublishedPolicy(Configs.of(GROUPS, values, values))


def recomputed(trainer: PolicyTrainer, item: DBRecordData) -> Values:
    """Return what ``--old_logprobs recompute`` takes for one trajectory, in order of spans."""
    forests = FrozenLogprobs(start=True).attach(trainer.model, trainer.pack([item]), trainer.options)
    values = np.full(item.trainable_tokens, np.nan, np.float32)
    for forest in forests:
        assert forest.start_logprob is not None
        values[forest.label] = forest.start_logprob
    return values


def with_column(item: DBRecordData, values: Values) -> DBRecordData:
    return replace(item, columns=TokenColumns({VERSION_LOGPROBS: values}).pack())


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of another version."""
    return write_tiny_policy(tmp_path_factory.mktemp("model") / "other", seed=3)


@pytest.mark.parametrize("merging", ["off", "group"])
@pytest.mark.parametrize("autocast", ["false", "true"])
def test_each_versions_logprobs_are_the_trainers_bit_for_bit(
    base: Path, other: Path, merging: str, autocast: str
) -> None:
    flags = {"prefix_merging": merging, "autocast_bf16": autocast}
    policy, found = filler(base, **flags), {}
    trainers = {folder: tiny_trainer(folder, **flags) for folder in (base, other)}
    for folder in (other, base, other):  # forwards, back, and forwards again
        policy.load(folder)
        for item in DATA:
            found[folder, item.id] = policy.logprobs(item, {})
            assert np.array_equal(found[folder, item.id], recomputed(trainers[folder], item))
    assert all(not np.array_equal(found[base, item.id], found[other, item.id]) for item in DATA)


@pytest.mark.parametrize("autocast", ["true", "false"])
def test_published_bfloat16_weights_are_exact_where_products_are_bfloat16(
    base: Path, tmp_path: Path, autocast: str
) -> None:
    """The trainer rounds its float32 weights for each product, as publication has rounded them once."""
    rounded = tmp_path / "rounded"
    model: Any = AutoModelForCausalLM.from_pretrained(str(base))
    model.to(torch.bfloat16).save_pretrained(rounded)
    policy, trainer = filler(base, autocast_bf16=autocast), tiny_trainer(base, autocast_bf16=autocast)
    policy.load(rounded)
    for item in DATA:
        found, own = policy.logprobs(item, {}), recomputed(trainer, item)
        assert np.array_equal(found, own) == (autocast == "true")
        np.testing.assert_allclose(found, own, atol=5e-3, rtol=0)


def test_a_whole_step_differs_from_single_trajectories_by_rounding_at_most(base: Path) -> None:
    """A matrix product may add in another order where it has other rows: so tolerance is all there is."""
    policy, trainer = filler(base), tiny_trainer(base)
    (forest,) = FrozenLogprobs(start=True).attach(trainer.model, trainer.pack(DATA), trainer.options)
    assert forest.start_logprob is not None
    for number, item in enumerate(DATA):
        here = forest.trajectory[forest.row] == number
        whole = forest.start_logprob[here][np.argsort(forest.label[here])]
        np.testing.assert_allclose(policy.logprobs(item, {}), whole, atol=2e-6, rtol=0)


@pytest.mark.parametrize("updates", [{}, {"num_epochs_per_batch": 2, "mini_batches": 2}], ids=["one", "four"])
def test_at_age_0_a_step_is_that_of_recompute_bit_for_bit(base: Path, updates: dict[str, int]) -> None:
    """Whatever the column has: the trainer has the weights of that version itself."""
    data = [with_column(item, np.full(4, -1.5, np.float32)) for item in DATA]
    flags = {"importance_correction": "tis:2", **updates}
    ours = tiny_trainer(base, old_logprobs="version", **flags)
    theirs = tiny_trainer(base, old_logprobs="recompute", **flags)
    one, other = ours.train(data), theirs.train(data)
    assert have_same_weights(ours, theirs)
    same = {
        name: value for name, value in other.metrics.items() if not name.startswith(("seconds", "t", "m"))
    }
    assert {name: one.metrics[name] for name in same} == same
    gap = float(np.mean([np.abs(recomputed(tiny_trainer(base), item) + 1.5).mean() for item in DATA]))
    assert one.metrics["version_gap"] == pytest.approx(gap, abs=1e-5)


def test_older_tokens_have_their_versions_logprobs_and_two_figures(base: Path, other: Path) -> None:
    """Version 0 is ``other``, version 1 the weights that the step begins with; μ is 0.1 nats off."""
    policy, trainer = filler(base), tiny_trainer(base, old_logprobs="version")
    policy.load(other)
    data = []
    for item in group("x"):
        spans = sampled_by(item, 0, 1)
        at_version = np.concatenate([policy.logprobs(item, {})[:2], recomputed(trainer, item)[2:]])
        behavior = pack_floats((at_version + 0.1).tolist())
        data.append(replace(with_column(spans, at_version), behavior_logprobs=behavior))
    metrics = trainer.train(data, {0: 1, 1: 0}).metrics
    assert metrics["kl_mismatch"] == pytest.approx(np.expm1(-0.1) + 0.1, rel=1e-4)
    staleness = []
    for item in data:
        ratio = recomputed(tiny_trainer(base), item)[:2] - policy.logprobs(item, {})[:2]
        staleness += [*(np.expm1(ratio) - ratio), 0.0, 0.0]
    assert metrics["kl_staleness"] == pytest.approx(np.mean(staleness), rel=1e-3)
    assert metrics["version_gap"] < 1e-6


def test_version_is_the_column_but_at_age_0() -> None:
    current, behavior, column = (
        torch.tensor([-1.0, -2.0]),
        torch.tensor([-3.0, -3.0]),
        torch.tensor([-4.0, -5.0]),
    )
    found = old_logprobs("version", current, behavior, torch.tensor([0, 2]), column)
    assert found.tolist() == [-1.0, -5.0]
    with pytest.raises(ValueError, match="has no column 'version_logprobs'"):
        old_logprobs("version", current, behavior, torch.tensor([0, 0]))


def test_a_step_refuses_tokens_without_a_value_by_name() -> None:
    values = np.array([-1.0, np.nan, -1.0, np.nan], np.float32)

    def problem(item: DBRecordData) -> str | None:
        return packing_problem(item, vocab_size=259, max_tokens=99, column=VERSION_LOGPROBS)

    assert problem(with_column(DATA[0], np.zeros(4, np.float32))) is None
    assert problem(with_column(DATA[0], values)) == (
        "2 of its 4 trainable tokens have no value in column version_logprobs"
    )
    assert str(problem(DATA[0])).startswith("4 of its 4 trainable tokens")
