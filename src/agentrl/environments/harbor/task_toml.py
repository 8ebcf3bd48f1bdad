"""Define what ``task.toml`` of a Harbor task may say, and which of it runs here.

Both spellings of the version are read: ``version = "1.0"`` and ``schema_version = "1.1"`` to ``"1.4"``. Other
keys are ignored, as Harbor ignores those that it does not know.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AfterValidator, BeforeValidator, ConfigDict, ValidationError

from agentrl.documents.task_messages import BadTaskError
from agentrl.errors import did_you_mean
from agentrl.validation import Count, PlainText, Positive, PositiveWhole, Text, problems_of, validate, wrong

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


def _at_least_one(number: int) -> int:
    if number < 1:
        raise wrong("at least 1")
    return number


def _image(name: str) -> str:
    if name.startswith("-"):
        raise wrong("the name of an image")
    return name


def _variable(name: str) -> str:
    if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise wrong("a variable named by letters, digits and _")
    return name


Variables = Mapping[Annotated[str, AfterValidator(_variable)], PlainText]
Megabytes = Annotated[int, BeforeValidator(_megabytes), AfterValidator(_at_least_one)]
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

    docker_image: Annotated[Text, AfterValidator(_image)] | None = None
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
    try:
        found = validate(TaskToml, given)
    except ValidationError as error:
        problem = problems_of(error, given)[0]
        raise BadTaskError(
            f"task.toml: {problem.text}" + (f" ({problem.hint})" if problem.hint else "")
        ) from error
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
