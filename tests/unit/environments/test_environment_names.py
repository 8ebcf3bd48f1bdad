"""What environments are told to use by the ``meta`` of a task: only what the operator allowed."""

from __future__ import annotations

import json
from contextlib import suppress
from contextvars import copy_context
from pathlib import Path
from typing import Any

import pytest

from agentrl.documents.task import Task
from agentrl.documents.task_file import read_tasks
from agentrl.documents.task_json import make_task
from agentrl.documents.task_source import TaskSource
from agentrl.environments import tasks as sources
from agentrl.environments.session import environment_names, full_environments, names_of, open_environment
from agentrl.environments.tasks import read_task_source
from agentrl.errors import ConfigError, ScorerError, TaskEnvironmentError, TaskFileError
from agentrl.permissions import allow
from agentrl.scoring.code import code
from agentrl.scoring.scorers import ScorerContext

pytestmark = pytest.mark.attack

HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "openenv": (
        {"environment": "openenv", "meta": {"server": "http://169.254.169.254/latest", "openenv": {}}},
        "//169.254.169.254:80",
    ),
    "nemo_gym": (
        {"environment": "nemo_gym", "meta": {"server": "http://10.0.0.1:1", "nemo_gym": {"row": "{}"}}},
        "//10.0.0.1:1",
    ),
    "verifiers": (
        {
            "environment": "verifiers",
            "meta": {"id": "subprocess:Popen", "args": '{"args": ["id"]}', "row": 0},
        },
        'subprocess:Popen({"args": ["id"]})',
    ),
    "verifiers without args": ({"environment": "verifiers", "meta": {"id": "x", "row": 0}}, "x()"),
    "harbor": (
        {
            "environment": "harbor",
            "meta": {"harbor": {"source": "/home/u/t/../x", "folder": ".", "digest": ""}},
        },
        "/home/u/x",
    ),
    "code": (
        {
            "environment": "code",
            "answer": ["pass"],
            "meta": {"sandbox": {"visible": ["/home"], "seconds": 3}},
        },
        'sandbox({"visible": ["/home"]})',
    ),
}


def task_of(row: dict[str, Any]) -> Task:
    return make_task({"id": "a", "query": "q", **row}, "train", 1)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_stored_task_uses_only_what_is_allowed(name: str) -> None:
    row, outside = HOSTILE[name]
    assert environment_names(task_of(row)) == {outside}

    def open_it() -> None:
        allow(())
        with pytest.raises(TaskEnvironmentError) as refused:
            open_environment(task_of(row), call_timeout=1)
        assert outside in str(refused.value)

    copy_context().run(open_it)


@pytest.mark.parametrize("name", ["openenv", "nemo_gym", "verifiers", "harbor", "textarena", "code"])
@pytest.mark.parametrize("meta", [{}, {"server": 1, "openenv": 2, "nemo_gym": [], "harbor": "x", "id": None}])
def test_meta_that_is_not_an_environments_own_fails_its_trajectory_alone(name: str, meta: Any) -> None:
    task = task_of({"environment": name, "meta": meta})
    assert full_environments([task]) in (frozenset(), frozenset({name}))

    def open_it() -> None:
        allow(())
        with suppress(TaskEnvironmentError, ConfigError):
            open_environment(task, call_timeout=1)

    copy_context().run(open_it)


@pytest.mark.parametrize("name", HOSTILE)
def test_rows_that_others_write_name_nothing_outside(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row, outside = HOSTILE[name]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"id": "a", "query": "q", **row}) + "\n")
    assert read_task_source(str(file)).outside == {outside}

    def untrusted(text: str, split: str) -> TaskSource:
        source = TaskSource(Path(text))
        source.is_trusted = False
        return source

    monkeypatch.setattr(sources, "open_source", untrusted)
    with pytest.raises(TaskFileError, match="others write this data"):
        read_task_source(str(file))
    with pytest.raises(TaskFileError, match="others write this data"):
        read_tasks(file, source=untrusted(str(file), "train"))


def test_rows_that_others_write_may_use_what_is_built_in(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    answer = {"tests": ["assert f() == 1"], "sandbox": {"seconds": 3}}
    file.write_text(json.dumps({"id": "a", "query": "q", "scorer": "code", "answer": answer}) + "\n")
    source = TaskSource(file)
    source.is_trusted = False
    assert len(read_tasks(file, source=source, names=names_of).tasks) == 1


async def test_an_answer_sets_limits_of_its_sandbox_but_not_what_confines_it() -> None:
    answer = {"tests": ["pass"], "sandbox": {"isolation": "limits", "python": "/tmp/evil"}}
    context = ScorerContext(query="q", answer=answer, final_answer="pass")
    assert names_of(task_of({"scorer": "code", "answer": answer})) == {
        'sandbox({"isolation": "limits", "python": "/tmp/evil"})'
    }
    allow(())
    with pytest.raises(ScorerError, match="nobody allowed"):
        await code(context)
