"""An agent that samples its calls in its own way, on a real engine: on-policy ratios stay 1."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rollout_fakes import OneEngine, make_rollout
from served_engine import Served, serve_locally
from tiny_policy import write_tiny_policy
from transformers import Qwen3ForCausalLM

from agentrl.calls.turns import Turn
from agentrl.chat.open_format import open_chat_format
from agentrl.config.schema import AgentConfig, GroupConfig, ModelConfig
from agentrl.data.finalize_group import GroupRules
from agentrl.data.planner import build_micro_batches
from agentrl.distributed.parallel_model import ParallelModel
from agentrl.documents.model_call import DispatchedSamplingTask
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim, Slot, Task
from agentrl.inference.engines.clients import engine_client
from agentrl.losses.settings import LossSettings
from agentrl.model.load import load_policy
from agentrl.store.groups import GroupOutcome, StoredGroup
from agentrl.train.step import forward_backward

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120), pytest.mark.usefixtures("starts_warm")]

TASK = Task(
    id="train/0/a", task_id="a", split="train", epoch=0, order=0, query="1+2?",
    slots=(Slot(traj_id=0), Slot(traj_id=1)),
)  # fmt: skip
PLAIN: dict[str, Any] = {}
COLD = {"temperature": 0.5}
HOT = {"temperature": 1.5}
GREEDY = {"temperature": 0.0}
TRUNCATED = {"temperature": 1.5, "top_p": 0.8}
FEW = {"top_k": 5, "min_p": 0.05}
PENALISED = {"temperature": 0.5, "presence_penalty": 1.5}


def sharpen(folder: Path) -> None:
    """Multiply the policy's logits, so that the temperature matters."""
    model = Qwen3ForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.mul_(10.0)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = write_tiny_policy(tmp_path_factory.mktemp("call-sampling") / "policy")
    sharpen(folder)
    with serve_locally(folder, max_total_tokens=4096) as served:
        yield served


@asynccontextmanager
async def opened(served: Served) -> AsyncIterator[OneEngine]:
    async with engine_client("local", served.url, 60.0) as client:
        yield OneEngine(client)


async def sample(
    served: Served, traj_id: int, turns: Sequence[dict[str, Any]]
) -> list[DispatchedSamplingTask]:
    """One trajectory whose agent makes a call for each of ``turns``, with its parameters."""
    calls: list[DispatchedSamplingTask] = []

    async def write(call: Turn) -> None:
        calls.append(call.document())

    async with opened(served) as engine:
        rollout = make_rollout(
            Claim(task=TASK, traj_id=traj_id, attempt=1, owner="o"), AgentConfig(),
            chat_format=open_chat_format(served.folder, ModelConfig()), engine=engine, write=write,
            params=SamplingParams(max_new_tokens=24),
        )  # fmt: skip
        for number, changes in enumerate(turns):
            if number:
                rollout.append_messages([{"role": "user", "content": "and then?"}])
            await rollout.generate(**changes)
        await rollout.finish()
    return calls


async def sample_group(
    served: Served, *trajectories: Sequence[dict[str, Any]]
) -> list[list[DispatchedSamplingTask]]:
    """The calls of each trajectory."""
    return [await sample(served, traj, turns) for traj, turns in enumerate(trajectories)]


def decide(sampled: Sequence[Sequence[DispatchedSamplingTask]]) -> GroupOutcome:
    """What becomes of a group of which the first trajectory is right."""
    records = [
        Record(
            id=calls[0].record, task=TASK.id, traj_id=traj, attempt=1, split="train", epoch=0,
            query=TASK.query, score=1.0 - traj, turns=len(calls),
        )
        for traj, calls in enumerate(sampled)
    ]  # fmt: skip
    by_record = {record.id: calls for record, calls in zip(records, sampled, strict=True)}
    group = StoredGroup(task=TASK, records=records, calls=by_record)
    return GroupRules(config=GroupConfig(), seed=0).decide(group)


def step(served: Served, outcome: GroupOutcome) -> dict[str, Any]:
    """The metrics of a step on the weights that sampled."""
    model = load_policy(ModelConfig(model_name_or_path=str(served.folder))).model
    vocabulary = model.config.get_text_config().vocab_size
    forests = build_micro_batches(outcome.data, 4096, vocab_size=vocabulary)
    return forward_backward(ParallelModel(model), forests, LossSettings())


async def test_calls_at_temperatures_of_their_own_are_on_policy(served: Served) -> None:
    outcome = decide(await sample_group(served, (COLD, PLAIN, HOT), (COLD, COLD)))
    assert [[span.temperature for span in item.spans] for item in outcome.data] == [
        [0.5, 1.0, 1.5],
        [0.5, 0.5],
    ]
    report = step(served, outcome)
    assert report["trainable_tokens"] > 60
    assert report["ratio_mean"] == pytest.approx(1.0, abs=1e-3)
    assert report["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    assert report["kl_k1"] == pytest.approx(0.0, abs=1e-4)


async def test_truncated_calls_are_on_policy_over_the_ids_that_they_were_sampled_from(served: Served) -> None:
    outcome = decide(await sample_group(served, (TRUNCATED, PLAIN, FEW), (FEW, TRUNCATED)))
    assert [[span.call for span in item.spans] for item in outcome.data] == [[0, 1, 2], [0, 1]]
    assert outcome.summary["masked_calls"] == []
    report = step(served, outcome)
    assert report["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert report["ratio_max"] == pytest.approx(1.0, abs=1e-3)
    unmasked = tuple(replace(item, sampling_mask=b"") for item in outcome.data)
    assert step(served, replace(outcome, data=unmasked))["ratio_mean"] < 0.98


async def test_a_penalized_call_is_context_where_the_engine_gives_the_policys_logprobs(
    served: Served,
) -> None:
    right, wrong = await sample_group(served, (COLD, PENALISED, COLD), (GREEDY, COLD))
    right[1] = replace(right[1], logprobs_of="policy")
    outcome = decide([right, wrong])
    assert [[span.call for span in item.spans] for item in outcome.data] == [[0, 2], [1]]
    assert outcome.data[0].tokens == sum(len(call.context_ids + call.output_ids) for call in right) // 4
    assert {item["because"]: item["calls"] for item in outcome.summary["masked_calls"]} == {
        "presence_penalty 1.5": 1, "temperature 0.0": 1,
    }  # fmt: skip
    report = step(served, outcome)
    assert report["trainable_tokens"] == sum(
        len(call.output_ids) // 4 for call in (right[0], right[2], wrong[1])
    )
    assert report["ratio_max"] == pytest.approx(1.0, abs=1e-3)


async def test_a_trajectory_of_penalized_calls_alone_is_abandoned(served: Served) -> None:
    right, wrong = await sample_group(served, (COLD,), (PENALISED,))
    outcome = decide([right, [replace(call, logprobs_of="policy") for call in wrong]])
    assert [item.id for item in outcome.data] == [right[0].record]
    assert "1 sampled with presence_penalty 1.5" in str(outcome.records[1].abandoned_because)
