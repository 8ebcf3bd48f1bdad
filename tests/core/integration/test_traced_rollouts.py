"""The spans of whole trajectories, as a collector gets them: agents, tools, gateways, judges, scoring."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest
import yaml
from fake_llm import fake_llm
from gateway_run import ADD, answerer_of, gateway_task, worker_of
from otlp_collector import collecting, trace_flags, traced
from rollout_fakes import FakeTools, ScriptedEngine, format_of

from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, RunConfig, SamplingConfig
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import RecordStatus, StopReason
from agentrl.documents.task import Task
from agentrl.errors import EngineError, OutageError, ScorerError
from agentrl.gateway.app import GatewayHost
from agentrl.observe.tracing import tracing
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.rollout import Rollout
from agentrl.rollout.worker import Worker
from agentrl.scoring.scorers import SCORERS, ScorerContext
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]


async def run(store: Store, worker: Worker, task: Task) -> Record:
    """Run one trajectory of ``task``; return its Record."""
    await store.tasks.load([task])
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=600)
    assert claim is not None
    await worker.run(claim)
    record = await store.records.get(claim.record_id)
    assert record is not None
    return record


def react(store: Store, *script: Any, **sampling: Any) -> Worker:
    """A worker whose agent is ``react``."""
    engine = ScriptedEngine(format_of(), *script)
    return Worker(
        store=store, router=engine, tools=FakeTools(), chat_format=engine.chat_format,
        params=SamplingParams(temperature=0.7), seed=7, agent=AgentConfig(),
        sampling=SamplingConfig(**sampling), claims=ClaimConfig(retry_backoff_seconds=0.01),
    )  # fmt: skip


async def test_a_trajectory_with_a_tool_is_one_trace_that_its_record_names(store: Store) -> None:
    worker = react(store, ADD, "<answer>3</answer>")
    with traced() as collector:
        record = await run(store, worker, gateway_task(slots=1))
    assert record.status is RecordStatus.SCORED
    root = collector.one("invoke_agent react")
    assert record.trace_id == root.trace
    assert {span.trace for span in collector.spans} == {root.trace}
    assert {span.parent for span in collector.spans} == {"", root.id}
    expected = {
        "gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": "react",
        "gen_ai.conversation.id": record.id, "agentrl.task": record.task, "agentrl.attempt": 1,
        "agentrl.stop_reason": "answered", "agentrl.turns": 2, "agentrl.tool_calls": 1, "agentrl.score": 1.0,
    }  # fmt: skip
    assert expected.items() <= root.attributes.items()
    first, second = collector.named("chat train-model")
    assert first.attributes["gen_ai.response.finish_reasons"] == ["tool_calls"]
    expected = {
        "gen_ai.operation.name": "chat", "gen_ai.request.temperature": 0.7, "agentrl.policy_version": 3,
        "gen_ai.response.model": "train-model@3", "agentrl.turn": 2,
        "gen_ai.response.finish_reasons": ["stop"], "server.address": "engine",
        "gen_ai.usage.input_tokens": record.prompt_tokens,
    }  # fmt: skip
    assert expected.items() <= second.attributes.items()
    spent = [span.attributes["gen_ai.usage.output_tokens"] for span in (first, second)]
    assert sum(spent) == record.generated_tokens
    tool = collector.one("execute_tool add")
    assert (tool.attributes["gen_ai.tool.name"], tool.attributes["agentrl.tool.server"]) == ("add", "fake")
    score = collector.one("score exact")
    assert score.events["gen_ai.evaluation.result"]["gen_ai.evaluation.score.value"] == 1.0
    names = ["invoke_agent react", first.name, tool.name, second.name, score.name]
    assert [span.name for span in sorted(collector.spans, key=lambda span: span.begin)] == names
    assert "1+2?" not in str(collector.spans)


async def test_content_is_in_the_spans_with_the_flag(store: Store) -> None:
    worker = react(store, ADD, "<answer>3</answer>")
    with traced("--trace_content", "true") as collector:
        await run(store, worker, gateway_task(slots=1))
    first, second = collector.named("chat")
    assert '"content": "1+2?"' in first.attributes["gen_ai.input.messages"]
    assert '"type": "tool_call"' in first.attributes["gen_ai.output.messages"]
    assert '"response": "3"' in second.attributes["gen_ai.input.messages"]
    assert "1+2?" not in second.attributes["gen_ai.input.messages"]
    tool = collector.one("execute_tool").attributes
    assert (tool["gen_ai.tool.call.arguments"], tool["gen_ai.tool.call.result"]) == ('{"a": 1, "b": 2}', "3")


async def test_without_the_flag_a_record_has_no_trace(store: Store) -> None:
    record = await run(store, react(store, "<answer>3</answer>"), gateway_task(slots=1))
    assert (record.status, record.trace_id) == (RecordStatus.SCORED, None)


async def test_a_failure_has_its_kind_in_each_span_that_it_ended(store: Store) -> None:
    with traced() as collector:
        record = await run(store, react(store, EngineError("the engine burst")), gateway_task(slots=1))
    assert record.failure is not None
    root, chat = collector.one("invoke_agent"), collector.one("chat")
    assert record.trace_id == root.trace
    for span in (root, chat):
        assert (span.failed, span.attributes["error.type"], span.status) == (True, "engine", "")


async def test_calls_through_a_gateway_of_another_process_join_the_trace(store: Store) -> None:
    async def client(rollout: Rollout) -> Outcome:
        async with (
            rollout.gateway(train="all") as end,
            openai.AsyncOpenAI(base_url=end.base_url, api_key=end.api_key) as api,
        ):
            messages: list[Any] = list(rollout.first_messages)
            first = await api.chat.completions.create(model="policy", messages=messages)
            messages += [first.choices[0].message.model_dump(exclude_none=True)]
            messages += [{"role": "user", "content": "sure?"}]
            await api.chat.completions.create(model="policy", messages=messages)
        return Outcome(StopReason.ANSWERED, "3")

    engine = ScriptedEngine(format_of(), "3", "yes")
    host = GatewayHost(answerer_of(store, engine), GatewayConfig())
    with traced() as collector:
        record = await run(store, worker_of(store, engine, client, host), gateway_task(slots=1))
        await host.close()
    root = collector.one("invoke_agent gateway_agent")
    calls = collector.named("chat")
    assert record.trace_id == root.trace
    assert [(call.trace, call.parent) for call in calls] == [(root.trace, root.id)] * 2
    assert [call.attributes["gen_ai.response.id"] for call in calls] == list(record.traj)
    assert calls[1].attributes["agentrl.parent_call"] == record.traj[0]
    assert calls[0].attributes["agentrl.gateway.dialect"] == "chat"


async def test_a_score_from_the_queue_joins_the_trace_of_its_trajectory(store: Store) -> None:
    down = [OutageError("the judge is away")]

    async def late(context: ScorerContext) -> float:
        if down:
            raise down.pop()
        return 0.5

    SCORERS.add(late, "late_scorer")
    task = replace(gateway_task(slots=1), scorer="late_scorer")
    worker = react(store, "<answer>3</answer>")
    with traced() as collector:
        record = await run(store, worker, task)
        assert record.score is None
        async with asyncio.timeout(10):
            lease: Any = {"split": "train", "owner": "other", "lease_seconds": 60}
            while not (claims := await store.claims.claim_sampled(**lease)):  # noqa: ASYNC110  until the back-off ends
                await asyncio.sleep(0.01)
        (claim,) = claims
        assert await worker.scoring.score_stored(claim)
    first, second = collector.named("score late_scorer")
    stored = collector.one("score_stored")
    assert (first.failed, first.attributes["error.type"]) == (True, "scorer")
    assert stored.trace == second.trace == record.trace_id
    assert (stored.parent, second.parent) == (collector.one("invoke_agent").id, stored.id)
    assert stored.attributes["agentrl.score"] == 0.5


async def test_the_process_of_agentrl_score_adds_to_the_trace(
    store: Store, run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fails(*_: object) -> None:
        raise ScorerError("not here")

    monkeypatch.setattr("agentrl.columns.scores.score_context", fails)
    with collecting() as collector:
        with tracing(trace_flags(collector.url), "sample"):
            record = await run(store, react(store, "<answer>3</answer>"), gateway_task(slots=1))
        command = (
            sys.executable, "-m", "agentrl", "score", "--until_empty", "true", "--trace", collector.url,
            "--run_name", run_config.run_name, "--db_connection_string", run_config.db_connection_string,
            "--log_dir", run_config.log_dir,
        )  # fmt: skip
        ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, timeout=100)
    assert "1 trajectories scored" in ended.stdout, ended.stderr
    score = collector.one("score exact")
    assert (score.trace, score.attributes["agentrl.score"]) == (record.trace_id, 1.0)
    names = {span.name: span.resource["service.name"] for span in collector.spans}
    assert names["invoke_agent react"] == "agentrl-sample"
    assert names["score_stored"] == names["score exact"] == "agentrl-score"


async def test_a_judge_is_a_model_call_below_its_scorer(store: Store, tmp_path: Path) -> None:
    async with fake_llm() as llm:
        llm.replies["judge"] = ["Correct"]
        path = tmp_path / "agent_config.yml"
        entry = {"base_url": llm.url, "api_key": "none", "model": "judge"}
        path.write_text(yaml.safe_dump({"scorer_agent": {"models": [entry]}}))
        worker = react(store, "<answer>three</answer>", agent_config_path=str(path))
        with traced() as collector:
            record = await run(store, worker, replace(gateway_task(slots=1), scorer="agentcpm"))
    assert record.score == 1.0
    judge = collector.one("chat judge")
    assert judge.parent == collector.one("score agentcpm").id
    assert judge.attributes["gen_ai.provider.name"] == "openai"
    assert judge.attributes["server.address"] == "127.0.0.1"
