"""Links of the documentation: files and headings exist, and the site's contents name every page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from docs_pages import DOCS, PAGES, ROOT, anchors, links

import agentrl

OTHERS = (ROOT / "CONTRIBUTING.md", *sorted((ROOT / "assets").rglob("*.md")))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_somewhere(page: Path) -> None:
    broken = [link for link in links(page) if not _exists(page, link)]
    assert broken == []


def _exists(page: Path, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or target.suffix != ".md" or anchor in anchors(target)


def test_the_contents_of_the_site_name_pages_that_exist() -> None:
    contents = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")[1]
    named = re.findall(r": (\S+\.md)$", contents, re.MULTILINE)
    assert len(named) == len(set(named))
    assert [name for name in named if not (DOCS / name).is_file()] == []


def test_the_api_page_has_every_public_name() -> None:
    shown = re.findall(r"^::: agentrl\.(\S+)\.(\w+)$", (DOCS / "api.md").read_text(encoding="utf-8"), re.M)
    missing = set(agentrl.__all__) - {name for _, name in shown} - {"Message"}
    assert missing == set()
    shown.remove(("local.started_run", "Estimate"))  # what evaluate() of a StartedRun returns
    assert {(module, name) for module, name in shown if agentrl._MODULES.get(name) != module} == set()
