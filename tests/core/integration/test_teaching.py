"""A teacher fills its column: the student's ids or aligned text, privileged prompts, outages, refusals."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_run as run
import torch
from ready_data import ready_data
from tiny_policy import tiny_format, tiny_tokenizer, write_tiny_policy
from transformers import AutoModelForCausalLM

from agentrl.columns import outages as breaker_module
from agentrl.columns import pool as pool_module
from agentrl.columns.teacher import FolderTeacher, Scored, TeacherColumn, Teaching
from agentrl.config.schema import ClaimConfig, GroupConfig
from agentrl.data.forest import forest_from_data
from agentrl.documents.status import RecordStatus
from agentrl.errors import EngineError
from agentrl.inference.engine import EngineRefusedError, malformed
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store
from agentrl.store.groups import read_columns

pytestmark = pytest.mark.integration

TASK = "train/0/late"
# Without a back-off: while the oldest Record rests, another one would get the refusals meant for it.
CLAIMS = ClaimConfig(retry_backoff_seconds=1e-6, max_attempts=2)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(pool_module, "LONGEST_POLL_SECONDS", 0.05)
    monkeypatch.setattr(breaker_module, "FIRST_PROBE_SECONDS", 0.05)


@pytest.fixture
async def finalizer(store: Store, tmp_path: Path) -> GroupFinalizer:
    return await waiting_group(store, tmp_path)


async def waiting_group(store: Store, tmp_path: Path) -> GroupFinalizer:
    """Store two scored Records of two model calls each, whose group waits for its teacher."""
    await run.publish(store, tmp_path / "weights", 0, step=0, train_step=None)
    await run.add_task(store, TASK, 0)
    for value in (0.0, 1.0):
        await run.score(store, await run.claim(store), value)
    finalizer = GroupFinalizer(store, GroupConfig(columns="teacher"), split="train", seed=0)
    assert await finalizer.run_waiting() == 0
    return finalizer


class Scripted:
    """A teacher that raises the given errors first, and then gives every id the logprob −id/8."""

    name = "scripted"

    def __init__(self, *errors: EngineError) -> None:
        self.errors = list(errors)
        self.read: list[list[int]] = []

    async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
        if self.errors:
            raise self.errors.pop(0)
        self.read.append(list(ids))
        return Scored(np.array([-id / 8 for id in ids[first:]], np.float32))

    async def folder(self) -> str | None:
        return None

    async def close(self) -> None:
        """Nothing is open."""


async def teach(store: Store, teaching: Teaching) -> int:
    """Fill until nothing waits; return how many Records were filled."""
    column = TeacherColumn(store=store, teaching=teaching, claims=CLAIMS, until_empty=True)
    return await asyncio.wait_for(column.run(asyncio.Event(), concurrency=1), 30)


async def test_a_folder_scores_the_students_ids_and_its_likeliest_others(
    store: Store, finalizer: GroupFinalizer, tmp_path: Path
) -> None:
    folder = write_tiny_policy(tmp_path / "teacher", seed=3)
    assert await teach(store, Teaching(FolderTeacher(folder), top_logprobs=4)) == 2
    assert await store.database["SamplerProcess"].distinct("gpus") == [1], "costs count its time"
    assert await finalizer.run_waiting() == 1
    data = await store.training.fetch([item.id for item in await ready_data(store, "train")])
    columns = forest_from_data(data).columns
    assert columns is not None
    model = AutoModelForCausalLM.from_pretrained(str(folder))
    expected = []
    for first in (0, 1):
        ids = [10, 20, first, 1, 2, 3, 11, 20, first, 1, 2, 3]
        with torch.no_grad():
            logprobs = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        expected += [float(logprobs[at - 1, ids[at]]) for at in (2, 3, 4, 5, 8, 9, 10, 11)]
        best = logprobs[1].topk(4)
    np.testing.assert_allclose(columns.values["teacher"], expected, atol=1e-5)
    top = columns.top["teacher"]
    assert top.ids.counts.tolist() == [4] * 16
    assert top.ids.ids[32:36].tolist() == sorted(best.indices.tolist())


async def test_an_idle_teacher_fills_what_begins_to_wait_at_once(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_POLL_SECONDS", 600.0)
    stop = asyncio.Event()

    class Last(Scripted):
        async def score(self, ids: Sequence[int], first: int, top: int) -> Scored:
            scored = await super().score(ids, first, top)
            if len(self.read) == 4:
                stop.set()
            return scored

    column = TeacherColumn(store=store, teaching=Teaching(Last()), claims=CLAIMS)
    filling = asyncio.create_task(column.run(stop, concurrency=8))
    await asyncio.sleep(0.5)
    await waiting_group(store, tmp_path)
    await asyncio.wait_for(filling, 30)


@pytest.mark.parametrize("refusal", [EngineRefusedError("too long"), malformed("teacher", "NaN")], ids=str)
async def test_an_outage_counts_as_no_failure_and_a_refusal_gives_up_at_the_last_attempt(
    store: Store, finalizer: GroupFinalizer, refusal: EngineError
) -> None:
    down = [EngineError("no route", outage=breaker_module.DATABASE) for _ in range(5)]
    refused = [refusal] * CLAIMS.max_attempts
    assert await teach(store, Teaching(Scripted(*down, *refused))) == 1
    columns = await read_columns(store.connection, [f"{TASK}/0/1", f"{TASK}/1/1"])
    assert sorted((item.status.value, item.failures) for (item,) in columns.values()) == [
        ("failed", 2), ("filled", 0),
    ]  # fmt: skip
    assert await finalizer.run_waiting() == 1
    records = await store.records.by_task(TASK)
    assert sorted(record.status for record in records) == [RecordStatus.ABANDONED, RecordStatus.READY]
    assert [record.abandoned_because for record in records if record.abandoned_because] == [
        f"its column teacher was given up: {refusal.message}"
    ]


async def test_a_privileged_prompt_is_at_the_end_of_the_system_message(
    store: Store, finalizer: GroupFinalizer
) -> None:
    engine, chat = Scripted(), tiny_format()
    await teach(store, Teaching(engine, teacher=chat, prompt="The answer to {query} is {answer}."))
    prompt = chat.render(
        [
            {"role": "system", "content": "The answer to What is 2 + 2? is None."},
            {"role": "user", "content": "?"},
        ],
        None,
    )
    assert engine.read[0] == [*prompt, 0, 1, 2, 3]
    (column,) = (await read_columns(store.connection, [f"{TASK}/0/1"]))[f"{TASK}/0/1"]
    assert np.frombuffer(column.values, "<f4").tolist() == [0.0, -0.125, -0.25, -0.375] * 2


async def test_another_tokenizer_gets_the_text_and_its_logprobs_are_aligned(store: Store) -> None:
    chat, core = tiny_format(), tiny_tokenizer().backend_tokenizer
    merged = type(core).from_str(core.to_str())
    merged.add_tokens(["ab"])
    engine = Scripted()
    end = core.token_to_id("<|im_end|>")
    teaching = Teaching(engine, teacher=chat, tokenizers=(core, merged), stop_ids=frozenset({end}))
    await run.add_task(store, TASK, 0, generations=1)
    call = run.call(await run.claim(store), 0, 0, 2)
    spoken = [*core.encode("abc").ids, end]
    call = replace(call, output_ids=np.array(spoken, "<i4").tobytes())
    task = await store.tasks.get(TASK)
    assert task is not None
    values, top = await teaching.values(task, [call])
    pair, last = merged.token_to_id("ab"), core.token_to_id("c")
    assert engine.read[0][-3:] == [pair, last, end]
    np.testing.assert_array_equal(values, np.array([math.nan, math.nan, -last / 8, -end / 8], np.float32))
    assert top is None
