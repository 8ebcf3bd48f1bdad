"""The folders of a run's trainer: whose they are, and whether they hold what the run has committed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.base.folder_owner import (
    OWNER_FILE,
    Owner,
    claim,
    confirm,
    foreign,
    read_owner,
    require_not_foreign,
)
from agentrl.config.schema import RunConfig
from agentrl.documents.run import PolicyVersion, TrainerLease
from agentrl.documents.status import StepStatus
from agentrl.documents.training import Checkpoint, TrainStep, is_checkpoint, readable_checkpoints
from agentrl.errors import ConfigError, PublishError, quoted
from agentrl.weights import storage
from agentrl.weights.publish import version_folders

if TYPE_CHECKING:
    from agentrl.store.client import Store


@dataclass(frozen=True, kw_only=True)
class RunFolders:
    """Where one run keeps checkpoints and versions. It writes and deletes there alone."""

    owner: Owner
    output: Path
    versions: str
    """Location of the versions: a folder's absolute path, or a URL."""
    fallback: Path | None = None
    """Folder for checkpoints that cannot be written to ``output``."""

    @property
    def roots(self) -> list[Path]:
        """The folders of checkpoints."""
        return [self.output] if self.fallback is None else [self.output, self.fallback]

    @property
    def _local(self) -> Iterator[tuple[Path, str]]:
        """Yield each folder on a disk, and the flag that gives another."""
        yield self.output, "--output_dir"
        if self.fallback is not None:
            yield self.fallback, "--fallback_output_dir"
        if not storage.is_remote(self.versions):
            inside = Path(self.versions).parent == self.output.resolve()
            yield Path(self.versions), "--output_dir" if inside else "--publish_to"

    async def require_not_foreign(self, store: Store) -> None:
        """Raise ConfigError if one is another run's: by its owner file, or else by what it holds.

        A folder without an owner file may be a run's of before there were owner files.
        """
        claimed = await asyncio.to_thread(
            lambda: {folder: require_not_foreign(folder, self.owner, flag) for folder, flag in self._local}
        )
        if storage.is_remote(self.versions):
            await self._remote_owner()
        for root in self.roots:
            others = [] if claimed[root] else await asyncio.to_thread(readable_checkpoints, root)
            names = {item.state.run_name for item in others} - {self.owner.run}
            if names:
                raise ConfigError(
                    f"{root} holds checkpoints of run {min(names)!r}, and this is run {self.owner.run!r}",
                    hint="give another --output_dir",
                )
        if storage.is_remote(self.versions) or claimed[Path(self.versions)] or await self._is_known(store):
            return
        if found := version_folders(await storage.folder_names(self.versions)):
            raise ConfigError(
                f"{self.versions} holds published versions, such as {min(found)}, that are not of run"
                f" {self.owner.run!r}",
                hint="give another --output_dir, or delete them",
            )

    async def _is_known(self, store: Store) -> bool:
        """Return whether the folders hold a checkpoint of the run, or a version that it has published."""
        # Make a list: any() takes no asynchronous generator.
        if any([await asyncio.to_thread(readable_checkpoints, root) for root in self.roots]):
            return True
        places = [Path(item.location) for item in await store.policy_versions.all() if item.is_stored]
        return any(place.parent == Path(self.versions) and place.is_dir() for place in places)

    async def require_committed(
        self, store: Store, lease: TrainerLease, found: Checkpoint | None, steps: Sequence[TrainStep]
    ) -> None:
        """Raise ConfigError if resuming from ``found`` would lose steps that the run has saved elsewhere.

        Steps after the last checkpoint are re-opened: a trainer may be killed before it saves. That they were
        never saved is known only in the run's own folder; a new, a mistyped or an unmounted one is as empty.
        """
        step = 0 if found is None else found.state.step
        undone = {item.id for item in steps if item.status is StepStatus.COMMITTED and item.step > step}
        if not undone:
            return
        saved = lease.saved if lease.saved is not None and lease.saved.step in undone else None
        claimed = await asyncio.to_thread(require_not_foreign, self.output, self.owner, "--output_dir")
        is_older = lease.output is None  # the run was last trained before there were owner files
        if saved is None and (claimed or (is_older and await self._is_known(store))):
            return
        here = "no checkpoint" if found is None else f"no newer one than {found.folder}"
        looked = " and ".join(place_of(root) for root in self.roots)
        kept = f"its folder is {lease.output or 'another one'}"
        if saved is not None:
            kept = f"their last checkpoint is {saved.place}"
        back = "none" if found is None else quoted(found.folder)
        raise ConfigError(
            f"run {self.owner.run!r} has committed {len(undone)} steps that are not here: {kept}, and"
            f" {looked} has {here}",
            hint="give the run's --output_dir, in the folder where it was started and with its disk mounted;"
            f" or undo these steps and withdraw their versions: --resume_from_checkpoint {back}",
        )

    def require_own(self, versions: Iterable[PolicyVersion]) -> None:
        """Raise ConfigError unless the folders of all ``versions`` are the run's, before they are deleted.

        The database names a folder, and may have been imported: its folders are the run's that it comes from.
        """
        for version in versions:
            root = version.location.rpartition("/")[0]
            if root != self.versions and (storage.is_remote(root) or read_owner(Path(root)) != self.owner):
                raise ConfigError(
                    f"version {version.id} is in {version.location}, and {root} is not known to be run"
                    f" {self.owner.run!r}'s",
                    hint="give the --output_dir of its trainer; an imported run has another run's weights",
                )

    async def claim(self) -> None:
        """Make all of them the run's.

        Raises ConfigError if another run was first, or if one is read-only or lies in what a trainer deletes.
        """
        for folder, flag in self._local:
            await asyncio.to_thread(_require_lasting, folder, flag)
            try:
                await asyncio.to_thread(claim, folder, self.owner, flag)
            except OSError as error:
                raise ConfigError(
                    f"{folder} cannot be written: {error.strerror or error}",
                    hint=f"give a folder that this user can write: {flag}",
                ) from error
        if storage.is_remote(self.versions) and await self._remote_owner() is None:
            await storage.write(f"{self.versions}/{OWNER_FILE}", self.owner.to_json())
            await self._remote_owner()  # no storage of fsspec creates atomically: the last writer wins

    async def _remote_owner(self) -> Owner | None:
        """Return who owns the versions' URL. Raises ConfigError if another run does, and PublishError."""
        place = f"{self.versions}/{OWNER_FILE}"
        try:
            found = Owner.from_json(await storage.read(place), place)
        except PublishError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                return None
            raise
        if found != self.owner:
            raise foreign(self.versions, found, self.owner, "--publish_to")
        return found

    def confirm_versions(self) -> Path:
        """Return where a version is written before it is renamed or uploaded. Raises as ``confirm``."""
        is_url = storage.is_remote(self.versions)
        confirm(self.output if is_url else Path(self.versions), self.owner)
        return self.output / "weights" if is_url else Path(self.versions)


async def run_folders(
    store: Store, run: RunConfig, fallback: str | None, publish_to: str | None, *, makes: bool = True
) -> RunFolders:
    """Return the folders of a run with these flags; ``makes`` as for ``Settings.owner``.

    Raises ConfigError if one is another run's, or if --publish_to cannot be used.
    """
    owner = await store.settings.owner(makes=makes)
    output, *others = run.checkpoint_roots(fallback)
    folders = RunFolders(
        owner=owner,
        output=output,
        versions=_versions_root(run, publish_to),
        fallback=next(iter(others), None),
    )
    await folders.require_not_foreign(store)
    return folders


def _require_lasting(folder: Path, flag: str) -> None:
    """Raise ConfigError if ``folder`` lies in a checkpoint or a version of a run: its trainer prunes them."""
    for place in folder.resolve().parents:
        is_pruned = is_checkpoint(place) or version_folders([place.name])
        if is_pruned and (owner := read_owner(place.parent)) is not None:
            raise ConfigError(
                f"{folder} lies in {place}, which {owner} deletes when newer ones replace it",
                hint=f"give another {flag}",
            )


def _versions_root(run: RunConfig, publish_to: str | None) -> str:
    if publish_to is None:
        return str((Path(run.output) / "weights").resolve())
    storage.require_storage(publish_to)
    is_url = storage.is_remote(publish_to)
    root = publish_to.rstrip("/") if is_url else str(Path(publish_to).resolve())
    return f"{root}/{run.run_name}"


def place_of(folder: Path) -> str:
    """Return host and absolute path of a folder, for people."""
    return f"{socket.gethostname()}:{folder.resolve()}"
