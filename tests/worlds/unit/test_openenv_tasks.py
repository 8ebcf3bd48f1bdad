"""What an OpenEnv server's schema and observations become, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from made_documents import made_task

from agentrl.documents.task import Task
from agentrl.environments.environment import full_environments
from agentrl.errors import ServerFullError, TaskEnvironmentError, TaskFileError
from agentrl.worlds.openenv import (
    InvalidActionError,
    OpenEnvSession,
    Options,
    action_value,
    listed_tools,
    observation_text,
    settings,
)

METADATA = {"type": "object"}


def schema(required: list[str], **fields: str) -> dict[str, Any]:
    own = {name: {"type": kind} for name, kind in fields.items()}
    return {"properties": {"metadata": METADATA, **own}, "required": required, "description": "Act."}


@pytest.mark.parametrize(
    ("given", "options", "mode"),
    [
        (schema(["message"], message="string"), {}, "text"),
        (schema([], message="string"), {}, "text"),
        (schema(["message"], message="string", tone="string"), {}, "text"),
        (schema(["id"], id="integer"), {}, "tool"),
        (schema(["id"], id="integer"), {"action_field": "id"}, "text"),
        (schema(["x", "y"], x="number", y="number"), {}, "tool"),
        (schema(["tool_name"], tool_name="string", arguments="object"), {}, "mcp"),
        (schema([]), {}, "mcp"),
    ],
)
def test_the_schema_of_actions_decides_how_the_model_acts(
    given: dict[str, Any], options: dict[str, str], mode: str
) -> None:
    assert settings(given, Options.read(options))["action"] == mode


def test_a_tool_has_the_schema_of_the_actions_without_metadata() -> None:
    (tool,) = json.loads(settings(schema(["x"], x="number"), Options(action="tool"))["tools"])
    assert tool["function"]["name"] == "step"
    assert tool["function"]["description"] == "Act."
    assert tool["function"]["parameters"] == {"properties": {"x": {"type": "number"}}, "required": ["x"]}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"action": "text"}, "action_field=None is not text"),
        ({"action": "both"}, "action is 'both'; it must be 'text', 'tool' or 'mcp'"),
        ({"max_sessions": "0"}, "max_sessions is '0'; it must be at least 1"),
        ({"max_turns": "many"}, "max_turns is 'many'; it must be a whole number"),
        ({"max_turns": "1_000"}, "max_turns is '1_000'; it must be a whole number"),
        ({"max_turns": "+1"}, r"max_turns is '\+1'; it must be a whole number"),
        ({"max_turns": " 1 "}, "max_turns is ' 1 '; it must be a whole number"),
        ({"max_sessions": "1.0"}, r"max_sessions is '1\.0'; it must be a whole number"),
        ({"reset": "[1]"}, r"reset is '\[1\]'; it must be a JSON object"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, str], problem: str) -> None:
    with pytest.raises(TaskFileError, match=problem):
        settings(schema(["x"], x="object"), Options.read(options))


def test_a_server_without_tools_is_refused() -> None:
    with pytest.raises(TaskFileError, match="lists no tools"):
        listed_tools({"tools": []})


def test_a_message_becomes_the_value_of_the_fields_type() -> None:
    assert action_value(" 7 ", "string") == " 7 "
    assert action_value(" 7 ", "integer") == 7
    assert action_value("true", "boolean") is True
    for text, kind in (("true", "integer"), ("seven", "number"), ("1", "boolean"), ('"1"', "integer")):
        with pytest.raises(ValueError, match=r"is no|Expecting"):
            action_value(text, kind)


def test_an_observation_is_shown_by_its_only_text_or_as_json() -> None:
    assert observation_text({"text": "go", "turn": 1, "metadata": {"id": "x"}}, None) == "go"
    assert observation_text({"a": "x", "b": "y", "metadata": {}}, None) == '{"a": "x", "b": "y"}'
    assert observation_text({"board": [1, 2], "text": "go"}, "board") == "[1, 2]"
    content = {"content": [{"type": "text", "text": "4"}], "data": None}
    assert observation_text({"tool_name": "add", "result": content, "error": None}, None) == "4"
    assert observation_text({"tool_name": "add", "result": {"data": 4}, "error": None}, None) == "4"
    with pytest.raises(TaskEnvironmentError, match="no field 'x'; it has text"):
        observation_text({"text": "go"}, "x")


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ("<html>", TaskEnvironmentError, "not OpenEnv's"),
        ('{"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "x"}}', TaskEnvironmentError, "x"),
        ('{"type": "error", "data": {"code": "CAPACITY_REACHED"}}', ServerFullError, "free"),
        ('{"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "bad", "errors":'
         ' [{"loc": ["move"], "msg": "Field required"}]}}', InvalidActionError, "move: Field required"),
    ],
)  # fmt: skip
def test_each_kind_of_error_of_a_server_is_told_apart(
    answer: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        OpenEnvSession("http://a")._data(answer)


def test_a_sampler_runs_as_many_episodes_of_a_server_as_its_address_allows() -> None:
    def task(server: str, limit: int | None) -> Task:
        meta = {"server": server, "openenv": {"max_sessions": limit}}
        return made_task(environment="openenv", meta=meta)

    running = [task("http://a", 2), task("http://b", None), task("http://b", None)]
    assert full_environments(running) == frozenset()
    assert full_environments([*running, task("http://a", 2)]) == {"http://a"}
