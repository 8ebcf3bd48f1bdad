"""Provide run databases and documents of realistic size."""

from __future__ import annotations

import random
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import (
    DispatchedSamplingTask,
    ToolExecution,
    VersionSpan,
    full_messages,
    pack_floats,
    pack_ids,
    unpack_floats,
    unpack_ids,
)
from agentrl.documents.status import CallStatus
from agentrl.documents.task import Slot, Task, task_key
from agentrl.documents.training import DBRecordData, Node, TrainableSpan
from agentrl.store.client import Store, open_store

Json = dict[str, Any]
SPLIT = "train"
GENERATIONS = 8
_VOCABULARY = """the a of which tower river year author answer search page result number first city between
because then question therefore tool found compare population century museum built opened according"""
_WORDS = _VOCABULARY.split()
_TOOL = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search the web and return the first results with their addresses.",
        "parameters": {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to look for"}},
            "required": ["query"],
        },
    },
}


@asynccontextmanager
async def run_database(uri: str, name: str) -> AsyncIterator[Store]:
    """Yield the store of a new run. Drop its database at the end."""
    run_name = f"bench_{name}_{uuid.uuid4().hex[:8]}"
    async with await open_store(
        RunConfig(run_name=run_name, db_connection_string=uri, db_timeout_seconds=300.0)
    ) as store:
        yield store
        await store.database.client.drop_database(run_name)


def text(rng: random.Random, tokens: int) -> str:
    """Return words of about ``tokens`` tokens, at four characters a token."""
    words: list[str] = []
    length = 0
    while length < 4 * tokens:
        words.append(rng.choice(_WORDS))
        length += len(words[-1]) + 1
    return " ".join(words)


def make_tasks(count: int, generations: int = GENERATIONS) -> list[Task]:
    """Return new Tasks, as loaded from a task file."""
    rng = random.Random(count)
    return [
        Task(
            id=task_key(SPLIT, 0, f"q{number}"), task_id=f"q{number}", split=SPLIT, epoch=0, order=number,
            query=text(rng, 60), answer="1889",
            slots=tuple(Slot(traj_id=slot) for slot in range(generations)),
        )
        for number in range(count)
    ]  # fmt: skip


def make_call(
    record: str, index: int, *, context: int, output: int, version: int = 3, seed: int = 0
) -> DispatchedSamplingTask:
    """Return a model call with ``context`` new prompt tokens and ``output`` generated tokens."""
    rng = random.Random(f"{seed}/{index}")
    numbers = np.random.default_rng(seed * 1000 + index)
    question = (
        {"role": "system", "content": text(rng, 40)},
        {"role": "user", "content": text(rng, context - 40)},
    )
    answered = ({"role": "tool", "name": "search", "execution": 0},)
    search = ToolExecution(
        name="search", arguments={"query": "tower"}, result=text(rng, context), error=False, seconds=0.2,
        server="web",
    )  # fmt: skip
    return DispatchedSamplingTask(
        id=f"{record}/{index}", record=record, index=index,
        parent=f"{record}/{index - 1}" if index else None, status=CallStatus.COMPLETED,
        messages=answered if index else question,
        response={"role": "assistant", "content": text(rng, output), "tool_calls": [_tool_call()]},
        tool_executions=(search,),
        tools=(_TOOL,) * 4 if index == 0 else None, finish_reason="stop",
        versions=(VersionSpan(version=version, start=0, end=output),),
        prompt_tokens=(context + output) * index + context, generated_tokens=output, engine="engine-1",
        sampling_params={"temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8196}, generate_seconds=1.25,
        context_ids=pack_ids(numbers.integers(0, 150_000, context).astype(np.int32)),
        output_ids=pack_ids(numbers.integers(0, 150_000, output).astype(np.int32)),
        logprobs=pack_floats(-numbers.exponential(0.5, output).astype(np.float32)),
    )  # fmt: skip


def _tool_call() -> Json:
    return {"type": "function", "function": {"name": "search", "arguments": '{"query": "tower"}'}}


def make_trajectory(record: str, *, turns: int = 20, tokens: int = 20_000, seed: int = 0) -> list[
    DispatchedSamplingTask
]:  # fmt: skip
    """Return ``turns`` model calls with ``tokens`` in total: half prompt tokens, half generated."""
    half = tokens // turns // 2
    return [make_call(record, index, context=half, output=half, seed=seed) for index in range(turns)]


def make_data(
    record: str, task: str, *, tokens: int = 20_000, turns: int = 20, seed: int = 0
) -> DBRecordData:
    """Return the training data of one trajectory: one chain of ``tokens``, half of them trainable."""
    numbers = np.random.default_rng(seed)
    half = tokens // turns // 2
    spans = tuple(
        TrainableSpan(
            start=(2 * turn + 1) * half,
            end=(2 * turn + 2) * half,
            call=turn,
            version=3,
            advantage=0.5,
            temperature=1.0,
        )
        for turn in range(turns)
    )
    return DBRecordData(
        id=record, record=record, task=task, split=SPLIT, score=1.0, advantage=0.5, min_version=3,
        max_version=3, tokens=tokens, trainable_tokens=half * turns, turns=turns,
        nodes=(Node(start=0, end=tokens),), spans=spans,
        input_ids=pack_ids(numbers.integers(0, 150_000, tokens).astype(np.int32)),
        behavior_logprobs=pack_floats(-numbers.exponential(0.5, half * turns).astype(np.float32)),
    )  # fmt: skip


def with_plain_arrays(call: DispatchedSamplingTask) -> Json:
    """Return the call's document with plain number arrays in place of packed bytes."""
    return {
        **call.to_document(),
        "context_ids": unpack_ids(call.context_ids).tolist(),
        "output_ids": unpack_ids(call.output_ids).tolist(),
        "logprobs": unpack_floats(call.logprobs).tolist(),
    }


def with_whole_conversations(calls: list[DispatchedSamplingTask]) -> list[Json]:
    """Return the calls as the original system stores them: all messages and prompt ids in every call."""
    messages: list[Json] = []
    prompt: list[int] = []
    documents = []
    for parent, call in zip([None, *calls], calls, strict=False):
        messages = [*messages, *full_messages(call, parent)]
        prompt = [*prompt, *unpack_ids(call.context_ids).tolist()]
        whole = {"messages": messages, "tools": list(calls[0].tools or ()), "context_ids": prompt}
        documents.append({**with_plain_arrays(call), **whole})
        messages = [*messages, dict(call.response)]
        prompt = [*prompt, *unpack_ids(call.output_ids).tolist()]
    return documents
