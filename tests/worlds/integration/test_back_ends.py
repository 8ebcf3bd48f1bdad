"""What every back end does: state, inputs, outputs, limits, copies. Docker and Kubernetes are stand-ins."""

from __future__ import annotations

import asyncio
import io
import re
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import fake_docker
import pytest
from fake_kubernetes import FakeKubernetes
from rootfs_here import rootfs_problem, sh

from agentrl.worlds.containers.changes import Changes, NotKeptError
from agentrl.worlds.containers.container import CONTAINERS, Container, ContainerSpec, FilesTooLargeError
from agentrl.worlds.harbor.environment import prepare_logs

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(rootfs_problem() is not None, reason="this machine has no namespaces"),
]
BACK_ENDS = ("sandbox", "docker", "kubernetes")


@pytest.fixture(params=BACK_ENDS)
async def spec(
    request: pytest.FixtureRequest, rootfs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[str, ContainerSpec]]:
    """Return the name of a back end and a spec for it."""
    own: dict[str, Any] = {"image": "image:1"}
    if request.param == "sandbox":
        own = {"rootfs": str(rootfs)}
    if request.param == "docker":
        fake_docker.install(tmp_path / "docker", rootfs)
        monkeypatch.setenv("PATH", f"{tmp_path}/docker:/usr/bin:/bin")
    server = None
    if request.param == "kubernetes":
        server = FakeKubernetes(tmp_path, rootfs)
        own["options"] = {"kubeconfig": str(await server.start())}
    yield request.param, ContainerSpec(name="test", seconds=60, environment={"OF_SPEC": "yes"}, **own)
    if server is not None:
        assert server.jobs == {}
        await server.stop()


@pytest.fixture
async def box(spec: tuple[str, ContainerSpec]) -> AsyncIterator[Container]:
    kind = CONTAINERS.get(spec[0])
    await asyncio.to_thread(kind.check, spec[1], "here")
    async with kind(spec[1]) as started:
        yield started
    await started.stop()


async def test_files_and_processes_stay_between_commands(box: Container) -> None:
    ticks = "for n in 1 2 3 4 5 6 7 8 9; do echo >> /root/t; sleep 0.1; done"
    await sh(box, f"echo one > /etc/mine; ({ticks}) >/dev/null 2>&1 &")
    assert (await sh(box, "cat /etc/mine")).stdout == "one\n"
    first = int((await sh(box, "sleep 0.2; wc -l < /root/t")).stdout)
    assert int((await sh(box, "sleep 0.3; wc -l < /root/t")).stdout) > first > 0


async def test_a_command_gets_input_variables_and_a_folder(box: Container) -> None:
    done = await sh(
        box, "cat; echo $A $OF_SPEC; pwd", environment={"A": "b c"}, workdir="/tmp", stdin=b"x\xc3\xa9\n"
    )
    assert done.stdout.splitlines() == ["xé", "b c yes", "/tmp"]
    large = await sh(box, "wc -c", stdin=b"\xff" * 300_000)
    assert large.stdout.strip() == "300000"
    done = await box.run(["/bin/sh", "-c", 'echo "$1"; echo err >&2; exit 7', "sh", "a 'b'"], seconds=20)
    assert (done.stdout, done.stderr, done.exit_code, done.exceeded) == ("a 'b'\n", "err\n", 7, None)
    assert (await box.run(["/no/program"], seconds=20)).exit_code in (126, 127)


async def test_output_is_limited_and_shortened(box: Container) -> None:
    line = "while :; do echo yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy; done"
    assert (await sh(box, line, output_bytes=10_000)).exceeded == "output"
    done = await sh(box, "for n in 1 2 3 4 5 6 7 8 9 10; do echo line $n; done", shown_bytes=20)
    assert done.stdout == "line 1\nlin\n[51 bytes left out]\n9\nline 10\n"
    assert done.stdout_bytes == 71


async def test_time_kills_a_command_and_no_other(box: Container) -> None:
    other = asyncio.create_task(sh(box, "sleep 1.5; echo done"))
    late = await sh(box, "echo begun; while :; do echo >> /root/ticks; sleep 0.05; done", seconds=0.7)
    assert (late.exceeded, late.stdout) == ("time", "begun\n")
    running = asyncio.create_task(sh(box, "while :; do echo >> /root/ticks; sleep 0.05; done"))
    await asyncio.sleep(0.4)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    ticks = (await sh(box, "wc -l < /root/ticks")).stdout
    assert int(ticks) > 0
    assert (await other).stdout == "done\n"
    assert (await sh(box, "wc -l < /root/ticks")).stdout == ticks


async def test_a_command_that_is_cancelled_at_any_time_ends(box: Container) -> None:
    await sh(box, "echo > /root/ticks")
    async with asyncio.timeout(20):
        for delay in (0, 0.005, 0.01, 0.02, 0.03, 0.05, 0.08):
            running = asyncio.create_task(sh(box, "while :; do echo >> /root/ticks; sleep 0.02; done"))
            await asyncio.sleep(delay)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
    ticks = (await sh(box, "wc -l < /root/ticks")).stdout
    assert (await sh(box, "sleep 0.3; wc -l < /root/ticks")).stdout == ticks


async def test_files_are_copied_both_ways(box: Container, tmp_path: Path) -> None:
    archive = tmp_path / "in.tar"
    with tarfile.open(archive, "w") as target:
        for name, mode in (("run.sh", 0o755), ("deep/er", 0o600)):
            member = tarfile.TarInfo(name)
            member.mode, member.size = mode, 5
            target.addfile(member, io.BytesIO(b"hello"))
    await box.copy(archive, into="/new/tests")
    assert (
        await sh(box, "cd /new/tests; cat deep/er; test -x run.sh && ln -s er deep/link")
    ).stdout == "hello"
    await box.copy(tmp_path / "out.tar", out_of="/new/tests")
    with tarfile.open(tmp_path / "out.tar") as source:
        names = {name.removeprefix("./") for name in source.getnames()} - {"."}
    assert names == {"deep", "deep/er", "deep/link", "run.sh"}
    with pytest.raises(FileNotFoundError, match="/nowhere"):
        await box.copy(tmp_path / "none.tar", out_of="/nowhere")
    await sh(box, "printf %03000000d 0 > /new/tests/large")
    with pytest.raises(FilesTooLargeError):
        await box.copy(tmp_path / "large.tar", out_of="/new/tests", limit=1 << 20)


CHANGE = """
cd /root; mkdir -p work/deep; echo one > work/deep/a; ln -s a work/deep/link; ln work/deep/a work/deep/hard
echo 'two words' > '/etc/a name'; echo more >> /etc/passwd; rm /bin/yes; rm /bin/tr; mkdir /bin/tr
echo x > /bin/tr/f; chmod 750 work; echo hosts > /etc/hosts
"""
LOOK = """
cd /root; cat work/deep/a work/deep/link work/deep/hard '/etc/a name' /bin/tr/f; tail -n 1 /etc/passwd
[ -e /bin/yes ] || echo gone; stat -c %a work; echo again >> work/deep/a; cat work/deep/hard
[ -e /tmp/.agentrl-changes ]
"""
SEEN = "one\none\none\ntwo words\nx\nmore\ngone\n750\none\nagain\n"


async def test_what_has_changed_goes_to_a_new_container(
    spec: tuple[str, ContainerSpec], tmp_path: Path
) -> None:
    kind, folder, kept = CONTAINERS.get(spec[0]), tmp_path / "changes", tmp_path / "kept.tar"
    folder.mkdir()
    await asyncio.to_thread(kind.check, spec[1], "here")
    async with kind(spec[1]) as box:
        changes = Changes(box, folder)
        await changes.begin()
        assert (await sh(box, CHANGE)).stderr == ""
        await changes.save(kept, 1 << 40)  # more than the container may write
        await sh(box, "echo late > /root/late")
    async with kind(spec[1]) as box:
        await Changes(box, folder).apply(kept)
        seen = await sh(box, LOOK)
        assert (seen.stdout, seen.exit_code) == (SEEN, 1)
        assert (await sh(box, "[ -e /root/late ]")).exit_code == 1
        assert (await sh(box, "cat /etc/hosts")).stdout != "hosts\n"


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("truncate -s 2M /root/large", "they have more than 1,048,576 bytes"),
        (
            "(for n in 1 2 3 4 5 6 7 8 9; do sleep 1; done) >/dev/null 2>&1 &",
            "programs run in the background",
        ),
        ("touch '/root/a\\b'", "a name cannot be archived: 'root/a"),
        ("rm /bin/find", "not found"),
    ],
)
async def test_what_no_archive_restores_is_not_kept(
    box: Container, tmp_path: Path, line: str, why: str
) -> None:
    if "&" in line and not (await sh(box, "echo /proc/[0-9]*")).stdout[6:7].isdigit():
        pytest.skip("this stand-in has no /proc")
    changes = Changes(box, tmp_path)
    await changes.begin()
    await sh(box, line)
    with pytest.raises(NotKeptError, match=re.escape(why)):
        await changes.save(tmp_path / "kept.tar", 1 << 20)
    assert not (tmp_path / "kept.tar").exists()


async def test_the_folders_of_a_harbor_task_are_made(box: Container) -> None:
    await prepare_logs(box)
    assert (await sh(box, "cd /logs; echo *")).stdout == "agent artifacts verifier\n"
