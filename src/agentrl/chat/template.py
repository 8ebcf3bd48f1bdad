"""Render messages with a model's chat template: messages → text. Needs no torch."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from agentrl.chat.renderer import Message, ToolSchemas
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
        self, messages: Sequence[Message], tools: ToolSchemas | None, *, add_generation_prompt: bool
    ) -> str:
        """Return the text of a conversation. Raises TrajectoryError if the template refuses it."""
        return self._render(messages, tools, {}, add_generation_prompt)

    def render_marked(
        self, messages: Sequence[Message], tools: ToolSchemas | None
    ) -> tuple[str, list[tuple[int, int]]]:
        """Return the text of a conversation, and where ``{% generation %}`` blocks lie in it: [start, end).

        Offsets count characters. Raises TrajectoryError if the template refuses the conversation.
        """
        start, end = (f"{side}{uuid.uuid4().hex}" for side in ("start", "end"))
        marked = self._render(messages, tools, {_START: start, _END: end}, add_generation_prompt=False)
        text, spans = "", []
        before, *blocks = marked.split(start)
        text += before
        for block in blocks:
            inside, _, after = block.partition(end)
            spans.append((len(text), len(text) + len(inside)))
            text += inside + after
        return text, spans

    def _render(
        self,
        messages: Sequence[Message],
        tools: ToolSchemas | None,
        marks: Mapping[str, str],
        add_generation_prompt: bool,
    ) -> str:
        try:
            return self._template.render(
                **self._variables,
                **marks,
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


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
