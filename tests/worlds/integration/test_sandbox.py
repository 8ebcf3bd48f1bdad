"""Run programs that attack the sandbox: each ends in a named state, and nothing of it is left."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from waiting import cancel, until

from agentrl.errors import ToolServerError
from agentrl.worlds.sandbox.linux import landlock_version
from agentrl.worlds.sandbox.local import LAUNCHER, Isolation, LocalSandbox, SandboxLimits, namespace_problem

pytestmark = pytest.mark.integration

LIMITS = SandboxLimits(
    seconds=4, cpu_seconds=1, memory_mb=128, processes=16, disk_mb=4, files=64, open_files=32,
    output_bytes=4096,
)  # fmt: skip
SLEEP = "import time; time.sleep(60)"
MARK = "agentrl-sandbox-left-behind"


SYSTEM_PYTHON = "/usr/bin/python3"
PYTHON = SYSTEM_PYTHON if os.geteuid() == 0 and Path(SYSTEM_PYTHON).exists() else None
"""Root's own interpreter may be unreadable for other users."""


def made(isolation: Isolation, *visible: str, **limits: float) -> LocalSandbox:
    """Return a sandbox with ``LIMITS``, but for ``limits``."""
    return LocalSandbox(
        dataclasses.replace(LIMITS, **limits), isolation=isolation, python=PYTHON, visible=visible
    )


@pytest.fixture(params=["namespaces", "limits"])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[LocalSandbox]:
    """Return a sandbox of each kind."""
    if request.param == "namespaces" and (problem := await asyncio.to_thread(namespace_problem)):
        pytest.skip(f"no namespaces here: {problem}")
    sandbox = made(request.param)
    yield sandbox
    await sandbox.close()
    assert not _processes_with(MARK)


def _size(folder: str) -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(folder).rglob("*"))


def _table(folder: str) -> Path:
    file = Path(folder, "table.db")
    file.write_text("x")
    file.chmod(0o644)
    return file


def _lock(file: Path) -> None:
    """Lock a file for a moment. Raises BlockingIOError if somebody else has locked it."""
    with file.open() as opened:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _processes_with(mark: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


async def test_a_program_gets_its_input_and_its_output_is_returned(sandbox: LocalSandbox) -> None:
    done = await sandbox.run("import sys\nprint(sys.stdin.read() * 2)\nsys.stderr.write('é')", stdin="ab\n")
    assert done.succeeded
    assert (done.stdout, done.stderr) == ("ab\nab\n\n", "é")
    failed = await sandbox.run("raise ValueError('no')")
    assert failed.exit_code == 1
    assert "line 1" in failed.stderr
    assert "ValueError: no" in failed.stderr


async def test_files_stay_for_the_next_program_and_end_with_the_sandbox(sandbox: LocalSandbox) -> None:
    await sandbox.run(
        "import os\nopen('a.py', 'w').write('x = 41')\nos.mkdir('d')\nos.mkfifo('p')\nos.chmod('d', 0)"
    )
    assert (await sandbox.run("import a\nprint(a.x + 1)")).stdout == "42\n"
    folder = Path(str(sandbox._folder))
    await sandbox.close()
    assert not await asyncio.to_thread(folder.exists)
    assert (await sandbox.run("import os\nprint(sorted(os.listdir()))")).stdout == "['main.py']\n"


async def test_an_infinite_loop_ends_at_its_cpu_time(sandbox: LocalSandbox) -> None:
    assert (await sandbox.run("while True: pass")).exceeded == "time"


async def test_a_sleeping_program_ends_at_its_time_by_the_clock() -> None:
    sandbox = LocalSandbox(SandboxLimits(seconds=0.5))
    done = await sandbox.run("import time\nprint('begun', flush=True)\ntime.sleep(60)")
    assert (done.exceeded, done.stdout) == ("time", "begun\n")
    await sandbox.close()


async def test_a_memory_bomb_is_an_error_of_the_program(sandbox: LocalSandbox) -> None:
    done = await sandbox.run("x = 'a' * (1 << 30)")
    assert not done.succeeded
    assert "MemoryError" in done.stderr


async def test_the_memory_of_all_processes_is_bounded_together(sandbox: LocalSandbox) -> None:
    program = (
        "import os, time\n"
        "for _ in range(6):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(os.urandom(1 << 20)) * 60\n"
        "        time.sleep(30)\n"
        "time.sleep(30)"
    )
    assert (await sandbox.run(program)).exceeded == "memory"


async def test_a_fork_bomb_meets_the_limit_of_processes(sandbox: LocalSandbox) -> None:
    program = (
        "import os, sys\n"
        "n = 0\n"
        "try:\n"
        "    while True:\n"
        "        if os.fork() == 0:\n"
        "            import time; time.sleep(30)\n"
        "        n += 1\n"
        "except BlockingIOError:\n"
        "    print(n < 17)"
    )
    assert (await sandbox.run(program)).stdout == "True\n"
    short = made(sandbox._isolation, seconds=1.5)
    bomb = await short.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    await short.close()
    assert bomb.exceeded == "time"


async def test_endless_output_is_cut_and_ends_the_program(sandbox: LocalSandbox) -> None:
    done = await sandbox.run("while True: print('y' * 1000)")
    assert done.exceeded == "output"
    assert len(done.stdout) == LIMITS.output_bytes


async def test_a_flood_of_files_is_bounded(sandbox: LocalSandbox) -> None:
    many = await sandbox.run("import time\nfor i in range(10_000): open(str(i), 'w').close()\ntime.sleep(5)")
    assert many.exceeded == "files" or "OSError" in many.stderr
    await sandbox.close()
    large = await sandbox.run("open('large', 'wb').write(bytes(8 << 20))")
    assert large.exceeded == "files" or "OSError" in large.stderr
    await sandbox.close()
    parts = await sandbox.run(
        "import time\nfor i in range(20): open(str(i), 'wb').write(bytes(1 << 20))\ntime.sleep(5)"
    )
    assert parts.exceeded == "files" or "OSError" in parts.stderr


@pytest.mark.attack
@pytest.mark.parametrize("isolation", ["namespaces", "limits"])
async def test_files_below_any_path_count_and_none_stays(isolation: Isolation) -> None:
    sandbox = made(isolation)
    deep = "import os\nfor _ in range({levels}): os.mkdir('d' * 250); os.chdir('d' * 250)\n"
    fill = "for n in range(40): open(f'f{n}', 'wb').write(os.urandom(1 << 20))\nimport time; time.sleep(5)"
    try:
        for code in (deep.format(levels=20) + fill, deep.format(levels=1500) + "import time; time.sleep(5)"):
            done = await sandbox.run(code)
            assert not done.succeeded
            assert isolation == "namespaces" or done.exceeded == "files"
            folder = Path(str(sandbox._folder))
            await sandbox.close()
            assert not await asyncio.to_thread(folder.exists)
    finally:
        await sandbox.close()


@pytest.mark.attack
async def test_a_program_locks_no_file_of_the_host(sandbox: LocalSandbox, open_folder: str) -> None:
    file = _table(open_folder)
    seeing = made(sandbox._isolation, open_folder)
    lock = f"import fcntl, time; fcntl.flock(open({str(file)!r}), fcntl.LOCK_EX); time.sleep(2)"
    try:
        running = asyncio.create_task(seeing.run(lock))
        while not running.done():
            _lock(file)
            await asyncio.wait([running], timeout=0.05)
        done = await running
        assert done.succeeded is (sandbox._isolation == "namespaces"), done.stderr
    finally:
        await seeing.close()


async def test_sparse_files_do_not_fill_the_disk_of_the_host(sandbox: LocalSandbox) -> None:
    await sandbox.run("for i in range(50): open(str(i), 'wb').truncate(4 << 20)")
    assert _size(str(sandbox._folder)) < 64 << 20


async def test_the_environment_and_the_descriptors_of_the_sampler_are_not_inherited(
    sandbox: LocalSandbox, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AGENTRL_SECRET", "swordfish")
    secret = tmp_path / "secret"
    secret.write_text("swordfish")
    with secret.open() as held:
        os.set_inheritable(held.fileno(), True)
        program = (
            "import os\n"
            "print(open('/proc/self/environ').read(), dict(os.environ))\n"
            f"for pid in (1, os.getppid(), {os.getpid()}):\n"
            "    for name in ('environ', 'cmdline', 'mem'):\n"
            "        try: print(pid, name, open(f'/proc/{pid}/{name}').read(99999))\n"
            "        except OSError: pass\n"
            "for fd in range(3, 64):\n"
            "    try: print(fd, os.read(fd, 100))\n"
            "    except OSError as error: assert error.errno == 9\n"
            "print('END')"
        )
        done = await sandbox.run(program)
    assert "END" in done.stdout or done.exceeded == "output"
    assert "swordfish" not in done.stdout


async def test_no_socket_reaches_another_machine_or_process(sandbox: LocalSandbox) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        program = (
            "import socket\n"
            "for family, address in [(2, ('127.0.0.1', PORT)), (2, ('1.1.1.1', 53)),\n"
            "                        (socket.AF_VSOCK, (2, 1)), (1, '/var/run/docker.sock')]:\n"
            "    try:\n"
            "        s = socket.socket(family)\n"
            "        s.settimeout(1)\n"
            "        s.connect(address)\n"
            "        print('REACHED', address)\n"
            "    except OSError as error: print(error.errno)\n"
            "a, b = socket.socketpair()\n"
            "a.send(b'within the program')"
        )
        done = await sandbox.run(program.replace("PORT", str(port)))
    assert done.succeeded, done.stderr
    assert "REACHED" not in done.stdout


async def test_other_processes_of_the_user_cannot_be_killed(sandbox: LocalSandbox) -> None:
    other = await asyncio.create_subprocess_exec(sys.executable, "-c", SLEEP)
    try:
        program = (
            "import os, signal\n"
            f"for pid in (os.getppid(), {other.pid}, {os.getpid()}, 1, -1):\n"
            "    try: os.kill(pid, signal.SIGKILL if pid != -1 else 0)\n"
            "    except OSError as error: print(type(error).__name__)\n"
            "print('END')"
        )
        done = await sandbox.run(program)
        assert "END" in done.stdout
        assert other.returncode is None
    finally:
        other.kill()
        await other.wait()


async def test_links_out_of_the_directory_change_nothing_on_the_host(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("intact")
    program = (
        "import os, shutil\n"
        "os.unlink('main.py')\n"
        f"os.symlink({str(victim)!r}, 'main.py')\n"
        f"os.symlink({str(tmp_path)!r}, 'out')\n"
        "os.symlink('/', 'root')\n"
        f"for path in ('main.py', 'out/victim', {str(victim)!r}):\n"
        "    try: open(path, 'w').write('changed')\n"
        "    except OSError as error: print(error.errno)"
    )
    await sandbox.run(program)
    again = await sandbox.run("print('replaced, not followed')")
    await sandbox.close()
    assert again.stdout == "replaced, not followed\n"
    if os.geteuid() == 0 or sandbox._isolation == "namespaces":
        assert victim.read_text() == "intact"
    assert victim.exists()


async def test_background_processes_end_with_the_program(sandbox: LocalSandbox) -> None:
    program = (
        "import os, subprocess, sys\n"
        f"command = [sys.executable, '-c', {SLEEP!r}, {MARK!r}]\n"
        "subprocess.Popen(command, start_new_session=True)\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        "        os.execv(sys.executable, command)\n"
        "    os._exit(0)\n"
        "print('gone')"
    )
    done = await sandbox.run(program)
    assert done.stdout == "gone\n"
    assert not _processes_with(MARK)


async def test_namespaces_and_tracing_are_denied(sandbox: LocalSandbox) -> None:
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "for call in (lambda: libc.unshare(0x10000000), lambda: libc.ptrace(16, os.getppid(), 0, 0),\n"
        "             lambda: libc.mount(b'none', b'/', 0, 0, 0), lambda: libc.memfd_create(b'm', 0)):\n"
        "    print(call(), ctypes.get_errno())"
    )
    assert (await sandbox.run(program)).stdout == "-1 1\n" * 4


async def test_a_cancelled_call_kills_its_program(sandbox: LocalSandbox) -> None:
    command = f"[sys.executable, '-c', {SLEEP!r}, {MARK!r}]"
    program = f"import os, sys\nos.execv(sys.executable, {command})"
    call = asyncio.create_task(sandbox.run(program))
    await until(lambda: bool(_processes_with(MARK)))
    await cancel(call)
    await until(lambda: not _processes_with(MARK))


async def test_a_directory_that_the_program_may_not_enter_is_no_error_of_the_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root runs programs as another user")
    os.chmod(tmp_path, 0o700)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    sandbox = made("limits")
    with pytest.raises(ToolServerError, match="Permission denied"):
        await sandbox.run("print(1)")
    await sandbox.close()


async def test_an_interpreter_that_cannot_start_is_named(tmp_path: Path) -> None:
    sandbox = LocalSandbox(LIMITS)
    sandbox._python = str(tmp_path / "none")
    with pytest.raises(ToolServerError, match="cannot start a program"):
        await sandbox.run("print(1)")
    await sandbox.close()


async def test_files_of_the_user_cannot_be_read_nor_those_of_other_processes(
    sandbox: LocalSandbox, tmp_path: Path
) -> None:
    if sandbox._isolation == "limits" and landlock_version() == 0 and os.geteuid() != 0:
        pytest.skip("this kernel has no Landlock")
    secret = tmp_path / "key"
    secret.write_text("swordfish")
    program = (
        f"own = '/proc/{os.getpid()}/'\n"
        f"for path in ({str(secret)!r}, '/etc/shadow', own + 'mem', own + 'environ'):\n"
        "    try: print(open(path).read(99))\n"
        "    except OSError: print('denied')"
    )
    assert (await sandbox.run(program)).stdout == "denied\n" * 4


SAMPLER = """
import asyncio, sys
from agentrl.worlds.sandbox.local import LocalSandbox, SandboxLimits
python = sys.argv[3] or None
asyncio.run(LocalSandbox(SandboxLimits(seconds=60), isolation=sys.argv[1], python=python).run(sys.argv[2]))
"""


@pytest.fixture
def open_folder() -> Iterator[str]:
    """Return a folder that other users may enter, as a sandbox of root needs it; pytest's own are closed."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o711)
        yield folder


async def test_a_program_ends_with_a_sampler_that_is_killed(sandbox: LocalSandbox, open_folder: str) -> None:
    mark = f"{MARK}-orphan"
    program = f"import os, sys\nos.execv(sys.executable, [sys.executable, '-c', {SLEEP!r}, {mark!r}])"
    words = (sandbox._isolation, program, PYTHON or "")
    sampler = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SAMPLER, *words, env={"TMPDIR": open_folder}
    )
    try:
        await until(lambda: len(_processes_with(mark)) > 1)  # the sampler itself, and the program
    finally:
        sampler.kill()
        await sampler.wait()
    await until(lambda: not _processes_with(mark))


async def test_a_launcher_that_dies_ends_its_programs_and_is_started_again(sandbox: LocalSandbox) -> None:
    command = f"[sys.executable, '-c', {SLEEP!r}, {MARK!r}]"
    call = asyncio.create_task(sandbox.run(f"import os, sys\nos.execv(sys.executable, {command})"))
    await until(lambda: bool(_processes_with(MARK)))
    assert LAUNCHER._process is not None
    LAUNCHER._process.kill()
    with pytest.raises(ToolServerError, match="launcher ended"):
        await call
    await until(lambda: not _processes_with(MARK))
    assert (await sandbox.run("print(1)")).stdout == "1\n"
