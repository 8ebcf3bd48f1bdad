"""Invariants 7, 8 and 9: what is kept is as it was written, a family agrees, what was withdrawn is gone."""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

from pymongo.errors import OperationFailure

from agentrl.documents.checkpoint import is_checkpoint
from agentrl.documents.family import PARENT, child_key
from agentrl.documents.status import APPLIED_STEPS, DataStatus, RecordStatus
from agentrl.store.admin.check.reading import CheckOptions, Findings, Invariant, Section, Snapshot, Whole
from agentrl.store.ancestry import CHILDREN
from agentrl.store.mechanics.blobs import CHECKSUMS, MARK, PACKED, changed_parts, digest, moved_fields
from agentrl.store.mechanics.connection import Connection, Json
from agentrl.store.names import DATA, IMAGE, RECORD, RETRACTION, RUN, STEP, TOMBSTONE
from agentrl.store.schema import VALIDATORS

_SAMPLED = frozenset(
    {RecordStatus.COMPLETED, RecordStatus.SCORING, RecordStatus.SCORED, RecordStatus.READY,
     RecordStatus.ABANDONED}
)  # fmt: skip


class Contents(Section):
    """Checks the documents of one collection against the checksums that were written with them."""

    fields: ClassVar = {}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for document in page:
            key, name = document["_id"], f"{self.collection} {document['_id']}"
            findings.count(Invariant.CONTENTS, "checksums", len(document.get(CHECKSUMS, {})))
            for part, stored, now in changed_parts(self.collection, document):
                what, expected = f"{part} as it was written", f"sha256 {stored}"
                findings.wrong(Invariant.CONTENTS, key, name, what, expected, f"sha256 {now}")
            if self._is_due(document) and not document.get(CHECKSUMS):
                findings.wrong(Invariant.CONTENTS, key, name, CHECKSUMS, "one or more", "none")

    def _is_due(self, document: Json) -> bool:
        """Return whether a checksum is written before a document is as this one is."""
        if self.collection == RECORD:
            return document["status"] in _SAMPLED
        return self.collection != STEP or document["status"] in APPLIED_STEPS


class Images(Section):
    """Checks every image against its ``_id``, the hash of its bytes."""

    collection = IMAGE
    fields: ClassVar = {"data": 1, MARK: 1}
    page_size = 32

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for image in (image for image in page if not image.get(MARK)):
            findings.count(Invariant.CONTENTS, "images")
            actual = hashlib.sha256(image["data"]).hexdigest()
            if actual != image["_id"]:
                key, expected = image["_id"], f"sha256 {image['_id']}"
                findings.wrong(Invariant.CONTENTS, key, f"Image {key}", "its bytes", expected, actual)


class Files(Section):
    """Checks the GridFS files of one collection's documents, which are named by their digests."""

    fields: ClassVar = {"length": 1}
    page_size = 16

    def __init__(self, connection: Connection, options: CheckOptions, owner: str) -> None:
        super().__init__(connection, options, f"{owner}.packed.files")
        self.owner = owner

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        for file in page:
            findings.count(Invariant.CONTENTS, "files")
            expected = digest(file["_id"])
            chunks = moment.each(
                f"{self.owner}.packed.chunks", {"files_id": file["_id"]}, {"data": 1}, by="n"
            )
            actual = hashlib.sha256()
            async for chunk in chunks:
                actual.update(chunk["data"])
            is_changed = actual.hexdigest()[: len(expected)] != expected
            if is_changed and not await _is_quarantined(moment, self.owner, file["_id"]):
                findings.wrong(
                    Invariant.CONTENTS, file["_id"], f"{self.collection} {file['_id']}",
                    "its bytes as they were written", f"sha256 {expected}…", f"sha256 {actual.hexdigest()}",
                )  # fmt: skip


class StrayFiles(Whole):
    """Names the GridFS files that no document names, and the documents whose files are gone."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        for owner in PACKED:
            files = {file["_id"] for file in await moment.find(f"{owner}.packed.files", {}, {"_id": 1})}
            named: dict[str, str] = {}
            async for moved in moment.each(owner, {MARK: {"$exists": True}}, {MARK: 1}):
                named |= dict.fromkeys(moved_fields(moved), f"{owner} {moved['_id']}")
            for file, document in named.items():
                if file not in files and not await _is_quarantined(moment, owner, file):
                    findings.wrong(Invariant.CONTENTS, None, document, "its file in GridFS", file, "none")
            chunks = await moment.aggregate(f"{owner}.packed.chunks", [{"$group": {"_id": "$files_id"}}])
            stray = sorted(map(str, {*files, *(chunk["_id"] for chunk in chunks)} - named.keys()))
            if stray:
                findings.note(
                    f"{owner}: {len(stray)} files in GridFS belong to no document: {stray[0]}"
                    f"{', …' if stray[1:] else ''}: a writer ended before its document, or somebody deleted"
                    " it"
                )


async def _is_quarantined(moment: Snapshot, owner: str, file_id: str) -> bool:
    """Return whether a file's datum is quarantined, which names what is wrong with it."""
    datum = {"_id": file_id.rsplit("/", 2)[0], "status": DataStatus.QUARANTINED.value}
    return owner == DATA and bool(await moment.find(DATA, datum, {"_id": 1}))


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


SEARCHED: Final = (
    *(name for name in VALIDATORS if name != TOMBSTONE),
    *(f"{name}.packed.{part}" for name in PACKED for part in ("files", "chunks")),
)
"""The collections that may not name what is withdrawn."""
_CUTS = re.compile(r"[/@:\s,;\"']|$")


class Retractions(Whole):
    """Names the retractions that a call began and did not finish."""

    async def inspect(self, moment: Snapshot, findings: Findings) -> None:
        for retraction in await moment.find(RETRACTION, {}, {"finished_at": 1}):
            findings.count(Invariant.RETRACTED, "retractions")
            if retraction.get("finished_at") is None:
                what, expected = "finished", "a call of agentrl retract that ends"
                name = f"Retraction {retraction['_id']}"
                findings.wrong(Invariant.RETRACTED, None, name, what, expected, "an unfinished one")


class Withdrawn(Section):
    """Searches one collection for the ids in tombstones, in every text of every document."""

    fields: ClassVar = {}
    page_size = 100
    _ids: frozenset[str] = frozenset()

    async def scan(self, findings: Findings) -> None:
        await self._load()
        if self._ids:
            await super().scan(findings)

    async def look_again(self, keys: Collection[Any], findings: Findings) -> None:
        await self._load()
        await super().look_again(keys, findings)

    async def _load(self) -> None:
        deleted = self.connection.collection(TOMBSTONE).find({"deleted_at": {"$ne": None}}, {"_id": 1})
        self._ids = frozenset([stone["_id"] async for stone in deleted])

    async def inspect(self, moment: Snapshot, page: list[Json], findings: Findings) -> None:
        epochs = {"/".join(key.split("/")[:2]) for key in self._ids}
        begin = re.compile("|".join(re.escape(f"{epoch}/") for epoch in sorted(epochs)))
        findings.count(Invariant.RETRACTED, "documents searched", len(page))
        for document in page:
            for text in _texts(document):
                for found in begin.finditer(text):
                    cuts = (text[found.start() : cut.start()] for cut in _CUTS.finditer(text, found.end()))
                    for name in self._ids.intersection(cuts):
                        what = "no name of what is withdrawn"
                        findings.wrong(
                            Invariant.RETRACTED, document["_id"], f"{self.collection} {document['_id']}",
                            what, "only its Tombstone", name,
                        )  # fmt: skip


def _texts(value: Any) -> Iterator[str]:
    """Yield every text in a document, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)
