"""The engines' copy: bit-identical over random chains with kills, gaps and damage; shared under a lock."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pytest
from published_chain import Chain, random_weights
from safetensors.torch import load_file

from agentrl.documents.document import now
from agentrl.documents.run import PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.errors import PublishError
from agentrl.weights import local_copy
from agentrl.weights.folder import TensorChecksum, checksums, weights_digest
from agentrl.weights.local_copy import LocalCopy, model_files


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy whole weights too, as from a URL."""
    monkeypatch.setattr(local_copy, "is_in_place", lambda version: False)


def held_digest(copy: LocalCopy) -> str:
    tensors = {}
    for file in copy.folder.glob("*.safetensors"):
        tensors |= {name: TensorChecksum.of(tensor) for name, tensor in load_file(file).items()}
    return weights_digest(tensors)


def published(chain: Chain, chance: random.Random, count: int) -> None:
    """Publish whole weights, and then others and deltas at random."""
    weights = random_weights(chance)
    chain.publish(weights)
    for number in range(1, count):
        weights = random_weights(chance, weights)
        chain.publish(weights, None if chance.random() < 0.2 else number)


class Killed(BaseException):
    """A SIGKILL: nothing of this process writes from then on."""


class Kills:
    """Kill at a chosen write; a write of bytes is then made in part."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        for owner, name in (
            (os, "pwrite"), (Path, "write_bytes"), (Path, "write_text"), (Path, "replace"), (Path, "unlink"),
        ):  # fmt: skip
            patch.setattr(owner, name, self._killed(getattr(owner, name)))

    def _killed(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(target: Any, data: Any = None, *rest: Any, **options: Any) -> Any:
            if self.left is not None:
                self.left -= 1
                if self.left == 0 and isinstance(data, (bytes, str, memoryview)):
                    write(target, data[: len(data) // 2], *rest, **options)
                if self.left <= 0:
                    raise Killed
            return write(target, *(() if data is None else (data,)), *rest, **options)

        return wrapped


async def test_chains_with_kills_are_bit_identical(monkeypatch: pytest.MonkeyPatch) -> None:
    chance, kills = random.Random(1), Kills(monkeypatch)
    killed = 0
    for _ in range(25):
        with TemporaryDirectory() as root:
            kills.left = None
            chain: Any = Chain(Path(root) / "published")
            published(chain, chance, chance.randint(2, 6))
            wanted = 1
            while True:
                wanted = chance.randint(wanted, len(chain.versions))
                kills.left = chance.choice((None, *range(1, 16)))
                try:
                    held = await LocalCopy(Path(root) / "copy").bring(chain, chain.versions[wanted])
                except Killed:
                    killed += 1
                    continue
                assert held.id == wanted
                assert held_digest(LocalCopy(Path(root) / "copy")) == held.digest
                if wanted == len(chain.versions):
                    break
    assert killed > 15


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Return versions 1 (whole), 2, 3, 4 (deltas), 5 (whole) and 6 (a delta)."""
    found, chance = Chain(tmp_path / "published"), random.Random(7)
    weights = random_weights(chance)
    for base in (None, 1, 2, 3, None, 5):
        found.publish(weights, base)
        weights = {name: tensor + 1 for name, tensor in weights.items()}
    return found


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[LocalCopy]:
    found = LocalCopy(tmp_path / "copy")
    yield found
    found.release()


async def bring(copy: LocalCopy, chain: Any, version: int) -> int:
    held = await copy.bring(chain, chain.versions[version])
    assert held_digest(copy) == chain.versions[held.id].digest
    return held.id


def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the list of the folders from which files are downloaded from then on."""
    found: list[str] = []
    download = local_copy.storage.download

    async def listed(location: str, files: Any, folder: Path) -> None:
        found.extend([Path(location).name] * len(files))
        await download(location, files, folder)

    monkeypatch.setattr(local_copy.storage, "download", listed)
    return found


async def test_missed_versions_are_caught_up_by_the_shortest_chain(
    copy: LocalCopy, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = reads(monkeypatch)
    assert await bring(copy, chain, 1) == 1
    read.clear()
    assert await bring(copy, chain, 3) == 3
    assert read == ["v000002", "v000003"]
    read.clear()
    assert await bring(LocalCopy(copy.folder.parent), chain, 3) == 3  # another engine of the host
    assert read == []
    assert await bring(copy, chain, 6) == 6
    assert set(read) == {"v000005", "v000006"}
    assert await bring(copy, chain, 4) == 6  # an engine that is late gets what the others have
    chain.versions[6] = replace(chain.versions[6], status=VersionStatus.WITHDRAWN)
    assert await bring(copy, chain, 4) == 4


async def test_a_missing_link_leaves_the_newest_version_that_can_be_had(
    copy: LocalCopy, chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    (chain.root / "v000003" / "rank-0.delta").unlink()
    assert await bring(copy, chain, 4) == 2
    assert len(caplog.messages) == 1
    assert "version 2 is taken, not 3: " in caplog.text
    with pytest.raises(PublishError, match=r"v000003/rank-0\.delta"):
        await bring(copy, chain, 4)
    assert await bring(copy, chain, 2) == 2
    assert await bring(copy, chain, 6) == 6
    chain.versions[5] = replace(chain.versions[5], pruned_at=now())
    with pytest.raises(PublishError, match="version 6 is a delta of version 5, which is deleted"):
        await LocalCopy(copy.folder.parent / "other").bring(chain, chain.versions[6])  # type: ignore[arg-type]


async def test_a_copy_with_other_bytes_is_made_again_from_whole_weights(
    copy: LocalCopy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chain = Chain(tmp_path / "published")
    weights = random_weights(random.Random(7))
    chain.publish(weights)
    changed = weights["layers.1.q"].clone()
    changed[0] += 1
    chain.publish(weights | {"layers.1.q": changed}, 1)
    assert await bring(copy, chain, 1) == 1
    file = copy.folder / "model-2.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert await bring(copy, chain, 2) == 2
    assert "is made again from version 1: tensor layers.1.q" in caplog.text


async def test_a_copy_from_before_a_restart_of_the_host_is_not_trusted(
    copy: LocalCopy, chain: Chain, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await bring(copy, chain, 2) == 2
    state = copy.folder.parent / "state.json"
    state.write_text(json.dumps(json.loads(state.read_text()) | {"boot": "another"}))
    read = reads(monkeypatch)
    assert await bring(copy, chain, 3) == 3
    assert "v000001" in read


async def test_the_copy_changes_only_while_no_engine_reads_it(
    copy: LocalCopy, chain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = LocalCopy(tmp_path / "copy")
    assert (await reader.hold(chain, chain.versions[1]))[0].id == 1
    monkeypatch.setattr(local_copy, "LOCK_SECONDS", 0.1)
    with pytest.raises(PublishError, match="another process of this host has locked"):
        await copy.bring(chain, chain.versions[2])
    assert held_digest(copy) == chain.versions[1].digest
    monkeypatch.setattr(local_copy, "LOCK_SECONDS", 30.0)
    waiting = asyncio.ensure_future(copy.hold(chain, chain.versions[2]))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    reader.release()
    assert (await waiting)[0].id == 2
    second = LocalCopy(tmp_path / "copy")
    async with asyncio.timeout(0.5):  # several engines read at a time; it holds the version already
        await second._acquire(fcntl.LOCK_SH)
    second.release()


def test_a_copy_whose_writer_is_killed_heals(tmp_path: Path) -> None:
    chance = random.Random(3)
    for number in range(6):
        chain: Any = Chain(tmp_path / str(number) / "published")
        published(chain, chance, 8)
        child = os.fork()
        if child == 0:
            for version in chain.versions.values():
                asyncio.run(LocalCopy(tmp_path / str(number) / "copy").bring(chain, version))
            os._exit(0)
        time.sleep(chance.uniform(0, 0.06))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        copy = LocalCopy(tmp_path / str(number) / "copy")
        last: PolicyVersion = chain.versions[8]
        assert asyncio.run(copy.bring(chain, last)) == last
        assert held_digest(copy) == last.digest


async def test_an_evaluation_gets_the_version_that_it_wants_or_none(chain: Any, tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path / "copy", is_exact=True)
    assert await bring(copy, chain, 4) == 4
    assert await bring(copy, chain, 2) == 2
    (chain.root / "v000003" / "rank-0.delta").unlink()
    with pytest.raises(PublishError, match=r"v000003/rank-0\.delta"):
        await bring(copy, chain, 4)


async def test_processes_that_want_exact_versions_have_their_own_copies(chain: Any, tmp_path: Path) -> None:
    """On one copy each would undo what the other has brought, and neither might ever hold its version."""
    one, other = (LocalCopy(tmp_path / "copy", is_exact=True) for _ in range(2))
    for first, second in ((4, 2), (3, 6), (2, 4)):
        held = await asyncio.gather(
            one.hold(chain, chain.versions[first]), other.hold(chain, chain.versions[second])
        )
        assert [version.id for version, _ in held] == [first, second]
        assert held_digest(one) == chain.versions[first].digest
        assert held_digest(other) == chain.versions[second].digest
    assert {one.folder, other.folder} == {tmp_path / name / "model" for name in ("copy", "copy-2")}
    one.release()
    third = LocalCopy(tmp_path / "copy", is_exact=True)
    assert (await third.hold(chain, chain.versions[2]))[0].id == 2
    assert third.folder == one.folder
    (chain.root / "v000003" / "rank-0.delta").unlink()
    with pytest.raises(PublishError, match=r"v000003/rank-0\.delta"):
        await third.hold(chain, chain.versions[4])
    assert (await one.hold(chain, chain.versions[2]))[1] == str(third.folder)  # whoever fails gives it back
    one.release()
    other.release()


def test_the_copy_of_a_killed_process_is_the_next_ones(tmp_path: Path) -> None:
    """The killed one was at any point of a write; a second process has its own copy all the while."""
    chance, chain = random.Random(5), cast("Any", Chain(tmp_path / "published"))
    weights = random_weights(chance)
    for base in (None, *range(1, 8)):
        chain.publish(weights, base)
        weights = {name: tensor + 1 for name, tensor in weights.items()}
    for number in range(6):
        root = tmp_path / str(number)
        child = os.fork()
        if child == 0:
            copy = LocalCopy(root / "copy", is_exact=True)
            for place in itertools.cycle((*range(2, 9), 3, 6)):
                asyncio.run(copy.hold(chain, chain.versions[place]))
        try:
            deadline = time.monotonic() + 30
            while not (root / "copy" / "state.json").exists() and time.monotonic() < deadline:
                time.sleep(0.001)
            beside = LocalCopy(root / "copy", is_exact=True)
            assert asyncio.run(beside.hold(chain, chain.versions[5]))[1] == str(root / "copy-2" / "model")
            time.sleep(chance.uniform(0, 0.06))
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for wanted in (7, 2):
            after = LocalCopy(root / "copy", is_exact=True)
            assert asyncio.run(after.hold(chain, chain.versions[wanted]))[1] == str(root / "copy" / "model")
            assert held_digest(after) == chain.versions[wanted].digest
            after.release()
        assert held_digest(beside) == chain.versions[5].digest
        beside.release()


async def test_adapters_are_copied_beside_and_the_oldest_ones_go(chain: Any, tmp_path: Path) -> None:
    copy = LocalCopy(tmp_path / "copy")
    for number in range(20, 30):
        adapter = replace(chain.versions[1], id=number, encoding="adapter")
        version, folder = await copy.hold(chain, await copy.bring(chain, adapter))
        assert version == adapter
        assert checksums(Path(folder)) == adapter.files
        copy.release()
    assert len(list((tmp_path / "copy" / "adapters").iterdir())) == 8


async def test_the_tokenizer_of_a_delta_is_that_of_its_whole_weights(chain: Any, tmp_path: Path) -> None:
    folder = await model_files(chain, chain.versions[4], tmp_path / "copy")
    assert os.listdir(folder) == ["config.json"]
