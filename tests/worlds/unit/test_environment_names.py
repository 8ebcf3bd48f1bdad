"""What environments are told to use by the ``meta`` of a task: only what the operator allowed."""

from __future__ import annotations

from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest
from json_rows import write_rows

from agentrl.base.user_code import allow
from agentrl.documents.task import Task
from agentrl.documents.task_file import TaskSource, read_tasks
from agentrl.documents.task_json import make_task
from agentrl.environments.environment import environment_names, full_environments, names_of, open_environment
from agentrl.errors import ConfigError, ScorerError, TaskEnvironmentError, TaskFileError
from agentrl.rollout import load_tasks as sources
from agentrl.rollout.load_tasks import read_task_source
from agentrl.scoring.scorers import ScorerContext
from agentrl.worlds.code import code

pytestmark = pytest.mark.attack

HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "openenv": ({"server": "http://169.254.169.254/latest", "openenv": {}}, "//169.254.169.254:80"),
    "nemo_gym": ({"server": "http://10.0.0.1:1", "nemo_gym": {"row": "{}"}}, "//10.0.0.1:1"),
    "verifiers": (
        {"id": "subprocess:Popen", "args": '{"args": ["id"]}', "row": 0}, 'subprocess:Popen({"args": ["id"]})'
    ),
    "verifiers without args": ({"id": "x", "row": 0}, "x()"),
    "harbor": ({"harbor": {"source": "/home/u/t/../x", "folder": ".", "digest": ""}}, "/home/u/x"),
    "code": ({"sandbox": {"visible": ["/home"], "seconds": 3}}, 'sandbox({"visible": ["/home"]})'),
}  # fmt: skip
"""The ``meta`` of tasks of an environment, and what they name."""


def hostile_row(name: str) -> tuple[dict[str, Any], str]:
    """A row of ``HOSTILE``, and what it names outside."""
    meta, outside = HOSTILE[name]
    environment = name.split()[0]
    answer = {"answer": ["pass"]} if environment == "code" else {}
    return {"id": "a", "query": "q", "environment": environment, "meta": meta, **answer}, outside


def untrusted(text: str | Path, split: str = "train") -> TaskSource:
    """A source that others write."""
    source = TaskSource(Path(text))
    source.is_trusted = False
    return source


def task_of(row: dict[str, Any]) -> Task:
    return make_task({"id": "a", "query": "q", **row}, "train", 1)


def open_with_nothing_allowed(task: Task) -> None:
    allow(())
    open_environment(task, call_timeout=1)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stored_task_uses_only_what_is_allowed(name: str) -> None:
    row, outside = hostile_row(name)
    assert environment_names(task_of(row)) == {outside}

    with pytest.raises(TaskEnvironmentError) as refused:
        copy_context().run(open_with_nothing_allowed, task_of(row))
    assert outside in str(refused.value)


@pytest.mark.parametrize("name", ["openenv", "nemo_gym", "verifiers", "harbor", "textarena", "code"])
@pytest.mark.parametrize("meta", [{}, {"server": 1, "openenv": 2, "nemo_gym": [], "harbor": "x", "id": None}])
def test_meta_that_is_not_an_environments_own_fails_its_trajectory_alone(name: str, meta: Any) -> None:
    task = task_of({"environment": name, "meta": meta})
    assert full_environments([task]) in (frozenset(), frozenset({name}))

    with suppress(TaskEnvironmentError, ConfigError):
        copy_context().run(open_with_nothing_allowed, task)


def test_nothing_that_rows_of_others_name_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "evil_module.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sources, "open_source", untrusted)
    for field in ("environment", "scorer", "agent_name"):
        row = {"id": "a", "query": "q", "answer": "1", field: "evil_module:x"}
        file = write_rows(tmp_path / "rows.jsonl", row)
        with pytest.raises(TaskFileError, match="'evil_module:x', and others write this data"):
            read_task_source(str(file))


@pytest.mark.parametrize("name", HOSTILE)
def test_rows_that_others_write_name_nothing_outside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, outside = hostile_row(name)
    file = write_rows(tmp_path / "rows.jsonl", row)
    assert read_task_source(str(file)).outside == {outside}

    monkeypatch.setattr(sources, "open_source", untrusted)
    with pytest.raises(TaskFileError, match="others write this data"):
        read_task_source(str(file))
    with pytest.raises(TaskFileError, match="others write this data"):
        read_tasks(file, source=untrusted(file))


def test_rows_that_others_write_may_use_what_is_built_in(tmp_path: Path) -> None:
    answer = {"tests": ["assert f() == 1"], "sandbox": {"seconds": 3}}
    file = write_rows(tmp_path / "rows.jsonl", {"id": "a", "query": "q", "scorer": "code", "answer": answer})
    assert len(read_tasks(file, source=untrusted(file), names=names_of).tasks) == 1


async def test_an_answer_sets_limits_of_its_sandbox_but_not_what_confines_it() -> None:
    answer = {"tests": ["pass"], "sandbox": {"isolation": "limits", "python": "/tmp/evil"}}
    context = ScorerContext(query="q", answer=answer, final_answer="pass")
    assert names_of(task_of({"scorer": "code", "answer": answer})) == {
        'sandbox({"isolation": "limits", "python": "/tmp/evil"})'
    }
    allow(())
    with pytest.raises(ScorerError, match="nobody allowed"):
        await code(context)
