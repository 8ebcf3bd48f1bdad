"""Render and parse by the ``renderers`` package, which knows model families by their token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from agentrl.chat.chat_format import Message, TokenizedConversation, ToolSchemas, split_train
from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers import (
    ParsedMessage,
    ReasoningTags,
    ToolCall,
    ToolCallParser,
    opens_thought,
    split_reasoning,
)
from agentrl.chat.parsers.base import shown
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.reasoning import THINK, SplitText
from agentrl.errors import TrajectoryError

_PROMPT_END = 16
"""Tokens at the end of a prompt that tell whether it opens a thought."""

_HARMONY = "gpt-oss"
"""Its own encoder keeps text as text, so its messages are not marked by ``ControlTokens.protect``."""


class RendererFormat:
    """A renderer of the package; a second instance, which keeps all reasoning, extends prompts."""

    def __init__(
        self,
        renderer: Any,
        extender: Any,
        tokens: ControlTokens,
        *,
        stop_ids: Iterable[int] = (),
        parser: ToolCallParser | None = None,
        reader: ToolCallParser | None = None,
        tags: ReasoningTags = THINK,
    ) -> None:
        """``parser`` replaces the renderer's own; ``stop_ids`` are further ids that close a turn.

        ``reader`` reads the calls that the renderer finds by their ids: it knows more of what models write
        between the marks. ``tags`` tell a thought that is not closed.
        """
        import renderers

        self.name = str(renderer.config.name)
        self.description = f"{self.name} of renderers {renderers.__version__}"
        self.tokens = tokens
        self._renderer = renderer
        self._extender = extender
        self._parser = parser
        self._reader = reader
        self._tags = tags
        self.stop_ids = frozenset(renderer.get_stop_token_ids()) | frozenset(stop_ids)

    @property
    def call_marks(self) -> tuple[str, ...] | None:
        """Return the texts with which a tool call may begin; None if any text may be one."""
        parser = self._parser or self._reader
        return (*parser.marks, "<|", "<｜") if isinstance(parser, MarkedParser) else None

    @property
    def agreed_settings(self) -> dict[str, str]:
        """Return what all samplers of a run must have in common."""
        return {"chat_format": f"{self.description}: {self._renderer.config!r}"}

    def render(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return the prompt of a conversation, up to where the assistant continues."""
        return self._render(messages, tools, add_generation_prompt=True)

    def render_closed(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return a conversation that ends with its last message."""
        return self._render(messages, tools, add_generation_prompt=False)

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a message's text has at least; 0 if none is known."""
        return self.tokens.fewest_tokens(text)

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one; None if the renderer cannot extend it."""
        before = [*prompt_ids, *output_ids]
        added, schemas = self._protected(new_messages, tools)
        try:
            extended = self._extender.bridge_to_next_turn(
                list(prompt_ids), list(output_ids), added, tools=schemas
            )
        except Exception as error:
            raise self._refusal(new_messages, error) from error
        if extended is None or list(extended.token_ids[: len(before)]) != before:
            return None
        return list(extended.token_ids[len(before) :])

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message in generated ids."""
        parsed = self._renderer.parse_response(
            list(output_ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        reasoning = str(parsed.reasoning_content or "")
        spoken = self._split(output_ids, prompt_ids)
        if spoken.is_open:
            return ParsedMessage(spoken.rest.strip(), reasoning=spoken.reasoning)
        if self._parser is not None and parsed.reasoning_complete is not False:
            own = self._parser.parse(self._text_after_thought(output_ids, reasoning), tools)
            return ParsedMessage(own.content, own.tool_calls, own.error, reasoning)
        calls: list[ToolCall] = []
        error = None
        for call in parsed.tool_calls:
            problem = _problem(call)
            if problem is None:
                calls.append(ToolCall(str(call.name), dict(_arguments(call.arguments) or {})))
            else:
                error = error or problem
        if self._reader is not None and (parsed.tool_calls or not self._quotes_a_mark(spoken.rest)):
            read = self._reader.parse(spoken.rest, tools)
            if read.tool_calls and (read.error is None or error is not None):
                content = read.content if read.error is None else spoken.rest.strip()
                return ParsedMessage(content, read.tool_calls, read.error, reasoning)
        content = (
            str(parsed.content or "") if error is None else self._text_after_thought(output_ids, reasoning)
        )
        return ParsedMessage(content.strip(), tuple(calls), error, reasoning)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        return self.tokens.decode(ids[:end])

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says."""
        from renderers import build_training_sample

        plain, flags = split_train(messages)
        protected, schemas = self._protected(plain, tools)
        try:
            sample = build_training_sample(
                self._renderer,
                protected,
                role_to_mask=_is_assistant,
                tools=schemas,
                ensure_final_stop=True,
                message_loss_mask=flags,
            )
        except Exception as error:
            raise self._refusal(messages, error) from error
        return TokenizedConversation(
            np.asarray(sample.token_ids, np.int64), np.asarray(sample.loss_mask, np.bool_)
        )

    def _render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool
    ) -> list[int]:
        protected, schemas = self._protected(messages, tools)
        try:
            rendered = self._renderer.render(
                protected, tools=schemas, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            raise self._refusal(messages, error) from error
        return list(rendered.token_ids)

    def _protected(
        self, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[list[Any], list[Any] | None]:
        if self.name == _HARMONY:
            return list(messages), list(tools) if tools else None
        return self.tokens.protect(messages), self.tokens.protect_tools(tools)

    def _refusal(self, messages: Sequence[Message], error: Exception) -> TrajectoryError:
        roles = " ".join(str(message.get("role")) for message in messages)
        return TrajectoryError(
            f"the chat format {self.name} cannot render the roles [{roles}]: {error}",
            hint="give another by --chat_format",
        )

    def _quotes_a_mark(self, text: str) -> bool:
        """Return whether ``text`` holds a mark of calls as plain text, which is a quotation and no call."""
        return not isinstance(self._reader, MarkedParser) or any(mark in text for mark in self._reader.opens)

    def _split(self, output_ids: Sequence[int], prompt_ids: Sequence[int]) -> SplitText:
        """Split the generated text into thoughts and the rest; harmony uses channels instead of tags."""
        text = self.decode(output_ids)
        if self.name == _HARMONY:
            return SplitText("", text)
        opened = opens_thought(self.tokens.decode(prompt_ids[-_PROMPT_END:]), self._tags)
        return split_reasoning(text, self._tags, opened=opened)

    def _text_after_thought(self, output_ids: Sequence[int], reasoning: str) -> str:
        text = self.decode(output_ids)
        return text[text.index(reasoning) + len(reasoning) :] if reasoning and reasoning in text else text


def _is_assistant(message: Mapping[str, Any]) -> bool:
    return message.get("role") == "assistant"


def _problem(call: Any) -> str | None:
    """Return the problem of a call that the renderer found; None if it is well-formed."""
    status = str(call.status)
    if status == "unknown_tool" or (status == "ok" and _arguments(call.arguments) is not None):
        return None
    what = "its arguments are not a JSON object" if status == "ok" else status.replace("_", " ")
    return f"the tool call cannot be read ({what}): {shown(call.raw)}"


def _arguments(value: Any) -> dict[str, Any] | None:
    """Return arguments as an object; None if they are not an object."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except ValueError:
            return None
    return {} if value is None else value if isinstance(value, dict) else None
