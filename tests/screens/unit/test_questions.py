"""The saved questions: the page shows each, each asks a view that exists, and Compass can keep them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.store.schema import VIEWS

ROOT = Path(__file__).resolve().parents[3]
QUESTIONS = sorted((ROOT / "assets" / "compass").glob("*.mongodb.js"))
PAGE = (ROOT / "docs" / "auditing.md").read_text(encoding="utf-8")


def query_of(question: Path) -> str:
    lines = question.read_text(encoding="utf-8").splitlines()
    return "\n".join(line for line in lines if not line.startswith("//")).strip()


def test_there_are_ten_questions() -> None:
    assert [path.name[:2] for path in QUESTIONS] == [f"{number:02d}" for number in range(1, 11)]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda path: path.name)
def test_the_page_shows_the_question_and_it_asks_a_view(question: Path) -> None:
    query = query_of(question)
    assert f"```js\n{query}\n```" in PAGE
    asked = re.match(r'db\.getCollection\("(\w+)"\)\.aggregate\(\[', query)
    assert asked[1] in VIEWS.known()


def test_the_page_shows_pictures_that_exist() -> None:
    pictures = re.findall(r"\]\((images/[\w.]+)\)", PAGE)
    assert len(pictures) >= 3
    assert all((ROOT / "docs" / picture).stat().st_size < 200_000 for picture in pictures)


def test_compass_gets_a_file_for_each_question_and_keeps_its_own(tmp_path: Path) -> None:
    saved = tmp_path / "SavedPipelines"
    saved.mkdir()
    (saved / "mine.json").write_text("{}", encoding="utf-8")
    command = [sys.executable, str(ROOT / "scripts" / "compass.py"), "--run_name", "run"]
    for _ in range(2):
        subprocess.run([*command, "--folder", str(tmp_path)], check=True, capture_output=True, timeout=60)
    files = [path for path in saved.iterdir() if path.name != "mine.json"]
    kept = sorted((json.loads(path.read_text()) for path in files), key=lambda item: item["name"])
    assert [item["name"][:2] for item in kept] == [path.name[:2] for path in QUESTIONS]
    for item, question in zip(kept, QUESTIONS, strict=True):
        view, pipeline = item["namespace"].removeprefix("run."), item["pipelineText"]
        assert query_of(question) == f'db.getCollection("{view}").aggregate({pipeline}).toArray();'
        assert (saved / f"{item['id']}.json").is_file()
    nowhere = [*command, "--folder", str(tmp_path / "none")]
    missing = subprocess.run(nowhere, check=False, capture_output=True, text=True, timeout=60)
    assert missing.returncode == 1
    assert "start Compass once" in missing.stderr
