"""What CONTRIBUTING names exists: the files of its map, the commands of its first block, and its floors."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def test_every_file_of_the_map_exists() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| Where ")]
    named = [name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[2])]
    assert len(rows) > 25
    folders = [ROOT / "src/agentrl", ROOT / "src/agentrl/chat/parsers"]
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def test_every_command_of_the_page_exists() -> None:
    block = TEXT.split("```bash")[1].split("```")[0]
    named = re.findall(r"(?:scripts|tests)/[\w/.]+", block)
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_floors_are_those_that_are_checked() -> None:
    page = TEXT.split("import each other:")[1].split("## Rules")[0]
    written = [set(re.findall(r"`(\w+)`", floor)) for floor in re.split(r"^\d\. ", page, flags=re.M)[1:]]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    assert written == [set(layer.split(" : ")) for layer in layers]
