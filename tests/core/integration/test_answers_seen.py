"""A trajectory whose tool had the task's answer says so, and scores as any other."""

from __future__ import annotations

import asyncio

import pytest
from test_sampling import ADD, Setting, quick, task

from agentrl.config.schema import SamplingConfig
from agentrl.documents.status import RecordStatus
from agentrl.store.client import Store

pytestmark = pytest.mark.integration
__all__ = ["quick"]


@pytest.mark.parametrize(
    ("watched", "text", "seen"),
    [
        ("auto", "Q: 1+2? A: three apples", "add"),
        ("auto", "three apples", None),
        ("add", "three apples", "add"),
        ("none", "Q: 1+2? A: three apples", None),
    ],
)
async def test_a_sampler_notes_which_tool_had_the_answer(
    store: Store, watched: str, text: str, seen: str | None
) -> None:
    await store.tasks.load([task("a", slots=1, answer="three apples")])
    setting = Setting(
        store, ADD, "<answer>three apples</answer>", sampling=SamplingConfig(watch_answers=watched)
    )
    setting.tools.text = text
    await asyncio.wait_for(setting.run(), 60)
    (record,) = await setting.records("train/0/a")
    assert (record.answer_seen_in, record.score) == (seen, 1.0)
    assert record.status is not RecordStatus.FAILED
