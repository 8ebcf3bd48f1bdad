"""Offer the policy as a LangChain chat model: token ids in, token ids out."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LanguageModelInput
from langchain_core.messages import AIMessage, AIMessageChunk, BaseMessage, ToolMessage, convert_to_messages
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool

from agentrl.chat.chat_format import Message
from agentrl.chat.text_stream import Delta, TextStream
from agentrl.concurrency import end_tasks
from agentrl.errors import ConfigError, TrajectoryError
from agentrl.inference.engine import Progress
from agentrl.rollout.histories import MakeProgress
from agentrl.rollout.model_call import Turn, with_text_arguments
from agentrl.rollout.rollout import Role, Rollout, current_rollout
from agentrl.threads import own_code

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
