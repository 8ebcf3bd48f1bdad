"""Find the program of a command line, and the folders that it needs in a sandbox."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from agentrl.errors import ConfigError

SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM: Final = ("/usr/", "/bin/", "/sbin/", "/lib")
_BINARY_FOLDERS: Final = ("bin", ".bin")
_LOOK_SECONDS: Final = 10.0
_DEEPEST: Final = 4
"""Length of a chain of interpreters: a script, its interpreter, the base of a virtual environment."""


def search_path(folders: Sequence[str]) -> str:
    """Return the PATH of a harness: ``folders``, then the system's."""
    return os.pathsep.join([*folders, SYSTEM_PATH])


def arguments_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a command; text is a line for the shell."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)


def find_program(command: str | Sequence[str], path: str, where: str) -> str | None:
    """Return the program of a command; None for a word that the shell itself knows. Raises ConfigError."""
    name = _first_word(command, where)
    found = shutil.which(name, path=path)
    if found is not None:
        return os.path.abspath(found)
    if isinstance(command, str) and _shell_knows(name):
        return None
    raise ConfigError(
        f"{where}: there is no command {name!r}",
        hint=f"install it, or name its folder in 'path'; searched: {path}",
    )


def folders_of(program: str, depth: int = _DEEPEST) -> Iterator[str]:
    """Yield the folders that a program needs: its installation, and that of its interpreter."""
    for place in dict.fromkeys((program, os.path.realpath(program))):
        prefix = _prefix(place)
        if not f"{prefix}/".startswith(_SYSTEM):
            yield prefix
        home = _home_of_environment(prefix)
        if home is not None and depth:
            yield from folders_of(home, depth - 1)
    interpreter = _interpreter(program)
    if interpreter is not None and depth:
        yield from folders_of(interpreter, depth - 1)


def _first_word(command: str | Sequence[str], where: str) -> str:
    try:
        words = _words(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(
            f"{where}: the command cannot be read as a shell line: {error}", hint="close its quotes"
        ) from error
    for word in words:
        if not (isinstance(command, str) and word.partition("=")[0].isidentifier() and "=" in word):
            return word
    raise ConfigError(f"{where}: the command is empty", hint="name a program")


def _words(line: str) -> list[str]:
    """Return the words of a shell line, without brackets and operators."""
    reader = shlex.shlex(line, posix=True, punctuation_chars=True)
    reader.whitespace_split = True
    return [word for word in reader if not set(word) <= set("();<>|&")]


def _shell_knows(name: str) -> bool:
    """Return whether a word is a keyword or a command of the shell itself."""
    done = subprocess.run(
        ["/bin/sh", "-c", 'command -v -- "$1"', "sh", name],
        capture_output=True, timeout=_LOOK_SECONDS, check=False, env={"PATH": "/nowhere"},
    )  # fmt: skip
    return done.returncode == 0 or name in ("{", "!")


def _prefix(program: str) -> str:
    folder = os.path.dirname(program)
    return os.path.dirname(folder) if os.path.basename(folder) in _BINARY_FOLDERS else folder


def _home_of_environment(prefix: str) -> str | None:
    """Return the interpreter below a Python virtual environment; None if ``prefix`` is none."""
    try:
        lines = Path(prefix, "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    homes = [
        value.strip() for key, _, value in (line.partition("=") for line in lines) if key.strip() == "home"
    ]
    return os.path.join(homes[0], "python3") if homes else None


def _interpreter(program: str) -> str | None:
    """Return the interpreter in the first line of a script; None for a binary."""
    try:
        with open(program, "rb") as source:
            line = source.readline(1024)
    except OSError:
        return None
    words = line[2:].decode("utf-8", "replace").split() if line.startswith(b"#!") else []
    if words and os.path.basename(words[0]) == "env":
        names = [word for word in words[1:] if not word.startswith("-")]
        return shutil.which(names[0]) if names else None
    return words[0] if words else None
