"""Start the program itself, keep its files, and run it with limits alone where there are no namespaces."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import tarfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn

from agentrl.base.untrusted_folder import DEEPEST, TooDeepError, discard, entries_of
from agentrl.worlds.sandbox import linux, seccomp

MAIN = "main.py"
SYSTEM: Final = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/alternatives", "/etc/ld.so.cache",
    "/etc/localtime",
)  # fmt: skip
"""What every program may read."""
DESCRIPTORS: Final = 256
"""Above the descriptors of a launcher, which has about ten."""
DEVICES: Final = ("full", "null", "random", "urandom", "zero")
_FIRST_USER: Final = 2_000_000_000
_NOBODY: Final = 65534
_KILL_SECONDS: Final = 5.0


@dataclass(frozen=True, kw_only=True)
class Job:
    """One program to run, as the launcher reads it from its standard input.

    With ``command`` it is any program instead of ``code``: it may open sockets and send signals, its address
    space is not limited, and its files are kept when it exceeds a limit too.
    """

    limits: dict[str, Any]
    directory: str
    """The private folder of the session on the host."""
    namespaces: bool
    code: str = ""
    stdin: str = ""
    python: str = ""
    """The interpreter."""
    visible: tuple[str, ...] = ()
    """Folders that the program may read."""
    keep_files: bool = False
    """Keep the files of the program's directory for the next program of the session."""
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
    stdin_encoding: str = "utf-8"
    holds: bool = False
    """Start a container over the root file system in ``directory``, and hold it (``rootfs``)."""
    user: str = "0"
    """Of a program in a container: a name, or ``UID[:GID]``."""
    is_privileged: bool = True
    """Whether root keeps capabilities in its container."""
    copies: tuple[str, ...] = ()
    """Instead of a program: ``in`` or ``out``, and a folder there; the archive is ``directory``."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """The descriptors of the program."""

    stdin: int
    stdout: int
    stderr: int

    def close(self) -> None:
        """Close them in this process, after the program has them."""
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.close(descriptor)


def become(job: Job, directory: str, streams: Streams, user: int | None) -> None:
    """Turn this process into the program. Raises OSError if that fails.

    ``user`` is the user id to take, if there is one. The program inherits no variable, no capability and no
    descriptor but its three streams: all others are closed on exec.
    """
    os.setsid()
    for target, source in enumerate((streams.stdin, streams.stdout, streams.stderr)):
        os.dup2(source, target)
    for descriptor in range(3, DESCRIPTORS):
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
    processes = int(job.limits["processes"])
    if not job.namespaces and user is None:
        processes += _processes_of_user()  # the limit counts all processes of the user there
    limit_resources(job, processes)
    linux.prctl(linux.PR_SET_NO_NEW_PRIVS, 1)
    if job.namespaces or user is not None:
        linux.keep_capabilities(())
    if not job.namespaces:
        linux.restrict_paths(
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


def limit_resources(job: Job, processes: int) -> None:
    """Set the limits of this process, and of each that it starts."""
    limits = job.limits
    memory = int(limits["memory_mb"]) << 20
    bounds = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: int(limits["cpu_seconds"] or resource.RLIM_INFINITY),
        resource.RLIMIT_FSIZE: int(limits["disk_mb"]) << 20,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_NOFILE: int(limits["open_files"]),
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_SIGPENDING: 256,
    }
    if job.command or job.copies:
        del bounds[resource.RLIMIT_AS]  # interpreters such as Node reserve far more than they use
    os.nice(5)
    for kind, bound in bounds.items():
        _, hard = resource.getrlimit(kind)
        soft = bound if hard == resource.RLIM_INFINITY else min(bound, hard)
        ceiling = soft
        if kind == resource.RLIMIT_CPU and bound > 0 and hard == resource.RLIM_INFINITY:
            # At the soft limit the kernel sends SIGXCPU, which names the reason, at the hard one SIGKILL.
            ceiling = soft + 1
        resource.setrlimit(kind, (soft, ceiling))


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


def extract(descriptor: int, directory: str) -> None:
    """Extract an archive that ``save`` or this package wrote; nothing outside ``directory`` is changed.

    Raises tarfile.ExtractError for what would be written elsewhere.
    """
    with os.fdopen(descriptor, "rb") as source, tarfile.open(fileobj=source) as archive:
        archive.extraction_filter = lambda member, _: member
        # Not by the filter: early releases of Python 3.11 call none.
        archive.extractall(directory, _inside(archive, os.path.realpath(directory)), numeric_owner=True)


def _inside(archive: tarfile.TarFile, root: str) -> Iterator[tarfile.TarInfo]:
    """Yield each member when those before it have been extracted: they may have made links.

    Links may lead anywhere, as the program's own do, but nothing is written through them. A file or folder
    takes the place of a link with its name, but for a link to a folder inside.
    """

    def leads_away(path: str) -> bool:
        return os.path.commonpath((root, os.path.realpath(path))) != root

    for member in archive:
        member.name = os.path.normpath(member.name)
        path = os.path.join(root, member.name)
        # A hard link counts as the file itself, whose mode and content would change.
        linked = [os.path.join(root, member.linkname)] if member.islnk() else []
        for place in (os.path.dirname(path), *linked):
            if leads_away(place):
                raise tarfile.ExtractError(f"{member.name!r} would change {os.path.realpath(place)}")
        if os.path.islink(path) and not (member.isdir() and os.path.isdir(path) and not leads_away(path)):
            os.unlink(path)
        yield member


def save(descriptor: int, directory: str, job: Job) -> bool:
    """Archive the program's directory; return False if it is too large or deep, or cannot be read."""
    limit = int(job.limits["disk_mb"]) << 20
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * limit + (4 << 20), resource.RLIM_INFINITY))
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with os.fdopen(descriptor, "wb") as target:
            with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as archive:
                archive.add(directory, arcname=".", filter=_not_too_deep)
            target.flush()
    except (OSError, ValueError, tarfile.TarError, RecursionError):
        return False
    return True


def _not_too_deep(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if member.name.count("/") > DEEPEST:
        raise TooDeepError(f"the program's directory has more than {DEEPEST} levels of folders")
    return plain(member)


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Keep folders, files and links; drop pipes and sockets."""
    return member if member.isdir() or member.isreg() or member.issym() or member.islnk() else None


def guarded(status: int, steps: Callable[[], None]) -> NoReturn:
    """Run the steps of a forked child, which never returns: report an error and exit."""
    try:
        steps()
    except BaseException as error:  # noqa: BLE001  the child must not return into its parent's code
        with contextlib.suppress(OSError):
            write_report(status, {"error": f"{type(error).__name__}: {error}"})
    finally:
        os._exit(1)


def write_report(status: int, report: dict[str, Any]) -> None:
    """Write how a program ended to the pipe of its supervisor."""
    os.write(status, json.dumps(report).encode() + b"\n")


def read_report(status: int) -> dict[str, Any]:
    """Return the first report on a pipe that the program's end closes; empty without one."""
    with os.fdopen(status, "rb") as reader:
        report: dict[str, Any] = json.loads(reader.readline() or b"{}")
    return report


class PlainRun:
    """The program as a child of this process, which adopts the processes that it leaves behind."""

    def __init__(self, job: Job, streams: Streams) -> None:
        self._job = job
        self._directory = os.path.join(job.directory, "work")
        user = _unused_user() if os.geteuid() == 0 else None
        os.makedirs(self._directory, mode=0o700, exist_ok=True)
        before = os.path.join(job.directory, "files.tar")
        if job.command and os.path.exists(before):
            extract(os.open(before, os.O_RDONLY), self._directory)
        if user is not None:
            os.chmod(job.directory, 0o711)  # the program may pass, and change nothing: archives lie here
            _give(self._directory, user)
        write_main(job, self._directory, user)
        self._status, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            guarded(write, lambda: become(job, self._directory, streams, user))
        os.close(write)
        self._descriptor = os.pidfd_open(self.pid)

    @property
    def waits_on(self) -> int:
        """Return the descriptor that becomes readable at the end."""
        return self._descriptor

    def processes(self) -> Iterator[int]:
        """Yield what counts towards the memory."""
        return descendants(self.pid)

    def over_files(self) -> bool:
        """Return whether the directory has too many files, too large ones, or too many levels of folders."""
        count = size = 0
        try:
            for _, _, status in entries_of(self._directory, unlock=os.geteuid() != 0):
                count, size = count + 1, size + status.st_blocks * 512
        except TooDeepError:
            return True
        except OSError:  # it has locked a folder again; the next look counts
            return False
        limits = self._job.limits
        return count > int(limits["files"]) or size > int(limits["disk_mb"]) << 20

    def end(self, *, keep_files: bool) -> dict[str, Any]:
        """Kill the program and all that it started; return its exit code."""
        status: int | None = None
        deadline = time.monotonic() + _KILL_SECONDS
        while time.monotonic() < deadline:
            for pid in descendants(os.getpid()):
                if pid != os.getpid():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            try:
                pid, code = os.waitpid(-1, 0)
            except ChildProcessError:
                break
            if pid == self.pid:
                status = os.waitstatus_to_exitcode(code)
        if report := read_report(self._status):
            return report
        kept = not self._job.command or (keep_files and self._save())
        return {"status": -int(signal.SIGKILL) if status is None else status, "kept": kept}

    def _save(self) -> bool:
        after = os.path.join(self._job.directory, "files.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        kept = save(os.open(after, flags, 0o600), self._directory, self._job)
        discard(self._directory)
        return kept


def memory_of(pid: int) -> int:
    """Return the anonymous and shared memory of a process, in bytes."""
    pages = 0
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith(("RssAnon:", "RssShmem:")):
                pages += int(line.split()[1])
    return pages << 10


def descendants(pid: int) -> Iterator[int]:
    """Yield a process and all that descend from it."""
    yield pid
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as children:
                for child in children.read().split():
                    yield from descendants(int(child))


def _unused_user() -> int:
    """Return a user id that owns nothing and runs nothing else, if this container has one."""
    user = _FIRST_USER + os.getpid()
    with open("/proc/self/uid_map") as mapped:
        ranges = [(int(line.split()[0]), int(line.split()[2])) for line in mapped]
    return user if any(first <= user < first + count for first, count in ranges) else _NOBODY


def _give(directory: str, user: int) -> None:
    """Make ``user`` the owner of the directory and of what an earlier program left in it.

    What has more levels of folders than a program may make is deleted.
    """
    try:
        for folder, name, _ in entries_of(directory):
            os.chown(name, user, user, dir_fd=folder, follow_symlinks=False)
    except TooDeepError:
        discard(directory)
        os.mkdir(directory, mode=0o700)
    os.chown(directory, user, user)
