"""Read the folder of a Harbor task: what it must hold, its settings, its image, its digest.

Both spellings of the version are read: ``version = "1.0"`` and ``schema_version = "1.1"`` to ``"1.4"``. Other
keys are ignored, as Harbor ignores those that it does not know.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import os
import posixpath
import re
import shlex
import stat
import tarfile
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

from agentrl.base.atomic_folder import scratch_folder
from agentrl.base.untrusted_folder import DEEPEST, discard, lies_in
from agentrl.base.validation import (
    Count,
    PlainText,
    Positive,
    PositiveWhole,
    Text,
    check,
    read_settings,
    wrong,
)
from agentrl.documents.task_json import BadTaskError
from agentrl.errors import ConfigError, did_you_mean

VERSIONS: Final = ("1.0", "1.1", "1.2", "1.3", "1.4")
PUBLIC, NONE, ALLOWLIST = "public", "no-network", "allowlist"
Network = Literal["public", "no-network", "allowlist"]

_SIZE: Final = re.compile(r"([0-9]{1,12}(?:\.[0-9]{0,12})?)\s*([GMK])", re.IGNORECASE)
_MOST_DOTS: Final = 512
"""Most dots of a line: the TOML reader takes quadratic time for a key with many parts."""
_UNITS: Final = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}


def _megabytes(value: Any) -> Any:
    """Return a size such as ``2G`` or ``512M`` in megabytes; a number is one already."""
    if not isinstance(value, str):
        return value
    found = _SIZE.fullmatch(value.strip())
    if found is None:
        raise wrong("a size such as '2G' or '512M'")
    return max(1, math.floor(float(found[1]) * _UNITS[found[2].upper()]))


def _user(value: Any) -> Any:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _image_name(name: str) -> str:
    if name.startswith("-"):
        raise wrong("the name of an image")
    return name


def _variable(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise wrong("a variable named by letters, digits and _")
    return name


Variables = Mapping[Annotated[str, AfterValidator(_variable)], PlainText]
Megabytes = Annotated[int, BeforeValidator(_megabytes), Field(ge=1)]
User = Annotated[Text, BeforeValidator(_user)]
"""A name or a number."""


class _Section:
    """A table of ``task.toml``: keys that it does not declare are ignored."""

    __slots__ = ()
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="ignore")


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthCheck(_Section):
    """A command that must succeed before the agent begins; times are in seconds."""

    command: Text
    interval_sec: Positive = 5.0
    timeout_sec: Positive = 30.0
    start_period_sec: Annotated[float, AfterValidator(abs)] = 0.0
    """Failures in this time after the start do not count."""
    start_interval_sec: Positive = 5.0
    retries: PositiveWhole = 3

    @property
    def seconds(self) -> float:
        """Return the longest time that it takes."""
        return self.start_period_sec + (self.timeout_sec + self.interval_sec) * (self.retries + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentTable(_Section):
    """``[environment]``, and ``[verifier.environment]`` of a separate verifier."""

    docker_image: Annotated[Text, AfterValidator(_image_name)] | None = None
    os: str = "linux"
    cpus: Positive | None = None
    memory_mb: Megabytes | None = None
    memory: Megabytes | None = None
    """The old name of ``memory_mb``."""
    storage_mb: Megabytes | None = None
    storage: Megabytes | None = None
    gpus: Count | None = None
    tpu: Mapping[str, Any] | None = None
    mcp_servers: tuple[Mapping[str, Any], ...] = ()
    env: Variables = field(default_factory=dict)
    healthcheck: HealthCheck | None = None
    workdir: Text | None = None
    build_timeout_sec: Positive = 600.0
    network_mode: Network | None = None
    allow_internet: bool | None = None
    """The old form of ``network_mode``."""

    @property
    def network(self) -> str:
        """Return the network policy: ``public`` unless the table says otherwise."""
        return self.network_mode or (NONE if self.allow_internet is False else PUBLIC)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentTable(_Section):
    """``[agent]``."""

    timeout_sec: Positive | None = None
    user: User | None = None
    network_mode: Network | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Collect(_Section):
    """A command that runs in the agent's container before its artifacts are collected."""

    command: Text
    service: str = "main"
    timeout_sec: Positive = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierTable(_Section):
    """``[verifier]``."""

    timeout_sec: Positive = 600.0
    env: Variables = field(default_factory=dict)
    user: User | None = None
    network_mode: Network | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[Collect, ...] = ()

    @property
    def is_separate(self) -> bool:
        """Return whether the tests run in a container of their own."""
        return (self.environment_mode or ("separate" if self.environment else "shared")) == "separate"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package(_Section):
    """``[task]``."""

    name: Text


@dataclass(frozen=True, slots=True, kw_only=True)
class SolutionTable(_Section):
    """``[solution]``."""

    env: Variables = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Artifact(_Section):
    """A path of the agent's container that a separate verifier finds at the same place."""

    source: Text
    service: str | None = None


def _artifact(value: Any) -> Any:
    return {"source": value} if isinstance(value, str) else value


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskToml(_Section):
    """The file ``task.toml``."""

    schema_version: str = VERSIONS[-1]
    task: Package | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    agent: AgentTable = field(default_factory=AgentTable)
    verifier: VerifierTable = field(default_factory=VerifierTable)
    environment: EnvironmentTable = field(default_factory=EnvironmentTable)
    solution: SolutionTable = field(default_factory=SolutionTable)
    steps: tuple[Mapping[str, Any], ...] = ()
    artifacts: tuple[Annotated[Artifact, BeforeValidator(_artifact)], ...] = ()

    def network(self, phase: Literal["agent", "verifier"]) -> bool:
        """Return whether a phase reaches the network."""
        own = (self.agent if phase == "agent" else self.verifier).network_mode
        where = self.environment
        if phase == "verifier" and self.verifier.is_separate and self.verifier.environment is not None:
            where = self.verifier.environment
        return (own or where.network) == PUBLIC


def read_task_toml(text: str) -> TaskToml:
    """Return what ``task.toml`` says. Raises BadTaskError if it cannot be read or run."""
    if any(line.count(".") > _MOST_DOTS for line in text.splitlines()):
        raise BadTaskError(f"task.toml has a line with more than {_MOST_DOTS} dots")
    try:
        given = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # numbers of any length and arrays of any depth
        raise BadTaskError(f"task.toml is not TOML: {error}") from error
    version = given.setdefault("schema_version", given.pop("version", VERSIONS[-1]))
    if str(version) not in VERSIONS:
        raise BadTaskError(
            f"task.toml has the schema version {version!r}; this AgentRL reads {VERSIONS[0]} to"
            f" {VERSIONS[-1]}: install a newer AgentRL, or let Harbor write the task in one of these"
        )
    given["schema_version"] = str(version)
    found = check(TaskToml, given, lambda problem: BadTaskError(f"task.toml: {problem}"))
    for reason in _what_cannot_run(found):
        raise BadTaskError(f"task.toml{reason}")
    return found


def _what_cannot_run(found: TaskToml) -> Iterator[str]:
    """Yield what a task needs that no machine gives it here, with what to do."""
    verifier = found.verifier
    places = {"environment": found.environment}
    if verifier.environment is not None:
        places["verifier.environment"] = verifier.environment
    for name, place in places.items():
        if place.os.lower() != "linux":
            yield f": {name}.os is {place.os!r}; only linux runs here"
        if place.gpus or place.tpu:
            yield (
                f": {name} asks for accelerators, and containers here get none: remove gpus and tpu if the"
                " task runs without"
            )
        if place.mcp_servers:
            yield (
                f": {name}.mcp_servers are not started here: give them by --mcp_servers_file, and remove them"
                " from the task"
            )
    modes = {name: place.network for name, place in places.items()}
    for name, mode in {**modes, "agent": found.agent.network_mode, "verifier": verifier.network_mode}.items():
        if mode == ALLOWLIST:
            yield (
                f": {name}.network_mode is 'allowlist', and containers here reach all hosts or none: write"
                " 'public' or 'no-network'"
            )
    if found.steps:
        yield f": the task has {len(found.steps)} steps; only tasks of one step run here"
    if verifier.environment_mode == "shared" and verifier.environment is not None:
        yield (
            ": verifier.environment_mode is 'shared', and verifier.environment describes another container:"
            " remove one of them"
        )
    services = [*(hook.service for hook in verifier.collect), *(each.service for each in found.artifacts)]
    for service in services:
        if service not in (None, "main"):
            yield f" names the service {service!r}: a task has one container here"


_TEMPLATE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-(.*))?\}")


def filled(variables: Mapping[str, str], where: str, allowed: Mapping[str, str]) -> dict[str, str]:
    """Return variables with ``${NAME}`` and ``${NAME:-default}`` replaced from ``allowed``.

    Raises BadTaskError for a name that is not allowed and has no default.
    """
    values = {}
    for name, text in variables.items():
        found = _TEMPLATE.fullmatch(text)
        value = text if found is None else allowed.get(found[1], found[2])
        if value is None:
            other = did_you_mean(found[1], allowed) if found is not None and allowed else ""
            raise BadTaskError(
                f"task.toml: {where}.{name} is {text!r}, a variable of this machine that tasks may not read:"
                f" set it, and name it in --task_variables{f' ({other})' if other else ''}"
            )
        values[name] = value
    return values


_HARMLESS: Final = frozenset({"LABEL", "CMD", "ENTRYPOINT", "EXPOSE", "MAINTAINER", "STOPSIGNAL", "SHELL"})
"""Instructions that change no file: containers of tasks wait for commands, whatever their image starts."""


@dataclass(slots=True)
class Dockerfile:
    """What the last stage of a Dockerfile says."""

    base: str = ""
    workdir: str = "/"
    environment: dict[str, str] = field(default_factory=dict)
    user: str | None = None
    copies: list[tuple[tuple[str, ...], str]] = field(default_factory=list)
    """Paths beside the Dockerfile, and where they go: an absolute path, a folder if it ends in ``/``."""
    needs_build: str | None = None
    """The first instruction that only a builder of images can follow, with its line; None without one."""


def read_dockerfile(path: Path) -> Dockerfile:
    """Return what a Dockerfile says. Raises BadTaskError for one without ``FROM``."""
    found = Dockerfile()
    for line, word, rest in _instructions(path.read_text(encoding="utf-8", errors="replace")):
        if not _follow(found, word, rest):
            found.needs_build = found.needs_build or f"line {line}: {word} {rest[:60]}"
    if not found.base:
        raise BadTaskError(f"{path.parent.name}/Dockerfile has no FROM")
    return found


def _follow(found: Dockerfile, word: str, rest: str) -> bool:
    """Take one instruction; return whether it can be followed without a builder."""
    match word:
        case "FROM":
            is_first, found.workdir, found.user = not found.base, "/", None
            found.environment, found.copies = {}, []
            found.base = next(name for name in [*rest.split(), "scratch"] if not name.startswith("--"))
            return is_first
        case "WORKDIR":
            found.workdir = posixpath.normpath(posixpath.join(found.workdir, _unquoted(rest)))
        case "USER":
            found.user = rest
        case "ENV":
            found.environment |= _variables(rest)
        case "COPY" | "ADD":
            words = _words(rest)
            is_plain = len(words) >= 2 and not any(name.startswith("--") or "://" in name for name in words)
            if word == "ADD" or not is_plain:
                return False
            target = posixpath.join(found.workdir, words[-1])
            is_folder = len(words) > 2 or words[-1].endswith(("/", ".")) or target == "/"
            found.copies.append((tuple(words[:-1]), posixpath.normpath(target) + "/" * is_folder))
        case _:
            return word in _HARMLESS
    return "$" not in rest


def _instructions(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield the line, the instruction in capitals and the rest of each; comments are left out."""
    begun, parts = 0, list[str]()
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line.startswith("#"):
            continue
        begun = begun if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            word, _, rest = " ".join(parts).partition(" ")
            yield begun, word.upper(), rest.strip()
            parts = []


def _words(rest: str) -> list[str]:
    if rest.startswith("["):
        try:
            return [str(word) for word in json.loads(rest)]
        except (ValueError, RecursionError):
            return []
    return rest.split()


def _variables(rest: str) -> dict[str, str]:
    if re.match(r"[A-Za-z_][A-Za-z0-9_]*\s", rest):
        name, _, value = rest.partition(" ")
        return {name: _unquoted(value.strip())}
    try:
        pairs = [word.partition("=") for word in shlex.split(rest)]
    except ValueError:
        return {}
    return {name: value for name, _, value in pairs}


def _unquoted(text: str) -> str:
    return text[1:-1] if len(text) > 1 and text[0] == text[-1] and text[0] in "\"'" else text


TASK_FILE: Final = "task.toml"
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_BUILDS: Final[Mapping[Any, Any]] = {
    "context": (".", "./", "${CONTEXT_DIR}"), "dockerfile": ("Dockerfile", "./Dockerfile"),
}  # fmt: skip
"""What a compose file may say of the image of ``main``: it is that of the Dockerfile."""
_IDLE: Final = (
    "sleep infinity", ["sleep", "infinity"], ["tail", "-f", "/dev/null"],
    *([shell, "-c", "sleep infinity"] for shell in ("sh", "/bin/sh", "bash", "/bin/bash")),
)  # fmt: skip
_LEFT_OUT: Final = frozenset({".git", "__pycache__", ".DS_Store"})
_CANARY: Final = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_MOST_FILES: Final = 20_000
MOST_BYTES: Final = 1 << 30
_MOST_TEXT: Final = 1 << 20
_MOST_COMPOSE: Final = 1 << 16
_READ: Final = (
    TASK_FILE, "instruction.md", "trajectory.json", "tests", "tests/test.sh", "tests/Dockerfile",
    "environment", "environment/Dockerfile", "solution", "solution/solve.sh",
)  # fmt: skip
"""Files that are read on this machine; a link elsewhere is read in the container, if at all."""


@dataclass(frozen=True, slots=True)
class ImageOf:
    """Where the image of a container comes from: a name, or a folder with a Dockerfile."""

    table: EnvironmentTable
    image: str | None
    build: Path | None
    dockerfile: Dockerfile | None


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task whose files are complete and whose ``task.toml`` runs here."""

    folder: Path
    toml: TaskToml
    image: ImageOf
    verifier_image: ImageOf | None
    """The image of a separate verifier; None if the tests run in the agent's container."""
    tests_in_image: bool
    """Whether the verifier's image holds the tests, so that none are copied."""
    digest: str
    """Of all files of the folder: their paths, whether they may be executed, and their bytes."""

    @property
    def name(self) -> str:
        """Return the name of its package, else of its folder."""
        return self.folder.name if self.toml.task is None else self.toml.task.name

    @property
    def instruction(self) -> str:
        """Return what the agent reads, without the canary line of a benchmark."""
        lines = (self.folder / "instruction.md").read_text(encoding="utf-8").split("\n")
        while lines and (_CANARY.fullmatch(lines[0].strip()) or not lines[0].strip()):
            del lines[0]
        return "\n".join(lines).rstrip()

    @property
    def solution(self) -> Path | None:
        """Return the folder with ``solve.sh``; None without one."""
        return self.folder / "solution" if (self.folder / "solution" / "solve.sh").is_file() else None


def read_task_folder(folder: Path) -> HarborTask:
    """Return the task in ``folder``. Raises BadTaskError if it is incomplete or cannot run."""
    _require_own_files(folder)
    try:
        toml = read_task_toml((folder / TASK_FILE).read_text(encoding="utf-8"))
        instruction = folder / "instruction.md"
        if not instruction.is_file() or not instruction.read_text(encoding="utf-8").strip():
            raise BadTaskError("there is no instruction.md with text")
    except (OSError, UnicodeDecodeError) as error:
        raise BadTaskError(f"its text cannot be read: {error}") from error
    tests, environment = folder / "tests", folder / "environment"
    image = _image(toml.environment, environment, "environment")
    verifier_image, in_image = None, False
    if toml.verifier.is_separate:
        table = toml.verifier.environment or toml.environment
        own = toml.verifier.environment is not None and toml.verifier.environment.docker_image is not None
        in_image = own or (tests / "Dockerfile").is_file()
        if in_image:
            verifier_image = _image(table, tests, "tests")
        else:
            verifier_image = ImageOf(table, image.image, image.build, image.dockerfile)
    if not in_image and not (tests / "test.sh").is_file():
        raise BadTaskError("there is no tests/test.sh, which gives the reward")
    if (folder / "trajectory.json").exists():
        raise BadTaskError("it begins with the conversation in trajectory.json, which is not replayed here")
    try:
        digest = _digest(folder)
    except OSError as error:
        raise BadTaskError(f"its files cannot be read: {error}") from error
    return HarborTask(folder, toml, image, verifier_image, in_image, digest)


def _require_own_files(folder: Path) -> None:
    """Raise BadTaskError if a file that is read here links out of the task, or if a text is too long."""
    for name in _READ:
        path = folder / name
        if not lies_in(path, folder):
            raise BadTaskError(f"{name} is a link out of the task's folder")
        if name.endswith((TASK_FILE, ".md", "Dockerfile")) and path.is_file():
            size = path.stat().st_size
            if size > _MOST_TEXT:
                raise BadTaskError(f"{name} has {size:,} bytes, and the limit is {_MOST_TEXT:,}")


def _image(table: EnvironmentTable, folder: Path, where: str) -> ImageOf:
    for name in _COMPOSE:
        if (folder / name).is_file():
            _require_one_container(folder / name, f"{where}/{name}", table)
    if table.docker_image is not None:
        return ImageOf(table, table.docker_image, None, None)
    if not (folder / "Dockerfile").is_file():
        raise BadTaskError(f"there is no {where}/Dockerfile, and task.toml names no docker_image")
    return ImageOf(table, None, folder, read_dockerfile(folder / "Dockerfile"))


def _require_one_container(path: Path, named: str, table: EnvironmentTable) -> None:
    """Raise BadTaskError for a file of Docker Compose that starts more than the image of ``main``, idle.

    Values are compared and never shown: one may stand for more text than fits memory.
    """
    hint = "run it with Harbor, or move what its services need there and delete it"
    if not lies_in(path, path.parent) or path.stat().st_size > _MOST_COMPOSE:
        raise BadTaskError(f"{named} is a link out of its folder, or longer than {_MOST_COMPOSE:,} bytes")
    try:
        if "<<" in path.read_text(encoding="utf-8"):
            raise BadTaskError(f"{named} merges mappings (<<), which may stand for more than fits memory")
        content = read_settings(path, hint=hint).content
    except ConfigError as error:
        raise BadTaskError(f"{named}: {error.message}") from error
    except (OSError, ValueError, RecursionError, AttributeError, LookupError, TypeError) as error:
        # PyYAML lets through what its constructors raise, such as that of a date in month 13.
        raise BadTaskError(f"{named} cannot be read: {str(error)[:200]}") from error
    services = content.get("services") if isinstance(content, dict) else None
    main = services.get("main") if isinstance(services, dict) else None
    if not isinstance(services, dict) or not isinstance(main, dict):
        raise BadTaskError(f"{named} has no service main, which Harbor's agent works in")
    build = main["build"] if isinstance(main.get("build"), dict) else {"context": main.get("build", ".")}
    images = ("${MAIN_IMAGE_NAME}", main.get("image") if "build" in main else table.docker_image)
    known = {"build": (main.get("build"),), "command": _IDLE, "image": images}
    more = [f"the service {name}" for name in services if name != "main"]
    more += [str(key) for key in content if key not in ("services", "version", "name")]
    more += [f"main.{key}" for key, value in main.items() if value not in known.get(key, ())]
    more += [f"main.build.{key}" for key, value in build.items() if value not in _BUILDS.get(key, ())]
    if more:
        raise BadTaskError(
            f"{named} asks Docker Compose for {', '.join(each[:60] for each in more[:5])}, and here a task is"
            f" one container of a Dockerfile or a docker_image: {hint}"
        )


_lock = threading.Lock()


def process_folder() -> Path:
    """Return a folder for the archives of this process, which is deleted when it ends."""
    with _lock:
        return _process_folder()


@cache
def _process_folder() -> Path:
    folder = scratch_folder("harbor")
    atexit.register(discard, folder)
    return folder


def files_of(folder: Path) -> Iterator[tuple[str, Path, os.stat_result]]:
    """Yield each file and link of a folder by its relative path, in order; follow no links.

    Raises BadTaskError for more than ``DEEPEST`` levels of folders, and OSError for what cannot be listed.
    """
    for parent, folders, files in os.walk(folder, onerror=_raise):
        if parent.count(os.sep) - str(folder).count(os.sep) > DEEPEST:
            raise BadTaskError(f"it has more than {DEEPEST} levels of folders")
        folders[:] = sorted(set(folders) - _LEFT_OUT)
        linked = [name for name in folders if os.path.islink(os.path.join(parent, name))]
        for name in sorted([*files, *linked]):
            path = Path(parent, name)
            if name not in _LEFT_OUT and not name.endswith(".pyc"):
                yield path.relative_to(folder).as_posix(), path, path.lstat()


def _raise(error: OSError) -> None:
    raise error


def _digest(folder: Path) -> str:
    digest, count, size = hashlib.sha256(), 0, 0
    for name, path, status in files_of(folder):
        count, size = count + 1, size + status.st_size
        if count > _MOST_FILES or size > MOST_BYTES:
            raise BadTaskError(f"it holds more than {_MOST_FILES:,} files or {MOST_BYTES >> 20} MiB")
        if stat.S_ISLNK(status.st_mode):
            content = os.readlink(path).encode()
        elif stat.S_ISREG(status.st_mode):
            content = path.read_bytes()
        else:
            raise BadTaskError(f"{name} is neither a file nor a folder")
        kind = f"{name}\0{stat.S_IFMT(status.st_mode):o}{status.st_mode & 0o100:o}\0{len(content)}\0"
        digest.update(kind.encode("utf-8", "surrogateescape") + content)
    return digest.hexdigest()


def pack_folder(folder: Path, target: Path) -> None:
    """Write the files of a folder to an archive, by relative paths. Root owns them, and links stay links."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, path, _ in files_of(folder):
            archive.add(path, arcname=name, recursive=False, filter=_by_root)


def pack_copies(dockerfile: Dockerfile, context: Path, target: Path) -> None:
    """Write what the COPY lines of a Dockerfile add, by paths from the root. Raises BadTaskError."""
    with tarfile.open(target, "w", format=tarfile.GNU_FORMAT) as archive:
        for sources, where in dockerfile.copies:
            for path in _found(sources, context):
                if path.is_dir():
                    inside = [(name, each) for name, each, _ in files_of(path)]
                else:
                    inside = [(path.name if where.endswith("/") else "", path)]
                for name, each in inside:
                    arcname = os.path.join(where, name).strip("/")
                    archive.add(each, arcname=arcname, recursive=False, filter=_by_root)


def _found(sources: Sequence[str], context: Path) -> Iterator[Path]:
    for source in sources:
        pattern = os.path.normpath(source.lstrip("/"))
        try:
            paths = [context] if pattern == "." else sorted(context.glob(pattern))
        except ValueError as error:
            raise BadTaskError(f"the Dockerfile copies {source!r}: {error}") from error
        if not paths or not all(lies_in(path, context) for path in paths):
            raise BadTaskError(f"the Dockerfile copies {source!r}, which its folder does not hold")
        yield from paths


def _by_root(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = "root"
    return member
