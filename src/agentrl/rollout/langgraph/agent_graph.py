"""Run graphs as agents, LangGraph's and ChatLearn's, and offer the tools of the trajectory to them.

The file of a ChatLearn agent imports from this module what it imported from ``chatlearn``.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun
from langchain_core.messages import AIMessage, BaseMessage, ToolMessage, convert_to_messages
from langchain_core.messages.tool import ToolCall
from langchain_core.outputs import ChatResult
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import BaseTool
from langgraph.errors import GraphRecursionError

from agentrl.documents.status import StopReason
from agentrl.errors import TrajectoryError
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.langgraph.chat_model import PolicyChatModel, from_messages, text_of
from agentrl.rollout.rollout import Rollout, current_rollout
from agentrl.scoring.answers import extract_answer
from agentrl.threads import GRAPH_THREADS, own_code
from agentrl.user_code import describe

_built: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Graphs by the function that built them and the agent's file."""


async def run_graph_of(extension: Any, rollout: Rollout) -> Outcome:
    """Run a compiled graph, or one that a function builds from the agent's ``cfg``, once per process."""
    if not callable(extension) or hasattr(extension, "ainvoke"):
        return await run_graph(rollout, extension)
    graphs = _built.setdefault(extension, {})
    path = rollout.agent_cfg_path
    if path not in graphs:
        graph = extension(rollout.cfg)
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
        with GRAPH_THREADS.asyncios():
            final = await graph.ainvoke(start, config)
    except GraphRecursionError:
        return Outcome(StopReason.TURNS_LIMIT)
    return outcome_of(final, task.answer_schema, start["messages"])


def outcome_of(final: Any, answer_schema: str, given: Any) -> Outcome:
    """Return the outcome that a graph's final state describes; the graph began with the messages ``given``.

    Without a message of the policy, the last one that the graph itself has added counts: it may copy the
    policy's text. What looks like an answer inside a malformed tool call does not count.
    """
    state = final if isinstance(final, Mapping) else {}
    answer = state.get("final_answer")
    said = [item for item in _messages(state) if isinstance(item, AIMessage)]
    examples = [item.content for item in convert_to_messages(given) if isinstance(item, AIMessage)]
    sampled = [item for item in said if "finish_reason" in item.response_metadata]
    last = next(reversed(sampled or [item for item in said if item.content not in examples]), None)
    is_cut = last is not None and last.response_metadata.get("finish_reason") == "length"
    if answer is None and last is not None and not (is_cut or last.invalid_tool_calls):
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


__all__ = ["AgentGraphOutput", "BaseAgentGraph", "CustomChatModel", "run_agent_graph"]

_instances: WeakKeyDictionary[type, dict[Path | None, Any]] = WeakKeyDictionary()
"""Agent graphs by their class and the agent's file: a process makes each once."""


@dataclass(kw_only=True)
class AgentGraphOutput:
    """What ``run`` of an agent graph returns.

    The tokens of the trajectory are those that the engine sampled, so an output names none.
    """

    state: Mapping[str, Any]
    """The final state of the graph."""
    reward_score: float | None = None
    """The agent's own score; None leaves the trajectory to the scorer of its task."""
    num_turns: int = 0
    extra_fields: dict[str, Any] = field(default_factory=dict)


class BaseAgentGraph:
    """The base of an agent graph: ``build_graph`` makes ``self.graph``, and ``run`` runs it on a task."""

    graph: Any

    def __init__(self, agent_name: str, cfg: Any, llm: Any = None, tokenizer: Any = None, **_: Any) -> None:
        """``cfg`` is the agent's YAML file; ``llm`` and ``tokenizer`` are None: the chat model needs none."""
        self.agent_name = agent_name
        self.cfg = cfg
        self.llm = llm
        self.tokenizer = tokenizer

    def build_graph(self) -> Any:
        """Make the chat model; a subclass also makes its graph."""
        self.chatmodel = CustomChatModel(model=self.agent_name)

    async def run(self, messages: Any, sampling_params: dict[str, Any], **fields: Any) -> AgentGraphOutput:
        """Run the graph on ``messages``; ``fields`` are ``ground_truth`` and the other fields of the task."""
        config = {"configurable": {"sampling_params": sampling_params, **fields}}
        return self.convert_agent_graph_output(
            await self.graph.ainvoke({"messages": messages}, config=config)
        )

    def convert_agent_graph_output(self, messages: Mapping[str, Any]) -> AgentGraphOutput:
        """Return the output that a final state describes."""
        kept = messages["messages"]
        turns = max((turn for turn, item in enumerate(kept, 1) if isinstance(item, AIMessage)), default=0)
        return AgentGraphOutput(state=messages, num_turns=turns)


class CustomChatModel(PolicyChatModel):
    """The policy as ChatLearn's chat model: ``sampling_params`` of a call, ``loss_mask`` of its answer."""

    model: str | None = None
    llm: Any = None
    tokenizer: Any = None

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        params = dict(kwargs.pop("sampling_params", None) or {})
        if "max_new_tokens" in params:
            params["max_tokens"] = params.pop("max_new_tokens")
        result = await super()._agenerate(messages, stop, run_manager, **kwargs, **params)
        for generation in result.generations:
            answer = generation.message
            if isinstance(answer, AIMessage) and answer.usage_metadata is not None:
                used = answer.usage_metadata
                mask = _mask_before(messages, used["input_tokens"]) + [1] * used["output_tokens"]
                answer.response_metadata["loss_mask"] = mask
        return result


async def run_agent_graph(extension: type, rollout: Rollout) -> Outcome:
    """Run an agent graph on the task of ``rollout``; the answer is read as that of a LangGraph agent.

    ``run`` gets the first messages, empty ``sampling_params`` (those of the run then hold), ``ground_truth``
    and the fields of ``meta``.
    """
    instances = _instances.setdefault(extension, {})
    path = rollout.agent_cfg_path
    if path not in instances:
        name = rollout.task.agent_name or rollout.config.agent_name
        instances[path] = extension(agent_name=name, cfg=rollout.cfg, llm=None, tokenizer=None)
    fields = {"ground_truth": rollout.task.answer, **rollout.task.meta}
    messages = from_messages(rollout.first_messages)
    try:
        with GRAPH_THREADS.asyncios():
            output = await instances[path].run(**{**fields, "messages": messages, "sampling_params": {}})
    except GraphRecursionError:
        return Outcome(StopReason.TURNS_LIMIT)
    if not isinstance(output, AgentGraphOutput):
        raise TrajectoryError(
            f"run of {extension.__name__} returned {describe(output)}",
            hint="return self.convert_agent_graph_output(final_state)",
        )
    outcome = outcome_of(output.state, rollout.task.answer_schema, messages)
    return outcome if output.reward_score is None else replace(outcome, score=float(output.reward_score))


def _mask_before(messages: list[BaseMessage], prompt_tokens: int) -> list[int]:
    """Return the mask of a prompt: 1 for the tokens that the policy sampled in an answer before.

    It is right for a conversation that only grows. Training does not read it.
    """
    before = [mask for item in messages if (mask := item.response_metadata.get("loss_mask")) is not None]
    known: list[int] = before[-1] if before and len(before[-1]) <= prompt_tokens else []
    return known + [0] * (prompt_tokens - len(known))


class PolicyTool(BaseTool):
    """A tool of the trajectory: its runs are recorded with the model call that asked for them."""

    role: str | None = None

    async def ainvoke(
        self, input: str | dict[str, Any] | ToolCall, config: RunnableConfig | None = None, **kwargs: Any
    ) -> Any:
        """Run the tool; answer a tool call with a ToolMessage, and bare arguments with text."""
        is_call = isinstance(input, dict) and input.get("type") == "tool_call"
        arguments: Any = input["args"] if is_call else input  # type: ignore[index]
        call_id = str(input.get("id") or "") if is_call else ""  # type: ignore[union-attr]
        rollout = current_rollout()
        role = rollout if self.role is None else rollout.role(self.role)
        with own_code():
            text, failed = await role.call_tool(call_id, self.name, arguments)
        if not is_call:
            return text
        return ToolMessage(
            text, tool_call_id=call_id, name=self.name, status="error" if failed else "success"
        )

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("tools of a trajectory are asynchronous: use ainvoke")


def policy_tools(rollout: Rollout | None = None, role: str | None = None) -> Sequence[BaseTool]:
    """Return the tools that the trajectory offers, for ``bind_tools`` and ToolNode.

    Without ``rollout`` those of the running agent's. ``role`` names the role whose calls they answer.
    """
    rollout = rollout or current_rollout()
    functions = [schema["function"] for schema in rollout.schemas]
    return [
        PolicyTool(
            name=function["name"],
            description=function.get("description") or "",
            args_schema=function.get("parameters") or {"type": "object", "properties": {}},
            role=role,
        )
        for function in functions
    ]
