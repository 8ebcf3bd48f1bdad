"""One trajectory of the agent ``command`` on a real database, a real gateway and a scripted engine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from gateway_run import answerer_of, gateway_task
from rollout_fakes import FakeTools, ScriptedEngine, format_of

from agentrl.config.gateway import GatewayConfig
from agentrl.config.schema import AgentConfig, ClaimConfig, SamplingConfig
from agentrl.documents.record import Record
from agentrl.documents.sampling import SamplingParams
from agentrl.documents.task import Claim
from agentrl.gateway.host import GatewayHost
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


def write_harness(folder: Path, command: Any, **keys: Any) -> Path:
    """Write the YAML file of a harness."""
    path = folder / "harness.yml"
    path.write_text(yaml.safe_dump({"command": command, **keys}), encoding="utf-8")
    return path


class HarnessRun:
    """A worker whose agent is a harness."""

    def __init__(self, store: Store, path: Path, *script: str | Callable[[str], str], **agent: Any) -> None:
        self.store = store
        self.engine = ScriptedEngine(format_of(), *(script or ("the answer",)))
        self.host = GatewayHost(answerer_of(store, self.engine, **agent), GatewayConfig())
        self.worker = Worker(
            store=store, router=self.engine, tools=FakeTools(), chat_format=self.engine.chat_format,
            params=SamplingParams(), seed=7,
            agent=AgentConfig(agent_name="command", agent_cfg_path=str(path), **agent),
            sampling=SamplingConfig(), claims=ClaimConfig(retry_backoff_seconds=0.01), gateway=self.host,
        )  # type: ignore[arg-type]  # fmt: skip

    async def claim(self) -> Claim:
        """Claim a trajectory."""
        await self.store.tasks.load([gateway_task(slots=1)])
        claim = await self.store.claims.claim(split="train", owner="me", lease_seconds=600)
        assert claim is not None
        return claim

    async def run(self) -> Record:
        """Run one trajectory; return its Record."""
        claim = await self.claim()
        try:
            await self.worker.run(claim)
        finally:
            await self.host.close()
        record = await self.store.records.get(claim.record_id)
        assert record is not None
        return record
