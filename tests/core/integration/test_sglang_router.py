"""Trajectories through a real sglang-router in front of a real SGLang server and a local engine.

They keep their engine, resume aborted calls, and lose no token when SGLang's server dies.
"""

import asyncio
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from engine_policy import assert_logprobs, prompt, save_model

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.documents.run import InferenceService
from agentrl.documents.sampling import SamplingParams
from agentrl.inference.client import EngineClient
from agentrl.inference.engines.commands import (
    EngineCommand,
    EngineProcess,
    engine_command,
    engine_venv,
    free_port,
)
from agentrl.inference.http import EngineHttp
from agentrl.inference.served_engine import FrontRouter
from agentrl.inference.session import EngineRouter

pytestmark = [pytest.mark.integration, pytest.mark.sglang, pytest.mark.timeout(600)]

SHORT = SamplingParams(max_new_tokens=12, extra={"ignore_eos": True})
LONG_TOKENS = 1500
LONG = SHORT.replace(max_new_tokens=LONG_TOKENS)


@pytest.fixture(scope="module")
def router_python() -> str:
    python = engine_venv("sglang") / "bin" / "python"
    probe = [str(python), "-c", "import sglang_router"]
    if not python.is_file() or subprocess.run(probe, capture_output=True, check=False).returncode:
        if "sglang" in os.environ.get("AGENTRL_REQUIRE_ENGINES", "").split(","):
            raise FileNotFoundError(f"{python} has no sglang_router; run: bash scripts/setup_sglang.sh")
        pytest.skip(f"{python} has no sglang_router; run: bash scripts/setup_sglang.sh")
    return str(python)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("router-model"), seed=1)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[list[EngineProcess]]:
    processes: list[EngineProcess] = []
    yield processes
    for process in processes:
        asyncio.run(process.stop())


@asynccontextmanager
async def fleet(folder: str, python: str, started: list[EngineProcess], logs: Path) -> AsyncIterator[str]:
    """SGLang and a local engine registered at a router; yields the router's URL once it has both."""
    config = EngineConfig(max_total_tokens=16384, inf_mem_ratio=0.1)
    urls = []
    for kind in ("sglang", "local"):
        port = free_port(config.host)
        command = engine_command(folder, ModelConfig(), replace(config, engine=kind), port)
        started.append(EngineProcess(command, logs / f"{kind}.log"))
        urls.append(f"http://{config.host}:{port}")
    port, metrics = free_port(config.host), free_port(config.host)
    argv = [
        *(python, "-m", "sglang_router.launch_router", "--host", config.host, "--port", str(port)),
        *("--prometheus-port", str(metrics), "--policy", "cache_aware", "--disable-retries"),
    ]
    started.append(EngineProcess(EngineCommand(argv), logs / "router.log"))
    router = f"http://{config.host}:{port}"
    for url, process in zip([*urls, router], started, strict=True):
        async with EngineClient(url) as client:
            await process.wait_ready(client, 150.0)
    fronts = [FrontRouter(router) for _ in urls]
    keeping = [asyncio.create_task(front.keep(url)) for front, url in zip(fronts, urls, strict=True)]
    await workers(router, 2)
    yield router
    for task in keeping:
        task.cancel()
    await asyncio.gather(*keeping, return_exceptions=True)
    for front, url in zip(fronts, urls, strict=True):
        await front.leave(url)
    await workers(router, 0)


async def workers(router: str, count: int) -> None:
    http = EngineHttp(router)
    async with asyncio.timeout(60):
        while [worker["is_healthy"] for worker in await listed(http)] != [True] * count:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    await http.close()


async def listed(http: EngineHttp) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (await http.call("GET", "/workers"))["workers"]
    return found


async def no_engines() -> list[InferenceService]:
    return []


async def test_trajectories_run_through_a_router(
    folder: str, router_python: str, started: list[EngineProcess], tmp_path: Path
) -> None:
    async with fleet(folder, router_python, started, tmp_path) as url:
        router = EngineRouter(no_engines, router_url=url, vocab_size=512, backoff=0.05)
        async with asyncio.timeout(240):
            counts = await asyncio.gather(*(turns(router, folder, number) for number in range(2)))
            assert sum(cached for cached, _ in counts) >= 0.9 * sum(known for _, known in counts)
            await an_engine_dies(router, folder, started[0])
        await router.close()


async def turns(router: EngineRouter, folder: str, number: int) -> tuple[int, int]:
    """Five turns; returns the tokens that the engine had cached, and those that it had seen."""
    cached = known = 0
    async with router.session(f"t{number}", f"group{number}") as session:
        ids = prompt(number, 200)
        for turn in range(5):
            made = await session.generate(ids, SHORT)
            assert_logprobs(folder, ids, made)
            cached, known = cached + made.cached_tokens, known + (len(ids) - 40 if turn else 0)
            ids = [*ids, *made.output_ids, *prompt(50 + turn, 28)]
    return cached, known


async def an_engine_dies(router: EngineRouter, folder: str, process: EngineProcess) -> None:
    """Four long generations on both engines lose none of their tokens when one engine is killed."""

    async def one(number: int) -> None:
        async with router.session(f"long{number}") as session:
            made = await session.generate(prompt(60 + number), LONG)
        assert (len(made.output_ids), made.finish_reason) == (LONG_TOKENS, "length")
        assert_logprobs(folder, prompt(60 + number), made)

    running = [asyncio.create_task(one(number)) for number in range(4)]
    await asyncio.sleep(0.5)
    assert not any(task.done() for task in running)
    os.killpg(process.pid, signal.SIGKILL)
    await asyncio.gather(*running)
