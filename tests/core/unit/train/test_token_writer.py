"""Values of single tokens are written after the commit; what goes wrong there is a warning."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from training_data import group

from agentrl.documents.model_call import pack_halves, unpack_halves
from agentrl.documents.status import DataStatus
from agentrl.documents.training import TokenStatistics, TrainStep
from agentrl.errors import StoreUnavailableError
from agentrl.train import loop
from agentrl.train.loop import TokenWriter
from agentrl.train.step import TokenValues

STEP = TrainStep(id="2/7", step=7, policy_version=6, data=("a/0/1",), owner="me")
ITEM = group("a")[0]
VALUES = [
    TokenValues(ITEM.id, ITEM.spans, np.array([0.5, -1.0, 0.0, 2e5], np.float32), np.ones(4, np.float32))
]


def failing(error: BaseException) -> Callable[[Sequence[TokenStatistics]], Any]:
    async def put(items: Sequence[TokenStatistics]) -> None:
        raise error

    return put


async def test_a_step_is_written_as_one_document_per_trajectory(store: Any) -> None:
    writes = TokenWriter(store)
    writes.start(STEP, VALUES)
    await writes.close()
    (written,) = store.statistics.values()
    assert (written.id, written.record, written.step) == ("a/0/1@2/7", "a/0/1", 7)
    assert [(span.start, span.end) for span in written.spans] == [(6, 10)]
    assert unpack_halves(written.log_ratios).tolist() == [0.5, -1.0, 0.0, 65504.0]
    assert written.problem(10) is None
    assert written.problem(9) == "a span is outside 9 tokens"


def test_packed_halves_keep_missing_values_and_three_digits() -> None:
    values = np.array([1e-4, 0.0123456, 11.5, np.nan], np.float32)
    np.testing.assert_allclose(unpack_halves(pack_halves(values)), values, rtol=5e-4)


async def test_a_failed_write_is_a_warning(store: Any, caplog: pytest.LogCaptureFixture) -> None:
    store.training.put_token_statistics = failing(StoreUnavailableError("the database is gone"))  # type: ignore[method-assign]
    writes = TokenWriter(store)
    writes.start(STEP, VALUES)
    await writes.close()
    assert "step 7: its token statistics are not stored: the database is gone" in caplog.text


async def test_a_slow_write_is_never_waited_for_longer_than_the_end_of_the_run(
    store: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def hangs(items: Sequence[TokenStatistics]) -> None:
        await asyncio.Event().wait()

    store.training.put_token_statistics = hangs  # type: ignore[method-assign]
    monkeypatch.setattr(loop, "CLOSE_SECONDS", 0.01)
    writes = TokenWriter(store)
    writes.start(STEP, VALUES)
    writes.start(STEP, VALUES)
    assert "still writing those of an earlier step" in caplog.text
    await writes.close()
    assert "the database is too slow" in caplog.text
    assert store.statistics == {}


async def test_a_run_stores_the_tokens_of_each_step_whose_write_succeeds(
    store: Any, start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put = store.training.put_token_statistics

    async def fails_once(items: Sequence[TokenStatistics]) -> None:
        if items[0].step == 1:
            raise StoreUnavailableError("gone")
        await put(items)

    monkeypatch.setattr(store.training, "put_token_statistics", fails_once)
    await (await start(save_steps=9, publish_steps=9)).run()
    assert store.with_status(DataStatus.TRAINED) == list(store.data)
    steps = list(store.train_steps.values())
    assert [step.step for step in steps] == [1, 2, 3]
    assert store.statistics.keys() == {f"{data}@{step.id}" for step in steps[1:] for data in step.data}
    assert all(item.problem(10) is None for item in store.statistics.values())
    assert "step 1: its token statistics are not stored: gone" in caplog.text
