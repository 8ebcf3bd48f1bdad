"""Commands in real containers: their rights, their files, and what stays after them."""

from __future__ import annotations

import subprocess
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from docker_here import IMAGE, docker_problem
from rootfs_here import rootfs_with_python

from agentrl.documents.record import CommandRun, Ending
from agentrl.errors import ToolServerError
from agentrl.worlds.archives import read_file
from agentrl.worlds.harness.agent import ContainerSession
from agentrl.worlds.harness.prepare import HarnessConfig, HarnessLimits, Prepared, build_base
from agentrl.worlds.sandbox.local import namespace_problem

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]
needs_docker = pytest.mark.skipif(docker_problem() is not None, reason=f"no Docker here: {docker_problem()}")


def session_of(
    folder: Path, *, isolation: str = "docker", image: str = IMAGE, **limits: Any
) -> ContainerSession:
    own: dict[str, Any] = {"image": image}
    if isolation == "sandbox":
        own = {"rootfs": rootfs_with_python()}
    config = HarnessConfig(
        source=folder / "harness.yml", command="true", isolation=isolation, network="none",
        limits=HarnessLimits(**limits), **own,
    )  # fmt: skip
    base = folder / "base.tar"
    build_base(config, base)
    return ContainerSession(Prepared(config, base, (), ()))


@pytest.fixture(params=["sandbox", "docker"])
async def session(tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[ContainerSession]:
    problem = docker_problem() if request.param == "docker" else namespace_problem()
    if problem is not None:
        pytest.skip(f"no {request.param} here: {problem}")
    async with session_of(tmp_path, isolation=request.param, disk_mb=50, files=300, memory_mb=300) as opened:
        await opened.fill({"task.json": b"{}"})
        yield opened


async def run(session: ContainerSession, command: str, **variables: str) -> CommandRun:
    return await session.run(command, variables, seconds=60)


def lines(done: CommandRun) -> list[str]:
    assert done.ended is Ending.EXITED, done
    return done.stdout.splitlines()


def containers() -> list[str]:
    words = ["docker", "ps", "--all", "--quiet", "--filter", "name=agentrl-harness"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()


async def test_a_command_has_no_capability_and_writes_to_its_folders_only(session: ContainerSession) -> None:
    done = await run(
        session,
        "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status; pwd; ls -A ..;"
        " grep -oE '^ *[a-z0-9]+:' /proc/net/dev | tr -d ' ';"
        " for place in / /usr /etc /var /opt; do touch $place/x && echo wrote $place; done;"
        " touch /tmp/x /var/tmp/x x ~/x && echo ok",
    )
    user, *rights = lines(done)
    assert int(user) > 0
    assert [word for line in rights[:3] for word in line.split()[1:]] == ["0000000000000000"] * 2 + ["1"]
    assert rights[3:] == ["/sandbox/workspace", "home", "task.json", "tmp", "workspace", "lo:", "ok"]


async def test_variables_of_the_sampler_stay_outside(
    session: ContainerSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTHER_TOKEN", "do-not-pass")
    plain = set(lines(await run(session, "env", MODEL="policy")))
    assert {"MODEL=policy", "HOME=/sandbox/home", "TMPDIR=/sandbox/tmp"} <= plain
    assert not {line for line in plain if line.startswith(("DOCKER_", "OTHER_TOKEN", "AGENTRL_TEST"))}
    own = lines(await run(session, "env", PATH="/usr/bin:/bin", HOME="/sandbox", TMPDIR="/tmp"))
    assert {"PATH=/usr/bin:/bin", "HOME=/sandbox", "TMPDIR=/tmp"} <= set(own)


async def test_files_pass_to_the_next_command_also_those_that_their_owner_cannot_read(
    session: ContainerSession,
) -> None:
    await run(
        session,
        "mkdir -p a/b; echo one > a/b/c; chmod 000 a/b/c a/b a; mkfifo pipe; ln -s /etc/shadow link;"
        " cp /bin/true own; chmod 6755 own",
    )
    done = await run(session, "cat a/b/c; readlink link; [ -e pipe ] || echo none; stat -c %a own")
    assert lines(done) == ["one", "/etc/shadow", "none", "755"]
    assert read_file(session.archive, "a/b/c", 100) == "one\n"
    assert read_file(session.archive, "link", 100) is None


@pytest.mark.parametrize(
    "command",
    [
        "for n in 1 2 3; do truncate -s 40M sparse$n; done",
        "for n in $(seq 400); do : > f$n; done",
        "for n in 1 2 3; do head -c 40000000 /dev/zero > ~/$n; done",
        "head -c 60000000 /dev/zero > /tmp/large",
    ],
    ids=["sparse", "files", "home", "tmp"],
)
async def test_files_above_the_limits_are_dropped(session: ContainerSession, command: str) -> None:
    assert (await run(session, "echo kept > kept")).ended is Ending.EXITED
    before = session.archive.read_bytes()
    assert (await run(session, command)).ended is Ending.DISK_LIMIT
    assert session.archive.read_bytes() == before
    assert lines(await run(session, "cat kept; ls")) == ["kept", "kept"]


async def test_nothing_stays_after_commands(session: ContainerSession) -> None:
    await run(session, "setsid sleep 1000 & echo started")
    late = await session.run("echo begun; sleep 1000", {}, seconds=2)
    assert (late.ended, late.stdout, late.exit_code) == (Ending.TIME_LIMIT, "begun\n", -9)
    assert {path.name for path in session.archive.parent.iterdir()} == {"files.tar", "before.tar"}
    with tarfile.open(session.archive) as files:
        assert "task.json" in files.getnames()


@needs_docker
async def test_an_image_that_cannot_run_fails_the_sandbox(tmp_path: Path) -> None:
    async with session_of(tmp_path, image="agentrl.invalid/no-such-image:1") as session:
        await session.fill({})
        with pytest.raises(ToolServerError, match="docker run failed"):
            await run(session, "true")
    assert containers() == []
