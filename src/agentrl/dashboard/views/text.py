"""Read and cut the text of models, tools and task files for a page; the templates escape it (``visible``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from agentrl.documents.images import text_of

MAX_CHARS: Final = 20_000
"""Characters of one text on a page; a link leads to the whole."""
_LINE = 100


@dataclass(frozen=True, slots=True)
class Shown:
    """The beginning of a text. ``chars`` counts the characters of the whole."""

    text: str
    chars: int

    @property
    def is_cut(self) -> bool:
        """Return whether the page shows only the beginning."""
        return self.chars > len(self.text)


def shown(value: object) -> Shown:
    """Return the beginning of a text for a page."""
    text = str(value)
    return Shown(text[:MAX_CHARS], len(text))


def content_text(content: Any) -> str:
    """Return the text of a message's content, whatever a client has sent."""
    if content is None or isinstance(content, (str, list)):
        return text_of(content)
    return json_text(content)


def call_text(call: Any) -> str:
    """Return a tool call as ``→ name(arguments)``."""
    function = call.get("function", call) if isinstance(call, Mapping) else {}
    return f"→ {function.get('name', '?')}({json_text(function.get('arguments'))})"


def json_text(value: Any) -> str:
    """Return a text as it is, and any other value as JSON: on one line if it is short."""
    if isinstance(value, str):
        return value
    is_short = len(str(value)) < _LINE
    return json.dumps(value, ensure_ascii=False, default=str, indent=None if is_short else 1)
