"""The chat format of any model with a chat template: the template's text, and a parser of its tool calls.

The ids between two generations are the difference of two renderings. Their history has a marker instead of
the generated turn, so a template that rewrites history (drops thoughts, adds empty ones) changes no id.
"""

from __future__ import annotations

import marshal
import threading
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np

from agentrl.chat.chat_format import Message, TokenizedConversation, ToolSchemas, split_train
from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers import ParsedMessage, ToolCallParser, opens_thought, parse_text
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.reasoning import tags_in
from agentrl.chat.template import ChatTemplate
from agentrl.errors import TrajectoryError

_PROMPT_END = 16
"""Tokens at the end of a prompt in which a template may open a thought."""


_MAX_PROMPTS = 16


class TemplateFormat:
    """A chat template with its tokenizer and a tool-call parser."""

    name = "template"

    def __init__(
        self,
        template: ChatTemplate,
        tokens: ControlTokens,
        parser: ToolCallParser,
        stop_ids: Iterable[int],
        parser_name: str = "hermes",
    ) -> None:
        """``stop_ids`` close an assistant turn."""
        self.template = template
        self.tokens = tokens
        self._parser = parser
        self.parser_name = parser_name
        self.stop_ids = frozenset(stop_ids)
        self._tags = tags_in(template.source)
        self._prompts: dict[bytes, list[int]] = {}
        """Ids of the latest prompts by ``_key``: all trajectories of a group start with one prompt."""
        self._keeping = threading.Lock()
        self._decoded: tuple[Sequence[int], str] = ((), "")
        """The last ids given to ``decode`` and their text."""

    @property
    def call_marks(self) -> tuple[str, ...] | None:
        """Return the texts with which a tool call may begin; None if any text may be one."""
        return self._parser.marks if isinstance(self._parser, MarkedParser) else None

    def with_parser(self, parser: ToolCallParser, name: str) -> TemplateFormat:
        """Return the same format with another parser of tool calls."""
        return TemplateFormat(self.template, self.tokens, parser, self.stop_ids, name)

    @property
    def description(self) -> str:
        """Return one line about the format."""
        return f"the model's chat template, tool calls by the text parser {self.parser_name}"

    @property
    def agreed_settings(self) -> dict[str, str]:
        """Return what all samplers of a run must have in common."""
        return {"chat_template": f"sha256 {self.template.digest}"}

    def render(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return the prompt of a conversation, up to where the assistant continues."""
        key = self._key(messages, tools)
        ids = None if key is None else self._prompts.pop(key, None)
        if ids is None:
            ids = self.tokens.encode(self._text(messages, tools, add_generation_prompt=True))
        if key is not None:
            with self._keeping:
                self._prompts[key] = ids
                if len(self._prompts) > _MAX_PROMPTS:
                    del self._prompts[next(iter(self._prompts))]
        return list(ids)

    def render_closed(self, messages: Sequence[Message], tools: ToolSchemas | None) -> list[int]:
        """Return a conversation that ends with its last message."""
        return self.tokens.encode(self._text(messages, tools, add_generation_prompt=False))

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
        """Return the ids between a generation and the next one."""
        text = self._text_after_generation(history, new_messages, tools)
        ids = self.tokens.encode(text)
        closed = bool(output_ids) and output_ids[-1] in self.stop_ids
        return ids[1:] if closed and ids and ids[0] in self.stop_ids else ids

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        """Return the message in generated ids."""
        opened = opens_thought(self.tokens.decode(prompt_ids[-_PROMPT_END:]), self._tags)
        return parse_text(self._parser, self.decode(output_ids), tools, self._tags, opened=opened)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of generated ids with special tokens, without the ids that close the turn."""
        if isinstance(ids, tuple) and ids is self._decoded[0]:
            return self._decoded[1]
        end = len(ids)
        while end and ids[end - 1] in self.stop_ids:
            end -= 1
        text = self.tokens.decode(ids[:end])
        self._decoded = (ids, text)
        return text

    def tokenize(self, messages: Sequence[Message], tools: ToolSchemas | None) -> TokenizedConversation:
        """Return a whole conversation and a mask of what the assistant says.

        Raises ValueError for a template that does not render the start of a conversation as a prefix of it.
        """
        plain, flags = split_train(messages)
        masked = self._mask_by_marks if self.template.marks_assistant else self._mask_by_prefixes
        ids, mask = masked(plain, flags, tools)
        return TokenizedConversation(np.asarray(ids, np.int64), np.asarray(mask, np.bool_))

    def _key(self, messages: Sequence[Message], tools: ToolSchemas | None) -> bytes | None:
        """Return bytes that are equal only for prompts with equal text; None if the text may change."""
        if self.template.reads_clock:
            return None
        try:
            return marshal.dumps((list(messages), list(tools or ())), 0)  # 0: no marks of shared objects
        except ValueError:
            return None  # an object of another kind than JSON's

    def _text(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool
    ) -> str:
        return self.template.render(
            self.tokens.protect(messages),
            self.tokens.protect_tools(tools),
            add_generation_prompt=add_generation_prompt,
        )

    def _text_after_generation(
        self, history: Sequence[Message], new_messages: Sequence[Message], tools: ToolSchemas | None
    ) -> str:
        """Return the rendered text after the generated turn: its closing tokens to the generation prompt."""
        marker = f"mark{uuid.uuid4().hex}"
        added = self.tokens.protect(new_messages)
        before = history[:-1]
        has_results = any(message.get("role") == "tool" for message in new_messages)
        if not (has_results and history[-1].get("tool_calls") and self._names_tools_by_calls):
            try:
                spoken = {"role": "assistant", "content": marker}
                return self._text_after(marker, [*before, spoken, *added], tools)
            except TrajectoryError:
                if not has_results:
                    raise
        called = _marked_call(history[-1], marker)
        return self._from_closing_token(self._text_after(marker, [*before, called, *added], tools))

    @cached_property
    def _names_tools_by_calls(self) -> bool:
        """Return whether the template writes a result under the name of the latest call that it can see.

        Then the generated turn must be a call: behind a text, an earlier call's name would be written.
        """
        earlier, marker = (f"mark{uuid.uuid4().hex}" for _ in range(2))
        question: Message = {"role": "user", "content": "1"}
        spoken: Message = {"role": "assistant", "content": marker}
        results: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": f"call0000{place}", "content": "1"}
            for place, name in enumerate((earlier, "later"))
        ]
        for arguments in ({"x": 1}, '{"x": 1}'):
            function = {"name": earlier, "arguments": arguments}
            calls = [{"id": "call00000", "type": "function", "function": function}]
            called: Message = {"role": "assistant", "content": "", "tool_calls": calls}
            with suppress(TrajectoryError):
                messages = [question, called, results[0], spoken, results[1]]
                return earlier in self._text_after(marker, messages, None)
        return False

    def _text_after(self, marker: str, messages: Sequence[Message], tools: ToolSchemas | None) -> str:
        text = self.template.render(messages, tools, add_generation_prompt=True)
        if text.count(marker) != 1:
            raise TrajectoryError(
                f"the chat template renders an assistant message {text.count(marker)} times",
                hint="give a template that renders each message once by --chat_template FILE",
            )
        return text[text.index(marker) + len(marker) :]

    def _from_closing_token(self, text: str) -> str:
        texts = (self.tokens.token_text(token) for token in self.stop_ids)
        found = [place for place in (text.find(closing) for closing in texts if closing) if place >= 0]
        if not found:
            raise TrajectoryError(
                "the chat template does not close an assistant turn with one of the model's stop tokens",
                hint="give a template that does by --chat_template FILE",
            )
        return text[min(found) :]

    def _mask_by_marks(
        self, messages: Sequence[Message], flags: Sequence[bool], tools: ToolSchemas | None
    ) -> tuple[list[int], list[bool]]:
        text, spans = self.template.render_marked(
            self.tokens.protect(messages), self.tokens.protect_tools(tools)
        )
        trained = [
            flag for message, flag in zip(messages, flags, strict=True) if message["role"] == "assistant"
        ]
        if not all(trained):
            if len(spans) != len(trained):
                raise ValueError(
                    f"the chat template marks {len(spans)} parts of {len(trained)} assistant messages, so"
                    " messages with train: false cannot be found in it"
                )
            spans = [span for span, flag in zip(spans, trained, strict=True) if flag]
        ids, mask, left = [], [], list(reversed(spans))
        for token, (start, end) in self.tokens.encode_with_offsets(text):
            while left and left[-1][1] <= start:
                left.pop()
            ids.append(token)
            mask.append(bool(left) and start < end and left[-1][0] <= start)
        return ids, mask

    def _mask_by_prefixes(
        self, messages: Sequence[Message], flags: Sequence[bool], tools: ToolSchemas | None
    ) -> tuple[list[int], list[bool]]:
        """Mark what each trained message adds to the prompt before it, up to its last closing token."""
        encode = self.tokens.encode
        whole = encode(self._text(messages, tools, add_generation_prompt=False))
        mask = [False] * len(whole)
        for index, is_trained in enumerate(flags):
            if not is_trained:
                continue
            prompt = encode(self._text(messages[:index], tools, add_generation_prompt=True))
            spoken = encode(self._text(messages[: index + 1], tools, add_generation_prompt=False))
            if whole[: len(spoken)] != spoken or spoken[: len(prompt)] != prompt:
                raise ValueError(
                    f"the chat template does not render messages up to {index} as a prefix of the"
                    " conversation"
                )
            start, end = len(prompt), len(spoken)
            closings = [place for place in range(start, end) if spoken[place] in self.stop_ids]
            if closings:
                end = closings[-1] + 1
            mask[start:end] = [True] * (end - start)
        return whole, mask


def _marked_call(message: Message, marker: str) -> Message:
    """Return the message with ``marker`` in its last call: some templates allow results only after calls."""
    calls = message.get("tool_calls") or [{"id": "call00000", "function": {"name": "f"}}]
    is_text = isinstance(calls[-1]["function"].get("arguments"), str)
    arguments = f'{{"x": "{marker}"}}' if is_text else {"x": marker}
    function = {"name": calls[-1]["function"]["name"], "arguments": arguments}
    last = {"id": calls[-1].get("id"), "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [*calls[:-1], last]}
