"""Every file that the map of CONTRIBUTING names exists, and so does every command of its first block."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
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
