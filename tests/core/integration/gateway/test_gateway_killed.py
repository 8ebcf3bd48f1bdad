"""A gateway process that is killed in the middle of an answer: its successor gives the answer, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_run import GatewayRun
from scripted_engine import Call, ScriptedEngine
from tiny_policy import tiny_format, write_tiny_policy

from agentrl.base.processes import free_port
from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import RunConfig
from agentrl.documents.model_call import unpack_ids
from agentrl.documents.record import GatewayCallStatus
from agentrl.store.client import Store

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("starts_warm")]

BODY = {"model": "policy", "messages": [{"role": "user", "content": "1+2?"}], "stream": True}
START_SECONDS = 90


@asynccontextmanager
async def gateway(run: RunConfig, model: Path, port: int) -> AsyncIterator[asyncio.subprocess.Process]:
    """A gateway in a process of its own; it is killed behind the block."""
    flags = {
        "run_name": run.run_name, "db_connection_string": run.db_connection_string, "log_dir": run.log_dir,
        "model_name_or_path": model, "gateway_port": port, "heartbeat_seconds": 600,
    }  # fmt: skip
    words = [f"--{name}={value}" for name, value in flags.items()]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "agentrl", "gateway", *words)
    try:
        async with asyncio.timeout(START_SECONDS), httpx2.AsyncClient() as client:
            while True:
                with contextlib.suppress(httpx2.TransportError):
                    if (await client.get(f"http://127.0.0.1:{port}/health")).status_code == 200:
                        break
                assert process.returncode is None
                await asyncio.sleep(0.1)
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def texts_of(url: str, seen: asyncio.Event | None = None) -> list[str]:
    """The pieces of text of a streamed answer; ``seen`` is set at the first."""
    texts: list[str] = []
    async with (
        httpx2.AsyncClient(timeout=START_SECONDS) as client,
        client.stream("POST", url, json=BODY) as answer,
    ):
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event: Any = json.loads(line[6:])
                texts.append(event["choices"][0]["delta"].get("content") or "")
                if texts[-1] and seen is not None:
                    seen.set()
    return [text for text in texts if text]


async def test_the_successor_of_a_killed_gateway_answers_its_call_once(
    store: Store, run_config: RunConfig, tmp_path: Path
) -> None:
    chat_format = tiny_format()
    ids = [*chat_format.tokens.encode("1+2=3"), min(chat_format.stop_ids)]

    async def hang(call: Call) -> None:
        await call.head()
        await call.tokens(ids[:1], 1)
        await asyncio.Event().wait()

    async def answer(call: Call) -> None:
        await call.head()
        await call.tokens(ids, len(ids), "stop")
        await call.done()

    model = await asyncio.to_thread(write_tiny_policy, tmp_path / "model")
    run, port = GatewayRun(store), free_port()
    async with ScriptedEngine(hang, answer).serving() as engine:
        engine.vocab_size = 4096
        await store.services.register(engine.service("e"))
        config = GatewayConfig(gateway_url=f"http://127.0.0.1:{port}")
        async with run.open(config=config) as endpoint:
            url = f"{endpoint.base_url}/chat/completions"
            async with gateway(run_config, model, port) as first:
                seen = asyncio.Event()
                lost = asyncio.create_task(texts_of(url, seen))
                await asyncio.wait_for(seen.wait(), START_SECONDS)
                first.kill()
                with pytest.raises(httpx2.TransportError):
                    await lost
            assert await run.calls() == []
            soon = {"$set": {"expires_at": {"$add": ["$$NOW", 1000]}}}  # milliseconds, in place of 15 s
            await store.database["GatewayCall"].update_many({}, [soon])
            async with gateway(run_config, model, port):  # it waits for the end of the killed one's lease
                texts, again = await asyncio.gather(texts_of(url), texts_of(url))
    assert "".join(texts) == "".join(again) == "1+2=3"
    (call,) = await run.calls()
    assert unpack_ids(call.output_ids).tolist() == ids
    (request,) = await store.database["GatewayCall"].find({}).to_list()
    assert (request["status"], request["call"]) == (GatewayCallStatus.DONE, call.id)
    assert len(engine.calls) == 2
