"""The spans of optimizer steps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from fake_store import FakeStore
from otlp_collector import traced


async def test_a_step_is_a_trace_with_its_phases_and_links(
    store: FakeStore, start: Callable[..., Any]
) -> None:
    asked: list[int] = []

    async def trace_ids(records: list[str], limit: int) -> list[str]:
        asked.append(len(records))
        return [f"{len(asked):032x}"]

    store.records = SimpleNamespace(trace_ids=trace_ids)  # type: ignore[attr-defined]
    trainer = await start(max_steps=2)
    with traced() as collector:
        await trainer.run()
    first, second = collector.named("train_step")
    assert (first.parent, first.trace == second.trace) == ("", False)
    assert (first.links, second.links) == ([f"{1:032x}"], [f"{2:032x}"])
    step = store.train_steps["1/1"]
    expected = {
        "agentrl.train_step": "1/1", "agentrl.step": 1, "agentrl.policy_version": 0, "agentrl.groups": 2,
        "agentrl.loss": step.metrics["loss"], "agentrl.trajectories": step.metrics["trajectories"],
    }  # fmt: skip
    assert expected.items() <= first.attributes.items()
    assert len(first.attributes["agentrl.records"]) == asked[0] == len(step.data)
    children = [span for span in collector.spans if span.parent == first.id]
    names = [span.name for span in sorted(children, key=lambda span: span.begin)]
    assert names == ["wait_for_data", "updates", "commit", "publish", "save"]
    (updates,) = (span for span in children if span.name == "updates")
    phases = [span for span in collector.spans if span.parent == updates.id]
    assert [span.name for span in phases] == ["pack", "forward", "backward", "optimizer"]
    assert all(first.begin <= span.begin and span.end <= first.end for span in children)
