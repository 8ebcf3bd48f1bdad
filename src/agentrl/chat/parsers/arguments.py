"""Convert arguments that a format writes as text by the tool's schema, and validate calls against it."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from agentrl.base.concurrency import within_cpu
from agentrl.chat.parsers.parser import (
    CallSyntaxError,
    ToolCall,
    Tools,
    finite_float,
    load_json,
    read_literal,
    tool_names,
)

_DEPTH = 16
"""Longest chain of references and alternatives that is followed."""


def parameters_of(name: str, tools: Tools) -> Mapping[str, Any] | None:
    """Return the parameter schema of the tool ``name``; None for an unknown tool."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            return parameters if isinstance(parameters, Mapping) else {}
    return None


def convert_arguments(name: str, texts: Mapping[str, str], tools: Tools) -> dict[str, Any]:
    """Return the arguments of the tool ``name`` with each text converted by the tool's schema."""
    root = parameters_of(name, tools) or {}
    schemas = _object_schemas(root, root, texts)
    return {key: convert_text(text, _property(key, schemas), root) for key, text in texts.items()}


def property_names(name: str, tools: Tools) -> frozenset[str] | None:
    """Return the names of all arguments of the tool ``name``; None if it takes others too or is unknown."""
    root = parameters_of(name, tools)
    if root is None:
        return None
    schemas = _object_schemas(root, root, {})
    names = frozenset(key for schema in schemas for key in schema.get("properties") or ())
    is_open = any(schema.get("additionalProperties") for schema in schemas)
    return None if is_open or not names else names


def convert_text(text: str, spec: Any, root: Mapping[str, Any] | None = None) -> Any:
    """Return the value that ``text`` stands for under the schema ``spec``; ``text`` itself if none fits.

    A value of an enumeration is that value. Else the first type wins, in the order null, integer, number,
    boolean, object, array, string. Where the schema allows a string too, or names no known type, a value
    wins only if it is written as ``text`` is: ``02134`` stays text. ``root`` resolves ``$ref``.
    """
    parts = _alternatives(spec, root or {})
    choices = [choice for part in parts for choice in _choices(part)]
    if text in choices:
        return text
    decoded = _json_or_text(text)
    for choice in choices:
        if (
            not isinstance(choice, str)
            and decoded == choice
            # Tell true from 1: Python calls them equal.
            and isinstance(decoded, bool) == isinstance(choice, bool)
        ):
            return decoded
    types = {kind for part in parts for kind in _types(part)} or {_type_of(choice) for choice in choices}
    known = types & _TYPES
    if not known:
        return decoded if not isinstance(decoded, str) and _is_written(decoded, text) else text
    if known == {"string"}:
        return text
    return _first_conversion(text, decoded, known)


def _first_conversion(text: str, decoded: Any, types: set[str]) -> Any:
    if isinstance(decoded, str) and "string" in types and text.strip().startswith('"'):
        return decoded
    bare = _unquoted(text)
    for kind, convert in _CONVERSIONS.items():
        if kind in types:
            try:
                value = convert(bare)
            except ValueError:
                continue
            if "string" not in types or _is_written(value, text):
                return value
    return text


def _is_written(value: Any, text: str) -> bool:
    """Return whether ``text`` is ``value`` as JSON or Python writes it, up to spaces in lists and objects.

    If not, the conversion loses something, such as the leading zero of a postal code.
    """
    if isinstance(value, (list, dict)):
        return text.lstrip()[:1] in ("[", "{")
    return text in (json.dumps(value), repr(value))


def _alternatives(spec: Any, root: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return a schema and all its ``anyOf``, ``oneOf`` and ``allOf`` parts, references resolved."""
    return _Walk(root, lambda branch: True).parts(spec)


def _object_schemas(spec: Any, root: Mapping[str, Any], texts: Mapping[str, str]) -> list[Mapping[str, Any]]:
    """Return the schemas of an object with ``texts``: no branch whose constants contradict them."""
    return _Walk(root, lambda branch: not any(_contradicts(schema, root, texts) for schema in branch)).parts(
        spec
    )


class _Walk:
    """Collects the parts of a schema, each once: schemas refer to themselves, and share their parts."""

    def __init__(
        self, root: Mapping[str, Any], is_possible: Callable[[Sequence[Mapping[str, Any]]], bool]
    ) -> None:
        self._root = root
        self._is_possible = is_possible
        # Key by id, as dicts have no hash; each list holds its schema, so that no id is given out again.
        self._known: dict[int, list[Mapping[str, Any]]] = {}
        """The parts of each schema by its ``id``; empty while they are collected, which ends a cycle."""

    def parts(self, spec: Any, depth: int = _DEPTH) -> list[Mapping[str, Any]]:
        """Return a schema, then its parts, without impossible branches of ``anyOf`` and ``oneOf``."""
        schema = _resolve(spec, self._root)
        if not isinstance(schema, Mapping) or depth == 0:
            return []
        if id(schema) not in self._known:
            self._known[id(schema)] = []
            found = [schema]
            for word in ("allOf", "anyOf", "oneOf"):
                inner = schema.get(word)
                for item in inner if isinstance(inner, list) else ():
                    branch = self.parts(item, depth - 1)
                    if word == "allOf" or self._is_possible(branch):
                        found += branch
            self._known[id(schema)] = list({id(part): part for part in found}.values())
        return self._known[id(schema)]


def _contradicts(schema: Mapping[str, Any], root: Mapping[str, Any], texts: Mapping[str, str]) -> bool:
    properties = schema.get("properties")
    for key, spec in properties.items() if isinstance(properties, Mapping) else ():
        resolved = _resolve(spec, root)
        choices = _choices(resolved) if isinstance(resolved, Mapping) else []
        if key in texts and choices and not any(_means(texts[key], choice) for choice in choices):
            return True
    return False


def _means(text: str, choice: Any) -> bool:
    return text == choice or (not isinstance(choice, str) and bool(_json_or_text(text) == choice))


def _property(key: str, schemas: list[Mapping[str, Any]]) -> Any:
    """Return the schema of one argument: all that its object schemas say about it."""
    specs = [
        schema["properties"][key]
        for schema in schemas
        if isinstance(schema.get("properties"), Mapping) and key in schema["properties"]
    ]
    if not specs:
        extra = (schema.get("additionalProperties") for schema in schemas)
        specs = [item for item in extra if isinstance(item, Mapping)]
    return specs[0] if len(specs) == 1 else {"anyOf": specs}


def _resolve(spec: Any, root: Mapping[str, Any]) -> Any:
    """Follow the local ``$ref`` of a schema; an unknown one and a cycle resolve to an empty schema."""
    for _ in range(_DEPTH):
        reference = spec.get("$ref") if isinstance(spec, Mapping) else None
        if not isinstance(reference, str):
            return spec
        spec = root
        for part in reference.removeprefix("#").strip("/").split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            spec = spec.get(key, {}) if isinstance(spec, Mapping) else {}
    return {}


def _choices(part: Mapping[str, Any]) -> list[Any]:
    enum = part.get("enum")
    return ([part["const"]] if "const" in part else []) + (enum if isinstance(enum, list) else [])


def _types(part: Mapping[str, Any]) -> Iterator[str]:
    """Yield the types of a schema by JSON schema's names, also those that a database, Python or C names."""
    kinds = part.get("type")
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if isinstance(kind, str):
            base = re.split(r"[(\[<\d ]", kind.strip().lower())[0]
            yield kind if kind in _TYPES else _ALIASES.get(base, base)
    if kinds is None and "properties" in part:
        yield "object"
    if kinds is None and "items" in part:
        yield "array"


def _json_or_text(text: str) -> Any:
    try:
        return load_json(text)
    except CallSyntaxError:
        return text


def _unquoted(text: str) -> str:
    """Return ``text`` without the quotes of a JSON string, and without one level of JSON escapes."""
    bare = text.strip()
    for candidate in (bare, f'"{bare}"' if "\\" in bare else bare):
        value = _json_or_text(candidate)
        if isinstance(value, str) and candidate.startswith('"') and value != candidate:
            return _unquoted(value) if value.startswith('"') else value.strip()
    return bare


def _null(text: str) -> None:
    if text.lower() != "null" and text != "None":
        raise ValueError(text)


def _integer(text: str) -> int:
    try:
        # Refuse underscores: int() reads 1_000, which JSON never writes: it is text.
        return int(text) if "_" not in text else int("no digits")
    except ValueError:
        value = finite_float(text)
        if not value.is_integer() or "_" in text:
            raise
        return int(value)


def _number(text: str) -> int | float:
    if "_" in text:
        raise ValueError(text)
    try:
        return int(text)
    except ValueError:
        return finite_float(text)


def _boolean(text: str) -> bool:
    value = {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if value is None:
        raise ValueError(text)
    return value


def _container(kind: type[Any], text: str) -> Any:
    value = _json_or_text(text)
    if isinstance(value, str):
        value = read_literal(value)
    if not isinstance(value, kind):
        raise ValueError(text)
    return value


_CONVERSIONS: dict[str, Any] = {
    "null": _null,
    "integer": _integer,
    "number": _number,
    "boolean": _boolean,
    "object": lambda text: _container(dict, text),
    "array": lambda text: _container(list, text),
}

_TYPES = frozenset({*_CONVERSIONS, "string"})

_ALIASES = {
    "int": "integer", "uint": "integer", "long": "integer", "short": "integer", "unsigned": "integer",
    "bigint": "integer", "smallint": "integer", "tinyint": "integer", "num": "number", "float": "number",
    "double": "number", "decimal": "number", "real": "number", "numeric": "number", "bool": "boolean",
    "dict": "object", "map": "object", "list": "array", "tuple": "array", "arr": "array", "str": "string",
    "text": "string", "varchar": "string", "char": "string", "enum": "string", "date": "string",
    "datetime": "string", "time": "string", "uuid": "string",
}  # fmt: skip
"""Type names of Python, C and databases that tools write instead of those of JSON schema."""


def _type_of(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", dict: "object", list: "array"}
    return names.get(type(value), "string")


Check = Callable[[Mapping[str, Any]], str | None]
"""Returns the problem of a call's arguments; None if they fit the schema."""


def validate_call(call: ToolCall, tools: Tools) -> str | None:
    """Return None if ``call`` matches one of the ``tools``, else the problem as text.

    Arguments of a tool with an invalid schema are not validated.
    """
    parameters = parameters_of(call.name, tools)
    if parameters is None:
        return unknown_tool(call.name, tools)
    try:
        problem = _check(json.dumps(parameters, default=str))(call.arguments)
    except (RecursionError, ValueError):  # a schema that is too deep, or in Python contains itself
        return None
    if problem is None:
        return None
    expected = ", ".join(_signature(parameters)) or "none"
    return f"{call.name}: {problem}. Arguments: {expected}."


def load_validator() -> None:
    """Import what validation needs: it takes 50 ms, which the first tool calls would wait for."""
    _check("{}")


CHECK_SECONDS = 0.25
"""CPU time of one check, which patterns and nested ``$ref`` can make endless; beyond it a value is valid."""

_ENDLESS = re.compile(r'"(pattern\w*|uniqueItems|unevaluated\w+|\$\w+)"')
"""The keywords that can. A schema without them needs no clock, which costs as much as the check."""


def validator_of(schema: Mapping[str, Any]) -> Any:
    """Return the validator of a JSON schema. Raises ValueError for one that is not valid."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    try:
        Draft202012Validator.check_schema(schema)
    except (SchemaError, RecursionError, re.error) as error:
        raise ValueError(getattr(error, "message", str(error))) from error
    # Give an empty registry: with its own, jsonschema fetches a $ref to a URL, which the schema chooses.
    return Draft202012Validator(schema, registry=Registry())


@lru_cache(maxsize=1024)
def _check(parameters: str) -> Check:
    """Return the check of a schema given as JSON. Compiling one takes half a millisecond, so it is cached."""
    from jsonschema.exceptions import UnknownType, best_match
    from referencing.exceptions import Unresolvable

    try:
        validator = validator_of(json.loads(parameters))
    except ValueError:
        return lambda arguments: None

    is_bounded = _ENDLESS.search(parameters) is None

    def check(arguments: Mapping[str, Any]) -> str | None:
        def find() -> Any:
            return best_match(validator.iter_errors(arguments))

        try:
            error = find() if is_bounded else within_cpu(CHECK_SECONDS, find)
        except (UnknownType, Unresolvable, RecursionError, re.error):  # also a cycle of ``$ref``
            return None
        if error is None:
            return None
        where = ".".join(str(part) for part in error.absolute_path)
        return f"argument {where}: {error.message}" if where else str(error.message)

    return check


def unknown_tool(name: str, tools: Tools) -> str:
    """Return that there is no tool ``name``, which one is near, and which there are."""
    names = tool_names(tools)
    if not names:
        return f"there is no tool named {name!r}; no tools are offered"
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    return f"there is no tool named {name!r}; {hint}The tools are: {', '.join(names)}"


def _signature(parameters: Mapping[str, Any]) -> list[str]:
    """Return each argument with ``?`` unless it is required, and its types."""
    always = _Walk(parameters, lambda branch: False).parts(parameters)
    required = {name for schema in always for name in schema.get("required") or ()}
    specs: dict[str, Any] = {}
    for schema in _object_schemas(parameters, parameters, {}):
        for name, spec in (schema.get("properties") or {}).items():
            specs.setdefault(name, spec)
    rows = []
    for name, spec in specs.items():
        kinds = dict.fromkeys(kind for part in _alternatives(spec, parameters) for kind in _types(part))
        rows.append(f"{name}{'' if name in required else '?'} ({' or '.join(kinds) or 'any'})")
    return rows
