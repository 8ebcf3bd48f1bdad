"""Ratios and entropies of single tokens in the database: read by step, pruned, exported, checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import small_run as run
from db_command import violations

from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import pack_halves
from agentrl.documents.training import DBRecordData, TokenSpan, TokenStatistics, statistics_key
from agentrl.lab.deletion import Retention
from agentrl.lab.transfer import Transfer
from agentrl.screens.views.read import TokenReads
from agentrl.store.client import Store, open_connection

pytestmark = pytest.mark.integration

TRAINED = f"{run.TRAINED}/1/1"


def statistics(data: DBRecordData, step_id: str = run.STEP, *, spans: int | None = None) -> TokenStatistics:
    """The values 0, 0.25, … and 1, 1.25, … of the tokens of the first ``spans`` spans."""
    chosen = data.spans[:spans]
    values = np.arange(sum(span.end - span.start for span in chosen), dtype=np.float32) / 4
    return TokenStatistics(
        id=statistics_key(data.id, step_id), record=data.id, train_step=step_id, step=1,
        spans=tuple(TokenSpan(start=span.start, end=span.end) for span in chosen),
        log_ratios=pack_halves(values), entropies=pack_halves(1 + values),
    )  # fmt: skip


async def data_of(store: Store) -> DBRecordData:
    return (await store.training.fetch([TRAINED]))[0]


async def test_values_are_read_at_their_tokens_for_the_steps_that_count(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    item = statistics(await data_of(store))
    await store.training.put_token_statistics([item])
    await store.training.put_token_statistics([item])
    undone = replace(item, id=statistics_key(item.record, "0/1"), train_step="0/1")
    await store.training.put_token_statistics([undone])
    reads = TokenReads(store.connection)
    read = await reads.trajectory(TRAINED)
    first, second = read.calls
    assert list(first.values) == [1]
    assert first.values[1].log_ratios.tolist() == [0.0, 0.25, 0.5, 0.75]
    assert second.values[1].entropies.tolist() == [2.0, 2.25, 2.5, 2.75]

    await store.training.put_token_statistics([statistics(await data_of(store), spans=1)])
    read = await reads.trajectory(TRAINED)
    assert read.calls[0].values[1].log_ratios.tolist() == [0.0, 0.25, 0.5, 0.75]
    assert np.isnan(read.calls[1].values[1].entropies).all()
    other = await reads.trajectory(f"{run.READY}/1/1")
    assert [call.values for call in other.calls] == [{}, {}]


async def test_a_reverted_step_shows_no_values_and_a_check_finds_values_that_do_not_fit(
    store: Store, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights")
    item = statistics(await data_of(store))
    await store.training.put_token_statistics([replace(item, log_ratios=b"\0" * 6)])
    assert "8 tokens have [6, 16] packed bytes" in str(await violations(store))
    reads = TokenReads(store.connection)
    read = await reads.trajectory(TRAINED)
    assert read.calls[0].values == {}
    await store.training.put_token_statistics([item])
    assert await store.steps.revert_after(0) == 1
    await store.policy_versions.withdraw_after(0)
    assert await violations(store) == []
    read = await reads.trajectory(TRAINED)
    assert read.calls[0].values == {}


async def test_an_import_restores_them_and_prune_deletes_them_with_their_trajectory(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights")
    item = statistics(await data_of(store))
    kept = replace(item, id="other", record=f"{run.READY}/1/1")
    await store.training.put_token_statistics([item, kept])
    await Transfer(store.connection).export(tmp_path / "exported")
    retention = Retention(store.connection)
    counted = await retention.prune(last_step=1, older_than_days=0, dry_run=True)
    assert await retention.prune(last_step=1, older_than_days=0) == counted
    assert await store.database["TokenStatistics"].distinct("_id") == ["other"]

    copy = replace(run_config, run_name=f"{run_config.run_name}_copy")
    connection = await open_connection(copy)
    try:
        await Transfer(connection).load(tmp_path / "exported")
        found = connection.collection("TokenStatistics").find(sort=[("_id", -1)])
        assert [TokenStatistics.from_document(document) async for document in found] == [item, kept]
    finally:
        await connection.client.drop_database(copy.run_name)
        await connection.close()
