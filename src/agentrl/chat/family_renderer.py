"""Render by the ``renderers`` package, which knows model families by their token ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers import (
    ParsedMessage,
    ReasoningTags,
    ToolCall,
    ToolCallParser,
    split_reasoning,
)
from agentrl.chat.parsers.base import shown
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.reasoning import THINK, SplitText, parse_split
from agentrl.chat.renderer import Message, Renderer, TokenizedConversation, ToolSchemas, split_train
from agentrl.errors import TrajectoryError

HARMONY = "gpt-oss"
"""Its own encoder keeps text as text, so its messages are not marked by ``ControlTokens.protect``."""


class FamilyRenderer(Renderer):
    """A renderer of the package; a second instance, which keeps all reasoning, extends prompts."""

    def __init__(
        self,
        renderer: Any,
        extender: Any,
        tokens: ControlTokens,
        *,
        stop_ids: Iterable[int] = (),
        parser: ToolCallParser | None = None,
        tags: ReasoningTags = THINK,
    ) -> None:
        """``parser`` reads calls in place of the package; ``stop_ids`` are further ids that close a turn."""
        import renderers

        super().__init__(tokens, [*renderer.get_stop_token_ids(), *stop_ids])
        self.name = str(renderer.config.name)
        self.description = f"{self.name} of renderers {renderers.__version__}"
        self.agreed_settings = {"chat_format": f"{self.description}: {renderer.config!r}"}
        self._renderer = renderer
        self._extender = extender
        self._parser = parser
        self._tags = tags
        if isinstance(parser, MarkedParser):
            self.call_marks = (*parser.marks, "<|", "<｜")

    def with_parser(self, parser: ToolCallParser) -> FamilyRenderer:
        """Return the same renderer whose tool calls ``parser`` reads."""
        return FamilyRenderer(
            self._renderer,
            self._extender,
            self.tokens,
            stop_ids=self.stop_ids,
            parser=parser,
            tags=self._tags,
        )

    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation."""
        protected, schemas = self._protected(messages, tools)
        try:
            rendered = self._renderer.render(
                protected, tools=schemas, add_generation_prompt=add_generation_prompt
            )
        except Exception as error:
            raise self._refusal(messages, error) from error
        return list(rendered.token_ids)

    def extend(
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
        """Return the message in generated ids.

        Why not always the package's parser? It reads no call that the end of the text closes, none behind
        Llama's ``<|python_tag|>``, no list of calls, and converts fewer arguments by the tool's schema.
        """
        text = self.decode(output_ids)
        if self.name == HARMONY:
            split = SplitText("", text)  # it has channels instead of tags
        else:
            opened = self.opens_thought(prompt_ids, self._tags)
            split = split_reasoning(text, self._tags, opened=opened)
        if self._parser is None and not split.is_open:
            return self._parse_by_package(text, output_ids, tools, prompt_ids)
        if self._parser is None or self._quotes_marks(split.rest, output_ids):
            return ParsedMessage(split.rest.strip(), reasoning=split.reasoning)
        return parse_split(self._parser, split, tools)

    def _parse_by_package(
        self, text: str, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int]
    ) -> ParsedMessage:
        parsed = self._renderer.parse_response(
            list(output_ids), tools=list(tools) or None, prompt_ids=list(prompt_ids)
        )
        reasoning = str(parsed.reasoning_content or "")
        calls: list[ToolCall] = []
        error = None
        for call in parsed.tool_calls:
            problem = _problem(call)
            if problem is None:
                calls.append(ToolCall(str(call.name), dict(_arguments(call.arguments) or {})))
            else:
                error = error or problem
        content = str(parsed.content or "")
        if error is not None:
            content = text.partition(reasoning)[2] if reasoning and reasoning in text else text
        return ParsedMessage(content.strip(), tuple(calls), error, reasoning)

    def _quotes_marks(self, text: str, output_ids: Sequence[int]) -> bool:
        """Return whether ordinary tokens spell the marks of calls in ``text``: a quotation and no call."""
        opens = self._parser.opens if isinstance(self._parser, MarkedParser) else ()
        ids = [self.tokens.token_id(mark) for mark in opens if mark in text]
        return bool(ids) and all(token is not None and token not in output_ids for token in ids)

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says."""
        from renderers import build_training_sample

        plain, flags = split_train(messages)
        protected, schemas = self._protected(plain, tools)
        try:
            sample = build_training_sample(
                self._renderer,
                protected,
                role_to_mask=lambda message: message.get("role") == "assistant",
                tools=schemas,
                ensure_final_stop=True,
                message_loss_mask=flags,
            )
        except Exception as error:
            raise self._refusal(messages, error) from error
        return TokenizedConversation(
            np.asarray(sample.token_ids, np.int64), np.asarray(sample.loss_mask, np.bool_)
        )

    def _protected(
        self, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[list[Any], list[Any] | None]:
        if self.name == HARMONY:
            return list(messages), list(tools) if tools else None
        return self.tokens.protect(messages), self.tokens.protect_tools(tools)

    def _refusal(self, messages: Sequence[Message], error: Exception) -> TrajectoryError:
        roles = " ".join(str(message.get("role")) for message in messages)
        return TrajectoryError(
            f"the chat format {self.name} cannot render the roles [{roles}]: {error}",
            hint="give another by --chat_format",
        )


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
