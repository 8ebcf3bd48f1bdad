"""A stand-in for Docker's client: containers are copies of a folder, commands run in them by ``unshare``."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from pathlib import Path

PROGRAM = """#!/bin/sh
exec {python} -I -S {here} {folder} {rootfs} "$@"
"""
_WITHOUT_VALUE = ("--interactive", "--read-only", "--force", "--volumes", "--all", "--quiet")


def install(folder: Path, rootfs: Path) -> Path:
    """Write the program ``docker`` into a folder for PATH; return where its containers and calls are."""
    state = folder / "state"
    state.mkdir(parents=True)
    program = folder / "docker"
    here = Path(__file__).resolve()
    program.write_text(PROGRAM.format(python=sys.executable, here=here, folder=state, rootfs=rootfs))
    program.chmod(0o755)
    return state


def inside(root: Path, workdir: str, command: list[str]) -> list[str]:
    """Return the command line that runs a command with another root, as root, on this machine."""
    return ["unshare", "--map-root-user", f"--root={root}", f"--wd={workdir}", *command]


def kill_inside(root: Path) -> None:
    """Kill the processes that run with this root."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/root") == str(root.resolve()):
                os.kill(int(pid), signal.SIGKILL)


def _split(words: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return flags with their values, and the other words."""
    flags = []
    while words and words[0].startswith("-"):
        flag = words.pop(0)
        flags.append((flag, words.pop(0) if flag not in _WITHOUT_VALUE else ""))
    return flags, words


def main() -> None:
    """Do one command of Docker's."""
    state, rootfs, command, *words = sys.argv[1:]
    with open(f"{state}/calls", "a") as calls:
        print(command, *words, file=calls)
    if os.path.exists(f"{state}/away"):
        sys.exit("Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is it running?")
    flags, words = _split(words)
    options = dict(flags)
    if command == "ps":
        print(*(path.name for path in Path(state).iterdir() if path.is_dir()), sep="\n")
    elif command == "inspect":
        print(f"false {str(os.path.isdir(f'{state}/{words[0]}')).lower()}")
    elif command == "rm":
        for name in words:
            if os.path.isdir(f"{state}/{name}"):
                kill_inside(Path(state, name, "root"))
                shutil.rmtree(f"{state}/{name}", ignore_errors=True)
    elif command == "run":
        folder = Path(state, options["--name"])
        folder.mkdir()
        shutil.copytree(rootfs, folder / "root", symlinks=True)
        line = inside(folder / "root", "/", [options["--entrypoint"], *words[1:]])
        os.execvpe(line[0], line, {"PATH": os.environ["PATH"]})
    elif command == "exec":
        folder = Path(state, words[0])
        if not folder.is_dir():
            sys.exit(f"Error response from daemon: No such container: {words[0]}")
        given = [value for flag, value in flags if flag == "--env"]
        own = {name: value or os.environ[name] for name, _, value in (one.partition("=") for one in given)}
        line = inside(folder / "root", options.get("--workdir", "/"), words[1:])
        os.execvpe(line[0], line, {"PATH": "/usr/bin:/bin", "HOME": "/root", **own})


if __name__ == "__main__":
    main()
