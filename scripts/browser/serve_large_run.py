"""Fill a temporary MongoDB with a large run, serve it with ``agentrl dashboard``, and run a command.

    python scripts/browser/serve_large_run.py --trajectories 100000 -- COMMAND ...

The command gets DASHBOARD_URL, DASHBOARD_RUN and DASHBOARD_IDS (JSON) in its environment; its exit code is
that of this program. Without a command the dashboard is served until Ctrl-C.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from large_run import LargeRun, write
from run_services import run_config

from agentrl.base.concurrency import background
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import Store, open_store

RUN = "count_with_python"
SMALL_RUN = "count_lower_rate"
_SMALL = 8000
_BEAT_SECONDS = 2.0
_START_SECONDS = 180.0


def main() -> int:
    """Serve, and return the exit code of the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("command", nargs="*")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with _mongod() as uri, contextlib.suppress(KeyboardInterrupt):
        return asyncio.run(_serve(uri, arguments.trajectories, arguments.command))
    return 130


@contextmanager
def _mongod() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="agentrl-browser-") as folder:
        mongo = EmbeddedMongo(folder)
        try:
            yield mongo.up().uri
        finally:
            mongo.down()


async def _serve(uri: str, trajectories: int, command: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="agentrl-tokenizer-") as folder:
        async with await open_store(run_config(uri, RUN)) as store:
            run = await _fill(store, LargeRun(trajectories, Path(folder)))
            async with await open_store(run_config(uri, SMALL_RUN)) as other:
                await _fill(other, LargeRun(min(_SMALL, trajectories), Path(folder) / "small", seed=1))
            async with background(_beat(store)), _dashboard(uri) as address:
                return await _run(command, address, run)


async def _fill(store: Store, run: LargeRun) -> LargeRun:
    began = time.monotonic()
    written = await write(store, run, lambda line: print(f"{store.run_name}: {line}", flush=True))
    print(f"{store.run_name}: {written:,} documents in {time.monotonic() - began:.0f} s", flush=True)
    return run


async def _beat(store: Store) -> None:
    """Keep the engines and samplers alive."""
    while True:
        for processes in ("InferenceService", "SamplerProcess"):
            await store.database[processes].update_many({}, {"$currentDate": {"heartbeat": True}})
        await asyncio.sleep(_BEAT_SECONDS)


@asynccontextmanager
async def _dashboard(uri: str) -> AsyncIterator[str]:
    """Start ``agentrl dashboard`` and yield its address. The URI goes by the environment, not by ``ps``."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "agentrl", "dashboard", "--port", "0",
        stdout=asyncio.subprocess.PIPE, env={**os.environ, "MONGO_URI": uri},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), _START_SECONDS)
        yield line.decode().removeprefix("dashboard: ").strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def _run(command: list[str], address: str, run: LargeRun) -> int:
    print(f"dashboard: {address.replace('?', f'runs/{RUN}?')}", flush=True)
    ids = json.dumps({**run.interesting, "small_run": SMALL_RUN})
    address, _, token = address.partition("?token=")
    environment = {
        "DASHBOARD_URL": address,
        "DASHBOARD_TOKEN": token,
        "DASHBOARD_RUN": RUN,
        "DASHBOARD_IDS": ids,
    }
    if not command:
        print(ids, flush=True)
        await asyncio.Event().wait()
    process = await asyncio.create_subprocess_exec(*command, env={**os.environ, **environment})
    return await process.wait()


if __name__ == "__main__":
    sys.exit(main())
