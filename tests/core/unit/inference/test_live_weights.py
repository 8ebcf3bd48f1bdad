"""Versions from the trainer's memory: which are loaded, and what an engine serves after a failure."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.processes import identify
from agentrl.documents.run import LiveShare, LiveWeights, PolicyVersion
from agentrl.errors import EngineError, PublishError
from agentrl.inference.engine import EngineRefusedError
from agentrl.inference.served_engine import Loaded, PartlyLoadedError, ServedWeights, is_reachable
from agentrl.weights.folder import write_manifest
from agentrl.weights.local_copy import LocalCopy

HERE = identify(os.getpid())
assert HERE is not None
SHARE = LiveShare(name="a", host="here", process=HERE, file="/proc/1/fd/3")
LIVE = LiveWeights(kind="tensor", shares=(SHARE, replace(SHARE, name="b")))


class Engine:
    """An engine that records the calls, and refuses those in ``refused``, by their arguments."""

    takes_live_weights = True

    def __init__(self, engine: str, *refused: str) -> None:
        self.engine, self.refused = engine, refused
        self.calls: list[Any] = []

    async def server_info(self) -> dict[str, Any]:
        return {"engine": self.engine, "tp_size": 2}

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: Any) -> None:
            self.calls.append((name, *arguments))
            if any(word in self.refused for word in (name, *arguments)):
                raise EngineRefusedError(f"no {name}")

        return call

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]


class Store:
    """The published versions, newest first."""

    def __init__(self, *versions: PolicyVersion) -> None:
        self.versions = list(versions)
        self.policy_versions = self

    async def published(self, limit: int, *, below: int | None = None) -> list[PolicyVersion]:
        return [version for version in self.versions if below is None or version.id < below][:limit]


def version(number: int, folder: Path | None = None, live: LiveWeights | None = LIVE) -> PolicyVersion:
    """A version that is stored in ``folder``, if one is given."""
    files: Any = ()
    if folder is not None:
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(b"weights")
        files = write_manifest(folder, version=number)
    location = "" if folder is None else str(folder)
    return PolicyVersion(id=number, step=number, location=location, files=files, train_step=None, live=live)


def served(engine: Engine, *versions: PolicyVersion) -> ServedWeights:
    client: Any = engine
    store: Any = Store(*versions)
    return ServedWeights(client, store, LocalCopy(Path("unused")), run_name="run")


async def test_a_live_version_needs_no_folder() -> None:
    engine = Engine("local")
    weights = served(engine)
    await weights.fetch(version(3))
    await weights.load(version(3))
    assert weights.loaded == Loaded(3, 3)
    assert engine.calls == [
        ("begin_update",), ("load_memory", SHARE.file, "a", 3), ("load_memory", SHARE.file, "b", 3),
        ("end_update",),
    ]  # fmt: skip


async def test_a_stored_version_replaces_one_that_the_trainer_does_not_give(tmp_path: Path) -> None:
    engine = Engine("local", "load_memory")
    weights = served(engine)
    stored = version(3, tmp_path / "v3")
    await weights.fetch(stored)
    await weights.load(stored)
    assert weights.loaded == Loaded(3, 3)
    assert engine.calls[-1] == ("update_weights", stored.location, 3)
    with pytest.raises(EngineError, match="no load_memory"):
        await weights.load(version(4))
    assert engine.names[-2:] == ["begin_update", "load_memory"]


async def test_sglang_gets_whole_weights_again_after_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.inference.served_engine import LiveLoader

    async def halves(self: Any, number: int, share: LiveShare, ranks: int) -> Any:
        yield self._client.load_pickled(share.name.encode(), ranks, number, 1)

    monkeypatch.setattr(LiveLoader, "_load_pickled", halves)
    stored = version(2, tmp_path / "v2", live=None)
    engine = Engine("sglang", b"b")  # type: ignore[arg-type]
    weights = served(engine, version(3), stored)
    await weights.load(version(3))
    assert weights.loaded == Loaded(2, 2)
    assert engine.calls[-2:] == [("end_update",), ("update_weights", stored.location, 2)]
    for lost in (served(engine), served(Engine("sglang", b"b", "update_weights"), stored)):  # type: ignore[arg-type]
        with pytest.raises(PartlyLoadedError):
            await lost.load(version(3))


async def test_what_is_out_of_reach_is_refused_before_the_engine_pauses() -> None:
    there = replace(HERE, boot_id="another machine")
    for kind, is_near in (("tensor", False), ("distributed", True)):
        live = LiveWeights(kind=kind, shares=(replace(SHARE, process=there),))  # type: ignore[arg-type]
        assert is_reachable(live) == is_near
    ended = replace(SHARE, process=replace(HERE, started=1))
    for far in (replace(LIVE, shares=(ended,)), replace(LIVE, shares=(SHARE, replace(SHARE, process=there)))):
        with pytest.raises(PublishError, match="does not reach"):
            await served(Engine("local")).fetch(version(3, live=far))
    vllm = Engine("vllm")
    vllm.takes_live_weights = False
    with pytest.raises(PublishError, match="does not reach"):
        await served(vllm).fetch(version(3))
