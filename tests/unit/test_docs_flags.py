"""docs/coming_from.md: every flag on our side of its tables exists."""

from __future__ import annotations

import dataclasses
import re

import pytest
from docs_pages import DOCS

from agentrl.config.load import parse
from agentrl.config.schema import GROUPS

PAGE = (DOCS / "coming_from.md").read_text(encoding="utf-8")
FLAGS = {item.name for group in GROUPS for item in dataclasses.fields(group)}
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("|---")]
OURS = [row.rstrip(" |").split(" | ")[-1] for row in ROWS]


def test_our_flags_exist() -> None:
    named = {name for cell in OURS for name in re.findall(r"--([A-Za-z_0-9]+)", cell)}
    assert len(named) > 80
    assert named - FLAGS == set()


@pytest.mark.parametrize("given", sorted({
    code for cell in OURS for code in re.findall(r"`(--\w+ [^`]+)`", cell) if "…" not in code
}))  # fmt: skip
def test_our_values_are_accepted(given: str) -> None:
    values = given.replace("LOW:HIGH", "0.5:2").replace("LIMIT", "0.1").replace("'", "")
    flags = re.findall(r"(--\w+) (\{.*\}|\S+)", values)
    assert flags
    words = [word for pair in flags for word in pair]
    parse(["--num_train_epochs", "2", *words], command="agentrl", description="", shown=())
