"""``scripts/bench/train.py`` compares equal work: the same loss, and a row that fails where it is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.documents.model_call import unpack_ids

sys.path.append(str(Path(__file__).parents[3] / "scripts" / "bench"))

import train
import train_child
from train_workload import Group, load_model

GROUP = Group(trajectories=2, turns=1, prompt=12, output=8, observation=1, uneven=True)


def dapo_norm() -> float:
    """Return the gradient norm of TRL's ``dapo`` loss: -Σ A·log πθ over the step's tokens, ÷ tokens."""
    model = load_model("tiny")
    data = GROUP.data(model.config.vocab_size)
    tokens = sum(item.trainable_tokens for item in data)
    assert len({item.trainable_tokens for item in data}) > 1
    for item in data:
        ids = torch.tensor(unpack_ids(item.input_ids).tolist())
        logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        (-item.advantage * logprobs[item.spans[0].start - 1 :].sum() / tokens).backward()
    return float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize("way", ["off", "group"])
def test_the_benchmark_trains_the_loss_of_its_baseline(way: str) -> None:
    ours = train_child._ours(way, {"model": "tiny", "group": GROUP.plain(), "max_tokens": 4096, "steps": 1})
    row = train._same_gradient("gradient norm", ours, {"grad_norm": dapo_norm()})
    assert row.passed, row


def test_unequal_work_fails_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    norms: dict[str, Any] = {"trl": 1.27187, "trajectory": 1.95341, "group": 1.27187}
    common = {"cpu_seconds": 1.0, "seconds": 1.0, "peak_bytes": 1}
    bench = train.Bench(True, 1, {"tiny": "tiny"}, Path(), {})
    monkeypatch.setattr(train.Bench, "child", lambda *_, way, **__: {**common, "grad_norm": norms[way]})
    rows = train._against_trl(bench, "tiny, short outputs", "tiny", GROUP)
    assert [row.passed for row in rows if "gradient norm" in row.what] == [False, True]
