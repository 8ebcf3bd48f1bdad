"""Check the chat messages of a task: what is read, what is refused with its place, what is stored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from json_rows import write_rows

from agentrl.documents.task import Task
from agentrl.documents.task_file import read_tasks
from agentrl.documents.task_json import BadTaskError, make_task, read_examples
from agentrl.errors import TaskFileError

SYSTEM = {"role": "system", "content": "S"}
USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}


def call(name: str, arguments: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}, **more}


def result(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **more}


def asks(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def task_of(**fields: Any) -> Task:
    return make_task({"id": "x", **fields}, "train", 2)


def test_examples_are_stored_between_the_system_prompt_and_the_question() -> None:
    task = task_of(query="q", messages=[SYSTEM, USER, ANSWER])
    assert (task.system_prompt, task.messages, task.query) == ("S", (USER, ANSWER), "q")
    assert task.meta == {}
    assert Task.from_document(task.to_document()) == task


def test_calls_get_ids_and_objects_and_their_results_name_them() -> None:
    calls = [call("add", '{"a": 1}'), {"name": "now", "arguments": None}]
    task = task_of(query="q", messages=[USER, asks(*calls), result("3"), result("noon"), ANSWER])
    said, first, second = task.messages[1:4]
    assert said["content"] == ""
    assert [each["function"] for each in said["tool_calls"]] == [
        {"name": "add", "arguments": {"a": 1}}, {"name": "now", "arguments": {}},
    ]  # fmt: skip
    ids = [each["id"] for each in said["tool_calls"]]
    assert len(set(ids)) == 2
    assert [(each["name"], each["tool_call_id"]) for each in (first, second)] == list(
        zip(["add", "now"], ids, strict=True)
    )


def test_results_may_come_in_another_order_than_their_calls() -> None:
    calls = [call("a", {}, id="1"), call("b", {}, id="2")]
    answered = [result("B", tool_call_id="2"), result("A", tool_call_id="1")]
    task = task_of(query="q", messages=[USER, asks(*calls), *answered, ANSWER])
    assert [each["name"] for each in task.messages[2:4]] == ["b", "a"]


def test_a_prompt_ends_with_the_question() -> None:
    prompt = [SYSTEM, USER, ANSWER, {"role": "user", "content": [{"type": "text", "text": "q"}]}]
    for field in ("messages", "prompt"):
        task = task_of(**{field: prompt})
        assert (task.system_prompt, task.messages, task.query, task.meta) == ("S", (USER, ANSWER), "q", {})


def test_a_whole_conversation_asks_its_first_question() -> None:
    task = task_of(messages=[SYSTEM, USER, ANSWER])
    assert (task.system_prompt, task.messages, task.query) == ("S", (), "1+1?")
    assert task.meta["messages"][-1] == ANSWER


def test_the_query_at_the_end_of_the_messages_is_asked_once() -> None:
    task = task_of(query="1+1?", messages=[SYSTEM, USER])
    assert (task.messages, task.query) == ((), "1+1?")


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ("x", "messages is text; it must be a list of chat messages"),
        (["x"], r"messages\[0\] is text"),
        ([USER, {"role": "robot", "content": ""}], r"\[1\]: the role is 'robot'; choose one of system"),
        ([{"role": "user"}], r"messages\[0\]: content is missing"),
        ([{"role": "user", "content": 3}], r"messages\[0\]: content is a number"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], r"messages\[0\]: content is a list"),
        ([{**USER, "weight": 1}], r"messages\[0\]: a message of role user has no 'weight'"),
        ([USER, SYSTEM], r"messages\[1\]: a system message comes first"),
        ([USER, result("3")], r"messages\[1\]: no call before it waits for a result"),
        ([USER, asks(call("f", {})), ANSWER], r"messages\[2\]: the call of f before it has no result"),
        ([USER, asks(call("f", {}))], "the end of messages: the call of f before it has no result"),
        ([SYSTEM, USER, asks({"id": "1"})], r"messages\[2\].tool_calls\[0\]: a call is"),
        ([USER, asks(call("f", "{"))], r"tool_calls\[0\]: arguments are not JSON"),
        ([USER, asks(call("f", [1]))], r"tool_calls\[0\]: arguments are a list"),
        ([USER, asks(call("f", {}, id="1"), call("g", {}, id="1"))], "two tool calls have one id"),
        ([USER, asks(call("f", {}, id="1")), result("", tool_call_id="2")], "with the id '2'"),
        ([USER], "ends with a user message that is not the query"),
        ([USER, asks(call("f", '{"a": 1e999}')), result("3")], "beyond the range of a 64-bit float"),
    ],
)
def test_what_is_no_conversation_is_refused_with_its_place(messages: Any, reason: str) -> None:
    with pytest.raises(BadTaskError, match=reason):
        task_of(query="q", messages=messages)


def test_two_system_prompts_are_refused() -> None:
    with pytest.raises(BadTaskError, match="give one of them"):
        task_of(query="q", messages=[SYSTEM], system_prompt="T")


def test_a_prompt_without_a_question_is_refused() -> None:
    for prompt, reason in (([ANSWER], "no user message"), ([{**USER, "content": " "}], "question is empty")):
        with pytest.raises(BadTaskError, match=reason):
            task_of(prompt=prompt)


def test_a_bad_message_is_reported_with_its_line(tmp_path: Path) -> None:
    good = {"id": "a", "query": "q", "messages": [USER, ANSWER]}
    file = write_rows(tmp_path / "tasks.jsonl", good, {**good, "id": "b", "messages": [{"role": "x"}]})
    with pytest.raises(TaskFileError, match=r"tasks.jsonl:2: messages\[0\]: the role is 'x'"):
        read_tasks(file)
    assert read_tasks(file, skip_bad_lines=True).tasks[0].messages == (USER, ANSWER)


@pytest.mark.parametrize("empty", [None, []])
def test_what_a_client_writes_for_nothing_is_nothing(empty: object) -> None:
    given = [
        {"role": "user", "content": "u", "tool_calls": empty, "refusal": empty},
        {"role": "assistant", "content": "a", "tool_calls": empty, "annotations": empty},
    ]
    read = read_examples("messages", given, "q")
    assert [*read.messages] == [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
