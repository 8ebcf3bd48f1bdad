"""Cut the text of models, tools and task files for a page; the templates escape it (``visible``)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

MAX_CHARS: Final = 20_000
"""Characters of one text on a page; a link leads to the whole."""


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
