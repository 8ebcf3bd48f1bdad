"""Read the chat messages and the images of a task, and define the error of a task that cannot be loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import ValidationError

from agentrl.documents.base import excerpt
from agentrl.documents.images import Image, ImageRef, image_of_file, image_of_url
from agentrl.errors import ImageError
from agentrl.validation import problems_of, validate

T = TypeVar("T")


class BadTaskError(ValueError):
    """A task of the file cannot be loaded; the message is the reason."""


def checked(kind: type[T], given: Any, *place: str | int) -> T:
    """Return ``given``, which stands at ``place`` of a task, as ``kind``. Raises BadTaskError."""
    try:
        return validate(kind, given)
    except ValidationError as error:
        problem = problems_of(error, given, *place)[0]
    raise BadTaskError(problem.text + (f" ({problem.hint})" if problem.hint else ""))


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
_KEYS: Mapping[str, frozenset[str]] = {
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
    unknown = sorted(set(message) - _KEYS[role])
    if unknown:
        raise BadTaskError(f"{where}: a message of role {role} has no {excerpt(unknown[0], _SHOWN)}")
    for key in sorted(_KEYS[role] - {"content", "tool_calls"}):
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
