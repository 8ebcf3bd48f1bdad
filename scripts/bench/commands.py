"""Run ``agentrl`` commands beside a MongoDB of their own, for benchmarks that train."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from agentrl.base.installation import shipped_files
from agentrl.base.processes import (
    StoppedBySignalError,
    SupervisedProcess,
    Supervisor,
    raise_on_signals,
    run_child,
    start_child,
    stop_child,
    thread_limits,
)
from agentrl.config.schema import ClaimConfig, RunConfig
from agentrl.local.mongod import EmbeddedMongo
from agentrl.store.client import open_store

COMMAND_SECONDS = 1200.0
SERVER_SECONDS = 60.0


@contextmanager
def database(work: Path | None = None) -> Iterator[tuple[Path, str]]:
    """Run a mongod on ``work``/mongo; yield ``work`` and the URI. Without ``work``, in a temporary folder.

    A signal leaves the block and exits: with mongod, all that the block has started ends.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as scratch:
        folder = work or Path(scratch)
        mongo = EmbeddedMongo(folder / "mongo")
        try:
            with raise_on_signals():
                yield folder, mongo.up().uri
        except StoppedBySignalError as stopped:
            raise SystemExit(stopped.exit_code) from None
        finally:
            mongo.down()


@contextmanager
def server(words: Sequence[str], port: int) -> Iterator[None]:
    """Run a server for the length of the block, once it listens on ``port``. Exits if it does not."""
    process = start_child(words, log=None)
    deadline = time.monotonic() + SERVER_SECONDS
    try:
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the server does not listen on port {port}: {' '.join(words)}")
            time.sleep(0.1)
        yield
    finally:
        stop_child(process)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def command(name: str, flags: Sequence[str]) -> list[str]:
    """Return the command line of an ``agentrl`` command."""
    return [sys.executable, "-m", "agentrl", name, *flags]


def environment() -> dict[str, str]:
    """Return the environment of the processes: few threads, no network, the package ``demo``."""
    paths = os.pathsep.join(filter(None, [str(shipped_files()), os.environ.get("PYTHONPATH")]))
    own = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "PYTHONPATH": paths}
    return {**os.environ, **thread_limits(), **own}


def agentrl(name: str, flags: Sequence[str], work: Path) -> None:
    """Run a command to its end; its output goes to a file below ``work``. Exits if it fails."""
    log = work / "logs" / f"{name}.out"
    code = run_child(command(name, flags), log=log, env=environment(), seconds=COMMAND_SECONDS)
    if code != 0:
        raise SystemExit(f"agentrl {name} ended with exit code {code}; its log is {log}")


def train_run(
    flags: Mapping[str, Sequence[str]], logs: Path, seconds: float, variables: Mapping[str, str] | None = None
) -> None:
    """Run the commands ``flags`` until the last one, the trainer, ends; it is stopped after ``seconds``.

    ``logs`` receives their output; ``variables`` are added to their environment. Exits if the trainer fails.
    """
    supervisor = Supervisor(lambda line: print(line, flush=True))
    members = [
        SupervisedProcess(
            name, command(name, words), logs / f"{name}.out", environment() | dict(variables or {}),
            is_server=name == "serve",
        )
        for name, words in flags.items()
    ]  # fmt: skip
    try:
        for member in members[:-1]:
            supervisor.start(member)
        code = supervisor.run_main(members[-1], deadline=time.monotonic() + seconds)
    finally:
        supervisor.stop(ClaimConfig.drain_seconds)
    if code != 0:
        raise SystemExit(f"the trainer ended with exit code {code}; its log is {members[-1].log}")


async def newest_version(run: RunConfig) -> int:
    """Return the newest published policy version of a run; 0 before the first."""
    async with await open_store(run) as store:
        version = await store.policy_versions.latest()
        return 0 if version is None else version.id
