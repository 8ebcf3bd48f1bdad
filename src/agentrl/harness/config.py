"""Read the YAML file that describes a harness: its command, working directory, limits and score."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final, Self

import yaml

from agentrl.documents.harness import Ending
from agentrl.errors import ConfigError
from agentrl.tools.sandbox.limits import SandboxLimits

Command = str | tuple[str, ...]

SCORES: Final = ("scorer", "exit_code", "reward")
ANSWERS: Final = ("message", "stdout")
ISOLATIONS: Final = ("auto", "namespaces", "limits", "docker")
_RESERVED: Final = "AGENTRL_"
_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessLimits(SandboxLimits):
    """What a harness may use."""

    seconds: float = 1800.0
    cpu_seconds: int = 1800
    memory_mb: int = 4096
    processes: int = 256
    disk_mb: int = 1024
    files: int = 65536
    open_files: int = 1024
    output_bytes: int = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCommand:
    """A command that scores the working directory, such as its tests."""

    command: Command
    restore: tuple[str, ...] = ()
    """Files and folders that are put back as they were, so that the harness cannot have changed them."""
    seconds: float = _SECONDS
    result: str = "exit_code"
    """``exit_code``: 1 if it is 0, else 0. ``stdout``: the number on the last line."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HarnessConfig:
    """The description of a harness. Folders and files are absolute."""

    source: Path
    command: Command
    template: Path | None = None
    bundle: Path | None = None
    ref: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    pass_environment: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    path: tuple[str, ...] = ()
    visible: tuple[str, ...] = ()
    isolation: str = "auto"
    image: str | None = None
    """The image of ``isolation: docker``."""
    network: str = "gateway"
    """``gateway``, ``host``, or a network of Docker."""
    limits: HarnessLimits = field(default_factory=HarnessLimits)
    score: str = "scorer"
    score_file: str | None = None
    score_command: ScoreCommand | None = None
    answer: str = "message"
    answer_file: str | None = None
    fail_on: frozenset[Ending] = frozenset(Ending) - {Ending.EXITED}
    train: str = "main"

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the harness of a YAML file. Raises ConfigError with the key, its value and the fix."""
        try:
            content = yaml.safe_load(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ConfigError(
                f"{path} cannot be read: {error.strerror}", hint="give the path of a harness's YAML file"
            ) from error
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} is not YAML: {error}", hint="see docs/harnesses.md") from error
        return cls(**_Reader(path.resolve()).read(content))


class _Reader:
    """Reads the keys of one file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, content: Any) -> dict[str, Any]:
        if not isinstance(content, Mapping):
            raise self.error("the file", content, "write keys, at least 'command'")
        self._known(content, _KEYS, "")
        if "command" not in content:
            raise ConfigError(
                f"{self._path}: 'command' is missing", hint="give the command line of the harness"
            )
        workspace = self._mapping(content, "workspace", ("template", "bundle", "ref"))
        if {"template", "bundle"} <= set(workspace):
            raise self.error("workspace", workspace, "give a template or a bundle, not both")
        for name in ("template", "bundle"):
            self._exists(workspace, name, is_folder=name == "template")
        values: dict[str, Any] = {
            "source": self._path,
            "command": self._command(content["command"], "command"),
            "template": self._file(workspace.get("template"), "workspace.template"),
            "bundle": self._file(workspace.get("bundle"), "workspace.bundle"),
            "ref": self._text(workspace, "ref", "workspace."),
            "environment": self._texts(content, "environment"),
            "pass_environment": self._list(content, "pass_environment"),
            "files": self._texts(content, "files"),
            "path": self._folders(content, "path"),
            "visible": self._folders(content, "visible"),
            **self._isolation(content),
            "limits": self._limits(content),
            "train": self._text(content, "train") or "main",
        }
        for name in (*values["environment"], *values["pass_environment"]):
            if not name.isidentifier() or name.startswith(_RESERVED):
                raise self.error("environment", name, f"name variables by letters, none with {_RESERVED}")
            if values["isolation"] == "docker" and name.startswith("DOCKER_"):
                raise self.error("environment", name, "give it another name: the client of Docker reads it")
        self._check_files(values["files"])
        return {**values, **self._score(content), **self._answer(content), **self._fail_on(content)}

    def error(self, key: str, value: Any, hint: str) -> ConfigError:
        return ConfigError(f"{self._path}: {key} is {ascii(value)[:200]}", hint=hint)

    def _known(self, content: Mapping[Any, Any], keys: Sequence[str], prefix: str) -> None:
        for key in content:
            if key not in keys:
                near = difflib.get_close_matches(str(key), keys, n=1)
                raise ConfigError(
                    f"{self._path}: unknown key {prefix + str(key)!r}",
                    hint=f"did you mean {near[0]!r}?" if near else f"choose one of {', '.join(keys)}",
                )

    def _mapping(self, content: Mapping[str, Any], key: str, keys: Sequence[str] | None) -> dict[str, Any]:
        value = content.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, value, "write keys below it")
        if keys is not None:
            self._known(value, keys, f"{key}.")
        return dict(value)

    def _texts(self, content: Mapping[str, Any], key: str) -> dict[str, str]:
        found = self._mapping(content, key, None)
        for name, value in found.items():
            if (
                not isinstance(name, str)
                or isinstance(value, (Mapping, list, type(None)))
                or "\0" in str(value)
            ):
                raise self.error(f"{key}.{name}", value, "give text")
        return {name: _plain_text(value) for name, value in found.items()}

    def _list(self, content: Mapping[str, Any], key: str) -> tuple[str, ...]:
        value = content.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.error(key, value, "give a list of texts")
        return tuple(value)

    def _text(self, content: Mapping[str, Any], key: str, prefix: str = "") -> str | None:
        value = content.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self.error(prefix + key, value, "give text")
        return value

    def _choice(self, content: Mapping[str, Any], key: str, known: Sequence[str], default: str) -> str:
        value = content.get(key, default)
        if value not in known:
            raise self.error(key, value, f"choose one of {', '.join(known)}")
        return str(value)

    def _command(self, value: Any, key: str) -> Command:
        if isinstance(value, str) and value.strip():
            return value
        if isinstance(value, list) and value and all(isinstance(word, str) for word in value):
            return tuple(value)
        raise self.error(key, value, "give a line for the shell, or a list of words")

    def _folders(self, content: Mapping[str, Any], key: str) -> tuple[str, ...]:
        """Return absolute paths; one with a variable that is not set is left out."""
        expanded = [os.path.expanduser(os.path.expandvars(item)) for item in self._list(content, key)]
        return tuple(str(self._path.parent / item) for item in expanded if "$" not in item)

    def _file(self, value: Any, key: str) -> Path | None:
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            raise self.error(key, value, "give a path")
        return self._path.parent / os.path.expanduser(value)

    def _exists(self, workspace: Mapping[str, Any], name: str, *, is_folder: bool) -> None:
        path = self._file(workspace.get(name), f"workspace.{name}")
        if path is not None and not (path.is_dir() if is_folder else path.is_file()):
            kind = "folder" if is_folder else "file"
            raise self.error(
                f"workspace.{name}", str(path), f"give an existing {kind}, relative to this file"
            )

    def _isolation(self, content: Mapping[str, Any]) -> dict[str, Any]:
        isolation = self._choice(content, "isolation", ISOLATIONS, "auto")
        image, is_docker = self._text(content, "image"), isolation == "docker"
        if is_docker != (image is not None):
            raise self.error("image", image, "name an image with isolation: docker, and only with it")
        if not is_docker:
            return {
                "isolation": isolation,
                "network": self._choice(content, "network", ("gateway", "host"), "gateway"),
            }
        for name in ("path", "visible"):
            if name in content:
                raise self.error(name, content[name], "put programs into the image")
        network = self._text(content, "network")
        if network in (None, "gateway", "none"):
            raise self.error(
                "network", network, "give host, or a network of Docker in which --gateway_url is reachable"
            )
        return {"isolation": isolation, "image": image, "network": network}

    def _limits(self, content: Mapping[str, Any]) -> HarnessLimits:
        names = [item.name for item in fields(HarnessLimits)]
        return HarnessLimits.of(self._mapping(content, "limits", names), f"{self._path}: limits")

    def _check_files(self, files: Mapping[str, str]) -> None:
        for name in files:
            if name.startswith("/") or ".." in Path(name).parts:
                raise self.error("files", name, "give a path below the working directory, or below ~/")

    def _score(self, content: Mapping[str, Any]) -> dict[str, Any]:
        value = content.get("score", "scorer")
        if isinstance(value, str):
            return {"score": self._choice(content, "score", SCORES, "scorer")}
        score = self._mapping(content, "score", ("file", "command", "restore", "seconds", "result"))
        if ("file" in score) == ("command" in score):
            raise self.error("score", value, f"give {', '.join(SCORES)}, {{file: …}} or {{command: …}}")
        if "file" in score:
            self._known(score, ("file",), "score.")
            return {"score": "file", "score_file": self._text(score, "file", "score.")}
        seconds = score.get("seconds", _SECONDS)
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or seconds <= 0:
            raise self.error("score.seconds", seconds, "give a number above 0")
        command = ScoreCommand(
            command=self._command(score["command"], "score.command"),
            restore=self._list(score, "restore"),
            seconds=float(seconds),
            result=self._choice(score, "result", ("exit_code", "stdout"), "exit_code"),
        )
        return {"score": "command", "score_command": command}

    def _answer(self, content: Mapping[str, Any]) -> dict[str, Any]:
        if isinstance(content.get("answer"), Mapping):
            answer = self._mapping(content, "answer", ("file",))
            if not answer:
                raise self.error("answer", answer, f"give {', '.join(ANSWERS)} or {{file: PATH}}")
            return {"answer": "file", "answer_file": self._text(answer, "file", "answer.")}
        return {"answer": self._choice(content, "answer", ANSWERS, "message")}

    def _fail_on(self, content: Mapping[str, Any]) -> dict[str, Any]:
        known = [ending.value for ending in Ending if ending is not Ending.EXITED]
        by_exit = {Ending.NONZERO_EXIT.value} if content.get("score") == "exit_code" else set()
        chosen = [name for name in known if name not in by_exit] if "fail_on" not in content else None
        for name in chosen or self._list(content, "fail_on"):
            if name not in known:
                raise self.error("fail_on", name, f"choose from {', '.join(known)}")
        return {"fail_on": frozenset(map(Ending, chosen or self._list(content, "fail_on")))}


def _plain_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_KEYS: Final = (
    "command", "workspace", "environment", "pass_environment", "files", "path", "visible", "isolation",
    "image", "network", "limits", "score", "answer", "fail_on", "train",
)  # fmt: skip
