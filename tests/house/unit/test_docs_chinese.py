"""The pages in Chinese have the headings, tables, links and code blocks of the English ones.

That of flags leads to the English tables, which are generated. A page that has no Chinese one says so at its
top, and the Chinese contents list it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from docs_pages import DOCS, ROOT, anchors, blocks, headings, links

README = ROOT / "README.zh.md"
CHINESE = DOCS / "zh"
CONTENTS = CHINESE / "index.md"
FLAGS = CHINESE / "flags.md"
TRANSLATED = [README, *sorted(CHINESE.rglob("*.md"))]
ENGLISH = [page for page in sorted(DOCS.rglob("*.md")) if not page.is_relative_to(CHINESE)]


def english_of(page: Path) -> Path:
    """Return the page that ``page`` translates."""
    return ROOT / "README.md" if page == README else DOCS / page.relative_to(CHINESE)


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_translation_is_in_step(page: Path) -> None:
    english = english_of(page)
    code = [
        [(block.language, block.title, block.text, block.not_run) for block in blocks(item)]
        for item in (english, page)
    ]
    assert code[0] == code[1], f"copy the code blocks of {english.name} into {page.name}"
    levels = [[heading.split(" ")[0] for heading in headings(item)] for item in (english, page)]
    targets = _targets(english)
    if page == CONTENTS:  # its last section lists the pages that have no Chinese one
        levels[0].append("##")
        targets |= _only_english()
    assert levels[0] == levels[1]
    assert page == FLAGS or _table_rows(english) == _table_rows(page)
    assert targets == _targets(page)


@pytest.mark.parametrize("page", sorted(CHINESE.rglob("*.md")), ids=lambda page: str(page.relative_to(ROOT)))
def test_each_language_leads_to_the_other(page: Path) -> None:
    english = english_of(page)
    there = Path(os.path.relpath(page, english.parent)).as_posix()
    back = Path(os.path.relpath(english, page.parent)).as_posix()
    assert there in links(english)
    assert back in links(page)


@pytest.mark.parametrize("page", ENGLISH, ids=lambda page: str(page.relative_to(ROOT)))
def test_an_english_page_says_at_its_top_what_there_is_in_chinese(page: Path) -> None:
    if page in _only_english():
        line = f"本页只有英文版。[中文目录]({os.path.relpath(CONTENTS, page.parent)})"
    else:
        line = f"[中文]({os.path.relpath(CHINESE / page.relative_to(DOCS), page.parent)})"
    title, *below = page.read_text(encoding="utf-8").splitlines()[:4]
    assert title.startswith("# ")
    assert below == ["", line, ""]


@pytest.mark.parametrize("page", TRANSLATED, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_chinese_pages_where_there_are(page: Path) -> None:
    translated = {english_of(item) for item in TRANSLATED} - {english_of(page)}
    wrong = [link for link in links(page) if (page.parent / link.split("#")[0]).resolve() in translated]
    assert wrong == []


def test_the_page_of_flags_leads_to_every_table_and_names_flags_that_exist() -> None:
    english = english_of(FLAGS)
    assert {link.partition("#")[2] for link in links(FLAGS)} == {"", *anchors(english)} - {"flags"}
    named, known = (set(re.findall(r"--(\w+)", page.read_text("utf-8"))) for page in (FLAGS, english))
    assert named - known == set()


def test_the_tutorial_is_translated() -> None:
    tutorial = {DOCS / "first_run.md", *(DOCS / "your_own").glob("*.md")}
    assert tutorial - {english_of(page) for page in TRANSLATED} == set()


def test_the_contents_of_the_site_name_every_chinese_page() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    pages = [page.relative_to(DOCS).as_posix() for page in sorted(CHINESE.rglob("*.md"))]
    assert [page for page in pages if f": {page}\n" not in contents] == []


def _only_english() -> set[Path]:
    return set(ENGLISH) - {english_of(page) for page in TRANSLATED}


def _table_rows(page: Path) -> int:
    return sum(line.startswith("| ") for line in page.read_text(encoding="utf-8").splitlines())


def _targets(page: Path) -> set[Path]:
    """Return the other pages and files that a page links to: of a translated one the English page."""
    local = [link.split("#")[0] for link in links(page) if ":" not in link and not link.startswith("#")]
    files = {(page.parent / link).resolve() for link in local}
    pages = {english_of(file) if file in TRANSLATED else file for file in files}
    return pages - {english_of(page) if page in TRANSLATED else page}
