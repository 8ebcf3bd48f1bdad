"""``agentrl fork`` of a real trainer's run: the child goes on as its parent did; a kill leaves no half."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from forked import run_forked
from test_train_loop import GROUPS, Run, base, run, steps_of, told
from training_data import group

from agentrl.base.folder_owner import OWNER_FILE, Owner
from agentrl.config.schema import ModelConfig, RunConfig
from agentrl.documents.status import TaskStatus
from agentrl.errors import ConfigError, StoreError
from agentrl.inference.served_engine import starting_weights
from agentrl.lab import lab_cli
from agentrl.lab.manage_runs import RunAdmin
from agentrl.lab.whatif_run import checkpoint_roots
from agentrl.store.client import run_exists
from agentrl.weights.folder import verify
from agentrl.weights.local_copy import LocalCopy

__all__ = ["base", "run"]

pytestmark = pytest.mark.integration
SAVED = ("--save_steps", "1", "--save_total_limit", "9")
PLACES = ("Ancestry.adopt", "Fork._copy_versions", "Fork._copy_tasks")
KILLED = """
import os, signal, sys
from agentrl.cli.main import main
from agentrl.lab.fork import Ancestry, Fork
kind, name = {place!r}.split(".")
owner = {{"Ancestry": Ancestry, "Fork": Fork}}[kind]
work = getattr(owner, name)
async def work_and_die(*arguments, **named):
    await work(*arguments, **named)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(owner, name, work_and_die)
sys.exit(main(sys.argv[1:]))
"""


async def forked(parent: Run, name: str, *more: str) -> int:
    """Run ``agentrl fork`` in this process; the child's output folder is a sibling of the parent's."""
    where = ("--db_connection_string", parent.uri)
    return await lab_cli.begin_fork(lab_cli.fork_parser().parse_args([parent.name, name, *where, *more]))


async def sample_as_the_parent(child: Run) -> None:
    """Finalize the child's open tasks with the very data that the parent sampled for them."""
    summary = {
        "scored": 2, "failed": 0, "mean_score": 0.5, "pass_rate": 0.5, "trained": 2,
        "finalized_at": datetime(2026, 1, 1, tzinfo=UTC), "counted_at_step": None,
    }  # fmt: skip
    async with await child.open() as store:
        for task in await store.tasks.find("train", status=TaskStatus.CREATED):
            done = {"status": TaskStatus.COMPLETED.value, "group": summary}
            await store.database["Task"].update_one({"_id": task.id}, {"$set": done})
            data = [item.to_document() for item in group(task.id)]
            await store.database["DBRecordData"].insert_many(data)


@pytest.fixture
async def child(run: Run, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Run]:
    """The name of a child; the current folder is one in which it has no output yet."""
    (run.folder / "here").mkdir()
    monkeypatch.chdir(run.folder / "here")
    child = replace(run, name=f"{run.name}_child")
    yield child
    async with await run.open() as store:
        for name in (child.name, f"{child.name}2"):
            await store.database.client.drop_database(name)


async def test_a_fork_goes_on_as_its_parent_did(
    run: Run, child: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """Same data and settings: the same steps, losses and weights, from the checkpoint where it lies."""
    await run.fill()
    assert run.train(*SAVED)[0] == 0
    assert await forked(run, child.name, "--from_step", "1") == 0
    said = capsys.readouterr().out
    assert "2 tasks are trained, 4 wait to be sampled" in said
    assert f"agentrl train --run_name {child.name} --autocast_bf16" in said
    assert "--db_connection_string '***'" in said
    async with await child.open() as store:
        assert [task.id for task in await store.tasks.find("train", status=TaskStatus.CREATED)] == [
            *GROUPS[2:]
        ]
        number, folder, _ = await starting_weights(store, ModelConfig(), LocalCopy(run.folder / "copy"))
        assert folder == str(run.output / "checkpoint-000001" / "model")
        newest = await store.policy_versions.latest()
        assert (number, newest.step) == (newest.id, 1)
        verify(newest.location, newest.files)
    await sample_as_the_parent(child)
    code, output = child.train(*SAVED)
    assert code == 0, output
    parents, steps = await steps_of(run), await steps_of(child)
    assert told(steps) == told(parents)
    assert [step.inherited for step in steps] == [True, False, False]
    async with await child.open() as store:
        made = await store.settings.of_steps(steps)
    assert [made[step.id].values["run_name"] for step in steps] == [run.name, child.name, child.name]
    last = "checkpoint-000003/model/model.safetensors"
    own = next(child.output.glob("checkpoint-000003*")) / "model/model.safetensors"
    assert own.read_bytes() == (run.output / last).read_bytes()
    async with await child.open() as store, await run.open() as parent:
        versions = await store.policy_versions.all()
        assert [version.id for version in versions] == list(range(len(versions)))
        assert versions[-1].digest == (await parent.policy_versions.all())[-1].digest
    assert await forked(child, f"{child.name}2", "--from_step", "2") == 0
    with pytest.raises(ConfigError, match="one of its parent's"):
        await forked(child, f"{child.name}3", "--from_step", "1")
    async with await replace(child, name=f"{child.name}2").open() as store:
        assert [each.run for each in await store.ancestry.lineage()] == [child.name, run.name]
        assert await store.ancestry.holder("DBRecordData", f"{GROUPS[0]}/0/1") == run.name
        assert await store.ancestry.holder("DBRecordData", f"{GROUPS[2]}/0/1") == child.name


async def test_a_step_is_forked_from_the_folder_of_the_start_that_made_it(
    run: Run, child: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that went on in another folder keeps its first steps in the one before; errors name both."""
    await run.fill()
    assert run.train(*SAVED, "--max_steps", "1")[0] == 0
    first, moved = run.output / "checkpoint-000001", run.folder / "moved"
    code, output = run.train(*SAVED, "--output_dir", str(moved), "--resume_from_checkpoint", str(first))
    assert code == 0, output
    with pytest.raises(ConfigError, match="no checkpoint of step 7") as caught:
        await forked(run, child.name, "--from_step", "7")
    assert f"in {moved} and {run.output}; its checkpoints are of the steps: 1, 2, 3" in str(caught.value)
    assert await forked(run, child.name, "--from_step", "1") == 0
    assert await forked(run, f"{child.name}2") == 0
    said = capsys.readouterr().out
    assert f"from {first}" in said
    assert f"from {moved / 'checkpoint-000003'}" in said
    async with await run.open() as store:
        assert await checkpoint_roots(store) == [moved, run.output]
        # Another run has the old folder by now: its steps are named alike.
        owner = run.output / OWNER_FILE
        owner.write_bytes(Owner(run=run.name, id="0" * 32, server="localhost:27017").to_json())
        assert await checkpoint_roots(store) == [moved]


async def refused(run: Run, child: Run) -> None:
    """The messages name the checkpoints that exist, or what stands in the way."""
    with pytest.raises(ConfigError, match=r"no checkpoint of step 1 in .*steps: 2, 3") as caught:
        await forked(run, child.name, "--from_step", "1")
    assert "--save_steps (it had 2)" in str(caught.value)
    with pytest.raises(ConfigError, match="is not here"):
        await forked(run, child.name, "--output_dir", "nowhere")
    old = run.folder / "here" / "output" / child.name / "old"
    old.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is not empty"):
        await forked(run, child.name)
    old.rmdir()
    with pytest.raises(ConfigError, match="is the parent and cannot be the new run"):
        await forked(run, run.name)
    async with await run.open() as store:
        assert await store.ancestry.children() == []
        assert child.name not in await store.connection.client.list_database_names()


@pytest.mark.usefixtures("short_transactions")
async def test_a_refused_or_killed_fork_leaves_no_run(run: Run, child: Run) -> None:
    """A refusal writes nothing, and nobody can open what a kill left: the command begins anew."""
    await run.fill()
    assert run.train("--save_steps", "2", "--save_total_limit", "9")[0] == 0
    await refused(run, child)
    words = ["fork", run.name, child.name, "--db_connection_string", run.uri]
    config = RunConfig(run_name=child.name, db_connection_string=run.uri)
    for place in PLACES:
        code, output = run_forked(("-c", KILLED.format(place=place)), words, run.folder / "cli.log", 60)
        assert code == -signal.SIGKILL, output
        with pytest.raises(StoreError, match="did not finish"):
            await run_exists(config)
        async with await run.open() as store:
            assert [each.run for each in await store.ancestry.living_children()] == [child.name]
    assert await forked(run, child.name) == 0
    async with await child.open() as store:
        assert len(await store.tasks.find("train")) == len(GROUPS)
        await RunAdmin(store.connection).delete(None, 10.0)
