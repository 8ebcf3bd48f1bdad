"""Read the folder of a Harbor task: what it must hold, its image, and the digest of its content."""

from __future__ import annotations

import atexit
import hashlib
import os
import re
import stat
import tarfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from agentrl.atomic_folder import scratch_folder
from agentrl.documents.task_messages import BadTaskError
from agentrl.environments.harbor.dockerfile import Dockerfile, read_dockerfile
from agentrl.environments.harbor.task_toml import EnvironmentTable, TaskToml, read_task_toml
from agentrl.untrusted_folder import DEEPEST, discard, lies_in

TASK_FILE: Final = "task.toml"
_COMPOSE: Final = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
_LEFT_OUT: Final = frozenset({".git", "__pycache__", ".DS_Store"})
_CANARY: Final = re.compile(r"<!--.*canary.*-->|#.*canary.*", re.IGNORECASE)
_MOST_FILES: Final = 20_000
MOST_BYTES: Final = 1 << 30
_MOST_TEXT: Final = 1 << 20
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
        if (folder / name).exists():
            raise BadTaskError(
                f"{where}/{name} is for Docker Compose, and here a task is one container of a Dockerfile or"
                " a docker_image: run it with Harbor, or move what its services need there and delete it"
            )
    if table.docker_image is not None:
        return ImageOf(table, table.docker_image, None, None)
    if not (folder / "Dockerfile").is_file():
        raise BadTaskError(f"there is no {where}/Dockerfile, and task.toml names no docker_image")
    return ImageOf(table, None, folder, read_dockerfile(folder / "Dockerfile"))


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
