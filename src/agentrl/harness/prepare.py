"""Prepare a harness once per process: read its file, find its programs and what they need, build files."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agentrl.containers.base import CONTAINERS
from agentrl.errors import ConfigError
from agentrl.harness.config import TASK, HarnessConfig, ScoreCommand
from agentrl.harness.workspace import build_base, keep_until_exit

_ETC: Final = ("/etc/ssl", "/etc/ca-certificates", "/etc/hosts", "/etc/nsswitch.conf", "/etc/resolv.conf")
"""What clients of HTTP servers read."""
_prepared: dict[tuple[Path, int], Prepared] = {}
_lock = threading.Lock()
SYSTEM_PATH: Final = "/usr/local/bin:/usr/bin:/bin"
_SYSTEM: Final = ("/usr/", "/bin/", "/sbin/", "/lib")
_BINARY_FOLDERS: Final = ("bin", ".bin")
_LOOK_SECONDS: Final = 10.0
_DEEPEST: Final = 4
"""Length of a chain of interpreters: a script, its interpreter, the base of a virtual environment."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A harness that can be run."""

    config: HarnessConfig
    base: Path
    """The archive of its working directory."""
    path: tuple[str, ...]
    """The folders of its PATH, before the system's."""
    visible: tuple[str, ...]
    """The folders that it may read."""


def prepare(path: Path | None) -> Prepared:
    """Return the harness of a YAML file; a changed file is read again. Raises ConfigError."""
    if path is None:
        raise ConfigError(
            "the agent 'command' needs a description of its harness",
            hint="give --agent_cfg_path FILE.yml, or agent_cfg_path of the task",
        )
    config_file = path.resolve()
    with _lock:
        changed = config_file.stat().st_mtime_ns if config_file.exists() else 0
        key = (config_file, changed)
        if key not in _prepared:
            _prepared[key] = _prepare(HarnessConfig.read(path))
        return _prepared[key]


def _prepare(config: HarnessConfig) -> Prepared:
    in_container = config.in_container or config.isolation == TASK
    own, visible = ([], []) if in_container else _programs(config)
    if config.in_container:
        try:
            kind = CONTAINERS.get(config.isolation)
        except ConfigError as error:
            raise ConfigError(f"{config.source}: isolation: {error.message}", hint=error.hint) from error
        kind.check(config.container_spec(network=config.network), str(config.source))
    missing = [name for name in config.pass_environment if name not in os.environ]
    if missing:
        raise ConfigError(
            f"{config.source}: pass_environment names {missing[0]!r}, which is not set",
            hint=f"export {missing[0]}=…",
        )
    base = keep_until_exit() / "base.tar"
    build_base(config, base)
    unique = sorted({os.path.normpath(folder) for folder in visible})  # a folder before what it holds
    return Prepared(config, base, tuple(dict.fromkeys(own)), tuple(unique))


def _programs(config: HarnessConfig) -> tuple[list[str], list[str]]:
    """Return the folders of PATH, and those that the programs of the harness need. Raises ConfigError."""
    own = [folder for folder in config.path if os.path.isdir(folder)]
    search = os.pathsep.join([*own, os.environ.get("PATH", SYSTEM_PATH)])
    programs = [find_program(config.command, search, f"{config.source}: command")]
    if isinstance(config.score, ScoreCommand):
        where = f"{config.source}: score.command"
        programs.append(find_program(config.score.command, search, where))
    visible = [*_ETC, *config.visible]
    for program in filter(None, programs):
        own.append(os.path.dirname(program))
        visible += folders_of(program)
    for folder in config.path:
        visible += [folder] if os.path.isdir(folder) else []
    return own, visible


def arguments_of(command: str | Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of a command; text is a line for the shell."""
    return ("/bin/sh", "-c", command) if isinstance(command, str) else tuple(command)


def find_program(command: str | Sequence[str], path: str, where: str) -> str | None:
    """Return the program of a command; None for a word that the shell itself knows. Raises ConfigError."""
    name = _first_word(command, where)
    program = shutil.which(name, path=path)
    if program is not None:
        return os.path.abspath(program)
    if isinstance(command, str) and _shell_knows(name):
        return None
    raise ConfigError(
        f"{where}: there is no command {name!r}",
        hint=f"install it, or name its folder in 'path'; searched: {path}",
    )


def folders_of(program: str, depth: int = _DEEPEST) -> Iterator[str]:
    """Yield the folders that a program needs: its installation, and that of its interpreter."""
    for path in dict.fromkeys((program, os.path.realpath(program))):
        prefix = _prefix(path)
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
        words = list(command)
        if isinstance(command, str):
            reader = shlex.shlex(command, posix=True, punctuation_chars=True)
            reader.whitespace_split = True
            words = [word for word in reader if not set(word) <= set("();<>|&")]
    except ValueError as error:
        raise ConfigError(
            f"{where}: the command cannot be read as a shell line: {error}", hint="close its quotes"
        ) from error
    for word in words:
        if not (isinstance(command, str) and word.partition("=")[0].isidentifier() and "=" in word):
            return word
    raise ConfigError(f"{where}: the command is empty", hint="name a program")


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
