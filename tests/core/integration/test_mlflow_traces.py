"""A trajectory and its spans in a real MLflow server, read back through its REST API."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest
from gateway_run import ADD, gateway_task
from otlp_collector import trace_flags
from rollout_fakes import FakeTools, ScriptedEngine, format_of

from agentrl.config.schema import AgentConfig, ClaimConfig, SamplingConfig
from agentrl.documents.sampling import SamplingParams
from agentrl.inference.engines.commands import free_port
from agentrl.observe.tracing import tracing
from agentrl.rollout.worker import Worker
from agentrl.store.client import Store

VENV = Path(os.environ.get("AGENTRL_MLFLOW_VENV") or Path(__file__).parents[3] / ".venv-mlflow")

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(400),
]


@pytest.fixture
def mlflow(tmp_path: Path) -> Iterator[str]:
    """A server on SQLite; its URL."""
    port = free_port("127.0.0.1")
    url = f"http://127.0.0.1:{port}"
    command = [
        str(VENV / "bin" / "mlflow"), "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path}/mlflow.db",
        "--default-artifact-root", str(tmp_path / "artifacts"),
    ]  # fmt: skip
    off = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    environment = {**os.environ, **off}
    with (tmp_path / "mlflow.log").open("wb") as log:
        server = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=tmp_path, start_new_session=True
        )
    try:
        wait_for(f"{url}/health", server, tmp_path / "mlflow.log")
        yield url
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def wait_for(url: str, server: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until the server answers."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        assert server.poll() is None, log.read_text()
        try:
            if httpx2.get(url, timeout=5).is_success:
                return
        except httpx2.TransportError:
            time.sleep(0.2)
    raise AssertionError(log.read_text())


@pytest.mark.skipif(
    not (VENV / "bin" / "mlflow").exists(), reason=f"no MLflow in {VENV}: bash scripts/setup_mlflow.sh"
)
async def test_a_trajectory_is_seen_in_mlflow(store: Store, mlflow: str) -> None:
    record_id, trace_id = await trajectory(store, mlflow.replace("http", "mlflow") + "/my traces")
    record = await store.records.get(record_id)
    assert record is not None
    trace = await read(mlflow, f"tr-{trace_id}")
    info, spans = trace["trace_info"], trace["spans"]
    assert info["state"] == "OK"
    assert info["tags"]["agentrl.run"] == "traced"
    assert info["trace_metadata"]["mlflow.trace.session"] == record.id
    usage = f'"output_tokens": {record.generated_tokens}'
    assert usage in info["trace_metadata"]["mlflow.trace.tokenUsage"]
    kinds = {span["name"]: attribute(span, "mlflow.spanType") for span in spans}
    assert kinds["invoke_agent react"] == {"string_value": "AGENT"}
    assert kinds["chat train-model"] == {"string_value": "CHAT_MODEL"}
    assert kinds["execute_tool add"] == {"string_value": "TOOL"}
    assert "score exact" in kinds
    assert len(spans) == 5
    (tool,) = (span for span in spans if span["name"] == "execute_tool add")
    assert "3" in str(attribute(tool, "mlflow.spanOutputs"))
    found = await experiment(mlflow, "my traces")
    assert info["trace_location"]["mlflow_experiment"]["experiment_id"] == found


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="the package mlflow is not installed")
async def test_a_trajectory_is_written_into_a_file_without_a_server(store: Store, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    record_id, trace_id = await trajectory(store, uri)
    from mlflow.tracing.client import TracingClient

    trace = TracingClient(uri).get_trace(f"tr-{trace_id}")
    assert trace.info.state == "OK"
    assert trace.info.trace_metadata["mlflow.trace.session"] == record_id
    assert sorted(span.name for span in trace.data.spans) == [
        "chat train-model", "chat train-model", "execute_tool add", "invoke_agent react", "score exact",
    ]  # fmt: skip


async def trajectory(store: Store, address: str) -> tuple[str, str]:
    """Run a traced trajectory; return its Record's id and its trace's."""
    engine = ScriptedEngine(format_of(), ADD, "<answer>3</answer>")
    worker = Worker(
        store=store, router=engine, tools=FakeTools(), chat_format=engine.chat_format,
        params=SamplingParams(), seed=7, agent=AgentConfig(), sampling=SamplingConfig(),
        claims=ClaimConfig(),
    )  # fmt: skip
    await store.tasks.load([gateway_task(slots=1)])
    claim = await store.claims.claim(split="train", owner="me", lease_seconds=600)
    assert claim is not None
    with tracing(trace_flags(address, "--trace_content", "true"), "sample"):
        assert await worker.run(claim)
    record = await store.records.get(claim.record_id)
    assert record is not None
    assert record.trace_id is not None
    return record.id, record.trace_id


async def read(url: str, trace: str) -> dict[str, Any]:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        answer = await client.get("/api/3.0/mlflow/traces/get", params={"trace_id": trace})
        found: dict[str, Any] = answer.raise_for_status().json()["trace"]
        return found


async def experiment(url: str, name: str) -> str:
    async with httpx2.AsyncClient(base_url=url, timeout=60) as client:
        path = "/api/2.0/mlflow/experiments/get-by-name"
        answer = await client.get(path, params={"experiment_name": name})
        return str(answer.raise_for_status().json()["experiment"]["experiment_id"])


def attribute(span: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((item["value"] for item in span["attributes"] if item["key"] == name), None)
