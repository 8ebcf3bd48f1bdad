"""Read the YAML file of a harness, find its programs and what they need, build its working directory."""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Tag, ValidationInfo

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.untrusted_folder import DEEPEST, HINT, BundleError, BundleTooLargeError, check_out, discard
from agentrl.base.validation import (
    BesideFile,
    PlainText,
    Positive,
    PositiveWhole,
    SettingsModel,
    Text,
    read_settings,
    wrong,
)
from agentrl.documents.record import Ending
from agentrl.errors import ConfigError
from agentrl.worlds.archives import write_beginning
from agentrl.worlds.containers.container import CONTAINERS, ContainerSpec
from agentrl.worlds.sandbox.local import SandboxLimits
from agentrl.worlds.sandbox.namespaces import WORK

_RESERVED: Final = "AGENTRL_"
CONTAINER_USER: Final = "1000:1000"
_SPARE_SECONDS: Final = 1800.0
"""Time that a container outlives its command, for copies."""


def _command(value: Any) -> str | tuple[str, ...]:
    if isinstance(value, str) and value.strip():
        return value
    if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
        return tuple(value)
    raise wrong("a line for the shell, or a list of words")


def _variable(name: str) -> str:
    if not name.isidentifier() or name.startswith(_RESERVED):
        raise wrong(f"named by letters, none with {_RESERVED}")
    return name


def _below(name: str) -> str:
    if name.startswith("/") or ".." in Path(name).parts:
        raise wrong("named by a path below the working directory, or below ~/")
    return name


def _failing(ending: Ending) -> Ending:
    if ending is Ending.EXITED:
        raise wrong("a failure")
    return ending


def _folders(paths: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """Return absolute paths; leave out a path with a variable that is not set."""
    expanded = [os.path.expanduser(os.path.expandvars(path)) for path in paths]
    return tuple(str((info.context or Path()) / path) for path in expanded if "$" not in path)


def _network(name: str) -> str:
    if name == "none":
        raise wrong("a network in which the gateway is reachable")
    return name


def _pattern(text: str) -> str:
    try:
        matches_nothing = re.search(text, "") is not None
    except re.error as error:
        raise wrong(f"a regular expression of Python: {error}") from error
    if matches_nothing:
        raise wrong("a regular expression that does not match the empty text")
    return text


def _shape(value: Any) -> str | None:
    """Return the tag of a word, or of a mapping with exactly one of ``file`` and ``command``."""
    if isinstance(value, str):
        return "<word>"
    named = [name for name in ("file", "command") if isinstance(value, dict) and name in value]
    return f"<{named[0]}>" if len(named) == 1 else None


def _one_of(expected: str) -> Discriminator:
    return Discriminator(
        _shape, custom_error_type="wrong_value", custom_error_message="wrong",
        custom_error_context={"expected": expected},
    )  # fmt: skip


TASK: Final = "task"
"""``isolation`` of a harness that runs in the container of its task."""
Command = Annotated[str | tuple[str, ...], BeforeValidator(_command)]
Variable = Annotated[str, AfterValidator(_variable)]
Pattern = Annotated[Text, AfterValidator(_pattern)]
Below = Annotated[str, AfterValidator(_below)]
Folders = Annotated[tuple[Text, ...], AfterValidator(_folders)]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessLimits(SandboxLimits):
    """What a harness may use."""

    seconds: Positive = 1800.0
    cpu_seconds: PositiveWhole = 1800
    memory_mb: PositiveWhole = 4096
    processes: PositiveWhole = 256
    disk_mb: PositiveWhole = 1024
    files: PositiveWhole = 65536
    open_files: PositiveWhole = 1024
    output_bytes: PositiveWhole = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace(SettingsModel):
    """What the working directory begins with: the files of a folder, or of a commit in a Git bundle."""

    template: BesideFile | None = None
    bundle: BesideFile | None = None
    ref: Text | None = None

    def __post_init__(self) -> None:
        if self.template is not None and self.bundle is not None:
            raise wrong("a template or a bundle, not both")
        if self.template is not None and not self.template.is_dir():
            raise wrong("an existing folder, relative to this file", "template")
        if self.bundle is not None and not self.bundle.is_file():
            raise wrong("an existing file, relative to this file", "bundle")


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessFile(SettingsModel):
    """A file that the harness writes into the working directory."""

    file: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCommand(SettingsModel):
    """A command that scores the working directory, such as its tests."""

    command: Command
    restore: tuple[Text, ...] = ()
    """Files and folders that are put back as they were, so that the harness cannot have changed them."""
    seconds: Positive = 120.0
    result: Literal["exit_code", "stdout"] = "exit_code"
    """``exit_code``: 1 if it is 0, else 0. ``stdout``: the number on the last line."""


Score = Annotated[
    Annotated[Literal["scorer", "exit_code", "reward"], Tag("<word>")]
    | Annotated[HarnessFile, Tag("<file>")]
    | Annotated[ScoreCommand, Tag("<command>")],
    _one_of("scorer, exit_code, reward, {file: PATH} or {command: …}"),
]
Answer = Annotated[
    Annotated[Literal["message", "stdout"], Tag("<word>")] | Annotated[HarnessFile, Tag("<file>")],
    _one_of("message, stdout or {file: PATH}"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessConfig(SettingsModel):
    """The description of a harness. Folders and files are absolute."""

    command: Command
    workspace: Workspace = field(default_factory=Workspace)
    environment: Mapping[Variable, PlainText] = field(default_factory=dict)
    pass_environment: tuple[Variable, ...] = ()
    files: Mapping[Below, PlainText] = field(default_factory=dict)
    path: Folders = ()
    visible: Folders = ()
    isolation: Text = "auto"
    """``auto``, ``namespaces``, ``limits``, the name of a container back end, or ``task``: the container that
    a Harbor task brings."""
    image: Text | None = None
    rootfs: BesideFile | None = None
    container: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the container back end."""
    network: Annotated[Text, AfterValidator(_network)] = "gateway"
    """``gateway``, ``host``, or another one that the container back end knows."""
    limits: HarnessLimits = field(default_factory=HarnessLimits)
    score: Score = "scorer"
    answer: Answer = "message"
    fail_on: frozenset[Annotated[Ending, AfterValidator(_failing)]] | None = None
    """Endings that fail the attempt; None: those ``failing``, and each bad one without a model call."""
    train: Text = "main"
    volatile: tuple[Pattern, ...] = ()
    """Regular expressions of text that may differ when the program starts again under another sampler."""
    source: Path
    """The file itself."""

    def __post_init__(self) -> None:
        if self.in_container or self.isolation == TASK:
            for name in ("path", "visible"):
                if getattr(self, name):
                    raise wrong("left out with a container: put programs into the image", name)
        if self.isolation == TASK:
            if self.workspace != Workspace():
                raise wrong("left out with isolation: task, which has the task's files", "workspace")
            if self.score != "scorer":
                raise wrong("scorer with isolation: task, whose tests give the score", "score")
            if isinstance(self.answer, HarnessFile):
                raise wrong("message or stdout with isolation: task", "answer")
        if self.in_container:
            return
        for name in ("image", "rootfs", "container"):
            if getattr(self, name):
                raise wrong(f"left out with isolation: {self.isolation}, which starts no container", name)
        if self.network not in ("gateway", "host"):
            raise wrong("gateway or host", "network")

    @property
    def in_container(self) -> bool:
        """Return whether commands run in containers of their own."""
        return self.isolation not in ("auto", "namespaces", "limits", TASK)

    def container_spec(self, *, network: str, gateway: tuple[str, int] | None = None) -> ContainerSpec:
        """Return what the container of one command is made of."""
        limits = self.limits
        return ContainerSpec(
            name="harness", image=self.image, rootfs=None if self.rootfs is None else str(self.rootfs),
            user=CONTAINER_USER, writable=(WORK, "/tmp", "/var/tmp"), network=network, gateway=gateway,
            memory_mb=limits.memory_mb, storage_mb=limits.disk_mb, files=limits.files,
            processes=limits.processes, open_files=limits.open_files, cpu_seconds=limits.cpu_seconds,
            seconds=limits.seconds + _SPARE_SECONDS, options=self.container,
        )  # fmt: skip

    @property
    def failing(self) -> frozenset[Ending]:
        """Return the endings that fail the attempt: by default all bad ones that leave nothing to score.

        A model that can end its harness could otherwise avoid the 0 of an exit code or of tests.
        """
        if self.fail_on is not None:
            return self.fail_on
        if isinstance(self.score, ScoreCommand) or self.isolation == TASK:
            return frozenset({Ending.NO_CALLS})
        scored = {Ending.NONZERO_EXIT, Ending.KILLED} if self.score == "exit_code" else set()
        return frozenset(Ending) - {Ending.EXITED, *scored}

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the harness of a YAML file. Raises ConfigError with the key, its value and the fix."""
        file = read_settings(path.resolve(), hint="docs/harnesses.md lists the keys of a harness's YAML file")
        return file.check(cls, file.content, source=file.path)


def build_base(config: HarnessConfig, target: Path) -> None:
    """Write the archive that every trajectory begins with. Raises ConfigError."""
    with _source(config) as source:
        write_beginning(target, source)
    size, most = target.stat().st_size, config.limits.disk_mb
    if size > most << 20:
        raise ConfigError(
            f"{config.source}: the working directory has {size >> 20} MiB, above limits.disk_mb {most}",
            hint="raise limits.disk_mb",
        )


@contextmanager
def _source(config: HarnessConfig) -> Iterator[Path | None]:
    """Yield the folder that the working directory is copied from; None for an empty one."""
    limits, workspace = config.limits, config.workspace
    if workspace.bundle is None:
        yield workspace.template
        return
    folder = scratch_folder("bundle")
    try:
        clone = folder / "clone"
        check_out(
            workspace.bundle, clone, ref=workspace.ref, max_bytes=limits.disk_mb << 20, max_files=limits.files
        )
        yield clone
    except BundleTooLargeError as error:
        raise ConfigError(
            f"{config.source}: workspace.bundle {workspace.bundle} holds more than limits.disk_mb"
            f" {limits.disk_mb} or limits.files {limits.files}, or {DEEPEST} levels of folders",
            hint="raise the limit, if you trust the bundle",
        ) from error
    except BundleError as error:
        raise ConfigError(
            f"{config.source}: workspace.bundle {workspace.bundle} with ref {workspace.ref!r} cannot be"
            f" checked out: {error}",
            hint=f"{HINT}, and name one of its branches as ref",
        ) from error
    finally:
        discard(folder)


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
    folder = scratch_folder("harness")
    atexit.register(discard, folder)
    base = folder / "base.tar"
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
