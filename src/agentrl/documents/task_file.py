"""Task files: JSONL or a JSON list → Tasks. Every bad line is named with its file, line and reason."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.documents.task import Slot, Task, task_key
from agentrl.errors import TaskFileError

_ID = ("id", "task_id")
_QUERY = ("q", "Question", "question", "query", "content", "instruction", "traj_question")
_ANSWER = ("a", "Final answer", "Final Answer", "Final sample answer", "answer", "expected_answer")
_RAW_ANSWER = ("expected_answer", "answer")
_SHOWN = 20


class _BadTaskError(ValueError):
    """One task of the file is none; the message is the reason."""


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Tasks in their sampling order, and ``file:line: reason`` of every line that was skipped."""

    tasks: tuple[Task, ...]
    skipped: tuple[str, ...]


def read_tasks(
    path: str | Path, *, split: str = "train", epoch: int = 0, seed: int = 0, shuffle: bool = True,
    num_generations: int = 8, skip_bad_lines: bool = False,
    known_scorers: Collection[str] | None = None, known_agents: Collection[str] | None = None,
) -> ReadResult:  # fmt: skip
    """Read a task file. Without ``skip_bad_lines`` one bad line makes it a TaskFileError that lists them.

    ``known_scorers`` and ``known_agents`` check names, where given; ``module:function`` is always let
    through. The order is shuffled by ``seed`` and the epoch, the same on every machine.
    """
    path = Path(path)
    tasks: dict[str, Task] = {}
    bad: list[str] = []
    for line, item in _items(path):
        try:
            if isinstance(item, _BadTaskError):
                raise item
            task = _task(item, split, epoch, num_generations)
            _check_name("scorer", task.scorer, known_scorers)
            _check_name("agent_name", task.agent_name, known_agents)
            if task.id in tasks:
                raise _BadTaskError(f"id {task.task_id!r} is used above")
            tasks[task.id] = task
        except _BadTaskError as error:
            bad.append(f"{path}:{line}: {error}")
    if bad and not skip_bad_lines:
        more = f"\n  … and {len(bad) - _SHOWN} more" if len(bad) > _SHOWN else ""
        raise TaskFileError(
            f"{len(bad)} of {len(bad) + len(tasks)} tasks of {path} cannot be read:\n  "
            + "\n  ".join(bad[:_SHOWN])
            + more,
            cure="mend these lines, or load the others with --skip_bad_lines",
        )
    if not tasks:
        raise TaskFileError(f"{path} holds no tasks", cure='write one {"id": …, "query": …} a line')
    return ReadResult(tasks=tuple(_ordered(list(tasks.values()), epoch, seed, shuffle)), skipped=tuple(bad))


def _ordered(tasks: list[Task], epoch: int, seed: int, shuffle: bool) -> list[Task]:
    if shuffle:
        random.Random(f"{seed}/{epoch}").shuffle(tasks)
    return [replace(task, order=order) for order, task in enumerate(tasks)]


def _items(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, value) of every task; the value is a _BadTaskError where it is no JSON."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise TaskFileError(
            f"the task file {path} cannot be read: {error.strerror}",
            cure="give an existing JSONL or JSON file",
        ) from error
    except UnicodeDecodeError as error:
        raise TaskFileError(
            f"the task file {path} is not UTF-8 (byte {error.start})", cure="convert it to UTF-8"
        ) from error
    if text.lstrip().startswith("["):
        yield from _list_items(path, text)
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield number, _parse(line)


def _list_items(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """The items of a JSON list, each with the line on which it begins."""
    decoder = json.JSONDecoder(parse_constant=_no_constant)
    position, length = text.index("[") + 1, len(text)
    while True:
        while position < length and text[position] in " \t\r\n,":
            position += 1
        if position < length and text[position] == "]" and not text[position + 1 :].strip():
            return
        line = text.count("\n", 0, position) + 1
        try:
            value, position = decoder.raw_decode(text, position)
        except (json.JSONDecodeError, _BadTaskError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise TaskFileError(
                f"{path}:{line}: the JSON list cannot be read on: {reason}",
                cure="mend the list, or write JSONL: one task a line",
            ) from error
        yield line, value


def _parse(line: str) -> Any:
    try:
        return json.loads(line, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        return _BadTaskError(f"not JSON: {error.msg} (column {error.colno})")
    except _BadTaskError as error:
        return error
    except RecursionError:
        return _BadTaskError("not JSON that can be read: nested too deeply")


def _no_constant(name: str) -> Any:
    raise _BadTaskError(f"not JSON: {name} is no JSON number")


def _task(item: Any, split: str, epoch: int, num_generations: int) -> Task:
    if not isinstance(item, dict):
        raise _BadTaskError(f"a task is a JSON object, and this is {_kind(item)}")
    rest = dict(item)
    task_id = _take_id(rest)
    query = _take_query(rest)
    answer = _take_answer(rest)
    return Task(
        id=task_key(split, epoch, task_id),
        task_id=task_id,
        split=split,
        epoch=epoch,
        order=0,
        query=query,
        answer=answer,
        aug_answers=tuple(_take(rest, "aug_answers", list) or ()),
        scorer=_take_word(rest, "scorer") or "agentcpm",
        answer_schema=_take_word(rest, "answer_schema") or "answer",
        agent_name=_take_word(rest, "agent_name"),
        system_prompt=_take(rest, "system_prompt", str),
        query_prompt=_take_query_prompt(rest),
        tools=_take_tools(rest),
        max_turns=_take_max_turns(rest),
        meta=_meta(rest),
        slots=tuple(Slot(traj_id=number) for number in range(num_generations)),
    )


def _take_id(rest: dict[str, Any]) -> str:
    for name in _ID:
        value = rest.pop(name, None)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise _BadTaskError(f"{name} is {_kind(value)}, and it is text or a whole number")
        if not str(value).strip():
            raise _BadTaskError(f"{name} is empty")
        return str(value)
    raise _BadTaskError("id is missing (task_id is read too)")


def _take_query(rest: dict[str, Any]) -> str:
    for name in _QUERY:
        value = rest.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, str):
            raise _BadTaskError(f"{name} is {_kind(value)}, and it is text")
        if not value.strip():
            raise _BadTaskError(f"{name} is empty")
        return value
    raw = rest.get("raw")
    for holder in (rest, raw if isinstance(raw, dict) else {}):
        text = _first_user_message(holder.get("messages"))
        if text:
            return text
    raise _BadTaskError("query is missing")


def _first_user_message(messages: Any) -> str | None:
    for message in messages if isinstance(messages, list) else []:
        if isinstance(message, dict) and message.get("role") == "user":
            content = message.get("content")
            return content if isinstance(content, str) else None
    return None


def _take_answer(rest: dict[str, Any]) -> Any:
    for name in _ANSWER:
        if rest.get(name) is not None:
            return rest.pop(name)
    raw = rest.get("raw")
    if isinstance(raw, dict):
        return next((raw[name] for name in _RAW_ANSWER if raw.get(name) is not None), None)
    return None


def _take(rest: dict[str, Any], name: str, kind: type) -> Any:
    value = rest.pop(name, None)
    if value is not None and not isinstance(value, kind):
        raise _BadTaskError(f"{name} is {_kind(value)}, and it is {_kind(kind())}")
    return value


def _take_word(rest: dict[str, Any], name: str) -> str | None:
    value = _take(rest, name, str)
    if value is not None and not value.strip():
        raise _BadTaskError(f"{name} is empty")
    return None if value is None else str(value).strip()


def _take_query_prompt(rest: dict[str, Any]) -> str | None:
    value: str | None = _take(rest, "query_prompt", str)
    if value is not None and "{query}" not in value:
        raise _BadTaskError("query_prompt does not hold {query}")
    return value


def _take_tools(rest: dict[str, Any]) -> tuple[str, ...] | None:
    value = _take(rest, "tools", list)
    if value is None:
        return None
    if not all(isinstance(name, str) for name in value):
        raise _BadTaskError("tools is a list of the names of MCP servers, and this one holds other things")
    return tuple(value)


def _take_max_turns(rest: dict[str, Any]) -> int | None:
    value = rest.pop("max_turns", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise _BadTaskError(f"max_turns is {_kind(value)}, and it is a whole number")
    if value < 1:
        raise _BadTaskError(f"max_turns is {value}, and it is at least 1")
    return value


def _meta(rest: Mapping[str, Any]) -> dict[str, Any]:
    meta = rest.get("meta")
    if not isinstance(meta, dict):
        return dict(rest)
    return {**meta, **{name: value for name, value in rest.items() if name != "meta"}}


def _check_name(field: str, name: str | None, known: Collection[str] | None) -> None:
    if name is not None and known is not None and name not in known and ":" not in name:
        raise _BadTaskError(f"{field} {name!r} is none of {', '.join(sorted(known))}")


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)
