"""A step that distils from a teacher's likeliest ids trains the reverse KL, however it is split."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, chains, tiny_model

from agentrl.data.forest import forest_from_data
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.record import TokenColumns, TopLogprobs
from agentrl.documents.training import DBRecordData
from agentrl.losses.settings import LossSettings
from agentrl.train.step import forward_backward

SETTINGS = LossSettings(loss_calculater="OPD", old_logprobs="recompute")


def taught() -> tuple[list[DBRecordData], list[np.ndarray]]:
    """Trajectories whose teacher has a logprob of every id, and these logprobs [T, V] of each."""
    rng = np.random.default_rng(0)
    data, teachers = [], []
    for item in chains():
        logits = torch.from_numpy(rng.normal(size=(item.trainable_tokens, VOCABULARY)))
        logprobs = logits.log_softmax(-1).half().float().numpy()
        spans = [np.arange(span.start, span.end) for span in item.spans]
        sampled = unpack_ids(item.input_ids)[np.concatenate(spans)]
        values = logprobs[np.arange(len(sampled)), sampled]
        top = TopLogprobs.of([dict(enumerate(row.tolist())) for row in logprobs])
        columns = TokenColumns({"teacher": values}, {"teacher": top}).pack()
        data.append(replace(item, columns=columns))
        teachers.append(logprobs)
    return data, teachers


def step(data: list[DBRecordData], size: int) -> tuple[float, torch.Tensor]:
    """Loss and gradient of the embeddings with ``size`` trajectories in a micro-batch."""
    model = tiny_model("qwen3")
    forests = [forest_from_data(data[start : start + size]) for start in range(0, len(data), size)]
    report = forward_backward(ParallelModel(model), forests, SETTINGS)
    assert "kl_teacher" in report
    return report["loss"], model.get_input_embeddings().weight.grad


def test_the_loss_of_a_step_is_the_mean_divergence_of_its_tokens() -> None:
    data, teachers = taught()
    model = tiny_model("qwen3")
    total = 0.0
    for item, teacher in zip(data, teachers, strict=True):
        ids = torch.from_numpy(unpack_ids(item.input_ids).astype(np.int64))[None]
        logits = model(input_ids=ids).logits[0].detach()
        places = np.concatenate([np.arange(span.start, span.end) for span in item.spans])
        heat = np.concatenate([np.full(span.end - span.start, span.temperature) for span in item.spans])
        policy = (logits[places - 1] / torch.from_numpy(heat)[:, None].float()).log_softmax(-1)
        total += float((policy.exp() * (policy - torch.from_numpy(teacher))).sum())
    loss, _ = step(data, len(data))
    assert loss == pytest.approx(total / sum(item.trainable_tokens for item in data), rel=2e-3)


def test_micro_batches_change_neither_loss_nor_gradient() -> None:
    data, _ = taught()
    whole, gradient = step(data, len(data))
    for size in (1, 2):
        loss, found = step(data, size)
        assert loss == pytest.approx(whole, rel=1e-5)
        torch.testing.assert_close(found, gradient, atol=1e-5, rtol=1e-4)
