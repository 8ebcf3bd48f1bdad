"""Actors are killed, frozen, restarted, and recorded when they end by themselves."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from waiting import until

from chaos import actors as actors_module
from chaos.actors import Actor, environment, watch

SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def actor(tmp_path: Path) -> Iterator[Actor]:
    made = Actor("sampler-0", [sys.executable, "-c", SLEEPS], tmp_path / "log.out", environment())
    yield made
    if made.process is not None:
        made.process.kill()
        made.process.wait(10)


async def test_a_kill_is_not_recorded_as_an_exit(actor: Actor) -> None:
    actor.start()
    assert await actor.kill()
    assert actor.pid is None
    assert not actor.note_exit()
    assert actor.exits == []
    assert not await actor.kill()


async def test_freeze_stops_a_process_and_thaw_continues_it(actor: Actor) -> None:
    assert not actor.freeze()
    actor.start()
    assert actor.freeze()
    process = psutil.Process(actor.pid)
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    actor.thaw()
    await until(lambda: process.status() != psutil.STATUS_STOPPED)


async def test_an_actor_that_ends_by_itself_is_recorded_and_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors_module, "_RESTART_SECONDS", 0.01)
    monkeypatch.setattr(actors_module, "_POLL_SECONDS", 0.01)
    ends = [sys.executable, "-c", "print('why'); raise SystemExit(3)"]
    actor = Actor("engine-1", ends, tmp_path / "x.out", environment())
    actor.start()
    watcher = asyncio.create_task(watch([actor]))
    try:
        await until(lambda: len(actor.exits) >= 2)
    finally:
        watcher.cancel()
        if actor.process is not None:
            await asyncio.to_thread(actor.process.wait, 10)
    assert {(exit.actor, exit.code) for exit in actor.exits} == {("engine-1", 3)}
    assert "why" in actor.exits[0].last_lines


@pytest.mark.parametrize(("program", "exits"), [(SLEEPS, []), ("raise SystemExit(1)", [1])])
async def test_a_stop_is_recorded_only_with_an_error(tmp_path: Path, program: str, exits: list[int]) -> None:
    actor = Actor("trainer", [sys.executable, "-c", program], tmp_path / "x.out", environment())
    actor.start()
    if exits and actor.process is not None:
        await asyncio.to_thread(actor.process.wait, 10)
    await actor.stop(10)
    assert [exit.code for exit in actor.exits] == exits


@pytest.mark.parametrize(("program", "codes"), [("time.sleep(0.3); raise SystemExit(1)", []), ("", [0])])
async def test_a_superseded_process_must_end_with_an_error(
    tmp_path: Path, program: str, codes: list[int]
) -> None:
    ready = tmp_path / "ready"
    lines = f"import pathlib, time; pathlib.Path({str(ready)!r}).touch(); time.sleep(0.3); {program}"
    actor = Actor("trainer", [sys.executable, "-c", lines], tmp_path / "x.out", environment())
    actor.start()
    await until(ready.exists)
    frozen = actor.set_aside()
    assert frozen is not None
    assert actor.pid is None
    await actor.end_superseded(frozen, 30.0)
    assert [exit.code for exit in actor.exits] == codes


async def test_a_process_that_is_not_replaced_is_killed(actor: Actor) -> None:
    actor.start()
    frozen = actor.set_aside()
    assert frozen is not None
    await actor.end_superseded(frozen, 0.0)
    assert frozen.poll() == -signal.SIGKILL
    assert actor.exits == []
