"""Run the program in new namespaces: no network but a way to one address, no other processes, few files.

Not by bubblewrap: its tmpfs bounds no number of files, and a program of root would be root on the host.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import struct
import threading
from collections.abc import Iterable
from typing import Final

from agentrl.worlds.sandbox import linux
from agentrl.worlds.sandbox.program import (
    DEVICES,
    SYSTEM,
    Job,
    Streams,
    become,
    extract,
    guarded,
    save,
    write_main,
    write_report,
)

WORK: Final = "/sandbox"
"""A folder that no host has: what the program may read keeps its path, and may not lie inside."""
_INSIDE_USER: Final = 1000
_HOST_USER_OF_ROOT: Final = 65534
_ALL: Final = (
    linux.CLONE_NEWUSER
    | linux.CLONE_NEWNS
    | linux.CLONE_NEWPID
    | linux.CLONE_NEWNET
    | linux.CLONE_NEWIPC
    | linux.CLONE_NEWUTS
    | linux.CLONE_NEWCGROUP
)
LOOPBACK: Final = "127.0.0.1"
_CONNECT_SECONDS: Final = 10.0
_RELAY_CHUNK: Final = 65536
_BACKLOG: Final = 128
_DESCRIPTORS: Final = 1024
_SET_FLAGS: Final = 0x8914
_UP: Final = 0x1 | 0x40


Files = tuple[int | None, int | None]
"""Descriptors of the session's files: an archive of the directory before and after the program."""


def start(job: Job, streams: Streams, files: Files, status: int, channel: socket.socket | None = None) -> int:
    """Start the program; return the process to kill in order to end all of it.

    ``channel`` receives the socket on which the program reaches its gateway.

    When the program ends, ``{"status": …}`` is written to ``status``, or ``{"error": …}`` if it cannot start.
    """
    ready_read, ready_write = os.pipe()
    go_read, go_write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ready_read)
        os.close(go_write)
        guarded(status, lambda: _outer(job, streams, files, status, ready_write, go_read, channel))
    os.close(ready_write)
    os.close(go_read)
    if os.read(ready_read, 1) == b"1":
        map_users(child, f"0 {{own}} 1\n{_INSIDE_USER} {_HOST_USER_OF_ROOT} 1", f"{_INSIDE_USER} {{own}} 1")
        os.write(go_write, b"1")
    os.close(ready_read)
    os.close(go_write)
    return child


def map_users(child: int, of_root: str, of_others: str) -> None:
    """Map users and groups of the child's namespace: lines of uid_map, in which ``own`` is this user."""
    root = os.geteuid() == 0
    if not root:
        write_text(f"/proc/{child}/setgroups", "deny")
    for kind, own in (("uid", os.geteuid()), ("gid", os.getegid())):
        write_text(f"/proc/{child}/{kind}_map", (of_root if root else of_others).format(own=own))


def enter(job: Job, channel: socket.socket | None) -> None:
    """Move this process into new namespaces, with a way to the job's gateway. Raises OSError."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.unshare(_ALL & ~linux.CLONE_NEWNET if job.network == "host" else _ALL)
    if job.network != "host" and (job.command or job.holds):
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # switch the loopback on
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH22x", b"lo", _UP))
    if channel is not None and job.gateway is not None:
        with channel, socket.create_server((LOOPBACK, job.gateway[1]), backlog=_BACKLOG) as listener:
            socket.send_fds(channel, [b"x"], [listener.fileno()])
    linux.prctl(linux.PR_SET_DUMPABLE, 1)


def _outer(
    job: Job, streams: Streams, files: Files, status: int, ready: int, go: int, channel: socket.socket | None
) -> None:
    """Create the namespaces, start their first process and wait for it."""
    enter(job, channel)
    os.write(ready, b"1")
    os.close(ready)
    if os.read(go, 1) != b"1":
        raise OSError("the users of the namespace cannot be mapped")
    os.close(go)
    first = os.fork()
    if first == 0:
        guarded(status, lambda: _init(job, streams, files, status))
    os.waitpid(first, 0)
    os._exit(0)


def _init(job: Job, streams: Streams, files: Files, status: int) -> None:
    """Be the first process of the namespaces: build the root, run the program, keep its files."""
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
    linux.prctl(linux.PR_SET_DUMPABLE, 0)
    os.umask(0o022)
    user = _INSIDE_USER if os.getuid() == 0 else None
    _build_root(job, user)
    if job.command:
        signal.signal(signal.SIGTERM, lambda *_: os.kill(-1, signal.SIGKILL))
    program = os.fork()
    if program == 0:
        guarded(status, lambda: _program(job, streams, files, user))
    streams.close()
    ended = None
    while ended is None:
        child, code = os.wait()
        ended = code if child == program else None
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()
    full = any(map(is_full, (WORK, "/tmp")))
    _, after = files
    kept = after is None or save(after, WORK, job)
    write_report(status, {"status": os.waitstatus_to_exitcode(ended), "kept": kept, "full": full})
    os._exit(0)


def _program(job: Job, streams: Streams, files: Files, user: int | None) -> None:
    before, _ = files
    if before is not None:
        extract(before, WORK)
    write_main(job, WORK, user)
    become(job, WORK, streams, user)


def _build_root(job: Job, user: int | None) -> None:
    """Replace the root by a small one in memory: what the program may read, and its directory."""
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    linux.mount("tmpfs", "/tmp", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    linux.pivot_root("/tmp", "/tmp/old")
    os.chdir("/")
    linux.mount("tmpfs", "/new", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, "size=1m,nr_inodes=1024,mode=755")
    size = f"size={job.limits['disk_mb']}m,nr_inodes={job.limits['files']},mode=700"
    for path in (WORK, "/tmp"):
        os.mkdir(f"/new{path}")
        linux.mount("tmpfs", f"/new{path}", "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, size)
        if user is not None:
            os.chown(f"/new{path}", user, user)
    for path in dict.fromkeys((*SYSTEM, *job.visible)):  # some may lie below /tmp
        _show(path)
    os.mkdir("/new/dev")
    show_devices("/old/dev", "/new/dev", DEVICES)
    os.makedirs("/new/etc", exist_ok=True)
    write_text("/new/etc/passwd", f"sandbox:x:{_INSIDE_USER}:{_INSIDE_USER}::{WORK}:/bin/sh\n")
    write_text("/new/etc/group", f"sandbox:x:{_INSIDE_USER}:\n")
    os.mkdir("/new/proc")
    with contextlib.suppress(OSError):  # a container may forbid it; programs rarely need it
        linux.mount("proc", "/new/proc", "proc", linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC)
    os.symlink("/tmp", "/new/dev/shm")
    os.mkdir("/new/.old")
    linux.pivot_root("/new", "/new/.old")
    os.chdir("/")
    linux.detach("/.old")
    os.rmdir("/.old")
    linux.make_read_only("/", recursive=False)
    limit_kernel_objects("/proc")


def limit_kernel_objects(proc: str) -> None:
    """Forbid nested user namespaces, and limit the resources that the host counts by user."""
    for name, most in (("user_namespaces", 0), ("inotify_instances", 16), ("inotify_watches", 4096)):
        with contextlib.suppress(OSError):
            write_text(f"{proc}/sys/user/max_{name}", str(most))


def _show(path: str) -> None:
    """Show a folder or file of the host read-only; a link stays a link.

    A folder is an overlay, whose files have locks of their own: a bind mount would let a program lock the
    host's files, which needs no right to write. Where something is mounted below a folder, or its file system
    takes no overlay, it is a bind mount all the same.
    """
    source, target = f"/old{path}", f"/new{path}"
    if os.path.lexists(target) or not os.path.lexists(source):
        return
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.islink(source):
        os.symlink(os.readlink(source), target)
        return
    if os.path.isdir(source):
        os.mkdir(target)
        if _overlay(source, target):
            return
    else:
        write_text(target, "")
    linux.bind_read_only(source, target)


def _overlay(source: str, target: str) -> bool:
    """Show a folder by a read-only overlay; return whether that is possible."""
    with open("/old/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
        has_mounts = any(line.split()[4].startswith(f"{source}/") for line in mounts)
    if has_mounts or any(character in source for character in ":,\\"):
        return False
    os.makedirs("/empty", exist_ok=True)
    plain = linux.MS_NOSUID | linux.MS_NODEV | linux.MS_RDONLY
    try:
        linux.mount("overlay", target, "overlay", plain, f"lowerdir={source}:/empty,userxattr")
    except OSError:
        return False
    return True


def show_devices(source: str, target: str, names: Iterable[str]) -> None:
    """Show the devices ``names`` of one folder in another, and the program's own streams. Raises OSError."""
    for name in names:
        write_text(f"{target}/{name}", "")
        linux.mount(f"{source}/{name}", f"{target}/{name}", flags=linux.MS_BIND)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{target}/{name}")
    os.symlink("/proc/self/fd", f"{target}/fd")


def is_full(directory: str) -> bool:
    """Return whether a file system has no space left, or no room for another file."""
    disk = os.statvfs(directory)
    return disk.f_bavail == 0 or disk.f_favail == 0


def write_text(path: str, text: str) -> None:
    """Write a new file, or a file of the kernel."""
    with open(path, "w", encoding="utf-8") as target:
        target.write(text)


def start_forwarder(target: tuple[str, int]) -> tuple[int, socket.socket]:
    """Fork a forwarder to ``target``; return its process, and where to send the socket that it serves."""
    own, passed = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        try:
            linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.closerange(3, own.fileno())
            os.closerange(own.fileno() + 1, _DESCRIPTORS)
            _serve(own, target)
        finally:
            os._exit(0)
    own.close()
    return pid, passed


def _serve(channel: socket.socket, target: tuple[str, int]) -> None:
    _, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
    if not descriptors:
        return
    listener = socket.socket(fileno=descriptors[0])
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_relay, args=(client, target), daemon=True).start()


def _relay(client: socket.socket, target: tuple[str, int]) -> None:
    with client:
        try:
            server = socket.create_connection(target, _CONNECT_SECONDS)
        except OSError:
            return
        with server:
            server.settimeout(None)
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_pump, args=(server, client), daemon=True)
            back.start()
            _pump(client, server)
            back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while chunk := source.recv(_RELAY_CHUNK):
            target.sendall(chunk)
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)
