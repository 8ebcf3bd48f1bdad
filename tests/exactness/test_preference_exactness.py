"""DPO and KTO of a step, packed, cut and spread over ranks, against their formulas on the plain model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from agentrl.data.forest import TokenForest
from agentrl.data.planner import SequenceRows, build_micro_batches
from agentrl.documents.model_call import unpack_floats, unpack_ids
from agentrl.documents.training import DBRecordData
from agentrl.losses.settings import LossSettings
from exactness.models import VOCABULARY, tiny_model
from exactness.reference import AGES, longest_sequence, path_to, taken
from exactness.steps import make_step, random_shape
from exactness.test_plan_exactness import on_ranks

pytestmark = [pytest.mark.exactness, pytest.mark.timeout(300)]

LIMIT = 1e-5
FLAGS: dict[str, dict[str, Any]] = {
    "DPO": {"preference_beta": 0.3},
    "KTO": {"preference_beta": 0.3, "kto_desirable_weight": 1.5, "kto_undesirable_weight": 0.7},
}


def scored_step(seed: int) -> list[DBRecordData]:
    """Trajectories with scores of 0, 1/2 and 1; some groups have one trajectory, or agree."""
    data = make_step(random_shape(seed), seed)
    return [replace(item, score=(7 * index + seed) % 3 / 2) for index, item in enumerate(data)]


def log_ratios(model: Any, data: Sequence[DBRecordData]) -> torch.Tensor:
    """Σ log πθ/π_ref of each trajectory, a call at a time; its stored logprobs stand for the reference's."""
    sums = []
    for item in data:
        ids, reference = unpack_ids(item.input_ids), unpack_floats(item.behavior_logprobs)
        total = -torch.tensor(float(reference.sum()))
        for span in item.spans:
            path = path_to(item.nodes, span.end)
            logits = model(input_ids=torch.tensor([[int(ids[at]) for at in path]])).logits[0]
            logprobs = torch.log_softmax(logits.float() / span.temperature, -1)
            for index in range(span.start, span.end):
                total = total + logprobs[path.index(index) - 1, int(ids[index])]
        sums.append(total)
    return torch.stack(sums)


def dpo(h: torch.Tensor, data: Sequence[DBRecordData]) -> torch.Tensor:
    losses = []
    for task in dict.fromkeys(item.task for item in data):
        mine = [(item.score, -place, place) for place, item in enumerate(data) if item.task == task]
        best, worst = max(mine)[2], min((score, -before, place) for score, before, place in mine)[2]
        losses.append(-torch.nn.functional.logsigmoid(0.3 * (h[best] - h[worst])))
    return torch.stack(losses).mean()


def kto(h: torch.Tensor, data: Sequence[DBRecordData]) -> torch.Tensor:
    z = h.detach().mean().clamp(min=0)
    losses = [
        1.5 - 1.5 * torch.sigmoid(0.3 * (own - z))
        if item.score > 0.5
        else 0.7 - 0.7 * torch.sigmoid(0.3 * (z - own))
        for own, item in zip(h, data, strict=True)
    ]
    return torch.stack(losses).mean()


def referenced(forest: TokenForest) -> TokenForest:
    return replace(forest, reference_logprob=forest.behavior_logprob)


@pytest.mark.parametrize("loss", FLAGS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**16),
    ranks=st.integers(1, 3),
    merging=st.sampled_from(["off", "trajectory", "group"]),
    room=st.integers(0, 60),
    rows=st.sampled_from([None, SequenceRows(0, padded=True), SequenceRows(12, padded=False)]),
)
def test_a_step_equals_the_formula(
    loss: str, seed: int, ranks: int, merging: Any, room: int, rows: SequenceRows | None
) -> None:
    options = LossSettings(loss_calculater=loss, **FLAGS[loss])
    data = list(options.loss.choose(scored_step(seed)))
    assume(data)
    model = tiny_model("llama gqa, tied")
    model.set_attn_implementation("sdpa")
    h = log_ratios(model, data)
    expected_loss = {"DPO": dpo, "KTO": kto}[loss](h, data)
    expected_loss.backward()  # type: ignore[no-untyped-call]
    expected = taken(model, float(expected_loss.detach()))
    forests = build_micro_batches(
        data, longest_sequence(data) + room, vocab_size=VOCABULARY, merging=merging, ranks=ranks, ages=AGES,
        rows=rows,
    )  # fmt: skip
    forests = [referenced(forest) for forest in forests]
    reports, computed = on_ranks(model, forests, options, ranks, data)
    assert computed.deviation(expected) <= LIMIT
    assert reports[0]["trajectories"] == len(data)
