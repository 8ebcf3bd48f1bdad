"""The lease of a device: turns, shared holders, and processes that are killed."""

import asyncio
import os
import signal
from pathlib import Path

import pytest
from waiting import until, waiting_program

from agentrl.base import device_lease
from agentrl.base.device_lease import DeviceLease, leased_devices

HOLDER = """
import asyncio, subprocess, sys
from pathlib import Path
from agentrl.base.device_lease import DeviceLease
lease = DeviceLease(["d"], "a child", folder=Path(sys.argv[1]))
asyncio.run(lease.acquire(urgent=True))
child = subprocess.Popen(["sleep", "60"], pass_fds=lease.locks) if sys.argv[2:] else None
print(child.pid if child else 0, flush=True)
sys.stdin.read()
"""


def lease(folder: Path, *names: str, shared: bool = False) -> DeviceLease:
    return DeviceLease(names or ["d"], "a test", shared=shared, folder=folder)


async def within(seconds: float, task: "asyncio.Task[None]") -> bool:
    return bool((await asyncio.wait([task], timeout=seconds))[0])


async def test_the_holder_gives_way_to_an_urgent_lease_and_gets_the_device_back(tmp_path: Path) -> None:
    engine, trainer = lease(tmp_path), lease(tmp_path)
    await engine.acquire()
    wanted = asyncio.create_task(engine.until_wanted())
    assert not await within(0.12, wanted)
    turn = asyncio.create_task(trainer.acquire(urgent=True))
    await wanted
    assert not turn.done()
    engine.release()
    back = asyncio.create_task(engine.acquire())
    await turn
    assert not await within(0.12, back)
    trainer.release()
    await back
    assert not await within(0.12, asyncio.create_task(engine.until_wanted()))


async def test_an_urgent_lease_comes_before_others(tmp_path: Path) -> None:
    holder, engine, trainer = lease(tmp_path), lease(tmp_path), lease(tmp_path)
    await holder.acquire()
    other = asyncio.create_task(engine.acquire())
    turn = asyncio.create_task(trainer.acquire(urgent=True))
    await holder.until_wanted()
    holder.release()
    await turn
    assert not other.done()
    trainer.release()
    await other


async def test_several_engines_share_what_the_trainer_has_alone(tmp_path: Path) -> None:
    engines = [lease(tmp_path, shared=True) for _ in range(2)]
    for engine in engines:
        await engine.acquire()
    turn = asyncio.create_task(lease(tmp_path).acquire(urgent=True))
    engines[0].release()
    assert not await within(0.12, turn)
    engines[1].release()
    await turn


async def test_several_devices_are_one_lease(tmp_path: Path) -> None:
    first, second = lease(tmp_path, "a", "b"), lease(tmp_path, "c", "b")
    await first.acquire()
    turn = asyncio.create_task(second.acquire(urgent=True))
    await first.until_wanted()
    first.release()
    await turn


async def test_a_cancelled_wait_leaves_nothing_locked(tmp_path: Path) -> None:
    engine, trainer = lease(tmp_path, "b"), lease(tmp_path, "a", "b")
    await engine.acquire()
    turn = asyncio.create_task(trainer.acquire(urgent=True))
    await engine.until_wanted()
    turn.cancel()
    await asyncio.wait([turn])
    assert not await within(0.12, asyncio.create_task(engine.until_wanted()))
    await lease(tmp_path, "a").acquire()


@pytest.mark.parametrize("inherits", [False, True])
async def test_a_killed_process_frees_the_device_when_its_children_have_ended(
    tmp_path: Path, inherits: bool
) -> None:
    words = [HOLDER, str(tmp_path), *(["inherits"] if inherits else [])]
    process, child = await asyncio.to_thread(waiting_program, *words)
    with process:
        turn = asyncio.create_task(lease(tmp_path).acquire())
        assert not await within(0.12, turn)
        process.kill()
    if inherits:
        assert not await within(0.12, turn)
        os.kill(int(child), signal.SIGKILL)
    assert await within(5.0, turn)


async def test_a_long_wait_names_who_had_the_device_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(device_lease, "MESSAGE_SECONDS", 0.05)
    caplog.set_level("INFO")
    await lease(tmp_path).acquire()
    turn = asyncio.create_task(lease(tmp_path).acquire())
    await until(lambda: bool(caplog.messages))
    turn.cancel()
    assert f"the device d: a test (process {os.getpid()}) had it last" in caplog.messages[0]


def test_devices_are_the_visible_gpus_or_the_run_on_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_lease, "has_gpu", lambda: True)
    assert leased_devices("o", {"CUDA_VISIBLE_DEVICES": "3, 1"}) == ["gpu-1", "gpu-3"]
    assert leased_devices("o", {}) == ["gpu-all"]
    monkeypatch.setattr(device_lease, "has_gpu", lambda: False)
    [first], [second] = leased_devices("a", {}), leased_devices("b", {})
    assert first.startswith("cpu-")
    assert first != second
