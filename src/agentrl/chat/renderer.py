"""Define messages, and a renderer: what turns them into token ids and back, for one model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers import ParsedMessage, ReasoningTags, opens_thought
from agentrl.documents.images import ImageSpan

Message = dict[str, Any]
"""One chat message, as in an OpenAI request; ``reasoning_content`` holds an assistant's thought."""

ToolSchemas = Sequence[Mapping[str, Any]]
"""The function schemas of the tools offered, as in an OpenAI request."""

TRAIN = "train"
"""Field of an assistant message: false makes it context of a conversation for fine-tuning."""


_PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may open a thought."""


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


class Renderer(ABC):
    """Renders messages as token ids. Text inside messages never becomes a control token."""

    name: str
    """The name for ``--chat_format``."""
    description: str
    """One line about the renderer."""
    agreed_settings: dict[str, str]
    """What all samplers of a run must have in common."""
    call_marks: tuple[str, ...] | None = None
    """The texts with which a tool call may begin; None if any text may be one."""

    def __init__(self, tokens: ControlTokens, stop_ids: Iterable[int]) -> None:
        """``stop_ids`` close an assistant turn."""
        self.tokens = tokens
        self.stop_ids = frozenset(stop_ids)
        self._decoded: tuple[Sequence[int], str] = ((), "")
        """The last ids given to ``decode`` and their text."""

    @abstractmethod
    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation, up to where the assistant continues with ``add_generation_prompt``.

        Raises TrajectoryError if the conversation cannot be rendered.
        """

    @abstractmethod
    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        """Return the ids between a generation and the next one: prompt, output, *these ids*, next output.

        ``history`` ends with the message that ``output_ids`` were parsed into; ``new_messages`` follow it.
        None if the renderer cannot extend the prompt.
        """

    @abstractmethod
    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message that was generated after ``prompt_ids``; its ``error`` reports a bad call."""

    @abstractmethod
    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says, for fine-tuning.

        Assistant messages with ``train: false`` are not in the mask. Raises ValueError or TrajectoryError
        for a conversation whose tokens cannot be attributed.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        last, text = self._decoded
        if isinstance(ids, tuple) and ids is last:
            return text
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        text = self.tokens.decode(ids[:end])
        self._decoded = (ids, text)
        return text

    def opens_thought(self, prompt_ids: Sequence[int], tags: ReasoningTags) -> bool:
        """Return whether a prompt ends inside a thought, as templates of thinking models write it."""
        return opens_thought(self.tokens.decode(prompt_ids[-_PROMPT_END:]), tags)
