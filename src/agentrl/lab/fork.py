"""Begin a child of a run: its database with what its own indexes need, and the notes in both runs."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pymongo import DESCENDING, UpdateOne

from agentrl.documents.document import plain
from agentrl.documents.run import (
    ADMISSION,
    PARENT,
    EpochOpening,
    Gate,
    PolicyVersion,
    Relative,
    Withdrawn,
    parse_epoch_key,
)
from agentrl.documents.status import StepStatus, TaskStatus, VersionStatus
from agentrl.documents.task import CONVERSATIONS, Begin, record_task, task_key
from agentrl.documents.training import (
    Checkpoint,
    is_checkpoint,
    read_checkpoint,
    read_checkpoints,
    readable_checkpoints,
)
from agentrl.errors import ConfigError, StoreError
from agentrl.lab.transfer import make_run
from agentrl.store.epochs import OF_SOURCES, ease_after_group, unbegun
from agentrl.store.mechanics.connection import (
    EPOCH,
    GATE,
    IMPORTS,
    RETRACTION,
    RUN,
    SETTINGS,
    STEP,
    TASK,
    TOMBSTONE,
    VERSION,
    Connection,
    Json,
    Repository,
    database_call,
    id_prefix,
)
from agentrl.store.mechanics.lease import literal
from agentrl.store.schema import new_schema, prepare
from agentrl.store.settings import Ancestry, Settings, copy_into

_PAGE = 1000
_SPLIT = "train"
_KEPT_SETTINGS = ["tasks", "model", "files", "adapter"]
"""Concerns in which a child is like its parent: its tasks, and what its checkpoint can be loaded into."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """What a new child holds. ``version`` is the number of the policy version that it begins with."""

    version: int
    inherited: int
    """Tasks that the parent has trained, or sampled in vain, up to the step."""
    waiting: int
    """Tasks that the child samples anew."""


class Fork(Repository):
    """Begins children of the connection's run. It needs the rights of an administrator on both runs."""

    @database_call
    async def checkpoint(self, output: Path | None, step: int | None) -> Checkpoint:
        """Return the parent's checkpoint of ``step`` in ``output``; None: in the folders of its trainers.

        Without ``step`` it is that of the newest one.

        Checkpoints with reverted steps do not count. Raises ConfigError, which names the others.
        """
        name = self._connection.database.name
        parent = await self._one(Relative, RUN, {"_id": PARENT})
        if parent is not None and step is not None and step <= parent.step:
            raise ConfigError(
                f"step {step} of run {name!r} is one of its parent's", hint=f"fork {parent.run}"
            )
        settings = Settings(self._connection)
        roots = await settings.checkpoint_folders() if output is None else [output]
        looked = " and ".join(map(str, roots)) or "another run has it"
        if not any([await asyncio.to_thread(root.is_dir) for root in roots]):
            raise ConfigError(
                f"the output folder of run {name!r} is not here: {looked}",
                hint="give --output_dir, or start this command on the trainer's machine, in its folder",
            )
        items = list[Checkpoint]()
        for root in reversed(roots):
            read = read_checkpoints if root == roots[0] else readable_checkpoints
            items += await asyncio.to_thread(read, root)
        found = {item.state.step: item for item in items if await self._is_committed(item)}
        if step is None and found:
            return found[max(found)]
        if step is None or step not in found:
            trainer = (await settings.resolved()).get("train")
            every = None if trainer is None else trainer.values.get("save_steps")
            steps = ", ".join(map(str, sorted(found))) or "none"
            wanted = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            raise ConfigError(
                f"run {name!r} has {wanted} in {looked}; its checkpoints are of the steps: {steps}",
                hint="give one of these as --from_step; a run keeps more of them with a lower --save_steps"
                + (f" (it had {every})" if every else "")
                + " and a higher --save_total_limit",
            )
        return found[step]

    async def _is_committed(self, item: Checkpoint) -> bool:
        query = {"_id": {"$in": list(item.state.train_steps)}, "status": StepStatus.COMMITTED.value}
        committed = await self._collection(STEP).count_documents(query)
        return committed == len(item.state.train_steps) == item.state.step

    @database_call
    async def begin(
        self,
        name: str,
        begun: Relative,
        weights: PolicyVersion,
        *,
        on_documents: Callable[[int], None] = lambda count: None,
    ) -> Begun:
        """Make the database ``name`` of a child; ``begun`` says where it begins.

        ``weights`` are those of ``begun.checkpoint``; their number, step and origin are set here. The child
        gets the parent's tasks. A kill leaves a database that is not a run, and the same call begins anew.
        Raises StoreError if ``name`` is taken, ConfigError if the checkpoint is deleted meanwhile; nothing is
        left then.
        """
        child = self._connection.beside(name)
        steps = _steps_in(begun)
        async with make_run(child) as making:
            try:
                parent = replace(begun, id=PARENT, run=self._connection.database.name)
                await child.collection(RUN).insert_one(parent.to_document())
                await prepare(child.database)
                await Ancestry(self._connection).adopt(name, begun)
                _steps_in(begun)  # from here on the parent keeps it
                await self._copy_run(child, steps)
                version = await self._copy_versions(child, weights, begun.step, steps)
                inherited, tasks = await self._copy_tasks(child, begun.step, steps, on_documents)
                await making.finish(new_schema())
            except Exception:
                if await making.drop():
                    await Ancestry(self._connection).release(name)
                raise
        return Begun(version=version, inherited=inherited, waiting=tasks - inherited)

    async def _copy_run(self, child: Connection, steps: Sequence[str]) -> None:
        """Copy the steps up to the beginning, the imports, and the settings in which both are alike.

        Tasks that were withdrawn from the parent are not loaded into the child either.
        """
        for collection, query, fields in (
            (STEP, {"_id": {"$in": list(steps)}}, {"inherited": True}),
            (IMPORTS, {}, {}),
            (SETTINGS, {"_id": {"$in": _KEPT_SETTINGS}}, {}),
            (TOMBSTONE, {"kind": Withdrawn.TASK.value, "deleted_at": {"$ne": None}}, {}),
            (RETRACTION, {"finished_at": {"$ne": None}, "tasks": {"$gt": 0}}, {}),
        ):  # fmt: skip
            stages: list[Json] = [{"$match": query}, *([{"$set": fields}] if fields else [])]
            await copy_into(child, self._connection, collection, *stages)

    async def _copy_versions(
        self, child: Connection, weights: PolicyVersion, step: int, steps: Sequence[str]
    ) -> int:
        """Copy the versions up to that of ``step``, whose files become the checkpoint's; return its number.

        The folders of the others are the parent's, which may delete them: they count as pruned.
        """
        published = {"status": VersionStatus.PUBLISHED.value, "step": {"$lte": step}}
        newest = await self._one(PolicyVersion, VERSION, published, sort=[("_id", DESCENDING)])
        if newest is None:
            number, digest = 0, None
        elif newest.step == step:
            number, digest = newest.id, newest.digest if weights.encoding == "full" else None
        else:
            number, digest = newest.id + 1, None
        pruned_at = {"$cond": ["$_id", {"$ifNull": ["$pruned_at", "$$NOW"]}, None]}
        earlier = {"$match": {"_id": {"$lt": number}}}
        await copy_into(child, self._connection, VERSION, earlier, {"$set": {"pruned_at": pruned_at}})
        first = replace(weights, id=number, step=step, digest=digest, train_step=steps[-1])
        await child.collection(VERSION).insert_one(first.to_document())
        return number

    async def _copy_tasks(
        self, child: Connection, step: int, steps: Sequence[str], on_documents: Callable[[int], None]
    ) -> tuple[int, int]:
        """Copy the tasks with their epochs; return how many are inherited, and how many there are.

        Those that no step up to ``step`` has used are as new, in the parent's order. Tasks of evaluations
        stay with the parent, and so do unused conversations: nobody would have them again. The child opens
        later epochs of a mixture's sources itself, because pass rates decide what they set aside.
        """
        inherited = await self._used_tasks(step, steps)
        gate = await self._one(Gate, GATE, {"_id": ADMISSION}) or Gate()
        names = [source.name for source in gate.sources]
        last = _last_epochs(inherited, names) if names else {}

        def is_copied(epoch: int, source: str | None) -> bool:
            return source is None or epoch <= last.get(source, 0)

        counted = {
            "$mergeObjects": ["$group", {"counted_at_step": {"$min": ["$group.counted_at_step", step]}}]
        }
        used = {"$mergeObjects": ["$$ROOT", {"inherited": True, "ease": None, "group": counted}]}
        total = 0
        fields = {"_id": 1, "epoch": 1, "source": 1}
        async for every in self._pages(TASK, {"split": _SPLIT}, _PAGE, fields):
            page = [
                task
                for task in every
                if task["_id"] in inherited
                or (task["epoch"] != CONVERSATIONS and is_copied(task["epoch"], task.get("source")))
            ]
            ids = [task["_id"] for task in page if task["_id"] in inherited]
            chosen = {"$cond": [{"$in": ["$_id", literal(ids)]}, used, unbegun("$slots.traj_id")]}
            of_page = {"$match": {"_id": {"$in": [task["_id"] for task in page]}}}
            await copy_into(child, self._connection, TASK, of_page, {"$replaceWith": chosen})
            total += len(page)
            on_documents(len(page))
        for opening in await self._all(EpochOpening, EPOCH, {"_id": id_prefix(f"{_SPLIT}/")}):
            _, epoch, source = parse_epoch_key(opening.id)
            if is_copied(epoch, source):
                free = replace(opening, owner=None, lease_expires_at=None, attempt=0)
                await child.collection(EPOCH).insert_one(free.to_document())
        await self._restore_selection(child, inherited)
        await self._restore_mixture(child, gate, step)
        return len(inherited), total

    async def _used_tasks(self, step: int, steps: Sequence[str]) -> set[str]:
        """Return the Tasks that the steps trained, and those without training data that they counted."""
        used: set[str] = set()
        async for document in self._collection(STEP).find({"_id": {"$in": list(steps)}}, {"data": 1}):
            used |= set(map(record_task, document["data"]))
        in_vain = {
            "status": TaskStatus.COMPLETED.value, "group.counted_at_step": {"$gt": 0, "$lte": step},
            "group.trained": 0,
        }  # fmt: skip
        return used | set(await self._ids(TASK, in_vain))

    async def _restore_selection(self, child: Connection, inherited: Collection[str]) -> None:
        """Let ``--task_selection`` go on: the next number, and the ease of tasks that may be begun again."""
        tasks, last, updates = child.collection(TASK), 0, []
        selected = {"inherited": True, "begun.number": {"$gt": 0}}
        async for task in tasks.find(
            selected, {"split": 1, "epoch": 1, "task_id": 1, "begun": 1, "group": 1}
        ):
            begun = Begin.from_document(task["begun"])
            last = max(last, begun.number)
            if task_key(task["split"], task["epoch"] + 1, task["task_id"]) not in inherited:
                ease = {"$set": {"ease": ease_after_group(begun, task["group"])}}
                updates.append(UpdateOne({"_id": task["_id"]}, ease))
        if updates:
            await tasks.bulk_write(updates)
        await child.collection(GATE).update_one({"_id": ADMISSION}, {"$set": {"begun": last}})

    async def _restore_mixture(self, child: Connection, gate: Gate, step: int) -> None:
        """Let the mixture go on as of ``step``: what was begun, whose turn it is, which gates are open.

        A gate that opened after ``step`` was committed is closed: the child looks at its own pass rates.
        """
        if not gate.sources:
            return
        begun = Counter[str]()
        last = 0
        credits = tuple(source.credit for source in gate.sources)
        selected = {"split": _SPLIT, "inherited": True, "begun.number": {"$gt": 0}, **OF_SOURCES}
        async for task in child.collection(TASK).find(selected, {"source": 1, "begun": 1}):
            begun[task["source"]] += 1
            number = task["begun"]["number"]
            if number > last:
                last, credits = number, tuple(task["begun"].get("credits", credits))
        if not last:
            credits = (0.0,) * len(gate.sources)
        # A source that was added since has no credit yet.
        credits += (0.0,) * (len(gate.sources) - len(credits))
        sources = [
            replace(
                source, begun=begun[source.name], credit=credit,
                opened=source.opened if source.opened and source.opened.after_step < step else None,
            )
            for source, credit in zip(gate.sources, credits, strict=False)
        ]  # fmt: skip
        await child.collection(GATE).update_one({"_id": ADMISSION}, {"$set": {"sources": plain(sources)}})


def _last_epochs(inherited: Collection[str], sources: Collection[str]) -> dict[str, int]:
    """Return the last epoch of each source of which a task is inherited."""
    last: dict[str, int] = {}
    for key in inherited:
        _, epoch, task_id = key.split("/", 2)
        source = task_id.partition("/")[0]
        if source in sources:
            last[source] = max(last.get(source, 0), int(epoch))
    return last


def _steps_in(begun: Relative) -> tuple[str, ...]:
    """Return the steps in the parent's checkpoint. Raises StoreError if it is not there, or not whole."""
    folder = Path(begun.checkpoint)
    state = read_checkpoint(folder).state if is_checkpoint(folder) else None
    if state is not None and state.step == begun.step:
        return state.train_steps
    raise StoreError(
        f"there is no checkpoint of step {begun.step} in {folder}",
        hint="a child begins from its parent's checkpoint: bring the folder back, or share it",
    )
