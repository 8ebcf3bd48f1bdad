"""An engine and a trainer of one machine take turns: the order, and processes that are killed."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from engine_policy import save_model
from waiting import until

from agentrl.base.device_lease import DeviceLease, leased_devices
from agentrl.config.schema import RunConfig
from agentrl.documents.run import InferenceService, PolicyVersion
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.status import ServiceStatus
from agentrl.inference.session import EngineRouter
from agentrl.store.client import Store
from agentrl.weights.folder import write_manifest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240), pytest.mark.usefixtures("starts_warm")]

LONG = SamplingParams(max_new_tokens=1500, extra={"ignore_eos": True})
TRAINER = """
import asyncio, sys
from agentrl.base.device_lease import DeviceLease, leased_devices
asyncio.run(DeviceLease(leased_devices(sys.argv[1]), "the trainer").acquire(urgent=True))
print("has it", flush=True)
sys.stdin.read()
"""


@contextmanager
def serve(run: RunConfig, folder: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """`agentrl serve --colocate true` of a tiny model."""
    words = [
        *("serve", "--run_name", run.run_name, "--db_connection_string", str(run.db_connection_string)),
        *("--model_name_or_path", save_model(folder / "base", seed=1), "--output_dir", str(folder)),
        *("--log_dir", str(folder / "logs"), "--heartbeat_seconds", "0.2", "--max_total_tokens", "65536"),
        *("--colocate", "true"),
    ]
    with (folder / "serve.out").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "agentrl", *words], stdout=output, stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


async def publish(store: Store, folder: Path, version: int) -> None:
    location = Path(save_model(folder, seed=2))
    files = write_manifest(location, version=version)
    await store.policy_versions.publish(
        PolicyVersion(id=version, step=version, location=str(location), files=files, train_step=None)
    )


async def test_engine_and_trainer_take_turns(store: Store, run_config: RunConfig, tmp_path: Path) -> None:
    async def found(condition: Callable[[InferenceService], bool]) -> InferenceService:
        async def holds() -> bool:
            engines.extend(await store.services.live(60.0))
            return bool(engines) and condition(engines[-1])

        engines: list[InferenceService] = []
        await until(holds, 100)
        return engines[-1]

    def ready(version: int) -> Callable[[InferenceService], bool]:
        return lambda service: (service.status, service.policy_version) == (ServiceStatus.READY, version)

    with serve(run_config, tmp_path) as process:
        await found(ready(0))
        router = EngineRouter(lambda: store.services.live(60.0), wait_seconds=0.5, max_age=0.1)
        async with router.session("trajectory") as session:
            flying = asyncio.create_task(session.generate([5, 6, 7], LONG))
            await found(lambda service: service.running_requests == 1)

            trainer = DeviceLease(leased_devices(str(tmp_path)), "the trainer")
            await asyncio.wait_for(trainer.acquire(urgent=True), 30)
            lent = await found(lambda service: service.status is ServiceStatus.LENT)
            assert lent.detail == "the trainer has the device"
            await publish(store, tmp_path / "v1", 1)
            await asyncio.sleep(1.0)
            assert not flying.done()  # after twice --engine_wait_seconds
            trainer.release()
            await found(ready(1))
            made = await flying
            assert len(made.output_ids) == 1500
            assert [span.version for span in made.versions] == [0, 1]
        await router.close()

        with subprocess.Popen(  # noqa: ASYNC220
            [sys.executable, "-c", TRAINER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as killed:
            assert killed.stdout is not None
            assert await asyncio.to_thread(killed.stdout.readline) == b"has it\n"
            await found(lambda service: service.status is ServiceStatus.LENT)
            killed.kill()
        await found(ready(1))

        process.kill()
        await asyncio.wait_for(trainer.acquire(urgent=True), 10)
