"""Containers that killed processes leave, against a program that stands in for docker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from path_programs import stand_in
from waiting import waiting_program

from agentrl.errors import ToolServerError
from agentrl.worlds.containers import docker
from agentrl.worlds.containers.container import ContainerSpec
from agentrl.worlds.containers.docker import DockerContainer
from agentrl.worlds.harness.agent import ContainerSession
from agentrl.worlds.harness.prepare import HarnessConfig, Prepared, build_base

DOCKER = """#!{python}
import os, sys
words = sys.argv[1:]
folder = os.path.join(os.path.dirname(os.path.abspath(__file__)), "containers")
if words[0] == "run":
    open(os.path.join(folder, words[words.index("--name") + 1]), "w").close()
    if "harness" in words[words.index("--name") + 1]:
        sys.exit(125)
    print("started", flush=True)
    sys.stdin.read()
if words[0] == "ps":
    assert words[words.index("--filter") + 1] == "name=agentrl-" and "--all" in words
    print(*(name for name in os.listdir(folder) if "agentrl-" in name), sep="\\n")
if words[0] == "rm" and "--force" in words:
    for name in words[words.index("--volumes") + 1 :]:
        os.remove(os.path.join(folder, name))
"""
RUNS = """
import asyncio, os, sys
from agentrl.worlds.containers.container import ContainerSpec
from agentrl.worlds.containers.docker import DockerContainer
async def main():
    box = DockerContainer(ContainerSpec(name="sandbox", image="python:3.12", seconds=60))
    await box.start()
    print("begun", flush=True)
    sys.stdin.read()
asyncio.run(main())
"""


@pytest.fixture
def containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH; return the folder with a file for each container."""
    stand_in(monkeypatch, tmp_path, "docker", DOCKER.format(python=sys.executable))
    docker._remove_containers_of_ended.cache_clear()
    (tmp_path / "containers").mkdir()
    return tmp_path / "containers"


def running() -> subprocess.Popen[str]:
    """Start a process that has begun a container and waits."""
    process, said = waiting_program(RUNS)
    assert said == "begun"
    return process


def names(containers: Path, of: int | None = None) -> set[str]:
    """Return the names of the containers, or of those of a process."""
    return {path.name for path in containers.iterdir() if of is None or f"-{of}." in path.name}


@pytest.mark.attack
async def test_the_next_container_removes_those_of_killed_processes(containers: Path) -> None:
    others = {"agentrl-sampler-1", "agentrl-sandbox-7.7.00000000.00000000", "mine-agentrl-sandbox"}
    for name in others:
        (containers / name).touch()
    killed, living = running(), running()
    killed.kill()
    killed.communicate(timeout=30)
    assert (len(names(containers, killed.pid)), len(names(containers, living.pid))) == (1, 1)
    try:
        async with DockerContainer(ContainerSpec(name="sandbox", image="python:3.12", seconds=60)):
            own = names(containers, os.getpid())
            assert names(containers) == {*others, *names(containers, living.pid), *own}
            assert len(own) == 1
    finally:
        living.communicate("", timeout=30)


async def test_a_harness_names_its_containers_so(containers: Path, tmp_path: Path) -> None:
    (killed := running()).kill()
    killed.communicate(timeout=30)
    container = {"isolation": "docker", "image": "image:1", "network": "host"}
    config = HarnessConfig(source=tmp_path / "h.yml", command="true", **container)  # type: ignore[arg-type]
    build_base(config, tmp_path / "base.tar")
    async with ContainerSession(Prepared(config, tmp_path / "base.tar", (), ())) as session:
        await session.fill({})
        with pytest.raises(ToolServerError, match="docker run failed"):
            await session.run("true", {}, seconds=20)
    assert names(containers) == set()
    assert docker.container_name("harness").startswith(f"agentrl-harness-{os.getpid()}.")
