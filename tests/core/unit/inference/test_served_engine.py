"""A served engine sends heartbeats, loads versions, refuses damaged ones and stops; with fakes."""

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from published_chain import Chain, random_weights
from waiting import cancel

from agentrl.base.device_lease import DeviceLease
from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.status import ServiceStatus, VersionStatus
from agentrl.errors import EngineError, PublishError, StoreError, StoreUnavailableError
from agentrl.inference import served_engine
from agentrl.inference.client import EngineLoad, ModelInfo
from agentrl.inference.engine import EngineRefusedError
from agentrl.inference.served_engine import ServedEngine, ServedWeights, starting_weights
from agentrl.weights.folder import write_manifest
from agentrl.weights.local_copy import LocalCopy


class Services:
    def __init__(self) -> None:
        self.registered: list[InferenceService] = []
        self.beats: list[dict[str, Any]] = []
        self.stopped: list[str] = []
        self.failures = 0
        self.away = False
        self.changed = asyncio.Event()

    async def register(self, service: InferenceService) -> None:
        self.registered.append(service)

    async def beat(self, id: str, **fields: Any) -> None:
        self.changed.set()
        if self.failures:
            self.failures -= 1
            raise StoreError("the primary is gone")
        self.beats.append(fields)

    async def stop(self, id: str) -> None:
        if self.away:
            raise StoreUnavailableError("no server")
        self.stopped.append(id)


class PolicyVersions:
    def __init__(self) -> None:
        self.newest: PolicyVersion | None = None
        self.known: list[PolicyVersion] = []

    async def latest(self) -> PolicyVersion | None:
        return self.newest

    async def published(self, limit: int, *, below: int | None = None) -> list[PolicyVersion]:
        published = [version for version in self.known if version.status is VersionStatus.PUBLISHED]
        newest_first = sorted(published, key=lambda version: -version.id)
        return [version for version in newest_first if below is None or version.id < below][:limit]


class Store:
    def __init__(self) -> None:
        self.services = Services()
        self.policy_versions = PolicyVersions()
        self._published = asyncio.Event()

    def publish(self, version: PolicyVersion) -> None:
        self.policy_versions.newest = version
        self._published.set()

    async def wait_for_change(self, *collections: str, timeout: float) -> None:
        async with asyncio.timeout(60):  # asyncio.wait_for can lose a cancellation in Python 3.11
            await self._published.wait()
        self._published.clear()


class Client:
    """An engine that records the calls that change it, and fails some."""

    url = "http://engine"

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.failing = Counter[str]()
        """How many of the next calls of a name get no answer."""
        self.refused: set[str] = set()

    async def load(self) -> EngineLoad:
        return EngineLoad(requests=3, tokens=700)

    async def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="m", version=0, vocab_size=512, context_length=4096)

    async def check_instance(self, expected: str | None) -> None:
        if expected != Process.instance:
            raise EngineError("another server")

    async def prepare_delta(self, files: list[Path], base: int) -> None:
        self.calls.append(("prepare_delta", [file.parent.name for file in files], base))
        if "prepare_delta" in self.refused or not all(file.is_file() for file in files):
            raise EngineRefusedError("it has no such call")

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            self.calls.append((name, *arguments))
            if name in self.refused:
                raise EngineRefusedError(f"no {name}")
            if self.failing[name]:
                self.failing[name] -= 1
                raise EngineError("no answer")

        return call


class Process:
    pid = 4711
    instance = "i1"

    def __init__(self) -> None:
        self.returncode: int | None = None

    async def wait_ready(self, client: Client, seconds: float) -> None:
        return None

    async def stop(self) -> None:
        self.returncode = -15

    async def check(self, client: Client) -> None:
        if self.returncode is not None:
            raise EngineError(f"exit code {self.returncode}")


class Harness:
    def __init__(self, folder: Path, lease: DeviceLease | None = None) -> None:
        self.store, self.client, self.process = Store(), Client(), Process()
        self.copy = LocalCopy(folder / "copy")
        weights = self.weights(self.copy, folder="/models/base")
        self.engine = ServedEngine(
            self.store, self.client, self.process, EngineConfig(heartbeat_seconds=0.01),  # type: ignore[arg-type]
            service_id="e1", lease=lease, weights=weights,
        )  # fmt: skip

    def weights(self, copy: LocalCopy, version: int = 0, folder: str = "") -> ServedWeights:
        client: Any = self.client
        store: Any = self.store
        return ServedWeights(client, store, copy, run_name="run", version=version, folder=folder)

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                self.store.services.changed.clear()
                await self.store.services.changed.wait()

    async def until_ready(self) -> None:
        await self.until(lambda: any(b["status"] is ServiceStatus.READY for b in self.store.services.beats))

    async def until_beats(self, count: int) -> None:
        await self.until(lambda: len(self.store.services.beats) >= count)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine beside the block, and cancel it at the end."""
        task = asyncio.create_task(self.engine.run())
        try:
            yield
        finally:
            await cancel(task)

    @property
    def beat(self) -> dict[str, Any]:
        """The last heartbeat."""
        return self.store.services.beats[-1]


@pytest.fixture
async def harness(tmp_path: Path) -> Harness:
    return Harness(tmp_path)


def published(folder: Path, version: int) -> PolicyVersion:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(bytes([version]) * 1000)
    files = write_manifest(folder, version=version)
    return PolicyVersion(id=version, step=version, location=str(folder), files=files, train_step=None)


def updates(version: PolicyVersion) -> list[tuple[Any, ...]]:
    return [("pause", "retract"), ("update_weights", version.location, version.id), ("resume",)]


async def test_a_version_is_loaded_between_pause_and_resume(harness: Harness, tmp_path: Path) -> None:
    version = published(tmp_path / "v1", 1)
    await harness.engine.update(version)
    assert harness.client.calls == updates(version)
    assert harness.beat == {
        "status": ServiceStatus.READY, "policy_version": 1, "running_requests": 3,
        "running_tokens": 700, "context_length": None, "detail": None, "needs_full": False, "adapter": None,
        "figures": None,
    }  # fmt: skip


async def test_a_wrong_checksum_never_reaches_the_engine(harness: Harness, tmp_path: Path) -> None:
    broken, good = published(tmp_path / "v1", 1), published(tmp_path / "v2", 2)
    (tmp_path / "v1" / "model.safetensors").write_bytes(b"x" * 1000)
    await harness.engine.update(broken)
    assert harness.client.calls == []
    beat = harness.beat
    assert beat["policy_version"] == 0
    assert "model.safetensors" in beat["detail"]
    await harness.engine.update(good)
    assert harness.beat["policy_version"] == 2
    assert harness.beat["detail"] is None


async def test_an_engine_that_refuses_a_version_keeps_its_weights(harness: Harness, tmp_path: Path) -> None:
    version = published(tmp_path / "v1", 1)
    harness.client.refused = {"update_weights"}
    await harness.engine.update(version)
    assert harness.client.calls == updates(version)
    beat = harness.beat
    assert (beat["policy_version"], beat["status"]) == (0, ServiceStatus.READY)
    assert "no update_weights" in beat["detail"]


async def test_an_engine_is_resumed_whatever_failed(harness: Harness, tmp_path: Path) -> None:
    version = published(tmp_path / "v1", 1)
    harness.client.failing["pause"] = 1
    await harness.engine.update(version)
    assert harness.client.calls == [("pause", "retract"), ("resume",)]
    assert harness.beat["status"] is ServiceStatus.READY
    harness.client.calls.clear()
    harness.client.failing["resume"] = 2
    await harness.engine.update(version)
    assert harness.client.calls == [*updates(version), ("resume",), ("resume",)]
    assert harness.beat["policy_version"] == 1
    assert harness.process.returncode is None


async def test_an_engine_that_stays_paused_is_ended(harness: Harness, tmp_path: Path) -> None:
    harness.client.failing["resume"] = 99
    await harness.engine.update(published(tmp_path / "v1", 1))
    assert harness.client.calls.count(("resume",)) == 5
    assert harness.process.returncode == -15


async def test_readiness_is_reported_before_the_next_heartbeat(harness: Harness) -> None:
    harness.engine._config = EngineConfig(heartbeat_seconds=60.0)

    async with harness.running():
        await harness.until_ready()


async def test_it_registers_follows_versions_and_stops(harness: Harness, tmp_path: Path) -> None:
    version = published(tmp_path / "v4", 4)
    async with harness.running():
        await harness.until_ready()
        harness.store.publish(version)
        await harness.until(lambda: harness.beat["policy_version"] == 4)
    assert harness.client.calls == [("set_version", 0), *updates(version)]
    assert [service.id for service in harness.store.services.registered] == ["e1"]
    assert harness.store.services.registered[0].status is ServiceStatus.STARTING
    assert harness.store.services.stopped == ["e1"]


async def test_a_version_that_cannot_be_fetched_is_tried_again(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_engine, "_FOLLOW_POLL_SECONDS", 0.01)
    version = published(tmp_path / "v1", 1)
    (tmp_path / "v1").rename(tmp_path / "away")
    async with harness.running():
        harness.store.publish(version)
        await harness.until(lambda: any("refused" in str(b["detail"]) for b in harness.store.services.beats))
        (tmp_path / "away").rename(tmp_path / "v1")
        harness.store.publish(version)  # ends the wait, as its time would
        await harness.until(lambda: harness.beat["policy_version"] == 1)
    assert harness.beat["detail"] is None


async def test_a_database_outage_does_not_stop_the_engine(harness: Harness) -> None:
    async with harness.running():
        await harness.until_beats(2)
        harness.store.services.failures = 3
        await harness.until_beats(len(harness.store.services.beats) + 1)


@pytest.fixture
async def turns(tmp_path: Path) -> tuple[Harness, DeviceLease]:
    """An engine that holds its device, and the lease of a trainer."""
    engine, trainer = (DeviceLease(["d"], name, folder=tmp_path / "locks") for name in ("engine", "trainer"))
    await engine.acquire()
    return Harness(tmp_path, engine), trainer


async def test_it_lends_its_device_and_returns_with_the_newest_version(
    turns: tuple[Harness, DeviceLease], tmp_path: Path
) -> None:
    harness, trainer = turns
    version = published(tmp_path / "v4", 4)

    def lent(detail: str | None, status: ServiceStatus) -> bool:
        beat = harness.beat
        return (beat["detail"], beat["status"]) == (detail, status)

    async with harness.running():
        for expected in (0, 4):
            await trainer.acquire(urgent=True)
            assert lent("the trainer has the device", ServiceStatus.LENT)
            if expected:
                harness.store.publish(version)
                await asyncio.sleep(0.1)
                assert harness.beat["policy_version"] == 0
            trainer.release()
            await harness.until(lambda: lent(None, ServiceStatus.READY))
            assert harness.beat["policy_version"] == expected
    lending = [("pause", "abort"), ("release_memory",), ("resume_memory", "weights")]
    back = [("resume_memory", "kv_cache"), ("resume",)]
    assert harness.client.calls == [
        ("set_version", 0), *lending, ("update_weights", "/models/base", 0), *back,
        *lending, ("update_weights", version.location, 4), *back,
    ]  # fmt: skip


async def test_an_engine_that_keeps_its_memory_is_ended(turns: tuple[Harness, DeviceLease]) -> None:
    harness, trainer = turns
    harness.client.failing["release_memory"] = 99
    task = asyncio.create_task(harness.engine.run())
    turn = asyncio.create_task(trainer.acquire(urgent=True))
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="-15"):
            await task
    assert not turn.done()  # `agentrl serve` has the lease until it ends
    turn.cancel()


async def test_an_engine_that_ends_is_an_error(harness: Harness) -> None:
    task = asyncio.create_task(harness.engine.run())
    await harness.until_beats(2)
    harness.process.returncode = -11
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="-11"):
            await task
    assert harness.store.services.stopped == ["e1"]


async def test_an_engine_stops_without_error_while_the_database_is_unavailable(harness: Harness) -> None:
    async with harness.running():
        await harness.until_beats(2)
        harness.store.services.away = True
    assert harness.store.services.stopped == []


async def test_it_starts_with_the_newest_intact_version(harness: Harness, tmp_path: Path) -> None:
    first, second, third, fourth = (published(tmp_path / f"v{number}", number) for number in range(1, 5))
    (tmp_path / "v2" / "model.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "v4" / "model.safetensors").write_bytes(b"x" * 1000)
    withdrawn = dataclasses.replace(third, status=VersionStatus.WITHDRAWN)
    harness.store.policy_versions.known = [first, second, withdrawn, fourth]
    store: Any = harness.store
    copy = harness.copy
    assert await starting_weights(store, ModelConfig(), copy) == (1, first.location, None)
    harness.store.policy_versions.known = [second, fourth]
    with pytest.raises(PublishError, match="v4"):
        await starting_weights(store, ModelConfig(model_name_or_path="base"), copy)
    harness.store.policy_versions.known = []
    assert await starting_weights(store, ModelConfig(model_name_or_path="/base"), copy) == (0, "/base", None)


def chain_of(harness: Harness, folder: Path, *steps: int) -> Chain:
    """Publish random weights, and for each step these weights plus its number, where ``harness`` looks."""
    chain = Chain(folder)
    weights = random_weights(random.Random(0))
    chain.publish(weights)
    for step, number in enumerate(steps, 1):
        chain.publish({name: tensor + number for name, tensor in weights.items()}, step)
    store: Any = harness.store
    store.policy_versions.get = chain.get
    return chain


async def test_a_delta_is_loaded_from_the_copy_of_the_host(harness: Harness, tmp_path: Path) -> None:
    chain = chain_of(harness, tmp_path / "published", 1, 0)
    harness.client.refused = {"prepare_delta"}
    await harness.engine.update(chain.versions[2])
    assert ("update_weights", str(harness.copy.folder), 2) in harness.client.calls
    assert harness.beat["policy_version"] == 2
    other = harness.weights(LocalCopy(tmp_path / "copy"))
    await other.fetch(chain.versions[3])
    harness.client.calls.clear()
    await other.load(chain.versions[2])
    assert other.loaded.version == 3  # another engine has changed the copy meanwhile
    assert harness.client.calls == [("update_weights", str(harness.copy.folder), 3)]
    (tmp_path / "published/v000003/rank-0.delta").unlink()
    late = harness.weights(LocalCopy(tmp_path / "late"), version=1)
    await late.fetch(chain.versions[3])
    assert late.needs_full
    await late.load(chain.versions[3])
    assert late.loaded.version == 2
    alone = harness.weights(LocalCopy(tmp_path / "alone"), version=2)
    with pytest.raises(PublishError, match="the newest that can is version 2"):
        await alone.fetch(chain.versions[3])
    assert alone.needs_full


async def test_an_engine_that_takes_deltas_changes_its_weights_before_the_copy_follows(
    harness: Harness, tmp_path: Path
) -> None:
    chain = chain_of(harness, tmp_path / "published", 1, 2, 3, 4)
    calls, copy = harness.client.calls, harness.copy

    def holds(version: int) -> bool:
        return copy._state().is_whole(chain.versions[version])

    weights = harness.weights(copy, version=1)
    await weights.fetch(chain.versions[3])  # version 2 was missed
    assert calls == [("prepare_delta", ["2", "3"], 1)]
    await weights.load(chain.versions[3])
    assert weights.loaded.version == 3
    assert calls.pop() == ("apply_delta", 3)
    assert not holds(3)
    await weights.keep_up()
    assert holds(3)
    harness.client.refused = {"apply_delta", "update_weights"}  # its memory was released in between
    await weights.fetch(chain.versions[4])
    with pytest.raises(EngineRefusedError, match="no update_weights"):
        await weights.load(chain.versions[4])
    assert calls[-2:] == [("apply_delta", 4), ("update_weights", str(copy.folder), 4)]
    harness.client.refused.clear()
    await weights.load(chain.versions[4])
    assert weights.loaded.version == 4
    assert calls[-1] == ("update_weights", str(copy.folder), 4)
    delta = tmp_path / "published/v000005/rank-0.delta"
    delta.write_bytes(bytes(delta.stat().st_size))
    with pytest.raises(PublishError, match="has the sha256"):
        await weights.fetch(chain.versions[5])
    assert weights.needs_full


async def test_a_host_without_the_trainer_s_folder_starts_with_its_own_model(
    harness: Harness, tmp_path: Path
) -> None:
    base = published(tmp_path / "base", 0)
    elsewhere = dataclasses.replace(base, location="/of/the/trainer")
    harness.store.policy_versions.known = [elsewhere]
    store: Any = harness.store
    config = ModelConfig(model_name_or_path=base.location)
    assert await starting_weights(store, config, harness.copy) == (0, base.location, None)
    (tmp_path / "base" / "model.safetensors").write_bytes(b"another model")
    with pytest.raises(PublishError, match="/of/the/trainer"):
        await starting_weights(store, config, harness.copy)


async def test_a_delta_that_arrives_in_the_trainer_s_turn_is_loaded_from_the_copy(
    harness: Harness, tmp_path: Path
) -> None:
    chain = chain_of(harness, tmp_path / "published", 1, 2, 3)
    weights = harness.weights(harness.copy, version=1)
    await weights.release_memory()
    await weights.fetch(chain.versions[2])
    await weights.reload(chain.versions[2])
    assert harness.client.calls == [("release_memory",), ("update_weights", str(harness.copy.folder), 2)]
    await weights.fetch(chain.versions[3])  # the engine was not asked in vain, so it still takes deltas
    assert harness.client.calls[-1] == ("prepare_delta", ["3"], 2)
