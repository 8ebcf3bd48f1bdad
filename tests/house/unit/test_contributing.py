"""What CONTRIBUTING says is so: rooms and floors, files and commands, and the figures of the walks."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from walks.held import listed, stored_figures
from walks.house import WINGS
from walks.walk import WAYS

ROOT = Path(__file__).parents[3]
SOURCE = ROOT / "src/agentrl"
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ABSENT = {wing for wing in WINGS if not (SOURCE / wing).is_dir()}
"""Wings that were taken away: the core's tests pass without them."""


def test_every_file_of_the_map_exists() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("| Where ")]
    named = [name for row in rows for name in re.findall(r"`([\w/]+(?:\.py|/))`", row.split("|")[2])]
    assert len(rows) > 25
    folders = [SOURCE, SOURCE / "chat/parsers"]
    missing = [name for name in named if not any((folder / name).exists() for folder in folders)]
    assert [name for name in missing if name.partition("/")[0] not in ABSENT] == []


def test_every_command_of_the_page_exists() -> None:
    block = TEXT.split("```bash")[1].split("```")[0]
    named = re.findall(r"(?:scripts|tests)/[\w/.]+", block)
    assert len(named) > 3
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_floors_are_those_that_are_checked() -> None:
    picture = TEXT.split("```text")[1].split("```")[0]
    drawn = [set(re.findall(r"\w+", re.split(r"\s{4,}", line.strip())[0])) for line in picture.splitlines()]
    layers = SETTINGS["tool"]["importlinter"]["contracts"][0]["layers"]
    checked = [set(layer.split(" : ")) for layer in layers]
    assert [floor for floor in drawn if floor] == [floor for floor in checked if floor != {"__main__"}]


def test_every_room_and_wing_has_its_line() -> None:
    rooms = {path.parent.name for path in SOURCE.glob("*/__init__.py")}
    assert set(re.findall(r"^\*\*(\w+)\*\*$", TEXT, flags=re.M)) == set(WINGS)
    assert set(re.findall(r"^\| `(\w+)` \|", TEXT, flags=re.M)) == rooms - set(WINGS)


@pytest.mark.parametrize("walk", WAYS)
def test_the_page_says_the_figures_that_the_walks_are_held_to(walk: str) -> None:
    title = WAYS[walk].title
    figures = ", ".join(f"{number} {what}" for what, number in stored_figures()[walk].items())
    assert f"\n### {title}: {figures}\n" in TEXT
    named = [file for part in listed(title) for file in part]
    assert len(named) == stored_figures()[walk]["files"]
    assert [file for file in named if not (SOURCE / file).exists()] == []
