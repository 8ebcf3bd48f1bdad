"""Invariant 8: a run and its parent name each other, and what the child needs of its parent is kept."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pymongo.errors import OperationFailure

from agentrl.documents.checkpoint import is_checkpoint
from agentrl.documents.family import PARENT, child_key
from agentrl.store.admin.check.reading import Snapshot, Whole
from agentrl.store.admin.check.report import Findings, Invariant
from agentrl.store.ancestry import CHILDREN
from agentrl.store.mechanics.connection import Json
from agentrl.store.names import RUN


class Family(Whole):
    """Checks the documents ``parent`` and ``child/NAME`` against those of the other runs."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        for parent in await moment.find(RUN, {"_id": PARENT}):
            await self._parent(parent, findings)
        for child in await moment.find(RUN, CHILDREN):
            findings.count(Invariant.FAMILY, "children")
            other = await self._of_run(child["run"], PARENT, findings)
            if other is None or other.get("run") != self.connection.database.name:
                findings.note(f"there is no child {child['run']} any more: agentrl db prune forgets it")
            else:
                await self._checkpoint(f"Run {child['_id']}", child, findings)

    async def _parent(self, parent: Json, findings: Findings) -> None:
        findings.count(Invariant.FAMILY, "parents")
        key = child_key(self.connection.database.name)
        note = await self._of_run(parent["run"], key, findings)
        if note is None:
            what = f"the document {key} of run {parent['run']}"
            hint = "its checkpoint is not kept for this run"
            findings.wrong(Invariant.FAMILY, None, f"Run {PARENT}", what, "a note of this child", hint)
        await self._checkpoint(f"Run {PARENT}", parent, findings)

    async def _of_run(self, run: str, key: str, findings: Findings) -> Json | None:
        try:
            return await self.connection.beside(run).collection(RUN).find_one({"_id": key})
        except OperationFailure:
            findings.note(f"this user may not read run {run}: the family is not checked")
            return {"run": self.connection.database.name}

    async def _checkpoint(self, name: str, relative: Json, findings: Findings) -> None:
        if not relative["checkpoint"]:  # the base model
            return
        folder = Path(relative["checkpoint"])
        if await asyncio.to_thread(is_checkpoint, folder):
            return
        if await asyncio.to_thread(folder.parent.is_dir):
            what = f"the checkpoint from which {relative['kind']} begins"
            findings.wrong(Invariant.FAMILY, None, name, what, str(folder), "no checkpoint")
        else:
            findings.note(f"{folder.parent} is not on this machine: the family's checkpoints are not checked")
