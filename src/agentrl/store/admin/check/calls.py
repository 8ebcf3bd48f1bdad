"""Invariant 1: a Record's model calls are all there, in order, and add up to what the Record says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from agentrl.store.admin.check.findings import Problem
from agentrl.store.admin.check.reading import Snapshot, differing
from agentrl.store.blobs import moved_fields
from agentrl.store.connection import Json
from agentrl.store.names import CALL

_BYTES = 4
"""Of one packed id, and of one packed logprob."""
_PACKED = ("context_ids", "output_ids", "logprobs")

_FIELDS = {
    "record": 1, "index": 1, "parent": 1, "status": 1, "versions": 1, "prompt_tokens": 1,
    "generated_tokens": 1, "created_at": 1, "packed_in_gridfs": 1,
    "executions": {"$size": "$tool_executions"},
    **{name: {"$binarySize": f"${name}"} for name in _PACKED},
}  # fmt: skip


async def read_calls(moment: Snapshot, record_ids: Sequence[str]) -> dict[str, list[Json]]:
    """The calls of Records by index, with the sizes in bytes of their token arrays instead of these."""
    calls: dict[str, list[Json]] = {key: [] for key in record_ids}
    pipeline: list[Json] = [
        {"$match": {"record": {"$in": list(record_ids)}}},
        {"$sort": {"record": 1, "index": 1}},
        {"$project": _FIELDS},
    ]
    for call in await moment.aggregate(CALL, pipeline):
        if call.get("packed_in_gridfs"):
            call.update(await _sizes(moment, call))
        calls[call["record"]].append(call)
    return calls


async def _sizes(moment: Snapshot, call: Json) -> Json:
    names = moved_fields(call)
    files = await moment.by_id(f"{CALL}.packed.files", names, {"length": 1})
    return {name: files[key]["length"] if key in files else None for key, name in names.items()}


def call_problems(record: Json, calls: Sequence[Json]) -> Iterator[Problem]:
    """What is wrong between a Record and its calls."""
    expected = list(record["traj"])
    keys = [call["_id"] for call in calls]
    name = f"Record {record['_id']}"
    yield from differing(
        name,
        [
            ("its model calls in the order of traj", expected, keys),
            ("gap-free indexes of its calls", list(range(len(calls))), [call["index"] for call in calls]),
            ("calls named after it", [f"{record['_id']}/{call['index']}" for call in calls], keys),
        ],
    )
    yield from differing(name, _sums(record, calls))
    earlier: dict[str, Json] = {}
    for call in calls:
        yield from _call(call, earlier)
        earlier[call["_id"]] = call


def _sums(record: Json, calls: Sequence[Json]) -> list[tuple[str, Any, Any]]:
    versions = [span["version"] for call in calls for span in call["versions"]]
    resets = sum(call["parent"] is None and call["index"] > 0 for call in calls)
    return [
        ("turns", len(calls), record["turns"]),
        ("tool_calls", sum(call["executions"] for call in calls), record["tool_calls"]),
        ("context_resets", resets, record["context_resets"]),
        ("prompt_tokens of its last call", calls[-1]["prompt_tokens"] if calls else 0,
         record["prompt_tokens"]),
        ("generated_tokens", sum(call["generated_tokens"] for call in calls), record["generated_tokens"]),
        ("min_version", min(versions, default=None), record.get("min_version")),
        ("max_version", max(versions, default=None), record.get("max_version")),
    ]  # fmt: skip


def _call(call: Json, earlier: dict[str, Json]) -> Iterator[Problem]:
    name = f"DispatchedSamplingTask {call['_id']}"
    parent = earlier.get(call["parent"]) if call["parent"] is not None else None
    if call["parent"] is not None and parent is None:
        yield Problem(name, "a parent among the calls before it", sorted(earlier), call["parent"])
        return
    for field in {*_PACKED, *moved_fields(call).values()}:
        if call[field] is None:
            yield Problem(name, f"its {field} in GridFS", "a file", "none")
            return
    before = parent["prompt_tokens"] + parent["generated_tokens"] if parent else 0
    generated = call["generated_tokens"] * _BYTES
    yield from differing(
        name,
        [
            ("bytes of output_ids", generated, call["output_ids"]),
            ("bytes of logprobs, one for each token", call["output_ids"], call["logprobs"]),
            ("prompt_tokens from its parent's and context_ids", before + call["context_ids"] // _BYTES,
             call["prompt_tokens"]),
        ],
    )  # fmt: skip
    reached = 0
    for span in call["versions"]:
        if span["start"] != reached or span["end"] < span["start"]:
            break
        reached = span["end"]
    if reached != call["generated_tokens"]:
        spans = [(span["version"], span["start"], span["end"]) for span in call["versions"]]
        yield Problem(name, "policy versions that cover its tokens", f"[0, {generated // _BYTES})", spans)
