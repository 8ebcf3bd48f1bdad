"""Run a LangGraph graph as the agent of a trajectory, and read its outcome from the final state."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.messages import AIMessage, BaseMessage
from langgraph.errors import GraphRecursionError

from agentrl.documents.status import StopReason
from agentrl.errors import TrajectoryError
from agentrl.rollout.langgraph.messages import from_messages, text_of
from agentrl.rollout.outcome import Outcome
from agentrl.rollout.rollout import Rollout
from agentrl.scoring.answers import extract_answer
from agentrl.user_code import describe

_built: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Graphs by the function that built them and the agent's file."""


async def run_found(found: Any, rollout: Rollout) -> Outcome:
    """Run a compiled graph, or one that a function builds from the agent's ``cfg``, once per process."""
    if not callable(found) or hasattr(found, "ainvoke"):
        return await run_graph(rollout, found)
    graphs = _built.setdefault(found, {})
    path = rollout.agent_cfg_path
    if path not in graphs:
        graph = found(rollout.cfg)
        graph = await graph if inspect.isawaitable(graph) else graph
        graphs[path] = graph.compile() if hasattr(graph, "compile") else graph
    return await run_graph(rollout, graphs[path])


async def run_graph(rollout: Rollout, graph: Any, **state: Any) -> Outcome:
    """Run a compiled graph on the task and return its outcome.

    It starts with ``messages``, the first messages of the trajectory, and with ``query``, ``answer`` and the
    fields of ``meta`` that its state has; ``state`` replaces any of them. Its final state gives the answer:
    ``final_answer``, or the answer in the last message of the policy. A number in ``score`` is the agent's
    own score, a mapping in ``rewards`` has those of roles.
    """
    if not hasattr(graph, "ainvoke"):
        raise TrajectoryError(
            f"the agent's graph is {describe(graph)}", hint="return a compiled graph: builder.compile()"
        )
    task = rollout.task
    fields = {"query": task.query, "answer": task.answer, **task.meta}
    known = set(getattr(graph, "channels", {}))
    start = {name: value for name, value in fields.items() if name in known}
    start |= {"messages": from_messages(rollout.first_messages), **state}
    config = {
        "recursion_limit": int(rollout.cfg.get("recursion_limit", max(25, 4 * rollout.max_turns))),
        "configurable": {"thread_id": rollout.record_id, "cfg": rollout.cfg},
    }
    try:
        final = await graph.ainvoke(start, config)
    except GraphRecursionError:
        return Outcome(StopReason.TURNS_LIMIT)
    return outcome_of(final, task.answer_schema)


def outcome_of(final: Any, answer_schema: str) -> Outcome:
    """Return the outcome that a graph's final state describes."""
    state = final if isinstance(final, Mapping) else {}
    answer = state.get("final_answer")
    last = next((item for item in reversed(_messages(state)) if isinstance(item, AIMessage)), None)
    is_cut = last is not None and last.response_metadata.get("finish_reason") == "length"
    if answer is None and last is not None and not is_cut:
        answer = extract_answer(text_of(last), answer_schema)
    score, rewards = state.get("score"), state.get("rewards")
    reason = StopReason.ANSWERED
    if answer is None:
        reason = StopReason.LENGTH_LIMIT if is_cut else StopReason.TURNS_LIMIT
    return Outcome(
        reason,
        None if answer is None else str(answer),
        float(score) if isinstance(score, numbers.Real) else None,
        rewards if isinstance(rewards, Mapping) else None,
    )


def _messages(state: Mapping[str, Any]) -> list[BaseMessage]:
    messages = state.get("messages")
    return list(messages) if isinstance(messages, (list, tuple)) else []
