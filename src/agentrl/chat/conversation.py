"""Keep one conversation as token ids: prompt k+1 = prompt k + generated ids + ids of the messages after them.

Generated ids stay as the engine returned them: they are never decoded and encoded again. The template never
sees them either. The text after a generated turn comes from a rendering that has a marker in place of that
turn, so a template that rewrites history (drops thoughts, adds empty ones) changes no id.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.renderer import ChatRenderer, Message
from agentrl.errors import TrajectoryError


class Conversation:
    """A conversation that grows by generations and messages.

    ``messages`` is for people, ``prompt_ids()`` for the engine. To reset the context, create a new object:
    it starts a new prefix.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Start from ``messages``. ``tools`` are the function schemas that the template renders."""
        self._renderer = renderer
        self.tools = tuple(dict(tool) for tool in tools or ())
        self.messages: list[Message] = [dict(message) for message in messages]
        self._fixed: list[int] = []
        self._seen = 0
        """Number of messages whose ids are in ``_fixed``."""
        self._context: list[int] | None = None

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages since the last generation; all messages before the first one."""
        return tuple(self.messages[self._seen :])

    def context_ids(self) -> list[int]:
        """Return the ids between the last generation and the next; the whole prompt before the first one."""
        if self._context is None:
            self._context = self._render_context()
        return list(self._context)

    def prompt_ids(self) -> list[int]:
        """Return the prompt of the next generation."""
        return self._fixed + self.context_ids()

    def append_generation(self, ids: Sequence[int], message: Message) -> None:
        """Append one generation: ``ids`` as generated, ``message`` as parsed."""
        self._fixed = [*self.prompt_ids(), *ids]
        self.messages.append(dict(message))
        self._seen = len(self.messages)
        self._context = None

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages that the model did not generate: tool results, user messages."""
        self.messages.extend(dict(message) for message in messages)
        self._context = None

    def replace_new_messages(self, messages: Sequence[Message]) -> None:
        """Replace the messages since the last generation."""
        self.messages[self._seen :] = [dict(message) for message in messages]
        self._context = None

    def _render_context(self) -> list[int]:
        if self._seen == 0:
            text = self._renderer.render(self.messages, self.tools, add_generation_prompt=True)
            return self._renderer.encode(text)
        ids = self._renderer.encode(self._text_after_generation())
        closed = bool(self._fixed) and self._fixed[-1] in self._renderer.eos_ids
        return ids[1:] if closed and ids and ids[0] in self._renderer.eos_ids else ids

    def _text_after_generation(self) -> str:
        """Return the rendered text after the generated turn: its closing tokens to the generation prompt."""
        marker = f"mark{uuid.uuid4().hex}"
        try:
            return self._text_after_marker({"role": "assistant", "content": marker}, marker)
        except TrajectoryError:
            if not any(message.get("role") == "tool" for message in self.new_messages):
                raise
            return self._from_closing_token(self._text_after_marker(self._marked_call(marker), marker))

    def _text_after_marker(self, placeholder: Message, marker: str) -> str:
        history = [*self.messages[: self._seen - 1], placeholder, *self.new_messages]
        text = self._renderer.render(history, self.tools, add_generation_prompt=True)
        if text.count(marker) != 1:
            raise TrajectoryError(
                f"the chat template renders an assistant message {text.count(marker)} times",
                hint="give a template that renders each message once by --chat_template FILE",
            )
        return text[text.index(marker) + len(marker) :]

    def _marked_call(self, marker: str) -> Message:
        """Return a tool call that holds ``marker``: some templates allow tool messages only after a call."""
        calls = self.messages[self._seen - 1].get("tool_calls") or [{"id": "call00000"}]
        function = {"name": "f", "arguments": {"x": marker}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": calls[-1].get("id"), "type": "function", "function": function}],
        }

    def _from_closing_token(self, text: str) -> str:
        starts = [text.find(eos) for eos in self._renderer.eos_texts()]
        found = [start for start in starts if start >= 0]
        if not found:
            raise TrajectoryError(
                "the chat template does not close an assistant turn with one of the model's stop tokens",
                hint="give a template that does by --chat_template FILE",
            )
        return text[min(found) :]
