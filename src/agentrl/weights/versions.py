"""Name, write and prune the folders of policy versions."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from agentrl.atomic_folder import discard_folder, finish_folder
from agentrl.documents.run import FileChecksum, PolicyVersion
from agentrl.documents.status import VersionStatus
from agentrl.weights.manifest import checksums, write_manifest
from agentrl.weights.model_folder import (
    SavableModel,
    begin_model_folder,
    explain_write_errors,
    save_model_files,
    weight_bytes,
)

_FOLDER = re.compile(r"v(\d+)(-\d+)?")


def version_folder(root: Path, version: int, attempt: int | None = None) -> Path:
    """Return the folder of a version: ``root/v000007``, or ``root/v000007-3`` for trainer attempt 3."""
    return root / (f"v{version:06d}" + ("" if attempt is None else f"-{attempt}"))


def free_folder(root: Path, version: int, attempt: int, *, is_contested: bool) -> Path:
    """Return a folder for ``version`` that no other trainer writes or has written.

    ``is_contested``: another trainer has reserved the number and may still write its folder.
    """
    plain = version_folder(root, version)
    return version_folder(root, version, attempt) if is_contested or plain.exists() else plain


def write_temporary(
    model: SavableModel,
    base: Path,
    target: Path,
    chat_template: str | None = None,
    written: Path | None = None,
) -> tuple[Path, tuple[FileChecksum, ...]]:
    """Write weights, config and tokenizer into a temporary folder beside ``target``.

    ``written`` is a folder that holds these weights already: its files are linked. Raises PublishError, and
    deletes the temporary folder, if a write fails.
    """
    needed = weight_bytes(model)
    with explain_write_errors(target, needed), contextlib.ExitStack() as on_error:
        temporary = begin_model_folder(target, needed)
        on_error.callback(discard_folder, temporary)
        save_model_files(model, base, temporary, chat_template, written)
        files = checksums(temporary)
        on_error.pop_all()
    return temporary, files


def place_version(temporary: Path, target: Path, version: int, files: Sequence[FileChecksum]) -> str:
    """Write the manifest of ``version`` into ``temporary`` and rename it to ``target``; return its path."""
    with explain_write_errors(target, sum(file.bytes for file in files)):
        write_manifest(temporary, version=version, files=files)
        finish_folder(temporary, target)
    return str(target.resolve())


def version_folders(root: Path) -> dict[str, int]:
    """Return {folder name: version} for the version folders in ``root``."""
    if not root.is_dir():
        return {}
    found = ((path.name, _FOLDER.fullmatch(path.name)) for path in root.iterdir())
    return {name: int(match[1]) for name, match in found if match is not None}


def kept_versions(folders: Iterable[int], in_use: Collection[int], *, keep: int) -> set[int]:
    """Return the versions to keep on disk: the newest ``keep`` (at least two) and those in use."""
    return set(sorted(set(folders))[-max(keep, 2) :]) | set(in_use)


def surplus_folders(
    folders: dict[str, int], known: Iterable[PolicyVersion], kept: Collection[int], newest: int
) -> tuple[list[str], list[int]]:
    """Return the names of the folders to delete, and the versions that lose their folder.

    These are the versions outside ``kept``, and folders that no document refers to: a trainer that was killed
    or replaced left them. A folder above ``newest`` stays, since it may be being published.
    """
    policies = {policy.id: policy for policy in known}
    deleted, pruned = [], []
    for name, version in folders.items():
        policy = policies.get(version)
        if policy is not None and Path(policy.location).name == name and policy.pruned_at is None:
            if version not in kept and policy.status is not VersionStatus.RESERVED:
                deleted.append(name)
                pruned.append(version)
        elif version <= newest:
            deleted.append(name)
    return deleted, pruned


def delete_folders(root: Path, names: Iterable[str]) -> None:
    """Delete the folders ``names`` of ``root``."""
    for name in names:
        shutil.rmtree(root / name, ignore_errors=True)
