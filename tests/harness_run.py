"""One trajectory of the agent ``command`` on a real database, a real gateway and a scripted engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import docker_here
import yaml
from gateway_run import answerer_of, gateway_task
from rollout_fakes import FakeTools, ScriptedEngine, format_of
from rootfs_here import rootfs_with_python

from agentrl.config.sampling import GatewayConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, SamplingConfig
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim, Task
from agentrl.gateway.app import GatewayHost
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store

PYTHON = "/usr/bin/python3" if Path("/usr/bin/python3").exists() else sys.executable
"""Other users, such as that of the sandbox, may run the system's interpreter."""

CALL = f"""
{PYTHON} - <<'EOF'
import json, os, urllib.request
ask = {{"model": os.environ["AGENTRL_MODEL"], "messages": [{{"role": "user", "content": "hi"}}]}}
head = {{"Authorization": "Bearer " + os.environ["AGENTRL_API_KEY"], "Content-Type": "application/json"}}
url = os.environ["AGENTRL_BASE_URL"] + "/chat/completions"
sent = urllib.request.Request(url, json.dumps(ask).encode(), head)
print(json.load(urllib.request.urlopen(sent))["choices"][0]["message"]["content"])
EOF
"""
"""A shell line that asks the model once and prints the answer."""


def write_harness(folder: Path, command: Any, name: str = "harness.yml", **keys: Any) -> Path:
    """Write the YAML file of a harness; one in Docker runs ``docker_here.IMAGE`` on the host's network.

    One in the sandbox's containers runs on ``rootfs_here.rootfs_with_python()``.
    """
    if keys.get("isolation") == "sandbox":
        keys = {"rootfs": str(rootfs_with_python()), **keys}
    if keys.get("isolation") == "docker":
        keys = {"image": docker_here.IMAGE, "network": "host", **keys}
    path = folder / name
    path.write_text(yaml.safe_dump({"command": command, **keys}), encoding="utf-8")
    return path


class HarnessRun:
    """A worker whose agent is a harness."""

    def __init__(
        self,
        store: Store,
        path: Path | None,
        *script: str | BaseException | Callable[[str], str],
        config: GatewayConfig | None = None,
        **agent: Any,
    ) -> None:
        self.store = store
        self.engine = ScriptedEngine(format_of(), *(script or ("the answer",)))
        self.host = GatewayHost(answerer_of(store, self.engine, **agent), config or GatewayConfig())
        self.worker = Worker(
            store=store, router=self.engine, tools=FakeTools(), chat_format=self.engine.chat_format,
            params=SamplingParams(), seed=7,
            agent=AgentConfig(agent_name="command", agent_cfg_path=path and str(path), **agent),
            sampling=SamplingConfig(), claims=ClaimConfig(retry_backoff_seconds=0.01), gateway=self.host,
        )  # type: ignore[arg-type]  # fmt: skip

    async def claim(self, *tasks: Task) -> Claim:
        """Claim a trajectory, of one of ``tasks`` if there are any."""
        await self.store.tasks.load(tasks or [gateway_task(slots=1)])
        claim = await self.store.claims.claim(split="train", owner="me", lease_seconds=600)
        assert claim is not None
        return claim

    async def run(self) -> Record:
        """Run one trajectory; return its Record."""
        return next(iter((await self.run_all([gateway_task(slots=1)])).values()))

    async def run_all(self, tasks: Sequence[Task]) -> dict[str, Record]:
        """Run a trajectory of each task, in parallel; return their Records by the tasks' names."""
        claims = [await self.claim(*tasks) for _ in tasks]
        try:
            await asyncio.gather(*map(self.worker.run, claims))
        finally:
            await self.host.close()
        records = [await self.store.records.get(claim.record_id) for claim in claims]
        return {record.task.rpartition("/")[2]: record for record in records if record is not None}
