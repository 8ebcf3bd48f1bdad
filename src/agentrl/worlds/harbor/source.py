"""Find the Harbor tasks in a folder or a git bundle, and give them as the lines of a task file."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final, cast

from agentrl.base.untrusted_folder import HINT, BundleError, check_out, discard, lies_in
from agentrl.documents.task_file import Places, TaskSource, task_format
from agentrl.documents.task_json import BadTaskError
from agentrl.errors import TaskEnvironmentError, TaskFileError
from agentrl.worlds.harbor.folder import (
    MOST_BYTES,
    TASK_FILE,
    HarborTask,
    process_folder,
    read_task_folder,
)
from agentrl.worlds.harbor.machine import check_runnable

NAME: Final = "harbor"
_SYSTEM: Final = (
    "You work in a Linux container through the tool bash. Do what the task asks, and check your work: tests"
    " that you cannot see will run when you end. When it is done, write <answer>done</answer>."
)
_BUNDLE: Final = (b"# v2 git bundle", b"# v3 git bundle")
_MOST_FILES: Final = 200_000
"""Most files of a whole bundle. Its tasks together may have ``MOST_BYTES``, as one task may."""
_OLD_FORMAT: Final = "task.yaml"


def is_harbor(path: str | Path) -> bool:
    """Return whether ``path`` is the folder of a Harbor task or of several, or a git bundle."""
    place = Path(path)
    if place.is_dir():
        return any(_task_folders(place))
    try:
        with place.open("rb") as file:
            return file.read(len(_BUNDLE[0])) in _BUNDLE
    except OSError:
        return False


@task_format("harbor")
def open_if_harbor(text: str, wanted: str) -> TaskSource | None:
    """Return the tasks of a folder or a git bundle for any split; None if it holds none."""
    return open_harbor(text) if is_harbor(text) else None


def open_harbor(path: str | Path) -> TaskSource:
    """Return the tasks of a folder or a git bundle. One that cannot run here is a bad line with its name.

    Raises TaskFileError for a bundle that cannot be checked out or holds no task.
    """
    place = Path(path).resolve()
    folders = list(_task_folders(_unpacked(place)))
    if not folders:
        raise TaskFileError(f"{path} holds no folder with {TASK_FILE}", hint="see docs/harbor.md")
    file = tempfile.TemporaryFile()  # noqa: SIM115  TaskSource closes it
    places, root = Places(), _unpacked(place)
    for number, folder in enumerate(folders, 1):
        places.begin(number - 1, folder)
        value: dict[str, Any] = {}
        try:
            _require_inside(place, root, folder)
            value = _line(place, folder, root)
        except BadTaskError as error:
            places.bad[number] = BadTaskError(f"Harbor task {folder.name}: {error}")
        file.write(json.dumps(value).encode() + b"\n")
    file.seek(0)
    return TaskSource(place, cast("Any", file), places=places)


def open_task(meta: Mapping[str, Any]) -> HarborTask:
    """Return the task that a Task's ``meta`` names, as it was loaded. Raises TaskEnvironmentError."""
    named = meta.get(NAME)
    if not isinstance(named, Mapping):
        raise TaskEnvironmentError(
            f"the task has no meta.{NAME}", hint="load its folder: agentrl tasks load DIR"
        )
    source, inside = Path(str(named["source"])), Path(str(named["folder"]))
    try:
        if inside.is_absolute() or ".." in inside.parts:
            raise BadTaskError("it is not below its source")
        root = _unpacked(source)
        _require_inside(source, root, root / inside)
        task = _read(root / inside)
    except (BadTaskError, TaskFileError, OSError) as error:
        raise TaskEnvironmentError(
            f"Harbor task {named['folder']} of {source}: {error}",
            hint="every sampler needs the folder at the path from which it was loaded",
        ) from error
    if task.digest != named["digest"]:
        raise TaskEnvironmentError(
            f"the files of Harbor task {task.name} in {task.folder} have changed since it was loaded",
            hint="put them back, or load the folder into a new run",
        )
    return task


def _require_inside(source: Path, root: Path, folder: Path) -> None:
    """Raise BadTaskError for a link out of a bundle; links in a folder are the user's own."""
    if source != root and not lies_in(folder, root):
        raise BadTaskError("it is a link out of the bundle")


@cache
def _read(folder: Path) -> HarborTask:
    return read_task_folder(folder)


def _line(source: Path, folder: Path, root: Path) -> dict[str, Any]:
    """Return the fields of a task file. Raises BadTaskError for a task that does not run here."""
    if not (folder / TASK_FILE).is_file():
        if not (folder / _OLD_FORMAT).is_file():
            raise BadTaskError(f"{TASK_FILE} is not a file")
        raise BadTaskError(
            f"{_OLD_FORMAT} is the format of Terminal-Bench 1: convert it by `harbor tasks migrate`"
        )
    task = read_task_folder(folder)
    check_runnable(task)
    toml, table = task.toml, task.toml.environment
    labels = toml.metadata.get("tags") or []
    named = [toml.metadata.get(key) for key in ("category", "difficulty")]
    tags = [str(label) for label in (*(labels if isinstance(labels, list) else [labels]), *named) if label]
    described = {
        "source": str(source),
        "folder": folder.relative_to(root).as_posix(),
        "digest": task.digest,
        "agent_seconds": toml.agent.timeout_sec,
        "verifier_seconds": toml.verifier.timeout_sec,
        "cpus": table.cpus,
        "memory_mb": table.memory_mb or table.memory,
        "storage_mb": table.storage_mb or table.storage,
    }
    return {
        "id": task.name, "query": task.instruction, "system_prompt": _SYSTEM, "environment": NAME,
        **({"tags": tags} if tags else {}), NAME: described,
    }  # fmt: skip


def _task_folders(folder: Path) -> Iterator[Path]:
    """Yield the folder itself if it is a task, else those one and two levels below that are, by name."""
    if (folder / TASK_FILE).is_file():
        yield folder
        return
    for pattern in (f"*/{TASK_FILE}", f"*/*/{TASK_FILE}"):
        tasks = [*folder.glob(pattern), *folder.glob(pattern.replace(TASK_FILE, _OLD_FORMAT))]
        if tasks:
            yield from sorted({path.parent for path in tasks})
            return


def _unpacked(source: Path) -> Path:
    """Return a folder as it is, and of a git bundle the folder of its HEAD. Raises TaskFileError."""
    if source.is_dir():
        return source
    try:
        status = source.stat()
    except OSError as error:
        raise TaskFileError(
            f"{source} cannot be read: {error}", hint="give a folder or a git bundle"
        ) from error
    return _clone(source, status.st_mtime_ns, status.st_size)


@cache
def _clone(bundle: Path, _changed: int, _size: int) -> Path:
    target = Path(tempfile.mkdtemp(dir=process_folder()), bundle.stem)
    try:
        check_out(bundle, target, max_bytes=MOST_BYTES, max_files=_MOST_FILES)
    except BundleError as error:
        discard(target.parent)
        raise TaskFileError(f"the git bundle {bundle} cannot be checked out: {error}", hint=HINT) from error
    return target
