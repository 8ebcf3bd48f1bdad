"""One task's JSON object → Task: the names under which each field is read, and their types."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from agentrl.documents.task import Slot, Task, task_key
from agentrl.documents.task_json import BadTaskError, check_storable

_ID = ("id", "task_id")
_QUERY = ("q", "Question", "question", "query", "content", "instruction", "traj_question")
_ANSWER = ("a", "Final answer", "Final Answer", "Final sample answer", "answer", "expected_answer")
_RAW_ANSWER = ("expected_answer", "answer")
_OTHER = (
    "aug_answers", "scorer", "answer_schema", "agent_name", "system_prompt", "query_prompt", "tools",
    "max_turns", "meta", "messages", "raw",
)  # fmt: skip
_KNOWN = frozenset((*_ID, *_QUERY, *_ANSWER, *_OTHER))
_LONG_ENOUGH = 4
_ALIKE = 0.8


@lru_cache(maxsize=4096)
def nearest_field(name: str) -> str | None:
    """Return the field that ``name`` is probably a misspelling of; None for a name that is known or far."""
    if name in _KNOWN or len(name) < _LONG_ENOUGH:
        return None
    candidates = sorted(known for known in _KNOWN if len(known) >= _LONG_ENOUGH)
    nearest = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=_ALIKE)
    return nearest[0] if nearest else None


def make_task(item: Any, split: str, epoch: int, num_generations: int) -> Task:
    """Return the Task of one JSON value, ``order`` 0. Raises BadTaskError."""
    if not isinstance(item, dict):
        raise BadTaskError(f"a task is a JSON object, and this is {_kind(item)}")
    check_storable(item)
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
            raise BadTaskError(f"{name} is {_kind(value)}, and it is text or a whole number")
        if not str(value).strip():
            raise BadTaskError(f"{name} is empty")
        return str(value)
    raise BadTaskError("id is missing (task_id is read too)")


def _take_query(rest: dict[str, Any]) -> str:
    for name in _QUERY:
        value = rest.pop(name, None)
        if value is None:
            continue
        if not isinstance(value, str):
            raise BadTaskError(f"{name} is {_kind(value)}, and it is text")
        if not value.strip():
            raise BadTaskError(f"{name} is empty")
        return value
    raw = rest.get("raw")
    for holder in (rest, raw if isinstance(raw, dict) else {}):
        text = _first_user_message(holder.get("messages"))
        if text:
            return text
    raise BadTaskError("query is missing")


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
        raise BadTaskError(f"{name} is {_kind(value)}, and it is {_kind(kind())}")
    return value


def _take_word(rest: dict[str, Any], name: str) -> str | None:
    value = _take(rest, name, str)
    if value is not None and not value.strip():
        raise BadTaskError(f"{name} is empty")
    return None if value is None else str(value).strip()


def _take_query_prompt(rest: dict[str, Any]) -> str | None:
    value: str | None = _take(rest, "query_prompt", str)
    if value is not None and "{query}" not in value:
        raise BadTaskError("query_prompt does not hold {query}")
    return value


def _take_tools(rest: dict[str, Any]) -> tuple[str, ...] | None:
    value = _take(rest, "tools", list)
    if value is None:
        return None
    if not all(isinstance(name, str) for name in value):
        raise BadTaskError("tools is a list of the names of MCP servers, and this one holds other things")
    return tuple(value)


def _take_max_turns(rest: dict[str, Any]) -> int | None:
    value = rest.pop("max_turns", None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadTaskError(f"max_turns is {_kind(value)}, and it is a whole number")
    if value < 1:
        raise BadTaskError(f"max_turns is {value}, and it is at least 1")
    return value


def _meta(rest: Mapping[str, Any]) -> dict[str, Any]:
    meta = rest.get("meta")
    if not isinstance(meta, dict):
        return dict(rest)
    return {**meta, **{name: value for name, value in rest.items() if name != "meta"}}


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)
