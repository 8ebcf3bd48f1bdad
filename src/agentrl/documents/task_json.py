"""Read one task of a task file: parse its JSON, check its messages and images, and make a Task of it."""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import AfterValidator, AliasChoices, BeforeValidator, Field

from agentrl.base.validation import PositiveWhole, Text, broken, check, wrong
from agentrl.documents.document import excerpt, shortened
from agentrl.documents.images import Image, ImageRef, image_of_file, image_of_url
from agentrl.documents.task import Slot, Task, sum_name, task_key
from agentrl.errors import ImageError


class BadTaskError(ValueError):
    """A task of the file cannot be loaded; the message is the reason."""


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)


MAX_TASK_IMAGES: Final = 64
"""Images of one task."""


def image_refs_of(sources: Sequence[str], folder: Path | None) -> tuple[ImageRef, ...]:
    """Return the images of a task's field ``images``, after decoding each. Raises BadTaskError."""
    return tuple(_ref(source, folder, f"images[{index}]") for index, source in enumerate(sources))


def read_images(sources: Sequence[str], folder: Path | None) -> list[Image]:
    """Return the same images with their bytes. Raises BadTaskError."""
    return [_read(source, folder, f"images[{index}]") for index, source in enumerate(sources)]


def is_url(source: str) -> bool:
    """Return whether the source of an image is a URL rather than a path."""
    return source[:5].lower() == "data:" or "://" in source[:10]


def _read(source: str, folder: Path | None, where: str) -> Image:
    try:
        if is_url(source):
            return image_of_url(source, where=where)
        return image_of_file(_path(source, folder, where))
    except ImageError as error:
        raise BadTaskError(f"{error.message} ({error.hint})" if error.hint else error.message) from error


def _ref(source: str, folder: Path | None, where: str) -> ImageRef:
    if not is_url(source):
        with suppress(OSError):
            state = _path(source, folder, where).stat()
            return _ref_of_file(source, folder, where, (state.st_mtime_ns, state.st_size))
    return _read(source, folder, where).ref


@lru_cache(maxsize=65536)
def _ref_of_file(source: str, folder: Path | None, where: str, state: tuple[int, int]) -> ImageRef:
    """Return the reference of a file, which is read again if its time or size has changed."""
    return _read(source, folder, where).ref


def _path(source: str, folder: Path | None, where: str) -> Path:
    if folder is None and not Path(source).is_absolute():
        raise BadTaskError(f"{where} is a path, and these tasks come from no file: give a data: URL")
    return (folder or Path()) / source


Message = dict[str, Any]

ROLES = ("system", "user", "assistant", "tool")
_MESSAGE_KEYS: Mapping[str, frozenset[str]] = {
    "system": frozenset({"role", "content"}),
    "user": frozenset({"role", "content", "name"}),
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content"}),
    "tool": frozenset({"role", "content", "name", "tool_call_id"}),
}
_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Chat:
    """The messages in front of a question, and the system prompt if they begin with one."""

    system: str | None = None
    messages: tuple[Message, ...] = ()


def read_examples(field: str, value: Any, question: str) -> Chat:
    """Return the messages in front of ``question``, without the question if it is the last of them.

    A system message may come first. Every tool call has a result. Arguments written as JSON text become
    objects, and missing ids of calls are filled in. Raises BadTaskError, which names the message.
    """
    messages = _messages(field, value)
    if messages and messages[-1]["role"] == "user" and messages.pop()["content"] != question:
        raise BadTaskError(f"{field} ends with a user message that is not the query: leave one of them out")
    return _chat(field, messages)


def read_prompt(field: str, value: Any) -> tuple[str, Chat]:
    """Return the question of a prompt, its last message, and the messages in front of it.

    A list that does not end with a user message is a whole conversation: its first user message is the
    question, and nothing after it is read. Raises BadTaskError.
    """
    messages = _messages(field, value)
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise BadTaskError(f"{field} has no user message; the question must be one")
    last = len(roles) - 1 if roles[-1] == "user" else roles.index("user")
    question: str = messages[last]["content"]
    if not question.strip():
        raise BadTaskError(f"{field}[{last}]: the question is empty")
    return question, _chat(field, messages[:last])


def _chat(field: str, messages: list[Message]) -> Chat:
    system = messages[0]["content"] if messages and messages[0]["role"] == "system" else None
    first = 0 if system is None else 1
    return Chat(system, tuple(_link_tool_calls(field, messages[first:], first)))


def _messages(field: str, value: Any) -> list[Message]:
    if not isinstance(value, list):
        raise BadTaskError(f"{field} is {kind_of(value)}; it must be a list of chat messages")
    return [_message(f"{field}[{index}]", item) for index, item in enumerate(value)]


def _message(where: str, item: Any) -> Message:
    if not isinstance(item, dict):
        raise BadTaskError(f"{where} is {kind_of(item)}; it must be an object with a role")
    role = item.get("role")
    if role not in ROLES:
        raise BadTaskError(f"{where}: the role is {excerpt(role, _SHOWN)}; choose one of {', '.join(ROLES)}")
    message = {  # clients and tables write what is missing as null or as an empty list
        key: value for key, value in item.items() if value is not None and (key == "content" or value != [])
    }
    unknown = sorted(set(message) - _MESSAGE_KEYS[role])
    if unknown:
        raise BadTaskError(f"{where}: a message of role {role} has no {excerpt(unknown[0], _SHOWN)}")
    for key in sorted(_MESSAGE_KEYS[role] - {"content", "tool_calls"}):
        if not isinstance(message.get(key, ""), str):
            raise BadTaskError(f"{where}: {key} is {kind_of(message[key])}; it must be text")
    if message.get("content") is None and not message.get("tool_calls"):
        raise BadTaskError(f"{where}: content is missing")
    return {**message, "content": _text(where, message.get("content", ""))}


def _text(where: str, content: Any) -> str:
    """Return the text of a message; a list of text parts is joined."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    texts: list[Any] = [p.get("text") for p in parts if isinstance(p, dict) and p.get("type") == "text"]
    if not parts or len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise BadTaskError(f"{where}: content is {kind_of(content)}; it must be text or a list of text parts")
    return "".join(texts)


def _link_tool_calls(field: str, messages: list[Message], first: int) -> list[Message]:
    """Return the messages with one id for each call and its result; ``first`` is the index of the first."""
    linked: list[Message] = []
    open_calls: dict[str, str] = {}
    for index, message in enumerate(messages, first):
        where = f"{field}[{index}]"
        if message["role"] == "system":
            raise BadTaskError(f"{where}: a system message comes first or not at all")
        if message["role"] == "tool":
            linked.append(_result(where, message, open_calls))
            continue
        _require_results(where, open_calls)
        if "tool_calls" in message:
            calls = _calls(where, message["tool_calls"], index)
            open_calls = {call["id"]: call["function"]["name"] for call in calls}
            message = {**message, "tool_calls": calls}
        linked.append(message)
    _require_results(f"the end of {field}", open_calls)
    return linked


def _require_results(where: str, open_calls: Mapping[str, str]) -> None:
    if open_calls:
        raise BadTaskError(f"{where}: the call of {next(iter(open_calls.values()))} before it has no result")


def _result(where: str, message: Message, open_calls: dict[str, str]) -> Message:
    call_id = message.get("tool_call_id") or next(iter(open_calls), None)
    if call_id not in open_calls:
        raise BadTaskError(f"{where}: no call before it waits for a result" + (
            f" with the id {excerpt(call_id, _SHOWN)}" if call_id else ""
        ))  # fmt: skip
    return {**message, "name": open_calls.pop(call_id), "tool_call_id": call_id}


def _calls(where: str, value: Any, index: int) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise BadTaskError(f"{where}: tool_calls is {kind_of(value)}; it must be a list of calls")
    calls = [
        _call(f"{where}.tool_calls[{number}]", item, f"shot{index % 1000:03d}{number % 100:02d}")
        for number, item in enumerate(value)
    ]
    if len({call["id"] for call in calls}) < len(calls):
        raise BadTaskError(f"{where}: two tool calls have one id")
    return calls


def _call(where: str, item: Any, default_id: str) -> dict[str, Any]:
    """Return a call in OpenAI's form; ``{"name", "arguments"}`` without the form is read too."""
    function = item.get("function", item) if isinstance(item, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(item, dict) or not isinstance(function, dict) or not isinstance(name, str) or not name:
        raise BadTaskError(f'{where}: a call is {{"function": {{"name": …, "arguments": {{…}}}}}}')
    call_id = item.get("id") or default_id
    if not isinstance(call_id, str):
        raise BadTaskError(f"{where}: id is {kind_of(call_id)}; it must be text")
    arguments = _arguments(where, function.get("arguments"))
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(where: str, value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else {}
        except (ValueError, RecursionError) as error:
            raise BadTaskError(f"{where}: arguments are not JSON: {excerpt(value, _SHOWN)}") from error
    if not isinstance(value, (dict, type(None))):
        raise BadTaskError(f"{where}: arguments are {kind_of(value)}; they must be an object")
    return value or {}


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


def make_task(
    item: Any, split: str, num_generations: int, folder: Path | None = None, order: int = 0
) -> Task:
    """Return the Task of one JSON value, in epoch 0. Raises BadTaskError.

    Paths of images are relative to ``folder``.
    """
    if not isinstance(item, dict):
        raise BadTaskError(f"the task is {kind_of(item)}; it must be a JSON object")
    check_bson_limits(item)
    fields, rest = _fields(item)
    if fields.id is None:
        raise BadTaskError("id is missing (task_id is read too)")
    query, chat = _take_question(fields.query, rest)
    if chat.messages:
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
        order=order,
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
        slots=_new_slots(num_generations),
    )


@cache
def _new_slots(number: int) -> tuple[Slot, ...]:
    return tuple(Slot(traj_id=traj_id) for traj_id in range(number))


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
    return check(_Fields, given, lambda problem: BadTaskError(str(problem))), rest


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
