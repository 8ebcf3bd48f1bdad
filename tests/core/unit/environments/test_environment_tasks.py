"""The tasks of an address: idempotent, extendable, different by split and seed; malformed addresses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import number_game
import pytest

from agentrl.documents.task import Task
from agentrl.environments.environment import ENVIRONMENTS, Environment, TaskRequest, environment
from agentrl.errors import TaskFileError
from agentrl.rollout.load_tasks import Address, is_address, read_task_source


def tasks(address: str, split: str = "train") -> list[Task]:
    return list(read_task_source(address, split=split, shuffle=False, num_generations=2).tasks)


def test_an_address_has_defaults_and_options() -> None:
    assert Address.parse("env:a") == Address(name="a", n=1000, seed=0, split=None, options={})
    whole = Address.parse("env:mod:Name?n=5&seed=2&split=test&size=3%2C4")
    assert whole == Address(name="mod:Name", n=5, seed=2, split="test", options={"size": "3,4"})
    assert is_address("env:a")
    assert not is_address("env.jsonl")


def test_the_same_address_gives_the_same_tasks_and_a_larger_one_the_same_first_tasks() -> None:
    few = tasks("env:number_game?n=5&seed=1")
    assert [task.id for task in few] == [task.id for task in tasks("env:number_game?n=5&seed=1")]
    more = tasks("env:number_game?n=9&seed=1")
    assert [(task.id, task.meta) for task in more[:5]] == [(task.id, task.meta) for task in few]
    assert (few[0].environment, few[0].scorer, few[0].agent_name, few[0].tools, few[0].max_turns) == (
        "number_game", "environment", "multi_turn", (), 3,
    )  # fmt: skip
    assert few[0].meta.keys() == {"secret"}


def test_tasks_of_other_seeds_splits_and_options_differ_in_id_and_content() -> None:
    parts = ("seed=1", "seed=2", "seed=1&largest=99", "seed=1&split=eval")
    found = [tasks(f"env:number_game?n=20&{part}") for part in parts]
    assert len({task.task_id for group in found for task in group}) == 80
    assert len({tuple(task.meta["secret"] for task in group) for group in found}) == 4
    evaluation = tasks("env:number_game?n=20&seed=1", split="eval-v000003")
    assert [task.meta for task in evaluation] == [task.meta for task in found[3]]


def test_an_environment_is_found_by_path() -> None:
    (task,) = tasks("env:number_game:NumberGame?n=1")
    assert task.environment == "number_game:NumberGame"
    assert ENVIRONMENTS.get(task.environment) is number_game.NumberGame


@pytest.mark.parametrize(
    ("address", "problem"),
    [
        ("env:?n=1", "names no environment"),
        ("env:number_game?n", "not key=value"),
        ("env:number_game?n=1&n=2", "given twice"),
        ("env:number_game?n=many", "n is 'many'"),
        ("env:number_game?n=0", "n is '0'; it must be at least 1"),
        ("env:number_game?large=3", "did you mean 'largest'"),
        ("env:number_game?largest=x", "cannot generate task 0: ValueError"),
    ],
)
def test_a_malformed_address_says_what_is_wrong(address: str, problem: str) -> None:
    with pytest.raises(TaskFileError, match=problem):
        tasks(address)


def test_tasks_that_are_no_json_are_refused_with_their_number() -> None:
    @environment("bad_tasks")
    class BadTasks(Environment):
        @classmethod
        def tasks(cls, request: TaskRequest) -> Iterator[dict[str, Any]]:
            yield {"query": "?"}
            yield {"query": "?", "value": {1, 2}}

    with pytest.raises(TaskFileError, match="cannot generate task 1: TypeError"):
        tasks("env:bad_tasks?n=2")


def test_only_an_environment_class_with_documented_tools_is_registered() -> None:
    with pytest.raises(TypeError, match="not a class derived"):
        environment("x")(dict)  # type: ignore[type-var]

    class Untyped(Environment):
        tools = ("go",)

        def go(self, steps) -> str:  # type: ignore[no-untyped-def]
            """Go."""
            return str(steps)

    with pytest.raises(TypeError, match="'steps' of go has no type hint"):
        environment("x")(Untyped)
