"""A ``python`` for commands of tests that has imported torch and agentrl already: it starts in 0.1 s.

It is the python of a venv whose start-up asks a server process, which has imported once, to fork itself for
``python -m MODULE`` and ``python FILE.py``. A program still has a process, a session, an environment and a
folder of its own, and starts others by ``sys.executable``, the same ``python``. It may be signalled, frozen
and killed as usual: the starter passes signals on, and the program is stopped, limited in the size of its
files, and ended with it. All other command lines run the real Python, and so does ``python -S``, as sandboxes
start it. Beside it lies ``accelerate``.

    python tests/warm_python.py FOLDER     # the server, of all processes that hold FOLDER/users
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib.util
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
import sysconfig
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_IMPORTED = (
    "agentrl.cli.main", "agentrl.local.launch", "agentrl.train.start", "agentrl.train.sft",
    "agentrl.lab.whatif_run", "agentrl.lab.blame", "agentrl.evaluation.evaluate",
    "agentrl.rollout.setup", "agentrl.columns.teacher", "agentrl.inference.served_engine",
    "agentrl.local.engine.server", "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.run", "accelerate.commands.launch", "mcp.server.mcpserver", "uvicorn",
)  # fmt: skip
_READY_SECONDS = 120.0
_LOOK_SECONDS = 0.05
"""Between two looks at a starter: a stop and a limit of its files hold for its program too."""
_USED_SECONDS = 1.0
_FIRST_FREE = 200
"""Received file descriptors wait above those that a program may have."""
_STARTER = """
import sys
words = sys.orig_argv[1:]
if words[:1] == ["-u"]:  # as torchrun starts its workers
    del words[0]
first = "".join(words[:1])
if first == "-m" or first.endswith(".py"):
    import json, os, signal, socket
    fds = []
    for fd in map(int, os.listdir("/proc/self/fd")):
        try:
            fds += [fd] * os.get_inheritable(fd)
        except OSError:
            pass  # that of the listing
    link = socket.socket(socket.AF_UNIX)
    link.connect({socket!r})
    request = {{"argv": words, "cwd": os.getcwd(), "environ": dict(os.environ), "fds": fds}}
    socket.send_fds(link, [b"."], fds)
    link.sendall(json.dumps(request).encode() + b"\\n")
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: link.send(bytes([number])))
    answers = link.makefile()
    answers.readline()  # the pid of the program
    code = int(answers.readline() or 1)
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
"""
_ACCELERATE = """#!/bin/sh
exec {python} -m accelerate.commands.accelerate_cli "$@"
"""


_PYTHON = sys.executable
_kept = contextlib.ExitStack()
atexit.register(_kept.close)
shared: list[Path] = []
"""The folder of the test run, the same in all its processes."""


@functools.cache
def warm_python() -> Path:
    """Return a ``python`` whose server runs until this process ends, and is one for all of a test run."""
    if not shared:
        shared.append(Path(_kept.enter_context(tempfile.TemporaryDirectory(prefix="agentrl-warm-"))))
    return _kept.enter_context(warm_server(shared[0] / "warm"))


@contextlib.contextmanager
def warm_server(folder: Path, **variables: str) -> Iterator[Path]:
    """Yield the path of ``python`` below ``folder``; start its server unless another process uses it already.

    The server ends soon after the last of the processes in such a block. ``variables`` are added to its
    environment.
    """
    folder.mkdir(parents=True, exist_ok=True)
    starter = folder / "bin" / "python"
    with (folder / "users").open("a") as users, (folder / "start").open("a") as start:
        fcntl.flock(users, fcntl.LOCK_SH)
        fcntl.flock(start, fcntl.LOCK_EX)
        if not starter.exists():
            _start_server(folder, starter, variables)
        fcntl.flock(start, fcntl.LOCK_UN)
        yield starter


def _start_server(folder: Path, starter: Path, variables: dict[str, str]) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", **variables}
    # No Popen: it would complain of a server that outlives the process which started it.
    server = os.posix_spawn(
        _PYTHON, [_PYTHON, __file__, str(folder)], environment,
        file_actions=[(os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)],
    )  # fmt: skip
    until = time.monotonic() + _READY_SECONDS
    while not starter.exists():
        assert os.waitpid(server, os.WNOHANG) == (0, 0), "the server of warm_python has ended"
        if time.monotonic() > until:
            os.kill(server, signal.SIGKILL)
            os.waitpid(server, 0)
            raise AssertionError(f"warm_python has not imported in {_READY_SECONDS:g} s")
        time.sleep(0.05)


def _serve(folder: Path) -> dict[str, Any]:
    """Fork for each request; return it in the fork, which becomes the program."""
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import of package")
    for module in _IMPORTED:
        if importlib.util.find_spec(".".join(module.split(".")[:2])) is not None:  # a wing may not be there
            importlib.import_module(module)
    path, starter = folder / "socket", folder / "bin" / "python"
    listener = socket.socket(socket.AF_UNIX)
    path.unlink(missing_ok=True)  # of one that was killed
    listener.bind(str(path))
    listener.listen(64)
    _make_venv(starter, str(path))
    sys.executable = str(starter)
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while True:
        if not select.select([listener], [], [], _USED_SECONDS)[0]:
            _end_if_unused(folder)
            continue
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _watch(link)
        link.close()


def _end_if_unused(folder: Path) -> None:
    """End once no process holds the folder; who comes later starts another server."""
    try:
        with (folder / "users").open("a") as users:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            (folder / "bin" / "python").unlink()
            (folder / "socket").unlink()
    except BlockingIOError:
        return
    except FileNotFoundError:
        pass  # the folder was removed
    os._exit(0)


def _make_venv(starter: Path, path: str) -> None:
    """Make the venv of ``starter``, which finds the packages of this one; ``starter`` comes last."""
    folder = starter.parents[1]
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "installed_base": str(folder)}))
    packages.mkdir(parents=True, exist_ok=True)
    (packages / "starter.py").write_text(_STARTER.format(socket=path), encoding="utf-8")
    others = f"import starter, site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "starter.pth").write_text(others, encoding="utf-8")
    (folder / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n", encoding="utf-8")
    starter.parent.mkdir(exist_ok=True)
    accelerate = starter.with_name("accelerate")
    accelerate.write_text(_ACCELERATE.format(python=starter), encoding="utf-8")
    accelerate.chmod(0o755)
    starter.symlink_to(Path(sys.executable).resolve())


def _watch(link: socket.socket) -> dict[str, Any]:
    """Fork the program and return its request there; here pass signals on, and end with it."""
    _, received, _, _ = socket.recv_fds(link, 1, 64)
    request: dict[str, Any] = json.loads(link.makefile().readline())
    program = os.fork()
    if program == 0:
        link.close()
        os.setsid()
        moved = [fcntl.fcntl(fd, fcntl.F_DUPFD, _FIRST_FREE) for fd in received]
        for fd, number in zip(moved, request["fds"], strict=True):
            os.dup2(fd, number)
        for fd in {*received, *moved} - {*request["fds"]}:
            os.close(fd)
        if 1 in request["fds"]:  # the old one remembers whether what was there could be sought
            sys.stdout = open(1, "w", encoding=sys.stdout.encoding, closefd=False)  # noqa: SIM115
        return request
    for fd in received:
        os.close(fd)
    starter, _, _ = struct.unpack("3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    ended, held = os.pidfd_open(program), Held(False, resource.prlimit(starter, resource.RLIMIT_FSIZE))
    with contextlib.suppress(OSError):
        link.sendall(b"%d\n" % program)
    watched: list[Any] = [link, ended]
    while ended not in (ready := select.select(watched, [], [], _LOOK_SECONDS)[0]):
        if ready:
            for number in _received(link) or [signal.SIGKILL]:
                os.kill(program, number)
        else:
            with contextlib.suppress(OSError):  # either has ended
                held = _hold_as(starter, program, held)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall(b"%d\n" % code)
    os._exit(0)


def _received(link: socket.socket) -> bytes:
    try:
        return link.recv(16)
    except ConnectionResetError:  # it was killed before it had read all
        return b""


class Held(NamedTuple):
    """What holds for a starter."""

    stands: bool
    limit: tuple[int, int]
    """Of the size of its files."""


def _hold_as(starter: int, program: int, held: Held) -> Held:
    """Stop or continue a program as its starter, and limit its files; return what holds for the starter."""
    state = Path(f"/proc/{starter}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    now = Held(state == "T", resource.prlimit(starter, resource.RLIMIT_FSIZE))
    if now.stands is not held.stands:
        os.killpg(program, signal.SIGSTOP if now.stands else signal.SIGCONT)
    if now.limit != held.limit:
        resource.prlimit(program, resource.RLIMIT_FSIZE, now.limit)
    return now


def _become(request: dict[str, Any]) -> None:
    """Do what ``python -m MODULE`` or ``python FILE`` does, but let the kernel free the imported modules."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    more = os.environ.get("PYTHONPATH", "")
    sys.argv = request["argv"]
    kind = sys.argv[0]
    is_file = kind not in ("-m", "-c")
    folder = str(Path(kind).resolve().parent) if is_file else request["cwd"]
    sys.path[:1] = [folder, *(more.split(os.pathsep) if more else [])]
    code: object = 0
    try:
        if is_file:
            runpy.run_path(kind, run_name="__main__")
        elif kind == "-m":
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            exec(compile(sys.argv.pop(1), "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as ended:
        code = ended.code or 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _become(_serve(Path(sys.argv[1])))
