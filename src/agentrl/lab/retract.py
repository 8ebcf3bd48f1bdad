"""Withdraw trajectories and tasks from a run, its children and its exports, in order (``agentrl retract``).

After ``--rebuild``, the next trainer goes on from the last clean checkpoint and trains the later steps again,
with the data that are left.
"""

from __future__ import annotations

import asyncio
import glob
import re
import secrets
import shutil
import socket
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.base.atomic_folder import TEMPORARY, delete_folder, remove_leftovers
from agentrl.base.folder_owner import read_owner
from agentrl.base.processes import user_name
from agentrl.base.registry import import_modules
from agentrl.base.user_code import allow
from agentrl.config.load import Configs
from agentrl.config.schema import ClaimConfig, EngineConfig, RunConfig, TaskConfig
from agentrl.data.finalize_group import decide_stored
from agentrl.documents.run import PolicyVersion, Rebuilt, Relative, Retraction, Tombstone, Withdrawn
from agentrl.documents.status import StepStatus, VersionStatus
from agentrl.documents.training import Checkpoint, TrainStep, read_checkpoints
from agentrl.errors import ConfigError, StoreError
from agentrl.lab.deletion import Retractions, RetractSelection, Withdrawing
from agentrl.lab.transfer import (
    COMPRESSED,
    FILE,
    MANIFEST,
    Transfer,
    require_pyarrow,
    verify,
    withdrawn_in,
)
from agentrl.observe.progress import progress
from agentrl.store.client import Store, open_connection, open_existing, open_store
from agentrl.store.mechanics.connection import Connection
from agentrl.store.run_list import Runs
from agentrl.train.folders import RunFolders, place_of, run_folders
from agentrl.train.lease import HeldTrainerLease, hold_lease
from agentrl.weights import storage
from agentrl.weights.storage import is_remote


@dataclass(frozen=True, slots=True, kw_only=True)
class Influence:
    """The weights of a run that contain given steps, and the newest checkpoint without them."""

    first: int | None
    """The first of the steps in the weights; None if all of them are undone."""
    clean: Checkpoint | None
    """None: the base model."""
    checkpoints: Sequence[Path]
    versions: Sequence[PolicyVersion]
    """Those with a folder."""
    children: Sequence[Relative]
    """Runs that began after the first of the steps, or that read its data."""
    pruned: int | None
    """The first step to repeat whose data were pruned; None: all can be repeated."""

    @property
    def step(self) -> int:
        """The step that the run goes back to."""
        return 0 if self.clean is None else self.clean.state.step


async def influence(
    store: Store, steps: Mapping[str, int | None], roots: Sequence[Path], earlier: Sequence[Path] = ()
) -> Influence:
    """Return where ``steps``, {TrainStep: its number if it is in the weights}, have influence.

    ``roots`` are the run's folders of checkpoints, ``earlier`` those of its former trainers, from which no
    trainer resumes.
    """
    every = await store.steps.find(status=None)
    committed = [step for step in every if step.status is StepStatus.COMMITTED]
    applied = {step.id for step in committed}
    found = [item for root in roots for item in read_checkpoints(root, undone=True)]
    usable = [item for item in found if applied.issuperset(item.state.train_steps)]
    clean = [item for item in usable if steps.keys().isdisjoint(item.state.train_steps)]
    found += [item for root in earlier for item in read_checkpoints(root, undone=True)]
    tainted = [item.folder for item in found if not steps.keys().isdisjoint(item.state.train_steps)]
    by_id = {step.id: step for step in every}
    versions = [
        version
        for version in await store.policy_versions.all()
        if version.is_stored
        and version.pruned_at is None
        and version.status is not VersionStatus.RESERVED
        and version.train_step in by_id
        and not steps.keys().isdisjoint(contained_steps(by_id[version.train_step], every))
    ]
    first = min((number for number in steps.values() if number is not None), default=None)
    family = await store.ancestry.living_children()
    newest = max(clean, key=lambda item: item.state.step, default=None)
    repeated = [step for step in committed if step.step > (0 if newest is None else newest.state.step)]
    gone = (step.step for step in repeated if first is not None and step.pruned_at is not None)
    return Influence(
        first=first,
        pruned=next(gone, None),
        children=[
            child for child in family if first is not None and max(child.step, *child.steps, 0) >= first
        ],
        clean=newest,
        checkpoints=tainted,
        versions=versions,
    )


def contained_steps(step: TrainStep, every: Sequence[TrainStep]) -> set[str]:
    """Return the ``_id`` of each step that weights made by ``step`` contain, its own included.

    Of each lower number that is the one of the last attempt up to its own: a later attempt that went back
    would have repeated the number. Attempts count without a clock, unlike ``planned_at``. The steps that a
    child copied from its parent have attempts of the parent, and nothing else has their numbers.
    """
    own = step.attempt
    before: dict[int, TrainStep] = {}
    for item in sorted(every, key=lambda item: (item.attempt <= own, item.attempt)):
        if item.step < step.step and item.committed_at is not None:
            before[item.step] = item
    return {step.id, *(item.id for item in before.values())}


def require_possible(found: Influence) -> None:
    """Raise StoreError if data of the steps to repeat were pruned, or if a child of the run reads them."""
    if found.pruned is not None:
        raise StoreError(
            f"the run cannot go back to step {found.step}: data of step {found.pruned} were pruned",
            hint="leave --rebuild out: what is withdrawn is deleted, and the weights keep its influence",
        )
    if found.children:
        names = " ".join(child.run for child in found.children)
        raise StoreError(
            f"the run cannot go back to step {found.step}: its children read what came later: {names}",
            hint=f"delete them first (agentrl runs rm {names}), or leave --rebuild out",
        )


async def go_back(store: Store, lease: HeldTrainerLease, found: Influence, roots: Sequence[Path]) -> Rebuilt:
    """Undo the steps after the clean checkpoint, then delete checkpoints and versions. Idempotent.

    ``roots`` are the run's folders of checkpoints. Call ``require_possible`` before. Raises StoreError for
    what cannot be deleted.
    """
    if found.first is not None:
        await lease.go_back(found.step)
    deleted = await lease.discard([folder.name for folder in found.checkpoints])
    checkpoints = [folder for folder in found.checkpoints if folder.name in deleted]
    for folder in checkpoints:
        try:
            await asyncio.to_thread(delete_folder, folder)
        except OSError as error:
            raise _not_deleted(folder) from error
    ids = sorted(version.id for version in found.versions)
    for version in found.versions:  # they are withdrawn: nobody loads one while it is deleted
        if not await storage.delete(version.location, version.files):
            raise _not_deleted(version.location)
    local = {Path(version.location).parent for version in found.versions if not is_remote(version.location)}
    await asyncio.to_thread(_delete_leftovers, {*roots, *local})
    await store.policy_versions.mark_pruned(ids, attempt=lease.attempt)
    last = await store.steps.last()
    return Rebuilt(
        step=0 if last is None else last.step,
        checkpoints=tuple(folder.name for folder in checkpoints),
        versions=(ids[0], ids[-1]) if ids else (),
    )


def _delete_leftovers(roots: Collection[Path]) -> None:
    """Delete what is left of folders whose deletion, or writing, was killed. Raises StoreError."""
    for root in sorted(roots):
        remove_leftovers(root)
        for left in root.glob(f"{TEMPORARY}*"):
            raise _not_deleted(left)


def _not_deleted(place: object) -> StoreError:
    return StoreError(
        f"{place} has weights with the influence of what is withdrawn, and cannot be deleted",
        hint="see the log for the reason; call agentrl retract again when it is gone",
    )


_NAME_ENDS = r"(?![A-Za-z0-9_.-])"
_RECORD = re.compile(r"^.*\n?(?:    .*\n?)*", re.MULTILINE)
"""A line and the indented lines behind it."""
_FILES = re.compile(r"\.(log|out)\b")
"""Logs of processes, rotated ones too, and what processes of ``agentrl launch`` printed."""
_WRITER = re.compile(r"^(?:\d{4}-\d\d-\d\d )?\d\d:\d\d:\d\d [A-Z]+ +([A-Za-z0-9_-]+)/\S+  ", re.MULTILINE)
"""A line of ``observe.logging``, with its run: files of run ``math_2`` lie beside those of ``math``."""


def remove_lines(folder: Path, run_name: str, names: Collection[str]) -> int:
    """Remove the log records in ``folder`` of a run that contain one of ``names``; return how many.

    Files are changed in place: a process that appends to one goes on.
    """
    if not names or not folder.is_dir():
        return 0
    named = re.compile("|".join(re.escape(name) + _NAME_ENDS for name in sorted(names)))
    removed = 0
    for path in sorted(folder.glob(f"{re.sub(r'[^A-Za-z0-9_.-]+', '-', run_name)}_*")):
        if _FILES.search(path.name) is None:
            continue
        text = path.read_text(encoding="utf-8", errors="replace")
        writer = _WRITER.search(text)
        if writer is not None and writer[1] != run_name:
            continue
        records = _RECORD.findall(text)
        kept = [record for record in records if named.search(record) is None]
        if len(kept) < len(records):
            removed += len(records) - len(kept)
            with path.open("r+", encoding="utf-8") as stream:
                stream.write("".join(kept))
                stream.truncate()
    return removed


_ROWS = re.compile(r"^[\d,]+(?= scored trajectories)", re.MULTILINE)
_NEW, _OLD = ".retracted-", ".original-"


async def delete_withdrawn(
    connection: Connection,
    *,
    attempt: int | None = None,
    on_group: Callable[[int], None] = lambda count: None,
) -> None:
    """Delete everything that tombstones list except images; call ``finish_withdrawn`` afterwards.

    A call that is killed is finished by the next. ``attempt`` is that of the trainer's lease, which the
    caller holds; ``on_group`` is called with 1 after each group. Raises ConfigError or GroupError, with what
    went before done, if a group's rules name code of the user that this process may not import.
    """
    withdrawing = Withdrawing(connection)
    await withdrawing.list_late_copies()
    while pending := await withdrawing.pending():
        for task in pending:
            await withdrawing.withdraw(task, decide_stored, attempt)
            on_group(1)
        await withdrawing.list_late_copies()
    for task in await withdrawing.kept_as_trained():
        await withdrawing.decide_again(task, decide_stored, attempt)
    await withdrawing.rewrite_steps(attempt)
    await withdrawing.sweep()
    await Retractions(connection).set_deleted()


async def finish_withdrawn(connection: Connection, *, is_sampled: bool) -> int:
    """Delete images that are left, and finish retractions with nothing more to do; return how many wait."""
    retractions, withdrawing = Retractions(connection), Withdrawing(connection)
    waiting = 0
    for retraction in await retractions.unfinished():
        left = await withdrawing.delete_images(retraction, is_sampled=is_sampled)
        waiting += left
        is_rebuilt = retraction.rebuilt is not None or not retraction.rebuilds
        if not left and is_rebuilt and not retraction.family and not retraction.archives:
            await retractions.finish(retraction)
    return waiting


def find_exports(path: str) -> list[Path]:
    """Return ``path`` if it is an export, else the exports below it. Raises StoreError if there are none.

    An export whose replacement was interrupted is named as if it were whole; nothing is changed.
    """
    folder = Path(path).resolve()
    beside = folder.parent.glob(f"{_NEW}{glob.escape(folder.name)}")
    names = {_final(found) for found in (*beside, *folder.rglob(f"{_NEW}*")) if _is_export(found)}
    archives = {found.parent for found in folder.rglob(MANIFEST)}
    tables = {found.parent.parent for found in folder.rglob(FILE)}
    names |= {_final(found) for found in archives | tables if _is_export(found)}
    if not names:
        raise StoreError(f"{folder} holds no export", hint=f"an export has {MANIFEST} or {FILE}")
    return sorted(names)


def _is_export(folder: Path) -> bool:
    is_archive = (folder / MANIFEST).is_file() and any(folder.glob("*.jsonl*"))
    return is_archive or (folder / FILE).is_file()


def _final(folder: Path) -> Path:
    """Return the place of an export that is being replaced: of its new folder, and of its old one."""
    return folder.with_name(folder.name.removeprefix(_NEW).removeprefix(_OLD))


def finish_replacement(folder: Path) -> None:
    """Finish the replacement of the export ``folder`` that was interrupted, if it was. Raises StoreError.

    Only folders that are exports are moved or deleted: others may have such a name too.
    """
    new, old = (folder.with_name(f"{prefix}{folder.name}") for prefix in (_NEW, _OLD))
    if _is_export(new):
        _replace(new, folder)
    elif _is_export(old) and _is_export(folder):
        shutil.rmtree(old)


async def withdraw_from(
    run: RunConfig, folder: Path, stones: Mapping[str, Tombstone], *, because: str, by: str
) -> int:
    """Write an export anew without what ``stones`` stand for; return how many Records and Tasks it held.

    An archive is imported into a database of its own, withdrawn from there as from the run, and exported
    again: its groups are decided again, and it holds the tombstones. Raises StoreError for a folder that is
    damaged or cannot be written.
    """
    if (folder / FILE).is_file():
        return _filter_dataset(folder, stones)
    created = {key: stone.created_at for key, stone in stones.items()}
    manifest = verify(folder)
    held = withdrawn_in(folder, manifest, created)
    if not held:
        return 0
    scratch = replace(run, run_name=f"retract_{secrets.token_hex(6)}")
    connection = await open_connection(scratch)
    new = folder.with_name(f"{_NEW}{folder.name}")
    try:
        await Transfer(connection).load(folder, allow_modules=True, withdrawn=True)
        again = [replace(stones[key], deleted_at=None) for key in sorted(held)]
        chosen = RetractSelection(tombstones=again, first_step=None, versions=())
        await Retractions(connection).begin(chosen, because, by, rebuilds=False)
        await delete_withdrawn(connection)
        await finish_withdrawn(connection, is_sampled=False)
        compress = any(item.file.endswith(COMPRESSED) for item in manifest.collections)
        await Transfer(connection).export(new, compress=compress)
    finally:
        await connection.client.drop_database(scratch.run_name)
        await connection.close()
    _replace(new, folder)
    return len(held)


def _replace(new: Path, folder: Path) -> None:
    """Put ``new`` in the place of ``folder``; ``finish_replacement`` goes on after an interruption."""
    old = folder.with_name(f"{_OLD}{folder.name}")
    try:
        if folder.exists() and not old.exists():
            folder.rename(old)
        new.rename(folder)
        shutil.rmtree(old)
    except OSError as error:
        raise StoreError(
            f"{folder} cannot be replaced: {error}", hint="call agentrl retract again"
        ) from error


def _filter_dataset(folder: Path, stones: Mapping[str, Tombstone]) -> int:
    require_pyarrow()
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(folder / FILE)
    ids, created = (table.column(name).to_pylist() for name in ("id", "created_at"))
    kept = [
        key not in stones or stones[key].created_at != at for key, at in zip(ids, created, strict=True)
    ]  # fmt: skip
    if all(kept):
        return 0
    partial = (folder / FILE).with_suffix(".partial")
    pyarrow.parquet.write_table(table.filter(kept), partial, compression="zstd")
    partial.replace(folder / FILE)
    readme = folder / "README.md"
    text = readme.read_text(encoding="utf-8")
    readme.write_text(_ROWS.sub(f"{sum(kept):,}", text), encoding="utf-8")
    return kept.count(False)


_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class RetractFlags:
    """What is withdrawn, from where and why: flags of ``agentrl retract``."""

    scorer: Sequence[str] = ()
    task: Sequence[str] = ()
    record: Sequence[str] = ()
    because: str = ""
    rebuild: bool = False
    archive: Sequence[str] = ()
    family: bool = False
    dry_run: bool = False
    yes: bool = False


async def retract(configs: Configs, confirm: Callable[[str], bool]) -> int:
    """Show what would go, ask by ``confirm``, delete it, and say what to do next; return the exit code."""
    run, flags = configs[RunConfig], configs[RetractFlags]
    exports = [folder for given in flags.archive for folder in find_exports(given)]
    import_modules(configs[TaskConfig].imported_modules)
    async with await open_existing(run):
        pass  # a misspelled run is not made
    async with await open_store(run) as store:
        allow([*configs[TaskConfig].allowed_names, *await store.imports.paths()])
        call = await _Call.of(store, configs)
        for line in call.preview():
            print(line)
        if call.rebuilds:
            call.require_rebuild()
        if flags.dry_run:
            return 0
        if not flags.yes and not await asyncio.to_thread(confirm, f"this from run {run.run_name}"):
            print(f"{run.run_name} is unchanged")
            return 0
        await call.withdraw(exports)
        gone = await call.retractions.withdrawn()
        if call.family:
            await call.withdraw_from_children(run, store, list(gone.values()))
            await call.retractions.plan_family(family=False)
        await _remove_log_lines(store, run, gone)
        for folder in exports:
            await asyncio.to_thread(finish_replacement, folder)
            held = await withdraw_from(run, folder, gone, because=flags.because, by=call.by)
            await call.retractions.end_archive(place_of(folder))
            print(f"{folder}: {held:,} withdrawn documents are taken out")
        archives = await call.left_archives()
        waiting = await finish_withdrawn(store.connection, is_sampled=call.is_sampled)
    for line in call.report(waiting, archives):
        print(line)
    return 1 if waiting or archives else 0


@dataclass(kw_only=True)
class _Call:
    """One call: what it withdraws, what earlier calls have left to do, and where that had influence."""

    store: Store
    configs: Configs
    retractions: Retractions
    selection: RetractSelection
    unfinished: Sequence[Retraction]
    rebuilt: list[Retraction]
    """Those for which the run goes back to an earlier checkpoint."""
    folders: RunFolders
    influence: Influence
    family: bool
    """Whether it is withdrawn from the run's children too."""
    because: str
    by: str
    is_sampled: bool = False
    """Whether samplers of the run live."""
    back_at: int | None = None
    """The step that the run went back to."""

    @classmethod
    async def of(cls, store: Store, configs: Configs) -> _Call:
        """Read what the flags select, and what earlier calls have left to do."""
        retractions, flags = Retractions(store.connection), configs[RetractFlags]
        if not [*flags.scorer, *flags.task, *flags.record, *await retractions.withdrawn()]:
            raise ConfigError(
                f"nothing is selected, and nothing was withdrawn from run {store.run_name} before",
                hint="give --record ID, --task ID or --scorer NAME, and --dry_run to see what would go",
            )
        selection = await _select(retractions, flags)
        unfinished, unrebuilt = await retractions.unfinished(), await retractions.unrebuilt()
        rebuilt = [item for item in unrebuilt if flags.rebuild or item.rebuilds]
        folders = await _folders(store, configs[RunConfig])
        # What was withdrawn before is in the weights still, also if this call selects nothing.
        steps = await retractions.tainted(rebuilt or unrebuilt, selection.steps)
        of_family = [item.because for item in unfinished if item.family]
        return cls(
            store=store,
            configs=configs,
            retractions=retractions,
            selection=selection,
            unfinished=unfinished,
            rebuilt=rebuilt,
            folders=folders,
            influence=await influence(store, steps, folders.roots, await _earlier(store, folders)),
            family=flags.family or bool(of_family),
            because=flags.because or "".join(of_family[-1:]),
            by=f"{user_name()}@{socket.gethostname()}",
        )

    @property
    def rebuilds(self) -> bool:
        return self.configs[RetractFlags].rebuild or bool(self.rebuilt)

    def preview(self) -> Iterator[str]:
        """Yield what would go, and where it went."""
        for item in self.unfinished:
            when = f"{item.at:%Y-%m-%d %H:%M} UTC"
            yield f"unfinished: the retraction of {when} by {item.by}; it is finished first"
        records, tasks = self.selection.of(Withdrawn.RECORD), self.selection.of(Withdrawn.TASK)
        if not records and not tasks and not self.unfinished:
            yield "nothing is selected that was not withdrawn before"
        for what, ids in (
            ("Records", [stone.id for stone in records]),
            ("Tasks", [stone.id for stone in tasks]),
            ("steps", self.selection.steps),
        ):
            if ids:
                more = ", …" if len(ids) > _SHOWN else ""
                yield f"{what:<12} {len(ids):,}: {', '.join(ids[:_SHOWN])}{more}"
        found = self.influence
        for child in found.children:
            yield f"child        {child.run}, a {child.kind} of step {child.step}, has it in its weights"
        if found.first is None:
            yield "weights      no step in the weights trained any of it"
            return
        numbers = [version.id for version in found.versions]
        versions = f", versions {min(numbers)} to {max(numbers)}" if numbers else ""
        back = f"--rebuild deletes them and goes back to step {found.step}"
        if self.rebuilds:
            back = f"they are deleted, and the run goes back to step {found.step}"
        yield (
            f"weights      from step {found.first} on: {len(found.checkpoints)} checkpoints{versions}; {back}"
        )

    def require_rebuild(self) -> None:
        """Raise StoreError or ConfigError if the run cannot go back to a checkpoint from here."""
        require_possible(self.influence)
        if self.influence.first is not None and not self.folders.output.is_dir():
            raise ConfigError(
                f"the output folder of run {self.store.run_name} is not here: {self.folders.output}",
                hint="--rebuild goes back to a checkpoint: give --output_dir, or call it on the trainer's"
                " machine, in its folder",
            )
        self.folders.require_own(self.influence.versions)

    async def withdraw(self, exports: Sequence[Path]) -> None:
        """Delete it from the run, and go back if that is asked for; ``exports`` are to follow."""
        store, retractions, flags = self.store, self.retractions, self.configs[RetractFlags]
        async with self._lease(store) as lease:
            if self.rebuilds:
                lease.ended = None
            last = await store.steps.last()  # a trainer that was killed may have left a plan
            await store.steps.revert_after(0 if last is None else last.step, attempt=lease.attempt)
            self.selection = await _select(retractions, flags)  # a trainer may have stepped since the preview
            if self.selection.tombstones:
                begun = await retractions.begin(
                    self.selection, self.because, self.by, rebuilds=flags.rebuild, family=self.family,
                    archives=[place_of(folder) for folder in exports],
                )  # fmt: skip
                self.rebuilt += [begun] if begun.rebuilds else []
            if self.family:
                await retractions.plan_family(family=True)
            if self.rebuilt:
                await self._go_back(lease)
            run_name = self.configs[RunConfig].run_name
            holders = await Runs(store.connection).holders(run_name, EngineConfig().alive_seconds)
            self.is_sampled = any(holder.startswith("sampler ") for holder in holders)
            with progress(f"withdrawing from run {run_name}, groups") as work:
                await delete_withdrawn(store.connection, attempt=lease.attempt, on_group=work.advance)

    async def left_archives(self) -> list[str]:
        """Return the exports that killed calls named and this one did not; forget deleted ones."""
        named = {place for item in await self.retractions.unfinished() for place in item.archives}
        for place in sorted(named):
            host, _, path = place.partition(":")
            if host == socket.gethostname() and not await asyncio.to_thread(Path(path).exists):
                await self.retractions.end_archive(place)
                named.discard(place)
        return sorted(named)

    async def _go_back(self, lease: HeldTrainerLease) -> None:
        await self.retractions.plan_rebuild(self.rebuilt)
        steps = await self.retractions.tainted(self.rebuilt)
        earlier = await _earlier(self.store, self.folders)
        found = await influence(self.store, steps, self.folders.roots, earlier)
        self.folders.require_own(found.versions)
        gone_back = await go_back(self.store, lease, found, [*self.folders.roots, *earlier])
        await self.retractions.set_rebuilt(self.rebuilt, gone_back)
        numbers = [int(key.split("/")[1]) for key in steps]
        if gone_back.step < min(numbers, default=0):  # else other steps have replaced them since
            self.back_at = gone_back.step

    async def withdraw_from_children(self, run: RunConfig, store: Store, stones: Sequence[Tombstone]) -> None:
        """Withdraw what ``stones`` stand for from the children of the run, and from theirs."""
        for child in await store.ancestry.living_children():
            named = replace(run, run_name=child.run)
            async with await open_store(named) as other:
                async with self._lease(other) as lease:
                    retractions = Retractions(other.connection)
                    selection = await retractions.select_of_parent(stones, reads=child.kind == "whatif")
                    if selection.tombstones:
                        await retractions.begin(selection, self.because, self.by)
                    await delete_withdrawn(other.connection, attempt=lease.attempt)
                await finish_withdrawn(other.connection, is_sampled=False)
                count = len(selection.tombstones)
                print(f"{child.run}, a {child.kind} of {store.run_name}: {count:,} withdrawn")
                await _remove_log_lines(other, named, [stone.id for stone in stones])
                await self.withdraw_from_children(named, other, stones)

    @asynccontextmanager
    async def _lease(self, store: Store) -> AsyncIterator[HeldTrainerLease]:
        """Hold the lease of a run's trainer, and leave how its last trainer ended as it is stored."""
        ended = (await store.trainer_lease.read()).ended
        async with hold_lease(store, self.configs[ClaimConfig].lease_seconds) as lease:
            lease.ended = ended
            yield lease

    def report(self, waiting: int, archives: Sequence[str]) -> Iterator[str]:
        """Yield what was done and what to do next; ``waiting`` images and ``archives`` are left to clean."""
        run = self.configs[RunConfig]
        yield (
            f"{run.run_name}: withdrawn; only tombstones are left: agentrl db check --run_name {run.run_name}"
        )
        if waiting:
            yield (
                f"{waiting} images were used within the last hour and stay until then: samplers of the run"
                f" live; finish it later: agentrl retract {run.run_name}"
            )
        for place in archives:
            yield f"{place} still holds it: give it by --archive, or delete it and call this again"
        earlier = [item.rebuilt.step for item in self.unfinished if item.rebuilt]
        back_at = self.back_at if self.rebuilt else next(reversed(earlier), None)
        if back_at is not None:
            yield (
                f"the run is back at step {back_at}: start its trainer again, with the same command; it"
                " repeats the later steps without what is withdrawn"
            )
        elif held := [step for step in (self.influence.first, self.selection.first_step) if step is not None]:
            yield (
                f"the weights from step {min(held)} on were trained with it:"
                f" agentrl retract {run.run_name} --rebuild trains them without"
            )


async def _remove_log_lines(store: Store, run: RunConfig, names: Collection[str]) -> None:
    """Remove the log records that name something withdrawn, where processes of the run wrote them."""
    stored = [each.values.get("log_dir") for each in await store.settings.flags()]
    for folder in sorted({run.log_dir, *(str(each) for each in stored if each)}):
        if lines := await asyncio.to_thread(remove_lines, Path(folder), run.run_name, names):
            print(f"{folder}: {lines:,} log records of {run.run_name} that named it are removed")


async def _select(retractions: Retractions, flags: RetractFlags) -> RetractSelection:
    return await retractions.select(scorers=flags.scorer, tasks=flags.task, records=flags.record)


async def _earlier(store: Store, folders: RunFolders) -> list[Path]:
    """Return the run's own folders of checkpoints that its newest trainer does not have."""
    known = {root.resolve() for root in folders.roots}
    found = [root for root in await store.settings.checkpoint_folders() if root.resolve() not in known]
    owners = {root: read_owner(root) for root in found}
    return [root for root, owner in owners.items() if owner is not None and owner.id == folders.owner.id]


async def _folders(store: Store, run: RunConfig) -> RunFolders:
    """Return the folders of the run's trainer; ConfigError if one is another run's."""
    trainer = (await store.settings.resolved()).get("train")
    stored: Mapping[str, Any] = {} if trainer is None else trainer.values
    own = replace(run, output_dir=run.output_dir or stored.get("output_dir"))
    fallback, publish_to = stored.get("fallback_output_dir"), stored.get("publish_to")
    return await run_folders(store, own, fallback, publish_to, makes=False)
