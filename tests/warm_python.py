"""A ``python`` for commands of tests that has imported torch and agentrl already: it starts in 0.1 s.

It is the python of a venv whose start-up asks a server process, which has imported once, to fork itself for
``python -m MODULE`` and ``python FILE.py``. A program still has a process, a session, an environment and a
folder of its own, and starts others by ``sys.executable``, the same ``python``. It may be signalled and
killed as usual, but for SIGSTOP: the starter passes signals on, and the program ends with it. All other
command lines run the real Python, and so does ``python -S``, as sandboxes start it. Beside it lies
``accelerate``.

    python tests/warm_python.py SOCKET PYTHON     # the server; PYTHON is the venv's
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_IMPORTED = (
    "agentrl.cli.main", "agentrl.local.launch", "agentrl.train.start", "agentrl.train.sft",
    "agentrl.lab.whatif_run", "agentrl.lab.blame", "agentrl.evaluation.evaluate",
    "agentrl.rollout.setup", "agentrl.columns.teacher", "agentrl.inference.served_engine",
    "agentrl.local.engine.server", "transformers.models.qwen3.modeling_qwen3",
    "torch.distributed.run", "accelerate.commands.launch", "mcp.server.mcpserver", "uvicorn",
)  # fmt: skip
_READY_SECONDS = 120.0
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
    code = int(link.makefile().readline() or 1)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
"""
_ACCELERATE = """#!/bin/sh
exec {python} -m accelerate.commands.accelerate_cli "$@"
"""


@contextlib.contextmanager
def warm_server(folder: Path, **variables: str) -> Iterator[Path]:
    """Run the server; return the path of ``python`` in a ``bin`` folder below ``folder``.

    ``variables`` are added to the server's environment.
    """
    starter, path = folder / "bin" / "python", folder / "socket"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", **variables}
    server = subprocess.Popen(
        [sys.executable, __file__, str(path), str(starter)], env=environment, stdin=subprocess.PIPE
    )
    try:
        until = time.monotonic() + _READY_SECONDS
        while not starter.exists():
            assert server.poll() is None, "the server of warm_python has ended"
            assert time.monotonic() < until, f"warm_python has not imported in {_READY_SECONDS:g} s"
            time.sleep(0.05)
        yield starter
    finally:
        server.kill()
        server.communicate(timeout=10)


def _serve(path: str, starter: str) -> dict[str, Any]:
    """Fork for each request; return it in the fork, which becomes the program."""
    warnings.filterwarnings("ignore", message=".*found in sys.modules after import of package")
    for module in _IMPORTED:
        if importlib.util.find_spec(".".join(module.split(".")[:2])) is not None:  # a wing may not be there
            importlib.import_module(module)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    _make_venv(Path(starter), path)
    sys.executable = starter
    gc.freeze()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the watchers
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:  # it ends with its test session
        link, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return _watch(link)
        link.close()
    os._exit(0)


def _make_venv(starter: Path, path: str) -> None:
    """Make the venv of ``starter``, which finds the packages of this one; ``starter`` comes last."""
    folder = starter.parents[1]
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder), "installed_base": str(folder)}))
    packages.mkdir(parents=True)
    (packages / "starter.py").write_text(_STARTER.format(socket=path), encoding="utf-8")
    others = f"import starter, site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    (packages / "starter.pth").write_text(others, encoding="utf-8")
    (folder / "pyvenv.cfg").write_text(f"home = {sys.base_prefix}/bin\n", encoding="utf-8")
    starter.parent.mkdir()
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
    ended = os.pidfd_open(program)
    while ended not in (ready := select.select([link, ended], [], [])[0]):
        assert ready == [link]
        for number in link.recv(16) or [signal.SIGKILL]:
            os.kill(program, number)
    code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    with contextlib.suppress(OSError):
        link.sendall(b"%d\n" % code)
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Do what ``python -m MODULE`` or ``python FILE`` does, but let the kernel free the imported modules."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    more = os.environ.get("PYTHONPATH", "")
    sys.argv = request["argv"]
    is_file = sys.argv[0] != "-m"
    folder = str(Path(sys.argv[0]).resolve().parent) if is_file else request["cwd"]
    sys.path[:1] = [folder, *(more.split(os.pathsep) if more else [])]
    code: object = 0
    try:
        if is_file:
            runpy.run_path(sys.argv[0], run_name="__main__")
        else:
            del sys.argv[0]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    if isinstance(code, str):
        print(code, file=sys.stderr)
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)


if __name__ == "__main__":
    _become(_serve(*sys.argv[1:]))
