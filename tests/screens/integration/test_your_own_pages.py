"""docs/your_own: the commands ``agentrl try`` of each page, with its files, against a real engine."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from docs_pages import DOCS, blocks, write_files
from served_engine import Served, serve_locally
from unmoved.train_dump import make_model

from agentrl.local.local_cli import try_one

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

SHORT = ["--max_new_tokens", "12", "--max_prompt_tokens", "400", "--prompt_reserve_tokens", "100"]
"""Flags that keep a model without training short; those of the page come later and win."""


def tries(page: Path) -> list[str]:
    """Return the ``agentrl try`` commands of a page."""
    lines = [
        line
        for block in blocks(page, "bash")
        for line in block.text.replace("\\\n", " ").splitlines()
        if line.startswith("agentrl try ")
    ]
    return [line for line in lines if "$MODEL" in line]


PAGES = [page for page in sorted((DOCS / "your_own").glob("*.md")) if tries(page)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """An engine that serves the tiny model."""
    with serve_locally(
        make_model(tmp_path_factory.mktemp("served") / "model"), max_total_tokens=8192
    ) as engine:
        yield engine


def test_every_page_has_a_trajectory_to_try() -> None:
    assert {page.stem for page in PAGES} == {
        "agent", "environment", "groups_and_contexts", "index", "langgraph", "scorer", "tasks", "tools",
    }  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_page_is_tried(
    page: Path,
    served: Served,
    mongo_uri: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_files(page, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONGO_URI", mongo_uri)
    monkeypatch.syspath_prepend(str(tmp_path))
    for given in tries(page):
        line = given.replace("$MODEL", str(served.folder)).replace("$ENGINE", served.url)
        command, wanted, *words = shlex.split(line)[1:]
        assert command == "try"
        code = try_one([wanted, *SHORT, *words])
        shown = capsys.readouterr().out
        assert code == 0, f"{given}\n{shown}"
        assert "SCORED" in shown, shown
