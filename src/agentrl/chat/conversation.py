"""One conversation as token ids: prompt k+1 is prompt k, the ids generated, and the ids of what came after.

Generated ids are kept as the engine returned them. They are never decoded and encoded again, and the template
never sees them: what stands behind a generated turn is taken from a rendering in which a mark stands in its
place, so that a template that rewrites history (drops thoughts, adds empty ones) changes nothing.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.chat.renderer import ChatRenderer, Message
from agentrl.errors import TrajectoryError


class Conversation:
    """A conversation that grows by generations and messages in turn.

    ``messages`` is the readable side, ``prompt_ids()`` the exact one. A new object is a new prefix: that is
    how a context is reset.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Start from ``messages``, with the schemas of the ``tools`` offered."""
        self._renderer = renderer
        self.tools = tuple(dict(tool) for tool in tools or ())
        self.messages: list[Message] = [dict(message) for message in messages]
        self._fixed: list[int] = []
        self._seen = 0
        """Messages whose ids are in ``_fixed``."""
        self._context: list[int] | None = None

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages since the last generation: all of them before the first."""
        return tuple(self.messages[self._seen :])

    def context_ids(self) -> list[int]:
        """Ids since the last generation, up to where the model speaks next; all of them before the first."""
        if self._context is None:
            self._context = self._render_context()
        return list(self._context)

    def prompt_ids(self) -> list[int]:
        """The prompt of the next generation."""
        return self._fixed + self.context_ids()

    def append_generation(self, ids: Sequence[int], message: Message) -> None:
        """The model spoke: ``ids`` as generated, ``message`` as parsed for reading."""
        self._fixed = [*self.prompt_ids(), *ids]
        self.messages.append(dict(message))
        self._seen = len(self.messages)
        self._context = None

    def append_messages(self, messages: Sequence[Message]) -> None:
        """What came after: tool results, a user's message."""
        self.messages.extend(dict(message) for message in messages)
        self._context = None

    def _render_context(self) -> list[int]:
        if self._seen == 0:
            text = self._renderer.render(self.messages, self.tools, add_generation_prompt=True)
            return self._renderer.encode(text)
        ids = self._renderer.encode(self._text_behind_generation())
        closed = bool(self._fixed) and self._fixed[-1] in self._renderer.eos_ids
        return ids[1:] if closed and ids and ids[0] in self._renderer.eos_ids else ids

    def _text_behind_generation(self) -> str:
        """From the end of the generated turn's text, its closing tokens first, to the generation prompt."""
        mark = f"mark{uuid.uuid4().hex}"
        try:
            return self._behind({"role": "assistant", "content": mark}, mark)
        except TrajectoryError:
            if not any(message.get("role") == "tool" for message in self.new_messages):
                raise
            return self._from_closing(self._behind(self._marked_call(mark), mark))

    def _behind(self, stand_in: Message, mark: str) -> str:
        history = [*self.messages[: self._seen - 1], stand_in, *self.new_messages]
        text = self._renderer.render(history, self.tools, add_generation_prompt=True)
        if text.count(mark) != 1:
            raise TrajectoryError(
                f"the chat template renders an assistant message {text.count(mark)} times",
                hint="give a template that renders each message once by --chat_template FILE",
            )
        return text[text.index(mark) + len(mark) :]

    def _marked_call(self, mark: str) -> Message:
        """For templates that let a tool message stand only behind a call."""
        calls = self.messages[self._seen - 1].get("tool_calls") or [{"id": "call00000"}]
        function = {"name": "f", "arguments": {"x": mark}}
        return {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": calls[-1].get("id"), "type": "function", "function": function}],
        }

    def _from_closing(self, text: str) -> str:
        starts = [text.find(eos) for eos in self._renderer.eos_texts()]
        found = [start for start in starts if start >= 0]
        if not found:
            raise TrajectoryError(
                "the chat template does not close an assistant turn with one of the model's stop tokens",
                hint="give a template that does by --chat_template FILE",
            )
        return text[min(found) :]
