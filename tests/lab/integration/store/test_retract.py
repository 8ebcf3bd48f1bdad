"""``agentrl retract``: what is withdrawn is gone everywhere, groups are decided again, kills are finished."""

from __future__ import annotations

import lzma
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as parquet
import pytest
import small_run as run
from db_command import agentrl_db, violations

from agentrl.base import atomic_folder
from agentrl.base.folder_owner import claim
from agentrl.config.schema import GroupConfig, RunConfig
from agentrl.documents.run import PARENT, TRAIN_ROLE, Kinship, Relative
from agentrl.documents.status import RecordStatus, TaskStatus
from agentrl.documents.training import TrainStep
from agentrl.errors import ConfigError, LeaseHeldError, LeaseLostError, StoreError
from agentrl.lab import deletion
from agentrl.lab import lab_cli as retract_command
from agentrl.lab import retract as of_trainer
from agentrl.lab.deletion import Retractions
from agentrl.lab.regroup import decide_anew
from agentrl.lab.retract import delete_withdrawn, remove_lines
from agentrl.lab.transfer import FILE
from agentrl.rollout.housekeeping import GroupFinalizer
from agentrl.store.client import Store, open_store
from agentrl.store.settings import settings_document
from agentrl.train.lease import hold_lease
from agentrl.weights import storage

pytestmark = pytest.mark.integration

FIRST, SECOND = f"{run.READY}/0/1", f"{run.READY}/1/1"
TRAINED = f"{run.TRAINED}/1/1"


async def agentrl_retract(config: RunConfig, *words: str) -> int:
    """Run ``agentrl retract`` inside a running event loop."""
    where = (config.run_name, "--db_connection_string", str(config.db_connection_string), "--yes")
    arguments = retract_command.retract_parser().parse_args([*where, *words])
    return await retract_command.withdraw_from_run(arguments)


async def mentions(store: Store, text: str) -> dict[str, int]:
    """Return {collection: documents that hold ``text`` anywhere}."""
    found: dict[str, int] = {}
    for name in await store.database.list_collection_names(filter={"type": "collection"}):
        if name.startswith("system."):
            continue
        async for document in store.database[name].find({}):
            if text in repr(document):
                found[name] = found.get(name, 0) + 1
    return found


async def be_killed(*_: object) -> None:
    raise KeyboardInterrupt


async def stored_task(store: Store, key: str) -> dict[str, Any]:
    document = await store.database["Task"].find_one({"_id": key})
    assert document is not None
    return document


async def test_an_untrained_group_is_decided_again_without_it(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    await store.labels.put(FIRST, by="ann", label="bad")
    printed = tmp_path / "logs" / f"{store.run_name}_sampler-0.out"
    printed.parent.mkdir()
    printed.write_text(f"12:00:00 WARNING {FIRST} failed\n")
    flags = {"log_dir": str(printed.parent)}
    await store.settings.join("sample", flags, given=flags, packages={})
    assert await agentrl_retract(run_config, "--record", FIRST, "--dry_run") == 0
    assert f"Records      1: {FIRST}" in capsys.readouterr().out
    assert len(await mentions(store, FIRST)) > 3
    assert await agentrl_retract(run_config, "--record", FIRST, "--because", "a licence") == 0
    assert await mentions(store, FIRST) == {"Tombstone": 1}
    assert printed.read_text() == "", "the samplers' --log_dir is searched too"
    task = await stored_task(store, run.READY)
    assert [slot["traj_id"] for slot in task["slots"]] == [1]
    assert (task["retracted"], task["group"]["scored"], task["group"]["outcome"]) == (1, 1, "abandoned")
    left = await store.records.get(SECOND)
    assert (left.status, left.abandoned_because) == (
        RecordStatus.ABANDONED,
        "no spread in the group's scores",
    )
    assert await violations(store) == []


async def test_a_trained_group_keeps_the_rest_as_trained(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    with pytest.raises(ConfigError, match="nothing is selected, and nothing was withdrawn"):
        await agentrl_retract(run_config)
    nowhere = ("--rebuild", "--output_dir", str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match=r"the output folder of run \S+ is not here"):
        await agentrl_retract(run_config, "--record", TRAINED, *nowhere)
    assert await agentrl_retract(run_config, "--record", TRAINED) == 0
    said = capsys.readouterr().out
    assert f"steps        1: {run.STEP}" in said
    assert "from step 1 on" in said
    assert await mentions(store, TRAINED) == {"Tombstone": 1}
    group = (await stored_task(store, run.TRAINED))["group"]
    assert (group["scored"], group["trained"], group["kept_as_trained"]) == (1, 1, True)
    other = await store.records.get(f"{run.TRAINED}/0/2")
    assert (other.status, other.advantage, other.trained_count) == (RecordStatus.READY, -1.0, 1)
    assert await violations(store) == []


async def test_rebuild_goes_back_and_decides_trained_groups_again(
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rebuild in a later call, killed when weights are deleted, is finished by a call without flags."""
    weights = tmp_path / "weights"
    await run.build(store, weights)
    assert await agentrl_retract(run_config, "--record", TRAINED) == 0

    with monkeypatch.context() as patched:
        patched.setattr(storage, "delete", be_killed)
        with pytest.raises(KeyboardInterrupt):
            await agentrl_retract(run_config, "--rebuild", "--output_dir", str(tmp_path))
    assert any("an unfinished one" in problem for problem in await violations(store))
    changed: set[str] = set()

    async def decide_late(*given: Any) -> Any:
        """Another process changes each group once while it is decided again."""
        outcome = await decide_anew(*given)
        if (key := given[1]["_id"]) not in changed:
            await store.database["Task"].update_one({"_id": key}, {"$currentDate": {"updated_at": True}})
            changed.add(key)
        return outcome

    monkeypatch.setattr(deletion, "decide_anew", decide_late)
    assert await agentrl_retract(run_config, "--output_dir", str(tmp_path)) == 0
    assert changed == {run.TRAINED}
    assert "the run is back at step 0" in capsys.readouterr().out
    assert sorted(path.name for path in weights.iterdir()) == ["v000000"]
    assert [step.status for step in await store.steps.find(status=None)] == ["reverted"]
    assert "kept_as_trained" not in (await stored_task(store, run.TRAINED))["group"]
    other = await store.records.get(f"{run.TRAINED}/0/2")
    assert (other.status, other.trained_count) == (RecordStatus.ABANDONED, 0)
    assert await agentrl_retract(run_config, "--rebuild") == 0
    assert "the run is back" not in capsys.readouterr().out
    assert await violations(store) == []


async def test_a_task_goes_with_query_and_answer_and_is_not_loaded_again(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await run.build(store, tmp_path / "weights")
    assert await agentrl_retract(run_config, "--task", "ready", "--task", run.RUNNING) == 0
    for key in (run.READY, run.RUNNING):
        left = await mentions(store, key)
        assert left.keys() == {"Tombstone"}
    await run.add_task(store, run.READY, 1)
    assert await store.tasks.get(run.READY) is None
    assert await violations(store) == []
    late = {**await stored_task(store, run.TRAINED), "_id": "train/1/ready", "task_id": "ready", "epoch": 1}
    await store.database["Task"].insert_one(late)  # by a sampler that opened an epoch meanwhile
    assert await agentrl_retract(run_config) == 0
    assert (await mentions(store, "train/1/ready")).keys() == {"Tombstone"}
    with pytest.raises(StoreError, match="has no task 'unknown'"):
        await agentrl_retract(run_config, "--task", "unknown")


async def test_a_sampler_that_holds_it_loses_it_and_the_others_go_on(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    await run.publish(store, tmp_path, 0, step=0, train_step=None)
    await run.add_task(store, run.READY, 0)
    first, second = await run.claim(store), await run.claim(store)
    assert await agentrl_retract(run_config, "--record", first.record_id) == 0
    with pytest.raises(LeaseLostError):
        await run.score(store, first, 1.0)
    await run.score(store, second, 1.0)
    assert (await stored_task(store, run.READY))["status"] == TaskStatus.WAITING
    assert await GroupFinalizer(store, GroupConfig(), split="train", seed=0).run_waiting() == 1
    assert await violations(store) == []


async def test_everything_that_a_scorer_scored(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    with pytest.raises(StoreError, match="its scorers are: exact"):
        await agentrl_retract(run_config, "--scorer", "other")
    assert await agentrl_retract(run_config, "--scorer", "exact") == 0
    assert await store.database["Record"].count_documents({"score": {"$ne": None}}) == 0
    assert await violations(store) == []


async def test_a_call_that_is_killed_is_finished_by_the_next(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    retractions = Retractions(store.connection)
    selection = await retractions.select(records=[FIRST, TRAINED])
    await retractions.begin(selection, "why", "ann", rebuilds=False)

    def die(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await delete_withdrawn(store.connection, on_group=die)
    assert len(await retractions.unfinished()) == 1
    assert any("an unfinished one" in problem for problem in await violations(store))
    with pytest.raises(StoreError, match="still holds what ann withdrew"):
        await store.withdrawals.require_deleted()
    assert await agentrl_retract(run_config) == 0
    said = capsys.readouterr().out
    assert "weights      from step 1 on" in said
    assert "the weights from step 1 on were trained with it" in said
    await store.withdrawals.require_deleted()
    for key in (FIRST, TRAINED):
        assert await mentions(store, key) == {"Tombstone": 1}
    assert await violations(store) == []


async def test_the_check_finds_what_is_left(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    assert await agentrl_retract(run_config, "--record", FIRST) == 0
    step = {"_id": run.STEP}
    await store.database["TrainStep"].update_one(step, {"$push": {"data": FIRST}})
    assert any(FIRST in problem and "only its Tombstone" in problem for problem in await violations(store))


async def test_a_live_trainer_is_named(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    await run.build(store, tmp_path / "weights")
    async with hold_lease(store, 60.0):
        with pytest.raises(LeaseHeldError, match="this run has a trainer"):
            await agentrl_retract(run_config, "--record", FIRST)


async def test_exports_lose_it_and_an_old_one_is_not_imported(
    store: Store, run_config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.build(store, tmp_path / "weights")
    names = ("archive", "compressed", "dataset", "old")
    archive, compressed, dataset, old = (tmp_path / "exports" / name for name in names)
    assert await agentrl_db(run_config, "export", str(archive)) == 0
    assert await agentrl_db(run_config, "export", str(compressed), "--compress") == 0
    assert await agentrl_db(run_config, "export", str(dataset), "--hf") == 0
    shutil.copytree(archive, old)
    given = [word for folder in (archive, compressed, dataset) for word in ("--archive", str(folder))]
    assert await agentrl_retract(run_config, "--record", FIRST, *given) == 0
    said = capsys.readouterr().out
    assert f"{archive}: 1 withdrawn documents are taken out" in said
    assert f"{compressed}: 1 withdrawn documents are taken out" in said
    assert f"{dataset}: 1 withdrawn documents are taken out" in said
    holding = [path.name for path in archive.iterdir() if FIRST in path.read_text(encoding="utf-8")]
    assert holding == ["Tombstone.jsonl"]
    texts = {path.name: lzma.decompress(path.read_bytes()).decode() for path in compressed.glob("*.xz")}
    holding = [name for name, text in texts.items() if FIRST in text]
    assert holding == ["Tombstone.jsonl.xz"]
    assert FIRST not in parquet.read_table(dataset / FILE).column("id").to_pylist()
    copy = replace(run_config, run_name=f"{run_config.run_name}_copy")
    with pytest.raises(StoreError, match="holds 1 Records or Tasks that were withdrawn"):
        await agentrl_db(copy, "import", str(old))
    assert await agentrl_db(copy, "import", str(archive)) == 0
    async with await open_store(copy) as imported:
        assert await violations(imported) == []
        await imported.connection.client.drop_database(copy.run_name)


async def test_logs_and_exports_of_a_killed_call_are_left_for_the_next(
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await run.build(store, tmp_path / "weights")
    archive = tmp_path / "archive"
    assert await agentrl_db(run_config, "export", str(archive)) == 0

    with monkeypatch.context() as patched:
        patched.setattr(of_trainer, "_remove_log_lines", be_killed)
        with pytest.raises(KeyboardInterrupt):
            await agentrl_retract(run_config, "--record", FIRST, "--archive", str(archive))
    assert any("an unfinished one" in problem for problem in await violations(store))
    await store.withdrawals.require_deleted()  # a trainer may go on
    assert await agentrl_retract(run_config) == 1
    assert f"{archive} still holds it: give it by --archive" in capsys.readouterr().out
    assert await agentrl_retract(run_config, "--archive", str(archive)) == 0
    assert await violations(store) == []


async def test_only_weights_that_hold_it_are_deleted(
    store: Store, run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run has gone back since, and trained the step again without it."""
    weights = tmp_path / "weights"
    await run.build(store, weights)
    assert await agentrl_retract(run_config, "--record", TRAINED) == 0
    attempt = await store.trainer_lease.acquire("t", "h", 1, 60.0)
    await store.policy_versions.withdraw_after(0, attempt=attempt)
    await store.steps.revert_after(0, attempt=attempt)
    again = TrainStep(id=f"{attempt}/1", step=1, policy_version=0, data=(), owner="t")
    await store.steps.plan(again, attempt=attempt)
    await store.steps.commit(again.id, {}, [], attempt=attempt)
    await run.publish(store, weights, 2, step=1, train_step=again.id)
    await store.trainer_lease.release(attempt)
    kills = iter([True])

    def killed(folder: Path) -> None:
        """Leave a part of the first folder, as a kill does."""
        if next(kills, False):
            raise KeyboardInterrupt
        remove(folder)

    remove = atomic_folder.remove_folder
    with monkeypatch.context() as patched:
        patched.setattr(atomic_folder, "remove_folder", killed)
        with pytest.raises(KeyboardInterrupt):
            await agentrl_retract(run_config, "--rebuild", "--output_dir", str(tmp_path))
    with pytest.raises(StoreError, match="still holds what"):
        await store.withdrawals.require_deleted()
    assert await agentrl_retract(run_config, "--output_dir", str(tmp_path)) == 0
    assert sorted(path.name for path in weights.iterdir()) == ["v000000", "v000002"]
    assert [step.id for step in await store.steps.find()] == [again.id]
    assert await violations(store) == []


async def test_checkpoints_in_the_folder_of_an_earlier_start_are_deleted_too(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    """The trainer has gone on in another ``--output_dir``: what is withdrawn is in the weights of both."""
    await run.build(store, tmp_path / "new" / "weights")
    owner, made = await store.settings.owner(), []
    for attempt, name in enumerate(("old", "strange", "new"), 1):
        own = owner if name != "strange" else replace(owner, id="another")
        claim(tmp_path / name, own, "--output_dir")
        made.append(run.write_checkpoint(tmp_path / name / "checkpoint-000001", 1, (run.STEP,)).folder)
        values = {"output_dir": str(tmp_path / name)}
        await store.settings.start(settings_document("", values, TRAIN_ROLE), attempt)
    assert await agentrl_retract(run_config, "--record", TRAINED, "--rebuild") == 0
    assert [folder.parent.name for folder in made if folder.is_dir()] == ["strange"]
    assert await violations(store) == []


def test_log_records_that_name_it_go(tmp_path: Path) -> None:
    log = tmp_path / "math_sample_host-1.log"
    log.write_text("a record=t/0/1\n    more\nb record=t/0/11\nc\n    in t/0/1 too\nd\n", encoding="utf-8")
    assert remove_lines(tmp_path, "math", {"t/0/1"}) == 2
    assert log.read_text(encoding="utf-8") == "b record=t/0/11\nd\n"


async def test_children_are_named_and_lose_it_with_family(
    store: Store,
    run_config: RunConfig,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A call that is killed before its last child is finished by the next, which names nothing."""
    await run.build(store, tmp_path / "weights")
    checkpoint = str(tmp_path / "checkpoint-000001")
    kinds: tuple[Kinship, ...] = ("fork", "whatif")
    for kind in kinds:
        begun = Relative(
            id=PARENT, run=store.run_name, kind=kind, step=1, checkpoint=checkpoint,
            steps=() if kind == "fork" else (1, 1),
        )  # fmt: skip
        name = f"{store.run_name}_{kind}"
        async with await open_store(replace(run_config, run_name=name)) as child:
            await child.database["Run"].insert_one(begun.to_document())
            await store.ancestry.adopt(name, begun)
            for copied in ("Task",) if kind == "fork" else ("TrainStep",):
                await child.database[copied].insert_many(await store.database[copied].find({}).to_list())
    with pytest.raises(StoreError, match="its children read what came later"):
        await agentrl_retract(run_config, "--record", TRAINED, "--rebuild")
    assert f"child        {store.run_name}_fork, a fork of step 1" in capsys.readouterr().out
    assert await Retractions(store.connection).unfinished() == []
    words = ("--record", TRAINED, "--task", "ready", "--family", "--because", "a licence")
    select = Retractions.select_of_parent

    async def die_at_the_last(self: Retractions, stones: Any, *, reads: bool) -> Any:
        if reads:
            raise KeyboardInterrupt
        return await select(self, stones, reads=reads)

    with monkeypatch.context() as patched:
        patched.setattr(Retractions, "select_of_parent", die_at_the_last)
        with pytest.raises(KeyboardInterrupt):
            await agentrl_retract(run_config, *words)
    assert any("an unfinished one" in problem for problem in await violations(store))
    assert await agentrl_retract(run_config) == 0
    assert await Retractions(store.connection).unfinished() == []
    for kind, key in (("fork", run.READY), ("whatif", TRAINED)):
        name = f"{store.run_name}_{kind}"
        async with await open_store(replace(run_config, run_name=name)) as child:
            assert (await mentions(child, key)).keys() == {"Tombstone"}
            assert await child.database["Retraction"].distinct("because") == ["a licence"]
            await child.connection.client.drop_database(name)
