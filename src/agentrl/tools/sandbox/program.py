"""Start the program itself: the last steps of a child process before it becomes the interpreter."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from dataclasses import dataclass, field
from typing import Any, Final

from agentrl.tools.sandbox import landlock, linux, seccomp

MAIN = "main.py"
SYSTEM: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/localtime",
)  # fmt: skip
"""What every program may read."""
_DESCRIPTORS: Final = 256
"""Above the descriptors of a launcher, which has about ten."""
DEVICES: Final = ("full", "null", "random", "urandom", "zero")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run, as the launcher reads it from its standard input.

    With ``command`` it is any program instead of ``code``: it may open sockets and send signals, its address
    space is not limited, and its files are kept when it exceeds a limit too.
    """

    code: str
    stdin: str
    python: str
    """The interpreter."""
    visible: tuple[str, ...]
    """Folders that the program may read."""
    directory: str
    """The private folder of the session on the host."""
    namespaces: bool
    keep_files: bool
    """Keep the files of the program's directory for the next program of the session."""
    limits: dict[str, Any]
    command: tuple[str, ...] = ()
    """The program and its arguments, instead of ``code``."""
    cwd: str = "."
    """Where the command runs, relative to the program's directory."""
    environment: dict[str, str] = field(default_factory=dict)
    """Further variables of the command."""
    network: str = "none"
    """``none``, ``host`` (a command's only), or ``gateway``: loopback, whose port leads to ``gateway``."""
    gateway: tuple[str, int] | None = None
    """The address outside; the port is the same inside."""
    shown_bytes: int | None = None
    """Bytes to return of each output: its begin and its end. None returns all up to the limit."""

    @property
    def mebibytes(self) -> int:
        """Return the memory limit in MiB."""
        return int(self.limits["memory_mb"])


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The descriptors of the program."""

    stdin: int
    stdout: int
    stderr: int


def become(job: Job, directory: str, streams: Streams, user: int | None) -> None:
    """Turn this process into the program. Raises OSError if that fails.

    ``user`` is the user id to take, if there is one. The program inherits no variable, no capability and no
    descriptor but its three streams: all others are closed on exec.
    """
    os.setsid()
    for target, source in enumerate((streams.stdin, streams.stdout, streams.stderr)):
        os.dup2(source, target)
    for descriptor in range(3, _DESCRIPTORS):
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a file that grows too large is an OSError
    os.umask(0o077)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    os.chdir(os.path.join(directory, job.cwd))
    _limit(job, user)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if job.namespaces or user is not None:
        linux.drop_capabilities()
    if not job.namespaces:
        landlock.restrict(
            readable=(*SYSTEM, *job.visible, "/proc" if job.command else "/proc/self"),
            devices=[f"/dev/{name}" for name in DEVICES],
            writable=directory,
            network=bool(job.command),
        )
    seccomp.install(namespaces=job.namespaces or bool(job.command))
    environment = {
        "HOME": directory, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": directory, "USER": "sandbox",
    }  # fmt: skip
    if job.command:
        os.execvpe(job.command[0], job.command, {**environment, **job.environment})
    os.execve(job.python, [job.python, "-s", os.path.join(directory, MAIN)], environment)


def write_main(job: Job, directory: str, user: int | None) -> None:
    """Write the program into its directory; what has that name is replaced, and a link is not followed."""
    if job.command:
        return
    path = os.path.join(directory, MAIN)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        target.write(job.code.encode("utf-8", "surrogatepass"))
    if user is not None:
        os.chown(path, user, user)


def _limit(job: Job, user: int | None) -> None:
    limits = job.limits
    memory = job.mebibytes << 20
    processes = int(limits["processes"])
    if not job.namespaces and user is None:
        processes += _processes_of_user()  # the limit counts all processes of the user there
    bounds = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(limits["cpu_seconds"]),
        resource.RLIMIT_FSIZE: int(limits["disk_mb"]) << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if job.command:
        del bounds[resource.RLIMIT_AS]  # interpreters such as Node reserve far more than they use
    os.nice(5)
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        soft = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        margin = int(kind == resource.RLIMIT_CPU)  # a soft limit of its own makes the signal SIGXCPU
        resource.setrlimit(kind, (soft, soft + margin if hard == resource.RLIM_INFINITY else soft))


def _processes_of_user() -> int:
    """Return the number of threads of this process's user."""
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:  # it has ended
            continue
    return count
