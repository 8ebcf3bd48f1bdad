"""Attach to an engine server that another process runs: several runs share it, each with its own adapters."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from agentrl.errors import EngineError
from agentrl.inference.client import EngineClient

_GONE_SECONDS = 60.0
"""How long the engine may be unreachable before it counts as ended."""


class AttachedEngine:
    """A running server, in the place of an ``EngineProcess``. It is never paused or ended from here."""

    def __init__(self, url: str, instance: str | None) -> None:
        self.url = url
        self.instance = instance
        self.pid = os.getpid()
        """Of the process that registers the engine: this one."""
        self._seen = time.monotonic()

    @classmethod
    async def find(cls, client: EngineClient, folder: str, seconds: float) -> AttachedEngine:
        """Wait until the server is healthy; check that it serves the weights in ``folder``, unchanged.

        Raises EngineError after ``seconds``, and for another model.
        """
        deadline = time.monotonic() + seconds
        while not await client.health():
            if time.monotonic() > deadline:
                raise EngineError(
                    f"no engine is ready at --engine_url {client.url} after {seconds:g} s",
                    hint="start it, or leave --engine_url out: `agentrl serve` then starts one",
                )
            await asyncio.sleep(1.0)
        info = await client.model_info()
        if info.version != 0:
            raise EngineError(
                f"the engine {client.url} serves whole weights that a run publishes, version {info.version}",
                hint="share an engine that serves its base model and adapters only",
            )
        difference = await asyncio.to_thread(_difference, Path(info.model_path), Path(folder))
        if difference is not None:
            raise EngineError(
                f"the engine {client.url} serves {info.model_path}, not the model in {folder}: {difference}",
                hint="give the engine's model by --model_name_or_path, or another --engine_url",
            )
        return cls(client.url, await client.instance())

    async def wait_ready(self, client: EngineClient, seconds: float) -> None:
        """Return at once: ``find`` has waited."""

    async def stop(self) -> None:
        """Leave the engine as it is."""

    async def check(self, client: EngineClient) -> None:
        """Raise EngineError once another server answers, or none has for a minute."""
        if await client.health():
            await client.check_instance(self.instance)
            self._seen = time.monotonic()
        elif time.monotonic() - self._seen > _GONE_SECONDS:
            raise EngineError(
                f"the engine {self.url} has not answered for {_GONE_SECONDS:g} s",
                hint="start it again; then start `agentrl serve` again",
            )


def _difference(served: Path, wanted: Path) -> str | None:
    """Return how the model in ``served`` differs from that in ``wanted``; None if they are the same."""
    from agentrl.weights.folder import tensor_files
    from agentrl.weights.model_folder import checksums

    if served.resolve() == wanted.resolve():
        return None
    if not served.is_dir():
        return "its folder is not on this machine, so that it cannot be compared"
    names = {"config.json", *(path.name for path in tensor_files(wanted))}
    ours, theirs = (
        {file.name: file.sha256 for file in checksums(folder) if file.name in names}
        for folder in (wanted, served)
    )
    differing = sorted(name for name in names if ours.get(name) != theirs.get(name))
    return f"{', '.join(differing)} differ" if differing else None
