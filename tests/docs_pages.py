"""The pages of the documentation: their fenced blocks, headings and links."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = tuple(sorted(ROOT.glob("README*.md"))) + tuple(sorted(DOCS.rglob("*.md")))

_FENCE = re.compile(r"^(?P<indent> *)(?P<marks>`{3,})(?P<info>[^`]*)$")
_NOT_RUN = re.compile(r"<!-- not run: (?P<reason>[^>]+?) -->\s*$")
_TITLE = re.compile(r'title="([^"]+)"')
_LINK = re.compile(r"(?<!\\)\[[^\]]*\]\(([^)\s]+)\)")
_CODE = re.compile(r"`[^`\n]*`|``.+?``")


@dataclass(frozen=True)
class Block:
    """One fenced block; ``not_run`` is the reason that the comment above it gives."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """Return the fenced blocks of a page, in order; those of one language if it is given."""
    found = list(_blocks(page))
    return found if language is None else [block for block in found if block.language == language]


def _blocks(page: Path) -> Iterator[Block]:
    lines = page.read_text(encoding="utf-8").splitlines()
    above, number = "", 0
    while number < len(lines):
        line = lines[number]
        number += 1
        opening = _FENCE.match(line)
        if opening is None:
            above = f"{above}\n{line}" if line.strip() else above
            continue
        begin, body = number, list[str]()
        while lines[number].strip() != opening["marks"]:
            body.append(lines[number].removeprefix(opening["indent"]))
            number += 1
        number += 1
        reason, title = _NOT_RUN.search(above), _TITLE.search(opening["info"])
        yield Block(
            page, begin, opening["info"].strip().split(" ")[0], title and title[1],
            "\n".join(body) + "\n", reason and reason["reason"],
        )  # fmt: skip
        above = ""


def write_files(page: Path, folder: Path) -> None:
    """Write the blocks of a page that have a title as files into ``folder``."""
    for block in blocks(page):
        if block.title is not None:
            (folder / block.title).write_text(block.text, encoding="utf-8")


def _prose(page: Path) -> str:
    """Return the text of a page without fenced blocks and inline code."""
    lines, fence = [], None
    for line in page.read_text(encoding="utf-8").splitlines():
        match = _FENCE.match(line)
        if fence is None and match is not None:
            fence = match["marks"]
        elif fence is not None:
            fence = None if line.strip() == fence else fence
        else:
            lines.append(line)
    return "\n".join(lines)


def headings(page: Path) -> list[str]:
    """Return the headings of a page with their marks, such as ``## Install``."""
    return [line for line in _prose(page).splitlines() if re.match(r"#{1,6} ", line)]


@functools.cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    found: dict[str, int] = {}
    names = set()
    for heading in headings(page):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.lstrip("#").strip())
        name = re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return names


def links(page: Path) -> list[str]:
    """Return the targets of a page's links and images, without those in code."""
    return _LINK.findall(_CODE.sub("", _prose(page)))
