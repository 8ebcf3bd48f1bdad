"""Make a small root file system of this machine's own programs, for containers of the sandbox."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from agentrl.tools.sandbox.local import namespace_problem

PROGRAMS = (
    *(
        "sh",
        "bash",
        "cat",
        "chmod",
        "cp",
        "dd",
        "echo",
        "env",
        "grep",
        "head",
        "hostname",
        "id",
        "kill",
        "ln",
    ),
    *(
        "ls",
        "mkdir",
        "mv",
        "rm",
        "sed",
        "sleep",
        "sort",
        "stat",
        "tail",
        "tar",
        "test",
        "touch",
        "true",
        "wc",
    ),
)


def rootfs_problem() -> str | None:
    """Return why no container can run here; None if one can."""
    return namespace_problem()


def make_rootfs(folder: Path, *more: str) -> Path:
    """Write a root file system with ``PROGRAMS`` and ``more``, and with the libraries that they need."""
    for name in ("bin", "etc", "tmp", "root", "usr"):
        (folder / name).mkdir(parents=True)
    (folder / "usr/bin").symlink_to("/bin")
    (folder / "etc/passwd").write_text(
        "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n"
    )
    for name in (*PROGRAMS, *more):
        program = shutil.which(name)
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
