"""Run LangGraph graphs as agents: a LangChain chat model over the policy, its tools, and the graph's outcome.

The file of a ChatLearn agent imports from this module what it imported from ``chatlearn``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import numbers
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.base.concurrency import GRAPH_THREADS, end_tasks, own_code
from agentrl.base.installation import how_to_install
from agentrl.base.user_code import describe
from agentrl.calls.trajectory_calls import MakeProgress
from agentrl.calls.turns import Turn, with_text_arguments
from agentrl.chat.chat_format import Delta, Message, TextStream
from agentrl.documents.status import StopReason
from agentrl.errors import ConfigError, TrajectoryError
from agentrl.inference.engine import Progress
from agentrl.rollout.agent_io import Outcome
from agentrl.rollout.agents import GRAPH_RUNNERS
from agentrl.rollout.rollout import Role, Rollout, current_rollout
from agentrl.scoring.answers import extract_answer

try:
    from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
    from langchain_core.language_models import BaseChatModel, LanguageModelInput
    from langchain_core.messages import (
        AIMessage,
        AIMessageChunk,
        BaseMessage,
        ToolMessage,
        convert_to_messages,
    )
    from langchain_core.messages.tool import ToolCall
    from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
    from langchain_core.runnables import Runnable, RunnableConfig
    from langchain_core.tools import BaseTool
    from langchain_core.utils.function_calling import convert_to_openai_tool
    from langgraph.errors import GraphRecursionError
except ModuleNotFoundError as error:
    raise ConfigError(f"{error.name} is not installed", hint=how_to_install("langgraph")) from error

__path__: list[str] = []
"""This file has the names of ``agentrl.rollout.langgraph.agent_graph`` too, which files of users import."""

_CHANGES = {"temperature": "temperature", "top_p": "top_p", "max_tokens": "max_new_tokens"}
"""Parameters of a call, by their names in LangChain."""


class PolicyChatModel(BaseChatModel):
    """The policy of the trajectory whose agent calls it.

    One object serves all trajectories of a process, so a graph may be compiled once. Messages that extend an
    earlier call's continue its sampled ids; edited ones are a branch. A synchronous call works in a thread of
    the graph, not in the event loop.
    """

    role: str | None = None
    """The role of the trajectory that calls are made for (``rollout.role``)."""
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    rollout: Any = None
    """The Rollout; None takes that of the running agent."""

    @property
    def _llm_type(self) -> str:
        return "agentrl"

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Return the model with tools that it may call. Raises ConfigError for a forced ``tool_choice``."""
        if tool_choice not in (None, "auto"):
            raise ConfigError(
                f"tool_choice is {tool_choice!r}, and the policy chooses itself", hint="leave tool_choice out"
            )
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        loop = self._rollout().loop
        try:
            running = asyncio.get_running_loop()
        except RuntimeError:
            running = None
        if running is loop:
            raise ConfigError(
                "the policy is called synchronously in the event loop, which would block it",
                hint="use `await model.ainvoke(…)` in an async node, or a node that is a plain function",
            )
        return asyncio.run_coroutine_threadsafe(
            self._agenerate(messages, stop, None, **kwargs), loop
        ).result()

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        message, turn = await self._complete(messages, stop, kwargs)
        return ChatResult(generations=[ChatGeneration(message=to_ai_message(message, turn))])

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        """Yield the text while it is generated, then tool calls and the end."""
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        streams: list[TextStream] = []

        def progress(prompt_ids: list[int]) -> Progress:
            stream = TextStream(self._rollout().chat_format, prompt_ids)
            streams.append(stream)

            def add(start: int, ids: Sequence[int]) -> None:
                for delta in stream.add(start, ids):
                    if delta.kind == "content":
                        queue.put_nowait(delta.text)

            return add

        answer = asyncio.create_task(self._complete(messages, stop, kwargs, progress))
        answer.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            while (text := await queue.get()) is not None:
                yield ChatGenerationChunk(message=AIMessageChunk(content=text))
            message, turn = await answer
        finally:
            await end_tasks(answer)
        whole = to_ai_message(message, turn)
        rest = streams[0].finish(message.get("reasoning_content") or "", message["content"])
        if rest is None:
            raise TrajectoryError("an engine failed, and its answer differs from the text streamed before")
        yield ChatGenerationChunk(message=_last_chunk(whole, rest))

    async def _complete(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None,
        kwargs: dict[str, Any],
        progress: MakeProgress | None = None,
    ) -> tuple[Message, Turn]:
        if stop:
            raise ConfigError(
                f"stop sequences {stop} are not supported", hint="bound the answer by max_tokens"
            )
        tools = kwargs.pop("tools", ())
        own = {name: getattr(self, name) for name in _CHANGES}
        given = {name: value for name, value in {**own, **kwargs}.items() if value is not None}
        given = {name: value for name, value in given.items() if not name.startswith("ls_")}
        unknown = sorted(set(given) - set(_CHANGES))
        if unknown:
            raise ConfigError(
                f"the policy's chat model has no parameter {unknown[0]!r}",
                hint=f"known: {', '.join(_CHANGES)}",
            )
        changes = {_CHANGES[name]: value for name, value in given.items()}
        role = self._role()
        with own_code():
            return await role.complete(to_messages(messages), tools, progress=progress, **changes)

    def _rollout(self) -> Rollout:
        rollout: Rollout = self.rollout or current_rollout()
        return rollout

    def _role(self) -> Role:
        rollout = self._rollout()
        return rollout if self.role is None else rollout.role(self.role)


def _last_chunk(whole: AIMessage, rest: Sequence[Delta]) -> AIMessageChunk:
    """Return what the chunks before leave out of a message."""
    content = "".join(delta.text for delta in rest if delta.kind == "content")
    return AIMessageChunk(
        content=content,
        tool_calls=whole.tool_calls,
        invalid_tool_calls=whole.invalid_tool_calls,
        additional_kwargs=whole.additional_kwargs,
        response_metadata=whole.response_metadata,
        chunk_position="last",
    )


_ROLES = {"system": "system", "human": "user", "ai": "assistant", "tool": "tool"}


def to_messages(messages: Sequence[BaseMessage]) -> list[Message]:
    """Return messages of LangChain as AgentRL's. Raises TrajectoryError for other kinds and for images."""
    return [_to_message(message) for message in messages]


def from_messages(messages: Sequence[Message]) -> list[BaseMessage]:
    """Return AgentRL's messages as LangChain's."""
    return convert_to_messages([with_text_arguments(message) for message in messages])


def to_ai_message(message: Message, turn: Turn) -> AIMessage:
    """Return the answer of a model call.

    A tool call that cannot be read is an ``invalid_tool_call``, which a graph may answer.
    """
    calls = [
        {"name": call["function"]["name"], "args": call["function"]["arguments"], "id": call["id"]}
        for call in message.get("tool_calls") or ()
    ]
    invalid = (
        []
        if turn.error is None
        else [{"name": None, "args": turn.text, "id": None, "error": turn.error, "type": "invalid_tool_call"}]
    )
    reasoning = message.get("reasoning_content")
    return AIMessage(
        content=message["content"],
        tool_calls=calls,
        invalid_tool_calls=invalid,
        additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
        response_metadata={"finish_reason": turn.finish_reason},
        usage_metadata={
            "input_tokens": turn.prompt_tokens,
            "output_tokens": turn.output_tokens,
            "total_tokens": turn.prompt_tokens + turn.output_tokens,
        },
        id=f"run-{uuid.uuid4().hex}",
    )


def text_of(message: BaseMessage) -> str:
    """Return the text of a message. Raises TrajectoryError for an image or another part that is not text."""
    if isinstance(message.content, str):
        return message.content
    texts = []
    for part in message.content:
        if isinstance(part, str):
            texts.append(part)
        elif part.get("type") == "text":
            texts.append(str(part.get("text", "")))
        elif isinstance(message, ToolMessage):
            texts.append(json.dumps(part, ensure_ascii=False, default=str))
        else:
            raise TrajectoryError(
                f"a message of the graph has a part of type {part.get('type')!r}",
                hint="the policy's chat model takes text only",
            )
    return "".join(texts)


def _to_message(message: BaseMessage) -> Message:
    role = _ROLES.get(message.type)
    if role is None:
        raise TrajectoryError(
            f"a message of the graph is of type {message.type!r}",
            hint=f"the policy's chat model takes: {', '.join(_ROLES)}",
        )
    converted: Message = {"role": role, "content": text_of(message)}
    if isinstance(message, AIMessage):
        if reasoning := message.additional_kwargs.get("reasoning_content"):
            converted["reasoning_content"] = reasoning
        if message.tool_calls:
            converted["tool_calls"] = [
                {"id": call["id"] or "", "type": "function",
                 "function": {"name": call["name"], "arguments": call["args"]}}
                for call in message.tool_calls
            ]  # fmt: skip
    if isinstance(message, ToolMessage):
        converted["tool_call_id"] = message.tool_call_id
        if message.name:
            converted["name"] = message.name
    return converted


_built: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()
"""Graphs by the function that built them and the agent's file."""


@GRAPH_RUNNERS.register("langgraph")
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


@GRAPH_RUNNERS.register("agent_graph")
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
