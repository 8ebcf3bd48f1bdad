"""Fixtures of the lab's tests."""

from __future__ import annotations

import pytest
from db_command import Db, agentrl_db

from agentrl.config.schema import RunConfig


@pytest.fixture
def db(run_config: RunConfig, capsys: pytest.CaptureFixture[str]) -> Db:
    """Run ``agentrl db WORDS`` on the test's run, expect exit code ``code``, and return what it printed."""

    async def run(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        assert await agentrl_db(run_config, *words) == code
        return capsys.readouterr().out

    return run
