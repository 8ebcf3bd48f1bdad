"""What a release contains: every asset but the user's keys, and the licence of every requirement."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import yaml

from agentrl.base.installation import shipped_files

ROOT = Path(__file__).parents[3]


def test_the_keys_of_a_user_are_not_shipped(tmp_path: Path) -> None:
    patterns = re.search(r"ignore_patterns\((.*?)\)", (ROOT / "setup.py").read_text(encoding="utf-8"))
    left_out = shutil.ignore_patterns(*re.findall(r'"([^"]+)"', patterns[1]))
    names = ["agent_config.yml", "agent_config_example.yml", ".env", "mcp_servers.yml", "__pycache__"]
    assert left_out(str(tmp_path), names) == {"agent_config.yml", ".env", "__pycache__"}


def test_the_shipped_files_are_those_of_the_clone() -> None:
    assert shipped_files() == ROOT / "assets"


def test_the_page_of_licences_has_every_requirement() -> None:
    page = (ROOT / "docs" / "licenses.md").read_text(encoding="utf-8").lower()
    files = [ROOT / name for name in re.findall(r"-r (\S+)", (ROOT / "requirements.txt").read_text("utf-8"))]
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    names = [re.split(r"[<>=;~!\[ ]", line)[0].lower() for line in lines if line and line[0] not in "#-"]
    listed = {name.replace("_", "-") for name in re.findall(r"^\| (\S+) \|", page, re.MULTILINE)}
    assert [name for name in names if name.replace("_", "-") not in listed] == []


def test_the_citation_and_the_issue_forms_are_yaml() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["license"] == "Apache-2.0"
    for form in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(form.read_text(encoding="utf-8"))
