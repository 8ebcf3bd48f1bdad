"""Values of single tokens are put back where their trajectories have them, however a step is packed."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import AGES, VOCABULARY, chains, plain_logprobs, tree
from tiny_trainer import have_same_weights, tiny_trainer
from training_data import group, sampled_by

from agentrl.data.forest import TokenForest, forest_from_data
from agentrl.data.planner import PrefixMerging, build_micro_batches
from agentrl.data.stream import Freshness
from agentrl.distributed.mesh import Mesh
from agentrl.documents.model_call import unpack_floats
from agentrl.documents.training import DBRecordData
from agentrl.train import step as step_module
from agentrl.train.step import TokenRecorder, TokenValues, choose_trajectories, split_updates

CPU = torch.device("cpu")


def several() -> list[DBRecordData]:
    """Chains and trees of two groups; the trajectories of a group begin alike."""
    items = [*chains(), tree(1), *chains(2, count=2), tree(3)]
    return [replace(item, id=f"{n}", record=f"{n}", task=f"q{n % 2}") for n, item in enumerate(items)]


def recorded(forests: Sequence[TokenForest], recorder: TokenRecorder) -> dict[str, TokenValues]:
    """The values, if a token's logprob is twice what the sampler stored and its entropy is its advantage."""
    for forest in forests:
        behavior, advantage = map(torch.from_numpy, (forest.behavior_logprob, forest.advantage))
        recorder.add(forest, 2 * behavior, advantage)
    return {values.record: values for values in recorder.collect(Mesh())}


def assert_is_of(values: TokenValues, item: DBRecordData) -> None:
    """Each token has its own values."""
    lengths = [span.end - span.start for span in item.spans]
    assert values.spans == item.spans
    np.testing.assert_allclose(values.log_ratio, unpack_floats(item.behavior_logprobs), rtol=1e-6)
    np.testing.assert_allclose(
        values.entropy, np.repeat([span.advantage for span in item.spans], lengths), rtol=1e-6
    )


@pytest.mark.parametrize("merging", ["off", "trajectory", "group"])
@pytest.mark.parametrize("max_tokens", [24, 4096])
def test_every_token_gets_its_own_values(merging: PrefixMerging, max_tokens: int) -> None:
    data = several()
    forests = build_micro_batches(
        data, max_tokens, vocab_size=VOCABULARY, merging=merging, ages=AGES, ranks=2
    )
    if max_tokens == 24 and merging != "off":
        assert any(forest.holds_parts for forest in forests)
        assert any(not forest.is_chains for forest in forests)
    found = recorded(forests, TokenRecorder(data, {item.id for item in data}, CPU))
    for item in data:
        assert_is_of(found[item.id], item)


def test_only_chosen_trajectories_are_recorded_and_others_change_nothing() -> None:
    data = several()
    chosen = {data[1].id, data[5].id}
    forests = build_micro_batches(data, 24, vocab_size=VOCABULARY, ages=AGES)
    found = recorded(forests, TokenRecorder(data, chosen, CPU))
    assert found.keys() == chosen
    for number in (1, 5):
        assert_is_of(found[data[number].id], data[number])


def test_masked_tokens_have_no_values() -> None:
    whole = sampled_by(group("a")[0], 0, 5)
    data = [Freshness(max_staleness=1, policy="mask").weigh(whole, {0: 5, 5: 0})]
    assert [span.version for span in data[0].spans] == [5]
    forests = build_micro_batches(data, 99, vocab_size=250)
    assert_is_of(recorded(forests, TokenRecorder(data, {whole.id}, CPU))[whole.id], data[0])


def test_the_first_trajectories_that_fit_are_chosen() -> None:
    data = group("a", size=4)
    big = replace(data[1], trainable_tokens=9)
    assert choose_trajectories([data[0], big, data[2], data[3]], 8) == {data[0].id, data[2].id}
    assert choose_trajectories(data, 3) == frozenset()


DATA = [*group("a", size=3), *group("b")]
trainer = partial(tiny_trainer, max_tokens=24, learning_rate=1e-2)


def entropies(model: Any, item: DBRecordData) -> torch.Tensor:
    """Of the trained tokens of a trajectory, from the model's plain logits."""
    ids = torch.from_numpy(np.frombuffer(item.input_ids, "<i4").astype(np.int64))
    chosen = torch.log_softmax(model(input_ids=ids[None]).logits[0].float(), -1)[5:9]
    return -(chosen.exp() * chosen).sum(-1)


def test_a_step_reports_what_plain_logits_of_each_trajectory_give(base: Path) -> None:
    policy = trainer(base)
    before = copy.deepcopy(policy.policy.model)
    before.set_attn_implementation("sdpa")
    found = policy.train(DATA).tokens
    assert [values.record for values in found] == [item.id for item in DATA]
    for item, values in zip(DATA, found, strict=True):
        with torch.no_grad():
            expected = plain_logprobs(before, forest_from_data([item])).numpy() + 5.5
            np.testing.assert_allclose(values.log_ratio, expected, atol=1e-5)
            np.testing.assert_allclose(values.entropy, entropies(before, item).numpy(), atol=1e-5)


def test_recording_changes_no_training_and_a_limit_of_zero_records_nothing(base: Path) -> None:
    with_values, without = trainer(base), trainer(base, token_statistics_mib=0.0)
    assert with_values.train(DATA).tokens
    assert without.train(DATA).tokens == []
    assert have_same_weights(with_values, without)


def test_the_values_are_those_of_the_first_pass_up_to_an_update_that_is_not_finite(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twice, by_hand = trainer(base, num_epochs_per_batch=2, mini_batches=2), trainer(base)
    parts = split_updates(DATA, 2)
    expected = [values for part in parts for values in by_hand.train(part).tokens]
    found = twice.train(DATA).tokens
    assert [values.record for values in found] == [values.record for values in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.log_ratio, other.log_ratio)

    plain, seen = step_module.forward_backward, []

    def breaks(*arguments: Any, **named: Any) -> dict[str, Any]:
        seen.append(plain(*arguments, **named))
        return seen[-1] | ({"loss": float("nan")} if len(seen) == 2 else {})

    monkeypatch.setattr(step_module, "forward_backward", breaks)
    cut = trainer(base, mini_batches=2).train(DATA).tokens
    assert [values.record for values in cut] == [item.id for item in parts[0]]


def test_labels_count_a_trajectorys_tokens_in_every_micro_batch() -> None:
    data = several()
    forests = build_micro_batches(data, 24, vocab_size=VOCABULARY, ages=AGES)
    for number, item in enumerate(data):
        labels = [forest.label[forest.trajectory[forest.row] == number] for forest in forests]
        assert sorted(np.concatenate(labels)) == list(range(item.trainable_tokens))
