"""Keep one conversation as token ids: prompt k+1 = prompt k + generated ids + ids of the messages after them.

Generated ids stay as the engine returned them: they are never decoded and encoded again. Where the chat
format drops earlier thoughts, the next prompt is a rendering of its own: a new branch of the token tree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.chat.chat_format import ChatFormat, Message, ToolSchemas
from agentrl.documents.images import ImageSpan


class Conversation:
    """A conversation that grows by generations and messages.

    ``messages`` is for people, ``prompt_ids()`` for the engine. To reset the context, create a new object:
    it starts a new prefix.
    """

    def __init__(
        self,
        chat_format: ChatFormat,
        messages: Sequence[Message],
        tools: ToolSchemas | None = None,
    ) -> None:
        """Start from ``messages``. ``tools`` are the function schemas that the format renders."""
        self._format = chat_format
        self.tools = tuple(dict(tool) for tool in tools or ())
        self.messages: list[Message] = [dict(message) for message in messages]
        self._prompt: list[int] = []
        self._output: list[int] = []
        """The last prompt and what was generated after it."""
        self._seen = 0
        """Number of messages that the last prompt and its output hold."""
        self._context: list[int] | None = None
        self._next_prompt: list[int] | None = None
        self._starts_branch = True
        self._images: tuple[ImageSpan, ...] = ()
        """The images of the last prompt."""

    @property
    def starts_branch(self) -> bool:
        """Return whether the next prompt does not continue the last generation."""
        self.context_ids()
        return self._starts_branch

    @property
    def new_messages(self) -> tuple[Message, ...]:
        """Messages since the last generation; all messages if the next prompt starts a branch."""
        return tuple(self.messages if self.starts_branch else self.messages[self._seen :])

    def context_ids(self) -> list[int]:
        """Return the ids between the last generation and the next; the whole prompt of a new branch.

        Do not change the list, nor that of ``prompt_ids``: each is made once.
        """
        if self._context is None:
            context, history = None, self.messages[: self._seen]
            if history:
                new = self.messages[self._seen :]
                context = self._format.next_prompt(self._prompt, self._output, history, new, self.tools)
            self._starts_branch = context is None
            self._context = self._format.render(self.messages, self.tools) if context is None else context
        return self._context

    def prompt_ids(self) -> list[int]:
        """Return the prompt of the next generation."""
        context = self.context_ids()
        if self._starts_branch:
            return context
        if self._next_prompt is None:
            self._next_prompt = [*self._prompt, *self._output, *context]
        return self._next_prompt

    def context_images(self) -> tuple[ImageSpan, ...]:
        """Return the images in ``context_ids()``."""
        ids = self.context_ids()
        first = 0 if self._starts_branch else self._seen - 1
        return self._format.locate_images(ids, self.messages[first:])

    def prompt_images(self) -> tuple[ImageSpan, ...]:
        """Return the images in ``prompt_ids()``."""
        added = self.context_images()
        if self._starts_branch:
            return added
        before = len(self._prompt) + len(self._output)
        return (*self._images, *(image.moved(before) for image in added))

    def append_generation(self, ids: Sequence[int], message: Message) -> None:
        """Append one generation: ``ids`` as generated, ``message`` as parsed."""
        self._images = self.prompt_images()
        self._prompt, self._output = self.prompt_ids(), list(ids)
        self.append_message(message)

    @property
    def unseen(self) -> tuple[Message, ...]:
        """Return the messages since the last answer; all messages before the first."""
        return tuple(self.messages[self._seen :])

    def append_message(self, message: Message) -> None:
        """Append the answer of another model: it has no ids of the policy."""
        self.messages.append(dict(message))
        self._seen = len(self.messages)
        self._context = self._next_prompt = None

    def append_messages(self, messages: Sequence[Message]) -> None:
        """Append messages that the model did not generate: tool results, user messages."""
        self.messages.extend(dict(message) for message in messages)
        self._context = self._next_prompt = None

    def change_new_messages(self, change: Callable[[Message], Message]) -> None:
        """Replace each message since the last generation by what ``change`` returns for it."""
        self.messages[self._seen :] = [change(message) for message in self.messages[self._seen :]]
        self._context = self._next_prompt = None
