"""Build the root of a container: an overlay in memory over its files, devices, processes and names."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import stat

from agentrl.worlds.sandbox import linux
from agentrl.worlds.sandbox.namespaces import limit_kernel_objects, show_devices, write_text
from agentrl.worlds.sandbox.program import DEVICES, Job

_ROOT = "/tmp/root"
_PLAIN = linux.MS_NOSUID | linux.MS_NODEV


def build_root(job: Job) -> None:
    """Make the overlay, or a copy where the kernel permits none, and show devices, processes and names."""
    linux.mount("none", "/", flags=linux.MS_REC | linux.MS_PRIVATE)
    lower = os.open(job.directory, os.O_PATH)  # whose path root inside may not enter
    become_user(0, 0)
    _mount_files(job, lower)
    for name in ("dev", "proc", "tmp", "var/tmp", "root"):
        os.makedirs(f"{_ROOT}/{name}", exist_ok=True)
    for name in ("tmp", "var/tmp"):
        os.chmod(f"{_ROOT}/{name}", 0o1777)
    _mount_devices()
    _mount_processes()
    _names(job)
    os.mkdir(f"{_ROOT}/.old", 0o700)
    linux.pivot_root(_ROOT, f"{_ROOT}/.old")
    os.chdir("/")
    linux.detach("/.old")
    os.rmdir("/.old")


def _mount_files(job: Job, lower: int) -> None:
    """Mount the files of the descriptor ``lower`` at ``_ROOT``; what is written is kept in memory."""
    linux.mount("tmpfs", "/tmp", "tmpfs", _PLAIN, "size=1m,mode=755")
    for name in ("lower", "files", "root"):
        os.mkdir(f"/tmp/{name}")
    linux.mount(f"/proc/self/fd/{lower}", "/tmp/lower", flags=linux.MS_BIND)
    limits = f"size={job.limits['disk_mb']}m,nr_inodes={job.limits['files']},mode=755"
    linux.mount("tmpfs", "/tmp/files", "tmpfs", _PLAIN, limits)
    os.mkdir("/tmp/files/upper")
    os.mkdir("/tmp/files/work")
    options = "lowerdir=/tmp/lower,upperdir=/tmp/files/upper,workdir=/tmp/files/work,userxattr"
    try:
        linux.mount("overlay", _ROOT, "overlay", _PLAIN, options)
    except OSError:
        _copy_tree("/tmp/lower", "/tmp/files/upper")
        linux.mount("/tmp/files/upper", _ROOT, flags=linux.MS_BIND)


def _mount_devices() -> None:
    dev = f"{_ROOT}/dev"
    linux.mount("tmpfs", dev, "tmpfs", _PLAIN, "size=64m,nr_inodes=4096,mode=755")
    devices = [name for name in (*DEVICES, "tty") if os.path.exists(f"/dev/{name}")]
    show_devices("/dev", dev, devices)
    os.mkdir(f"{dev}/shm")
    os.chmod(f"{dev}/shm", 0o1777)
    os.mkdir(f"{dev}/pts")
    with contextlib.suppress(OSError):  # terminals; a container may forbid them
        options = "newinstance,ptmxmode=0666,mode=0620"
        linux.mount("devpts", f"{dev}/pts", "devpts", linux.MS_NOSUID | linux.MS_NOEXEC, options)
        os.symlink("pts/ptmx", f"{dev}/ptmx")


def _mount_processes() -> None:
    proc = f"{_ROOT}/proc"
    with contextlib.suppress(OSError):  # a container may forbid it; programs rarely need it
        linux.mount("proc", proc, "proc", _PLAIN | linux.MS_NOEXEC)
        limit_kernel_objects(proc)
    for name in ("sys", "sysrq-trigger", "irq", "bus", "fs"):  # root inside may be root outside all the same
        with contextlib.suppress(OSError):
            linux.bind_read_only(f"{proc}/{name}", f"{proc}/{name}")


def _names(job: Job) -> None:
    """Write the files by which programs find hosts, those of the host's network with it."""
    resolvers = ""
    if job.network == "host":
        with contextlib.suppress(OSError), open("/etc/resolv.conf", encoding="utf-8") as source:
            resolvers = source.read()
    os.makedirs(f"{_ROOT}/etc", exist_ok=True)
    for name, text in (
        ("resolv.conf", resolvers),
        ("hosts", "127.0.0.1 localhost container\n::1 localhost\n"),
        ("hostname", "container\n"),
    ):
        path = f"{_ROOT}/etc/{name}"
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # it may be a link
        write_text(path, text)
    linux.set_hostname("container")


def _copy_tree(source: str, target: str) -> None:
    """Copy folders, files and links with owners and modes; no devices, pipes and sockets."""

    def skipped(folder: str, names: list[str]) -> list[str]:
        kinds = ((name, os.lstat(os.path.join(folder, name)).st_mode) for name in names)
        return [
            name
            for name, mode in kinds
            if not (stat.S_ISDIR(mode) or stat.S_ISREG(mode) or stat.S_ISLNK(mode))
        ]

    shutil.copytree(source, target, symlinks=True, ignore=skipped, dirs_exist_ok=True)
    for folder, folders, files in os.walk(source):
        for name in (*folders, *files):
            path = os.path.join(folder, name)
            copied = target + path[len(source) :]
            status = os.lstat(path)
            if (status.st_uid or status.st_gid) and os.path.lexists(copied):
                os.lchown(copied, status.st_uid, status.st_gid)
                if not stat.S_ISLNK(status.st_mode):
                    os.chmod(copied, stat.S_IMODE(status.st_mode))


def become_user(user: int, group: int) -> None:
    """Take a user and a group of the namespace; root instead of one that the host has not lent it.

    A change of the user clears the signal at the parent's death, so it is set again.
    """
    users = _mapped("uid")
    with contextlib.suppress(PermissionError):  # where the only user is the sampler's
        os.setgroups([])
    group = group if group < users else 0
    user = user if user < users else 0
    os.setresgid(group, group, group)
    os.setresuid(user, user, user)
    linux.prctl(linux.PR_SET_PDEATHSIG, signal.SIGKILL)


def _mapped(kind: str) -> int:
    with open(f"/proc/self/{kind}_map", encoding="utf-8") as lines:
        return int(lines.read().split()[2])
