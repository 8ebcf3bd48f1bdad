"""Choose the container of a Harbor task on this machine, and refuse a task that it cannot run."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from agentrl.documents.task_json import BadTaskError
from agentrl.environments.environment import container_flags
from agentrl.errors import ConfigError
from agentrl.worlds.containers.container import CONTAINERS, Container, ContainerSpec
from agentrl.worlds.harbor.folder import (
    HarborTask,
    ImageOf,
    filled,
    pack_copies,
    pack_folder,
    process_folder,
    read_dockerfile,
)

_SPARE_SECONDS: Final = 600.0
"""Time that a container outlives the limits of its task, for copies and starts."""
_NO_LIMIT_SECONDS: Final = 24 * 3600.0
"""Longest life of a container whose task limits no agent; the trajectory has a limit of its own."""
_ANSWER_SECONDS: Final = 20.0
_MEMORY_MB, _STORAGE_MB = 4096, 10240
"""Of a task that names none."""


def secrets() -> tuple[str, ...]:
    """Return the values of ``--task_variables``, which are not stored."""
    return tuple(value for value in container_flags().variables.values() if value)


def variables(given: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the variables of a table of ``task.toml``. Raises BadTaskError for one that may not be read."""
    return filled(given, where, container_flags().variables)


def back_end(task: HarborTask, image: ImageOf, *, is_verifier: bool = False) -> Container:
    """Return the container of a task, not yet started. Raises BadTaskError without a root file system.

    The agent and a shared verifier have the same one. ``is_verifier``: that of a separate verifier.
    """
    name, root = _root(task, image)
    if name == "sandbox" and root is None:
        raise BadTaskError(
            f"--containers is sandbox, and --rootfs names no root file system for {_named(task, image)}"
        )
    instruction = None if image.dockerfile is None else image.dockerfile.needs_build
    if instruction is not None and needs_copies(task, image):
        raise BadTaskError(
            f"its image must be built ({instruction}): build it where Docker is, `docker export` a container"
            f" of it, and give --rootfs {task.name}=FILE.tar"
        )
    return CONTAINERS.get(name)(_spec(task, image, root, is_verifier=is_verifier))


def check_runnable(task: HarborTask) -> None:
    """Raise BadTaskError unless this machine can run the containers of a task."""
    if task.verifier_image is None and task.toml.network("agent") != task.toml.network("verifier"):
        raise BadTaskError(
            "task.toml: agent and verifier share a container and differ in network_mode: write"
            ' verifier.environment_mode = "separate"'
        )
    variables(task.toml.verifier.env, "verifier.env")
    require_network(task)
    _check_image(task, task.image)
    if task.verifier_image is not None:
        _check_image(task, task.verifier_image, is_verifier=True)


def require_network(task: HarborTask) -> None:
    """Raise BadTaskError if a task asks for a network and the flags do not say which one it gets."""
    own_image = (task.verifier_image or task.image, True)
    for image, is_verifier in ((task.image, False), own_image):
        is_public = task.toml.network("verifier" if is_verifier else "agent")
        if is_public and container_flags().task_network is None and _root(task, image)[0] == "sandbox":
            raise BadTaskError(
                "it asks for a network (network_mode is 'public', also by default), and the sandbox has none"
                " but this machine's, with all that listens on it: give --task_network none or host, or use"
                " Docker"
            )


def _check_image(task: HarborTask, image: ImageOf, *, is_verifier: bool = False) -> None:
    """Raise BadTaskError unless a container of ``image`` can run here. Docker's images are not pulled yet."""
    problem = _docker_problem() if _root(task, image)[0] == "docker" else None
    if problem is not None:
        raise BadTaskError(
            f"it needs Docker, and {problem}: start it, or give a root file system of its image, --rootfs"
            f" {_named(task, image)}=FILE.tar"
        )
    container = back_end(task, image, is_verifier=is_verifier)
    if container.spec.rootfs is not None:
        try:
            container.check(container.spec, f"task {task.name}")
        except ConfigError as error:
            raise BadTaskError(f"{error.message} ({error.hint})") from error


@cache
def _docker_problem() -> str | None:
    """Return why there is no Docker here; None if a daemon answers."""
    command = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_ANSWER_SECONDS, check=False)
    except FileNotFoundError:
        return "there is no command 'docker'"
    except subprocess.TimeoutExpired:
        return f"its daemon does not answer within {_ANSWER_SECONDS:g} s"
    return None if done.returncode == 0 else "no daemon answers"


def needs_copies(task: HarborTask, image: ImageOf) -> bool:
    """Return whether the root is that of the Dockerfile's base, so that its COPY lines must be followed."""
    name, root = _root(task, image)
    return (
        name == "sandbox"
        and root is not None
        and image.build is not None
        and task.name not in container_flags().roots
    )


@cache
def archive_of(folder: Path, _digest: str) -> Path:
    """Return the archive of a folder of the task with this digest."""
    target = Path(tempfile.mkdtemp(dir=process_folder()), "files.tar")
    pack_folder(folder, target)
    return target


@cache
def copies_of(build: Path, _digest: str) -> Path:
    """Return the archive of what the Dockerfile in ``build`` copies, for the task with this digest."""
    target = Path(tempfile.mkdtemp(dir=process_folder()), "copies.tar")
    pack_copies(read_dockerfile(build / "Dockerfile"), build, target)
    return target


def _root(task: HarborTask, image: ImageOf) -> tuple[str, str | None]:
    """Return the back end of a task's image, and its root file system."""
    roots = container_flags().roots
    base = image.image or (image.dockerfile.base if image.dockerfile is not None else "")
    root = roots.get(task.name) or roots.get(base) or roots.get("")
    chosen = container_flags().containers
    if chosen == "auto":
        return ("docker", None) if root is None else ("sandbox", root)
    return chosen, root


def _network(task: HarborTask, image: ImageOf) -> str:
    """Return the network of a container that asks for one: never this machine's unless a flag says so."""
    own = {"docker": "bridge", "sandbox": "none"}
    return container_flags().task_network or own.get(_root(task, image)[0], "host")


def _named(task: HarborTask, image: ImageOf) -> str:
    can_use_base = image.dockerfile is not None and image.dockerfile.needs_build is None
    return (image.dockerfile.base if can_use_base and image.dockerfile else image.image) or task.name


def _spec(task: HarborTask, image: ImageOf, root: str | None, *, is_verifier: bool) -> ContainerSpec:
    toml, table, dockerfile = task.toml, image.table, image.dockerfile
    own = {} if root is None or dockerfile is None else dockerfile.environment
    agent = _NO_LIMIT_SECONDS if toml.agent.timeout_sec is None else toml.agent.timeout_sec
    check = 0.0 if table.healthcheck is None else table.healthcheck.seconds
    return ContainerSpec(
        name="harbor",
        image=image.image,
        build=None if image.build is None else str(image.build),
        rootfs=root,
        environment={**own, **variables(table.env, "environment.env")},
        workdir=table.workdir or (None if dockerfile is None else dockerfile.workdir),
        user=None if root is None or dockerfile is None else dockerfile.user,
        network=_network(task, image) if toml.network("verifier" if is_verifier else "agent") else "none",
        cpus=table.cpus,
        seconds=_SPARE_SECONDS + check + toml.verifier.timeout_sec + (0 if is_verifier else agent),
        memory_mb=table.memory_mb or table.memory or _MEMORY_MB,
        storage_mb=table.storage_mb or table.storage or _STORAGE_MB,
    )
