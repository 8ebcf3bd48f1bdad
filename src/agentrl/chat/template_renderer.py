"""Render any model by its chat template, without torch, and read its tool calls by a text parser.

The ids between two generations are the difference of two renderings. Their history has a marker instead of
the generated turn, so a template that rewrites history (drops thoughts, adds empty ones) changes no id.
"""

from __future__ import annotations

import hashlib
import json
import marshal
import re
import threading
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import numpy as np
from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.chat.control_tokens import ControlTokens
from agentrl.chat.parsers.base import ParsedMessage, get_parser
from agentrl.chat.parsers.marked import MarkedParser
from agentrl.chat.parsers.reasoning import parse_text, tags_in
from agentrl.chat.renderer import Message, Renderer, TokenizedConversation, ToolSchemas, split_train
from agentrl.errors import ModelError, TrajectoryError


class ChatTemplate:
    """A compiled chat template with its variables."""

    def __init__(
        self, source: str, variables: Mapping[str, Any], arguments: Mapping[str, Any] | None = None
    ) -> None:
        """Compile ``source``; ``variables`` are ``bos_token``, …, ``arguments`` ``--chat_template_kwargs``.

        Raises ModelError for a template that is not valid Jinja.
        """
        self.source = source
        self._variables = {**variables, **(arguments or {})}
        hashed = source + (json.dumps(arguments, sort_keys=True) if arguments else "")
        self.digest = hashlib.sha256(hashed.encode("utf-8", "replace")).hexdigest()[:16]
        self.marks_assistant = _GENERATION_TAG.search(source) is not None
        """Whether the template marks assistant text by ``{% generation %}``, as ``render_marked`` needs."""
        self.reads_clock = "strftime_now" in source
        """Whether the text of a conversation may depend on the time."""
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ModelError(
                f"the chat template is not valid Jinja: {error}", hint="give another by --chat_template FILE"
            ) from error

    def render(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas | None,
        *,
        add_generation_prompt: bool,
        marks: Mapping[str, str] | None = None,
    ) -> str:
        """Return the text of a conversation. Raises TrajectoryError if the template refuses it."""
        try:
            return self._template.render(
                **self._variables,
                **(marks or {}),
                messages=list(messages),
                tools=list(tools) if tools else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            roles = " ".join(str(message.get("role")) for message in messages)
            raise TrajectoryError(
                f"the chat template cannot render the roles [{roles}]: {error}",
                hint="give a template that supports tools and these roles by --chat_template FILE",
            ) from error

    def render_marked(
        self, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where ``{% generation %}`` blocks lie in it: [start, end).

        Offsets count characters. Raises TrajectoryError if the template refuses the conversation.
        """
        start, end = (f"{side}{uuid.uuid4().hex}" for side in ("start", "end"))
        marked = self.render(messages, tools, add_generation_prompt=False, marks={_START: start, _END: end})
        text, spans = "", []
        before, *blocks = marked.split(start)
        text += before
        for block in blocks:
            inside, _, after = block.partition(end)
            spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, spans


_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_START, _END = "_generation_start", "_generation_end"
"""Variables that hold the marks around a ``{% generation %}`` block; undefined, and so empty, by default."""


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}``: renders its body between the variables _START and _END."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """Return the body between its two marks."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        start, end = (
            nodes.Output([nodes.Name(name, "load", lineno=line)], lineno=line) for name in (_START, _END)
        )
        return [start, *body, end]


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the Jinja environment that chat templates expect: trimmed blocks, JSON not escaped for HTML."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().astimezone().strftime(form)
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


_MAX_PROMPTS = 16


class TemplateRenderer(Renderer):
    """A chat template with its tokenizer, and a parser of tool calls by its name."""

    name = "template"

    def __init__(
        self, template: ChatTemplate, tokens: ControlTokens, stop_ids: Iterable[int], parser: str = "hermes"
    ) -> None:
        super().__init__(tokens, stop_ids)
        self.template = template
        self.parser_name = parser
        self._parser = get_parser(parser)
        if isinstance(self._parser, MarkedParser):
            self.call_marks = self._parser.marks
        self.description = f"the model's chat template, tool calls by the text parser {parser}"
        self.agreed_settings = {"chat_template": f"sha256 {template.digest}"}
        self._tags = tags_in(template.source)
        self._prompts: dict[bytes, list[int]] = {}
        """Ids of the latest prompts by ``_key``: all trajectories of a group start with one prompt."""
        self._keeping = threading.Lock()

    def with_parser(self, parser: str) -> TemplateRenderer:
        """Return the same renderer with another parser of tool calls."""
        return TemplateRenderer(self.template, self.tokens, self.stop_ids, parser)

    def render(
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Return a conversation; a prompt that was rendered before costs nothing."""
        key = self._key(messages, tools) if add_generation_prompt else None
        ids = None if key is None else self._prompts.pop(key, None)
        if ids is None:
            ids = self.tokens.encode(
                self.template.render(
                    self.tokens.protect(messages),
                    self.tokens.protect_tools(tools),
                    add_generation_prompt=add_generation_prompt,
                )
            )
        if key is not None:
            with self._keeping:
                self._prompts[key] = ids
                if len(self._prompts) > _MAX_PROMPTS:
                    del self._prompts[next(iter(self._prompts))]
        return list(ids)

    def extend(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        history: Sequence[Message],
        new_messages: Sequence[Message],
        tools: ToolSchemas | None,
    ) -> list[int] | None:
        text = self._text_after_generation(history, new_messages, tools)
        ids = self.tokens.encode(text)
        closed = bool(output_ids) and output_ids[-1] in self.stop_ids
        return ids[1:] if closed and ids and ids[0] in self.stop_ids else ids

    def parse(
        self, output_ids: Sequence[int], tools: ToolSchemas, prompt_ids: Sequence[int] = ()
    ) -> ParsedMessage:
        opened = self.opens_thought(prompt_ids, self._tags)
        return parse_text(self._parser, self.decode(output_ids), tools, self._tags, opened=opened)

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
        text = self._text_after(marker, [*before, called, *added], tools)
        closings = (self.tokens.token_text(token) for token in self.stop_ids)
        ends = [end for end in (text.find(closing) for closing in closings if closing) if end >= 0]
        if not ends:
            raise TrajectoryError(
                "the chat template does not close an assistant turn with one of the model's stop tokens",
                hint="give a template that does by --chat_template FILE",
            )
        return text[min(ends) :]

    @cached_property
    def _names_tools_by_calls(self) -> bool:
        """Return whether the template writes a result under the name of the latest call that it can see.

        Then the generated turn must be a call: behind a text, an earlier call's name would be written.
        """
        earlier, marker = (f"mark{uuid.uuid4().hex}" for _ in range(2))
        question: Message = {"role": "user", "content": "1"}
        spoken: Message = {"role": "assistant", "content": marker}
        results: list[Message] = [
            {"role": "tool", "name": name, "tool_call_id": f"call0000{at}", "content": "1"}
            for at, name in enumerate((earlier, "later"))
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
        whole = self.render(messages, tools, add_generation_prompt=False)
        mask = [False] * len(whole)
        for index, is_trained in enumerate(flags):
            if not is_trained:
                continue
            prompt = self.render(messages[:index], tools)
            spoken = self.render(messages[: index + 1], tools, add_generation_prompt=False)
            if whole[: len(spoken)] != spoken or spoken[: len(prompt)] != prompt:
                raise ValueError(
                    f"the chat template does not render messages up to {index} as a prefix of the"
                    " conversation"
                )
            start, end = len(prompt), len(spoken)
            closings = [at for at in range(start, end) if spoken[at] in self.stop_ids]
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
