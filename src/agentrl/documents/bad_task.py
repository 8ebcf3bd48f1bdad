"""Define the error of a task that cannot be loaded, and name kinds of JSON values in words."""

from __future__ import annotations

from typing import Any


class BadTaskError(ValueError):
    """A task of the file cannot be loaded; the message is the reason."""


def kind_of(value: Any) -> str:
    """Return the kind of a JSON value in words."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true or false"
    kinds = {str: "text", int: "a number", float: "a number", list: "a list", dict: "an object"}
    return kinds.get(type(value), type(value).__name__)
