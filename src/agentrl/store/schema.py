"""Validators: the ``$jsonSchema`` of each collection, read off the document classes."""

from __future__ import annotations

import dataclasses
from datetime import datetime
from enum import Enum
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from agentrl.documents.base import Document, Root
from agentrl.documents.dispatch import DispatchedSamplingTask
from agentrl.documents.policy import PolicyVersion
from agentrl.documents.record import Record
from agentrl.documents.run import (
    FLAGS,
    SCHEMA,
    EpochOpening,
    Gate,
    ImportList,
    RunFact,
    RunSettings,
    TrainerLease,
    flags_key,
)
from agentrl.documents.run import SETTINGS as CONCERNS
from agentrl.documents.service import InferenceService
from agentrl.documents.task import Task
from agentrl.documents.training import DBRecordData, TrainStep
from agentrl.store.connection import Json
from agentrl.store.names import (
    CALL,
    DATA,
    EPOCH,
    GATE,
    IMPORTS,
    LEASE,
    RECORD,
    RUN,
    SERVICE,
    SETTINGS,
    STEP,
    TASK,
    VERSION,
)
from agentrl.store.slots import LEASE_DEADLINE

_PLAIN: dict[Any, tuple[str, list[str]]] = {
    str: ("text", ["string"]),
    bool: ("true or false", ["bool"]),
    int: ("a whole number", ["int", "long"]),
    float: ("a number", ["double", "int", "long"]),
    datetime: ("a date", ["date"]),
    bytes: ("packed bytes", ["binData"]),
}


def _schema_of(hint: Any, name: str) -> tuple[Json, str]:
    """The schema of a value, and what it says to people."""
    origin = get_origin(hint)
    if origin in (Union, UnionType):
        return _optional(*_schema_of(_some(hint), name))
    if origin is tuple:
        items, what = _schema_of(get_args(hint)[0], name)
        return {"bsonType": "array", "items": items}, f"a list, each: {what}"
    if origin is dict:
        return {"bsonType": "object"}, "an object"
    if origin is Literal:
        return {"enum": list(get_args(hint))}, f"one of {', '.join(get_args(hint))}"
    if hint in _PLAIN:
        what, types = _PLAIN[hint]
        return {"bsonType": types}, what
    if isinstance(hint, type) and issubclass(hint, Enum):
        states = [member.value for member in hint]
        return {"enum": states}, f"one of {', '.join(states)}"
    if isinstance(hint, type) and issubclass(hint, Document):
        return _object(hint), f"a {hint.__name__}"
    return {}, "anything"


def _some(hint: Any) -> Any:
    """``T`` of ``T | None``."""
    return next(arg for arg in get_args(hint) if arg is not type(None))


def _optional(schema: Json, what: str) -> tuple[Json, str]:
    if "enum" in schema:
        return {**schema, "enum": [*schema["enum"], None]}, f"{what}, or null"
    if "bsonType" not in schema:
        return schema, what
    types = [schema["bsonType"]] if isinstance(schema["bsonType"], str) else schema["bsonType"]
    return {**schema, "bsonType": [*types, "null"]}, f"{what}, or null"


def _object(cls: type[Document], **more: Json) -> Json:
    """A document of ``cls`` with its fields and ``more``, and no others."""
    hints = get_type_hints(cls)
    properties: Json = {}
    required = []
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        stored = "_id" if field.name == "id" and issubclass(cls, Root) else field.name
        title = f"{cls.__name__}.{stored}"
        schema, what = _schema_of(hints[field.name], title)
        properties[stored] = {**schema, "title": title, "description": f"{title} is {what}"}
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            required.append(stored)
    return {
        "bsonType": "object", "title": cls.__name__, "required": required or ["_id"],
        "additionalProperties": False, "properties": {**properties, **more},
    }  # fmt: skip


def _extra(title: str, description: str, **schema: Any) -> Json:
    return {"title": title, "description": f"{title} is {description}", **schema}


def _in_gridfs(cls: type[Document]) -> Json:
    return _extra(
        f"{cls.__name__}.packed_in_gridfs", "the fields that lie in GridFS, with the digests of their files",
        bsonType="array", items={"bsonType": "string"},
    )  # fmt: skip


_LAST_CLAIM = _extra(
    "Task.last_claim",
    "the slots that were claimed last, and who held them before",
    bsonType="array",
    items={
        "bsonType": "object", "required": ["traj_id"], "additionalProperties": False,
        "properties": {
            "traj_id": {"bsonType": ["int", "long"]}, "previous_owner": {"bsonType": ["string", "null"]},
        },
    },
)  # fmt: skip
_LEASE_DEADLINE = _extra(
    f"Task.{LEASE_DEADLINE}", "when the first lease of its slots runs out", bsonType=["date", "null"]
)
_RUN = {
    "_id": _extra("Run._id", f"one of {SCHEMA}", enum=[SCHEMA]),
    "version": _extra(
        "Run.version", "the version of the database's shape", bsonType=["int", "long"], minimum=1
    ),
}
_KEYS = [*CONCERNS, *map(flags_key, FLAGS)]

VALIDATORS: dict[str, Json] = {
    name: {"$jsonSchema": schema}
    for name, schema in {
        TASK: _object(Task, last_claim=_LAST_CLAIM, **{LEASE_DEADLINE: _LEASE_DEADLINE}),
        RECORD: _object(Record),
        CALL: _object(DispatchedSamplingTask, packed_in_gridfs=_in_gridfs(DispatchedSamplingTask)),
        DATA: _object(DBRecordData, packed_in_gridfs=_in_gridfs(DBRecordData)),
        VERSION: _object(PolicyVersion),
        SERVICE: _object(InferenceService),
        STEP: _object(TrainStep),
        RUN: _object(RunFact, **_RUN),
        SETTINGS: _object(RunSettings, _id=_extra("Settings._id", "a concern or flags/ROLE", enum=_KEYS)),
        GATE: _object(Gate),
        IMPORTS: _object(ImportList),
        EPOCH: _object(EpochOpening),
        LEASE: _object(TrainerLease),
    }.items()
}
"""What each collection takes: fields without a default are required, fields of no document are refused."""
