"""A trainer writes and deletes in its own folders alone, and gives no committed step up unasked."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from stored_run import StoredRun
from tiny_policy import write_tiny_policy

from agentrl.base.folder_owner import OWNER_FILE
from agentrl.documents.status import StepStatus
from agentrl.errors import ConfigError
from agentrl.observe.begin_run import check_base

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def trained(mongo_uri: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StoredRun]:
    """A run with checkpoints of steps 1 and 2; each test takes its output as it was."""
    folder = tmp_path_factory.mktemp("folders")
    run = StoredRun(f"t{time.monotonic_ns()}", mongo_uri, write_tiny_policy(folder / "base"), folder)
    asyncio.run(run.fill(8))
    run.train("--save_steps", "1", "--max_steps", "2")
    yield run
    asyncio.run(run.drop(f"{run.name}_2"))


@pytest.fixture
def run(trained: StoredRun, tmp_path: Path) -> Iterator[StoredRun]:
    shutil.copytree(trained.output, tmp_path / "kept", symlinks=True)
    yield trained
    shutil.rmtree(trained.output, ignore_errors=True)
    (tmp_path / "kept").rename(trained.output)


def refused(run: StoredRun, *more: str) -> str:
    """Start the trainer with ``more`` flags, and return why it refuses to train."""
    return run.command("train", *run.flags("--save_steps", "1", "--max_steps", "2", *more), code=2)


async def statuses(run: StoredRun) -> list[StepStatus]:
    async with await run.open() as store:
        versions = await store.policy_versions.published(9)
        assert [version.id for version in versions] == [2, 1, 0]
        return [step.status for step in await store.steps.find(status=None)]


@pytest.mark.parametrize("place", ["mistyped", "unmounted", "checkpoint lost", "copied without its owner"])
async def test_committed_steps_that_lie_elsewhere_are_not_undone(run: StoredRun, place: str) -> None:
    more: list[str] = []
    output, lost = run.output, run.output / "checkpoint-000002"
    if place == "mistyped":
        output = run.folder / "mistyped"
        more = ["--output_dir", str(output)]
    elif place == "unmounted":
        shutil.rmtree(output)
        output.mkdir()
    elif place == "checkpoint lost":
        shutil.rmtree(lost)
    else:
        (output / OWNER_FILE).unlink()
        shutil.rmtree(lost)
    for _ in range(2):  # the first refusal leaves nothing by which the second start would pass
        said = await asyncio.to_thread(refused, run, *more)
        assert f"last checkpoint is {os.uname().nodename}:{lost}" in said
        assert f"{output} has no" in said
        back = "none" if place in ("mistyped", "unmounted") else str(output / "checkpoint-000001")
        assert f"--resume_from_checkpoint {back}" in said
        assert await statuses(run) == [StepStatus.COMMITTED] * 2


async def test_a_folder_of_another_run_is_refused_and_stays_as_it_is(run: StoredRun) -> None:
    other = replace(run, name=f"{run.name}_2")
    before = {path: path.stat().st_mtime_ns for path in run.output.rglob("*")}
    for more in (
        ["--output_dir", str(run.output)],
        ["--fallback_output_dir", str(run.folder / "spare")],
        ["--publish_to", str(run.folder / "spare")],
    ):
        spare = run.folder / "spare" / other.name
        if len(more) and more[0] != "--output_dir":
            spare.parent.mkdir(exist_ok=True)
            spare.symlink_to(run.output)
        said = await asyncio.to_thread(refused, other, *more)
        assert f"belongs to run '{run.name}' of the database at" in said
        assert f"give another {more[0]}" in said
        spare.unlink(missing_ok=True)
    assert {path: path.stat().st_mtime_ns for path in run.output.rglob("*")} == before
    async with await other.open() as store:
        assert "flags/train" not in {item.id for item in (await store.settings.resolved()).values()}


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer_config.json", "added_tokens.json"])
async def test_a_base_whose_bytes_changed_is_refused_at_every_start(run: StoredRun, file: str) -> None:
    path = run.base / file
    content, status = (path.read_bytes(), path.stat()) if path.exists() else (None, None)
    if content is None or status is None:
        path.write_text("{}")
    else:
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    try:
        said = await asyncio.to_thread(refused, run)
        assert "was begun with other settings" in said
        assert f"base/{file} is" in said if content is not None else "the model's base is" in said
        assert await statuses(run) == [StepStatus.COMMITTED] * 2
        async with await run.open() as store:
            with pytest.raises(ConfigError, match="was begun with other settings"):  # an engine's start
                await check_base(store, str(run.base))
    finally:
        path.unlink() if content is None else path.write_bytes(content)


async def test_a_run_of_before_there_were_owner_files_goes_on_and_goes_back_when_it_is_asked_to(
    run: StoredRun,
) -> None:
    """Its folder is known by its checkpoints; a page beside the base is none of its bytes."""
    (run.base / "README.md").write_text("edited")
    for folder in (run.output, run.output / "weights"):
        (folder / OWNER_FILE).unlink()
    async with await run.open() as store:
        await store.database["TrainerLease"].update_one({}, {"$unset": {"output": "", "saved": ""}})
        await store.database["Settings"].delete_many({"_id": {"$in": ["identity", "files"]}})
    said = await asyncio.to_thread(run.train, "--save_steps", "1", "--max_steps", "3")
    assert "training from step 2" in said
    assert (run.output / OWNER_FILE).is_file()
    earlier = str(run.output / "checkpoint-000002")
    said = await asyncio.to_thread(run.train, "--max_steps", "2", "--resume_from_checkpoint", earlier)
    assert "1 steps after step 2 are reverted" in said
