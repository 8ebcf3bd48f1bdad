"""Define a chat format: how messages become token ids, and sampled ids a message, for one model."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.parsers import ParsedMessage
from agentrl.documents.images import ImageSpan

Message = dict[str, Any]
"""One chat message, as in an OpenAI request; ``reasoning_content`` holds an assistant's thought."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""The function schemas of the tools offered, as in an OpenAI request."""

ThinkingRetention = Literal["template", "all", "tool_cycle"]
"""Which earlier thoughts stay in the context: as the template keeps them, all, those since the last user
message."""


TRAIN = "train"
"""Field of an assistant message: false makes it context of a conversation for fine-tuning."""


UNSEEN_HINT = (
    "give a template that shows tools by --chat_template FILE (assets/chat_templates has one), or describe"
    " the tools in --system_prompt"
)
_SHOWN = 5


@dataclass(frozen=True)
class TokenizedConversation:
    """``input_ids`` int64[n]; ``is_trainable`` bool[n] marks the tokens of trained assistant messages.

    ``images`` are the tokens that stand for images.
    """

    input_ids: NDArray[np.int64]
    is_trainable: NDArray[np.bool_]
    images: tuple[ImageSpan, ...] = ()


def split_train(messages: Sequence[Message]) -> tuple[list[Message], list[bool]]:
    """Return the messages without the field ``train``, and whether each is a trained assistant message."""
    flags = [m.get("role") == "assistant" and m.get(TRAIN, True) is True for m in messages]
    return [{key: value for key, value in m.items() if key != TRAIN} for m in messages], flags


class ChatFormat(Protocol):
    """Converts messages to token ids and back. Text inside messages never becomes a control token."""

    @property
    def name(self) -> str:
        """Return the name for ``--chat_format``."""
        ...

    @property
    def description(self) -> str:
        """Return one line: what the format is, and what happens to earlier thoughts."""
        ...

    @property
    def stop_ids(self) -> frozenset[int]:
        """Return the ids at which an engine stops; each of them closes an assistant turn."""
        ...

    @property
    def agreed_settings(self) -> dict[str, str]:
        """Return what all samplers of a run must have in common."""
        ...

    def render(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return the prompt of a conversation, up to where the assistant continues.

        Raises TrajectoryError if the conversation cannot be rendered.
        """
        ...

    def fewest_tokens(self, text: str) -> int:
        """Return a number of tokens that a message's text has at least; 0 if none is known."""
        ...

    def next_prompt(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one: prompt, output, *these ids*, next output.

        ``history`` ends with the message that ``output_ids`` were parsed into; ``new_messages`` follow it.
        None if the next prompt drops earlier reasoning and so does not continue this one: render all messages
        then, as a new branch of the token tree.
        """
        ...

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message that was generated after ``prompt_ids``; its ``error`` reports a bad call."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        ...

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says, for fine-tuning.

        Assistant messages with ``train: false`` are not in the mask. Raises ValueError or TrajectoryError
        for a conversation whose tokens cannot be attributed.
        """
        ...


def unseen_tools(chat_format: ChatFormat, prompt: Sequence[int], tools: ToolSchemas) -> list[str]:
    """Return the names of the ``tools`` that do not stand in a prompt: its model cannot know them."""
    text = chat_format.decode(prompt)
    names = [str(tool.get("function", tool).get("name")) for tool in tools]
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", text)]


def unseen_problem(chat_format: ChatFormat, prompt: Sequence[int], tools: ToolSchemas) -> str | None:
    """Return which ``tools`` a prompt does not name, and what to do; None if it names all."""
    unseen = unseen_tools(chat_format, prompt, tools)
    if not unseen:
        return None
    more = f" and {len(unseen) - _SHOWN} more" if len(unseen) > _SHOWN else ""
    return (
        f"the prompt does not name the tools {', '.join(unseen[:_SHOWN])}{more}: the chat format"
        f" {chat_format.name} leaves them out, and the model cannot know them; {UNSEEN_HINT}"
    )
