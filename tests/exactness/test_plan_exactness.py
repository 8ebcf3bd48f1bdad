"""How a step is split and ordered, and over how many ranks, changes neither its loss nor a gradient."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agentrl.data.forest import TokenForest
from agentrl.data.planner import SequenceRows, build_micro_batches
from agentrl.distributed.mesh import Layout, Mesh
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.training import DBRecordData
from agentrl.losses.loss import LOSSES
from agentrl.losses.settings import LossSettings
from agentrl.train.step import forward_backward
from exactness.models import VOCABULARY, tiny_model
from exactness.reference import AGES, Computed, longest_sequence, plain_step
from exactness.steps import make_step, random_shape

PER_TRAJECTORY = [
    name for name in LOSSES.names() if not (LOSSES.get(name).compares or LOSSES.get(name).ignores_score)
]
"""Losses of a trajectory by itself; ``test_preference_exactness.py`` has those that compare some."""

pytestmark = [pytest.mark.exactness, pytest.mark.timeout(300)]

LIMIT = 1e-5


WHOLE: dict[str, dict[str, Any]] = {
    "GRPO": {"importance_correction": "seq_mask:0.7:1.5,seq_kl:0.6"},
    "MINIRL": {"importance_correction": "seq_tis:1.5", "old_logprobs": "recompute"},
    "GSPO": {"strict_in_bound": True, "epsilon": 0.2, "old_logprobs": "loglinear"},
}
"""Settings that read sums over whole trajectories, whichever rank holds their tokens."""


class Meeting:
    """Sums the values of simulated ranks, each of which is a thread."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._brought: list[Any] = [None] * ranks

    def sum(self, rank: int, value: Any) -> Any:
        self._brought[rank] = value
        self._barrier.wait()
        total = sum(self._brought[1:], self._brought[0])
        self._barrier.wait()
        return total


class ThreadMesh(Mesh):
    """The mesh of a simulated rank; all ranks train different data."""

    def __init__(self, meeting: Meeting, rank: int, ranks: int) -> None:
        super().__init__(Layout(dp_replicate=ranks))
        self.__dict__.update(meeting=meeting, place=rank)

    def coordinate(self, name: str) -> int:
        return 0

    def sum(self, tensor: Tensor, *, stages: bool = False, tokens: bool = False) -> Tensor:
        return cast(Tensor, self.sum_reports(tensor))

    def sum_reports(self, report: Any) -> Any:
        return self.__dict__["meeting"].sum(self.__dict__["place"], report)


def in_threads(work: Callable[[int], Any], count: int) -> list[Any]:
    """Run ``work(rank)`` for all ranks at once, and return the results."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(work, range(count)))


def on_ranks(
    model: Any,
    forests: list[TokenForest],
    options: LossSettings,
    ranks: int,
    data: Sequence[DBRecordData] = (),
) -> tuple[list[dict[str, Any]], Computed]:
    """Return the ranks' reports of one update, and its loss and summed gradients."""
    meeting = Meeting(ranks)
    models = [copy.deepcopy(model) for _ in range(ranks)]
    reports = in_threads(
        lambda rank: forward_backward(
            ParallelModel(models[rank], ThreadMesh(meeting, rank, ranks)), forests[rank::ranks], options,
            data=data,
        ),
        ranks,
    )  # fmt: skip
    parameters = [dict(each.named_parameters()) for each in models]
    gradients = {
        name: torch.stack([grad for each in parameters if (grad := each[name].grad) is not None]).sum(0)
        for name in parameters[0]
    }
    return reports, Computed(reports[0]["loss"], gradients)


@pytest.mark.parametrize("loss", PER_TRAJECTORY)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    ranks=st.integers(2, 4),
    merging=st.sampled_from(["off", "trajectory", "group"]),
    room=st.integers(0, 60),
    token_level=st.booleans(),
    rows=st.sampled_from([None, SequenceRows(0, padded=True), SequenceRows(12, padded=False)]),
)
def test_ranks_add_up_to_the_plain_step(
    loss: str, seed: int, ranks: int, merging: Any, room: int, token_level: bool, rows: SequenceRows | None
) -> None:
    model = tiny_model("llama gqa, tied")
    options = LossSettings(loss_calculater=loss, token_level_loss=token_level, **WHOLE.get(loss, {}))
    data = make_step(random_shape(seed), seed)
    assume(data)
    forests = build_micro_batches(
        data, longest_sequence(data) + room, vocab_size=VOCABULARY, merging=merging, ranks=ranks, ages=AGES,
        rows=rows,
    )  # fmt: skip
    reports, computed = on_ranks(model, forests, options, ranks)
    assert len({report["loss"] for report in reports}) == 1
    assert computed.deviation(plain_step(model, data, options)) <= LIMIT


@pytest.mark.parametrize("loss", PER_TRAJECTORY)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(seed=st.integers(0, 2**16), room=st.integers(0, 60), random=st.randoms(use_true_random=False))
def test_the_order_of_data_and_of_micro_batches_changes_nothing(
    loss: str, seed: int, room: int, random: Any
) -> None:
    model = tiny_model("qwen3 gqa, tied")
    options = LossSettings(loss_calculater=loss, token_level_loss=False)
    data = make_step(random_shape(seed), seed)
    assume(data)
    expected = plain_step(model, data, options)
    random.shuffle(data)
    forests = build_micro_batches(data, longest_sequence(data) + room, vocab_size=VOCABULARY, ages=AGES)
    random.shuffle(forests)
    report = forward_backward(ParallelModel(model), forests, options)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert Computed(report["loss"], gradients).deviation(expected) <= LIMIT
    assert report["trajectories"] == len(data)
