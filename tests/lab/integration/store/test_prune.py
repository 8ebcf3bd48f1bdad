"""``agentrl db prune``: what is finished goes within the limits, what is untrained or may be redone stays."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import small_run as run
from db_command import Db, agentrl_db, violations
from ready_data import statuses

from agentrl.config.schema import RunConfig
from agentrl.documents.record import Failure
from agentrl.documents.status import DataStatus
from agentrl.errors import ConfigError, StoreError
from agentrl.lab.deletion import Pruned, Retention
from agentrl.store.client import Store
from agentrl.store.mechanics import blobs
from agentrl.store.steps import StaleVersions

pytestmark = pytest.mark.integration

FAILED, TRAINED, OTHER = f"{run.TRAINED}/0/1", f"{run.TRAINED}/0/2", f"{run.TRAINED}/1/1"
READY = (f"{run.READY}/0/1", f"{run.READY}/1/1")
ABANDONED = f"{run.ABANDONED}/1/1"


async def prune(store: Store, *, last_step: int = 1, dry_run: bool = False, **limits: float) -> Pruned:
    retention = Retention(store.connection)
    return await retention.prune(last_step=last_step, dry_run=dry_run, **limits)  # type: ignore[arg-type]


async def resume_before_step_1(store: Store) -> None:
    assert await store.steps.revert_after(0) == 1
    await store.policy_versions.withdraw_after(0)


async def with_calls(store: Store) -> set[str]:
    return set(await store.database["DispatchedSamplingTask"].distinct("record"))


async def stamped(store: Store, collection: str) -> set[str]:
    return set(await store.database[collection].distinct("_id", {"pruned_at": {"$ne": None}}))


async def test_everything_finished_goes_and_nothing_else(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    before = await with_calls(store)
    for name in ("GatewayCall", "GatewaySession"):
        kept = [{"_id": record, "record": record} for record in (TRAINED, READY[0])]
        await store.database[name].insert_many(kept, bypass_document_validation=True)
    counted = await prune(store, older_than_days=0, dry_run=True)
    assert await with_calls(store) == before
    pruned = await prune(store, older_than_days=0)
    assert pruned == counted
    assert (pruned.data, pruned.files) == (2, 0)
    assert pruned.bytes > 1000
    gone = {FAILED, TRAINED, OTHER, ABANDONED}
    assert before - await with_calls(store) == gone
    assert gone <= await stamped(store, "Record")
    assert set(READY).isdisjoint(await stamped(store, "Record"))
    assert await stamped(store, "TrainStep") == {run.STEP}
    assert {run.TRAINED, run.ABANDONED} <= await stamped(store, "Task")
    counts = await statuses(store)
    assert (counts[DataStatus.READY], counts[DataStatus.TRAINED]) == (2, 0)
    record = await store.records.get(TRAINED)
    assert (record.score, record.trained_count, record.last_trained_step) == (0.0, 1, 1)
    for name in ("GatewayCall", "GatewaySession"):
        assert await store.database[name].distinct("record") == [READY[0]]
        await store.database[name].delete_many({})
    assert await prune(store, older_than_days=0) == Pruned()
    assert await violations(store) == []


async def test_what_the_next_owner_goes_on_with_stays(store: Store) -> None:
    await run.add_task(store, run.RUNNING, 0)
    kept = await run.claim(store)
    gone = await run.claim(store)
    for claim in (kept, gone):
        await store.model_calls.add(claim, run.call(claim, 0, 0, 2))
    await store.attempts.release(kept)
    await store.attempts.begin_anew(gone, Failure(kind="replay", message="x"))
    assert (await prune(store, older_than_days=0)).trajectories == 1
    assert await with_calls(store) == {kept.record_id}
    again = await run.claim(store)
    assert (again.record_id, again.attempt) == (kept.record_id, 2)
    assert (await prune(store, older_than_days=0)).trajectories == 0


async def test_what_a_later_step_than_the_checkpoint_trained_stays(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    await prune(store, older_than_days=0, last_step=0)
    assert {TRAINED, OTHER, *READY} <= await with_calls(store)
    assert ABANDONED not in await with_calls(store)
    await resume_before_step_1(store)
    assert (await statuses(store))[DataStatus.READY] == 4
    await prune(store, older_than_days=0)
    assert (await statuses(store))[DataStatus.READY] == 4
    assert await violations(store) == []


async def test_a_step_whose_data_are_gone_cannot_be_undone(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    await prune(store, older_than_days=0)
    with pytest.raises(StoreError, match=r"step 1 .* pruned"):
        await store.steps.revert_after(0)
    assert await store.steps.revert_after(1) == 0


async def test_stale_data_go_and_planned_data_stay(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    await resume_before_step_1(store)
    assert await store.training.mark_stale("train", StaleVersions(((0, 0),))) == 2
    await prune(store, older_than_days=0, last_step=0)
    assert {TRAINED, OTHER}.isdisjoint(await with_calls(store))
    assert (await statuses(store))[DataStatus.STALE] == 0
    assert await violations(store) == []


async def test_quarantined_data_go(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    assert await store.training.quarantine({"task": run.READY}, "it is bad") == 2
    await prune(store, older_than_days=0, last_step=0)
    assert (await statuses(store))[DataStatus.QUARANTINED] == 0
    assert await violations(store) == []


async def test_the_limits_of_age_and_step(store: Store, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    assert await prune(store, older_than_days=1) == Pruned()
    with pytest.raises(StoreError, match="step 2 is not committed"):
        await prune(store, before_step=2)
    long_ago = {"$set": {"created_at": datetime.now(UTC) - timedelta(days=9)}}
    for collection in ("Record", "DBRecordData"):
        await store.database[collection].update_many({"_id": {"$in": [TRAINED, FAILED]}}, long_ago)
    await prune(store, older_than_days=8, before_step=1)
    assert await stamped(store, "Record") == {FAILED}
    await prune(store, older_than_days=8)
    assert await stamped(store, "Record") == {FAILED, TRAINED}
    assert await violations(store) == []


async def test_files_go_with_their_documents(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blobs, "_LIMIT", 10)
    await run.build(store, tmp_path / "weights")
    neighbor = f"{TRAINED}0/0/output_ids/{hashlib.sha256().hexdigest()[:16]}"
    calls = store.database["DispatchedSamplingTask.packed.files"]
    await calls.insert_one({"_id": neighbor, "length": 1, "chunkSize": 1})
    pruned = await prune(store, older_than_days=0)
    assert pruned.files > 4
    for name in ("DispatchedSamplingTask", "DBRecordData"):
        files = await store.database[f"{name}.packed.files"].distinct("_id")
        chunks = await store.database[f"{name}.packed.chunks"].distinct("files_id")
        assert set(chunks) == set(files) - {neighbor}
        assert not any(str(file).startswith(f"{TRAINED}/") for file in files)
        assert any(str(file).startswith(f"{READY[0]}/") for file in files)
    assert await calls.find_one({"_id": neighbor}) is not None
    assert await violations(store) == []


async def test_the_command_heeds_the_oldest_checkpoint(
    store: Store, run_config: RunConfig, tmp_path: Path, db: Db
) -> None:
    await run.build(store, tmp_path / "weights")
    output = tmp_path / "output"
    words = ("prune", "--older_than_days", "0", "--output_dir", str(output))
    assert "no checkpoint under" in (out := await db(*words, "--dry_run"))
    assert "would be deleted: 3 model calls, 0 training documents" in out
    for step in (1, 2):
        run.write_checkpoint(output / f"checkpoint-{step:06d}", step, ())
    assert "deleted: 7 model calls, 2 training documents and 0 files" in await db(*words)
    with pytest.raises(ConfigError, match="nothing says what may go"):
        await agentrl_db(run_config, "prune")
    (output / "checkpoint-000001" / "state.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        await agentrl_db(run_config, *words)
