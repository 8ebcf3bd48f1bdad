"""Run git on a repository that a test makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

_WHO = ("-c", "user.name=a", "-c", "user.email=a@b")


def git(folder: Path, *words: str, stdin: bytes | str = b"") -> str:
    """Run a command in ``folder``, and return what it prints."""
    sent = stdin.encode() if isinstance(stdin, str) else stdin
    command = ["git", "-C", str(folder), *_WHO, *words]
    return subprocess.run(command, input=sent, check=True, capture_output=True).stdout.decode().strip()
