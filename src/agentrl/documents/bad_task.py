"""Define the error of a task that cannot be loaded, validate a task's fields, and name kinds of values."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import ValidationError

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
