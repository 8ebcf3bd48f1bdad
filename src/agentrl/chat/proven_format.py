"""Wrap a chat format: rewrite messages as its template needs them, and keep or drop earlier reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from agentrl.chat.adapt import Adaptation, in_call_order
from agentrl.chat.chat_format import (
    ChatFormat,
    Message,
    ThinkingRetention,
    TokenizedConversation,
    ToolSchemas,
)
from agentrl.chat.parsers import ParsedMessage
from agentrl.chat.vision import Vision, require_text_only
from agentrl.documents.images import has_images
from agentrl.errors import TrajectoryError

KeptThoughts = Literal["all", "tool_cycle", "none"]
"""Earlier thoughts that a template renders: all, those since the last user message, none."""

_KEPT = {
    "all": "stay in the context",
    "tool_cycle": "stay until the next user message",
    "none": "are dropped at every turn",
}


class RenderingFormat(ChatFormat, Protocol):
    """A chat format that can also render a conversation without a generation prompt."""

    @property
    def call_marks(self) -> tuple[str, ...] | None:
        """Return the texts with which a tool call may begin; None if any text may be one."""
        ...

    def render_closed(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return a conversation that ends with its last message."""
        ...


class ProvenFormat:
    """A format that renders every message of the proof's conversation.

    Where earlier thoughts are dropped, the next prompt is a branch: ``next_prompt`` returns None.
    """

    def __init__(
        self,
        base: RenderingFormat,
        adaptation: Adaptation,
        template_keeps: KeptThoughts,
        retention: ThinkingRetention,
        tool_problems: Sequence[str] = (),
        *,
        skips_cycles: bool = False,
        vision: Vision | None = None,
    ) -> None:
        """``tool_problems``: why the format cannot be used with tools. ``vision``: how it shows images.

        ``skips_cycles``: what follows a generation does not depend on the tool cycle before it.
        """
        self.base = base
        self.retention = retention
        self.adaptation = adaptation
        self.template_keeps = template_keeps
        self.keeps: KeptThoughts = template_keeps if retention == "template" else retention
        self.tool_problems = tuple(tool_problems)
        self.skips_cycles = skips_cycles
        self.name = base.name
        self.stop_ids = base.stop_ids
        self.vision = vision

    def without_tools(self, problem: str) -> ProvenFormat:
        """Return the same format, not to be used with tools because of ``problem``."""
        return ProvenFormat(
            self.base,
            self.adaptation,
            self.template_keeps,
            self.retention,
            [problem],
            skips_cycles=self.skips_cycles,
            vision=self.vision,
        )

    def skipping_cycles(self) -> ProvenFormat:
        """Return the same format, which renders no tool cycle again to extend a prompt."""
        return ProvenFormat(
            self.base,
            self.adaptation,
            self.template_keeps,
            self.retention,
            self.tool_problems,
            skips_cycles=True,
            vision=self.vision,
        )

    def with_vision(self, vision: Vision | None) -> ProvenFormat:
        """Return the same format, which shows images as ``vision`` says."""
        return ProvenFormat(
            self.base,
            self.adaptation,
            self.template_keeps,
            self.retention,
            self.tool_problems,
            skips_cycles=self.skips_cycles,
            vision=vision,
        )

    @property
    def call_marks(self) -> tuple[str, ...] | None:
        """Return the texts with which a tool call may begin; None if any text may be one."""
        return self.base.call_marks

    @property
    def description(self) -> str:
        """Return one line: the format, its changes of messages, and whether earlier thoughts stay."""
        thoughts = f"earlier thoughts {_KEPT[self.keeps]}"
        if self.keeps != self.template_keeps:
            thoughts += f" (in the template they {_KEPT[self.template_keeps]})"
        changed = self.adaptation.describe()
        parts = [self.base.description, *([f"with {changed}"] if changed else []), thoughts]
        images = [] if self.vision is None else ["with images"]
        return "; ".join([*parts, *images, *(["without tools"] if self.tool_problems else [])])

    @property
    def agreed_settings(self) -> dict[str, str]:
        """Return what all samplers of a run must have in common."""
        settings = {**self.base.agreed_settings, "thinking_retention": self.keeps}
        return settings if self.vision is None else {**settings, "images": repr(self.vision)}

    def render(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return the prompt of a conversation, up to where the assistant continues."""
        return self._expanded(self.base.render(self._adapted(messages), tools), messages)

    def render_closed(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return a conversation that ends with its last message."""
        return self._expanded(self.base.render_closed(self._adapted(messages), tools), messages)

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a message's text has at least; 0 if none is known."""
        return self.base.fewest_tokens(text)

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one; None where a thought is dropped."""
        if self._drops_a_thought(history, new_messages):
            return None
        self._check(new_messages)
        adapt = self.adaptation
        count = len(history)
        whole = adapt.with_ids([*history, *new_messages])
        history, new_messages = whole[:count], whole[count:]
        last = adapt.apply_to_one(history[-1])
        new = adapt.apply(in_call_order([history[-1], *new_messages])[1:])
        before = without_cycle(history[:-1]) if self.skips_cycles else history[:-1]
        try:
            ids = self.base.next_prompt(prompt_ids, output_ids, [*adapt.apply(before), last], new, tools)
        except TrajectoryError:
            if len(before) == len(history) - 1:
                raise
            written = [*adapt.apply(history[:-1]), last]
            ids = self.base.next_prompt(prompt_ids, output_ids, written, new, tools)
        return None if ids is None else self._expanded(ids, new)

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message in generated ids."""
        return self.base.parse(output_ids, tools, prompt_ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        return self.base.decode(ids)

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation, a mask of what the assistant says, and its images."""
        adapted = self._adapted(messages)
        plain = self.base.tokenize(adapted, tools)
        if self.vision is None or not has_images(adapted):
            return plain
        counts = self.vision.repeats(plain.input_ids.tolist(), adapted)
        ids, trained = np.repeat(plain.input_ids, counts), np.repeat(plain.is_trainable, counts)
        return TokenizedConversation(
            input_ids=ids,
            is_trainable=trained & (ids != self.vision.image_token),
            images=self.vision.locate(ids.tolist(), adapted),
        )

    def _drops_a_thought(self, history: Sequence[Message], new_messages: Sequence[Message]) -> bool:
        """Return whether a thought of the last prompt or output is not in the next prompt.

        Earlier ones were dropped before.
        """
        if self.keeps == "none":
            return _has_thought(history[-1])
        if self.keeps == "all" or not any(message.get("role") == "user" for message in new_messages):
            return False
        return any(_has_thought(message) for message in history[_last_question(history) :])

    def _check(self, messages: Sequence[Message]) -> None:
        if self.vision is None:
            require_text_only(messages, f"the model (chat format {self.name})")

    def _expanded(self, ids: list[int], messages: Sequence[Message]) -> list[int]:
        return ids if self.vision is None else self.vision.expand(ids, self.adaptation.apply(messages))

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        self._check(messages)
        return self.adaptation.apply(self.adaptation.with_ids(self._retained(messages)))

    def _retained(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return messages without the thoughts that ``--thinking_retention tool_cycle`` drops."""
        if self.keeps != "tool_cycle" or self.template_keeps != "all":
            return messages
        question = _last_question(messages)
        return [*map(without_thought, messages[:question]), *messages[question:]]


def _last_question(messages: Sequence[Message]) -> int:
    """Return the place of the last user message; 0 if there is none."""
    places = (place for place in range(len(messages) - 1, -1, -1) if messages[place].get("role") == "user")
    return next(places, 0)


def without_cycle(messages: Sequence[Message]) -> Sequence[Message]:
    """Return messages up to the last user message, if only assistant and tool messages follow it."""
    question = _last_question(messages)
    after = messages[question + 1 :]
    roles = {message.get("role") for message in after}
    is_cycle = bool(messages) and messages[question].get("role") == "user"
    return messages[: question + 1] if is_cycle and roles <= {"assistant", "tool"} else messages


def _has_thought(message: Message) -> bool:
    return message.get("role") == "assistant" and bool(message.get("reasoning_content"))


def without_thought(message: Message) -> Message:
    """Return the message without its reasoning."""
    return {key: value for key, value in message.items() if key not in ("reasoning_content", "thinking")}
