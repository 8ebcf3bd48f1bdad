"""Read one task of a task file: parse its JSON, check it against MongoDB's limits, and make a Task of it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from agentrl.documents.base import shortened
from agentrl.documents.task import Slot, Task, sum_name, task_key
from agentrl.documents.task_messages import (
    MAX_TASK_IMAGES,
    BadTaskError,
    Chat,
    checked,
    image_refs_of,
    kind_of,
    read_examples,
    read_prompt,
)
from agentrl.validation import PositiveWhole, Text, broken, wrong

MAX_LINE_BYTES = 16 * 2**20
"""Longest JSON text of one task."""

MAX_DOCUMENT_BYTES = 15 * 2**20
"""Largest task as a document. MongoDB allows 16 MiB, including slots and status."""

MAX_DEPTH = 90
"""Deepest nesting of lists and objects. MongoDB allows 100 levels in a document."""

_INT64 = 2**63
_MAX_DIGITS = 300
_ELEMENT_BYTES = 16
"""Upper bound of the bytes of a number or a list key in a document."""

ID = ("id", "task_id")
"""The names of the field ``id``; the first one that is not null counts, as with the other fields."""


class _Unstorable:
    """Placeholder for a JSON value that no document can hold."""

    def __init__(self, reason: str) -> None:
        self.reason = reason


class _NotStorableError(Exception):
    """A value cannot be stored; ``path`` is the path to it, innermost key first."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []


def _integer(text: str) -> int | _Unstorable:
    if len(text) <= _MAX_DIGITS:
        return int(text)
    return _Unstorable(f"an integer of {len(text.lstrip('-')):,} digits, and the limit is 64 bits")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object. A key that it has twice is refused: readers differ in which value counts."""
    value = dict(pairs)
    if len(value) < len(pairs):
        keys = [key for key, _ in pairs]
        value |= {key: _Unstorable("given twice") for key in value if keys.count(key) > 1}
    return value


DECODER = json.JSONDecoder(
    object_pairs_hook=_object,
    parse_int=_integer,
    parse_constant=lambda name: _Unstorable(f"not JSON: {name} is not a JSON number"),
)


def parse(raw: bytes) -> Any:
    """Return the value of one line of JSON. Raises BadTaskError."""
    try:
        return DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise BadTaskError(f"not UTF-8: byte 0x{raw[error.start]:02x} (byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise BadTaskError(f"not JSON: {error.msg} (column {error.colno})") from error
    except RecursionError as error:
        raise BadTaskError(f"nested more than {MAX_DEPTH} levels deep, the limit") from error


def check_bson_limits(item: dict[str, Any]) -> None:
    """Raise BadTaskError, which names the field, unless a document can hold ``item``.

    The id may be any integer, because it is stored as text.
    """
    fields = {key: value for key, value in item.items() if not (key in ID and isinstance(value, int))}
    try:
        size = _size(fields, 1)
    except _NotStorableError as error:
        where = ".".join(reversed(error.path))
        raise BadTaskError(f"{where}: {error.reason}" if where else error.reason) from error
    if size > MAX_DOCUMENT_BYTES:
        raise BadTaskError(
            f"the task takes about {size:,} bytes as a document, and the limit is {MAX_DOCUMENT_BYTES:,}"
        )


def _size(value: Any, depth: int) -> int:
    """Return the approximate size of ``value`` in a document, in bytes. Raises _NotStorableError."""
    if isinstance(value, str):
        return _text_size(value) + _ELEMENT_BYTES
    if isinstance(value, (dict, list)):
        if depth > MAX_DEPTH:
            raise _NotStorableError(f"nested more than {MAX_DEPTH} levels deep, the limit")
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return _ELEMENT_BYTES + sum(_item_size(key, item, depth) for key, item in items)
    _check_number(value)
    return _ELEMENT_BYTES


def _item_size(key: str | int, value: Any, depth: int) -> int:
    try:
        if isinstance(key, int):
            return _size(value, depth + 1)
        if "\0" in key:
            raise _NotStorableError("a NUL character in a key")
        return _text_size(key) + _size(value, depth + 1)
    except _NotStorableError as error:
        if len(error.path) < MAX_DEPTH:
            error.path.append(_shown(str(key)))
        raise


def _check_number(value: Any) -> None:
    if isinstance(value, _Unstorable):
        raise _NotStorableError(value.reason)
    if isinstance(value, float) and not math.isfinite(value):
        raise _NotStorableError("a number beyond the range of a 64-bit float")
    if isinstance(value, int) and not -_INT64 <= value < _INT64:
        raise _NotStorableError(f"the integer {_shown(str(value))}, and the limit is 64 bits")


def _text_size(text: str) -> int:
    if text.isascii():
        return len(text)
    try:
        return len(text.encode("utf-8"))
    except UnicodeEncodeError as error:
        char = text[error.start]
        what = "a byte that is not UTF-8, or " if "\udc80" <= char <= "\udcff" else ""
        raise _NotStorableError(f"{what}the lone surrogate {char!r}") from error


def _shown(text: str) -> str:
    """Return ``text`` as printable ASCII, cut to 40 characters."""
    return shortened(text.encode("unicode_escape").decode("ascii"), 40)


QUERY = ("q", "Question", "question", "query", "content", "instruction", "traj_question")
ANSWER = ("a", "Final answer", "Final Answer", "Final sample answer", "answer", "expected_answer")
AMOUNT: Final = re.compile(
    r"(?P<sign>[-−+]?) ?(?:\\?[$€£¥])? ?(?P<minus>[-−]?)(?P<number>(?:\d|\.\d)[\d.,]*)"
    r"(?: ?\\?%| +(?!(?:hundred|thousand|million|billion|trillion|dozen|half|and|or|to)\b)[a-z][a-z ]{0,20})?"
    r"[.,]?",
    re.IGNORECASE,
)
"""A number with a currency or a unit. Words that change the number, such as *million*, are not units."""
GSM8K_ANSWER: Final = re.compile(r"####(?!#)[ \t]*(?=[^\n]*\d|[A-Z]\s*$)([^\s#][^\n#]{0,40}?)\s*$")
"""The end of a solution as in GSM8K: ``#### 72``."""


def amount(text: str) -> str:
    """Return the number of an amount, ``-72`` of ``-$72``; of any other text the text."""
    found = AMOUNT.fullmatch(text)
    if found is None:
        return text
    is_negative = bool({found["sign"], found["minus"]} & {"-", "−"})
    return "-" * is_negative + found["number"].rstrip(".,")


def _id_text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise wrong("text or a whole number")
    return str(value)


def _scorer_name(value: Any) -> Any:
    """Read {name: weight} as the name of the weighted sum. Raises ValueError."""
    return sum_name(value) if isinstance(value, dict) else value


def _with_query(text: str) -> str:
    if "{query}" not in text:
        raise broken("does not hold {query}")
    return text


def _server_names(value: Any) -> Any:
    is_text = isinstance(value, str) and value.lstrip()[:1] == "["  # as tables without nested columns have it
    if is_text or (isinstance(value, list) and value and isinstance(value[0], dict)):
        raise broken(
            "describes functions, and a task's tools are the names of MCP servers",
            hint="serve these functions (docs/tools.md), or leave them out: --task_fields tools:=null",
        )
    return value


Word = Annotated[Text, AfterValidator(str.strip)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fields:
    """The fields of a task that have a type. A field that is null is as good as none."""

    id: Annotated[Text | None, BeforeValidator(_id_text), Field(validation_alias=AliasChoices(*ID))] = None
    query: Annotated[Text | None, Field(validation_alias=AliasChoices(*QUERY))] = None
    answer: Annotated[Any, Field(validation_alias=AliasChoices(*ANSWER))] = None
    aug_answers: tuple[Any, ...] = ()
    scorer: Annotated[Word | None, BeforeValidator(_scorer_name)] = None
    answer_schema: Word | None = None
    agent_name: Word | None = None
    agent_cfg_path: Word | None = None
    environment: Word | None = None
    system_prompt: str | None = None
    query_prompt: Annotated[str, AfterValidator(_with_query)] | None = None
    tools: Annotated[tuple[str, ...] | None, BeforeValidator(_server_names)] = None
    max_turns: PositiveWhole | None = None
    images: Annotated[tuple[Text, ...], Field(max_length=MAX_TASK_IMAGES)] = ()


def aliases_of(name: str) -> tuple[str, ...]:
    """Return the keys that field ``name`` of a task is read from."""
    return {"id": ID, "query": QUERY, "answer": ANSWER}.get(name, (name,))


_KEYS = [aliases_of(item.name) for item in dataclasses.fields(_Fields)]
"""The keys that each field is read from; the first one that is not null counts."""
_KNOWN = frozenset({
    *(key for keys in _KEYS for key in keys),
    "meta", "messages", "prompt", "raw", "reward_model", "extra_info",
})  # fmt: skip


_LONG_ENOUGH = 4
_ALIKE = 0.8


@lru_cache(maxsize=4096)
def nearest_field(name: str) -> str | None:
    """Return the known field that ``name`` probably misspells; None for known and for dissimilar names."""
    if name in _KNOWN or len(name) < _LONG_ENOUGH:
        return None
    candidates = sorted(known for known in _KNOWN if len(known) >= _LONG_ENOUGH)
    nearest = difflib.get_close_matches(name.lower(), candidates, n=1, cutoff=_ALIKE)
    return nearest[0] if nearest else None


def make_task(item: Any, split: str, num_generations: int, folder: Path | None = None) -> Task:
    """Return the Task of one JSON value, in epoch 0 with ``order`` 0. Raises BadTaskError.

    Paths of images are relative to ``folder``.
    """
    if not isinstance(item, dict):
        raise BadTaskError(f"the task is {kind_of(item)}; it must be a JSON object")
    check_bson_limits(item)
    fields, rest = _fields(item)
    if fields.id is None:
        raise BadTaskError("id is missing (task_id is read too)")
    query, chat = _take_question(fields.query, rest)
    check_bson_limits({"messages": list(chat.messages)})  # their arguments may have been JSON text
    if fields.system_prompt is not None and chat.system is not None:
        raise BadTaskError("system_prompt and a system message in the messages: give one of them")
    system_prompt = chat.system if fields.system_prompt is None else fields.system_prompt
    is_played, tools = fields.environment is not None, fields.tools
    return Task(
        id=task_key(split, 0, fields.id),
        task_id=fields.id,
        split=split,
        epoch=0,
        order=0,
        query=query,
        answer=_answer(fields.answer),
        aug_answers=fields.aug_answers,
        scorer=fields.scorer or ("environment" if is_played else "agentcpm"),
        answer_schema=fields.answer_schema or "answer",
        agent_name=fields.agent_name,
        agent_cfg_path=fields.agent_cfg_path,
        environment=fields.environment,
        system_prompt=system_prompt,
        messages=chat.messages,
        query_prompt=fields.query_prompt,
        images=image_refs_of(fields.images, folder),
        tools=() if tools is None and is_played else tools,
        max_turns=fields.max_turns,
        meta=_meta(rest),
        slots=tuple(Slot(traj_id=number) for number in range(num_generations)),
    )


def image_sources(item: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the paths and URLs of a task's images. Raises BadTaskError."""
    return _fields(item)[0].images


def _fields(item: Mapping[str, Any]) -> tuple[_Fields, dict[str, Any]]:
    """Return the fields that have a type, and the rest of the task."""
    given, rest = {}, dict(item)
    for keys in _KEYS:
        for key in keys:
            value = rest.pop(key, None)
            if value is not None:
                given[key] = value
                break
    return checked(_Fields, given), rest


_SHOWN_FIELDS: Final = 8


def _take_question(query: str | None, rest: dict[str, Any]) -> tuple[str, Chat]:
    """Return the question and the chat in front of it."""
    if query is not None:
        return query, read_examples("messages", rest.pop("messages", None) or [], query)
    for name in ("messages", "prompt"):
        if rest.get(name) and isinstance(rest[name], list):
            read = read_prompt(name, rest[name])
            if rest[name][-1].get("role") == "user":
                del rest[name]  # all of it is in the task
            return read
    others = ", ".join(list(rest)[:_SHOWN_FIELDS])
    raise BadTaskError(
        "query is missing" + (f"; if it is in {others}, give --task_fields query=NAME" if others else "")
    )


def _answer(given: Any) -> Any:
    """Return the answer; of one like GSM8K's, what stands behind ``####``: a number without its unit."""
    found = GSM8K_ANSWER.search(given) if isinstance(given, str) else None
    return given if found is None else amount(found[1])


def _meta(rest: Mapping[str, Any]) -> dict[str, Any]:
    meta = rest.get("meta")
    if not isinstance(meta, dict):
        return dict(rest)
    return {**meta, **{name: value for name, value in rest.items() if name != "meta"}}
