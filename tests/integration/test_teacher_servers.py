"""An SGLang or vLLM server as a teacher gives the logprobs that its model's folder gives."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tiny_policy import write_tiny_policy

from agentrl.config.schema import EngineConfig, ModelConfig
from agentrl.errors import ConfigError, EngineError
from agentrl.inference.engines.clients import engine_client
from agentrl.inference.engines.commands import engine_command
from agentrl.inference.engines.process import EngineProcess, free_port
from agentrl.teaching.engines import FolderTeacher, HttpTeacher

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

IDS = [10, 20, 30, 40, 50, 60, 70, 80]
FIRST = 3


@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("sglang", "vllm")]
)
async def test_a_server_scores_as_its_folder_does(kind: str, tmp_path: Path) -> None:
    folder = write_tiny_policy(tmp_path / "teacher", hidden_size=64)
    config = EngineConfig(engine=kind, max_total_tokens=8192, inf_mem_ratio=0.1)  # type: ignore[arg-type]
    port = free_port(config.host)
    url = f"http://{config.host}:{port}"
    teacher = HttpTeacher(url, 60.0)
    with pytest.raises(EngineError) as down:
        await teacher.folder()
    assert down.value.outage is not None
    try:
        command = engine_command(str(folder), ModelConfig(), config, port)
    except ConfigError as error:
        pytest.skip(str(error))
    process = EngineProcess(command, tmp_path / "engine.log")
    try:
        async with engine_client(kind, url, 120.0) as client:
            await process.wait_ready(client, 200.0)
        assert await teacher.folder() == str(folder)
        for top in (0, 3):
            found, wanted = await asyncio.gather(
                teacher.score(IDS, FIRST, top), FolderTeacher(folder).score(IDS, FIRST, top)
            )
            np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=2e-2)
            assert [set(row) for row in found.top] == [set(row) for row in wanted.top]
    finally:
        await teacher.close()
        await process.stop()
