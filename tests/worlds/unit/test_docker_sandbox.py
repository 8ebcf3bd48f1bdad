"""Programs in containers of Docker, against a program that stands in for docker and runs commands here."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from docker_here import IMAGE, docker_problem
from path_programs import stand_in

from agentrl.errors import ConfigError, ToolServerError
from agentrl.worlds.containers.docker import DockerClient
from agentrl.worlds.sandbox.local import SandboxLimits
from agentrl.worlds.sandbox.tool import ContainerSandbox, open_sandbox

DOCKER = """#!{python}
import os, sys
arguments = sys.argv[1:]
home = os.path.dirname(os.path.abspath(__file__))
with open(home + "/log", "a") as log:
    print(" ".join(arguments), file=log)
if arguments[0] == "exec":
    command = arguments[arguments.index("/bin/sh"):]
    if command[-1].startswith("kill"):  # it would be all processes of this user
        command[-1] = "true"
    os.chdir(home)
    os.execv(command[0], command)
if arguments[0] == "inspect":
    print("false true")
if "no-such-image" in arguments:
    sys.exit("Unable to find image")
if arguments[0] == "run":
    print("started", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put the stand-in on PATH; return the folder of its log."""
    stand_in(monkeypatch, tmp_path, "docker", DOCKER.format(python=sys.executable))
    return tmp_path


async def test_programs_of_a_trajectory_run_in_one_container_that_is_removed_at_its_end(docker: Path) -> None:
    sandbox = open_sandbox({"isolation": "docker", "image": "python:3.12"})
    first = await sandbox.run("open('a', 'w').write('x'); print(input())", stdin="hello\n")
    second = await sandbox.run("print(open('a').read()); raise SystemExit(3)")
    await sandbox.close()
    await sandbox.close()
    assert (first.stdout, first.succeeded) == ("hello\n", True)
    assert (second.stdout, second.exit_code, second.exceeded) == ("x\n", 3, None)
    for line in (docker / "log").read_text().splitlines():
        assert not line.startswith("exec --interactive") or "--user 65534:65534" in line
    commands = [line.split()[0] for line in (docker / "log").read_text().splitlines()]
    if commands[0] == "ps":  # the first container of a process looks for those of killed ones
        del commands[0]
    assert (commands[0], commands[-1], commands.count("run"), commands.count("rm")) == ("run", "rm", 1, 1)


async def test_a_program_beyond_its_time_or_output_is_killed(docker: Path) -> None:
    sandbox = ContainerSandbox(SandboxLimits(seconds=3, output_bytes=1000), image="python:3.12")
    late = await sandbox.run("import time; print('begun', flush=True); time.sleep(60)")
    loud = await sandbox.run("while True: print('y' * 100)")
    await sandbox.close()
    assert (late.exceeded, late.stdout) == ("time", "begun\n")
    assert (loud.exceeded, len(loud.stdout)) == ("output", 1000)


PROBLEM = docker_problem()
NO_DOCKER = pytest.mark.skipif(PROBLEM is not None, reason=f"no container can run here: {PROBLEM}")


@NO_DOCKER
async def test_programs_run_in_a_real_container() -> None:
    sandbox = ContainerSandbox(SandboxLimits(seconds=3, memory_mb=200), image=IMAGE)
    first = await sandbox.run("open('a', 'w').write('x'); print(input())", stdin="hello\n")
    second = await sandbox.run("print(open('a').read()); raise SystemExit(3)")
    late = await sandbox.run("import time; time.sleep(60)")
    large = await sandbox.run("x = b'1' * (400 << 20)")
    alone = await sandbox.run("import socket; socket.create_connection(('1.1.1.1', 53), 2)")
    await sandbox.close()
    assert (first.stdout, second.stdout, second.exit_code) == ("hello\n", "x\n", 3)
    assert (late.exceeded, large.exceeded) == ("time", "memory")
    assert "Network is unreachable" in alone.stderr


BLOCKING = {
    "full": "f = open('a', 'wb')\nwhile True: f.write(bytes(1 << 16)); f.flush()",
    "inodes": "for n in range(10**6): open(f'f{n}', 'w')",
    "locked": "import os; os.chmod('.', 0)",
    "folder": "import os; os.remove('main.py'); os.makedirs('main.py/a'); os.chmod('main.py', 0)",
    "fork": "import os\nos.setsid()\nwhile True:\n try: os.fork()\n except OSError: pass",
}


@NO_DOCKER
@pytest.mark.parametrize("program", BLOCKING.values(), ids=BLOCKING)
async def test_a_program_cannot_block_the_programs_after_it(program: str) -> None:
    limits = SandboxLimits(seconds=3, disk_mb=4, files=50, processes=16, cpu_seconds=3)
    sandbox = ContainerSandbox(limits, image=IMAGE)
    try:
        blocking = await sandbox.run(program)
        assert not blocking.succeeded or program in (BLOCKING["locked"], BLOCKING["folder"])
        after = await sandbox.run("print('next')")
        assert (after.stdout, after.exceeded) == ("next\n", None)
    finally:
        await sandbox.close()


async def test_docker_that_fails_or_is_missing_is_named(
    docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ToolServerError, match="docker run failed: Unable to find image"):
        await ContainerSandbox(SandboxLimits(), image="no-such-image").run("print(1)")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ToolServerError, match="none on PATH"):
        await ContainerSandbox(SandboxLimits(), image="python:3.12").run("print(1)")


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(ConfigError, match="isolation is 'vm'"):
        open_sandbox({"isolation": "vm"})
    with pytest.raises(ConfigError, match="visible is '/data'"):
        open_sandbox({"visible": "/data"})


async def test_a_failure_to_read_an_output_is_raised(docker: Path) -> None:
    client = DockerClient(1000)

    def broken(chunk: bytes) -> bool:
        raise OSError("no memory")

    client.stdout.add = broken  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no memory"):
        await client.run(["inspect"], seconds=10)
