"""Files of trajectories: kept in the run's folder, restored, deleted, and swept."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
from made_documents import made_task
from s3_here import s3_folder

from agentrl.base.folder_owner import OWNER_FILE, Owner
from agentrl.documents.status import ToolState
from agentrl.environments.environment import Environment, EnvironmentSession, environment, open_environment
from agentrl.environments.snapshots import Snapshots
from agentrl.errors import ConfigError
from agentrl.weights.storage import folder_names, name_of

RUN, OTHER = (Owner(run=name, id=name, server="s") for name in ("run", "other"))
LIMIT = 1000


@pytest.fixture(autouse=True)
def nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.environments.environment._not_kept", set())


@pytest.fixture(params=["folder", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    if request.param == "folder":
        yield str(tmp_path / "kept")
    else:
        with s3_folder(monkeypatch) as url:
            yield url


def snapshots(root: str | Path, owner: Owner = RUN) -> Snapshots:
    async def found() -> Owner:
        return owner

    return Snapshots(str(root), found, LIMIT)


@environment("desk")
class Desk(Environment):
    """Papers in memory, which fit into a snapshot."""

    tools = ("add", "read")
    state = ToolState.SNAPSHOT

    def __init__(self, task: Any) -> None:
        super().__init__(task)
        self.papers: list[str] = []
        self.hold = asyncio.Event()
        self.hold.set()

    async def add(self, paper: str) -> int:
        """Add a paper."""
        self.papers.append(paper)
        return len(self.papers)

    async def read(self) -> str:
        """Read all."""
        return ",".join(self.papers)

    async def snapshot(self, archive: Path, limit: int) -> None:
        await self.hold.wait()
        content = ",".join(self.papers)
        if len(content) >= limit:
            raise ValueError(f"{len(content)} letters")
        archive.write_text(content)  # noqa: ASYNC240

    def restore(self, archive: Path) -> None:
        self.papers = archive.read_text().split(",")


async def desk(kept: Snapshots | None, attempt: int = 1, record: str = "train/0/t/0/1") -> EnvironmentSession:
    """Open the environment of one trajectory."""
    files = None if kept is None else kept.of(record, attempt)
    session = open_environment(made_task("t", environment="desk"), call_timeout=10, files=files)
    assert session is not None
    await session.open()
    return session


async def test_a_new_session_goes_on_with_the_files_of_one_that_is_gone(root: str) -> None:
    first = await desk(snapshots(root))
    assert await first.snapshot() is None, "nothing has changed"
    references = []
    for paper in "abcd":
        await first.call("add", {"paper": paper})
        references.append(await first.snapshot())
        assert await first.snapshot() == references[-1], "the same again, without a second archive"
    assert len(set(references)) == 4
    for reference, papers in ((references[3], "a,b,c,d"), (references[2], "a,b,c")):
        second = await desk(snapshots(root), attempt=2)
        assert reference is not None
        assert await second.restore(reference)
        assert await second.snapshot() == reference
        assert (await second.call("read", {})).text == papers
    third = await desk(snapshots(root), attempt=2)
    assert not await third.restore(str(references[0])), "only the last two stay"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda reference: reference.replace(".tar", ".tar/../1-2.tar"),
        lambda reference: "../../secret:3:" + "0" * 64,
        lambda reference: reference[:-1] + ("0" if reference[-1] != "0" else "1"),
        lambda reference: "",
    ],
)
async def test_a_reference_to_another_file_restores_nothing(
    tmp_path: Path, spoil: Callable[[str], str]
) -> None:
    session = await desk(snapshots(tmp_path))
    await session.call("add", {"paper": "a"})
    reference = await session.snapshot()
    assert reference is not None
    assert not await (await desk(snapshots(tmp_path))).restore(spoil(reference))
    other = await desk(snapshots(tmp_path), record="train/0/other/0/1")
    assert not await other.restore(reference)


async def test_a_snapshot_that_cannot_be_kept_is_no_error_and_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    session = await desk(snapshots(tmp_path))
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            await session.call("add", {"paper": "x" * (LIMIT + number)})
            assert await session.snapshot() is None
    assert [record.why for record in caplog.records if hasattr(record, "why")] == [
        "TaskEnvironmentError: snapshot of environment desk raised ValueError: 1000 letters"
    ]
    plain = await desk(None)
    await plain.call("add", {"paper": "a"})
    assert (await plain.snapshot(), plain.keeps_files) == (None, False)


async def test_a_call_waits_for_the_snapshot_of_those_before_it(tmp_path: Path) -> None:
    session = await desk(snapshots(tmp_path))
    await session.call("add", {"paper": "a"})
    own = session.instance
    assert isinstance(own, Desk)
    own.hold.clear()
    keeping = asyncio.create_task(session.snapshot())
    await asyncio.sleep(0.02)
    late = asyncio.create_task(session.call("add", {"paper": "b"}))
    await asyncio.sleep(0.02)
    assert own.papers == ["a"]
    own.hold.set()
    reference = await keeping
    assert (await late).text == "2"
    second = await desk(snapshots(tmp_path))
    assert await second.restore(str(reference))
    assert (await second.call("read", {})).text == "a"


async def test_the_place_is_the_runs_and_another_run_keeps_nothing_there(
    root: str, caplog: pytest.LogCaptureFixture
) -> None:
    session = await desk(snapshots(root))
    await session.call("add", {"paper": "a"})
    assert await session.snapshot()
    other = await desk(snapshots(root, OTHER))
    await other.call("add", {"paper": "a"})
    assert await other.snapshot() is None
    assert "belongs to run 'run'" in caplog.records[-1].why  # type: ignore[attr-defined]
    await snapshots(root, OTHER).delete("train/0/t/0/1")
    assert await (await desk(snapshots(root))).restore(str(await session.snapshot()))
    with pytest.raises(ConfigError, match="a web server lists no files"):
        Snapshots("https://files.example/kept", lambda: asyncio.sleep(0, RUN), LIMIT)


async def test_what_trajectories_leave_is_deleted_and_swept(root: str) -> None:
    kept = snapshots(root)
    records = [f"train/0/t/{number}/1" for number in range(3)]
    for record in records:
        session = await desk(kept, record=record)
        await session.call("add", {"paper": "a"})
        await session.snapshot()
    await kept.delete(records[0])
    await kept.delete("train/0/never/0/1")
    asked: list[set[str]] = []

    async def unfinished(found: Collection[str]) -> Collection[str]:
        asked.append(set(found))
        return {records[1]}

    assert await snapshots(root).sweep(unfinished) == 1
    assert asked == [set(records[1:])]
    left = set(await folder_names(root))
    assert left == {OWNER_FILE, name_of(kept.folder_of(records[1]))}
    assert await snapshots(f"{root}/none").sweep(unfinished) == 0


async def test_archives_of_earlier_owners_do_not_pile_up(root: str, tmp_path: Path) -> None:
    kept = snapshots(root)
    archive = tmp_path / "archive"
    archive.write_text("x")
    for owner, own in ((1, 3), (2, 1), (3, 2)):
        files = kept.of("r", owner)
        for _ in range(own):
            await files.put(archive)
    assert sorted(await folder_names(kept.folder_of("r"))) == [
        "1-2.tar", "1-3.tar", "2-1.tar", "3-1.tar", "3-2.tar", "record",
    ]  # fmt: skip
    await files.put(archive)
    assert sorted(await folder_names(kept.folder_of("r"))) == ["3-2.tar", "3-3.tar", "record"]
