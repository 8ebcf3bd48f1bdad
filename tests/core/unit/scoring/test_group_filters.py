"""Test the inputs, results and errors of group filters."""

from __future__ import annotations

import random
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from made_documents import made_record, made_task

from agentrl.config.schema import GroupConfig
from agentrl.documents.record import Record
from agentrl.documents.status import StopReason
from agentrl.errors import GroupError
from agentrl.scoring.groups import (
    ScoredGroup,
    ScoredTrajectory,
    decide_group,
    dropped_by_filter,
    filtered_of,
    group_filter,
)

TASK = made_task(answer=["4"], meta={"level": [1]})
SCORES = (1.0, 0.0, 0.0, 1.0)


def records() -> list[Record]:
    made = [
        made_record(
            TASK, place, score, turns=place + 1, tool_calls=place, generated_tokens=10 * place,
            final_answer="4", stop_reason=StopReason.ANSWERED if score else StopReason.TURNS_LIMIT,
        )
        for place, score in enumerate(SCORES)
    ]  # fmt: skip
    return [replace(record, id=f"r{record.traj_id}") for record in made]


SEEN: list[ScoredGroup] = []
ANSWER: list[Any] = [{}]
"""What the filter ``scripted`` returns."""


@group_filter("scripted")
def scripted(group: ScoredGroup) -> Any:
    SEEN.append(group)
    return ANSWER[0]


def dropped(answer: Any) -> dict[str, str]:
    ANSWER[0] = answer
    return dropped_by_filter("scripted", TASK, records())


def test_a_filter_sees_its_task_and_the_scored_trajectories() -> None:
    dropped({})
    group = SEEN[-1]
    assert (group.task, group.task_id, group.split, group.epoch) == ("train/0/a", "a", "train", 0)
    assert (group.query, group.answer, group.meta) == ("q", ["4"], {"level": [1]})
    assert group.trajectories[1] == ScoredTrajectory(
        id="r1", score=0.0, turns=2, tool_calls=1, generated_tokens=10, stop_reason="turns_limit_error",
        final_answer="4",
    )  # fmt: skip


def test_what_a_filter_changes_stays_its_own() -> None:
    dropped({})
    SEEN[-1].meta["level"].append(2)
    SEEN[-1].answer.append("5")
    assert (TASK.meta, TASK.answer) == ({"level": [1]}, ["4"])
    with pytest.raises(FrozenInstanceError):
        SEEN[-1].trajectories[0].score = 5.0  # type: ignore[misc]


def test_a_filter_drops_by_reason_or_names_what_it_keeps() -> None:
    assert dropped({"r1": "too long"}) == {"r1": "group filter scripted: too long"}
    for kept in (["r0", "r2"], ("r0", "r2"), {"r0", "r2"}):
        assert dropped(kept) == dict.fromkeys(("r1", "r3"), "group filter scripted: not kept")
    assert dropped({}) == dropped(["r0", "r1", "r2", "r3"]) == {}
    assert set(dropped([])) == {"r0", "r1", "r2", "r3"}
    assert dropped({"r1": "\udcff" + "x" * 1000})["r1"] == "group filter scripted: ?" + "x" * 299


async def _async() -> dict[str, str]:
    return {}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "returned None"),
        ("r0", "returned 'r0'"),
        (7, "returned 7"),
        (["r9"], "names 'r9', which is not a trajectory of the group"),
        ({"r9": "no"}, "names 'r9'"),
        ([3], "names 3"),
        ({"r0": None}, "drops r0 for the reason None"),
        ({"r0": " "}, "drops r0 for the reason ' '"),
    ],
)
def test_another_result_is_named(answer: Any, words: str) -> None:
    with pytest.raises(GroupError) as raised:
        dropped(answer)
    assert f"group filter scripted {words}" in raised.value.message
    assert "return {id: reason}" in str(raised.value.hint)


def test_an_async_filter_is_named() -> None:
    with pytest.raises(GroupError, match="group filter scripted is async"):
        dropped(_async())


@group_filter("raises")
def raises(group: ScoredGroup) -> list[str]:
    raise KeyError(group.task_id)


@group_filter("exits")
def exits(group: ScoredGroup) -> list[str]:
    sys.exit(3)


@pytest.mark.parametrize(("name", "words"), [("raises", "KeyError: 'a'"), ("exits", "SystemExit: 3")])
def test_what_a_filter_raises_is_named(name: str, words: str) -> None:
    with pytest.raises(GroupError) as raised:
        dropped_by_filter(name, TASK, records())
    assert raised.value.message == f"group filter {name} raised {words}"


def test_the_example_filter_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend("assets/examples")
    name = "custom_group_filter:finished_and_tried"
    assert set(dropped_by_filter(name, TASK, records())) == {"r1", "r2"}


def test_what_a_filter_drops_is_in_nothing_that_follows() -> None:
    reasons = {"r1": "too long", "r2": "too long"}
    decided = decide_group(records(), GroupConfig(), random.Random(0), reasons)
    assert [item.abandoned_because for item in decided] == [
        "no spread in the group's scores", "too long", "too long", "no spread in the group's scores",
    ]  # fmt: skip
    kept = decide_group(records(), GroupConfig(), random.Random(0), {"r3": "too long"})
    assert [item.advantage for item in kept] == [1.0, -0.5, -0.5, None]
    all_of_them = dict.fromkeys(["r0", "r1", "r2", "r3"], "x")
    nothing = decide_group(records(), GroupConfig(), random.Random(0), all_of_them)
    assert {item.abandoned_because for item in nothing} == {"x"}


def test_what_was_dropped_is_read_from_the_group() -> None:
    assert filtered_of({}) is None
    assert filtered_of({"filtered": "r0"}) is None
    assert filtered_of({"filtered": ["r0"]}) == {}
    assert filtered_of({"filtered": [{"record": "r0", "because": "b"}]}) == {"r0": "b"}
