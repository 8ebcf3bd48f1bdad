"""Make a small root file system of this machine's own programs, for containers of the sandbox."""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.worlds.containers.container import Container, Execution
from agentrl.worlds.sandbox.local import namespace_problem

PROGRAMS = (
    "sh", "bash", "cat", "chmod", "cp", "dd", "echo", "env", "grep", "head", "hostname", "id", "kill", "ln",
    "ls", "mkdir", "mv", "rm", "sed", "sleep", "sort", "stat", "tail", "tar", "test", "touch", "true", "wc",
    "yes", "tr", "truncate", "seq", "readlink", "find",
)  # fmt: skip


def rootfs_problem() -> str | None:
    """Return why no container can run here; None if one can."""
    return namespace_problem()


async def sh(box: Container, line: str, **options: Any) -> Execution:
    """Run a shell line in a container."""
    return await box.run(["/bin/sh", "-c", line], **{"seconds": 20, **options})


def make_rootfs(folder: Path, *more: str) -> Path:
    """Write a root file system with ``PROGRAMS`` and ``more``, and with the libraries that they need."""
    for name in ("bin", "etc", "tmp", "root", "usr"):
        (folder / name).mkdir(parents=True)
    (folder / "usr/bin").symlink_to("/bin")
    (folder / "dev").mkdir()
    (folder / "dev/null").touch()  # of stand-ins, which have no devices
    (folder / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    )
    for name in (*PROGRAMS, *more):
        program = shutil.which(name, path="/usr/bin:/bin")
        if program is not None:
            shutil.copy(program, folder / "bin" / name)
            _copy_libraries(program, folder)
    return folder


def _copy_libraries(program: str, folder: Path) -> None:
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=20, check=False).stdout
    for library in re.findall(r"(/\S+) \(0x", listed):
        target = folder / library[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            shutil.copy(library, target)


@cache
def rootfs_with_python() -> Path:
    """Return a root file system that also has the system's Python, Git and what scripts of tests call."""
    folder = Path(tempfile.mkdtemp(prefix="rootfs-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make_rootfs(folder / "root", "python3", "git", "setsid", "mkfifo", "cmp", "basename", "dirname", "nohup")
    for library in Path("/usr/lib").glob("python3.*"):
        # With what Python has compiled: it starts in a fifth of the time.
        unwanted = shutil.ignore_patterns("test", "idlelib", "lib2to3", "config-*", "dist-packages")
        shutil.copytree(library, folder / "root" / str(library)[1:], symlinks=True, ignore=unwanted)
    return folder / "root"
