"""docs/your_own/environment.md: its environment is 20 lines long, and runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from test_environment_rollout import play

from agentrl.documents.status import StopReason
from agentrl.rollout.load_tasks import read_task_source

PAGE = Path(__file__).parents[4] / "docs" / "your_own" / "environment.md"


async def test_the_environment_of_the_page_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.read_text(encoding="utf-8")
    (code,) = re.findall(r'```python title="halving.py"\n(.*?)```', page, re.DOTALL)
    assert sum(bool(line.strip()) for line in code.splitlines()) <= 22
    (tmp_path / "halving.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    task = read_task_source("env:halving:Halving?n=3&seed=1", shuffle=False).tasks[0]
    assert (task.max_turns, task.system_prompt) == (7, "Answer with a number only.")
    secret = task.meta["secret"]
    rollout, outcome = await play(task, "multi_turn", "I do not know", str(secret + 1), str(secret))
    assert outcome.stop_reason is StopReason.ANSWERED
    said = [message["content"] for message in rollout.messages if message["role"] == "user"]
    assert said == [task.query, "higher", "lower"]
    assert rollout.tool_rewards["environment"]["state"] == 1.0
