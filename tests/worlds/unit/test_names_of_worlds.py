"""What the core finds in this wing by name: scorers, environments, agents, tools, formats, sandboxes."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from agentrl.base.registry import Registry
from agentrl.documents.task_file import TASK_FORMATS
from agentrl.environments.environment import ENVIRONMENTS
from agentrl.errors import ConfigError
from agentrl.rollout.agents import AGENTS, GRAPH_RUNNERS
from agentrl.scoring.scorers import SCORERS
from agentrl.tools.config import SERVER_SANDBOXES
from agentrl.tools.python import TOOLS
from agentrl.worlds.containers.container import CONTAINERS


@pytest.mark.parametrize(
    ("registry", "names"),
    [
        (SCORERS, "code"),
        (ENVIRONMENTS, "code harbor nemo_gym openenv reasoning_gym textarena verifiers"),
        (AGENTS, "command verifiers"),
        (TOOLS, "python_sandbox"),
        (CONTAINERS, "docker kubernetes sandbox"),
        (TASK_FORMATS, "harbor hub tables"),
        (SERVER_SANDBOXES, "stdio"),
    ],
)
def test_what_this_wing_adds_is_found_by_name(registry: Registry[Any], names: str) -> None:
    assert set(names.split()) <= registry.known().keys()


def test_the_runners_of_graphs_are_found_by_name() -> None:
    pytest.importorskip("langgraph", reason="not installed: langgraph (pip install -e '.[langgraph]')")
    assert GRAPH_RUNNERS.names() == ["agent_graph", "langgraph"]


@pytest.mark.parametrize(
    ("registry", "wrong", "nearest"),
    [(ENVIRONMENTS, "harbr", "harbor"), (TOOLS, "python_sandbx", "python_sandbox")],
)
def test_an_unknown_name_is_refused_with_the_nearest_of_this_wing(
    registry: Registry[Any], wrong: str, nearest: str
) -> None:
    with pytest.raises(ConfigError, match=rf"unknown .*'{wrong}'") as refused:
        registry.get(wrong)
    assert f"did you mean '{nearest}'?" in str(refused.value)


def test_environments_are_imported_without_their_packages() -> None:
    code = (
        "import sys; from agentrl.environments.environment import ENVIRONMENTS;"
        " assert 'reasoning_gym' in ENVIRONMENTS.names(); assert 'textarena' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
