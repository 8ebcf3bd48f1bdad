"""Read the rows of other systems as tasks: presets, known by a row's fields, and ``--task_fields``.

A preset adds the fields of a task to a row, and keeps the row's other fields, which become ``Task.meta``.
"""

from __future__ import annotations

import re
import string
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from agentrl.documents.document import excerpt
from agentrl.documents.task_json import (
    ANSWER,
    GSM8K_ANSWER,
    ID,
    QUERY,
    BadTaskError,
    aliases_of,
    nearest_field,
    parse,
)
from agentrl.errors import ConfigError

Row = dict[str, Any]

_ASKED: Final = (
    ("boxed", re.compile(r"\\f?boxed")),
    ("####", re.compile(r"####")),
    ("Answer:", re.compile(r"Answer:\s*\\?\$[A-Za-z]|(?:after|with|form|format)\W+Answer:", re.IGNORECASE)),
)
"""How a prompt says in which form it wants the answer: ``answer_schema``, which is in the mark → the mark."""
_BOXED = {"scorer": "math", "answer_schema": "boxed"}


_BARE = r"\s*([-+]?(?:\d|\\[A-Za-z]|\()[^\s$]*|[A-Za-z](?![A-Za-z]))"
"""What a model boxes without braces: a number, a command, a bracket or one letter."""


def last_braced(text: str, command: str) -> str | None:
    """Return the content of the last complete ``command{…}``, stripped; without one, of ``command 5``."""
    found: tuple[int, str] | None = None
    opened: list[tuple[int, bool]] = []
    for token in re.finditer(rf"({re.escape(command)}\s*\{{)|\\.|[{{}}]", text, re.DOTALL):
        if token.group() == "}" and opened:
            start, is_command = opened.pop()
            if is_command and (found is None or start > found[0]):
                found = start, text[start : token.start()].strip()
        elif token.group()[-1] == "{" and token.group() != "\\{":
            opened.append((token.end(), token.group(1) is not None))
    if found is not None:
        return found[1]
    bare = re.findall(re.escape(command) + _BARE, text)
    return bare[-1].rstrip(".,;:") if bare else None


@dataclass(frozen=True, slots=True)
class Preset:
    """One kind of row: how it is known, how it is read, and a line that says so."""

    fits: Callable[[Row], bool]
    read: Callable[[Row], Row]
    """Returns the task's fields for a row; None removes a field. A row's own scorer stays."""
    says: str


def _first(row: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _has(row: Mapping[str, Any], *names: str) -> bool:
    return _first(row, names) is not None


def _is_task(row: Row) -> bool:
    return _has(row, *ID) and _has(row, *ANSWER, "scorer", "environment")


def _inside(row: Mapping[str, Any], holder: str, name: str) -> Any:
    value = row.get(holder)
    return value.get(name) if isinstance(value, dict) else None


def _aside(row: Row, *names: str) -> Row:
    """Return the change that moves these fields into ``meta``."""
    moved = {name: row[name] for name in names if row.get(name) is not None}
    if not moved:
        return {}
    meta = row["meta"] if isinstance(row.get("meta"), dict) else {}
    return {**dict.fromkeys(moved), "meta": {**moved, **meta}}


def _texts(messages: Any) -> Iterator[str]:
    """Yield the text of the messages that are not the assistant's."""
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") in ("system", "user"):
            content = message.get("content")
            parts = content if isinstance(content, list) else [{"text": content}]
            yield from (str(part.get("text") or "") for part in parts if isinstance(part, dict))


def asked_schema(texts: Iterable[str]) -> str | None:
    """Return the ``answer_schema`` of the form in which a prompt asks for the answer; None without one.

    ``texts`` are the system prompt and the user's messages.
    """
    text = "\n".join(texts)
    folded = text.upper()  # plain words are found 100 times as fast as marks, and few tasks have one
    return next((schema for schema, mark in _ASKED if schema.upper() in folded and mark.search(text)), None)


def _original(row: Row) -> Row:
    given: Row = {}
    if not _has(row, *ANSWER):
        raw = row["raw"] if isinstance(row.get("raw"), dict) else {}
        given["answer"] = _first(raw, ("expected_answer", "answer"))
    if not _has(row, *QUERY, "messages", "prompt"):
        messages = _inside(row, "raw", "messages")
        said = [item for item in messages if isinstance(item, dict)] if isinstance(messages, list) else []
        given["query"] = next((item.get("content") for item in said if item.get("role") == "user"), None)
    return given


def _verl(row: Row) -> Row:
    given: Row = {}
    index, source = _inside(row, "extra_info", "index"), row.get("data_source")
    if not _has(row, *ID) and isinstance(index, (int, str)) and not isinstance(index, bool):
        given["id"] = f"{source}/{index}" if isinstance(source, str) else str(index)
    if not _has(row, *ANSWER):
        truth = _inside(row, "reward_model", "ground_truth")
        given["answer"] = truth["target"] if isinstance(truth, dict) and "target" in truth else truth
    if not _has(row, "data_source", "reward_model"):
        return given
    scorer = {} if _has(row, "environment") else {"scorer": "math"}
    if scorer and _are_tests(_first({**row, **given}, ANSWER)):
        return {**given, "scorer": "code"}
    asked = _first(row, QUERY)
    texts = [row.get("system_prompt"), asked] if asked else _texts(row.get("messages") or row.get("prompt"))
    if (schema := asked_schema(str(text) for text in texts if text)) is not None:
        given |= {"answer_schema": schema, **scorer}
    return given


def _are_tests(answer: Any) -> bool:
    """Return whether an answer, or the JSON in it, is tests of a program: ``{"inputs": …, "outputs": …}``.

    Raises BadTaskError for tests that call a function: the scorer ``code`` writes to a program's input.
    """
    if isinstance(answer, str) and answer.lstrip().startswith("{") and '"outputs"' in answer:
        with suppress(BadTaskError):
            answer = parse(answer.encode("utf-8", "surrogatepass"))
    if not isinstance(answer, dict) or not _has(answer, "inputs") or not _has(answer, "outputs"):
        return False
    if _has(answer, "fn_name"):
        raise BadTaskError(
            f"its tests call the function {excerpt(answer['fn_name'], 40)}, and the scorer code writes to a"
            " program's input: write them as assertions, or give a scorer of your own"
        )
    return True


_OPTION = re.compile(r"[A-Z]|(?:[Oo]ption|[Cc]hoice|opt?)[ _]?[A-Za-z]")
"""A column that holds one option: ``A``, ``option_a``, ``opa``."""
_RIGHT = ("answerKey", "answer_idx", "answer", "label", "correct", "cop")
"""Columns that say which choice is right: its letter, its text or its number from 0."""


def _listed_choices(row: Row) -> tuple[list[Any], list[str]]:
    """Return the texts and the labels of a row's choices; none if it has no choices."""
    listed = _first(row, ("choices", "options"))
    if isinstance(listed, dict):
        texts = listed["text"] if isinstance(listed.get("text"), list) else list(listed.values())
        labels = listed.get("label") if isinstance(listed.get("text"), list) else list(listed)
    elif listed is None:
        found = {name[-1].upper(): row[name] for name in row if _OPTION.fullmatch(name)}
        labels = [letter for letter in string.ascii_uppercase if found.get(letter) is not None]
        texts = [found[letter] for letter in labels]
        if "".join(labels) != string.ascii_uppercase[: len(labels)]:
            return [], []
    else:
        texts, labels = listed, None
    if not isinstance(texts, list):
        return [], []
    names = [str(label) for label in labels or string.ascii_uppercase[: len(texts)]]
    if len(names) == len(texts) and all(map(_is_labelled, texts, names)):
        texts = [_LABELLED.sub("", text, count=1) for text in texts]
    return texts, names


_LABELLED = re.compile(r"\s*[(\[]?(\w+)[)\].:]+\s+")


def _is_labelled(text: Any, label: str) -> bool:
    found = _LABELLED.match(text) if isinstance(text, str) else None
    return found is not None and found[1] == label


def _choices(row: Row) -> Row:
    """Put the choices below the question, and read the right one as its letter. Raises BadTaskError."""
    texts, labels = _listed_choices(row)
    right = _first(row, _RIGHT)
    letter = right.strip(" ()[].:") if isinstance(right, str) else right
    if letter in labels:
        index = labels.index(letter)
    elif right in texts:
        index = texts.index(right)
    elif isinstance(letter, str) and letter.upper() in labels:
        index = labels.index(letter.upper())
    else:
        number = int(right) if isinstance(right, str) and right.strip().isdecimal() else right
        index = number if isinstance(number, int) and not isinstance(number, bool) else -1
    if not 0 <= index < len(texts) == len(labels):
        raise BadTaskError(f"its answer {excerpt(right, 40)} is not one of its {len(texts)} choices")
    question = str(_first(row, (*QUERY, "question_stem")))
    lines = [f"{label}. {text}" for label, text in zip(labels, texts, strict=True)]
    if not all(line in question for line in lines):
        question = "\n".join([question.rstrip(), "", *lines])
    text = str(texts[index])
    is_label = text.strip(" ()[].:").upper() in map(str.upper, labels)  # the text of A may be B
    aside = _aside(row, *QUERY, "question_stem", "answer", "label", "correct")
    return {
        **aside, "query": question, "answer": labels[index],
        "aug_answers": [*([] if is_label else [text]), lines[index]], "scorer": "exact",
    }  # fmt: skip


def _lists_choices(row: Row) -> bool:
    if _has(row, "scorer", "environment") or not _has(row, *_RIGHT):
        return False
    texts, _ = _listed_choices(row)
    return (
        1 < len(texts) <= len(string.ascii_uppercase)
        and all(isinstance(text, (str, int, float)) for text in texts)
        and isinstance(_first(row, (*QUERY, "question_stem")), str)
    )


_SPEAKERS: Final = {"human": "user", "gpt": "assistant"}


def _conversations(row: Row) -> Row:
    """Read turns of ``from`` and ``value``. One without a value may have the right answer."""
    given: Row = {"conversations": None}
    messages = []
    for turn in row["conversations"]:
        role, text = turn.get("from"), turn.get("value")
        truth = turn.get("ground_truth")
        if text is not None:
            messages.append({"role": _SPEAKERS.get(role, role), "content": text})
        elif truth is not None:
            given |= {"answer": truth.get("value") if isinstance(truth, dict) else truth, **_BOXED}
    return {**given, "messages": messages}


def _is_conversation(row: Row) -> bool:
    turns = row.get("conversations")
    return isinstance(turns, list) and bool(turns) and all(isinstance(t, dict) and "from" in t for t in turns)


def _math(row: Row) -> Row:
    answer = _first(row, ANSWER)
    solution = row.get("solution")
    if answer is None and isinstance(solution, str):
        answer = last_braced(solution, "\\boxed")
        if answer is None:
            raise BadTaskError("there is no answer, and the solution has no \\boxed{…}")
    given = {
        **_aside(row, "messages"),
        "query": row.get("problem"),
        "problem": None,
        "answer": answer,
        **_BOXED,
    }
    return given | ({} if _has(row, *ID) else {"id": _first(row, ("unique_id", "uuid"))})


def _trl(row: Row) -> Row:
    given = _aside(row, *QUERY)
    if isinstance(row.get("prompt"), str):
        given |= {"query": row["prompt"], "prompt": None}
    answer = _first(row, (*ANSWER, "ground_truth", "solution"))
    if answer is None and not isinstance(row.get("label"), bool):  # true and false are those of KTO
        answer = row.get("label")
    if isinstance(answer, str) and not _has(row, *ANSWER):
        boxed = last_braced(answer, "\\boxed")
        answer = answer.strip().strip("$").strip() if boxed is None else boxed
    if answer is not None:
        given["answer"] = answer
        if not _has(row, "environment"):
            texts = [row["prompt"]] if isinstance(row["prompt"], str) else _texts(row["prompt"])
            given |= {**_BOXED, "answer_schema": asked_schema(texts) or _BOXED["answer_schema"]}
    return given


PRESETS: Final[Mapping[str, Preset]] = {
    "original": Preset(
        lambda row: isinstance(row.get("raw"), dict) and not (_has(row, *QUERY) and _has(row, *ANSWER)),
        _original, "query ← raw.messages, answer ← raw.expected_answer",
    ),
    "chatlearn": Preset(
        lambda row: _has(row, "data_source", "reward_model") and _has(row, "agent_cfg_path"), _verl,
        "query ← prompt, answer ← reward_model.ground_truth, id ← data_source/extra_info.index",
    ),
    "verl": Preset(
        lambda row: _has(row, "data_source", "reward_model")
        or _inside(row, "extra_info", "index") is not None,
        _verl, "query ← prompt, answer ← reward_model.ground_truth, id ← data_source/extra_info.index",
    ),
    "choices": Preset(
        _lists_choices, _choices,
        "query ← the question and its choices, answer ← the letter of the right one, or its text",
    ),
    "conversations": Preset(
        _is_conversation, _conversations,
        "query ← the human turn of conversations, answer ← the ground_truth of the assistant's",
    ),
    "trl": Preset(
        lambda row: _has(row, "prompt") and not _has(row, "query", "messages")
        and (isinstance(row["prompt"], str) or not _is_task(row)),
        _trl, "query ← prompt, answer ← answer, ground_truth, solution or label",
    ),
    "gsm8k": Preset(
        lambda row: not _is_task(row) and isinstance(row.get("question"), str)
        and isinstance(row.get("answer"), str) and GSM8K_ANSWER.search(row["answer"]) is not None,
        lambda row: dict(_BOXED), "query ← question, answer ← the number behind #### in answer",
    ),
    "math": Preset(
        lambda row: isinstance(row.get("problem"), str) and not _has(row, *QUERY)
        and (_has(row, "solution", *ANSWER)),
        _math, "query ← problem, answer ← answer, or \\boxed{…} in solution, id ← unique_id or uuid",
    ),
    "messages": Preset(
        lambda row: _has(row, "messages") and not _has(row, *QUERY) and not _is_task(row),
        lambda row: {"answer": _first(row, (*ANSWER, "reference_answer", "ground_truth"))},
        "query ← the last user message of messages, answer ← answer, reference_answer or ground_truth",
    ),
}  # fmt: skip
"""Rows of other systems. A row is read by the first preset that fits; docs/tasks.md has the table."""

TASK: Final = "task"
"""The name of rows that are tasks already."""


@dataclass(frozen=True, slots=True)
class TaskRows:
    """How rows become tasks: ``preset`` is auto, none or a preset's name."""

    preset: str = "auto"
    columns: Mapping[str, str] = field(default_factory=dict)
    """Field of the task → column of the row, or the path to it with dots."""
    constants: Mapping[str, str | None] = field(default_factory=dict)
    """Field of the task → its value in every row; None leaves it out (a column goes to ``meta``)."""

    @classmethod
    def parse(cls, preset: str, fields: str) -> TaskRows:
        """Return what ``--task_preset`` and ``--task_fields`` say. Raises ConfigError."""
        hint = "write query=COLUMN,answer=COLUMN,scorer:=math: a column behind =, a value or null behind :="
        columns: dict[str, str] = {}
        constants: dict[str, str | None] = {}
        for part in filter(None, map(str.strip, fields.split(","))):
            name, _, value = part.partition("=")
            is_constant = name.endswith(":")
            name = name.removesuffix(":")
            name, value = name.strip(), value.strip()
            if not name or not value or name in columns or name in constants:
                problem = "is given twice" if name in columns or name in constants else "is not FIELD=COLUMN"
                raise ConfigError(f"--task_fields: {part!r} {problem}", hint=hint)
            if (meant := nearest_field(name)) is not None:
                raise ConfigError(
                    f"--task_fields: a task has no field {name!r}", hint=f"did you mean {meant}?"
                )
            if is_constant:
                constants[name] = None if value == "null" else value
            else:
                columns[name] = value
        return cls(preset, columns, constants)

    def read(self, row: Any, number: int) -> tuple[Any, str]:
        """Return the task's JSON of the row with this number, from 0, and the preset that read it.

        A task without an id gets its number. Raises BadTaskError.
        """
        if isinstance(row, list):
            row = {"conversations": row}
        if not isinstance(row, dict):
            return row, TASK
        name = self.preset if self.preset in PRESETS else TASK
        if self.preset == "auto":
            name = next((name for name, preset in PRESETS.items() if preset.fits(row)), TASK)
        given = PRESETS[name].read(row) if name in PRESETS else {}
        kept = {key for key in _BOXED if row.get(key) is not None}
        task = {
            key: value for key, value in {**row, **given}.items() if key not in given or value is not None
        }
        task |= {key: row[key] for key in kept}
        mapped = {key: column_of(row, path) for key, path in self.columns.items()} | dict(self.constants)
        for path in self.columns.values():
            task.pop(path, None)
        for key, value in mapped.items():
            aliases = [alias for alias in aliases_of(key) if alias != key]
            task |= _aside(task, *aliases, *([key] if value is None else []))
            value = [value] if key == "images" and isinstance(value, str) else value
            task = {name: item for name, item in task.items() if name not in aliases} | {key: value}
        if not _has(task, *ID):
            task["id"] = str(number)
        return task, name

    def says(self, name: str) -> str:
        """Return how rows of preset ``name`` are read, in one line."""
        own = [f"{key} ← {path}" for key, path in self.columns.items()]
        own += [f"{key} = {value or 'null'}" for key, value in self.constants.items()]
        return ", ".join([*([PRESETS[name].says] if name in PRESETS else []), *own])


def column_of(row: Mapping[str, Any], path: str) -> Any:
    """Return the value of a column, or of a path such as ``reward_model.ground_truth``; None without one."""
    if path in row:
        return row[path]
    value: Any = row
    for name in path.split("."):
        if isinstance(value, list) and name.isdigit() and int(name) < len(value):
            value = value[int(name)]
        else:
            value = value.get(name) if isinstance(value, dict) else None
    return value
