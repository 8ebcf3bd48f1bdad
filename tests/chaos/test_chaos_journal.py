"""The checks of a chaos run's journals find what they are for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chaos.journal import CallWatcher, Notes

LOG = """\
began train/0/a/0/1 1 f00d
ended train/0/a/0/1 1 f00d
began train/0/a/0/1 2 beef
"""
RECORD = "train/0/a/0/1"


def call(index: int, **fields: Any) -> dict[str, Any]:
    values = {"_id": f"{RECORD}/{index}", "record": RECORD, "index": index, "output_ids": b"12"}
    return {**values, "tool_executions": [], **fields}


def ran(result: str, **fields: Any) -> dict[str, Any]:
    return {"result": result, "error": False, "finished": True, **fields}


class Found(dict[str, Any]):
    """A database of lists, in which every query finds everything."""

    def with_options(self, **_: object) -> Found:
        return self

    def __getitem__(self, name: str) -> Any:
        return Everything(super().__getitem__(name))


class Everything:
    def __init__(self, documents: list[dict[str, Any]]) -> None:
        self._documents = documents

    async def find(self, *_: object) -> Any:
        for document in self._documents:
            yield document


async def watched(*moments: list[dict[str, Any]], path: list[str] | None = None) -> list[str]:
    """Look at the model calls of each moment; in the last one the Record has them, or those of ``path``."""
    database = Found()
    watcher = CallWatcher(type("Stored", (), {"database": database})())
    for calls in moments:
        keys = [each["_id"] for each in calls]
        last = path is not None and calls is moments[-1]
        database.update(
            Record=[{"_id": RECORD, "traj": path if last else keys}], DispatchedSamplingTask=calls
        )
        await watcher.look({})
    return watcher.violations


def notes(folder: Path, *more: str) -> Notes:
    path = folder / "notes.log"
    path.write_text(LOG + "".join(f"{line}\n" for line in more), encoding="utf-8")
    return Notes(path)


def test_a_call_that_runs_twice_is_found(tmp_path: Path) -> None:
    assert list(notes(tmp_path).repeated()) == []
    (found,) = notes(tmp_path, f"began {RECORD} 2 cafe").repeated()
    assert "turn 2" in found


@pytest.mark.parametrize(
    ("stored", "wrong"),
    [
        (call(0, tool_executions=[ran("f00d")]), False),
        (call(1, tool_executions=[ran("may have taken effect", error=True)]), False),
        (call(1, tool_executions=[ran("f00d")]), True),
        (call(0, tool_executions=[ran("nobody returned it")]), True),
    ],
)
def test_a_result_that_its_own_call_did_not_return_is_found(
    tmp_path: Path, stored: dict[str, Any], wrong: bool
) -> None:
    assert bool(list(notes(tmp_path).invented(stored))) is wrong


async def test_a_trajectory_that_only_grows_is_right() -> None:
    begun = call(1, tool_executions=[ran("", finished=False)])
    ended = call(1, tool_executions=[ran("f00d")])
    assert await watched([call(0)], [call(0), begun], [call(0), ended]) == []


@pytest.mark.parametrize(
    ("before", "after", "path", "what"),
    [
        (call(0), call(0, output_ids=b"13"), None, "the tokens of"),
        (call(0, tool_executions=[ran("a")]), call(0, tool_executions=[ran("b")]), None, "the tool results"),
        (call(0), call(0), [], "had the calls"),
        (call(0), call(0), [f"{RECORD}/0", f"{RECORD}/1"], "is gone"),
    ],
)
async def test_a_stored_turn_that_changes_is_found(
    before: dict[str, Any], after: dict[str, Any], path: list[str] | None, what: str
) -> None:
    (found,) = await watched([before], [after], path=path)
    assert what in found
